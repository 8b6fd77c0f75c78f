"""The curate stage: read sources, select, write training prompts, held-out prompts and traces."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import numpy as np

from planish.records import layout
from planish.records.io import finished, read_manifest, write_set
from planish.records.prompts import PromptSet, TraceSet, prompt_id
from planish.records.refs import Ref, parse_pin
from planish.run.stage import Artifact, Context, Outcome, execute
from planish.stages.curate.config import CurateConfig
from planish.stages.curate.pass_rate import measure_pass_rates
from planish.stages.curate.problem import Ledger, Problem
from planish.stages.curate.records import Table, read_hub, read_table
from planish.stages.curate.report import curation_metrics, curation_report, source_name
from planish.stages.curate.select import Curated, curate
from planish.store import open_store

logger = logging.getLogger(__name__)


def run(
    root: str, config_sha256: str, prompts: Artifact, metrics: Artifact, report: Artifact
) -> None:
    """Make the prompts of a run.

    Args:
        root: URI of the run.
        config_sha256: digest of the run's configuration.
        prompts: gets the Ref of the training prompts.
        metrics: gets sizes and counts per filter.
        report: gets the curation report (Markdown).
    """
    execute(
        "curate",
        _work,
        root=root,
        config_sha256=config_sha256,
        outputs={"prompts": prompts, "metrics": metrics, "report": report},
    )


def _work(context: Context) -> Outcome:
    config = context.section(CurateConfig, "curate")
    ledger = Ledger()
    tables = read_tables(config, ledger)
    parents = dict(zip(("source", "evaluation_source"), (t.sha256 for t in tables), strict=False))
    if config.pass_rate_policy:
        parents["pass_rate_policy"] = parse_pin(config.pass_rate_policy)[1]
    target = layout.prompts(context.root)
    ready = finished(target, PromptSet.SCHEMA, parents=parents, config_sha256=context.config_sha256)
    if ready is not None:
        return _repeat(context, ready)
    measure = partial(measure_pass_rates, config=config, seed=context.seed)
    curated = curate(
        config, context.seed, tables, ledger, measure if config.pass_rate_policy else None
    )
    source = tables[0].sha256 if tables else ""
    text = curation_report(curated, source_name(curated.train), source)
    ref, numbers = _write(context, curated, parents, text)
    logger.info(
        "curated train=%d evaluation=%d traces=%d",
        *(len(curated.train), len(curated.evaluation), len(curated.traced)),
    )
    return Outcome(refs={"prompts": ref}, metrics=numbers, documents={"report": text})


def read_tables(config: CurateConfig, ledger: Ledger) -> list[Table]:
    """Read the configured data sets: none for generated tasks, else one or two.

    Raises:
        ConfigError: a data set cannot be read.
    """
    hub = partial(
        read_hub,
        config=config.hub_config,
        split=config.hub_split,
        revision=config.hub_revision,
    )
    named = [("", config.dataset), ("held-out ", config.evaluation_dataset)]
    return [
        read_table(dataset, skip_bad=config.skip_bad, ledger=ledger, hub=hub, label=label)
        for label, dataset in named
        if dataset
    ]


def _repeat(context: Context, ready: Ref) -> Outcome:
    """Hand back what an earlier attempt has finished."""
    manifest = read_manifest(ready.uri, sha256=ready.manifest_sha256)
    uri = layout.curation_report(context.root)
    text = open_store(uri).read(uri).decode("utf-8")
    return Outcome(
        refs={"prompts": ready},
        metrics=dict(manifest.attributes["metrics"]),
        documents={"report": text},
        already_done=True,
    )


def prompt_set(problems: Sequence[Problem]) -> PromptSet:
    """Return problems as a record."""
    return PromptSet(
        prompt_id=[prompt_id(p.messages, p.answer) for p in problems],
        messages=[p.messages for p in problems],
        answer=[p.answer for p in problems],
        verifier=[p.verifier for p in problems],
        source=[p.source for p in problems],
        pass_rate=np.array([p.pass_rate for p in problems], dtype=np.float32),
    )


def trace_set(problems: Sequence[Problem]) -> TraceSet:
    """Return the worked traces of problems as a record."""
    return TraceSet(
        prompt_id=[prompt_id(p.messages, p.answer) for p in problems],
        messages=[p.messages for p in problems],
        response=[p.trace or "" for p in problems],
        source=[p.source for p in problems],
    )


def _write(
    context: Context, curated: Curated, parents: dict[str, str], text: str
) -> tuple[Ref, dict[str, float]]:
    """Write both other sets and the report first: the training prompts mark the stage as done."""
    attributes = {"config_sha256": context.config_sha256, "seed": context.seed}
    if "source" in parents:
        attributes["source_sha256"] = parents["source"]
    evaluation = write_set(
        layout.evaluation_prompts(context.root),
        prompt_set(curated.evaluation),
        parents=parents,
        attributes=attributes,
    )
    traces = write_set(
        layout.traces(context.root),
        trace_set(curated.traced),
        parents=parents,
        attributes=attributes,
    )
    uri = layout.curation_report(context.root)
    open_store(uri).write(uri, text.encode("utf-8"))
    numbers = curation_metrics(curated)
    ref = write_set(
        layout.prompts(context.root),
        prompt_set(curated.train),
        parents=parents,
        attributes={
            **attributes,
            "evaluation_rows": len(curated.evaluation),
            "evaluation_sha256": evaluation.manifest_sha256,
            "trace_rows": len(curated.traced),
            "traces_sha256": traces.manifest_sha256,
            "metrics": numbers,
        },
    )
    return ref, numbers
