"""`run.json`: resolved configuration, identity and start of a run.

`initial` pins the policy and the train state from which the first iteration of the present run
starts: empty for the supervised start, else those of another root or of the run before.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

import planish
from planish import store
from planish.base.config import config_sha256, unplaced
from planish.base.errors import ConfigError, ObjectMissing, RecordError
from planish.records import layout
from planish.records.io import policy_versions, read_manifest
from planish.records.refs import parse_pin
from planish.run.stage import read_run
from planish.stages.prepare.settings import differences
from planish.store.documents import write_json

logger = logging.getLogger(__name__)

Config = Mapping[str, Mapping[str, Any]]

_PINNED = re.compile(r".+#sha256=[0-9a-f]{64}")
Pin = Annotated[str, Field(pattern=r"^(.+#sha256=[0-9a-f]{64})?$")]
_FOLDERS = ("policies", "states")


@dataclass(frozen=True)
class StartPins:
    """Pins of the policy and the train state from which a run starts."""

    policy: Pin = ""
    """Pin of the policy; empty if the run makes its own."""
    state: Pin = ""
    """Pin of the train state; empty before the first update."""


@dataclass(frozen=True)
class RunFile:
    """Content of `run.json`."""

    config: Config
    code_version: str
    resumed_from: str
    """Root of another run, or pin in it, from which this root started; empty for none."""
    origin: StartPins
    initial: StartPins
    """Start of the present run of the chain."""
    preset: str = ""
    """Preset below all other settings; empty for none."""
    offset: int = 0
    """Number of iterations of the chain before the present run."""
    num_shards: int = 0
    """Rollout shards of an iteration of the present run."""

    @property
    def sha256(self) -> str:
        """Digest of the configuration."""
        return config_sha256(self.config)

    def document(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {**asdict(self), "config_sha256": self.sha256}


def read_run_file(root: str) -> RunFile | None:
    """Return `run.json` of a root; None if the root is new."""
    try:
        raw = read_run(root)
    except ObjectMissing:
        return None
    try:
        return TypeAdapter(RunFile).validate_python(raw)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(
            f"`{layout.run_file(root)}` must hold config, code_version, resumed_from, origin and "
            f"initial, got {'.'.join(map(str, first['loc']))}: {first['msg']}; choose a new root"
        ) from None


def check_same_config(
    before: RunFile, config: Config, *, root: str, allow_config_change: bool
) -> list[str]:
    """Return the settings that differ from those of an earlier run.

    Raises:
        ConfigError: some of them change more than the place of computation, without permission.
    """
    changed = differences(unplaced(before.config), unplaced(config))
    if changed and not allow_config_change:
        raise ConfigError(
            f"the configuration must equal that of `{layout.run_file(root)}`, but differs in "
            f"{'; '.join(changed)}; undo the change, choose a new root, or set "
            "`chain.allow_config_change=true`"
        )
    return differences(before.config, config)


def open_run_file(
    root: str, config: Config, *, resume_from: str, allow_config_change: bool
) -> tuple[RunFile, list[str], bool]:
    """Return the content that `run.json` must have; write nothing.

    `resume_from` is the root of another run from which to start, or the pin of one of its policies
    or train states; it is empty, or this root, for none.

    Returns:
        The file (whose `initial` is still the start of the root), the changed settings, and whether
        the root is new.

    Raises:
        ConfigError: another configuration, another origin, or no run at `resume_from`.
    """
    resume_from = resume_from.rstrip("/")
    resume_from = "" if resume_from == root else resume_from
    before = read_run_file(root)
    if before is None:
        origin, changed = (
            _start_of_other(resume_from, config, allow_config_change)
            if resume_from
            else (StartPins(), [])
        )
        return RunFile(config, planish.__version__, resume_from, origin, origin), changed, True
    if resume_from and resume_from != before.resumed_from:
        raise ConfigError(
            f"`resume_from` must stay {before.resumed_from!r} on a root that has begun, got "
            f"{resume_from!r}; choose a new root"
        )
    changed = check_same_config(before, config, root=root, allow_config_change=allow_config_change)
    code_version = planish.__version__ if changed else before.code_version
    run = replace(before, config=config, code_version=code_version, initial=before.origin)
    return run, changed, False


def _start_of_other(
    place: str, config: Config, allow_config_change: bool
) -> tuple[StartPins, list[str]]:
    other = resumed_root(place)
    theirs = read_run_file(other)
    if theirs is None:
        raise ConfigError(
            f"`resume_from` must be the root of a run, but `{layout.run_file(other)}` does not "
            "exist; correct the URI"
        )
    changed = check_same_config(theirs, config, root=other, allow_config_change=allow_config_change)
    if place != other:
        return _start_at(other, place), changed
    newest = newest_version(other)
    if newest is not None:
        return start_after(other, newest), changed
    if theirs.initial.policy:
        return theirs.initial, changed
    raise ConfigError(
        f"`resume_from` must be a run with a finished policy, but `{other}` has none; run it "
        "until its supervised start is done, or start without it"
    )


def resumed_root(place: str) -> str:
    """Return the root of the run that `resume_from` names.

    Example:
        >>> resumed_root(f"s3://runs/a/policies/00003#sha256={'0' * 64}")
        's3://runs/a'

    Raises:
        ConfigError: neither a root nor the pin of a policy or a train state.
    """
    if "#" not in place:
        return place.rstrip("/")
    root, folder, name = [*place.rpartition("#")[0].rsplit("/", 2), "", ""][:3]
    if not _PINNED.match(place) or folder not in _FOLDERS or not name:
        raise ConfigError(
            "`resume_from` must be the root of a run, or the pin of one of its policies or train "
            f"states (`<root>/policies/00003#sha256=<digest>`), got {place!r:.300}; the report of "
            "that run lists them"
        )
    return root


def _start_at(root: str, pin: str) -> StartPins:
    """Return the pins of a policy and of its train state; `pin` is one of the two."""
    uri, digest = parse_pin(pin)
    try:
        pinned = read_manifest(uri, sha256=digest)
        if f"{root}/policies/" in uri:
            return start_after(root, int(uri.rpartition("/")[2]))
        for version in reversed(policy_versions(root)):
            policy = layout.policy(root, version)
            manifest = read_manifest(policy)
            if pinned.sha256 in manifest.parents.values():
                return StartPins(f"{policy}#sha256={manifest.sha256}", pin)
    except (ObjectMissing, RecordError, ValueError) as error:
        raise ConfigError(f"`resume_from` must name what is there, got {error}") from None
    raise ConfigError(
        f"`resume_from` must be a train state that a policy was exported from, got {pin!r}; pin "
        f"a policy of `{root}` instead"
    )


def newest_version(root: str) -> int | None:
    """Return the newest finished policy version of a root; None if there is none."""
    return max(policy_versions(root), default=None)


def start_after(root: str, version: int) -> StartPins:
    """Return the pins of a policy version and of the train state that it was exported from.

    Raises:
        RecordError: the train state does not exist any more.
    """
    uri = layout.policy(root, version)
    policy = read_manifest(uri)
    pin = f"{uri}#sha256={policy.sha256}"
    uris = store.list_uris(layout.state(root, 0).rpartition("/")[0])
    states = {uri.rpartition("/")[0] for uri in uris if uri.endswith("/manifest.json")}
    # The newest state is the likeliest match.
    for state in sorted(states, reverse=True):
        digest = read_manifest(state).sha256
        if digest in policy.parents.values():
            return StartPins(pin, f"{state}#sha256={digest}")
    if version == 0:
        return StartPins(pin, "")
    raise RecordError(
        f"the train state that `{uri}` was exported from must be under `{root}/states`, but is "
        "not; restore it, or start a new root from the policy alone (`model=<policy folder>`)"
    )


def write_run_file(root: str, run: RunFile) -> None:
    """Write `run.json` unless it exists with the same content."""
    if read_run_file(root) == run:
        return
    write_json(layout.run_file(root), run.document())
    logger.info("run file written root=%s config=%s", root, run.sha256[:12])
