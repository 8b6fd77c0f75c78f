"""`planish evaluate`: a model on evaluation sets without a run, resumed by the same command."""

import json
import re

import pytest

from planish import store
from planish.__main__ import main
from planish.engines.requests import Output
from planish.models.tokens import load_tokenizer
from planish.records import layout
from planish.records.io import read_manifest
from planish.records.reports import EvalReport, read_report
from planish.records.rollouts import FinishReason
from planish.stages.curate import records
from planish.stages.evaluate.stage import sampling_of
from tests.integration.own_model import make_model

ROWS = {
    "openai/gsm8k": [
        {"question": "Two and sixteen eggs?", "answer": "It is 2+16=<<2+16=18>>18.\n#### 18"},
        {"question": "Half of eight eggs?", "answer": "It is 8/2=<<8/2=4>>4.\n#### 4"},
    ],
    "HuggingFaceH4/MATH-500": [
        {
            "problem": "Find three quarters.",
            "solution": "It is $\\boxed{\\frac{3}{4}}$.",
            "answer": "\\frac{3}{4}",
            "subject": "Prealgebra",
            "level": 1,
            "unique_id": "test/prealgebra/1.json",
        }
    ],
}
RESPONSES = {"sixteen": "18", "eight": "4", "quarters": "0.75"}
MARKS = {"sixteen": "1100", "eight": "0001", "quarters": "0000"}


class ScriptedEngine:
    """Answers sample k of a prompt right where `MARKS` has a 1, in a box."""

    opened = 0

    def __init__(self, folder):
        ScriptedEngine.opened += 1
        self.backend = load_tokenizer(folder).backend

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def generate(self, requests):
        outputs = []
        for request in requests:
            prompt = self.backend.decode(list(request.prompt_ids))
            (word,) = (word for word in MARKS if word in prompt)
            right = MARKS[word][int(request.request_id[-3:])] == "1"
            text = f"so \\boxed{{{RESPONSES[word] if right else 7}}}"
            tokens = list(self.backend.encode(text, add_special_tokens=False))
            count, reason = len(tokens), FinishReason.STOP if right else FinishReason.LENGTH
            outputs.append(Output(request.request_id, tokens, [-1.0] * count, [0] * count, reason))
        return outputs


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model("Qwen2", tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def scripted(model, monkeypatch):
    monkeypatch.setattr(records, "read_hub", lambda source, **_: ROWS[source.place])
    monkeypatch.setattr("planish.engines.open_engine", lambda *_, **__: ScriptedEngine(model))
    monkeypatch.setattr(ScriptedEngine, "opened", 0)


def rows_of(text):
    """Return the cells of each row of the last table that was printed."""
    lines = [line for line in text.splitlines() if re.search(r"\d %", line)]
    return [[cell.strip() for cell in line.strip(" │").split("│")] for line in lines]


def test_two_known_sets_have_the_scores_of_the_hand_and_the_same_command_resumes(
    model, tmp_path, scripted, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    command = ["evaluate", str(model), "gsm8k", "math-500", "-n", "4"]
    command += ["--max-response-tokens", "32", "-o", "evaluate.num_resamples=20"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    root = re.search(r"root (file://\S+/evaluations/tiny-[0-9a-f]{8})\n", printed)[1]
    gsm8k, math = (
        read_report(EvalReport, f"{layout.evaluation(root, 0, name)}/report.json").scalars
        for name in ("gsm8k", "math-500")
    )
    # Two and one of four samples are right; pass@4 asks for one.
    assert gsm8k["accuracy"] == pytest.approx((2 / 4 + 1 / 4) / 2)
    assert (gsm8k["pass@4"], gsm8k["greedy"], math["accuracy"]) == (1.0, 0.5, 0.0)
    # Sample variances 1/3 and 1/4.
    assert gsm8k["accuracy_standard_error"] == pytest.approx(((1 / 3 + 1 / 4) / 4) ** 0.5 / 2)
    assert [head in printed for head in ("avg@4", "pass@4", "greedy", "cut off", "pass@8")] == [
        True, True, True, True, False,
    ]  # fmt: skip
    first, second = rows_of(printed)
    assert first[:6] == ["gsm8k", "2", "37.5 +- 19.1 %", "100.0 %", "50.0 %", "62.5 %"]
    assert second[:3] == ["math-500", "1", "0.0 +- 0.0 %"]
    policy = read_manifest(layout.policy(root, 0)).attributes
    assert (policy["metrics"], policy["dtype"]) == ({"imported": 1.0}, "bfloat16")
    assert main(command) == 0
    assert ScriptedEngine.opened == 1
    assert {row[-1] for row in rows_of(capsys.readouterr().out)} == {"done before"}
    assert main(["show", root]) == 0
    shown = capsys.readouterr().out
    assert "evals/gsm8k/00000/report.json" in shown
    assert "prompts/sets/math-500" in shown


def test_a_policy_of_a_run_has_the_scores_of_the_model_that_it_was_imported_from(
    model, tmp_path, capsys
):
    data = tmp_path / "mine.jsonl"
    data.write_text("".join(json.dumps({"task": f"{a}+1=", "n": a + 1}) + "\n" for a in range(3)))
    options = [str(data), "-n", "2", "--max-response-tokens", "4", "--temperature", "0.9"]
    options += ["--dataset-map", "prompt=task,answer=n", "--prompt-suffix", " In a \\boxed{}."]
    roots = [f"file://{tmp_path}/{name}" for name in ("model", "policy")]
    assert main(["evaluate", str(model), *options, "--out", roots[0]]) == 0
    pin = read_manifest(layout.policy(roots[0], 0)).ref(layout.policy(roots[0], 0)).pin()
    assert main(["evaluate", pin, *options, "--out", roots[1]]) == 0
    reports = [
        read_report(EvalReport, f"{layout.evaluation(root, 0, 'mine')}/report.json")
        for root in roots
    ]
    assert reports[0].scalars == reports[1].scalars
    assert reports[0].scalars["num_generated_tokens"] > 0
    assert reports[0].attributes["conditions"]["temperature"] == 0.9
    assert {report.attributes["conditions"]["top_p"] for report in reports} == {1.0}
    assert "policies" not in {path.name for path in (tmp_path / "policy").iterdir()}
    capsys.readouterr()
    assert main(["evaluate", str(model), *options, "-n", "3", "--out", roots[0]]) == 2
    assert "the configuration must equal that of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "evaluate", "expected"),
    [
        ("{root}/policies/00003", {"temperature": 0.6, "top_p": 0.7}, (0.6, 0.7)),
        ("{root}/policies/best-of-all", {"top_p": 0.95}, (1.0, 0.95)),
        ("{root}/policies/00003", None, (1.0, 1.0)),
        ("{root}/exports/00003", {"top_p": 0.7}, (1.0, 1.0)),
        ("file:///nowhere/policies/00003", {"top_p": 0.7}, (1.0, 1.0)),
        ("owner/policies/name", {}, (1.0, 1.0)),
        ("Qwen/Qwen2.5-0.5B-Instruct", {}, (1.0, 1.0)),
    ],
)
def test_a_model_is_sampled_as_its_run_measures_unless_something_else_is_asked(
    file_root, model, evaluate, expected
):
    config = {} if evaluate is None else {"evaluate": evaluate}
    store.write(layout.run_file(file_root), json.dumps({"config": config}).encode())
    assert tuple(sampling_of(model.format(root=file_root)).values()) == expected


def test_a_model_that_changed_in_its_folder_is_measured_again(tmp_path, scripted, capsys):
    folder = make_model("Qwen2", tmp_path / "changing")
    copy = tmp_path / "copy.jsonl"
    copy.write_text("".join(json.dumps(row) + "\n" for row in ROWS["openai/gsm8k"]))
    command = ["evaluate", str(folder), f"gsm8k={copy}", "-n", "4", "--max-response-tokens", "32"]
    command += ["--out", str(tmp_path / "out")]
    assert main(command) == 0
    make_model("Qwen2", folder, seed=1)
    assert main(command) == 0
    assert ScriptedEngine.opened == 2
    first, second = rows_of(capsys.readouterr().out)
    assert first[0] == second[0] == "gsm8k"
    assert "done before" not in (first[-1], second[-1])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (["math500"], "must be one of aime-2024, aime-2025, math-500, gsm8k, a file, or"),
        (["none.jsonl"], "`curate.evaluation_sets.dataset` must be a path"),
        (["gsm8k", "-n", "0"], "`evaluate.num_samples`: Input should be greater than or equal"),
        (["gsm8k", "--max-response-tokens", "999"], "`evaluate.max_response_tokens`"),
        (["gsm8k", "--verifier", "nobody"], "nobody"),
        (["gsm8k", "-o", "evaluate.top_q=1"], "did you mean `top_p`?"),
    ],
)
def test_what_can_not_be_measured_is_told_in_one_line_and_leaves_nothing(
    model, tmp_path, scripted, monkeypatch, capsys, data, words
):
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", str(model), *data]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("planish: ")
    assert words in line
    assert not list(tmp_path.iterdir())
