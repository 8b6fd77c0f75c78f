from pathlib import Path

import numpy as np
import pytest

from planish.stages.curate.config import CurateConfig
from planish.stages.curate.gsm8k import is_gsm8k, parse_row, problem_row, read_step
from planish.stages.curate.problem import CurationLedger
from planish.stages.curate.records import DataRow
from planish.stages.curate.select import curate
from planish.stages.curate.stage import read_tables

GSM8K = Path(__file__).parents[5] / "shared/data/gsm8k/train.jsonl"
needs_file = pytest.mark.skipif(not GSM8K.exists(), reason="the GSM8K file is not here")

ROW = {
    "question": "How many?",
    "answer": "She has 48/2 = <<48/2=24>>24.\nThen 48+24 = <<48+24=72>>72.\n#### 1,072",
}


REJECTED = {
    "division": ["48/2=24"],
    "result_not_an_integer": ["12/60=0.2", "8*18=144.00", "48+24=\u0667\u0662"],
    "operand_not_an_integer": ["0.2*50=10", ".5*4=2"],
    "more_than_two_operands": ["100-50-30-15=5", "2*(3+4)=14"],
    "no_operator": ["72=72"],
    "signs_or_parentheses": ["-3+5=2"],
    "not_arithmetic": ["560//10=56", "x*2=4"],
    "negative_result": ["3-5=-2"],
    "no_factor_of_one_digit": ["12*12=144"],
    "operand_over_4_digits": ["10000+1=10001", "9" * 5000 + "+1=1"],
    "result_is_wrong": ["48+24=73"],
    "no_equals_sign": ["48+24", ""],
}


def test_each_rejected_step_has_its_reason():
    found = {reason: {read_step(step, 4) for step in REJECTED[reason]} for reason in REJECTED}
    assert found == {reason: {reason} for reason in REJECTED}
    assert read_step("48 + 24 = 72", 4).prompt == "48+24="


def test_a_row_is_taken_apart():
    question, solution, final = parse_row(ROW)
    assert (question, final) == ("How many?", "1,072")
    assert solution.endswith("<<48+24=72>>72.")
    plain = problem_row(ROW)
    assert plain["answer"] == "1072"
    assert plain["trace"].endswith("Then 48+24 = 72.\nAnswer: 1072")
    assert is_gsm8k([DataRow(ROW, "line 1")])
    for other in ({}, {"question": "q"}, {"question": "q", "answer": "5"}, {"question": 1}):
        assert parse_row(other) is None
        assert problem_row(other) is None
        assert not is_gsm8k([DataRow(other, "line 1")])


def run(**options):
    config = CurateConfig(dataset=str(GSM8K), **options)
    ledger = CurationLedger()
    curated = curate(config, 0, read_tables(config, ledger), ledger)
    return curated, {f.name: f for f in ledger.filters}


@needs_file
def test_all_problems_and_steps_of_the_real_file_are_accounted_for():
    curated, filters = run(gsm8k_as="steps", evaluation_size=10_000)
    problems, steps = filters["problems with steps"], filters["column arithmetic"]
    different = filters["different expressions"]
    assert (problems.num_in, problems.reasons) == (7473, {"no_steps": 95})
    assert steps.num_in == 23716
    assert steps.num_in - steps.reasons["result_not_an_integer"] == 22818
    assert steps.reasons == {
        "division": 3166,
        "more_than_two_operands": 2862,
        "operand_not_an_integer": 1362,
        "no_factor_of_one_digit": 952,
        "result_not_an_integer": 898,
        "no_operator": 344,
        "operand_over_4_digits": 283,
        "signs_or_parentheses": 11,
        "not_arithmetic": 2,
    }
    assert steps.num_out + sum(steps.reasons.values()) == 23716
    assert (different.num_out, different.reasons) == (4763, {"duplicate": 9073})
    assert (len(curated.train), len(curated.evaluation)) == (4151, 612)
    lengths = [len(p.trace) + 1 for p in [*curated.train, *curated.evaluation]]
    assert np.percentile(lengths, [10, 50, 90, 100]).tolist() == [19, 22, 37, 41]


@needs_file
def test_all_word_problems_of_the_real_file_have_integer_answers():
    curated, filters = run(near_duplicate_threshold=1.0)
    assert filters["readable problems"].num_out == 7473
    assert filters["verifiable answer"].num_out == 7473
    assert {p.verifier for p in curated.train} == {"integer"}
    assert len(curated.traced) == len(curated.train), "every worked solution ends in its answer"
    assert len(curated.evaluation) == 512
