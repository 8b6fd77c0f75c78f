"""Feeds damaged files to readers of native code: `python -m tests.fuzz.native TARGET`.

A reader may return or raise its own error. What ends the process, by a signal or `terminate`, is
seen by who started it: the file `input` below `--folder` is then the one that did it.
Memory has a limit, so that a size which nobody checked is seen as well.
"""

import argparse
import hashlib
import json
import random
import resource
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.csv import write_csv

from planish.base.errors import CheckpointError, ConfigError, EngineError, RecordError
from planish.checkpoint.format import metafile
from tests.fuzz.checkpoint import damaged, lie_in_json, with_head
from tests.unit.checkpoint.format.metadata_samples import small

ROOM_BYTES = 4 << 30
"""Of addresses beyond what the process has when its first file is read."""
EDGES = (512, 2048, 8192)
"""Most damage lies so many bytes from one end: there stand the sizes and the types."""
WORDS = (0, 1, 4, 8, 12, 255, 256, 1 << 15, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)


def shaken(rng, data, others):
    """Return `data` damaged anywhere, or with one to four bytes or words of an end replaced."""
    if rng.random() < 0.3:
        return damaged(rng, data, others)
    result = bytearray(data)
    edge = min(rng.choice(EDGES), len(data))
    first = rng.choice((0, 0, len(data) - edge))
    for _ in range(rng.choice((1, 1, 2, 4))):
        place = rng.randrange(first, first + edge)
        word = rng.choice((rng.randbytes(1), rng.choice(WORDS).to_bytes(4, "little")))
        result[place : place + len(word)] = word
    return bytes(result[: len(data)])


def parquet_samples():
    """Return Parquet files of all kinds of columns."""
    rows = pa.table({
        "question": [f"{n} + 1?" for n in range(40)], "answer": [str(n) for n in range(40)],
        "messages": [[{"role": "user", "content": "x" * n}] for n in range(40)],
        "tokens": [list(range(n)) for n in range(40)], "score": np.linspace(0, 1, 40),
    })  # fmt: skip
    samples = []
    for compression, dictionary in (("zstd", True), ("snappy", False), ("none", True)):
        sink = pa.BufferOutputStream()
        pq.write_table(rows, sink, compression=compression, use_dictionary=dictionary)
        samples.append(sink.getvalue().to_pybytes())
    return samples


def metadata(folder):
    """The metadata of a checkpoint."""
    samples = [metafile.encode(small(seed, plain=True)) for seed in range(4)]
    return samples, None, partial(metafile.decode, max_bytes=8 << 20), CheckpointError


def rows(folder):
    """A data set in Parquet."""
    from planish.stages.curate.config import CurateConfig
    from planish.stages.curate.records import open_data

    config = CurateConfig(dataset=str(folder / "input"))
    return parquet_samples(), None, lambda _: [*open_data(config, key="x")[2]], ConfigError


def cases(folder):
    """Rows by which a user tries a verifier."""
    from planish.verifiers.contract import read_cases

    (folder / "input.parquet").symlink_to("input")
    return parquet_samples(), None, lambda _: read_cases(folder / "input.parquet"), ConfigError


def table(folder):
    """A trace of metrics in Parquet."""
    from planish.minder.lab.files import read_frame

    (folder / "input.parquet").symlink_to("input")
    return _trace(), None, lambda _: read_frame(folder / "input.parquet"), RecordError


def csv(folder):
    """A trace of metrics as text."""
    from planish.minder.lab.files import read_frame

    text = pa.BufferOutputStream()
    write_csv(pq.read_table(pa.BufferReader(_trace()[0])), text)
    (folder / "input.csv").symlink_to("input")
    sample = text.getvalue().to_pybytes()
    return [sample], None, lambda _: read_frame(folder / "input.csv"), RecordError


def _trace():
    columns = {"ts": np.arange(9.0), "machine": "m", "metric": "cpu_usage", "value": 0.5}
    filled = {n: v if isinstance(v, np.ndarray) else [v] * 9 for n, v in columns.items()}
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(filled), sink)
    return [sink.getvalue().to_pybytes()]


def record(folder):
    """A set of rollouts whose manifest fits its file."""
    from planish.records import RolloutSet
    from planish.records.io import read_set
    from planish.records.manifest import MANIFEST, Shard, seal
    from tests.unit.records.samples import file_of, random_rollouts

    sample = file_of(random_rollouts())

    def read(data):
        shard = Shard("input", 20, len(data), hashlib.sha256(data).hexdigest())
        (folder / MANIFEST).write_bytes(seal(RolloutSet.SCHEMA, 20, [shard], {}, {})[1])
        return read_set(RolloutSet, folder.as_uri())

    return [sample], None, read, RecordError


def weights(folder):
    """The weights of a policy that an engine opens."""
    from planish.engines.weights import FolderWeights

    (folder / "w.safetensors").symlink_to("input")

    def read(_):
        source = FolderWeights(folder)
        for name in source.names():
            assert source.read(name).isfinite().sum() >= 0

    return [_tensors()], with_head(8, 0), read, EngineError


def _tensors():
    from safetensors.numpy import save

    return save({"w": np.ones((4, 3), np.float32), "b": np.zeros(5, np.float16)}, {"format": "pt"})


def detector(folder):
    """The weights of a model of Minder."""
    from planish.minder.detect import model_files
    from planish.minder.detect.config import DenoiseConfig

    whole = model_files.default_models()
    (name,) = [path.name for path in whole.iterdir() if path.is_dir()][:1]
    shutil.copytree(whole, folder / "models")
    place = folder / "models" / name / "model.safetensors"
    sample = place.read_bytes()
    place.unlink()
    place.symlink_to(folder / "input")
    read = lambda _: model_files.load_models(folder / "models", DenoiseConfig(), (name,))  # noqa: E731
    return [sample], with_head(8, 0), read, ConfigError


def model(folder):
    """The weights of a model that a trainer opens."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from planish.models.policy import load_model

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 17}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)).save_pretrained(folder)
    sample = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("input")
    return [sample], with_head(8, 0), lambda _: load_model(folder), ConfigError


def tokenizer(folder):
    """A tokenizer."""
    from planish.models.tokens import character_tokenizer, load_tokenizer

    character_tokenizer("0123456789+=").save(folder)
    sample = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("input")
    return [sample], lie_in_json, lambda _: load_tokenizer(folder), ConfigError


def manifest(folder):
    """A manifest, which pydantic parses."""
    from planish.records.manifest import Shard, parse_manifest, seal

    shards = [Shard("a/b", 2, 3, "0" * 64), Shard("c", 1, 4, "1" * 64)]
    _, sample = seal("rollouts/1", 3, shards, {"policy": "2" * 64}, {"seed": 7, "x": [1.5, None]})
    return [sample], lie_in_json, partial(parse_manifest, name="x"), RecordError


def torch_state(folder):
    """A checkpoint of torch."""
    import torch
    import torch.distributed.checkpoint as dcp

    from planish.checkpoint.convert.dcp_bridge import _Folder

    state = {"w": torch.ones(4, 6).t(), "n": torch.arange(5), "lr": {"a": (0.5, "b")}}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    (file,) = folder.glob("*.distcp")
    sample = file.read_bytes()
    file.unlink()
    file.symlink_to("input")

    def read(_):
        opened = _Folder(folder)
        try:
            opened.values()
            for item in opened.items("main"):
                item.data.double().sum()
        finally:
            opened.close()

    return [sample], None, read, CheckpointError


TARGETS = {
    made.__name__: made
    for made in (metadata, rows, cases, table, csv, record, weights, detector, model, tokenizer,
                 manifest, torch_state)
}  # fmt: skip


def fuzz(name, cases, seed, folder):
    """Read damaged inputs; whatever is no refusal is raised, or ends the process."""
    samples, lie, read, refusals = TARGETS[name](folder)
    rng = random.Random(f"{seed} {name}")
    for sample in samples:
        (folder / "input").write_bytes(sample)
        read(sample)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + ROOM_BYTES, resource.RLIM_INFINITY))
    refused = 0
    for number in range(cases):
        sample = rng.choice(samples)
        does_lie = lie is not None and rng.random() < 0.5
        data = lie(rng, sample) if does_lie else shaken(rng, sample, samples)
        (folder / "input").write_bytes(data)
        try:
            read(data)
        except refusals:
            refused += 1
        except BaseException as error:
            error.add_note(f"{name} case {number} of seed {seed}: {data[:300]!r}")
            raise
    return {"target": name, "cases": cases, "refused": refused}


def main():
    """Run and print one line of JSON per target."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", choices=TARGETS, nargs="+")
    parser.add_argument("--cases", type=int, default=4_000, help="of each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    for name in options.target:
        folder = options.folder / name
        folder.mkdir()
        print(json.dumps(fuzz(name, options.cases, options.seed, folder)), flush=True)


if __name__ == "__main__":
    main()
