"""`python_tests`: what is right, what is wrong, and which tests can be run at all."""

import json
import os
import sys
import threading

import pytest

from planish import verifiers
from planish.verifiers import (
    VERIFIERS,
    Verdict,
    VerifierOptions,
    check_verifier,
    verify,
    verify_many,
)
from planish.verifiers.isolated.python_tests import extract_code
from planish.verifiers.isolated.values import decode, encode

OPTIONS = VerifierOptions(timeout_seconds=30.0)


def judge(code, tests):
    answer = tests if isinstance(tests, str) else json.dumps(tests)
    return verify("python_tests", f"Here it is:\n```python\n{code}\n```\n", answer, OPTIONS)


SORT = "def put_in_order(items):\n    items.sort()\n"
STACK = (
    "class Stack:\n    def __init__(self, *items):\n        self.items = list(items)\n"
    "    def push(self, item):\n        self.items.append(item)\n        return self\n"
    "    def __len__(self):\n        return len(self.items)\n"
    "    def __iter__(self):\n        return iter(self.items)\n"
    "    def __getitem__(self, at):\n        return self.items[at]\n"
)


@pytest.mark.parametrize(
    ("code", "tests"),
    [
        ("def double(x): return 2 * x", "assert double(2) == 4\nassert double(x=3) == 6"),
        ("def f(): return (1, [2.5], {'a': {3}}, b'x', None, 1j)",
         "assert f() == (1, [2.5], {'a': {3}}, b'x', None, 1j)"),
        ("def f(n): return 10 ** n", "assert f(5000) == 10 ** 5000"),
        ("def f(): return float('nan')", "assert f() != f()"),
        ("f = lambda x: [x, x]", "assert f('\\u00e9') == ['\\u00e9'] * 2"),
        ("LIMIT = 7\ndef f(): return LIMIT", "from random import random\nassert LIMIT == f() == 7"),
        (SORT, "a = [3, 1, 2]\nput_in_order(a)\nassert a == [1, 2, 3]"),
        ("def f(d): d['k'] = 1", "d = {}\nf(d)\nassert d == {'k': 1}"),
        (STACK, "s = Stack(1)\nassert s.push(2).push(3) is not None\nassert s.items == [1, 2, 3]\n"
                "assert len(s) == 3 and list(s) == [1, 2, 3] and s[-1] == 3 and bool(s)"),
        ("def f():\n    yield from range(3)",
         "assert list(f()) == [0, 1, 2]\nassert sum(f()) == 3"),
        ("def f(x):\n    if x < 0:\n        raise ValueError('negative')",
         "try:\n    f(-1)\nexcept ValueError as error:\n    assert str(error) == 'negative'\n"
         "else:\n    raise AssertionError"),
        ("def f(): return 1", "def test_one():\n    assert f() == 1"),
        ("def f(): return 1",
         "import unittest\nclass T(unittest.TestCase):\n"
         "    def test_one(self):\n        self.assertEqual(f(), 1)\n"
         "if __name__ == '__main__':\n    unittest.main()"),
        ("def check_me(a): return a + 1",
         "def check(candidate):\n    assert candidate(1) == 2\n\ncheck(check_me)"),
        ("import math, collections, heapq, re\nfrom dataclasses import dataclass\n@dataclass\n"
         "class P:\n    x: int\ndef f(): return P(math.gcd(4, 6)).x", "assert f() == 2"),
        ("import asyncio\nasync def g(): return 5\ndef f(): return asyncio.run(g())",
         "assert f() == 5"),
        ("def f():\n    open('notes', 'w').write('x')\n    return open('notes').read()",
         "assert f() == 'x'"),
        ("def add(a, b): return a + b",
         {"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [3, [1, 2]]}),
        ("class Solution:\n    def add(self, a, b): return (a, b)",
         {"fn_name": "add", "inputs": [[1, 2]], "outputs": [[1, 2]]}),
        ("print(sum(map(int, input().split())))",
         {"inputs": ["1 2\n", "3 4"], "outputs": ["3", "7"]}),
        ("import sys\nfor line in sys.stdin:\n    print(line.strip()[::-1], '')\nsys.exit()",
         {"inputs": ["ab\ncd\n"], "outputs": ["ba\ndc\n\n"]}),
        ("import os\nif __name__ == '__main__':\n    print(open(0).read() * 2, end='')",
         {"inputs": ["x"], "outputs": ["xx"]}),
    ],
)  # fmt: skip
def test_right_code_passes(code, tests):
    verdict = judge(code, tests)
    assert (verdict.accuracy, verdict.error, verdict.reason) == (1.0, False, "")
    assert verdict.extracted == f"{code}\n"[:300]


@pytest.mark.parametrize(
    ("code", "tests"),
    [
        ("def double(x): return 3 * x", "assert double(2) == 4"),
        ("def twice(x): return 2 * x", "assert double(2) == 4"),
        ("def double(x: return", "assert double(2) == 4"),
        ("1 / 0", "assert double(2) == 4"),
        ("def double(x): raise KeyError", "assert double(2) == 4"),
        ("import numpy", "assert double(2) == 4"),
        ("def f(): return 1", "def test_one():\n    assert f() == 2"),
        ("def f(): return 1",
         "import unittest\nclass T(unittest.TestCase):\n"
         "    def test_one(self):\n        self.assertEqual(f(), 2)\n"),
        ("def f(): return 1",
         "import unittest\nclass T(unittest.TestCase):\n"
         "    def test_one(self):\n        self.assertEqual(f(), 2)\nunittest.main()"),
        ("def add(a, b): return a - b", {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}),
        ("print(3)", {"inputs": ["", ""], "outputs": ["3", "4"]}),
        ("print(3); 1 / 0", {"inputs": [""], "outputs": ["3"]}),
        ("print(3); exit(1)", {"inputs": [""], "outputs": ["3"]}),
    ],
)  # fmt: skip
def test_wrong_code_fails_and_is_no_error(code, tests):
    verdict = judge(code, tests)
    assert (verdict.accuracy, verdict.error) == (0.0, False)


@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        ("assert 1 == 1", "never use the code"),
        ("assert apply(lambda x: x, 1) == 1", "a function cannot be handed to the code"),
        ("assert (", "must be Python or JSON"),
        ("# nothing", "must hold a statement"),
        ({"inputs": []}, "must be lists"),
        ({"inputs": ["1"], "outputs": []}, "equally many, got 1 and 0"),
        ({"inputs": [1], "outputs": ["1"]}, "must be texts"),
        ({"fn_name": "a.b", "inputs": [[1]], "outputs": [1]}, "the name of a function"),
        ({"fn_name": "f", "inputs": [1], "outputs": [1]}, "lists of arguments"),
        ("{", "Expecting property name"),
    ],
)
def test_tests_that_cannot_decide_are_an_error_of_the_row(tests, reason):
    verdict = judge("def apply(f, x): return f(x)", tests)
    assert (verdict.accuracy, verdict.error) == (0.0, True)
    assert reason in verdict.reason


def test_the_last_block_is_the_code_and_plain_python_needs_none():
    assert extract_code("```\na\n```\nno:\n```py\nb\n```") == "b\n"
    assert extract_code("```python\ncut = 1") == "cut = 1"
    assert extract_code("x = 1\n") == "x = 1\n"
    assert extract_code("I do not know.") is None
    assert verify("python_tests", "I do not know.", "assert f() == 1").invalid


def test_this_machine_can_confine_code():
    check_verifier("python_tests")


BOTH = threading.Barrier(2, timeout=60)


def verify_together(response, answer, options):
    """Right only where two rows are verified at the same time."""
    BOTH.wait()
    return Verdict(accuracy=float(response == answer))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor, one row at a time")
def test_rows_that_start_processes_are_run_at_once_and_keep_their_order(monkeypatch):
    monkeypatch.setitem(VERIFIERS, "together", f"{__name__}:verify_together")
    monkeypatch.setitem(sys.modules, __name__, sys.modules[verify_together.__module__])
    monkeypatch.setattr(verifiers, "PARALLEL", frozenset({"together"}))
    rows = [
        ("together", "a", "a"),
        ("together", "b", "a"),
        ("exact", "b", "a"),
        ("exact", "c", "c"),
    ]
    assert [verdict.accuracy for verdict in verify_many(rows)] == [1.0, 0.0, 0.0, 1.0]


def test_values_pass_as_exactly_the_plain_types():
    class Sly(int):
        def __eq__(self, other):
            return True

        __hash__ = int.__hash__

    values = [Sly(3), [Sly(4)], {"a": (Sly(5),)}, True, -(10**40), 0.1, "\ud800", bytearray(b"x")]
    copies = decode(json.loads(json.dumps(encode(values, id))), None)
    assert copies == [3, [4], {"a": (5,)}, True, -(10**40), 0.1, "\ud800", bytearray(b"x")]
    assert [type(copy) for copy in copies[:1]] == [int]
    assert copies[0] != 7
    nested = []
    nested.append(nested)
    with pytest.raises(RecursionError):
        encode(nested, id)
    for bad in (7, [1, 2, 3], ["code", "x"]):
        with pytest.raises(ValueError, match="no value"):
            decode(bad, None)
