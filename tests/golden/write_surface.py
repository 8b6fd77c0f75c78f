"""Writes what people and programs rely on: `python -m tests.golden.write_surface`.

Options of command lines, columns of records, names of metrics, exported names, keys of the
configuration. A change here is a change for users: it belongs in the changelog.
"""

import argparse
import inspect
from pathlib import Path

import planish
import planish.checkpoint
import planish.records
import planish.store
from planish.__main__ import parser
from planish.algorithms import ALGORITHMS
from planish.base.config import SECTIONS, section_class
from planish.base.telemetry import METRICS
from planish.records import PromptSet, RewardSet, RolloutSet, TraceSet, ValueSet, WaitingSet
from planish.run.__main__ import STAGES, stage_run

FOLDER = Path(__file__).parent / "surface"
PACKAGE = Path(planish.records.__file__).parents[1]


def commands() -> str:
    """One line per option of `planish` and of every stage."""
    lines = options_of(parser(), "planish")
    for stage in sorted(STAGES):
        for parameter in inspect.signature(stage_run(stage)).parameters.values():
            has_default = parameter.default is not inspect.Parameter.empty
            default = f" = {parameter.default!r}" if has_default else ""
            lines.append(f"planish.run {stage} --{parameter.name}: {parameter.annotation}{default}")
    return "".join(f"{line}\n" for line in lines)


def options_of(top: argparse.ArgumentParser, name: str) -> list[str]:
    """One line per option of every command below a parser."""
    lines = []
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command, sub in sorted(action.choices.items()):
                lines += options_of(sub, f"{name} {command}")
        elif name != "planish":
            lines.append(f"{name} {' '.join(action.option_strings) or action.dest.upper()}")
    return lines


def columns() -> str:
    """One line per column of every record."""
    return "".join(
        f"{cls.SCHEMA} {column.name}: {column.kind}\n"
        for cls in (PromptSet, RewardSet, RolloutSet, TraceSet, ValueSet, WaitingSet)
        for column in cls.COLUMNS
    )


def metrics() -> str:
    """One line per metric."""
    return "".join(f"{m.name} {m.kind} {','.join(m.labels) or '-'}\n" for m in METRICS)


def exports() -> str:
    """One line per exported name of the packages that others import from."""
    return "".join(
        f"{module.__name__}.{name}\n"
        for module in (planish, planish.checkpoint, planish.records, planish.store)
        for name in sorted(module.__all__)
    )


def configuration() -> str:
    """One line per key of every section; defaults are left to the tests of the sections."""
    lines = []
    for section in sorted(SECTIONS):
        names = sorted(ALGORITHMS) if section == "algorithm" else [""]
        for name in names:
            cls = section_class(section, {"name": name} if name else {})
            title = f"{section}[{name}]" if name else section
            lines += [f"{title}.{key}\n" for key in cls.model_fields]
    return "".join(lines)


SURFACES = {
    "columns.txt": columns,
    "commands.txt": commands,
    "configuration.txt": configuration,
    "exports.txt": exports,
    "metrics.txt": metrics,
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, surface in SURFACES.items():
        (FOLDER / name).write_text(surface())


if __name__ == "__main__":
    main()
