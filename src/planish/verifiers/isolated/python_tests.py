"""Verifier that runs the code of a response with the tests of its row.

A ground truth is either Python source with assertions, functions `test_...` or classes of unittest;
or JSON with `inputs` and `outputs`. The JSON describes programs that read standard input or, with
`fn_name`, calls of a function. The code of a response is its last block between triple backticks.

The code has no packages. It gets the standard library of Python, one process without threads, no
network, and a folder that is removed afterwards.

Source: the layout of `inputs`, `outputs`, `fn_name` is that of APPS, arXiv 2105.09938.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
import json
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planish.base.child import Child, start_child
from planish.base.errors import ConfigError
from planish.verifiers.verdict import Verdict, VerifierOptions, failed, not_found, right, wrong

ANSWER_CHILD = "planish.verifiers.isolated.answer_child"
TESTS_CHILD = "planish.verifiers.isolated.tests_child"
MAX_REPLY_BYTES = 8 << 20
MAX_SCRATCH_BYTES = 64 << 20
MAX_SCRATCH_FILES = 256
START_SECONDS = 60.0

_BLOCK = re.compile(r"```[ \t]*[a-zA-Z0-9]*[ \t]*\r?\n(.*?)(?:```|\Z)", re.DOTALL)

# The parent packages exist without running their `__init__.py`, whose imports would take longer
# than most responses run.
_BOOT = """
import sys, types
for name, folder in (("planish", ""), ("planish.verifiers", "/verifiers")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [sys.argv[1] + folder]
from {program} import main
main()
"""

_CALLS = """
import json
def as_json(value):
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if isinstance(value, dict):
        return {{str(key): as_json(item) for key, item in value.items()}}
    return value
function = globals().get({name!r})
if function is None:
    function = getattr(Solution(), {name!r})
for arguments, wanted in json.loads({cases!r}):
    seen = as_json(function(*arguments))
    assert seen == wanted or [seen] == wanted
"""

_ATTEMPTS = """
import os, socket
def succeeded():
    def read():
        open("/proc/%d/environ" % os.getppid()).read()
    def write():
        open(os.path.join(os.path.dirname(os.getcwd()), "out"), "w")
    def listen():
        socket.socket().listen()
    def fork():
        os.fork() or os._exit(0)
    def signal():
        os.kill(os.getppid(), 0)
    done = []
    for attempt in (read, write, listen, fork, signal):
        try:
            attempt()
            done.append(attempt.__name__)
        except OSError:
            pass
    return done
"""


@dataclass(frozen=True)
class PythonTests:
    """Tests of a row; exactly one of the two fields is set."""

    source: str = ""
    """Tests in Python."""
    programs: tuple[tuple[str, str], ...] = ()
    """(standard input, expected standard output) of each run of a program."""


@functools.lru_cache(maxsize=256)
def parse_tests(answer: str) -> PythonTests:
    """Read a ground truth.

    Raises:
        ValueError: it has no tests.
    """
    if not answer.lstrip().startswith("{"):
        try:
            tree = ast.parse(answer)
        except (SyntaxError, RecursionError, MemoryError) as error:
            raise ValueError(f"tests must be Python or JSON, got {error}") from None
        if not tree.body:
            raise ValueError("tests must hold a statement, got none")
        return PythonTests(source=answer)
    table = json.loads(answer)
    inputs, outputs, name = table.get("inputs"), table.get("outputs"), table.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs:
        raise ValueError("`inputs` and `outputs` must be lists with an item for each case")
    if len(inputs) != len(outputs):
        raise ValueError(
            f"`inputs` and `outputs` must be equally many, got {len(inputs)} and {len(outputs)}"
        )
    if name is None:
        pairs = list(zip(inputs, outputs, strict=True))
        if not all(isinstance(text, str) for pair in pairs for text in pair):
            raise ValueError("`inputs` and `outputs` must be texts where there is no `fn_name`")
        return PythonTests(programs=tuple(pairs))
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"`fn_name` must be the name of a function, got {name!r}")
    if not all(isinstance(arguments, list) for arguments in inputs):
        raise ValueError("`inputs` must be lists of arguments where there is a `fn_name`")
    cases = json.dumps(list(zip(inputs, outputs, strict=True)))
    return PythonTests(source=_CALLS.format(name=name, cases=cases))


def extract_code(response: str) -> str | None:
    """Return the last block between triple backticks, else the response if it is Python."""
    blocks = _BLOCK.findall(response)
    if blocks:
        return str(blocks[-1])
    try:
        return response if ast.parse(response).body else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def verify_python_tests(response: str, answer: str, options: VerifierOptions) -> Verdict:
    """A response is right if every test passes within the time limit.

    The limit is for each case, or for all tests in Python together.
    """
    try:
        tests = parse_tests(answer)
    except (ValueError, RecursionError) as error:
        return failed(reason=str(error))
    code = extract_code(response)
    if code is None:
        return not_found()
    seconds = options.timeout_seconds
    if tests.source:
        verdict, why = _run_source(code, tests.source, seconds)
        if verdict == "unusable":
            return failed(code, reason=why)
        return right(code) if verdict == "passed" else wrong(code)
    passed = all(
        output_of_program(code, stdin, seconds) == lines(out) for stdin, out in tests.programs
    )
    return right(code) if passed else wrong(code)


def lines(output: str) -> list[str]:
    """Return the lines of an output, without white space at their ends and without trailing empty
    lines.

    Example:
        >>> lines("1 2 ")
        ['1 2']
    """
    return [line.rstrip() for line in output.rstrip().split("\n")]


def check_isolation() -> None:
    """Check before a run that code cannot break out."""
    verdict, why = _run_source(_ATTEMPTS, "assert succeeded() == [], succeeded()", 60.0)
    if verdict != "passed":
        raise ConfigError(
            "the verifier `python_tests` must be able to confine the code of responses, got: "
            f"{why} by code that was confined; run rollout and reward on another kernel"
        )


@contextlib.contextmanager
def _confined(program: str, seconds: float) -> Iterator[tuple[Child, Path]]:
    """Start one of our programs in its own folder; both are removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="planish-tests-", ignore_cleanup_errors=True) as name:
        folder = Path(name).resolve()

        def watch() -> str:
            """Return the reason if the folder is too full, else ""."""
            with os.scandir(folder) as entries:
                files = list(itertools.islice(entries, MAX_SCRATCH_FILES + 1))
            size = 0
            for file in files:
                with contextlib.suppress(OSError):
                    size += 512 * file.stat(follow_symlinks=False).st_blocks
            too_full = len(files) > MAX_SCRATCH_FILES or size > MAX_SCRATCH_BYTES
            return "wrote more than it may" if too_full else ""

        root = str(Path(__file__).parents[2])
        boot, cpu_seconds = _BOOT.format(program=program), str(math.ceil(seconds) + 1)
        settings = {"PYTHONPATH": "", "PYTHONHASHSEED": "0", "TMPDIR": str(folder)}
        child = start_child(
            # No site packages; a fixed seed of hashes makes the order of sets the same each time.
            [sys.executable, *["-s", "-S", "-P", "-B", "-c"], boot, root, str(folder), cpu_seconds],
            environment={"OMP_NUM_THREADS": "1", **settings},
            max_bytes=MAX_REPLY_BYTES,
            watch=watch,
        )
        try:
            child.wait_ready(START_SECONDS)
        except OSError as error:
            reason = str(error).removeprefix("cannot confine: ")
            raise ConfigError(
                f"the verifier `python_tests` needs {reason}; run rollout and reward on a machine "
                "that has it, or take another verifier"
            ) from None
        try:
            yield child, folder
        finally:
            child.close()


def _run_source(code: str, tests: str, seconds: float) -> tuple[str, str]:
    """Run tests in Python; return `passed`, `failed` or `unusable`, and the reason."""
    with (
        _confined(ANSWER_CHILD, seconds) as (answer, _),
        _confined(TESTS_CHILD, seconds) as (
            judge,
            _,
        ),
    ):
        deadline = time.monotonic() + seconds

        def ask(child: Child, request: dict[str, Any]) -> dict[str, Any]:
            return child.ask(request, max(deadline - time.monotonic(), 0.0))

        try:
            told = ask(answer, {"code": code, "stdin": None})
            if not isinstance(told.get("names"), dict):
                return "failed", f"the code raised {told.get('raised')}"
            message = ask(judge, {"tests": tests, "names": told["names"]})
            while "ask" in message:
                message = ask(judge, ask(answer, message["ask"]))
        except OSError as error:
            return "failed", str(error)
        return str(message.get("verdict")), str(message.get("why"))


def output_of_program(code: str, stdin: str, seconds: float) -> list[str] | None:
    """Return the standard output of a program; None if it failed."""
    with _confined(ANSWER_CHILD, seconds) as (child, folder):
        with contextlib.suppress(OSError):
            if "ended" not in child.ask({"code": code, "stdin": stdin}, seconds):
                return None
            return lines((folder / "stdout").read_text("utf-8", "replace"))
        return None
