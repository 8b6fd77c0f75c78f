"""Which nodes of a workflow Argo tries again under the settings that the overlay gives it.

What a node that failed looks like is that of Argo Workflows 4.0 (argoproj/argo-workflows,
workflow/controller/operator.go `inferFailedReason` and dag.go `executeDAG`): a pod ends with a
message, and a graph is marked with its phase alone.
"""

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from planish.__main__ import parser
from tests.servers.program import BIN, require

REPOSITORY = Path(__file__).resolve().parents[2]
SETTINGS = REPOSITORY / "manifests/overlays/kfp-patch/workflow-controller.yaml"
EVALUATOR = BIN / "expression"

STOCK = {
    "ttlStrategy": dict.fromkeys(
        ("secondsAfterCompletion", "secondsAfterSuccess", "secondsAfterFailure"), 3600
    ),
    "templateDefaults": {"retryStrategy": {"limit": "2", "retryPolicy": "OnError"}},
}
"""Of Kubeflow Pipelines 2.17 (kubeflow/pipelines, tag 2.17.0,
manifests/kustomize/third-party/argo/base/workflow-controller-configmap-patch.yaml)."""

PODS = {
    "its program failed": ("Failed", "main: Error (exit code 1)"),
    "its program was killed": ("Failed", "main: OOMKilled (exit code 137)"),
    "it was preempted": ("Failed", "Pod was terminated in response to preemption"),
    "it was deleted by force": ("Error", "pod deleted"),
    "its account is missing": ("Error", 'pods "x" is forbidden: service account not found'),
}
GRAPHS = {"a task in it failed": ("Failed", ""), "a task in it got lost": ("Error", "")}


def settings():
    (data,) = (document["data"] for document in yaml.safe_load_all(SETTINGS.read_text()))
    assert set(data) == {"workflowDefaults"}
    return yaml.safe_load(data["workflowDefaults"])["spec"]


def retries(spec):
    return spec["templateDefaults"]["retryStrategy"]


def ask(account, phase, message):
    """Return whether Argo tries a node again, by its own evaluator of expressions."""
    require(EVALUATOR, remedy="build it with `tests/servers/build.sh expression`")
    expression = retries(settings())["expression"].replace(
        "{{workflow.serviceAccountName}}", account
    )
    last = {"exitCode": "-1", "status": phase, "duration": "3", "message": message}
    question = json.dumps({"expression": expression, "lastRetry": last, "retries": "0"})
    done = subprocess.run([EVALUATOR], input=question, capture_output=True, text=True, check=True)
    return done.stdout == "true\n"


@pytest.mark.parametrize("case", PODS)
def test_a_pod_of_ours_is_tried_again(case):
    assert ask("planish-runner", *PODS[case])


@pytest.mark.parametrize("case", GRAPHS)
def test_a_graph_of_ours_is_never_tried_again(case):
    assert not ask("planish-runner", *GRAPHS[case])


@pytest.mark.parametrize("case", [*PODS, *GRAPHS])
def test_runs_of_other_accounts_are_retried_as_before(case):
    phase, message = {**PODS, **GRAPHS}[case]
    assert ask("pipeline-runner", phase, message) == (phase == "Error")


def test_all_but_policy_and_expression_are_those_of_kubeflow():
    ours = settings()
    # The policy lets both phases through; the expression then chooses.
    assert retries(ours).pop("retryPolicy") == "Always"
    assert retries(ours).pop("expression")
    assert retries(STOCK).pop("retryPolicy") == "OnError"
    assert ours == STOCK


def test_the_account_of_the_expression_is_that_of_our_runs():
    account = parser().parse_args(["submit", "s3://b/r"]).service_account
    assert f"== '{account}'" in retries(settings())["expression"]
