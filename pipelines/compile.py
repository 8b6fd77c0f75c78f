"""Write every pipeline as YAML, one file for each (pipeline, profile).

python -m pipelines.compile            rewrites the golden files
python -m pipelines.compile --check    fails with a diff when they are not up to date
"""

import argparse
import difflib
import itertools
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from kfp import compiler

from components.images import PROFILES, Profile
from pipelines.compiled import Compiled, size_faults
from pipelines.monitor import Monitor, monitor_of, monitor_options
from pipelines.post_train import build_post_train, profile_named
from pipelines.reshard import build_reshard
from pipelines.share import name_tasks_apart, share_components
from planish.submit.command import gpu_nodes, placement_options
from planish.submit.local.command import resident_option
from planish.submit.pipeline import (
    CompiledPipeline,
    parse,
    parse_images,
    set_cache,
    set_gpu_nodes,
    set_network,
    set_placement,
    set_secrets,
)

GOLDEN = Path(__file__).resolve().parent.parent / "src/planish/submit/compiled"
"""Folder of the committed files, from which `planish submit` takes them."""


TWICE = ("python3", "-m", "planish.run.again")
"""What runs the command of a pod up to twice, whatever Kubeflow is told about retries."""


DIGEST = re.compile(r"@sha256:[0-9a-f]{64}$")

BUILDERS: dict[str, Callable[..., Any]] = {
    "post-train": build_post_train,
    "reshard": build_reshard,
}
"""Name of a pipeline to what builds it for a profile."""


def file_name(profile: Profile, pipeline: str = "post-train") -> str:
    """Return the name of the compiled file of a pipeline and a profile."""
    return f"{pipeline}-{profile.name}.yaml"


def compile_text(
    profile: Profile,
    images: Mapping[str, str] | None = None,
    *,
    pipeline: str = "post-train",
    monitor: Monitor | None = None,
) -> str:
    """Return the compiled YAML of a pipeline; equal inputs give equal bytes.

    Keys are sorted here, since kfp leaves pod labels in the order of a hash that changes from
    process to process.

    Args:
        profile: counts, resources, retries.
        images: image name to reference, replacing those of the table.
        pipeline: name in `BUILDERS`.
        monitor: options of tasks that look for faulty machines; None for no such tasks.

    Raises:
        ValueError: a count outside its limits, or an unknown image name.
    """
    more: dict[str, Any] = {"monitor": monitor} if pipeline == "post-train" else {}
    built = BUILDERS[pipeline](profile, images=images, **more)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pipeline.yaml"
        compiler.Compiler().compile(built, str(path))
        text = path.read_text("utf-8")
    heading = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    spec, platform = yaml.load_all(text, yaml.CSafeLoader)
    name_tasks_apart(spec)
    _try_twice(spec)
    share_components(spec, platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"])
    return heading + yaml.dump_all([spec, platform], Dumper=yaml.CSafeDumper, sort_keys=True)


def _try_twice(spec: dict[str, Any]) -> None:
    """Let every pod whose task has retries begin once more by itself, in place."""
    components, executors = spec["components"], spec["deploymentSpec"]["executors"]
    for graph in (spec["root"], *components.values()):
        for task in graph.get("dag", {}).get("tasks", {}).values():
            label = components[task["componentRef"]["name"]].get("executorLabel", "")
            if label and task.get("retryPolicy", {}).get("maxRetryCount"):
                container = executors[label]["container"]
                container["command"] = [*TWICE, *container["command"]]


def normalised(text: str) -> str:
    """Drop the line that names the SDK's version, which changes without us."""
    return re.sub(r"^sdkVersion: .*\n", "", text, flags=re.MULTILINE)


def drift(path: Path, text: str) -> list[str]:
    """Return the difference between a committed file and what compiles now; empty when equal."""
    committed = path.read_text("utf-8") if path.exists() else ""
    return list(
        difflib.unified_diff(
            normalised(committed).splitlines(),
            normalised(text).splitlines(),
            fromfile=f"committed/{path.name}",
            tofile=f"compiled/{path.name}",
            lineterm="",
        )
    )


def faults_of(pipeline: CompiledPipeline, *, release: bool) -> list[str]:
    """Return what keeps a pipeline from being used: its size, and moving images in a release."""
    documents = [pipeline.spec, pipeline.platform]
    faults = size_faults(Compiled.from_documents(documents))
    images = {container["image"] for container, _ in pipeline.pods()}
    for image in sorted(images):
        if image.endswith(":latest") or (release and not DIGEST.search(image)):
            faults.append(f"an image of a release must end with @sha256:..., got {image!r}")
    return faults


def main(argv: Sequence[str] | None = None) -> int:
    """Compile, check, then write or compare. Returns 1 on drift or faults."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.compile", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--out", type=Path, default=GOLDEN, help="folder of the files")
    parser.add_argument("--pipeline", action="append", choices=sorted(BUILDERS), default=[])
    parser.add_argument("--profile", action="append", choices=sorted(PROFILES), default=[])
    parser.add_argument("--image", action="append", default=[], metavar="IMAGE")
    parser.add_argument("--iterations", type=int, help="iterations of one run")
    parser.add_argument("--shards", type=int, help="rollout tasks of an iteration, 1 to 32")
    parser.add_argument("--parallelism", type=int, help="rollout tasks at a time, 0 for all")
    resident_option(parser)
    parser.add_argument(
        "--cold-start",
        action="store_true",
        help="GPUs for curate and sft, for `curate.pass_rate_policy` and `sft.force`",
    )
    parser.add_argument("--store-secret", default="", help="secret with endpoint and keys")
    parser.add_argument("--hub-secret", default="", help="secret with the hub's token")
    parser.add_argument("--cache-claim", default="", help="volume claim for models and data")
    placement_options(parser)
    monitor_options(parser, on_cluster=True)
    parser.add_argument("--release", action="store_true", help="images must be pinned by digest")
    arguments = parser.parse_args(argv)
    failed = False
    try:
        images = parse_images(arguments.image)
        profiles = [
            profile_named(
                name,
                num_iterations=arguments.iterations,
                num_shards=arguments.shards,
                parallelism=arguments.parallelism,
                iterations_per_task=arguments.resident,
                cold_start=arguments.cold_start,
            )
            for name in arguments.profile or PROFILES
        ]
        monitor = monitor_of(arguments.monitor, max_restarts=arguments.max_restarts)
        texts = []
        for pipeline, profile in itertools.product(arguments.pipeline or BUILDERS, profiles):
            compiled = parse(compile_text(profile, images, pipeline=pipeline, monitor=monitor))
            set_secrets(compiled, store=arguments.store_secret, hub=arguments.hub_secret)
            set_cache(compiled, arguments.cache_claim)
            set_placement(
                compiled,
                pull_secrets=arguments.image_pull_secret,
                tolerations=arguments.toleration,
                node_selectors=arguments.node_selector,
            )
            set_network(compiled, arguments.network)
            set_gpu_nodes(compiled, **gpu_nodes(arguments))
            faults = faults_of(compiled, release=arguments.release)
            texts.append((file_name(profile, pipeline), compiled.text(), faults))
    except ValueError as error:
        parser.error(str(error))
    for name, text, faults in texts:
        path = arguments.out / name
        lines = drift(path, text) if arguments.check else []
        if not arguments.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
        for line in [*faults, *lines]:
            sys.stderr.write(f"{line}\n")
        failed = failed or bool(faults or lines)
        word = "failed" if faults or lines else ("ok" if arguments.check else "written")
        sys.stderr.write(f"{word} {path.name} bytes={len(text)}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
