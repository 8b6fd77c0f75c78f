"""Writes docs/configuration.md from the classes, and what pods ask for from the profiles.

python -m tests.golden.write_configuration
"""

import ast
import functools
import inspect
import json
import textwrap
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from components.images import PROFILES
from pipelines.post_train import largest_requests
from planish.algorithms import ALGORITHMS
from planish.base.config import SECTIONS, Needs, Section, Wanted, section_class, toml_value

PAGE = Path(__file__).parents[2] / "docs/configuration.md"
PODS = Path(__file__).parents[2] / "src/planish/stages/prepare/profiles.json"

HEAD = """\
# Every setting

Written by `make golden` from the classes that check the settings; `none` switches off what may be
off. A run takes its preset, then a TOML file with the sections below, then overrides: `-p
overrides='train.learning_rate=1e-6'` of `planish submit`. An unknown key or a wrong type is an
error that names the key. A setting with another value than its default is refused without the
settings that its row says it needs; where a row names no value, any but the default will do.
Defaults are those of the class; the presets in `src/planish/base/presets/` set others: `-paper`
the published values, `-tiny` those of the demo, `-qwen2.5-0.5b` and `-qwen2.5-7b` sizes for one
machine of eight GPUs with 80 GB. `planish config show PRESET` prints every setting of one, with
overrides such as `run.seed=1` behind it.
"""


def page() -> str:
    """Return the page."""
    parts = [HEAD]
    for section in SECTIONS:
        if section == "algorithm":
            parts += [algorithms()]
        else:
            cls = section_class(section, {})
            parts += [table(f"`{section}`", cls, list(cls.model_fields))]
            for key, field in cls.model_fields.items():
                for inner in get_args(field.annotation):
                    if isinstance(inner, type) and issubclass(inner, Section):
                        title = f"`{section}.{key}`, each table"
                        parts += [table(title, inner, list(inner.model_fields))]
    return "\n".join(parts)


def algorithms() -> str:
    """Return the tables of the algorithms: what all share once, then what each adds."""
    classes = {name: section_class("algorithm", {"name": name}) for name in ALGORITHMS}
    first = next(iter(classes.values()))
    shared = [
        key
        for key, field in first.model_fields.items()
        if all(
            same(field, cls.model_fields.get(key)) and meaning(cls, key) == meaning(first, key)
            for cls in classes.values()
        )
    ]
    parts = [table("`algorithm`, whatever its name", first, shared)]
    for name, cls in classes.items():
        own = [key for key in cls.model_fields if key not in shared]
        parts += [table(f'`algorithm`, `name = "{name}"`', cls, own)]
    return "\n".join(parts)


def same(one: FieldInfo, other: FieldInfo | None) -> bool:
    """Tell whether a setting of two classes has one type and one default."""
    return other is not None and (one.default, one.annotation) == (other.default, other.annotation)


@functools.cache
def docstrings(cls: type) -> dict[str, str]:
    """Return the text below each attribute in the source of a class."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    return {
        place.target.id: str(text.value.value)
        for place, text in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(place, ast.AnnAssign)
        and isinstance(place.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }


def meaning(cls: type[Section], key: str) -> str:
    """Return what a setting means, in one line."""
    owners = [docstrings(base) for base in cls.__mro__ if key in inspect.get_annotations(base)]
    text = " ".join(owners[0].get(key, "").split())
    needed: dict[str, list[str]] = {}
    for needs in cls.declared(key, "needs"):
        who = "Needs" if isinstance(needs.when, Wanted) else f"{options(needs.when)} needs"
        needed.setdefault(who, []).append(need(needs))
    return " ".join([text, *(f"{who} {', '.join(each)}." for who, each in needed.items())])


def need(needs: Needs) -> str:
    """Return what a setting needs."""
    other = f"`{needs.path}`"
    if needs.values is Wanted.SAME:
        other = f"the same {other}"
    elif needs.values is not Wanted.IN_USE:
        other = f"{other} = {options(needs.values)}"
    others = " and ".join(f"`{key}` = {options(value)}" for key, value in needs.beside.items())
    return f"{other}{' where ' * bool(others)}{others}"


def options(values: Any) -> str:
    """Return one value or several as TOML."""
    each = values if isinstance(values, tuple) else (values,)
    return " or ".join(f"`{toml_value(value)}`" for value in each)


def table(title: str, cls: type[Section], keys: list[str]) -> str:
    """Return one section as a table."""
    rows = [f"## {title}", "", " ".join((cls.__doc__ or "").split()), ""]
    rows += ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    for key in keys:
        field = cls.model_fields[key]
        told = meaning(cls, key).replace("|", "\\|")
        rows.append(f"| `{key}` | {kind(field.annotation)} | {default(field)} | {told} |")
    return "\n".join([*rows, ""])


def kind(annotation: Any) -> str:
    """Return a type as a user writes it in TOML."""
    options = get_args(annotation)
    if NoneType in options:
        return f"{kind(next(o for o in options if o is not NoneType))} or none"
    if options and all(isinstance(option, (str, int)) for option in options):
        return ", ".join(f"`{option}`" for option in options)
    if get_origin(annotation) is dict:
        return "table"
    if options:
        return f"list of {kind(options[0])}"
    if issubclass(annotation, Section):
        return "tables or texts"
    return {
        "str": "text",
        "int": "integer",
        "float": "number",
        "bool": "true, false",
        "NoneType": "none",
    }.get(annotation.__name__, annotation.__name__)


def default(field: FieldInfo) -> str:
    """Return the default as TOML, empty where the key must be given."""
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return ""
    if value is None:
        return "`none`"
    shown = json.dumps(value).replace("|", "\\|")
    return f"`{shown}`"


def profiles() -> str:
    """Return what the pods of each profile ask for, as JSON for those who have only the package."""
    found = {name: json.loads(largest_requests(PROFILES[name])) for name in sorted(PROFILES)}
    return json.dumps(found, indent=2) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    PODS.write_text(profiles())
