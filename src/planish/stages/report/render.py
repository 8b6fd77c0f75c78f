"""The page as one self-contained HTML file and as Markdown.

The template engine escapes every text, so no content of a run can add markup, a link, an image or a
script to the page.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup

from planish.base.text import code_cell, code_span, longest_fence
from planish.stages.report.figures.charts import Chart
from planish.stages.report.text import number, one_line, utc, visible

MAX_BYTES = 1 << 20
"""Size limit of an HTML artifact that the Kubeflow page shows, in bytes."""
_MAX_CURATION = 60_000


def render_html(page: Mapping[str, Any]) -> str:
    """Return the result of `build_page` as HTML of less than `MAX_BYTES` bytes.

    A larger page loses its samples, then the curation report, then its charts.
    """
    kept = dict(page)
    for drop in ((), ("comparisons",), ("curation",), ("charts", "recovery")):
        kept |= dict.fromkeys(drop, "")
        charts = {name: drawn(kept[name]) for name in ("recovery", "charts")}
        curation = _safe_markdown(kept["curation"])
        text = fill("report.html.j2", {**kept, **charts, "curation": curation})
        if len(text.encode()) < MAX_BYTES:
            break
    return text


def drawn(charts: Sequence[Chart]) -> list[dict[str, Any]]:
    """Return charts for the templates; their drawings are the only text that is not escaped."""
    return [{**chart._asdict(), "svg": Markup(chart.svg)} for chart in charts]


def fill(template: str, page: Mapping[str, Any]) -> str:
    """Return a template filled with `page`, as HTML in the report's style, all text escaped."""
    css = resources.files("planish.stages.report").joinpath("templates/report.css").read_text()
    environment = _environment(autoescape=True)
    return environment.get_template(template).render(page=page, css=Markup(css))


def render_markdown(page: Mapping[str, Any]) -> str:
    """Return the result of `build_page` as Markdown, without text of the model."""
    environment = _environment(autoescape=False)
    environment.filters.update(cell=_cell, inline=code_span, code=code_cell, fenced=_fenced)
    return environment.get_template("report.md.j2").render(page=page)


def _environment(*, autoescape: bool) -> Environment:
    environment = Environment(
        loader=PackageLoader("planish.stages.report"),
        autoescape=autoescape,
        undefined=StrictUndefined,
        # Control and direction characters become visible in all printed text.
        finalize=lambda value: visible(value, limit=MAX_BYTES) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(number=number, one_line=one_line, utc=utc, visible=visible)
    return environment


def _safe_markdown(text: str) -> Markup:
    """Render Markdown with tables; no raw HTML, no links, no images."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    parser.disable(["link", "image", "autolink", "reference"])
    return Markup(parser.render(visible(text, limit=_MAX_CURATION)))


def _cell(text: str) -> str:
    """Return text for a Markdown table: as code if it contains an identifier, else escaped."""
    if re.search(r"\w_\w", text):
        return code_cell(text)
    return re.sub(r"([\\`*_\[\]<>&|#~])", r"\\\1", " ".join(text.split()))


def _fenced(text: str) -> str:
    fence = "`" * max(3, 1 + longest_fence(text))
    return f"{fence}text\n{text}\n{fence}"
