"""Interface of the stage that measures accuracy on held-out prompts."""

from kfp import dsl

from components.images import IMAGES


@dsl.component(base_image=IMAGES["rollout"], packages_to_install=[], install_kfp_package=False)
def evaluate(
    root: str,
    config_sha256: str,
    baseline_pin: str,
    policy_pin: str,
    evaluation: dsl.Output[dsl.Dataset],
    evaluation_metrics: dsl.Output[dsl.Metrics],
) -> None:
    """Measure the policy before and after on held-out prompts. Writes eval/1.

    Args:
        root: URI of the run.
        config_sha256: Digest of the configuration in run.json.
        baseline_pin: URI and digest of the policy to compare with.
        policy_pin: URI and digest of the newest policy.
    """
    from planish.stages.evaluate.stage import run

    run(
        root=root,
        config_sha256=config_sha256,
        baseline_pin=baseline_pin,
        policy_pin=policy_pin,
        evaluation=evaluation,
        metrics=evaluation_metrics,
    )
