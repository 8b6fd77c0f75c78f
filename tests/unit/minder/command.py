"""Doing a verb of `planish minder` in this process."""

from __future__ import annotations

from planish.__main__ import main


def run(capsys, *arguments):
    """Return exit code, and what was printed."""
    code = main(["minder", *map(str, arguments)])
    return code, capsys.readouterr()
