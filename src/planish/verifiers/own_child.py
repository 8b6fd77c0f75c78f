"""The child process of `planish.verifiers.own`, with one function of the user.

`python -P -m planish.verifiers.own_child package.module:function` writes whether the function is
callable, and the columns of a data row that are its parameters. Then it answers each line
`{"response": ..., "answer": ...}`, which has `extra` if the row has columns for it, by `{"score":
...}` or `{"error": ...}`. A built-in function may also return a text, `{"value": ...}`. Output of
the function is kept from standard output, where it would disturb the replies. The reply reports
it.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import io
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from planish.verifiers.isolated.confine import take_streams

PRINTED_CHARS = 80
"""Number of printed characters that the reply contains."""

TEXTS = {
    "response": "response",
    "solution_str": "response",
    "answer": "answer",
    "ground_truth": "answer",
}
"""Map from parameter name to the text that it gets; two names are those of verl."""


@dataclass(frozen=True)
class Function:
    """A function of the user, and the arguments that it takes."""

    call: Callable[..., Any]
    """The function; it should return a number from 0 to 1."""
    texts: Mapping[str, str]
    """Parameters that get response and answer by name; empty: the first two parameters get them."""
    columns: tuple[str, ...] = ()
    """Other parameters: columns of the data row."""
    needed: frozenset[str] = frozenset()
    """Columns without a default."""
    hidden: frozenset[str] | None = None
    """If set, the function takes all columns except these; None: only `columns`."""

    def __call__(self, response: str, answer: str, extra: Mapping[str, Any]) -> Any:
        """Call the function with the columns that it takes.

        Raises:
            ValueError: the function needs a column that the row lacks.
        """
        if missing := sorted(self.needed - extra.keys()):
            raise ValueError(f"takes the column `{missing[0]}`, which this row does not have")
        taken = {name: extra[name] for name in self.columns if name in extra}
        if self.hidden is not None:
            taken |= {name: value for name, value in extra.items() if name not in self.hidden}
        if not self.texts:
            return self.call(response, answer, **taken)
        given = {"response": response, "answer": answer}
        return self.call(**taken, **{name: given[which] for name, which in self.texts.items()})


class Printed(io.TextIOBase):
    """Replacement of standard output that keeps the first characters and drops the rest."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        """Keep the beginning of the output; drop the rest."""
        self.text += text[: PRINTED_CHARS - len(self.text)]
        return len(text)


def load(reference: str) -> Function:
    """Import a function by `package.module:function`.

    Raises:
        ValueError: the module, its import, the name or the signature is wrong.
    """
    name, _, attribute = reference.partition(":")
    try:
        module = importlib.import_module(name)
    except SystemExit as ended:
        raise ValueError(
            f"`{name}` must not end the program when it is imported, got SystemExit({ended.code!r})"
            "; put what only a script does below `if __name__ == '__main__':`"
        ) from None
    except ModuleNotFoundError as error:
        remedy = "install its package into this environment (image), or name its folder in"
        raise ValueError(
            f"`{name}` must be importable by {sys.executable}, got: {error}; {remedy} `PYTHONPATH`"
        ) from None
    except Exception as error:
        raise ValueError(
            f"`{name}` must be importable, got {type(error).__name__}: {error}; mend the module"
        ) from None
    function: Callable[..., Any] | None = getattr(module, attribute, None)
    if function is None or not callable(function):
        names = [n for n, value in vars(module).items() if callable(value) and n[0] != "_"]
        close = difflib.get_close_matches(attribute, names, n=1)
        seen = f"a {type(function).__name__}" if hasattr(module, attribute) else "no such name"
        raise ValueError(
            f"`{name}` must have a function `{attribute}`, got {seen}"
            + (f"; did you mean {close[0]!r}?" if close else f"; it has {names[:8]}")
        )
    try:
        signature = inspect.signature(function)
    except ValueError:
        # Functions written in C may have no signature, so only a call shows whether it works.
        return Function(function, {})
    found = read_signature(function, signature)
    try:
        columns = dict.fromkeys(found.columns)
        if found.texts:
            signature.bind(**columns, **found.texts)
        else:
            signature.bind("", "", **columns)
    except TypeError:
        raise ValueError(
            f"`{reference}` must take the two arguments (response, answer), and columns of the "
            f"data by their names, got {attribute}{signature}"
        ) from None
    return found


def read_signature(call: Callable[..., Any], signature: inspect.Signature) -> Function:
    """Return which parameters of a function are response, answer and columns."""
    every = list(signature.parameters.values())
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    texts = {p.name: TEXTS[p.name] for p in every if p.name in TEXTS and p.kind in by_name}
    places = [TEXTS.get(p.name) for p in every[:2] if p.kind is not p.KEYWORD_ONLY]
    if len({*texts.values()}) < 2 or places == ["response", "answer"]:
        texts = {}
    first = texts.keys() if texts else {p.name for p in every[:2]}
    rest = [p for p in every if p.name not in first and p.kind in by_name]
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in every)
    return Function(
        call,
        texts,
        tuple(p.name for p in rest),
        frozenset(p.name for p in rest if p.default is inspect.Parameter.empty),
        frozenset({*first, *TEXTS}) if takes_any else None,
    )


def score(function: Function, response: str, answer: str, extra: Mapping[str, Any]) -> float | str:
    """Call a function and return its score, or the text of a built-in function.

    Raises:
        ValueError: the function raised, or did not return a number from 0 to 1.
    """
    try:
        value = function(response, answer, extra)
    except (Exception, SystemExit) as error:
        raise ValueError(f"raised {type(error).__name__}: {error}") from error
    if isinstance(value, str) and function.call.__module__ == "planish.verifiers.math_library":
        return value
    seen = f"{value!r:.80} of type {type(value).__name__}"
    if not hasattr(type(value), "__float__"):
        raise ValueError(f"must return a number from 0 to 1, got {seen}")
    number = float(value)
    if not 0.0 <= number <= 1.0:
        raise ValueError(f"must return a number from 0 to 1, got {seen}")
    return number


def reply_to(function: Function, request: str, forked: list[bool]) -> dict[str, Any]:
    """Return the reply to one request line.

    The request is a JSON line with `response`, `answer`, `alarm_seconds`, and `extra` as JSON;
    `forked` gets an item if this process forks.
    """
    raw = json.loads(request)
    reply: dict[str, Any] = {}
    printed = Printed()
    sys.stdout = sys.stderr = printed
    # The alarm ends this process if its parent died during a request.
    signal.alarm(int(raw["alarm_seconds"]))
    try:
        extra = json.loads(raw.get("extra", "{}"))
        given = score(function, raw["response"], raw["answer"], extra)
        reply["value" if isinstance(given, str) else "score"] = given
    except Exception as error:
        reply["error"] = str(error)[:1000]
        if isinstance(error.__cause__, TimeoutError):
            reply["timeout"] = True
    finally:
        signal.alarm(0)
    if printed.text:
        reply["printed"] = printed.text
    if forked:
        reply["forked"] = True
    return reply


def main(reference: str) -> int:
    """Load the function, report ready or the fault, answer until the parent closes the socket."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests, reply = take_streams()
    forked: list[bool] = []
    os.register_at_fork(after_in_parent=lambda: forked.append(True))
    own = os.getpid()

    def send(message: dict[str, Any]) -> None:
        """Reply, but end a copy of this process that comes back out of the function."""
        if os.getpid() != own:
            os._exit(0)
        reply(message)

    try:
        function = load(reference)
    except ValueError as error:
        send({"error": str(error)})
        return 1
    send({"outcome": "ready", "columns": function.columns})
    for request in requests:
        forked.clear()
        send(reply_to(function, request, forked))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
