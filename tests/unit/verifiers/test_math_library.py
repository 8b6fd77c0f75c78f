"""Mathematical equality and values, by math-verify in a process of its own."""

import os
import sys

import pytest

from planish.verifiers import VerifierOptions, math_answer, verify
from planish.verifiers.child_process import ChildProcess
from planish.verifiers.own import shared_verifier

READY = 'import sys, time, json\nprint(\'{"outcome": "ready"}\', flush=True)\n'


@pytest.mark.parametrize(
    ("response", "answer", "accuracy"),
    [
        ("Answer: 1/2", "0.5", 1.0),
        ("Answer: 0.5", "\\frac12", 1.0),
        ("Answer: 2/3", "1/2", 0.0),
        ("Answer: $\\frac{1}{2}$", "1/2", 1.0),
        ("Answer: (1, 2)", "(1,2)", 1.0),
        ("Answer: (2, 1)", "(1,2)", 0.0),
        ("Answer: \\sqrt{8}", "2\\sqrt{2}", 1.0),
        ("Answer: 1+x", "x+1", 1.0),
        ("Answer: 5} or {5", "\\frac{10}{2}", 0.0),
        ("Answer: 5 or 7", "\\frac{10}{2}", 0.0),
        ("Answer: \u0665", "\\frac{10}{2}", 0.0),
        ("Answer: \\frac{1}{0}", "1/2", 0.0),
        ("Answer: 12", "13", 0.0),
    ],
)
def test_mathematical_equality_in_the_child(response, answer, accuracy):
    verdict = verify("math", response, answer)
    assert (verdict.accuracy, verdict.error) == (accuracy, False)


def test_the_child_is_reused_and_the_library_stays_out_of_this_process():
    verify("math", "Answer: 1/3", "2/6")
    child = shared_verifier("planish.verifiers.math_library:judge")
    pid = child.pid
    verify("math", "Answer: 1/4", "2/8")
    assert child.pid == pid != os.getpid()
    assert "math_verify" not in sys.modules


@pytest.mark.slow
def test_a_comparison_without_end_is_killed_and_the_next_one_works():
    hostile = verify("math", "Answer: 99999999!", "1/2", VerifierOptions(timeout_seconds=1.0))
    assert (hostile.accuracy, hostile.timeout, hostile.error) == (0.0, True, False)
    assert verify("math", "Answer: 3/6", "1/2").accuracy == 1.0


@pytest.mark.slow
def test_a_ground_truth_that_takes_too_long_itself_is_an_error():
    verdict = verify("math", "Answer: 1/2", "99999999!", VerifierOptions(timeout_seconds=1.0))
    assert (verdict.accuracy, verdict.timeout, verdict.error) == (0.0, True, True)
    assert "takes too long" in verdict.reason


@pytest.fixture
def child():
    """A child that says ready and then does `body` for each `line`."""
    children = []

    def start(*body):
        code = READY + "for line in sys.stdin:\n" + "".join(f"    {row}\n" for row in body)
        children.append(ChildProcess([sys.executable, "-c", code], max_reply_bytes=65536))
        children[-1].start()
        return children[-1]

    yield start
    for each in children:
        each.close()


@pytest.mark.parametrize(
    "body",
    ["sys.exit(3)", "print('not json', flush=True)", "print('[]', flush=True)",
     "print('x' * 200000, flush=True)"],
)  # fmt: skip
def test_a_child_that_dies_or_talks_nonsense_is_ended(child, body):
    bad = child(body)
    with pytest.raises(OSError, match=r"exit code|Expecting|must be an object|more than"):
        bad.ask({}, 120)
    assert bad.pid is None


class Broken:
    """Stands for the child of a comparison."""

    def __init__(self, *ends):
        self.ends, self.asked = list(ends), 0

    def ask(self, *_):
        self.asked += 1
        end = self.ends.pop(0)
        if isinstance(end, Exception):
            raise end
        return end


@pytest.fixture
def broken(monkeypatch):
    def make(*ends):
        fake = Broken(*ends)
        monkeypatch.setattr(math_answer, "shared_verifier", lambda _: fake)
        math_answer._asked.cache_clear()
        return fake

    yield make
    math_answer._asked.cache_clear()


def test_what_was_judged_or_was_late_is_asked_once_and_a_crash_again(broken):
    fake = broken({"score": 1.0}, TimeoutError(), {"score": 0.0}, OSError(), {"score": 1.0})
    for _ in range(2):
        assert verify("math", "Answer: 1/2", "2/4").accuracy == 1.0
    for _ in range(2):
        late = verify("math", "Answer: 1/3", "2/4")
        assert (late.timeout, late.error) == (True, False)
    assert fake.asked == 3
    assert verify("math", "Answer: 1/5", "2/4").error
    assert verify("math", "Answer: 1/5", "2/4").accuracy == 1.0


def test_a_value_without_a_form_is_found_and_its_search_may_be_late_or_crash(broken):
    assert verify("math", "so it is 18.", "18").accuracy == 1.0
    broken(TimeoutError(), OSError())
    late = verify("integer", "so it is 19.", "18")
    assert (late.timeout, late.error) == (True, False)
    assert verify("integer", "so it is 20.", "18").error
