"""`python_tests`: what is right, what is wrong, and which tests can be run at all."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

import planish
from planish import verifiers
from planish.base.errors import ConfigError
from planish.verifiers import (
    VERIFIERS,
    Verdict,
    VerifierOptions,
    answer_fault,
    check_machine,
    check_verifier,
    verify,
    verify_many,
)
from planish.verifiers.isolated import python_tests
from planish.verifiers.isolated.confine import filter_program
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


PATIENT = VerifierOptions(timeout_seconds=120.0)


def judge_hostile(code, tests, options=PATIENT):
    answer = tests if isinstance(tests, str) else json.dumps(tests)
    return verify("python_tests", f"```python\n{code}\n```", answer, options)


def attempt(body):
    """Code whose `attempt()` tells whether `body` was refused by the system."""
    lines = "".join(f"        {line}\n" for line in body.splitlines())
    return (
        "import ctypes, fcntl, os, resource, signal, socket, subprocess, sys, threading\n"
        f"def attempt():\n    try:\n{lines}"
        "    except (OSError, RuntimeError, ValueError) as error:\n"
        "        return 'refused: ' + type(error).__name__\n"
        "    return 'it went through'\n"
    )


REFUSED = {
    "environment of the parent": "open(f'/proc/{os.getppid()}/environ').read()",
    "memory of the parent": "open(f'/proc/{os.getppid()}/mem', 'rb').read(1)",
    "its own environment by proc": "open('/proc/self/environ').read()",
    "passwords": "open('/etc/passwd').read()",
    "the home folder": "open(os.path.expanduser('~/planish-was-here'), 'w')",
    "a folder of the home": "os.mkdir(os.path.expanduser('~/planish-was-here'))",
    "the temporary folder": "open('/tmp/planish-was-here', 'w')",
    "a listing of the home": "os.listdir(os.path.expanduser('~'))",
    "a file beside its folder": "open('../planish-was-here', 'w')",
    "a link out of its folder": "os.symlink('/etc', 'etc')",
    "a folder in its folder": "os.mkdir('deep')",
    "a device": "open('/dev/mem', 'rb')",
    "the memory of the machine": "open('/dev/shm/planish-was-here', 'w')",
    "to change a mode": "os.chmod('/tmp', 0o777)",
    "to truncate by name": "os.truncate(sys.executable, 0)",
    "to truncate by reading": "os.open('TARGET', os.O_RDONLY | os.O_TRUNC)",
    "to remove": "os.unlink('TARGET')",
    "an IPv4 socket": "socket.socket()",
    "an IPv6 socket": "socket.socket(socket.AF_INET6)",
    "a UNIX socket": "socket.socket(socket.AF_UNIX)",
    "a name server": "socket.getaddrinfo('localhost', 80)",
    "a message to an address": "socket.socketpair(type=2)[0].sendto(b'x', '/dev/log')",
    "a copy of the process": "os.fork()",
    "a program": "subprocess.run(['/bin/true'])",
    "a shell": "os.execv('/bin/sh', ['sh', '-c', 'true'])",
    "a thread": "threading.Thread(target=print).start()",
    "to kill the parent": "os.kill(os.getppid(), signal.SIGKILL)",
    "to kill everything": "os.kill(-1, signal.SIGKILL)",
    "to kill the group": "os.killpg(0, signal.SIGKILL)",
    "signals of files to the parent": "fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, os.getppid())",
    "more memory": "resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))",
    "another user": "os.setuid(1)",
    "to trace the parent": "if ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0): raise OSError",
    "memory of another process": (
        "if ctypes.CDLL(None).process_vm_readv(os.getppid(), 0, 0, 0, 0, 0) < 0: raise OSError"
    ),
    "a namespace": "if ctypes.CDLL(None).unshare(0x10000000): raise OSError",
    "to take off the filter": "if ctypes.CDLL(None).prctl(22, 0, 0): raise OSError",
    "calls of 32 bits": "if ctypes.CDLL(None).syscall(0x40000000 + 39) < 0: raise OSError",
}


def test_what_reaches_out_is_refused(tmp_path):
    target = tmp_path / "target"
    target.write_text("whole")
    bodies = [body.replace("TARGET", str(target)) for body in REFUSED.values()]
    code = [attempt(body).replace("attempt()", f"attempt_{n}()") for n, body in enumerate(bodies)]
    calls = ", ".join(f"{name!r}: attempt_{n}()" for n, name in enumerate(REFUSED))
    tests = "wrong = {k: v for k, v in attempts().items() if not v.startswith('refused: ')}\n"
    verdict = judge_hostile(
        "\n".join([*code, f"def attempts(): return {{{calls}}}"]), f"{tests}assert not wrong, wrong"
    )
    assert (verdict.accuracy, verdict.error) == (1.0, False), verdict.reason
    assert target.read_text() == "whole"
    for folder in (Path.home(), Path("/tmp"), Path("/dev/shm")):
        assert not (folder / "planish-was-here").exists()


def test_an_attempt_that_the_system_allows_is_seen_by_these_tests():
    verdict = judge_hostile(attempt("open('mine', 'w')"), "assert attempt() == 'it went through'")
    assert verdict.accuracy == 1.0


FATAL = {
    "an endless loop": "while True: pass",
    "a loop in a function": "def f(x):\n    while True: pass",
    "a long sleep": "import time\ntime.sleep(600)",
    "10 GB": "def f(x):\n    return len(b'x' * (10 << 30)) and 2",
    "10 GB bit by bit": "def f(x):\n    kept = []\n    while True: kept.append(bytearray(1 << 24))",
    "a fork bomb": "import os\nwhile True: os.fork()",
    "a thread bomb": "import threading\nwhile True: threading.Thread(target=input).start()",
    "deep recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return f(x + 1)",
    "deep data": "def f(x):\n    for _ in range(10**5): x = [x]\n    return x",
    "data in a circle": "def f(x):\n    x = []\n    x.append(x)\n    return x",
    "a long answer": "def f(x): return 'x' * (100 << 20)",
    "much output": "def f(x):\n    while True: print('x' * 10**6)",
    "much output to all": (
        "import os\nwhile True:\n    for d in range(9): os.write(d, b'x' * 65536)"
    ),
    "a full disk": "n = 0\nwhile True:\n    n += 1\n    open(str(n), 'wb').write(b'x' * (4 << 20))",
    "a long file": "f = open('f', 'wb')\nwhile True: f.write(b'x' * (1 << 20))",
    "many files": "n = 0\nwhile True:\n    n += 1\n    open(str(n), 'w').close()",
    "many open files": "kept = []\nwhile True: kept.append(open('/dev/null'))",
    "sys.exit": "import sys\nsys.exit(0)",
    "sys.exit in a call": "import sys\ndef f(x): sys.exit(0)",
    "os._exit": "import os\nos._exit(0)",
    "os._exit in a call": "import os\ndef f(x): os._exit(0)",
    "its own death": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "its own stop": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "closed descriptors": "import os\nos.closerange(0, 256)\ndef f(x): return 2",
    "a crash": "import ctypes\ndef f(x): ctypes.string_at(0)",
    "ignored limits": (
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    ),
    "a handler for all": (
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass"
    ),
    "KeyboardInterrupt": "def f(x): raise KeyboardInterrupt",
    "hash bomb": "def f(x): return {hash: 1 for hash in range(10**9)}",
    "power tower": "def f(x): return 9**9**9**9",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FATAL)
def test_what_harms_itself_is_wrong_and_no_error_of_ours(name, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    verdict = judge_hostile(FATAL[name], "assert f(1) == 2", VerifierOptions(timeout_seconds=0.5))
    assert (verdict.accuracy, verdict.error) == (0.0, False)
    assert list(tmp_path.iterdir()) == []


TRUTH = "assert f(1) == 'right-7d1c'"
PASSED = '{"verdict": "passed", "why": ""}'
FORGED = {
    "a printed verdict": f"print('{PASSED}')\ndef f(x): print('{PASSED}')",
    "a verdict on every descriptor": (
        f"import os\nfor d in range(64):\n    try: os.write(d, b'{PASSED}\\n' * 9)\n"
        "    except OSError: pass\n"
    ),
    "an object equal to all": (
        "class All:\n    def __eq__(self, other): return True\n    __ne__ = lambda s, o: False\n"
        "    __bool__ = lambda self: True\ndef f(x): return All()"
    ),
    "a text equal to all": (
        "class All(str):\n    def __eq__(self, other): return True\n    __hash__ = None\n"
        "def f(x): return All('wrong')"
    ),
    "replaced built-ins": (
        "import builtins\nbuiltins.AssertionError = ValueError\n"
        "def all(*_): return True\ndef f(x): return 0\ndef isinstance(*_): return True\n"
        "class AssertionError(Exception): pass\n"
    ),
    "names of the tests": (
        "def test_f(): pass\n"
        "__name__ = 'x'\n__debug__x = False\ndef f(x): return 0"
    ),
    "the tests in memory": (
        "import gc, re, sys\npattern = re.compile('right-[0-9]d[0-9]c')\ndef f(x):\n"
        "    seen = [repr(o) for o in gc.get_objects()]\n    frame = sys._getframe()\n"
        "    while frame:\n        seen.append(repr(frame.f_globals) + repr(frame.f_locals))\n"
        "        frame = frame.f_back\n"
        "    return (pattern.findall(' '.join(seen)) or [None])[0]\n"
    ),
    "the tests in a file": (
        "import os, re\ndef f(x):\n    for place in ('.', '..', '/proc/self/fd', '/tmp'):\n"
        "        try:\n            for name in os.listdir(place):\n"
        "                text = open(os.path.join(place, name), errors='replace').read()\n"
        "                found = re.findall('right-[0-9]d[0-9]c', text)\n"
        "                if found: return found[0]\n        except OSError:\n            pass\n"
    ),
    "an exit of the tests": "def f(x): raise SystemExit(0)",
    "a skipped test": "import unittest\ndef f(x): raise unittest.SkipTest('no')",
    "an exit handler": (
        "import atexit, os\n"
        "atexit.register(lambda: os._exit(0))\ndef f(x): return 0"
    ),
    "a patched reply": (
        "import json\nreal = json.dumps\n"
        f"json.dumps = lambda *a, **k: '{PASSED}'\ndef f(x): return 0\n"
    ),
    "a number that is none": (
        "import json\nfrom planish.verifiers.isolated import values\n"
        "json.dumps = lambda *a, **k: '{\"result\": [\"ref\", 99999], \"arguments\": [null]}'\n"
        "def f(x): return 0\n"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGED)
def test_a_result_cannot_be_forged(name):
    verdict = judge_hostile(FORGED[name], TRUTH)
    assert (verdict.accuracy, verdict.error) == (0.0, False)


def test_an_output_is_not_forged_by_what_the_process_says_of_itself():
    code = (
        "import os\nos.unlink('stdout')\nopen('stdout', 'w').write('4')\n"
        f"for d in range(64):\n    try: os.write(d, b'{PASSED}\\n')\n    except OSError: pass\n"
    )
    assert judge_hostile(code, {"inputs": ["x"], "outputs": ["5"]}).accuracy == 0.0


def test_the_code_gets_no_credentials_and_no_arguments_of_ours(monkeypatch):
    monkeypatch.setenv("MINIO_SECRET_KEY", "hidden-value")
    monkeypatch.setenv("HF_TOKEN", "hidden-value")
    code = "import os\ndef f(x): return 'hidden-value' in repr(dict(os.environ))"
    assert judge_hostile(code, "assert f(1) is False").accuracy == 1.0


def test_nothing_listens_to_the_code_and_the_parent_lives():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        port = server.getsockname()[1]
        code = attempt(f"socket.create_connection(('127.0.0.1', {port}), 1)")
        assert judge_hostile(code, "assert attempt().startswith('refused')").accuracy == 1.0
        with pytest.raises(BlockingIOError):
            server.accept()
    code = "import os, signal\ndef f(x): os.kill(os.getppid(), signal.SIGTERM)"
    assert judge_hostile(code, "f(1)").accuracy == 0.0
    assert os.getpid() > 0


def test_no_process_outlives_its_verdict():
    judge_hostile(
        "import time\ntime.sleep(600)", "assert f(1) == 2", VerifierOptions(timeout_seconds=0.5)
    )
    listed = subprocess.run(
        ["ps", "-o", "pid=,args=", "--ppid", str(os.getpid())],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert "isolated.answer_child" not in listed


@pytest.mark.skipif(
    os.getuid() != 0 or not Path("/usr/bin/python3").exists(),
    reason="only root can become another user, who needs an interpreter that all may run",
)
def test_a_user_without_privileges_is_confined_as_well():
    package = Path(planish.__file__).parent
    # Others may read neither a checkout in somebody's home nor the folders that pytest makes.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        copy = shutil.copytree(
            package, f"{folder}/planish", ignore=shutil.ignore_patterns("__pycache__")
        )
        for path in (copy, *map(str, Path(copy).rglob("*"))):
            os.chmod(path, 0o755)
        script = (
            "import os, sys\nif sys.version_info < (3, 11): sys.exit(77)\n"
            "os.setgroups([])\nos.setgid(65532)\nos.setuid(65532)\n"
            f"sys.path.insert(0, {folder!r})\n"
            "from planish.verifiers import check_verifier, verify\ncheck_verifier('python_tests')\n"
            "verdict = verify('python_tests', 'def f(x): return 2', 'assert f(1) == 2')\n"
            "assert verdict.accuracy == 1.0\n"
        )
        done = subprocess.run(
            ["/usr/bin/python3", "-B", "-c", script],
            capture_output=True,
            text=True,
            check=False,
            cwd="/",
            env={"PATH": os.environ["PATH"]},
        )
    if done.returncode == 77:
        pytest.skip("/usr/bin/python3 is older than 3.11")
    assert done.returncode == 0, done.stderr


@pytest.fixture
def unchecked():
    """This machine has not been checked, before and after."""
    check_machine.cache_clear()
    yield
    check_machine.cache_clear()


@pytest.mark.usefixtures("unchecked")
def test_a_kernel_that_cannot_confine_is_refused_before_any_code_runs(monkeypatch):
    boot = python_tests._BOOT.replace(
        "from {program}",
        "import planish.verifiers.isolated.confine as c\nc._CREATE_RULESET = 1000\nfrom {program}",
    )
    monkeypatch.setattr(python_tests, "_BOOT", boot)
    with pytest.raises(ConfigError, match=r"needs Landlock \(Linux 5\.13 or later"):
        check_verifier("python_tests")
    with pytest.raises(ConfigError, match="got Function not implemented; run rollout and reward"):
        judge_hostile("def f(x): return 2", "assert f(1) == 2")
    with pytest.raises(ConfigError, match="needs Landlock"):
        answer_fault("python_tests", "assert f(1) == 2")


@pytest.mark.usefixtures("unchecked")
def test_code_that_gets_out_is_told(monkeypatch):
    boot = python_tests._BOOT.replace(
        "from {program} import main",
        "import planish.verifiers.isolated.confine as c\nc.confine = lambda *_: None\n"
        "from {program} import main",
    )
    monkeypatch.setattr(python_tests, "_BOOT", boot)
    with pytest.raises(ConfigError, match=r"read.*, 'listen', 'fork', 'signal'\]"):
        check_verifier("python_tests")


def test_the_filter_of_the_other_machine_has_every_guard():
    here, there = filter_program("x86_64", 7), filter_program("aarch64", 7)
    assert len(there) < len(here)
    for program in (here, there):
        assert len(program) // 8 < 4096
        # Nothing falls out of the end: the last instruction refuses.
        assert program[-8:] == bytes([0x06, 0, 0, 0]) + (0x00050001).to_bytes(4, "little")
