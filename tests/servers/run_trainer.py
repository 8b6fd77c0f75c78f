"""Start the controllers of Kubeflow Trainer and of JobSet beside a control plane of the tests.

Their admission webhooks are not registered: the runtime of `manifests/trainer` says everything that
those would fill in.
"""

import json
import shutil
import time

from tests.servers.program import BIN, Program, few_variables, free_port, require
from tests.servers.run_control_plane import ControlPlane

CONFIGURATIONS = {
    "jobset": {
        "apiVersion": "config.jobset.x-k8s.io/v1alpha1",
        "internalCertManagement": {"enable": False},
    },
    "trainer": {
        "apiVersion": "config.trainer.kubeflow.org/v1alpha1",
        "certManagement": {"enable": False},
    },
}


def start_trainer(plane: ControlPlane) -> None:
    """Install what both controllers know and start them; they end with the control plane."""
    require(BIN / "jobset", BIN / "trainer", remedy="tests/servers/build.sh jobset trainer")
    for name in CONFIGURATIONS:
        plane.kubectl("create", "-f", str(BIN / f"{name}.yaml"))
    plane.kubectl("wait", "--for=condition=established", "crd", "--all", "--timeout=60s")
    # A controller ends where the API server does not serve yet what it has just been told.
    kinds = "trainjobs,trainingruntimes,clustertrainingruntimes,jobsets"
    while plane.kubectl("get", kinds, check=False).returncode:
        time.sleep(0.2)
    for name, settings in CONFIGURATIONS.items():
        folder = plane.folder / name
        certificates = folder / "k8s-webhook-server" / "serving-certs"
        certificates.mkdir(parents=True)
        for source, target in (("apiserver.crt", "tls.crt"), ("apiserver.key", "tls.key")):
            shutil.copy(plane.folder / "certificates" / source, certificates / target)
        path = folder / "config.json"
        general = {
            "kind": "Configuration",
            "leaderElection": {"leaderElect": False},
            "webhook": {"port": free_port(), "host": "127.0.0.1"},
            "metrics": {"bindAddress": "0"},
            "health": {"healthProbeBindAddress": "0"},
        }
        path.write_text(json.dumps({**general, **settings}))
        program = Program(plane.folder / f"{name}.log")
        plane.programs.append(program)
        environment = {**few_variables(plane.folder), "TMPDIR": str(folder)}
        program.start(
            [BIN / name, f"--config={path}", f"--kubeconfig={plane.kubeconfig}"],
            environment=environment,
        )
