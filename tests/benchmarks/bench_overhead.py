"""What kfp's local runner and process starts cost each stage: everything that is not our work.

python -m tests.benchmarks.bench_overhead
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.benchmarks.facts import write_result

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = REPOSITORY / "tests" / "golden" / "configs" / "tiny.toml"


def run_tiny(root: Path) -> None:
    """Run the smallest pipeline of one iteration with a single rollout shard."""
    command = [sys.executable, "-m", "pipelines.local", "--root", root.as_uri()]
    command += ["--config", str(TINY), "--iterations", "1", "--shards", "1"]
    with (root.parent / "log.txt").open("wb") as log:
        subprocess.run(command, cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT, check=True)


def split_seconds(root: Path) -> dict[str, dict[str, float]]:
    """Return for each stage: waiting for the runner, process start, loading, work (seconds)."""
    entries: list[dict[str, Any]] = [
        json.loads(path.read_text()) for path in (root / "logs").glob("*.json")
    ]
    entries.sort(key=lambda entry: entry["start_seconds"])
    result: dict[str, dict[str, float]] = {}
    before = None
    for entry in entries:
        began = entry["start_seconds"] - entry["startup_seconds"]
        loading = entry["metrics"].get("load_seconds", 0.0)
        result[entry["stage"]] = {
            "runner_seconds": round(max(0.0, began - before), 3) if before else 0.0,
            "start_seconds": entry["startup_seconds"],
            "loading_seconds": round(loading, 3),
            "work_seconds": round(entry["seconds"] - loading, 3),
        }
        before = entry["start_seconds"] + entry["seconds"]
    return result


def main() -> int:
    """Measure twice, keep the second run (the first one fills the caches of the file system)."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(2):
            root = Path(folder) / f"run{number}"
            run_tiny(root)
        stages = split_seconds(root)
    print(f"{'stage':<12}{'runner':>9}{'start':>9}{'loading':>9}{'work':>9}   seconds")
    for stage, parts in stages.items():
        print(f"{stage:<12}" + "".join(f"{value:9.2f}" for value in parts.values()))
    overhead = [parts["runner_seconds"] + parts["start_seconds"] for parts in stages.values()]
    result = {"stages": stages, "mean_overhead_seconds": round(sum(overhead) / len(overhead), 3)}
    print(f"overhead of the runner and process start: {result['mean_overhead_seconds']} s a task")
    write_result("overhead", "measured-cpu", result, "tests.benchmarks.bench_overhead")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
