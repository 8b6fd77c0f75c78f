"""What the page for clusters types is what a real API server answers, line by line."""

from __future__ import annotations

import pytest

from tests.contract.test_quickstart_page import blocks
from tests.servers.program import REPOSITORY

pytestmark = pytest.mark.server

NEEDS_NODES = ("wait", "port-forward")
"""Verbs that a control plane without nodes cannot do."""


def test_each_command_of_kubectl_prints_what_stands_below_it(control_plane):
    control_plane.kubectl("create", "namespace", "kubeflow", check=False)
    for overlay in ("kfp-single-user", "local"):
        folder = REPOSITORY / "manifests" / "overlays" / overlay
        control_plane.kubectl("delete", "-k", str(folder), "--ignore-not-found", check=False)
    control_plane.kubectl("-n", "kubeflow", "delete", "configmap", "kfp-launcher", check=False)
    settings = "--from-literal=defaultPipelineRoot=minio://mlpipeline/v2"
    control_plane.kubectl("-n", "kubeflow", "create", "configmap", "kfp-launcher", settings)
    for command, expected in blocks():
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
        assert control_plane.kubectl(*words).stdout.strip() == expected, command
