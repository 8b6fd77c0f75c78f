"""Doing a verb of `planish minder` in this process."""

from planish.__main__ import main
from planish.minder.lab.files import write_frame
from tests.minder_lab.simulator import simulate


def run(capsys, *arguments):
    """Return exit code, and what was printed."""
    code = main(["minder", *map(str, arguments)])
    return code, capsys.readouterr()


def simulated(path, seed=0, **options):
    """Write a simulated job and return its truth."""
    case = simulate(seed, **options)
    write_frame(path, case.frame)
    return case.truth
