"""What the pages for clusters and GPUs type is what a real API server answers, line by line."""

import pytest

from tests.contract.test_quickstart_page import GPU_PAGE, PAGE, blocks, is_shown
from tests.servers.program import REPOSITORY

pytestmark = pytest.mark.server

NEEDS_NODES = ("wait", "port-forward")
"""Verbs that a control plane without nodes cannot do."""


@pytest.mark.parametrize("page", [PAGE, GPU_PAGE], ids=["cluster", "gpu"])
def test_each_command_of_kubectl_prints_what_stands_below_it(page, control_plane):
    control_plane.kubectl("create", "namespace", "kubeflow", check=False)
    for overlay in ("kfp-single-user", "local", "gpu"):
        folder = REPOSITORY / "manifests" / "overlays" / overlay
        control_plane.kubectl("delete", "-k", str(folder), "--ignore-not-found", check=False)
    for name in ("kfp-launcher", "workflow-controller-configmap"):
        control_plane.kubectl("-n", "kubeflow", "delete", "configmap", name, check=False)
        settings = "--from-literal=defaultPipelineRoot=minio://mlpipeline/v2"
        control_plane.kubectl("-n", "kubeflow", "create", "configmap", name, settings)
    for command, expected in blocks(page):
        words = command.split()
        if words[0] != "kubectl" or set(words) & {*NEEDS_NODES, "delete"}:
            continue
        words = [
            f"--patch-file={REPOSITORY}/{word.partition('=')[2]}"
            if word.startswith("--patch-file=")
            else f"{REPOSITORY}/{word}"
            if word.startswith("manifests/")
            else word
            for word in words[1:]
        ]
        printed = control_plane.kubectl(*words).stdout.strip()
        # The page for GPUs leaves out what the other one shows.
        assert is_shown(expected, printed) or (page == GPU_PAGE and not expected), command
