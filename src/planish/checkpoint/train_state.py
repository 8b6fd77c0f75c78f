"""Train states: checkpoints that are records of a run, with a manifest like every other record.

The manifest beside a checkpoint is written after its COMMIT. It names the digest of the metadata,
so a pin of the manifest pins every byte. Policy and critic are two roles of one checkpoint.
Functions that need no tensors import no torch.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from planish import store
from planish.base.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointExists,
    ObjectChanged,
    ObjectExists,
    ObjectMissing,
    SaveFailed,
    StoreError,
    UnexpectedKeys,
)
from planish.base.parallel import SINGLE, Ranks
from planish.checkpoint.format.strict_json import Fields, Values
from planish.checkpoint.pinned import read_pinned
from planish.checkpoint.ranks.control import Control as Control
from planish.checkpoint.ranks.control import control_of
from planish.records import layout
from planish.records.manifest import MANIFEST, Manifest, manifest_uri, read_manifest, seal
from planish.records.refs import Ref

if TYPE_CHECKING:
    from planish.checkpoint.adapters.placement import Placed
    from planish.checkpoint.loading.reader import Opened

logger = logging.getLogger(__name__)

STATE_SCHEMA = "train-state/2"
POLICY, CRITIC = "policy", "critic"

PARTS: dict[str, tuple[str, str]] = {
    "model": (POLICY, "model"),
    "optimizer": (POLICY, "optimizer"),
    "random": (POLICY, "random"),
    "critic": (CRITIC, "model"),
    "critic_optimizer": (CRITIC, "optimizer"),
}
"""Part of a train state -> (role, part of the role)."""

KINDS: dict[str, str] = {"model": "model", "optimizer": "optim", "random": "extra"}
"""Part of a role -> kind of its tensors in a checkpoint."""

State = Values
"""Part, of `PARTS` -> name -> this rank's tensor, in any form of the framework (`api.save`); and
`extra` as JSON. Every framework uses the names of transformers, so that a trainer loads the states
of any other."""


class HeldState(NamedTuple):
    """Train state in the memory of a trainer."""

    parts: dict[str, Values]
    framework: str
    """Framework of the tensors, as for `api.save`: how they are spread over ranks."""


GARBAGE_SECONDS = 3600.0
"""Seconds for which objects of an uncommitted or replaced attempt are kept."""

MOST_PACE_SECONDS = 600.0
"""Most seconds over which an upload is spread, below the time limit of a save."""

_DIGEST = "checkpoint_sha256"
_STEP = re.compile(r"/step-\d{8}/")


def save(
    uri: str,
    state: State,
    *,
    parents: Mapping[str, str],
    attributes: Values,
    framework: str = "plain",
    ranks: Ranks = SINGLE,
) -> Ref:
    """Write a train state; it becomes visible as a whole or not at all.

    Every rank calls it with its own shards; one copy of replicated tensors is written. The new
    state replaces an older one at the same place when it is complete; a failed save keeps the old.

    Args:
        state: `{"model": {name: tensor}, "optimizer": {...}, "random": {...}, "extra": {...}}`.
        parents: name of each input to the sha256 of its manifest.
        attributes: attributes of the manifest: step, policy_version, config_sha256 ...
        framework: as `HeldState.framework`.

    Raises:
        TypeError: a value is neither a tensor nor a small value of JSON.
        SaveFailed: a rank failed; nothing is visible.
    """
    commit = begin_save(
        uri, state, parents=parents, attributes=attributes, framework=framework, ranks=ranks
    )
    ref = commit()
    ranks.barrier()
    return ref


def begin_save(
    uri: str,
    state: State,
    *,
    parents: Mapping[str, str],
    attributes: Values,
    framework: str,
    ranks: Ranks,
    pace_seconds: float | None = None,
) -> Callable[[], Ref]:
    """Begin to write a train state; for other arguments and errors see `save`.

    Args:
        pace_seconds: seconds over which the upload is spread, after `begin_save` has returned with
            the state staged; None: return once the state is committed.

    Returns:
        A function that waits until the state is committed, and returns its Ref. Every rank calls it
        once, from any thread; the state is a record once the call on the first rank has returned.
    """
    from planish.checkpoint import api

    uri = uri.rstrip("/")
    roles = by_role(state)
    roles.setdefault(POLICY, {})["extra"] = dict(state.get("extra", {}))
    step = int(attributes.get("step", 0))
    pace = min(pace_seconds or 0.0, MOST_PACE_SECONDS)
    handle = api.save(
        uri, roles, framework, pace_seconds is not None, step=step, overwrite=True, pace_s=pace
    )

    def commit() -> Ref:
        digest = handle.result().sha256
        manifest, data = seal(STATE_SCHEMA, 0, (), parents, {**attributes, _DIGEST: digest})
        if ranks.is_first:
            # A kill before this line leaves the older manifest, which names the replaced state.
            _write_record(uri, data, digest)
            try:
                # Killed saves of other steps may have left files beside it.
                api.gc(uri.rpartition("/")[0], grace_s=GARBAGE_SECONDS)
            except (StoreError, CheckpointError) as error:
                # The state is saved; a later save clears the leftovers.
                logger.warning("leftovers of saves stay uri=%s error=%s", uri, error)
        return manifest.ref(uri)

    return commit


def _write_record(uri: str, manifest: bytes, digest: str) -> None:
    """Write the manifest of a state that is committed, unless another save has replaced it.

    It reads the manifest's tag, then COMMIT, then replaces only the manifest of that tag. This
    order prevents a write over the manifest of a newer save.

    Raises:
        CheckpointExists: another save has been committed there since.
    """
    from planish.checkpoint.commit.commit import read_commit

    storage, path = store.open_store(uri)
    key = manifest_uri(path)
    while True:
        seen = store.tag(storage, key)
        commit = read_commit(storage, path)
        if commit is None or commit.meta_sha256 != digest:
            raise CheckpointExists(
                f"`{uri}` must hold the state that was just committed there, but another save or "
                "removal has replaced it; run one training at a time on a root"
            )
        with contextlib.suppress(ObjectExists, ObjectChanged, ObjectMissing):
            storage.put(key, manifest, if_none_match=not seen, if_match=seen)
            return


def load(
    pin: str,
    state: State,
    *,
    framework: str = "plain",
    ranks: Ranks = SINGLE,
    strict: bool = True,
) -> Fields:
    """Fill the tensors of `state` in place from a state that any number of ranks saved.

    Args:
        pin: `<uri>#sha256=<digest>`.
        framework: framework of the tensors of `state`; another one may have saved them.
        strict: also refuse saved parts that `state` lacks, except `random`.

    Returns:
        The JSON part of the saved state, as `read_state_info`.

    Raises:
        LayoutMismatch: names, shapes or types differ; every offender is named and no tensor has
            been touched.
        CheckpointIncomplete: the save never finished.
        CheckpointError: the state is damaged.
    """
    from planish.checkpoint import api

    place = checkpoint_pin(pin)
    roles = by_role(state)
    if strict:
        held = parts(pin) - {"random"}
        left = sorted(p for p in held if PARTS[p][1] not in roles.get(PARTS[p][0], {}))
        if left:
            raise UnexpectedKeys(
                f"`{pin}` must fit the model that loads it: `{'`, `'.join(left)}` have no place to "
                "go; resume with the model and optimizer that saved it"
            )
    if not roles:
        return read_state_info(pin)
    wanted = {part for role in roles.values() for part in role}
    chosen = (*(kind for part, kind in KINDS.items() if part in wanted), "extra")
    api.load(place, roles, framework, parts=tuple(dict.fromkeys(chosen)))
    ranks.barrier()
    # A load of the policy also fills `extra`; a load of the critic alone does not.
    extra: Fields | None = roles.get(POLICY, {}).get("extra")
    return read_state_info(pin) if extra is None else extra


def by_role(state: State) -> dict[str, Fields]:
    """Return the parts of a state by role, as `api.save` takes them."""
    roles: dict[str, Fields] = {}
    for part, (role, name) in PARTS.items():
        if part in state:
            roles.setdefault(role, {})[name] = state[part]
    return roles


def read_record(pin: str) -> tuple[str, Manifest]:
    """Return the folder and the manifest of a train state; raises what `read_pinned` raises."""
    uri, manifest = read_pinned(
        pin, STATE_SCHEMA, remedy="resume from an earlier state, or save it again"
    )
    if not isinstance(manifest.attributes.get(_DIGEST), str):
        raise CheckpointCorrupt(f"the manifest of `{uri}` must name `{_DIGEST}`; save it again")
    return uri, manifest


def checkpoint_pin(pin: str) -> str:
    """Return the checkpoint's pin for a train state's pin; errors as `read_record`."""
    uri, manifest = read_record(pin)
    return f"{uri}#sha256={manifest.attributes[_DIGEST]}"


def checkpoint_place(place: str) -> str:
    """Return a place for `reader.open_state`: of a train state's pin, the checkpoint's pin."""
    uri, mark, digest = place.partition("#sha256=")
    if not mark:
        return place
    try:
        manifest = read_manifest(uri)
    except ObjectMissing:
        return place
    is_state = manifest.schema == STATE_SCHEMA and manifest.sha256 == digest
    return checkpoint_pin(place) if is_state else place


def open_checkpoint(pin: str) -> Opened:
    """Open the checkpoint of a train state by the state's pin, for reading by one process."""
    from planish.checkpoint.loading.reader import open_state

    return open_state(checkpoint_pin(pin))


def latest(root: str) -> Ref | None:
    """Return the finished state with the highest step below a run's root; None without one."""
    from planish.checkpoint.commit.commit import read_commit

    prefix = layout.state(root.rstrip("/"), 0).rpartition("/")[0]
    uris = [uri for uri in store.list_uris(prefix) if _STEP.search(uri)]
    ends = f"/{MANIFEST}"
    for found in sorted((uri[: -len(ends)] for uri in uris if uri.endswith(ends)), reverse=True):
        manifest = read_manifest(found)
        if manifest.schema != STATE_SCHEMA:
            return manifest.ref(found)
        # Another save may have replaced the checkpoint that the manifest names.
        commit = read_commit(*store.open_store(found))
        if commit is not None and commit.meta_sha256 == manifest.attributes.get(_DIGEST):
            return manifest.ref(found)
    return None


def read_state_info(pin: str) -> Fields:
    """Return the JSON part of a state without touching its tensors, and without torch.

    It has `step`, `policy_version`, `data` (prompt cursor) and the trainer's counters. Errors as
    `read_record`.
    """
    from planish.checkpoint.loading.extras import read_shared
    from planish.checkpoint.loading.reader import BlockReader

    value = read_shared(BlockReader(open_checkpoint(pin)), POLICY).get("extra")
    if not isinstance(value, dict):
        raise CheckpointCorrupt(
            f"the extra part of `{pin}` must be a JSON object, got {type(value).__name__}"
        )
    return value


def parts(pin: str) -> set[str]:
    """Return the parts, of `PARTS`, that a state has, without reading a tensor."""
    held = {key[:2] for key in open_checkpoint(pin).metadata.tensor_ids}
    return {part for part, (role, name) in PARTS.items() if (role, KINDS[name]) in held}


def export_policy(
    state_pin: str,
    uri: str,
    *,
    policy_pin: str,
    parents: Mapping[str, str],
    attributes: Values,
    call: Control | None = None,
) -> Ref:
    """Write the policy of a train state as a folder that engines load; see `export_hf.export`.

    Configuration and tokenizer come from the policy `policy_pin`. `call` comes from `shared_call`
    if several ranks share the export.
    """
    from planish.checkpoint.convert.export_hf import export

    return export(
        checkpoint_pin(state_pin),
        uri,
        policy=policy_pin,
        role=POLICY,
        parents=parents,
        attributes=attributes,
        call=call,
    )


def shared_call(subject: str, timeout_seconds: float) -> Control:
    """Return an operation that all ranks take part in; if a rank is missing, it is SaveFailed."""
    return control_of().call(subject, timeout_seconds).twin(missing=SaveFailed)


def placed(name: str, tensor: Any) -> Placed:
    """Return the place of a rank's part in the whole tensor; see `placement.place`."""
    from planish.checkpoint.adapters.placement import place

    return place(name, tensor)
