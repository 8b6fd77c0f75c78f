"""Compare iterations in one task with iterations apart: every record of a run must be the same.

`python -m tests.integration.resident_equal --presets dapo-tiny,vapo-tiny --iterations 6` prints one
line for each way to run and exits 1 where records differ. Curation and cold start are done once a
preset, and copied.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from planish.records.manifest import MANIFEST

QUICK = (
    "sft.max_steps=60", "rollout.prompts_per_iteration=32", "evaluate.max_prompts=32",
)  # fmt: skip
"""Small enough that an iteration takes about a second."""
WAYS: dict[str, tuple[str, ...]] = {
    "one rank": (),
    "two ranks": ("train.num_processes=2",),
    "adapters": ("model.lora_rank=4",),
    "megatron": ("train.trainer=megatron",),
}
"""Way to the settings of both runs."""


def records(root: Path) -> dict[str, bytes]:
    """Return the manifests of a run by their place, and what updates have told."""
    names = [MANIFEST, "update.json"]
    found = [path for name in names for path in root.rglob(name)]
    return {str(path.relative_to(root)): path.read_bytes() for path in found}


def run(root: Path, preset: str, iterations: int, settings: Sequence[str], *options: str) -> None:
    """Run a preset; raises CalledProcessError where it fails."""
    line = [sys.executable, "-m", "pipelines.local", "--root", str(root), "--preset", preset]
    line += ["--iterations", str(iterations), *options]
    line += [word for setting in settings for word in ("-o", setting)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    # A task that failed is tried again, and would hide what failed.
    if done.returncode or "failed stage=" in done.stdout:
        raise SystemExit(
            f"{root} failed with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr}"
        )


def compare(
    folder: Path, preset: str, iterations: int, settings: Sequence[str], sizes: Sequence[int]
) -> list[str]:
    """Return the records that blocks of these sizes write otherwise than tasks apart."""
    apart, settings = folder / "apart", (*QUICK, *settings)
    run(apart, preset, iterations, settings, "--resident", "0")
    wanted = records(apart)
    faults = []
    for size in sizes:
        root = folder / f"blocks-of-{size}"
        run(root, preset, iterations, settings, "--resident", str(size))
        found = records(root)
        differ = sorted(k for k in wanted.keys() | found.keys() if wanted.get(k) != found.get(k))
        faults += [f"blocks of {size}: {name}" for name in differ]
    return faults


def main(argv: Sequence[str]) -> int:
    """Compare as the command line says; 0 where nothing differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--presets", default="dapo-tiny,vapo-tiny,tppo-tiny,dapo-moe-tiny")
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--sizes", default="6,4", help="iterations of a task")
    options = parser.parse_args(argv)
    sizes = [int(size) for size in options.sizes.split(",")]
    worst = 0
    for preset in options.presets.split(","):
        for way in options.ways.split(","):
            with tempfile.TemporaryDirectory() as folder:
                faults = compare(Path(folder), preset, options.iterations, WAYS[way], sizes)
                count = len(records(Path(folder) / "apart"))
                shutil.rmtree(folder, ignore_errors=True)
            worst |= bool(faults)
            print(f"{preset:<14} {way:<10} records={count} different={len(faults)}", flush=True)
            for fault in faults[:10]:
                print(f"    {fault}", flush=True)
    return worst


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
