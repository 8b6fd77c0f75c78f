"""From a train state to a Hugging Face folder, tensor by tensor, by plain bytes.

Imports neither torch nor transformers, so that the stage that calls it starts at once. In memory
are at most the largest tensor and a few buffers of 16 MiB; files are written on local disk first.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from planish.base.errors import LayoutMismatch
from planish.checkpoint.convert.hf_files import Form, plan_files, write_weights
from planish.checkpoint.convert.hf_names import Sources, plain_sources
from planish.checkpoint.convert.hf_source import POLICY_SCHEMA, PolicySource
from planish.checkpoint.load.fill import Array
from planish.checkpoint.load.reader import Opened, open_state
from planish.checkpoint.load.slices import SliceReader
from planish.records.files import write_files
from planish.records.refs import Ref
from planish.store import Store, uri_of

GROUP_BYTES = 64 << 20
"""Small tensors are read together, up to this size."""
MAX_FILE_BYTES = 5 << 30
_DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}

Names = Callable[[Opened, str], Sources]
"""What each weight of the target is made of, from a checkpoint and a role."""
Progress = Callable[[int, int], None]
"""Called with the bytes of weights done and in all."""


def unheard(done: int, total: int) -> None:
    """Tell nobody."""


def export(
    pin: str,
    uri: str,
    *,
    source: str,
    parents: Mapping[str, str],
    attributes: Mapping[str, Any],
    max_file_bytes: int = MAX_FILE_BYTES,
    role: str = "main",
    names: Names = plain_sources,
    storage: Store | None = None,
    progress: Progress = unheard,
) -> Ref:
    """Write the model of a checkpoint as a policy that engines load.

    Configuration, tokenizer and types are those of `source`; the files come first, the manifest
    last.

    Args:
        pin: URI or pin of the checkpoint.
        uri: folder of the new policy.
        source: pinned URI of an earlier policy of the same model.
        parents: name of each input to the sha256 of its manifest.
        attributes: of the manifest: policy_version, iteration, config_sha256 ...
        max_file_bytes: weights beyond this go to further files.
        role: whose model.
        names: which tensors of the checkpoint make up each weight.
        storage: of the checkpoint, in place of the one that `pin` names.
        progress: called after each weight; the last call comes before the files are stored.

    Returns:
        Ref of schema `policy/1`.

    Raises:
        LayoutMismatch: the checkpoint's weights are not those of the source.
        CheckpointError: the checkpoint or the source is damaged.
    """
    opened = open_state(pin, storage)
    policy = PolicySource.open(source)
    files: dict[str, Path | bytes] = {**policy.small_files()}
    forms = policy.forms()
    sources = names(opened, role)
    _check_forms(sources, forms, uri=opened.uri)
    dtypes = {form.dtype for form in forms.values()}
    facts = {
        **attributes,
        "dtype": _DTYPE_NAMES.get(dtypes.pop(), "mixed") if len(dtypes) == 1 else "mixed",
        "layout": "hf",
    }
    with tempfile.TemporaryDirectory(prefix="planish-export-") as scratch:
        files |= _write(opened, sources, forms, Path(scratch), max_file_bytes, progress)
        return write_files(uri, POLICY_SCHEMA, files, parents=parents, attributes=facts)


def export_folder(
    place: str,
    out: str,
    *,
    config_dir: Path | None = None,
    max_shard_bytes: int = MAX_FILE_BYTES,
    dtype: str | None = None,
    role: str = "main",
    names: Names = plain_sources,
    storage: Store | None = None,
    progress: Progress = unheard,
) -> Ref:
    """Write the model of a checkpoint as a Hugging Face folder, without an earlier policy.

    Args:
        place: URI or pin of the checkpoint.
        out: folder, of any store, or an absolute path; finished once its manifest is there.
        config_dir: local folder whose files (configuration, tokenizer) go beside the weights.
        max_shard_bytes: weights beyond this go to further files.
        dtype: float type of all float weights (`BF16`, ...); None keeps each tensor's own.
        role: whose model.
        names: which tensors of the checkpoint make up each weight.
        storage: of the checkpoint, in place of the one that `place` names.
        progress: called after each weight; the last call comes before the files are stored.

    Raises:
        LayoutMismatch: the checkpoint has no weights, or they cannot be converted.
        CheckpointError: the checkpoint is damaged.
    """
    opened = open_state(place, storage)
    sources = names(opened, role)
    if not sources:
        raise LayoutMismatch(
            f"`{opened.uri}` must hold model tensors of role `{role}`, got none; see `info`"
        )
    forms = {name: _form(part.form, dtype) for name, part in sources.items()}
    files: dict[str, Path | bytes] = {}
    if config_dir is not None:
        kept = (p for p in sorted(config_dir.rglob("*")) if p.is_file())
        files |= {str(p.relative_to(config_dir)): p for p in kept if _is_small(p)}
    types = {form.dtype for form in forms.values()}
    facts = {
        "dtype": _DTYPE_NAMES.get(types.pop(), "mixed") if len(types) == 1 else "mixed",
        "layout": "hf",
        "step": opened.commit.step,
    }
    with tempfile.TemporaryDirectory(prefix="planish-export-") as scratch:
        files |= _write(opened, sources, forms, Path(scratch), max_shard_bytes, progress)
        parents = {"state": opened.commit.meta_sha256}
        uri = uri_of(out).rstrip("/")
        return write_files(uri, POLICY_SCHEMA, files, parents=parents, attributes=facts)


def _form(stored: Form, dtype: str | None) -> Form:
    is_float = stored.dtype in _DTYPE_NAMES
    return Form(dtype, stored.shape) if dtype is not None and is_float else stored


def _is_small(path: Path) -> bool:
    return not path.name.endswith((".safetensors", ".safetensors.index.json", ".bin", ".pt"))


def _check_forms(sources: Sources, forms: Mapping[str, Form], *, uri: str) -> None:
    faults = [f"`{name}` is missing" for name in sorted(forms.keys() - sources.keys())]
    faults += [
        f"`{name}` is not in the source policy" for name in sorted(sources.keys() - forms.keys())
    ]
    faults += [
        f"`{name}` must have the shape {list(forms[name].shape)}, got {list(part.form.shape)}"
        for name, part in sources.items()
        if name in forms and forms[name].shape != part.form.shape
    ]
    if faults:
        raise LayoutMismatch(
            f"`{uri}` must hold the weights of its source policy: {'; '.join(faults)}; "
            "export with the policy that training began with"
        )


def _write(
    opened: Opened,
    sources: Sources,
    forms: Mapping[str, Form],
    folder: Path,
    max_file_bytes: int,
    progress: Progress,
) -> dict[str, Path | bytes]:
    reader = SliceReader(opened)
    done, total = 0, sum(form.nbytes for form in forms.values())
    progress(done, total)

    def arrays(names: Sequence[str]) -> Iterator[tuple[str, str, Array]]:
        nonlocal done
        for group in _groups(names, sources):
            found = reader.read_many([sources[name].slice for name in group])
            # Handed out one by one, so that a written tensor is not kept.
            for name in group:
                yield name, sources[name].form.dtype, found.pop(0)
                done += forms[name].nbytes
                progress(done, total)

    return write_weights(folder, forms, plan_files(forms, max_file_bytes), arrays)


def _groups(names: Sequence[str], sources: Sources) -> Iterator[list[str]]:
    group: list[str] = []
    filled = 0
    for name in names:
        size = sources[name].form.nbytes
        if group and filled + size > GROUP_BYTES:
            yield group
            group, filled = [], 0
        group.append(name)
        filled += size
    if group:
        yield group
