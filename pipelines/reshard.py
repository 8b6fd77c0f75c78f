"""The pipeline that writes a checkpoint anew, in one task that reads back what it has written.

    python -m pipelines.reshard --root /tmp/reshard --source PIN --layout tp=4

Any layout becomes any other: a state saved by FSDP ranks for tensor-parallel engines, or merged as
a Hugging Face folder. The same call again finds what is finished and reads it back.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kfp import dsl

from components import reshard
from components.images import CPU_TINY, PROFILES, Profile, resolve_images
from components.pod_settings import with_pod_settings
from planish.base.errors import ConfigError
from planish.store import normal_pin

DESCRIPTION = """Write a checkpoint anew for another layout, and read it back.

Args:
    root: URI of this run, `s3://bucket/prefix` or `file:///folder`: plan, logs, and the result
        unless `target` says where.
    source: URI of a committed checkpoint, or its pin `<uri>#sha256=<digest>`.
    layout: `merged` for a Hugging Face folder, or degrees such as `tp=4` or `fsdp=8,tp=2`.
    target: URI of the result; empty for a folder below the root.
    parts: `all`, or `model` without optimizers and counters.
    role: One role of several; empty for all.
    policy: Pin of a policy that gives configuration and tokenizer; for `merged` only.
    retain_folder: URI below which older checkpoints are removed at the end; empty for none.
    keep_last: Checkpoints that stay there; 0 removes none.
    keep_every: Multiples of this step stay as well; 0 for no such rule.
"""


def build_reshard(
    profile: Profile = CPU_TINY, *, images: Mapping[str, str] | None = None
) -> Callable[..., Any]:
    """Return the pipeline; call it to run locally, or compile it.

    Args:
        profile: resources, retries and timeouts; counts of iterations mean nothing here.
        images: image name to reference, replacing those of the table.

    Raises:
        ValueError: an unknown image name.
    """
    table = resolve_images(images)

    def pipeline(
        root: str,
        source: str,
        layout: str = "merged",
        target: str = "",
        parts: str = "all",
        role: str = "",
        policy: str = "",
        retain_folder: str = "",
        keep_last: int = 0,
        keep_every: int = 0,
    ) -> None:
        task = reshard(
            root=root,
            source=source,
            target_layout=layout,
            target=target,
            parts=parts,
            role=role,
            policy=policy,
            retain_folder=retain_folder,
            keep_last=keep_last,
            keep_every=keep_every,
        )
        with_pod_settings(task, "reshard", profile=profile, images=table)

    pipeline.__doc__ = DESCRIPTION
    decorate = dsl.pipeline(
        name="reshard",
        display_name=f"reshard {profile.name}",
        pipeline_config=dsl.PipelineConfig(
            active_deadline_seconds=profile.deadline_seconds,
            ttl_seconds_after_finished=profile.retention_seconds,
        ),
    )
    return decorate(pipeline)  # type: ignore[no-any-return]


def run_local(*, profile: str = "cpu-tiny", **parameters: Any) -> None:
    """Run the pipeline on this machine to its end.

    Args:
        profile: name in `components.images.PROFILES`.
        parameters: those of the pipeline.

    Raises:
        RuntimeError: a task failed.
        ConfigError: an unknown profile.
    """
    from pipelines.local import run_here

    if profile not in PROFILES:
        raise ConfigError(f"a profile must be one of {sorted(PROFILES)}, got {profile!r}")
    for name in ("root", "source", "target", "policy", "retain_folder"):
        parameters[name] = parameters[name] and normal_pin(parameters[name])
    run_here(build_reshard(PROFILES[profile]), parameters)


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; 0 when every task succeeded."""
    from pipelines.local import exit_status  # who compiles loads nothing that only runs need

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--root", required=True, help="URI or path of this run")
    parser.add_argument("--source", required=True, help="URI, path or pin of a checkpoint")
    parser.add_argument("--layout", default="merged", help="merged, tp=4, fsdp=8,tp=2, ...")
    parser.add_argument("--target", default="", help="URI or path of the result")
    parser.add_argument("--parts", default="all", choices=("all", "model"))
    parser.add_argument("--role", default="", help="one role of several")
    parser.add_argument("--policy", default="", help="pin of a policy, for merged")
    parser.add_argument("--retain-folder", default="", help="folder whose older checkpoints go")
    parser.add_argument("--keep-last", type=int, default=0, help="checkpoints that stay there")
    parser.add_argument("--keep-every", type=int, default=0, help="multiples that stay too")
    parser.add_argument("--profile", default="cpu-tiny", help="name of a compiled profile")
    arguments = vars(parser.parse_args(argv))
    return exit_status(run_local, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
