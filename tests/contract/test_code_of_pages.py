"""The Python on the pages for people who come from Kubeflow and from Python runs as it stands."""

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from planish.__main__ import main
from planish.records import layout
from planish.records.reports import BestPolicy
from planish.store.documents import write_json
from tests.golden.write_notebooks import NOTEBOOKS, notebook
from tests.unit.submit.kfp_server import Server

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:kfp.*")  # of every kfp.Client

DOCS = Path(__file__).resolve().parents[2] / "docs"
FEW = {
    "curate.max_operand_digits": 1,
    "curate.evaluation_size": 32,
    "sft.max_steps": 100,
    "sft.measure_after": 100,
    "sft.probe_prompts": 32,
    "rollout.prompts_per_iteration": 16,
}
"""Settings of a run of a few seconds whose policy is right now and then."""


def blocks(page: str, kind: str) -> list[str]:
    """Return the fenced blocks of a kind on a page; "" is the kind of commands."""
    text = (DOCS / page).read_text("utf-8")
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for found, block in fences if found == kind]


@pytest.fixture
def server():
    found = Server()
    yield found
    found.close()


@pytest.fixture
def followed(server, tmp_path, monkeypatch, capsys):
    """Follow the page for Kubeflow, with our address in place of its own; return its names."""
    monkeypatch.chdir(tmp_path)
    (command,) = blocks("kfp.md", "")
    words = shlex.split(command)
    assert (words[0], words[-2]) == ("planish", ">")
    assert main(words[1:-2]) == 0
    Path(words[-1]).write_text(capsys.readouterr().out)
    program = "\n".join(blocks("kfp.md", "python")).replace("http://localhost:8080", server.url)
    # kfp reads the source of a component from its file.
    Path("page.py").write_text(program)
    return runpy.run_path("page.py")


def test_the_own_dag_holds_the_run_and_the_step_behind_it_and_is_submitted(followed, server):
    (run,), (experiment,) = server.posted("runs"), server.posted("experiments")
    assert followed["run"].run_id in server.objects["runs"]
    assert (run["display_name"], experiment["display_name"]) == ("mine", "planish")
    assert run["service_account"] == "planish-runner"
    assert run["runtime_config"]["pipeline_root"] == "s3://planish/kfp"
    assert run["runtime_config"]["parameters"] == {"root": "s3://planish/mine", "least": 0.3}
    spec, platform = run["pipeline_spec"]["pipeline_spec"], run["pipeline_spec"]["platform_spec"]
    tasks = spec["root"]["dag"]["tasks"]
    assert tasks["accept"]["dependentTasks"] == ["post-train"]
    assert not tasks["accept"]["cachingOptions"].get("enableCache")
    (shipped, settings) = yaml.safe_load_all(Path("post-train.yaml").read_text())
    inner = spec["components"][tasks["post-train"]["componentRef"]["name"]]
    assert inner["dag"]["tasks"].keys() == shipped["root"]["dag"]["tasks"].keys()
    own = {"exec-accept"}
    executors = spec["deploymentSpec"]["executors"]
    assert executors.keys() - own == shipped["deploymentSpec"]["executors"].keys()
    images = {each["container"]["image"].rpartition("/")[0] for each in executors.values()}
    assert images == {"registry.example/team"}
    (pods, before) = (
        each["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
        for each in (platform, settings)
    )
    assert {name: pod for name, pod in pods.items() if name not in own} == before
    secret = pods["exec-accept"]["secretAsEnv"][0]
    assert secret in [
        {**each, "optional": secret["optional"]} for each in before["exec-prepare"]["secretAsEnv"]
    ]


def test_the_own_step_returns_the_best_policy_or_fails(followed, tmp_path):
    root, accept = tmp_path.as_uri(), followed["accept"].python_func
    best = BestPolicy(f"{layout.policy(root, 4)}#sha256={'0' * 64}", 4, 0.5, (0, 4))
    write_json(layout.best_policy(root), vars(best))
    assert accept(root=root, least=0.3) == best.pin
    with pytest.raises(ValueError, match=r"at least 0\.6, got 0\.5"):
        accept(root=root, least=0.6)


@pytest.mark.parametrize("name", sorted(NOTEBOOKS))
def test_a_notebook_is_its_page(name):
    """So that what runs the code of the page runs the cells of the notebook."""
    text = (DOCS.parent / "examples/notebooks" / name).read_text("utf-8")
    assert text == notebook(NOTEBOOKS[name])


@pytest.mark.long
def test_the_blocks_of_the_page_for_python_are_one_program(tmp_path):
    """A run of one iteration, its records, a loss, verdicts and checkpoints."""
    page = "\n".join(blocks("python.md", "python"))
    first = '{"train.learning_rate": 1e-3}'
    assert first in page
    (tmp_path / "page.py").write_text(page.replace(first, repr(FEW)))
    done = subprocess.run(
        [sys.executable, "page.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "FORCE_COLOR": "1"},  # as the kernel of a notebook has it
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\n") < 100, "a cell that nobody can read"
    *_, loss, exact, several, checkpoint = done.stdout.splitlines()
    assert "'approx_kl': " in loss
    assert (exact, several) == (r"1.0 \frac{3}{2}", "[0.0, 1.0]")
    assert checkpoint == "20 {'samples': 160} True"
