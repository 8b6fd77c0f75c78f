"""Curves over iterations as data: where their numbers come from, how they are named and read.

A curve without numbers is left out of its chart, a chart without curves out of the page. Iterations
of value pretraining, in which the policy stands still, are shaded in every chart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planish.stages.report.facts import RunFacts
from planish.stages.report.figures.charts import Band, Chart, Line, Unit, line_chart


@dataclass(frozen=True)
class Source:
    """Where a series lies.

    Example:
        >>> Source("rollout", "num_generated_tokens", sum).key
        'num_generated_tokens'
    """

    stage: str
    """`update` for the update report, else the stage whose log holds it."""
    key: str
    """Name of the scalar."""
    combine: Callable[[list[float]], float] | None = None
    """How the values of parallel tasks become one; None is the mean, weighted by their groups."""


@dataclass(frozen=True)
class Curve:
    """One line of a chart."""

    label: str
    """Name in the legend."""
    color: str
    """Key of the palette."""
    sources: tuple[Source, ...]
    """The first that exists is drawn."""
    is_secondary: bool = False
    """Drawn thinner and dashed."""
    is_quiet: bool = False
    """Left out where it is 0 throughout."""
    unless: Source | None = None
    """Iterations in which this is not 0 have no point."""


@dataclass(frozen=True)
class Panel:
    """One chart made of curves."""

    title: str
    """Heading."""
    y_label: str
    """Quantity and unit of the vertical axis."""
    hint: str
    """How to read it."""
    curves: tuple[Curve, ...]
    """Lines."""
    unit: Unit = "number"
    """How values are written."""
    from_zero: bool = False
    """The vertical axis starts at 0."""
    is_log: bool = False
    """The vertical axis is logarithmic."""
    floor: float | None = None
    """The vertical axis ends here at the latest; lower points are drawn on its edge."""


def update(key: str) -> Source:
    """Return the source of a scalar of the update report."""
    return Source("update", key)


def series(facts: RunFacts, sources: Sequence[Source]) -> dict[int, float]:
    """Return iteration -> value of the first source that has any."""
    for source in sources:
        if source.stage == "update":
            found = {
                iteration: scalars[source.key]
                for iteration, scalars in sorted(facts.updates.items())
                if source.key in scalars
            }
        else:
            found = facts.per_iteration(source.stage, source.key, source.combine)
        if found:
            return found
    return {}


def pretraining(facts: RunFacts) -> tuple[Band, ...]:
    """Return the stretches of iterations that trained the critic alone."""
    numbers = [n for n, flag in series(facts, (update("pretraining"),)).items() if flag > 0]
    stretches: list[list[int]] = []
    for number in numbers:
        if stretches and number == stretches[-1][1] + 1:
            stretches[-1][1] = number
        else:
            stretches.append([number, number])
    return tuple(Band("value pretraining", first, last) for first, last in stretches)


def lines_of(facts: RunFacts, curves: Sequence[Curve]) -> list[Line]:
    """Return the curves that have numbers."""
    lines = []
    for curve in curves:
        found = series(facts, curve.sources)
        if curve.unless is not None:
            hidden = series(facts, (curve.unless,))
            found = {number: y for number, y in found.items() if not hidden.get(number)}
        if found and (any(found.values()) or not curve.is_quiet):
            lines.append(
                Line(curve.label, curve.color, [*found], [*found.values()], curve.is_secondary)
            )
    return lines


def legend(lines: Sequence[Line], bands: Sequence[Band] = ()) -> tuple[tuple[str, str, str], ...]:
    """Return the legend of curves and shaded stretches."""
    shaded = tuple((label, "line", "box") for label in dict.fromkeys(b.label for b in bands))
    drawn = ((x.label, x.color, "dash" if x.is_secondary else "line") for x in lines)
    return (*drawn, *shaded)


def draw(facts: RunFacts, panel: Panel) -> Chart | None:
    """Draw a chart made of curves; None where no curve has numbers."""
    lines = lines_of(facts, panel.curves)
    if not lines:
        return None
    bands = pretraining(facts)
    svg = line_chart(
        panel.title,
        lines,
        y_label=panel.y_label,
        unit=panel.unit,
        from_zero=panel.from_zero,
        is_log=panel.is_log,
        floor=panel.floor,
        bands=bands,
    )
    named = lines if len(panel.curves) > 1 else ()
    return Chart(panel.title, svg, panel.hint, legend(named, bands))
