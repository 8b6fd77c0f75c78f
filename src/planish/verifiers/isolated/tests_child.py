"""The process with the tests of a row: it runs them against the code in another process.

The process has the definitions of the code as plain data and as `Remote` values, which forward each
call. It makes the verdict, because no code of the response ever runs in it.
"""

from __future__ import annotations

import builtins
import io
import json
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from typing import Any

from planish.verifiers.isolated.confine import begin
from planish.verifiers.isolated.values import decode, encode

Exchange = Callable[[dict[str, Any]], dict[str, Any]]
"""Function that sends an operation to the process with the code and returns the reply."""


class Unsupported(BaseException):
    """The tests need a value that cannot pass between processes; `except Exception` does not catch
    it.
    """


class AnswerError(Exception):
    """The code of the response raised an exception that is not a built-in one."""


class Remote:
    """A reference to a value of the response's code that is not plain data.

    Two references are equal if they refer to the same value; `==` of the response is not called.
    """

    def __init__(self, exchange: Exchange, number: int) -> None:
        self.__dict__.update(_exchange=exchange, _number=number)

    def _do(self, operation: str, *arguments: Any, **named: Any) -> Any:
        def number_of(value: Any) -> int:
            if not isinstance(value, Remote):
                kind = type(value).__name__
                raise Unsupported(f"a {kind} cannot be handed to the code of the response")
            number: int = value.__dict__["_number"]
            return number

        exchange: Exchange = self.__dict__["_exchange"]
        reply = exchange(
            {
                "operation": operation,
                "target": ["ref", self.__dict__["_number"]],
                "arguments": [encode(a, number_of) for a in arguments],
                "named": {name: encode(a, number_of) for name, a in named.items()},
            }
        )
        if "raised" in reply:
            name, text = reply["raised"]
            kind = getattr(builtins, str(name), None)
            is_error = isinstance(kind, type) and issubclass(kind, Exception)
            raise (kind if is_error and kind is not None else AnswerError)(str(text))

        def named_by(number: int) -> Any:
            return Remote(exchange, number)

        for before, after in zip(arguments, reply["arguments"], strict=True):
            copy = decode(after, named_by)
            if isinstance(before, list) and isinstance(copy, list):
                before[:] = copy
            elif isinstance(before, (dict, set)) and type(copy) is type(before):
                before.clear()
                before.update(copy)
        return decode(reply["result"], named_by)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the value in its own process."""
        return self._do("call", *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._do("get", name)

    def __getitem__(self, key: Any) -> Any:
        return self._do("item", key)

    def __iter__(self) -> Iterator[Any]:
        iterator = self._do("iter")
        return iter(iterator) if isinstance(iterator, list) else iterator

    def __next__(self) -> Any:
        return self._do("next")

    def __bool__(self) -> bool:
        return bool(self._do("bool"))

    def __len__(self) -> int:
        return int(self._do("len"))

    def __str__(self) -> str:
        return str(self._do("text"))


def run_tests(tests: str, names: dict[str, Any]) -> tuple[str, str]:
    """Run the tests, their functions `test_...` and their classes of unittest.

    `names` are the definitions of the response.

    Returns:
        (`passed`, `failed` or `unusable`, one line with the reason).
    """
    module = types.ModuleType("__main__")
    # A response must not replace the built-ins that the tests use.
    module.__dict__.update((n, v) for n, v in names.items() if not hasattr(builtins, n))
    sys.modules["__main__"] = module
    try:
        code = compile(tests, "<tests>", "exec")
    except (SyntaxError, ValueError) as error:
        return "unusable", f"tests must be Python, got {error}"
    given = set(names)
    sys.argv = ["tests"]
    try:
        try:
            exec(code, module.__dict__)
        except SystemExit as ended:
            # `unittest.main()` ends with SystemExit; exceptions of the response are not SystemExit
            # here.
            if ended.code:
                return "failed", f"the tests ended with {ended.code!r}"
        for name, value in list(module.__dict__.items()):
            if name in given and isinstance(value, Remote):
                continue
            if name.startswith("test_") and callable(value):
                value()
        suite = unittest.defaultTestLoader.loadTestsFromModule(module)
        result = unittest.TextTestRunner(io.StringIO()).run(suite)
        if not result.wasSuccessful():
            return "failed", "a test of unittest failed"
    except Unsupported as error:
        return "unusable", str(error)
    except BaseException as error:
        return "failed", f"{type(error).__name__}: {error}"[:300]
    return "passed", ""


def main() -> None:
    """Confine this process, run the tests, send the verdict."""
    requests, reply = begin()
    request = json.loads(requests.readline())
    num_calls = 0

    def exchange(operation: dict[str, Any]) -> dict[str, Any]:
        nonlocal num_calls
        num_calls += 1
        reply({"ask": operation})
        answer: dict[str, Any] = json.loads(requests.readline())
        return answer

    names = {
        name: decode(data, lambda number: Remote(exchange, number))
        for name, data in request["names"].items()
    }
    verdict, why = run_tests(request["tests"], names)
    if verdict == "passed" and not num_calls:
        verdict, why = "unusable", "the tests never use the code of the response"
    return reply({"verdict": verdict, "why": why})
