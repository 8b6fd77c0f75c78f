"""The page as one self-contained HTML file and as Markdown.

Every text is escaped here, by the template engine: nothing in a run can add markup, a link, an
image or a script to the page.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup

from planish.stages.report.page import Page
from planish.stages.report.words import visible

MAX_BYTES = 1 << 20
"""The Kubeflow page shows no larger HTML artifact."""
_MAX_CURATION = 60_000
_ALLOWED_TAGS = ("<code>", "</code>", "<br>")


def render_html(page: Page) -> str:
    """Return the page as HTML of less than `MAX_BYTES` bytes.

    A page that would be larger loses its samples, then its charts.
    """
    template = _environment(autoescape=True).get_template("report.html.j2")
    css = Markup(
        resources.files("planish.stages.report").joinpath("templates/report.css").read_text()
    )
    for drop in (
        (),
        ("comparisons",),
        ("comparisons", "curation"),
        ("comparisons", "curation", "charts"),
    ):
        kept: dict[str, Any] = {**vars(page), **{name: [] for name in drop}}
        kept["charts"] = [{**vars(chart), "svg": Markup(chart.svg)} for chart in kept["charts"]]
        kept["curation"] = _safe_markdown(str(kept["curation"] or ""))
        text = template.render(page=kept, css=css)
        if len(text.encode()) < MAX_BYTES:
            break
    return text


def render_markdown(page: Page) -> str:
    """Return the summary as Markdown; model text stays out of it."""
    environment = _environment(autoescape=False)
    environment.filters.update(cell=_cell, inline=_inline, fenced=_fenced)
    return environment.get_template("report.md.j2").render(page=page)


def _environment(*, autoescape: bool) -> Environment:
    return Environment(
        loader=PackageLoader("planish.stages.report"),
        autoescape=autoescape,
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _visible(value: object) -> object:
    """Make control and direction characters visible in everything that is printed."""
    return visible(value, limit=MAX_BYTES) if type(value) is str else value


def _safe_markdown(text: str) -> Markup:
    """Render Markdown with tables; of raw HTML only three bare tags, no links, no images."""
    parser = MarkdownIt("commonmark", {"html": True}).enable("table")
    parser.disable(["link", "image", "autolink", "reference", "html_block"])
    parser.add_render_rule("html_inline", _inline_tag)
    return Markup(parser.render(visible(text, limit=_MAX_CURATION)))


def _inline_tag(_: object, tokens: Sequence[Token], index: int, *__: object) -> str:
    tag = tokens[index].content
    return tag if tag in _ALLOWED_TAGS else html.escape(tag)


def _cell(text: str) -> str:
    """Escape text for a Markdown table."""
    return re.sub(r"([\\`*_\[\]<>|#~])", r"\\\1", " ".join(str(text).split()))


def _inline(text: str) -> str:
    """Return text as inline code, whatever it holds."""
    flat = " ".join(text.split())
    fence = "`" * (1 + _longest_fence(flat))
    return f"{fence} {flat} {fence}" if fence != "`" else f"`{flat}`"


def _fenced(text: str) -> str:
    """Return text as a code block, whatever it holds."""
    fence = "`" * max(3, 1 + _longest_fence(text))
    return f"{fence}text\n{text}\n{fence}"


def _longest_fence(text: str) -> int:
    """Return the length of the longest row of backticks."""
    return max((len(row) for row in re.findall(r"`+", text)), default=0)
