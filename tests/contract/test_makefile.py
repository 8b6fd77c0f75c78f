"""What `make` hands on to the programs that install packages."""

import os
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
TOLD = ("PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")


def installing(variables):
    """Return the commands by which `make` would install packages."""
    kept = {name: value for name, value in os.environ.items() if name not in TOLD}
    targets = (".venv/.installed", ".venv-engines/.installed", "servers")
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", *targets],
        cwd=REPOSITORY,
        env={**kept, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    return [line for line in lines if "pip install" in line or "python.sh" in line]


@pytest.mark.parametrize("name", TOLD)
def test_the_certificates_that_pip_is_told_of_reach_every_installation(name):
    """uv reads `SSL_CERT_FILE` alone, pip all but that."""
    bundle = "/etc/a company/ca.pem"
    commands = installing({name: bundle})
    assert len(commands) == 4
    for command in commands:
        assert command.startswith(f"SSL_CERT_FILE='{bundle}' PIP_CERT='{bundle}' "), command


def test_without_certificates_installations_are_as_they_were():
    assert not [command for command in installing({}) if "CERT" in command]
