"""The curate stage: read sources, select, and write training prompts, held-out prompts, traces."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from planish import store
from planish.engines.config import EngineConfig
from planish.records import layout
from planish.records.io import finished, read_manifest, write_set
from planish.records.prompts import PromptSet, TraceSet, prompt_id
from planish.records.refs import Ref, parse_pin
from planish.run.stage import Artifact, Context, Outcome, execute
from planish.stages.curate.columns import with_function_columns
from planish.stages.curate.config import SET_KEY, CurateConfig
from planish.stages.curate.pass_rate import measure_pass_rates, prompt_set
from planish.stages.curate.problem import CurationLedger, Problem
from planish.stages.curate.records import DataTable, read_data
from planish.stages.curate.report import curation_metrics, curation_report
from planish.stages.curate.select import Curated, curate, set_problems
from planish.verifiers import VerifierOptions

logger = logging.getLogger(__name__)


def run(root: str, config_sha256: str, prompts: Artifact, report: Artifact) -> None:
    """Make the prompts of a run; `components/curate.py` describes the parameters."""
    execute(
        "curate",
        make_prompts,
        root=root,
        config_sha256=config_sha256,
        outputs={"prompts": prompts, "report": report},
    )


def make_prompts(context: Context) -> Outcome:
    """Select problems and write the three sets unless an earlier attempt has."""
    config = with_function_columns(context.section(CurateConfig, "curate"), context.config)
    ledger = CurationLedger()
    tables, set_tables = read_tables(config, ledger), read_set_tables(config, ledger)
    parents = dict(zip(("source", "evaluation_source"), (t.sha256 for t in tables), strict=False))
    parents |= {f"set_{name}": table.sha256 for name, table in set_tables.items()}
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
    pass_rates = partial(
        measure_pass_rates,
        config=config,
        engine_config=context.section(EngineConfig, "engine"),
        seed=context.seed,
        judging=VerifierOptions.of(context.config.get("reward", {})),
    )
    curated = curate(
        config,
        context.seed,
        tables,
        ledger,
        pass_rates if config.pass_rate_policy else None,
        sets=set_problems(config, set_tables, ledger),
    )
    text = curation_report(curated, tables[0].sha256 if tables else "")
    store.write(report_uri, text.encode("utf-8"))
    for name, problems in curated.sets.items():
        write_prompts(context, name, problems, set_tables[name].sha256)
    ref = _write_sets(context, curated, parents)
    metrics = curation_metrics(curated)
    return Outcome(refs={"prompts": ref}, metrics=metrics, documents={"report": text})


def _write_sets(context: Context, curated: Curated, parents: dict[str, str]) -> Ref:
    attributes: dict[str, Any] = {"config_sha256": context.config_sha256, "seed": context.seed}
    if "source" in parents:
        attributes["source_sha256"] = parents["source"]
    evaluation = write_set(
        layout.evaluation_prompts(context.root),
        prompt_set(curated.evaluation),
        parents=parents,
        attributes=attributes,
    )
    traced = TraceSet(
        prompt_id=[prompt_id(p.messages, p.answer) for p in curated.traced],
        messages=[p.messages for p in curated.traced],
        response=[p.trace or "" for p in curated.traced],
        source=[p.source for p in curated.traced],
    )
    traces = write_set(layout.traces(context.root), traced, parents=parents, attributes=attributes)
    attributes |= {
        "evaluation_rows": len(curated.evaluation),
        "evaluation_sha256": evaluation.manifest_sha256,
        "trace_rows": len(curated.traced),
        "traces_sha256": traces.manifest_sha256,
        "metrics": curation_metrics(curated),
    }
    logger.info(
        "curated train=%d evaluation=%d traces=%d",
        len(curated.train),
        len(curated.evaluation),
        len(curated.traced),
    )
    # The training prompts are written last: they mark the stage as done.
    train = prompt_set(curated.train)
    return write_set(layout.prompts(context.root), train, parents=parents, attributes=attributes)


def read_tables(config: CurateConfig, ledger: CurationLedger) -> list[DataTable]:
    """Read the configured data sets: none for a generated task, else one or two."""
    named = [("", config), ("held-out ", config.of_held_out())]
    return [
        read_data(settings, ledger, label=label) for label, settings in named if settings.dataset
    ]


def read_set_tables(config: CurateConfig, ledger: CurationLedger) -> dict[str, DataTable]:
    """Return the tables of the evaluation sets by name; raises as `read_tables`."""
    return {
        chosen.name: read_data(config.of_set(chosen), ledger, key=SET_KEY, label=f"{chosen.name}, ")
        for chosen in config.evaluation_sets
    }


def make_sets(context: Context) -> list[Ref]:
    """Write the prompts of the evaluation sets alone, for a run that trains on nothing."""
    config, ledger = context.section(CurateConfig, "curate"), CurationLedger()
    tables = read_set_tables(config, ledger)
    return [
        write_prompts(context, name, problems, tables[name].sha256)
        for name, problems in set_problems(config, tables, ledger).items()
    ]


def write_prompts(context: Context, name: str, problems: Sequence[Problem], source: str) -> Ref:
    """Write the prompts of the evaluation set `name`; `source` is the sha256 of its data set."""
    return write_set(
        layout.evaluation_prompts(context.root, name),
        prompt_set(problems),
        parents={"source": source},
        attributes={"config_sha256": context.config_sha256},
    )
