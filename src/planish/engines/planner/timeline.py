"""Timeline of ranks and links as a self-contained SVG: one row per rank and link.

Colours follow the light or dark scheme of the reader; a span says its times when pointed at.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from planish.engines.planner.pipeline import Served

ROWS_SHOWN = 8
"""Rows of each kind in a picture; with more ranks it names their number."""
LABELS = {
    "attention": "attention",
    "dispatch": "link to experts",
    "experts": "experts",
    "combine": "link back",
}
WIDTH, LEFT, TOP, HEIGHT, GAP = 1000, 132, 58, 18, 10
"""Pixels: of the drawing, of the names, of the title, of a row, between kinds."""
STYLE = """
text { font: 12px sans-serif; fill: #333 } .title { font-size: 15px; font-weight: 600 }
.back { fill: #f1f3f5 } .tick { stroke: #c8ccd0 }
.b0 { fill: #0072b2 } .b1 { fill: #d55e00 } .b2 { fill: #009e73 } .b3 { fill: #cc79a7 }
.b4 { fill: #e69f00 } .b5 { fill: #56b4e9 } .b6 { fill: #7a7a7a } .b7 { fill: #a65628 }
@media (prefers-color-scheme: dark) {
text { fill: #ddd } .back { fill: #2a2d31 } .tick { stroke: #555 } svg { background: #16181b } }
"""


def timeline_svg(spans: Sequence[Served], title: str, *, layers: int) -> str:
    """Return the picture of the first layers of an iteration."""
    shown = [span for span in spans if span.layer < layers and span.kind in LABELS]
    start = min((span.start for span in shown), default=0.0)
    end = max((span.end for span in shown), default=1.0)
    scale = (WIDTH - LEFT - 12) / ((end - start) or 1.0)
    parts: list[str] = []
    top, places = TOP, {}
    for kind, label in LABELS.items():
        ranks = sorted({span.rank for span in shown if span.kind == kind})
        for rank in ranks[:ROWS_SHOWN]:
            places[kind, rank] = top
            parts += [
                f'<text x="{LEFT - 8}" y="{top + 13}" text-anchor="end">{label} {rank}</text>',
                f'<rect class="back" x="{LEFT}" y="{top}" width="{WIDTH - LEFT - 12}" '
                f'height="{HEIGHT - 2}"/>',
            ]
            top += HEIGHT
        if len(ranks) > ROWS_SHOWN:
            words = f"{ROWS_SHOWN} of {len(ranks)} ranks"
            parts.append(f'<text x="{LEFT - 8}" y="{top + 12}" text-anchor="end">{words}</text>')
            top += HEIGHT
        top += GAP
    for step in range(6):
        x = LEFT + step * (WIDTH - LEFT - 12) / 5
        words = f"{1e3 * (end - start) * step / 5:.2f} ms"
        anchor = "end" if step == 5 else "middle"
        parts += [
            f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{top}"/>',
            f'<text x="{x:.1f}" y="{top + 14}" text-anchor="{anchor}">{words}</text>',
        ]
    for span in shown:
        if (span.kind, span.rank) not in places:
            continue
        left, width = LEFT + (span.start - start) * scale, (span.end - span.start) * scale
        words = (
            f"{LABELS[span.kind]} {span.rank}, micro-batch {span.micro_batch}, layer "
            f"{span.layer}: {1e6 * span.start:.0f} to {1e6 * span.end:.0f} us"
        )
        parts.append(
            f'<rect class="b{span.micro_batch % 8}" x="{left:.2f}" '
            f'y="{places[span.kind, span.rank]}" width="{max(width - 0.6, 0.4):.2f}" '
            f'height="{HEIGHT - 2}"><title>{words}</title></rect>'
        )
    numbers = sorted({span.micro_batch for span in shown})
    for place, number in enumerate(numbers):
        x = LEFT + 120 * place
        parts += [
            f'<rect class="b{number % 8}" x="{x}" y="30" width="12" height="12"/>',
            f'<text x="{x + 17}" y="41">micro-batch {number}</text>',
        ]
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + 24}" role="img">\n'
        f"<style>{STYLE}</style>\n"
        f'<text class="title" x="{LEFT}" y="20">{escape(title)}</text>\n{body}\n</svg>\n'
    )
