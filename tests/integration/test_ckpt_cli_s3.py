"""`planish checkpoint ...` on a bucket of a real MinIO server does what it does on a folder."""

from __future__ import annotations

import json

import pytest

from planish.__main__ import main
from planish.checkpoint.convert.layouts import Layout
from planish.store import open_store
from tests.unit.checkpoint.written import tiny_model, write_checkpoint

pytestmark = pytest.mark.server


@pytest.fixture
def run(capsys):
    def call(*words):
        code = main(["checkpoint", *map(str, words)])
        return code, capsys.readouterr().out

    return call


def test_a_life_of_checkpoints_on_a_bucket(run, s3_root):
    root, boxes = f"{s3_root}/team/states", Layout.parse("fsdp=3").boxes
    pins = [
        write_checkpoint(f"{root}/step-{n}", tiny_model(seed=n), boxes, num_ranks=3, step=n)
        for n in (1, 2, 3)
    ]
    assert run("latest", root) == (0, f"{pins[-1]}\n")
    assert [entry["pin"] for entry in json.loads(run("ls", root, "--json")[1])] == pins
    assert "every block intact" in run("verify", pins[0])[1]
    code, out = run("reshard", pins[2], f"{s3_root}/team/tp", "tp=2")
    assert code == 0
    made = out.splitlines()[-1]
    assert run("diff", pins[2], made)[0] == 0
    assert run("diff", pins[1], made)[0] == 1
    assert "ranks 0 to 7" in run("report", made)[1]
    assert "deleted 1, kept 2" in run("retain", root, "--keep-last", 2)[1]

    storage, key = open_store(root)
    file = next(s.key for s in storage.list(f"{key}/step-3") if s.key.endswith("0.safetensors"))
    data = bytearray(storage.get(file, 1 << 20)[0])
    data[-1] ^= 1
    storage.put(file, data)
    code, out = run("verify", pins[2])
    assert (code, file.rpartition("/a-")[2].partition("/")[2] in out) == (1, True)

    left = open_store(root)[0].open_multipart(f"{key}/step-2/a-{'0' * 26}/data/x", 20 << 20)
    left.write(1, bytes(16 << 20))
    storage.put(f"{key}/step-2/a-{'0' * 26}/data/y", b"left by a crash")
    assert run("gc", root, "--grace-seconds", 0)[0] == 0
    assert [s.key for s in storage.list(f"{key}/step-2/a-{'0' * 26}")] == []
    left.abort()
    for name in ("step-2", "step-3"):
        assert run("rm", f"{root}/{name}", "--yes")[0] == 0
    assert run("latest", root) == (1, "")
    assert [stat.key for stat in storage.list(key)] == [f"{key}/LATEST"], "a hint, never believed"
