"""Commands that move or compare data: verify, diff, export-hf, reshard, report, the DCP bridge."""

from __future__ import annotations

import argparse

from planish.checkpoint import monitor
from planish.checkpoint.cli import Lines, Progress, place_of
from planish.checkpoint.heatmap import bytes_text, rate_text, seconds_text
from planish.checkpoint.layouts import Layout
from planish.checkpoint.report_page import html_report
from planish.checkpoint.report_text import text_report, wall_seconds
from planish.checkpoint.rewrite import rewrite


def report(options: argparse.Namespace, _: Progress) -> Lines:
    """Yield the timings of a save as text; write the page where asked for."""
    place = place_of(options.path)
    timeline = monitor.read_timings(place)
    title = place.partition("#")[0]
    yield text_report(timeline, title=title, rank=options.rank).rstrip("\n")
    if options.html is not None:
        options.html.write_text(html_report(timeline, title=title, rank=options.rank), "utf-8")
        yield f"\nwritten {options.html}"


def reshard(options: argparse.Namespace, progress: Progress) -> Lines:
    """Write a checkpoint anew, or export it; yield the pin of the result last."""
    layout = Layout.parse(options.layout)
    made = rewrite(
        *(place_of(options.path), place_of(options.out), layout),
        parts=options.parts,
        roles=[options.role] if options.role else [],
        overwrite=options.overwrite,
        progress=lambda done, total: progress(f"reshard to {layout}", done, total),
    )
    if made.already_done:
        yield "already there"
    else:
        size, seconds = made.commit.total_bytes, wall_seconds(made.timeline)
        yield (
            f"{bytes_text(size)} in {made.commit.n_objects} objects for {layout.num_ranks} ranks, "
            f"{bytes_text(made.bytes_read)} read, {seconds_text(seconds)}, "
            f"{rate_text(size, seconds)}"
        )
    yield made.pin
