"""The process with the code of a response: it runs the code, then serves requests of the tests.

The process confines itself before it reads the code. Its replies are untrusted.
"""

from __future__ import annotations

import json
import operator
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from planish.verifiers.isolated.confine import begin
from planish.verifiers.isolated.values import decode, encode

MAX_KEPT = 10_000
"""Most values that the tests can refer to."""

_OPERATIONS: dict[str, Callable[..., Any]] = {
    "bool": bool,
    "call": lambda function, *arguments, **named: function(*arguments, **named),
    "get": getattr,
    "item": operator.getitem,
    "iter": iter,
    "len": len,
    "next": next,
    "text": str,
}
"""Operations of tests on a value that is not plain data."""


def serve(requests: Any, reply: Callable[[dict[str, Any]], None], names: dict[str, Any]) -> None:
    """Send the names that the code defined, then answer requests until the pipe is closed."""
    kept: list[Any] = []

    def name_of(value: Any) -> int:
        if len(kept) >= MAX_KEPT:
            raise MemoryError(f"more than {MAX_KEPT} values without a plain form")
        kept.append(value)
        return len(kept) - 1

    public = {}
    for name, value in names.items():
        if name[0] != "_" and not isinstance(value, types.ModuleType):
            public[name] = encode(value, name_of)
    reply({"names": public})
    for line in requests:
        request = json.loads(line)
        try:
            target = decode(request["target"], kept.__getitem__)
            arguments = [decode(a, kept.__getitem__) for a in request["arguments"]]
            named = {k: decode(a, kept.__getitem__) for k, a in request["named"].items()}
            result = _OPERATIONS[request["operation"]](target, *arguments, **named)
            # The tests also see the changes that a function made to lists in its arguments.
            after = [encode(a, name_of) for a in arguments]
            reply({"result": encode(result, name_of), "arguments": after})
        except BaseException as error:
            reply({"raised": [type(error).__name__, str(error)[:1000]]})


def main() -> None:
    """Confine this process, run the code, then serve requests or end."""
    requests, reply = begin()
    request = json.loads(requests.readline())
    stdin = request["stdin"]
    if stdin is not None:
        for name, descriptor in (("stdin", 0), ("stdout", 1)):
            with open(name, "w+b") as file:
                file.write(stdin.encode("utf-8", "replace") if name == "stdin" else b"")
                file.seek(0)
                os.dup2(file.fileno(), descriptor)
    module = types.ModuleType("answer" if stdin is None else "__main__")
    sys.modules[module.__name__] = module
    try:
        exec(compile(request["code"], "<answer>", "exec"), module.__dict__)
    except SystemExit as ended:
        if stdin is None or ended.code not in (None, 0):
            return reply({"raised": ["SystemExit", str(ended.code)[:1000]]})
    except BaseException as error:
        return reply({"raised": [type(error).__name__, str(error)[:1000]]})
    if stdin is None:
        return serve(requests, reply, module.__dict__)
    sys.stdout.flush()
    return reply({"ended": True})
