"""Start a tracking server of MLflow on a free port, from an environment of its own."""

from dataclasses import dataclass, field
from pathlib import Path

from tests.servers.program import REPOSITORY, Program, few_variables, free_port, require

BINARY = REPOSITORY / ".cache" / "mlflow" / "bin" / "mlflow"


def require_mlflow() -> None:
    """Skip the test on a machine that lacks the program."""
    require(BINARY, remedy="install it with `make servers`")


@dataclass
class MlflowServer:
    """A running server on a database in a folder."""

    folder: Path
    port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        self.program = Program(self.folder / "mlflow.log")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start (again) on the same data and port, and wait until it answers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.program.start(
            [
                *(BINARY, "server", "--host", "127.0.0.1", "--port", str(self.port)),
                *("--backend-store-uri", f"sqlite:///{self.folder / 'mlflow.db'}"),
                *("--artifacts-destination", str(self.folder / "artifacts"), "--workers", "1"),
            ],
            environment={
                **few_variables(self.folder),
                "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            },
        )
        self.program.wait_for(f"{self.url}/health")

    def end(self) -> None:
        """End the server and what it has started."""
        self.program.terminate(120.0)
