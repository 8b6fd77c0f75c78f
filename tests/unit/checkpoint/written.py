"""Small checkpoints written without torch: arrays in, a committed checkpoint out."""

import numpy as np

from planish.checkpoint.commit.commit import publish
from planish.checkpoint.commit.journal import attempt_folder, join, journaled, new_attempt
from planish.checkpoint.format import metafile
from planish.checkpoint.format.geometry import whole
from planish.checkpoint.format.items import ITEM_BYTES, Columns, LocalItem, TensorSpec
from planish.checkpoint.format.metafile import block_crcs
from planish.checkpoint.format.small_objects import encode_extra
from planish.checkpoint.loading.fill import RAW
from planish.checkpoint.plan.files import RankPlan
from planish.checkpoint.plan.save import plan_save
from planish.store import open_store

SHARED = "data/main.extra/shared.bin"
COMMON = "data/main.loader/common.bin"
EXTRA = {SHARED: encode_extra({"tokens": 12, "scale": 0.5}), COMMON: encode_extra({"seed": 3})}
OBJECTS = {"main": {"shared": SHARED, "loader": {"common": COMMON, "shards": []}}}


def tiny_model(*, layers=2, hidden=8, vocab=13, dtype="F32", seed=0, role="main"):
    """Return TensorSpec -> raw elements of a small decoder with its Adam moments."""
    rng = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    for n in range(layers):
        for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"):
            shape = (hidden, 3 * hidden) if "down" in name else (hidden, hidden)
            shapes[f"model.layers.{n}.{name}.weight"] = shape
        shapes[f"model.layers.{n}.norm.weight"] = (hidden,)
    found = {}
    for fqn, shape in shapes.items():
        forms = [("model", fqn, dtype), ("optim", f"{fqn}.exp_avg", "F32")]
        for kind, name, form in forms:
            size = ITEM_BYTES[form]
            raw = rng.integers(0, 256, (*shape, size), dtype=np.uint8)
            found[TensorSpec(role, kind, name, form, shape)] = raw.view(RAW[size]).reshape(shape)
    step = TensorSpec(role, "optim", "step", "F32", ())
    found[step] = np.array(7.0, np.float32).view(np.uint32).reshape(())
    return found


def stored(reader, fqn, *, kind="model", role="main"):
    """Return a tensor of the checkpoint of a `SliceReader` by name."""
    metadata = reader.opened.metadata
    return metadata.tensors.spec(metadata.tensor_ids[role, kind, fqn])


def write_checkpoint(uri, tensors, boxes_of=None, *, num_ranks=1, step=7, header=None, extra=True):
    """Commit `tensors` as ranks would that hold `boxes_of(spec, rank)`; return its pin."""
    boxes_of = boxes_of or (lambda spec, rank: (whole(spec.shape),))
    items = [
        [LocalItem(spec, tuple(boxes_of(spec, rank))) for spec in tensors]
        for rank in range(num_ranks)
    ]
    columns = [Columns.from_items(some) for some in items]
    plan = plan_save(columns)
    blobs = []
    for rank in range(num_ranks):
        rows = [np.concatenate([_cut(tensors[i.tensor], b) for b in i.boxes] or [_nothing()])
                for i in items[rank]]  # fmt: skip
        for file in RankPlan.decode(plan.wire(rank), columns[rank]).files:
            entries = zip(file.items, file.starts, file.stops, strict=True)
            blobs.append((file.key, file.header + b"".join(
                rows[i].tobytes()[a:b] for i, a, b in entries)))  # fmt: skip
    roles = sorted({spec.role for spec in tensors})
    facts = {"step": step, "roles": roles, "layout": f"ranks={num_ranks}", "attributes": {}}
    meta = plan.metadata({**facts, **(header or {})})
    blobs += EXTRA.items() if extra else ()
    meta.objects = dict(OBJECTS) if extra else {}
    storage, path = open_store(uri)
    attempt = new_attempt()
    folder = attempt_folder(path, attempt)
    with journaled(storage, path, attempt) as journal:
        for row, (key, data) in enumerate(blobs):
            storage.put(join(folder, key), data)
            if row < len(plan.keys):
                meta.files.crcs[row] = block_crcs(data)
            else:
                meta.files.add(key, len(data), algorithm="crc32c", crcs=block_crcs(data))
        files = {key: len(data) for key, data in blobs}
        facts = {"step": step, "roles": tuple(roles), "journal": journal}
        commit = publish(storage, path, attempt, metafile.encode(meta), files, **facts)
    return f"{uri}#sha256={commit.meta_sha256}"


def _cut(array, box):
    place = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))
    return np.ascontiguousarray(array[place]).reshape(-1).view(np.uint8)


def _nothing():
    return np.zeros(0, np.uint8)
