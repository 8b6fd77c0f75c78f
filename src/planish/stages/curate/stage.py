"""The curate stage: read sources, select, write training prompts, held-out prompts and traces."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from planish import store
from planish.engines.config import EngineConfig
from planish.records import layout
from planish.records.io import finished, read_manifest, write_set
from planish.records.prompts import PromptSet, TraceSet, prompt_id
from planish.records.refs import parse_pin
from planish.run.stage import Artifact, Context, Outcome, execute
from planish.stages.curate.config import CurateConfig
from planish.stages.curate.pass_rate import measure_pass_rates, prompt_set
from planish.stages.curate.problem import CurationLedger
from planish.stages.curate.records import DataTable, read_hub, read_table
from planish.stages.curate.report import curation_metrics, curation_report
from planish.stages.curate.select import curate

logger = logging.getLogger(__name__)


def run(root: str, config_sha256: str, prompts: Artifact, report: Artifact) -> None:
    """Make the prompts of a run.

    Args:
        root: URI of the run.
        config_sha256: digest of the run's configuration.
        prompts: gets the Ref of the training prompts.
        report: gets the curation report (Markdown).
    """
    execute(
        "curate",
        make_prompts,
        root=root,
        config_sha256=config_sha256,
        outputs={"prompts": prompts, "report": report},
    )


def make_prompts(context: Context) -> Outcome:
    """Select problems and write the three sets unless an earlier attempt has."""
    config = context.section(CurateConfig, "curate")
    ledger = CurationLedger()
    tables = read_tables(config, ledger)
    parents = dict(zip(("source", "evaluation_source"), (t.sha256 for t in tables), strict=False))
    if config.pass_rate_policy:
        parents["pass_rate_policy"] = parse_pin(config.pass_rate_policy)[1]
    target = layout.prompts(context.root)
    ready = finished(target, PromptSet.SCHEMA, parents=parents, config_sha256=context.config_sha256)
    report_uri = layout.curation_report(context.root)
    if ready is not None:
        manifest = read_manifest(ready.uri, sha256=ready.manifest_sha256)
        return Outcome(
            refs={"prompts": ready},
            metrics=dict(manifest.attributes["metrics"]),
            documents={"report": store.read(report_uri).decode("utf-8")},
            already_done=True,
        )
    measure = partial(
        measure_pass_rates,
        config=config,
        engine_config=context.section(EngineConfig, "engine"),
        seed=context.seed,
    )
    curated = curate(
        config, context.seed, tables, ledger, measure if config.pass_rate_policy else None
    )
    text = curation_report(curated, tables[0].sha256 if tables else "")
    store.write(report_uri, text.encode("utf-8"))
    attributes: dict[str, Any] = {
        "config_sha256": context.config_sha256,
        "seed": context.seed,
        **({"source_sha256": parents["source"]} if "source" in parents else {}),
    }
    # The training prompts come last: they mark the stage as done.
    evaluation = write_set(
        layout.evaluation_prompts(context.root),
        prompt_set(curated.evaluation),
        parents=parents,
        attributes=attributes,
    )
    traced = curated.traced
    traces = write_set(
        layout.traces(context.root),
        TraceSet(
            prompt_id=[prompt_id(p.messages, p.answer) for p in traced],
            messages=[p.messages for p in traced],
            response=[p.trace or "" for p in traced],
            source=[p.source for p in traced],
        ),
        parents=parents,
        attributes=attributes,
    )
    attributes |= {
        "evaluation_rows": len(curated.evaluation),
        "evaluation_sha256": evaluation.manifest_sha256,
        "trace_rows": len(traced),
        "traces_sha256": traces.manifest_sha256,
        "metrics": curation_metrics(curated),
    }
    ref = write_set(target, prompt_set(curated.train), parents=parents, attributes=attributes)
    logger.info(
        "curated train=%d evaluation=%d traces=%d",
        len(curated.train),
        len(curated.evaluation),
        len(traced),
    )
    metrics = dict(attributes["metrics"])
    return Outcome(refs={"prompts": ref}, metrics=metrics, documents={"report": text})


def read_tables(config: CurateConfig, ledger: CurationLedger) -> list[DataTable]:
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
