import re

import pytest
import torch

from planish.__main__ import main
from planish.show import doctor


@pytest.fixture
def no_s3(monkeypatch):
    for name in ("MINIO_ENDPOINT", "MINIO_ACCESS_KEY", "MINIO_SECRET_KEY"):
        monkeypatch.delenv(name, raising=False)


def states(findings):
    return {found.what: found.state for found in findings}


def test_packages_are_grouped_by_extra_and_missing_ones_named_with_the_remedy():
    findings = doctor.packages(
        [
            "numpy>=2",
            "no-such-base; python_version > '3'",
            'pytest>=8; extra == "dev"',
            'no-such-thing==1; extra == "rollout"',
            'planish[reward]; extra == "rollout"',
        ]
    )
    assert states(findings) == {
        "planish": "ok",
        "base packages": "wrong",
        "extra dev": "ok",
        "extra rollout": "absent",
    }
    details = {found.what: found.detail for found in findings}
    assert details["extra rollout"] == "missing no-such-thing: pip install 'planish[rollout]'"
    assert details["base packages"] == "missing no-such-base: pip install planish"
    assert details["extra dev"].startswith("pytest ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has an accelerator")
def test_a_driver_that_is_too_old_is_wrong_and_no_accelerator_is_fine(monkeypatch):
    assert states(doctor.devices())["accelerators"] == "absent"
    monkeypatch.setattr(doctor, "driver_fault", lambda: "the driver is old")
    assert doctor.devices()[1] == doctor.MachineFact("accelerators", "wrong", "the driver is old")


def test_a_package_of_another_version_is_wrong():
    found = doctor.packages(['pytest<2; extra == "train"', 'numpy>=2; extra == "train"'])[-1]
    assert (found.what, found.state) == ("extra train", "wrong")
    assert re.fullmatch(
        r"pytest [\d.]+ in place of <2: pip install 'planish\[train\]'", found.detail
    )


def test_tools_on_the_path_are_found_and_others_explained():
    findings = doctor.tools(lambda name: "/usr/bin/go" if name == "go" else None)
    assert [(f.what, f.state) for f in findings] == [
        ("go", "ok"),
        ("chromium", "absent"),
        ("docker", "absent"),
        ("kubectl", "absent"),
    ]
    assert findings[0].detail == "/usr/bin/go"


def test_without_settings_the_s3_server_is_absent_which_is_fine(no_s3, capsys):
    assert states(doctor.servers())["s3 server"] == "absent"
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for word in ("base packages", "extra train", "machine", "accelerators", "minio program"):
        assert word in printed


def test_a_server_that_does_not_answer_is_wrong_and_the_exit_code_says_so(monkeypatch, capsys):
    monkeypatch.setenv("MINIO_ENDPOINT", "127.0.0.1:1")
    monkeypatch.setenv("MINIO_ACCESS_KEY", "key")
    monkeypatch.setenv("MINIO_SECRET_KEY", "very-secret")
    found = doctor.servers()[0]
    assert (found.state, "connection refused" in found.detail) == ("wrong", True)
    assert main(["doctor"]) == 1
    assert "very-secret" not in capsys.readouterr().out


@pytest.mark.server
def test_a_server_that_takes_the_keys_is_ok_and_wrong_keys_are_wrong(minio, monkeypatch):
    assert doctor.servers()[0].detail == f"{minio.endpoint} answers and takes the keys"
    monkeypatch.setenv("MINIO_SECRET_KEY", "wrong")
    assert doctor.servers()[0].state == "wrong"
    monkeypatch.setenv("MINIO_SECURE", "1")
    assert "MINIO_SECURE=0" in doctor.servers()[0].detail
    assert doctor.servers()[0].state == "wrong"
