"""A checkpoint in memory: what adapters collect, copied box by box to what they collect elsewhere.

Stands in for the store, the planner's files and the network, so that the layouts of adapters can be
compared bit by bit and fast. The real planner checks that the boxes of all ranks tile every tensor.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist

from planish.base.errors import DtypeMismatch, MissingKeys, ShapeMismatch, UnexpectedKeys
from planish.checkpoint.adapters.base import apply, collect
from planish.checkpoint.adapters.loader_state import LoaderState
from planish.checkpoint.adapters.placement import NAMES
from planish.checkpoint.format.geometry import intersect, shift
from planish.checkpoint.format.items import Columns, TensorSpec
from planish.checkpoint.format.metafile import Metadata
from planish.checkpoint.format.small_objects import decode_extra, encode_extra
from planish.checkpoint.plan.save import plan_save


@dataclasses.dataclass
class Memory:
    """What all ranks saved."""

    metadata: Metadata
    tensors: dict[tuple[str, str, str], TensorSpec]
    pieces: dict[tuple[str, str, str], list]
    """[(box, raw bytes)]"""
    shared: dict
    own: list
    loader: LoaderState | None


def raw(tensor):
    """Return the elements of a tensor in row-major order as bytes."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).clone()


def pieces_of(item):
    """Yield (box, data in the box's shape) of an item."""
    if len(item.boxes) == 1:
        yield item.boxes[0], item.data.reshape(item.boxes[0].lengths)
        return
    start = 0
    for box in item.boxes:
        yield box, item.data[start : start + box.volume].view(box.lengths)
        start += box.volume


def packed(collected):
    """Return what one rank saves, as it would travel."""
    for item in collected.items:
        if item.boxes:
            assert item.data is not None, item.tensor.fqn
            assert NAMES[item.data.dtype] == item.tensor.dtype
            volume = sum(box.volume for box in item.boxes)
            assert item.data.numel() == volume, item.tensor.fqn
            if len(item.boxes) == 1:
                assert tuple(item.data.shape) == item.boxes[0].lengths, item.tensor.fqn
            else:
                assert item.data.dim() == 1
                assert item.data.is_contiguous()
    found = {
        "columns": Columns.from_items(collected.items).encode(),
        "specs": [item.tensor for item in collected.items],
        "pieces": [
            (item.tensor, box, raw(part).numpy().tobytes())
            for item in collected.items
            if item.boxes
            for box, part in pieces_of(item)
        ],
        "shared": encode_extra(collected.shared),
        "own": encode_extra(collected.own),
        "facts": collected.facts,
        "loader": None,
    }
    state = collected.loader
    if state is not None:
        shards = [encode_extra(shard.to_data()) for shard in state.shards]
        found["loader"] = (encode_extra(state.common_data()), shards)
    return found


def unite(role, parts):
    """Return the memory of what all ranks packed; the planner refuses gaps and overlaps."""
    plan = plan_save([Columns.decode(part["columns"]) for part in parts])
    facts = {role: parts[0]["facts"]}
    metadata = plan.metadata({"facts": facts})
    tensors, pieces = {}, {}
    for part in parts:
        assert part["shared"] == parts[0]["shared"], "shared values must be equal on all ranks"
        for spec in part["specs"]:
            tensors[spec.role, spec.kind, spec.fqn] = spec
        for spec, box, data in part["pieces"]:
            known = pieces.setdefault((spec.role, spec.kind, spec.fqn), {})
            assert known.setdefault(box, data) == data, f"replicas of `{spec.fqn}` differ"
    assert set(metadata.tensor_ids) == set(tensors)
    loaders = [part["loader"] for part in parts if part["loader"] is not None]
    loader = None
    if loaders:
        shards = {}
        for _, held in loaders:
            for data in map(decode_extra, held):
                shards.setdefault((data["dp_rank"], data["reader"], data["order_key"]), data)
        loader = LoaderState.from_data(decode_extra(loaders[0][0]), shards.values())
    return Memory(
        metadata,
        tensors,
        {key: list(boxes.items()) for key, boxes in pieces.items()},
        decode_extra(parts[0]["shared"]),
        [decode_extra(part["own"]) for part in parts],
        loader,
    )


def save(state, framework, *, role="main", members=None):
    """Save the state of the ranks in `members`; every rank of the job calls it and gets all."""
    if not dist.is_initialized():
        return unite(role, [packed(collect(role, state, framework, for_load=False))])
    mine = None
    if members is None or dist.get_rank() in members:
        mine = packed(collect(role, state, framework, for_load=False))
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return unite(role, [part for part in parts if part is not None])


def load(memory, state, framework, *, role="main", rank=0, strict=True, **options):
    """Fill a state from memory, as a strict load does; returns the adapter's report."""
    found = collect(role, state, framework, for_load=True, metadata=memory.metadata)
    check(memory, found.items, strict=strict)
    for item in found.items:
        if item.boxes:
            fill(memory.pieces, item)
    own = memory.own[rank] if rank < len(memory.own) else {}
    return apply(role, state, framework, found, memory.shared, own, memory.loader, **options)


def check(memory, items, *, strict):
    """Refuse what a real load refuses."""
    wanted = {(i.tensor.role, i.tensor.kind, i.tensor.fqn): i.tensor for i in items}
    missing = sorted(set(wanted) - set(memory.tensors))
    if missing:
        raise MissingKeys(f"missing {missing}")
    left = sorted(key for key in set(memory.tensors) - set(wanted) if key[1] != "extra")
    if strict and left and dist.is_initialized() is False:
        raise UnexpectedKeys(f"unexpected {left}")
    for key, spec in wanted.items():
        if spec.shape != memory.tensors[key].shape:
            raise ShapeMismatch(f"{key}: {spec.shape} {memory.tensors[key].shape}")
        if spec.dtype != memory.tensors[key].dtype:
            raise DtypeMismatch(f"{key}: {spec.dtype} {memory.tensors[key].dtype}")


def fill(pieces, item):
    """Copy what intersects from the saved boxes to an item's."""
    spec = item.tensor
    for box, target in pieces_of(item):
        missing = box.volume
        for source, data in pieces.get((spec.role, spec.kind, spec.fqn), []):
            common = intersect(box, source)
            if common is None:
                continue
            whole = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(item.data.dtype)
            part = narrowed(whole.view(source.lengths), shift(common, [-o for o in source.offsets]))
            narrowed(target, shift(common, [-o for o in box.offsets])).copy_(part)
            missing -= common.volume
        assert missing == 0, f"`{spec.fqn}` lacks {missing} elements of {box}"


def narrowed(tensor, box):
    for dim, (start, length) in enumerate(zip(box.offsets, box.lengths, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor
