"""Rows of published data sets: which verifier they get, and how responses to them are graded."""

import pytest

from planish.stages.curate.columns import read_problems
from planish.stages.curate.config import CurateConfig
from planish.stages.curate.inspect import form_warnings
from planish.stages.curate.records import DataRow
from planish.verifiers import asked_form, verify

TRAIN = 'Solve the problem step by step. The last line should be "Answer: $Answer".\n\n1+17?\n\n'
BOX = "Please reason step by step, and put your final answer within \\boxed{}."
TAGS = "Think in <think> </think>, then give the answer in <answer> </answer>."
HASH = 'Two and sixteen eggs? Think step by step and output the final answer after "####".'
FORMS = {
    "DAPO": (
        {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": TRAIN}],
            "reward_model": {"ground_truth": "18", "style": "rule"},
        },
        "integer",
        ["so\n\nAnswer: 18", "Answer: $18$", "Answer: \\boxed{18}", "**Answer:** 18."],
        ["Answer: 19", "\\boxed{18}\nAnswer: 19", "Answer: 18 or 19", "I do not know"],
    ),
    "GSM8K of verl": (
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": HASH}],
            "reward_model": {"ground_truth": "1250", "style": "rule"},
        },
        "integer/hash",
        ["2+16\n#### 1250", "#### 1,250", "#### $1250.", "The answer is 1250."],
        ["#### 1251", "#### 1250\n#### 1251", "Answer: 1250\n#### 5", "it is 1251."],
    ),
    "GSM8K": (
        {"question": "Two and sixteen eggs?", "answer": "It is 2+16=<<2+16=18>>18.\n#### 18"},
        "integer",
        ["Answer: 18", "2+16=18\n#### 18", "so it is 18."],
        ["Answer: 19", "2+16=18, twice 36\n#### 36", "so it is 19."],
    ),
    "OpenR1": (
        {"prompt": [{"role": "user", "content": f"Find x. {BOX}"}], "answer": "\\frac{3}{4}"},
        "math/box",
        ["<think>\\boxed{1}</think> It is $\\boxed{\\frac{3}{4}}$.", "$$\\boxed{x = 0.75}$$"],
        ["\\boxed{\\frac{3}{5}}", "\\boxed{\\frac{3}{4}} or \\boxed{", "Answer: \\frac{4}{3}"],
    ),
    "NuminaMath": (
        {
            "prompt": [{"role": "system", "content": BOX}, {"role": "user", "content": "Solve."}],
            "answer": "x=1, y=2",
        },
        "math/box",
        ["\\boxed{x = 1, y = 2}", "So $\\boxed{x=1,\\ y=2}$."],
        ["\\boxed{x=9, y=2}", "\\boxed{2}", "\\boxed{x=1}"],
    ),
    "OlympiadBench": (
        {"prompt": [{"role": "user", "content": f"How long? {BOX}"}], "final_answer": "$12$"},
        "integer/box",
        ["\\boxed{12 \\text{ cm}}", "so $l = \\boxed{12}\\ \\text{cm}$", "\\boxed{12~cm}"],
        ["\\boxed{-12}", "\\boxed{l^2 = 12}", "\\boxed{13 \\text{ cm}}"],
    ),
    "tags of R1": (
        {"prompt": [{"role": "user", "content": f"1+17? {TAGS}"}], "answer": 18},
        "integer/tags",
        ["<think>1</think><answer>18</answer>", "<answer> $\\boxed{18}$ </answer>"],
        ["<answer>19</answer>", "<answer>18</answer> <answer>19", "<answer>18 or 19</answer>"],
    ),
}


def problem_of(fields, **settings):
    return read_problems(CurateConfig(**settings), [DataRow(fields, "line 1")])[0][0]


@pytest.mark.parametrize("name", FORMS)
def test_answers_to_a_published_data_form_are_graded_as_published(name):
    fields, verifier, right, wrong = FORMS[name]
    problem = problem_of(fields)
    assert problem.verifier == verifier
    assert form_warnings("data", [problem]) == []
    graded = {text: verify(verifier, text, problem.answer).accuracy for text in (*right, *wrong)}
    assert graded == dict.fromkeys(right, 1.0) | dict.fromkeys(wrong, 0.0)


def test_the_last_form_that_a_prompt_names_counts_and_verls_source_before_it():
    assert asked_form("Work. Write `Answer: <answer>`.") == "line"
    assert asked_form("#### Problem\n1+1?") is None
    assert asked_form(f"{TAGS} {BOX}") == "box"
    assert asked_form(BOX, "openai/gsm8k") == "hash"
    assert asked_form(BOX, "mine") == "box"


def test_another_form_than_the_verifier_reads_is_warned_of():
    fields = {"prompt": [{"role": "user", "content": BOX}], "answer": "18"}
    assert form_warnings("data", [problem_of(fields)]) == []
    told = form_warnings("data", [problem_of(fields, verifier="exact")] * 2)
    assert told == [
        "2 of 2 prompts of the data ask for the answer as `\\boxed{}`, but the verifier `exact` "
        "compares the whole response; change the prompts or `curate.verifier`"
    ]
    (told,) = form_warnings("data", [problem_of(fields | {"data_source": "openai/gsm8k"})])
    assert "but the verifier `integer/hash` looks for `####` first" in told
    (told,) = form_warnings("data", [problem_of(fields, verifier="integer/tags")])
    assert "looks for `<answer>` first" in told
