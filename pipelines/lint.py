"""Semantic checks of a compiled pipeline: fourteen rules that walk the YAML and nothing else.

The checks hold for any file that was compiled from these pipelines, also with replaced images.
They do not prove that a cluster accepts the file.

python -m pipelines.lint FILE... [--image NAME=REFERENCE] [--release]
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from components.images import resolve_images
from pipelines import lint_graph, lint_pods
from pipelines.lint_model import Compiled, Fault

RULES: dict[int, Callable[[Compiled], Iterator[Fault]]] = {
    1: lint_graph.inputs_are_declared,
    2: lint_graph.producers_are_upstream,
    3: lint_graph.stages_follow_prepare,
    4: lint_pods.caching_is_off,
    5: lint_pods.gpu_pods_are_complete,
    6: lint_pods.images_are_known,
    7: lint_pods.pods_wear_the_standard,
    8: lint_pods.retries_outlast_timeouts,
    9: lint_graph.arguments_fit_the_stages,
    10: lint_graph.loops_run_over_integers,
    11: lint_graph.size_is_within_limits,
    12: lint_pods.platform_names_executors,
    13: lint_graph.parameters_are_public,
    14: lint_pods.pods_keep_away_together,
}
"""Number of a rule to its check."""


def lint(
    text: str, *, images: Mapping[str, str] | None = None, release: bool = False
) -> list[Fault]:
    """Return every fault of a compiled pipeline, in the order of the rules.

    Args:
        text: the compiled YAML.
        images: image name to reference where the compilation replaced some.
        release: images must be pinned by digest.
    """
    return lint_documents(
        list(yaml.load_all(text, yaml.CSafeLoader)), images=images, release=release
    )


def lint_documents(
    documents: Sequence[Mapping[str, Any]],
    *,
    images: Mapping[str, str] | None = None,
    release: bool = False,
) -> list[Fault]:
    """Return every fault of the parsed documents of a compiled pipeline; as `lint`."""
    present = [document for document in documents if document]
    compiled = Compiled.from_documents(present, images=resolve_images(images), release=release)
    return [fault for rule in RULES.values() for fault in rule(compiled)]


def main(argv: Sequence[str] | None = None) -> int:
    """Lint files. Returns 1 when one of them has a fault."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.lint", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--image", action="append", default=[], metavar="NAME=REFERENCE")
    parser.add_argument("--release", action="store_true", help="images must be pinned by digest")
    arguments = parser.parse_args(argv)
    images = dict(pair.split("=", 1) for pair in arguments.image)
    failed = False
    for path in arguments.files:
        faults = lint(path.read_text("utf-8"), images=images, release=arguments.release)
        for fault in faults:
            sys.stderr.write(f"{path}: {fault}\n")
        failed = failed or bool(faults)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
