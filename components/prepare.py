"""Interface of the stage that checks everything and writes `run.json`."""

from typing import NamedTuple

from kfp import dsl

from components.images import IMAGES


@dsl.component(base_image=IMAGES["core"], packages_to_install=[], install_kfp_package=False)
def prepare(
    root: str,
    preset: str,
    config: str,
    overrides: str,
    model: str,
    dataset: str,
    seed: int,
    chain: str,
    num_iterations: int,
    num_shards: int,
    requests: str,
    max_avoided_nodes: int,
    plan: dsl.Output[dsl.Markdown],
) -> NamedTuple(  # type: ignore[valid-type]
    "Prepared",
    [
        ("config_sha256", str),
        ("offset", int),
        ("chain_index", int),
        ("node_affinity", dict),
        ("unfinished", bool),
    ],
):
    """Check configuration, store, lock and cluster; write run.json; say what will happen.

    Args:
        root: URI of the run.
        preset: Name of a shipped configuration.
        config: URI of a TOML file laid over it.
        overrides: `section.key=value`, separated by spaces.
        model: Model to start from; empty for the configured one.
        dataset: Data to train on; empty for the configured one.
        seed: Seed; -1 for the configured one.
        chain: JSON of the chain; see the run parameter.
        num_iterations: Iterations of this run.
        num_shards: Rollout shards of an iteration.
        requests: JSON of what the pods ask for.
        max_avoided_nodes: Nodes at most that pods keep away from.
    """
    from planish.stages.prepare.stage import run

    return run(
        root=root,
        preset=preset,
        config=config,
        overrides=overrides,
        model=model,
        dataset=dataset,
        seed=seed,
        chain=chain,
        num_iterations=num_iterations,
        num_shards=num_shards,
        requests=requests,
        max_avoided_nodes=max_avoided_nodes,
        summary=plan,
    )
