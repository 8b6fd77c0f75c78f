"""Upload of an exported policy to the hub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from planish.base.errors import ConfigError, StoreUnavailable
from planish.base.telemetry import first_line
from planish.store.hub import HUB_TIMEOUT_SECONDS

_OWN = {".gitattributes"}
"""Files that the hub puts into a new repository."""


def upload_model(
    repository: str, files: Mapping[str, Path | bytes], *, marker: str, is_public: bool
) -> bool:
    """Make a missing repository, commit all files at once, and return True if any file was new.

    It updates a repository that has the file `marker` with the same bytes. It raises ConfigError
    for any other that is not empty, and for a missing or refused token; StoreUnavailable if the
    hub is not reached or fails.
    """
    import huggingface_hub
    from huggingface_hub.errors import RepositoryNotFoundError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    if not huggingface_hub.get_token():
        raise ConfigError(
            f"an upload to hf://{repository} needs a token, got none; set HF_TOKEN to one that may "
            "write, or log in with `hf auth login`"
        )
    hub = huggingface_hub.HfApi()
    try:
        try:
            info = hub.model_info(repository, timeout=HUB_TIMEOUT_SECONDS)
        except RepositoryNotFoundError as error:
            # The hub also answers this way to an unknown token.
            if error.response.status_code != 404:
                raise
            hub.create_repo(repository, private=not is_public)
            info = hub.model_info(repository, timeout=HUB_TIMEOUT_SECONDS)
        present = {file.rfilename for file in info.siblings or ()} - _OWN
        if marker in present:
            found = hub.hf_hub_download(repository, marker, revision=info.sha)
            if Path(found).read_bytes() != files[marker]:
                present.add("another model")
            else:
                present.clear()
        if present:
            raise ConfigError(
                f"the target must be a new or empty repository or hold this very model, got "
                f"{sorted(present)[:8]} in hf://{repository}; choose another name, or delete it"
            )
        commit = hub.create_commit(
            repository,
            [
                huggingface_hub.CommitOperationAdd(name, content)
                for name, content in sorted(files.items())
            ],
            commit_message="Export of planish",
            parent_commit=info.sha,
        )
    except ConfigError:
        raise
    except Exception as error:
        raise _upload_fault(error, repository) from None
    return commit.oid != info.sha


def _upload_fault(error: Exception, repository: str) -> ConfigError | StoreUnavailable:
    from huggingface_hub import errors

    what = f"hf://{repository} must take the upload"
    if isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):
        # The client wraps the error of a single file.
        error = error.__cause__
    if isinstance(error, errors.OfflineModeIsEnabled):
        return ConfigError(f"{what}, but HF_HUB_OFFLINE is set; unset it, or export to a folder")
    if isinstance(error, errors.HFValidationError):
        return ConfigError(f"{what}, got a name that the hub does not allow: {error}")
    if not isinstance(error, errors.HfHubHTTPError):
        return StoreUnavailable(
            f"{what}, but the hub can not be reached or failed ({type(error).__name__}: "
            f"{first_line(error)}); try again where there is a network, or export to a folder"
        )
    status = error.response.status_code
    if status in (401, 403):
        return ConfigError(
            f"{what}, but the hub refused the token with HTTP status {status}; give one in "
            "HF_TOKEN that may write there"
        )
    if status < 500 and status not in (408, 409, 412, 429):
        return ConfigError(f"{what}, but the hub refused it with HTTP status {status}")
    return StoreUnavailable(f"{what}, but the hub answered with HTTP status {status}; try again")
