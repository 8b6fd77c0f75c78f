"""Commands that move or compare data: verify, diff, export-hf, reshard, report, the DCP bridge."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path

from planish import store
from planish.base.errors import EXIT_FAILED, ConfigError
from planish.checkpoint.cli.command import Ended, Lines, Progress, Table, checkpoint_of, place_of
from planish.checkpoint.convert.diff import diff as diff_checkpoints
from planish.checkpoint.convert.layouts import Layout
from planish.checkpoint.convert.merge import merge, merge_with_folder, policy_role
from planish.checkpoint.convert.rewrite import rewrite
from planish.checkpoint.load.reader import open_state
from planish.checkpoint.load.verify import verify as verify_checkpoint
from planish.checkpoint.watch import monitor
from planish.checkpoint.watch.heatmap import bytes_text, rate_text, seconds_text
from planish.checkpoint.watch.report_page import html_report
from planish.checkpoint.watch.report_text import text_report, wall_seconds
from planish.records.manifest import manifest_uri, read_manifest
from planish.records.refs import Ref


def report(options: argparse.Namespace, _: Progress) -> Lines:
    """Yield the timings of a save or load as text; write the page where asked for."""
    place = place_of(options.path)
    timeline = monitor.read_timings(place, "load" if options.load else "save")
    title = place.partition("#")[0]
    yield text_report(timeline, title=title, rank=options.rank).rstrip("\n")
    if options.html is not None:
        options.html.write_text(html_report(timeline, title=title, rank=options.rank), "utf-8")
        yield f"\nwritten {options.html}"


def reshard(options: argparse.Namespace, progress: Progress) -> Lines:
    """Write a checkpoint anew, or export it; yield the pin of the result last."""
    layout = Layout.parse(options.layout)
    if layout.is_merged:
        yield from export_hf(options, progress)
        return
    made = rewrite(
        *(checkpoint_of(options.path), place_of(options.out), layout),
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


def verify(options: argparse.Namespace, progress: Progress) -> Lines:
    """Check a checkpoint; yield every fault, and exit with 1 if there is one."""
    found = verify_checkpoint(
        checkpoint_of(options.path),
        options.level,
        progress=lambda done, total: progress("verify", done, total),
    )
    if not found.is_intact:
        rows = [
            [fault.file, fault.block if fault.block >= 0 else "", fault.text]
            for fault in found.faults
        ]
        yield Table(f"{found.uri}: {len(rows)} faults", ("object", "block", "what"), rows)
        raise Ended(EXIT_FAILED)
    how = {"meta": "metadata read", "size": "all there", "crc": "every block intact"}
    yield (
        f"{found.uri}: {how[found.level]}, {found.num_objects} objects, {found.num_tensors} "
        f"tensors, {bytes_text(found.num_bytes)} read"
    )


def diff(options: argparse.Namespace, progress: Progress) -> Lines:
    """Compare two checkpoints bit by bit; yield how they differ, and exit with 1 if they do."""
    found = diff_checkpoints(
        *(checkpoint_of(options.a), checkpoint_of(options.b)),
        progress=lambda done, total: progress("diff", done, total),
    )
    if found.is_equal:
        yield f"equal: {found.num_equal} tensors, {bytes_text(found.num_bytes)}"
        return
    rows: list[list[object]] = [[name, "only in the first", "", ""] for name in found.only_a]
    rows += [[name, "only in the second", "", ""] for name in found.only_b]
    rows += [[f"role {role}", "shared small values", "", ""] for role in found.values]
    rows += [
        [one.name, one.reason, one.num_elements or "", "" if one.max_abs != one.max_abs else
         one.max_abs]
        for one in found.differing
    ]  # fmt: skip
    more = f", the first {options.limit} shown" if len(rows) > options.limit else ""
    title = f"{len(rows)} differences{more}; {found.num_equal} tensors are equal"
    columns = ("tensor", "what differs", "elements", "largest difference")
    yield Table(title, columns, rows[: options.limit])
    raise Ended(EXIT_FAILED)


def export_hf(options: argparse.Namespace, progress: Progress) -> Lines:
    """Write the policy of a checkpoint as a Hugging Face folder; yield its pin."""
    yield _merged(options, progress).pin()


def _merged(options: argparse.Namespace, progress: Progress) -> Ref:
    def told(done: int, total: int) -> None:
        progress("export" if done < total else "store", done, total)

    place, out, source = checkpoint_of(options.path), place_of(options.out), options.source
    pin = source if "#sha256=" in source else ""
    if source and not pin and store.exists(manifest_uri(place_of(source))):
        pin = read_manifest(place_of(source)).ref(place_of(source)).pin()
    if pin:
        return merge(place, out, policy=pin, attributes={}, role=options.role, progress=told)
    if source and not Path(source).is_dir():
        raise ConfigError(
            f"`--source` must be a policy or a local folder with `config.json`, got {source!r}"
        )
    folder = Path(source) if source else None
    return merge_with_folder(place, out, folder=folder, role=options.role, progress=told)


def import_dcp(options: argparse.Namespace, progress: Progress) -> Lines:
    """Turn a folder of torch.distributed.checkpoint into a checkpoint; yield its pin."""
    with _bridge():
        from planish.checkpoint.convert.dcp_bridge import import_dcp as convert

        progress("import", 0, 0)
        made = convert(
            *(options.folder, place_of(options.out)),
            step=options.step,
            role=options.role,
            overwrite=options.overwrite,
        )
    yield made.pin


def export_dcp(options: argparse.Namespace, progress: Progress) -> Lines:
    """Turn a checkpoint into a folder that torch.distributed.checkpoint reads."""
    with _bridge():
        from planish.checkpoint.convert.dcp_bridge import export_dcp as convert

        progress("export", 0, 0)
        opened = open_state(checkpoint_of(options.path))
        role = policy_role(sorted(set(opened.metadata.tensors.roles)), options.role)
        convert(opened.pin, options.folder, role=role)
    yield f"written {options.folder}"


@contextlib.contextmanager
def _bridge() -> Iterator[None]:
    """Tell what a user can mend as an error of the configuration."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the DCP format needs torch, but `{error.name}` is not installed; install the extra "
            "`train`"
        ) from None
    except (FileExistsError, TypeError) as error:
        raise ConfigError(str(error)) from None
