"""Figures of a fixed size in pixels, and their export as SVG that takes its colours from the page.

It knows nothing of runs or metrics. Colours are names of the page's palette: they leave as CSS
variables, so that one drawing serves light and dark pages. Equal drawings give equal text.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from xml.etree import ElementTree

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

PALETTE: dict[str, str] = {
    "ink": "#010101",
    "muted": "#010102",
    "grid": "#010103",
    "surface": "#010104",
    "line": "#010105",
    "blue": "#010111",
    "orange": "#010112",
    "teal": "#010113",
    "red": "#010114",
    "violet": "#010115",
    "slate": "#010116",
}
"""Name of a page colour to the stand-in that matplotlib draws with."""

_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "path.simplify": True,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 12,
    "axes.edgecolor": PALETTE["grid"],
    "axes.labelcolor": PALETTE["muted"],
    "axes.labelsize": 12,
    "axes.linewidth": 1,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.formatter.useoffset": False,
    "grid.color": PALETTE["grid"],
    "grid.linewidth": 1,
    "xtick.color": PALETTE["muted"],
    "ytick.color": PALETTE["muted"],
    "xtick.labelsize": 12,
    "ytick.labelsize": 12,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "xtick.major.pad": 7,
    "ytick.major.pad": 7,
    "lines.linewidth": 2.25,
    "lines.solid_capstyle": "round",
    "lines.solid_joinstyle": "round",
    "text.color": PALETTE["ink"],
    "text.parse_math": False,
    "hatch.linewidth": 1,
}

_SVG = "http://www.w3.org/2000/svg"
_XLINK = "http://www.w3.org/1999/xlink"
_FONT_SHORTHAND = re.compile(r"font: (?P<weight>[^;]*?)(?P<size>[\d.]+px) [^;]+")
_FONT_FAMILY = re.compile(r"font-family: [^;]+;? ?")
_NO_ROTATION = re.compile(r"rotate\(-?0(\.0)? ")
_COLOR = {stand_in: f"var(--{name})" for name, stand_in in PALETTE.items()}
_ANY_COLOR = re.compile("|".join(_COLOR))


@dataclass
class Canvas:
    """One figure under construction.

    Example:
        >>> with canvas("demo", width=200, height=100) as page:
        ...     _ = page.axes.plot([1, 2], [3, 4], color=PALETTE["blue"])
        >>> page.svg.startswith("<svg")
        True
    """

    figure: Figure
    """Holds everything; 72 dots per inch, so one unit is one CSS pixel."""
    axes: Any
    """The only axes (matplotlib ships no types that strict checking accepts)."""
    tips: dict[str, str] = field(default_factory=dict)
    """Group id of a drawn element to the text shown when the pointer rests on it."""
    svg: str = ""
    """The finished drawing; empty until the block ends."""

    def tip(self, text: str) -> str:
        """Return a fresh group id whose element will show `text`."""
        key = f"tip{len(self.tips)}"
        self.tips[key] = text
        return key


@contextmanager
def canvas(
    name: str,
    *,
    width: int = 540,
    height: int = 236,
    left: int = 52,
    right: int = 14,
    top: int = 30,
    bottom: int = 44,
) -> Iterator[Canvas]:
    """Open a figure; sizes and margins are CSS pixels; `name` makes ids unique on a page."""
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(width / 72, height / 72), dpi=72)
        FigureCanvasSVG(figure)
        box = (
            left / width,
            bottom / height,
            (width - left - right) / width,
            (height - top - bottom) / height,
        )
        page = Canvas(figure, figure.add_axes(box))
        page.axes.tick_params(which="both", left=False, bottom=False)
        yield page
        page.svg = _export(figure, name, page.tips)


def _export(figure: Figure, name: str, tips: Mapping[str, str]) -> str:
    """Return a figure as SVG whose colours, font and ids are those of the page."""
    buffer = io.StringIO()
    blank = {"Date": None, "Creator": None, "Format": None, "Type": None}
    figure.savefig(buffer, format="svg", transparent=True, metadata=blank)
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    root = ElementTree.fromstring(buffer.getvalue())
    for extra in [*root.findall(f"{{{_SVG}}}metadata"), *root.findall(f"{{{_SVG}}}defs[1]")]:
        if extra.find(f"{{{_SVG}}}clipPath") is None:
            root.remove(extra)
    referenced: set[str] = set()
    for element in root.iter():
        for value in element.attrib.values():
            referenced.update(re.findall(r"url\(#([^)]+)\)", value))
        referenced.add(element.get(f"{{{_XLINK}}}href", "").removeprefix("#"))
    # A list: tool tips are added on the way and must not be visited.
    for element in list(root.iter()):
        _clean(element, referenced, tips)
    width, height = root.get("viewBox", "0 0 0 0").split()[2:]
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.set("role", "img")
    root.set("aria-label", name)
    root.set("style", f"max-width: {float(width):.0f}px; aspect-ratio: {width} / {height}")
    text = ElementTree.tostring(root, encoding="unicode")
    return _ANY_COLOR.sub(lambda match: _COLOR[match[0]], text)


def _clean(element: ElementTree.Element, referenced: set[str], tips: Mapping[str, str]) -> None:
    """Drop ids that nothing uses, add tool tips, and let text take the font of the page."""
    element.tail = None
    if element.tag != f"{{{_SVG}}}text":
        element.text = None
    key = element.get("id", "")
    if key in tips:
        element.set("class", "tip")
        title = ElementTree.Element(f"{{{_SVG}}}title")
        title.text = tips[key]
        element.insert(0, title)
    if key and key not in referenced:
        del element.attrib["id"]
    if _NO_ROTATION.match(element.get("transform", "")):
        del element.attrib["transform"]
    style = element.get("style", "")
    if "font" in style:
        style = _FONT_SHORTHAND.sub(r"font-weight: \g<weight>; font-size: \g<size>", style)
        element.set("style", _FONT_FAMILY.sub("", style).replace("font-weight: ; ", ""))
