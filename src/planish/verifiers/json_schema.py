"""Verifier that checks the JSON in a response against a schema, the row's ground truth.

The check runs in a child process with the time limit of verifiers, since patterns in a schema may
take forever. It downloads nothing: a `$ref` to another place makes the ground truth unusable.

Source: JSON Schema, draft 2020-12 and earlier drafts, as the library `jsonschema` checks them.
"""

from __future__ import annotations

import json
import re
from typing import Any

from planish.verifiers.own import shared_verifier
from planish.verifiers.verdict import Verdict, VerifierOptions

MAX_RESPONSE_CHARS = 200_000
MAX_STARTS = 1000
"""Most places at which a response without a code block is searched for a value."""

_BLOCK = re.compile(r"```[a-zA-Z]*[ \t]*\r?\n(.*?)```", re.DOTALL)


def verify_json_schema(response: str, answer: str, options: VerifierOptions) -> Verdict:
    """A response is right if its last JSON value follows the schema `answer`."""
    reference = "planish.verifiers.json_schema:follows_schema"
    return shared_verifier(reference)(response, answer, options)


def last_json(response: str) -> Any:
    """Return the last JSON value of a response.

    It is the last block between triple backticks that is one value. Without such a block it is the
    whole text, or else the last complete object or list in the text.

    Example:
        >>> last_json('I think {"a": 1} or rather {"a": [2]}.')
        {'a': [2]}

    Raises:
        ValueError: there is no value. `NaN` and `Infinity` are not JSON.
    """

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is no JSON")

    decoder = json.JSONDecoder(parse_constant=refuse)
    text = response[-MAX_RESPONSE_CHARS:]
    for whole in (*reversed(_BLOCK.findall(text)), text):
        try:
            return decoder.decode(whole.strip())
        except (ValueError, RecursionError):
            continue
    found: list[Any] = []
    end = 0
    for start in [match.start() for match in re.finditer(r"[{\[]", text)][-MAX_STARTS:]:
        if start < end:
            continue
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        found = [value]
    if not found:
        raise ValueError("no JSON in the response")
    return found[0]


def follows_schema(response: str, schema: str) -> bool:
    """Check a value against a schema; runs in a child process.

    Raises:
        ValueError: the schema is invalid.
        jsonschema.SchemaError: the schema is invalid.
    """
    from jsonschema.validators import validator_for
    from referencing import Registry

    rules = json.loads(schema)
    kind = validator_for(rules)
    kind.check_schema(rules)
    try:
        value = last_json(response)
    except ValueError:
        return False
    # With an empty registry the library does not download the targets of `$ref`.
    registry: Registry[Any] = Registry()
    return bool(kind(rules, registry=registry).is_valid(value))
