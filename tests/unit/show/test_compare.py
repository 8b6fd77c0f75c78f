"""`planish compare` shows what differs between runs, and refuses what it can not compare."""

import json
import re

import pytest
import torch

from planish.__main__ import main
from planish.records import layout
from planish.show import doctor
from planish.show.compare import CHARTS, HELD_OUT, SECONDS, default_names, points_of, read
from planish.store.documents import read_json, write_json
from tests.unit.stages.report.synthetic_run import Clock, build_run
from tests.unit.stages.report.test_report_page import HOSTILE, Elements


def make(root, settings=(), **run):
    """Write a run of one iteration, or as many as `run` says, with some settings changed."""
    build_run(root, **{"iterations": 1, **run})
    written = read_json(layout.run_file(root))
    for section, key, value in settings:
        written["config"].setdefault(section, {})[key] = value
    write_json(layout.run_file(root), written)
    return root


def compared(tmp_path, *arguments):
    """Return the page as its text, and its elements."""
    out = tmp_path / "new" / "page.html"
    assert main(["compare", *arguments, "--out", str(out)]) == 0
    html = out.read_text("utf-8")
    return html, Elements(html)


def section(html, name):
    """Return the cells of each row of the tables of a section."""
    text = re.search(rf'<section id="{name}">(.*?)</section>', html, re.DOTALL)[1]
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in text.split("<tr>")[1:]]
    return {row[0]: row[1:] for row in rows}


@pytest.mark.slow
def test_the_page_has_the_curves_the_outcomes_and_the_settings_that_differ(tmp_path, capsys):
    long = make(f"file://{tmp_path}/long", iterations=3)
    make(f"file://{tmp_path}/short", [("train", "learning_rate", 1e-4), ("model", "path", "x")])
    html, found = compared(tmp_path, long, f"{tmp_path}/short/", "--name", "long", "<i>&")
    assert section(html, "settings") == {
        "": ["long", "&lt;i&gt;&amp;"],
        "model.path": ["-", "&#34;x&#34;"],
        "train.learning_rate": ["0.0005", "0.0001"],
    }
    outcomes = section(html, "outcomes")
    assert outcomes["accuracy after"] == ["48.3 ± 0.6 %", "48.3 ± 0.6 %"]
    assert outcomes["iterations"] == ["3", "1"]
    assert outcomes["time in sft"] == ["31 s", "31 s"]
    assert re.findall(r'panel-head"><h3>([^<]+)', html) == [panel.title for panel in CHARTS]
    assert "long, held-out, after: 48 % +- 0.6 %" in html
    values = section(html, "curves")
    assert values["iteration"] == ["long", "&lt;i&gt;&amp;"]
    assert [bool(cell) for cell in values["2"]] == [True, False]
    assert not {"script", "link", "img", "a", "i"} & set(found.tags)
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == f"{tmp_path}/new/page.html"
    assert re.search(r"accuracy after +│ 48.3 ± 0.6 % +│ 48.3 ± 0.6 %", printed)


@pytest.mark.slow
def test_runs_without_common_measurements_and_hostile_text_are_shown(tmp_path):
    plain = make(f"file://{tmp_path}/plain")
    config = {HOSTILE: {HOSTILE: HOSTILE}}
    write_json(layout.run_file(f"file://{tmp_path}/new"), {"config": config, "preset": HOSTILE})
    html, found = compared(tmp_path, plain, f"{tmp_path}/new", "--name", "plain", HOSTILE)
    assert not {"script", "img", "svg"} & set(found.tags)
    assert not any(name.startswith("on") for name, _ in found.attributes)
    assert "\x00" not in html
    assert "\u202e" not in html
    assert json.dumps(HOSTILE) in found.text
    assert section(html, "outcomes")["accuracy before"] == ["27.8 ± 0.6 %", "-"]


def test_a_run_that_goes_on_and_was_not_evaluated_has_the_points_that_it_has(tmp_path):
    root = make(f"file://{tmp_path}/run", iterations=2, evaluate=False)
    Clock(root).log("rollout", 1.0, iteration=3)
    facts = read(root)
    assert points_of(facts, HELD_OUT) == {}
    assert [*points_of(facts, SECONDS)] == [1, 2]
    assert {len(points_of(facts, panel)) for panel in CHARTS[1:]} == {2}


def test_names_are_the_last_parts_that_differ():
    assert default_names(["file:///a/x", "file:///b/x", "s3://b/y"]) == ["a/x", "b/x", "b/y"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a"], "roots must be 2 to 12 different ones, got file://"),
        (["a", "./a/"], "roots must be 2 to 12 different ones, got file://"),
        (["a", "b"], "must be the root of a run, got no run.json there"),
        (["a", "b", "--name", "x"], "`--name` must name each of 2 roots differently, got ['x']"),
        (["a", "b", "--name", "x", "x"], "`--name` must name each of 2 roots differently"),
    ],
)
def test_what_can_not_be_compared_is_refused_in_one_line(
    tmp_path, monkeypatch, capsys, words, said
):
    monkeypatch.chdir(tmp_path)
    write_json(layout.run_file(f"file://{tmp_path}/a"), {"config": {}})
    assert main(["compare", *words]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert said in printed.err
    assert not (tmp_path / "compare.html").exists()


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
