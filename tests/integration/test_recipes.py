"""Every command of the recipes in `examples/`, as a machine without GPUs and network can run it.

Plan and submission are those of the page. The run has the page's preset and file, a model that was
made for the test and knows how answers look, rows in the form of the published data, and lengths of
a few tokens.
"""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from planish import store
from planish.__main__ import main, parser
from planish.base.config import parse_section
from planish.records import layout
from planish.stages.curate.columns import read_problems
from planish.stages.curate.config import CurateConfig
from planish.stages.curate.records import DataRow
from planish.stages.prepare.settings import build_config
from planish.store.documents import read_json
from tests.integration import programs
from tests.integration.own_model import make_model, teach

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RECIPES = ("gsm8k", "math", "dapo_math", "lora", "code", "moe", "long_responses")
pytestmark = pytest.mark.slow

FRAME = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes).\n\n{}\n\nRemember to put your answer on its own "
    'line after "Answer:".'
)
ANSWER = "#### {0}\n\\boxed{{{0}}}\nAnswer: {0}"
CODE = "```python\nf = lambda x: x + {0}\n```"
"""What models answer to everything: right for one row in two."""
SMALL = (
    "engine.name=transformers rollout.prompts_per_iteration=4 rollout.group_size=4 "
    "rollout.max_response_tokens=64 rollout.max_prompt_tokens=384 rollout.max_rows=16 "
    "rollout.max_generation_rounds=1 rollout.starvation_policy=relax "
    "reward.max_response_tokens=64 train.rollouts_per_minibatch=8 train.tokens_per_microbatch=2048 "
    "curate.evaluation_size=8 evaluate.num_samples=2 evaluate.pass_at=[1,2] evaluate.every=0 "
    "evaluate.max_response_tokens=64"
)
OVERLONG = " reward.overlong_buffer_tokens=8 reward.keep_uniform_groups=true"
MORE = {
    "gsm8k": OVERLONG,
    "math": OVERLONG,
    "dapo_math": OVERLONG,
    "lora": f"{OVERLONG} train.warmup_iterations=0",
    "code": OVERLONG,
    "moe": f"{OVERLONG} train.expert_parallel=1 train.pipeline_parallel=1",
    "long_responses": " algorithm.window_tokens=16 rollout.window_tokens=16 "
    "critic.pretrain_iterations=0 critic.warmup_iterations=0",
}


def problem(number):
    """Return the text of one of many problems, and its answer, 4 or 5."""
    return f"Ann has {number} eggs. How many are left in basket {number % 7}?", 4 + number % 2


def gsm8k(number):
    text, answer = problem(number)
    return {"question": text, "answer": f"So many: <<1+3={answer}>>{answer}.\n#### {answer}"}


def math(number):
    text, answer = problem(number)
    solution = f"It is $\\boxed{{{answer}}}$."
    return {"problem": text, "level": "Level 2", "type": "Algebra", "solution": solution}


def math_500(number):
    return {**math(number), "answer": str(problem(number)[1]), "subject": "Algebra"}


def aime(number):
    text, answer = problem(number)
    return {"problem": text, "answer": f"{answer}"}


def dapo(number):
    text, answer = problem(number)
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": FRAME.format(text)}],
        "reward_model": {"ground_truth": str(answer), "style": "rule-lighteval/MATH_v2"},
    }


def mbpp(number):
    _, answer = problem(number)
    tests = [f"assert f({number}) == {number + answer}", f"assert f(0) == {answer}"]
    return {
        "task_id": number,
        "text": f"Write `f` for case {number}.",
        "test_list": tests,
        "test_setup_code": "",
    }


ROWS = {
    "gsm8k": gsm8k,
    "math": math,
    "dapo_math": dapo,
    "lora": gsm8k,
    "moe": dapo,
    "long_responses": dapo,
}
SETS = {"gsm8k": gsm8k, "math-500": math_500, "aime-2024": aime, "aime-2025": aime}


def write(path, form, numbers):
    path.write_text("".join(json.dumps(form(number)) + "\n" for number in numbers))
    return path


def commands(recipe):
    """Return the words of every `planish` and `python` line in the blocks of a page."""
    page = (EXAMPLES / recipe / "README.md").read_text("utf-8")
    lines = "\n".join(re.findall(r"```\n(.*?)```", page, re.DOTALL)).splitlines()
    return [shlex.split(line) for line in lines if line]


def settings(recipe):
    """Return preset and file of the first command that starts a run, with its other overrides."""
    for words in commands(recipe):
        if words[:2] == ["planish", "submit"]:
            given = dict(word.split("=", 1) for word in words if re.match(r"\w+=", word))
            return given["preset"], given["config"]
        if words[:2] == ["planish", "run"]:
            asked = parser().parse_args(words[1:])
            return asked.preset, asked.config
    raise AssertionError(f"{recipe} starts no run")


@pytest.mark.parametrize("recipe", [*RECIPES, "kubeflow"])
def test_the_commands_of_the_page_are_taken(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(EXAMPLES.parent)
    done = []
    for words in commands(recipe):
        if words[:2] == ["planish", "plan"]:
            # Sizes of other models than Qwen2.5 are in their files.
            more = [f"model.path={moe_folder(tmp_path)}"] if recipe == "moe" else []
            assert main([*words[1:], *more]) == 0, capsys.readouterr().err
            assert "fits" in capsys.readouterr().out
        elif words[0] == "planish" and words[1] in ("submit", "upload"):
            assert main([*words[1:], "--dry-run"]) == 0, capsys.readouterr().err
        elif words[:2] == ["planish", "run"]:
            parser().parse_args(words[1:])
        else:
            assert words[0] == "python"
        done.append(words[1])
    assert {"submit", "run", "upload"} & set(done)


def moe_folder(tmp_path):
    """Write the sizes of Qwen3-30B-A3B."""
    sizes = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
    }
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    return tmp_path


def made_model(recipe, data, config, folder):
    """Write a model that answers the prompts of a run with one of two numbers."""
    kind = "Qwen3Moe" if recipe == "moe" else "Qwen3"
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    sizes = experts if recipe == "moe" else {}
    make_model(kind, folder, max_position_embeddings=512, **sizes)
    rows = [DataRow(json.loads(line), "") for line in data.read_text().splitlines()[:4]]
    problems, _ = read_problems(
        parse_section(CurateConfig, config["curate"], section="curate"), rows
    )
    asked = [problem.messages[0]["content"] for problem in problems]
    answer = CODE if recipe == "code" else ANSWER
    teach(folder, [(text, answer.format(n)) for text in asked for n in (4, 5)], steps=60)
    return folder


def data_of(recipe, folder):
    """Write rows in the form of the recipe's data set; returns the file."""
    if recipe != "code":
        return write(folder / "rows.jsonl", ROWS[recipe], range(48))
    source = folder / "mbpp"
    source.mkdir()
    for place, part in enumerate(("train", "validation", "test")):
        write(source / f"{part}.jsonl", mbpp, range(16 * place, 16 * place + 16))
    (prepare,) = (words for words in commands("code") if words[0] == "python")
    target = folder / prepare[2]
    done = subprocess.run(
        [sys.executable, EXAMPLES.parent / prepare[1], target, source],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "48 tasks" in done.stdout
    return target


@pytest.mark.long
@pytest.mark.parametrize(
    "recipe",
    [
        *("gsm8k", "code", "moe", "long_responses"),
        *(pytest.param(name, marks=pytest.mark.full) for name in ("math", "dapo_math", "lora")),
    ],
)
def test_the_recipe_ends_well_and_its_policy_does_not_get_worse(recipe, tmp_path, file_root):
    preset, config = settings(recipe)
    data = data_of(recipe, tmp_path)
    path = str(EXAMPLES.parent / config)
    tables = build_config(preset=preset, config=path, overrides="", model="", dataset="", seed=0)
    model = made_model(recipe, data, tables, tmp_path / "model")
    named = [table["name"] for table in tables["curate"].get("evaluation_sets", [])]
    files = {name: write(tmp_path / f"{name}.jsonl", SETS[name], range(100, 104)) for name in named}
    sets = ", ".join(f'{{name = "{name}", dataset = "{file}"}}' for name, file in files.items())
    more = f"{SMALL}{MORE[recipe]} {shlex.quote(f'curate.evaluation_sets=[{sets}]')}"
    code, told = programs.run(
        "pipelines.local",
        *("--root", file_root, "--preset", preset, "--config", path),
        *("--model", str(model), "--dataset", str(data), "--iterations", "1", "--shards", "1"),
        *("--overrides", more),
    )
    assert code == 0, "\n".join(line for line in told.splitlines() if "ERROR" in line)
    summary = read_json(f"{layout.report(file_root)}/summary.json")
    assert summary["state"] == "SUCCEEDED"
    noise = summary["accuracy_before_standard_error"] + summary["accuracy_after_standard_error"]
    assert summary["accuracy_before"] > 0
    assert summary["accuracy_after"] >= summary["accuracy_before"] - 2 * noise
    assert set(summary["evaluation_sets"]) == set(named)
    assert store.exists(f"{layout.report(file_root)}/report.html")
