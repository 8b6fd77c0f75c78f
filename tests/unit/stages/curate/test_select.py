import json
import random

import numpy as np
import pytest
from markdown_it import MarkdownIt

from planish.base.config import parse_section
from planish.base.errors import ConfigError
from planish.stages.curate.columns import read_problems, with_function_columns
from planish.stages.curate.config import CurateConfig
from planish.stages.curate.dedup import (
    SHINGLE_WORDS,
    jaccard,
    ngrams,
    remove_contaminated,
    remove_duplicates,
    remove_near_duplicates,
)
from planish.stages.curate.filters import (
    choose,
    has_good_trace,
    is_held_out,
    remove_long,
    remove_outside_band,
    remove_unverifiable,
    split,
)
from planish.stages.curate.pass_rate import prompt_set
from planish.stages.curate.problem import CurationLedger, Problem, words
from planish.stages.curate.records import DataRow, DataTable
from planish.stages.curate.report import curation_metrics, curation_report, drop_warnings
from planish.stages.curate.select import curate


def problem(question, answer="2", verifier="integer", **facts):
    facts = {"origin": question[:20], **facts}
    return Problem(
        question, [{"role": "user", "content": question}], answer, verifier, "s", **facts
    )


def rows(*fields):
    return [DataRow(dict(f), f"line {n}") for n, f in enumerate(fields, 1)]


def select(config, *fields, pass_rates=None, held=()):
    tables = [DataTable(rows(*fields), "0" * 64)] if fields else []
    tables += [DataTable(rows(*held), "1" * 64)] if held else []
    return curate(config, 0, tables, CurationLedger(), pass_rates)


def test_the_split_depends_on_the_problem_alone():
    problems = [problem(f"{n}+1=", family=f"{n}") for n in range(4000)]
    train, held = split(problems, 0.125, 4000)
    assert len(train) + len(held) == 4000
    assert abs(len(held) - 500) < 80
    assert split(problems[::-1][:100], 0.125, 99)[1] == [
        p for p in problems[::-1][:100] if p in held
    ]
    left, right = problem("5*24=", family="5*24"), problem("24*5=", family="5*24")
    for fraction in np.linspace(0.01, 0.99, 30):
        assert is_held_out(left, fraction) == is_held_out(right, fraction)


def test_a_small_set_holds_out_one_problem_and_a_large_one_no_more_than_are_wanted():
    for start in range(0, 1200, 12):
        train, held = split([problem(f"{n}+1=") for n in range(start, start + 12)], 0.001, 5)
        assert (len(train), len(held)) == (11, 1)
    problems = [problem(f"{n}+1=") for n in range(400)]
    most = split(problems, 0.5, 400)[1]
    train, held = split(problems, 0.5, 20)
    assert (len(train), len(held)) == (380, 20)
    assert {p.question for p in held} < {p.question for p in most}


def reasons_of(result):
    kept, drops = result
    return [p.question for p in kept], [d.reason for d in drops]


def test_each_filter_names_its_reasons():
    assert reasons_of(remove_long([problem("abc"), problem("abcd"), problem("  ")], 3)) == (
        ["abc"], ["prompt_too_long", "prompt_empty"],
    )  # fmt: skip
    answers = {"a": "7", "b": "9" * 100, "c": "seven", "d": ""}
    judged = remove_unverifiable([problem(*item) for item in answers.items()])
    assert reasons_of(judged) == (
        ["a"], ["answer_too_long", "answer_not_an_integer", "answer_empty"],
    )  # fmt: skip
    # The band includes its ends and lets unmeasured problems pass.
    rates = (0.0, 0.125, 0.5, 0.875, 1.0, float("nan"))
    band = remove_outside_band([problem(str(r), pass_rate=r) for r in rates], 0.125, 0.875)
    assert reasons_of(band) == (["0.125", "0.5", "0.875", "nan"], ["too_hard", "too_easy"])
    problems = [problem(f"{n}+1=") for n in range(50)]
    chosen, surplus = reasons_of(choose(problems, 10, "many"))
    assert (len(chosen), surplus) == (10, ["many"] * 40)
    assert chosen == [p.question for p in problems if p.question in chosen]
    assert reasons_of(choose(problems[::-1], 10, "many"))[0] == chosen[::-1]
    traces = ("1+1+0=2=2", "1+1+0=2=3", None)
    assert [has_good_trace(problem("1+1=", "2", "trace", trace=t)) for t in traces] == [
        True, False, False,
    ]  # fmt: skip


def read(*fields, **options):
    kept, drops = read_problems(CurateConfig(**options), rows(*fields))
    return kept, [d.reason for d in drops]


def test_rows_keep_the_columns_that_reward_functions_take_and_no_other(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    (tmp_path / "curated_reward.py").write_text(
        "def level(prompt, response, answer, level=1): ...\n"
        "def plain(text, truth, **columns): ...\n"
    )
    row = {"question": "How many?", "answer": 7, "level": {"of": [2]}, "other": 3}
    level, plain = "curated_reward:level", "curated_reward:plain"
    for options, wanted in (
        ({}, None),
        ({"verifier": level}, {"level": {"of": [2]}, "prompt": "How many?"}),
        ({"verifier": plain}, None),
        ({"verifier": plain, "reward_columns": ["other", "lost"]}, {"other": 3}),
    ):
        found = read(row, **options)[0]
        assert found[0].extra == ("" if wanted is None else json.dumps(wanted))
        kept = prompt_set(found).extra
        assert kept == (None if wanted is None else [found[0].extra])
    tables = {"reward": {"functions": [{"name": level}, {"name": "exact"}]}}
    assert with_function_columns(CurateConfig(), tables).reward_columns == ["level", "prompt"]
    assert "reward_columns" not in CurateConfig().model_dump()


def test_text_gets_instructions_and_messages_are_read_as_they_are():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1/2+1/3?"}]
    kept, reasons = read(
        {"question": " How many? ", "answer": 7},
        {"prompt": messages, "reward_model": {"ground_truth": "5/6"}, "data_source": "math"},
        {"prompt": [{**messages[1], "name": "x"}], "answer": "2", "system": "Be kind."},
        {"messages": messages, "answer": "2", "system": "Be kind."},
    )
    assert reasons == []
    assert (kept[0].question, kept[0].answer, kept[0].verifier) == ("How many?", "7", "integer")
    assert "Answer: <answer>" in kept[0].messages[0]["content"]
    assert "How many?" in kept[0].messages[0]["content"]
    assert (kept[1].messages, kept[1].question) == (messages, "1/2+1/3?")
    assert (kept[1].answer, kept[1].verifier, kept[1].source) == ("5/6", "math", "math")
    # A system column goes before a prompt that has no such message of its own.
    assert kept[2].messages == [{"role": "system", "content": "Be kind."}, messages[1]]
    assert kept[3].messages == messages


def test_a_conversation_that_ends_with_its_answer_is_no_prompt_beside_a_problem():
    user, assistant = ({"role": role, "content": role} for role in ("user", "assistant"))
    whole = [user, assistant]
    kept, reasons = read(
        {"problem": "1/2?", "answer": "1/2", "messages": whole},
        {"messages": [*whole, user], "problem": "2?", "answer": "2"},
        {"messages": [*whole, *whole], "answer": "3"},
    )
    assert reasons == []
    assert [p.question for p in kept] == ["1/2?", "user\nassistant\nuser", "user\nassistant\nuser"]


def test_answers_are_found_in_a_list_of_one_in_a_box_and_over_several_lines():
    matrix = "\\begin{pmatrix}\n1\\\\\n2\n\\end{pmatrix}"
    kept, reasons = read(
        {"question": "a", "final_answer": ["2"]},
        {"problem": "b", "solution": r"so \boxed{1} or rather \boxed{\frac{1}{2}}."},
        {"problem": "c", "answer": matrix},
        {"problem": "d", "answer": "two\nlines", "verifier": "exact"},
    )
    assert reasons == []
    assert [p.answer for p in kept] == [
        "2",
        r"\frac{1}{2}",
        matrix.replace("\n", " "),
        "two\nlines",
    ]
    assert remove_unverifiable(kept)[1] == []


def test_configured_fields_and_verifiers_win():
    fields = {"q": {"text": "1+1="}, "a": "2", "answer": "3", "prompt": "no", "trace": "=2"}
    kept, _ = read(fields, dataset_map="prompt=q.text, answer=a", verifier="trace")
    assert (kept[0].messages[0]["content"], kept[0].answer) == ("1+1=", "2")
    assert (kept[0].verifier, kept[0].trace) == ("trace", "=2")
    kept, _ = read({"prompt": "x", "answer": "y", "verifier": "exact"}, verifier="trace")
    assert kept[0].verifier == "exact"
    # A pattern is made of plain answers for the verifier `regex` alone.
    row, pattern = {"prompt": "x", "answer": "1.5"}, "^= {answer}$"
    kept, _ = read(row, verifier="regex", answer_pattern=pattern)
    assert kept[0].answer == r"^= 1\.5$"
    kept, _ = read(row, verifier="exact", answer_pattern=pattern)
    assert kept[0].answer == "1.5"


ROWS = {
    "no_prompt": [{"answer": "2"}],
    "no_answer": [
        {"prompt": "x"},
        {"prompt": "x", "answer": []},
        {"prompt": "x", "solution": "so it is 2"},
    ],
    "answer_is_no_text": [{"prompt": "x", "answer": 1 / 3}],
    "several_answers": [{"prompt": "x", "answer": ["2", "3"]}],
    "unknown_verifier": [{"prompt": "x", "answer": "2", "verifier": 7}],
    "system_is_no_text": [{"prompt": "x", "answer": "2", "system": 7}],
    "prompt_is_no_text": [
        {"prompt": prompt, "answer": "2"}
        for prompt in (
            *(5, [], ["x"], {"role": "user", "content": "x"}, [{"role": "user", "content": 5}]),
            *([{"role": role, "content": "x"}] for role in ("tool", "assistant")),
        )
    ],
}


@pytest.mark.parametrize("reason", ROWS)
def test_rows_without_a_problem_or_an_answer_are_dropped_with_a_reason(reason):
    assert read(*ROWS[reason], skip_bad=True) == ([], [reason] * len(ROWS[reason]))


def test_rows_of_mixed_types_are_refused_by_number():
    good = {"prompt": "1+1=", "answer": "2"}
    bad = [{"prompt": "x", "answer": {"value": 2}}, {"prompt": 5, "answer": 2}]
    with pytest.raises(ConfigError) as caught:
        read(good, *bad)
    assert "got 2 of 3 rows with another type: line 2 (answer_is_no_text)" in str(caught.value)
    assert "line 3 (prompt_is_no_text)" in str(caught.value)
    assert "curate.skip_bad" in str(caught.value)


def test_an_unknown_column_is_refused_with_those_that_are_there():
    with pytest.raises(ConfigError) as caught:
        read({"question": "1+1=", "label": "2"}, dataset_map="prompt=questoin,answer=label")
    assert "got prompt='questoin'; did you mean `question`?" in str(caught.value)
    assert "its columns are question, label" in str(caught.value)


@pytest.mark.parametrize("text", ["prompt", "prompt=", "promt=a", "prompt=a,prompt=b", "=a"])
def test_a_map_of_another_form_is_refused(text):
    with pytest.raises(ConfigError, match=r"`dataset_map` must read name=column"):
        parse_section(CurateConfig, {"dataset_map": text}, section="curate")


def sums(count, start=0):
    return [{"prompt": f"{n}+1=", "answer": n + 1, "verifier": "trace", "trace": f"={n + 1}"}
            for n in range(start, start + count)]  # fmt: skip


def test_every_row_of_a_data_set_is_trained_on_held_out_or_counted():
    fields = [*sums(100), *sums(3), {"prompt": "5+5=", "answer": "1" * 100}, {"prompt": "x"}]
    curated = select(CurateConfig(dataset="d", evaluation_size=5, num_traces=20), *fields)
    counts = {f.name: f for f in curated.ledger.filters}
    assert counts["readable problems"].reasons == {"no_answer": 1}
    assert counts["verifiable answer"].reasons == {"answer_too_long": 1}
    assert counts["duplicates"].reasons == {"duplicate": 3}
    assert counts["split, training part"].reasons == {"held_out": 5}
    assert (len(curated.train), len(curated.evaluation)) == (95, 5)
    assert len(curated.traced) == 20
    assert counts["traces for the cold start"].reasons == {"over_num_traces": 75}


def test_a_separate_evaluation_set_cleans_the_training_set():
    config = CurateConfig(dataset="d", evaluation_dataset="e")
    curated = select(config, *sums(20), held=sums(10, start=15))
    assert (len(curated.train), len(curated.evaluation)) == (15, 10)
    contamination = next(f for f in curated.ledger.filters if f.name == "contamination")
    assert contamination.reasons == {"equals_held_out": 5}


def test_generated_tasks_have_the_sizes_asked_for_and_no_shared_family():
    config = CurateConfig(num_prompts=700, evaluation_size=60, num_traces=50)
    curated = select(config)
    assert (len(curated.train), len(curated.evaluation), len(curated.traced)) == (700, 60, 50)
    assert {p.family for p in curated.train}.isdisjoint(p.family for p in curated.evaluation)
    assert {p.key for p in curated.traced} <= {p.key for p in curated.train}


@pytest.mark.slow
def test_a_task_with_few_prompts_ends():
    config = CurateConfig(num_prompts=300, evaluation_size=40, max_operand_digits=1)
    curated = select(config)
    assert 100 < len(curated.train) < 300
    assert 5 < len(curated.evaluation) < 40


def test_integer_answers_and_pass_rates_are_part_of_the_chain():
    fields = [{"prompt": f"What is {n}/7 of a cake?", "answer": f"{n}/7"} for n in range(1, 60)]
    config = CurateConfig(dataset="d", to_integers=True, pass_rate_min=0.2, pass_rate_max=0.8)

    def rates(problems):
        from dataclasses import replace

        return [replace(p, pass_rate=(i % 4) / 3) for i, p in enumerate(problems)]

    curated = select(config, *fields, pass_rates=rates)
    band = next(f for f in curated.ledger.filters if f.name == "pass rate")
    assert set(band.reasons) == {"too_hard", "too_easy"}
    assert {p.verifier for p in curated.train} == {"integer"}
    assert all(0.2 <= p.pass_rate <= 0.8 for p in curated.train)
    assert "pass_rate_mean" in curation_metrics(curated)


def test_nothing_left_is_an_error_with_the_counts_of_every_filter():
    with pytest.raises(ConfigError) as caught:
        select(CurateConfig(dataset="d", max_prompt_chars=2), *sums(9))
    assert "prompt length 9 -> 0 (prompt_too_long 9)" in str(caught.value)
    assert "at least one training prompt" in str(caught.value)
    with pytest.raises(ConfigError, match="at least one evaluation prompt"):
        select(CurateConfig(dataset="d", evaluation_dataset="e"), *sums(9), held=[{"prompt": "x"}])
    with pytest.raises(ConfigError, match="at least one training prompt"):
        select(CurateConfig(dataset="d"), *sums(1))


def test_a_filter_that_drops_more_than_a_fifth_is_told_with_three_examples():
    few, many = ([*sums(20), *sums(count)] for count in (4, 6))
    assert drop_warnings(select(CurateConfig(dataset="d"), *few).ledger) == []
    curated = select(CurateConfig(dataset="d", evaluation_fraction=0.5), *many)
    told = drop_warnings(curated.ledger)
    assert told == [
        "the filter `duplicates` drops 6 of 26 prompts (23%), such as duplicate in "
        "`line 21: 0+1= -> 1`; duplicate in `line 22: 1+1= -> 2`; duplicate in `line 23: 2+1= -> 3`"
    ]
    assert f"* {told[0]}\n" in curation_report(curated, "")
    assert curation_metrics(curated)["dropped_duplicates"] == 6


FRAMES = {
    "none": "{}",
    "before": "Work on the problem below one step at a time. {}",
    "behind": "{} Keep in mind that the answer goes on a line of its own after the rest.",
    "around": "Please read what follows and solve it. {} End with a line that holds the answer.",
    "chat template": "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>",
    "verl": '{} Let us think step by step and put the final result behind "####".',
}


def framed(frames):
    """Return 200 unrelated problems, and one that shares twenty words with ten of them."""
    rng = random.Random(3)
    names = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=7)) for _ in range(3000)]
    texts = [" ".join(rng.choices(names, k=30)) for _ in range(200)]
    texts += [" ".join(rng.choices(names, k=30) + t.split()[5:25]) for t in texts[:10]]
    return [
        {"prompt": [{"role": "user", "content": frames[n % len(frames)].format(t)}], "answer": n}
        for n, t in enumerate(texts)
    ]


@pytest.mark.parametrize("names", [*([n] for n in FRAMES), ["before", "behind", "around", "none"]])
def test_a_frame_around_the_problems_is_no_leak_and_hides_none(names):
    config = CurateConfig(dataset="d", evaluation_fraction=0.3)
    bare, curated = (
        select(config, *framed(frames)) for frames in (["{}"], [FRAMES[name] for name in names])
    )
    origins = [[p.origin for p in part] for part in (curated.train, curated.evaluation)]
    assert origins == [[p.origin for p in part] for part in (bare.train, bare.evaluation)]
    drops = next(f for f in bare.ledger.filters if f.name == "contamination").reasons
    assert 2 <= drops.pop("shares_13_words_with_held_out") <= 8
    assert drops == {}


def test_the_report_shows_counts_and_examples_and_no_markup_of_the_data():
    evil = "<script>alert(1)</script> | `x` **b** \n# head \x07"
    curated = select(CurateConfig(dataset="d"), *sums(40), {"prompt": evil, "answer": "x" * 2000})
    text = curation_report(curated, "ab" * 32)
    assert "| duplicates | prompts | 40 | 40 | 0 |" in text
    assert "| `answer_too_long` | 1 |" in text
    assert "\n# head" not in text
    assert "ab" * 32 in text
    page = MarkdownIt("commonmark", {"html": True}).enable("table").render(text)
    assert "<script>" not in page
    row = next(line for line in page.split("<tr>") if "answer_too_long" in line)
    assert row.count("<td") == 3
    assert "<code>line 41: &lt;script&gt;alert(1)&lt;/script&gt; | `x` **b** # head" in row


def test_impossible_settings_are_refused_all_at_once():
    with pytest.raises(ConfigError) as caught:
        parse_section(
            CurateConfig,
            {"pass_rate_min": 0.9, "pass_rate_max": 0.1, "rewriter": "x y"},
            section="curate",
        )
    for part in ("0.9 > 0.1", "'x y'"):
        assert part in str(caught.value)


TEXT = (
    "A farmer has twelve cows and sells four of them at the market on a rainy Monday morning "
    "before he buys nine sheep from his neighbour who lives across the river how many animals"
)


def test_equal_questions_are_kept_once_whatever_their_case_and_spacing_but_operators_differ():
    same = [problem(text) for text in ("1+1 =", "How  many?", "1 + 1=", "how many")]
    assert reasons_of(remove_duplicates(same)) == (["1+1 =", "How  many?"], ["duplicate"] * 2)
    different = [problem(text) for text in ("4+2=", "4-2=", "4*2=", "42=")]
    assert remove_duplicates(different)[0] == different


def test_equal_questions_with_different_answers_are_all_dropped():
    rows = [problem("1+1=", "2"), problem("1+1=", "3"), problem("2+2=", "4")]
    assert reasons_of(remove_duplicates(rows)) == (["2+2="], ["conflicting_answers"] * 2)


def near(problems, **options):
    return remove_near_duplicates(problems, **{"threshold": 0.7, "min_words": 12, **options})


def test_a_changed_word_makes_a_near_duplicate_and_the_first_one_stays():
    rows = [problem(TEXT), problem(TEXT.replace("Monday", "Friday")), problem(TEXT[::-1])]
    kept, drops = near(rows)
    assert kept == [rows[0], rows[2]]
    assert [d.reason for d in drops] == ["near_duplicate"]
    assert rows[0].origin in drops[0].example


def test_short_problems_are_never_near_duplicates_and_threshold_one_turns_the_filter_off():
    rows = [problem(f"{n}+1=") for n in range(50)]
    assert near(rows) == (rows, [])
    rows = [problem(TEXT), problem(TEXT + " now")]
    assert near(rows, threshold=1.0) == (rows, [])


def test_candidates_are_checked_exactly():
    left, right = (
        ngrams(words(t), SHINGLE_WORDS) for t in (TEXT, TEXT.replace("Monday", "Friday"))
    )
    similarity = jaccard(left, right)
    assert similarity == pytest.approx(29 / 35)
    rows = [problem(TEXT), problem(TEXT.replace("Monday", "Friday"))]
    assert len(near(rows, threshold=similarity)[0]) == 1
    assert len(near(rows, threshold=similarity + 0.01)[0]) == 2


def test_shared_instructions_make_no_near_duplicates():
    instruction = " ".join(f"please{chr(97 + i)}" for i in range(26))
    rows = [problem(f"{instruction} what is {n} plus {n * n} times {n + 7}") for n in range(30)]
    assert near(rows) == (rows, [])
    assert len(near(rows[:4])[0]) < 4, "too few to tell instructions from the problem"
    # A problem of instructions only is kept.
    rows = [problem(instruction)]
    rows += [problem(f"{instruction} {TEXT[n:]}") for n in range(0, 60, 5)]
    assert rows[0] in near(rows)[0]


def test_thirteen_words_in_a_row_are_a_leak_and_twelve_are_not():
    row = TEXT.split()
    held = [problem(TEXT)]
    thirteen = problem("unrelated words first then " + " ".join(row[5:18]))
    twelve = problem("unrelated words first then " + " ".join(row[5:17]))
    kept, drops = remove_contaminated([thirteen, twelve], held, ngram=13)
    assert kept == [twelve]
    assert drops[0].reason == "shares_13_words_with_held_out"
    assert remove_contaminated([thirteen], held, ngram=0)[0] == [thirteen]


def test_problems_in_a_frame_are_near_duplicates_by_what_is_in_it():
    frame = "Please read what follows and work on it line by line. {} End with the answer alone."
    rng = random.Random(7)
    names = [f"w{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(400)]
    texts = [" ".join(rng.choices(names, k=20)) for _ in range(30)]
    texts += [text + " x" for text in texts[:3]] + ["short one"]
    kept, drops = near([problem(frame.format(text)) for text in texts])
    assert [d.reason for d in drops] == ["near_duplicate"] * 3
    assert len(kept) == 31
