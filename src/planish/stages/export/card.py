"""The model card of an exported policy, from the records of its run.

The card reveals no address inside a company: it has only the last name of a file or bucket.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from planish.base.errors import ConfigError, PlanishError
from planish.base.text import code_span
from planish.records import EvalReport, read_report
from planish.records.manifest import Manifest
from planish.records.reports import evaluations
from planish.store.sources import open_folder, parse_source

logger = logging.getLogger(__name__)

CARD = "README.md"
_LICENCE = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}")
_LICENCE_LINE = re.compile(r"\A---\n(?:.*\n)*?license:[ \t]*['\"]?([A-Za-z0-9.-]+)")
_HEAD_BYTES = 1 << 16


def check_licence(licence: str) -> str:
    """Return a licence identifier in lower case; raise ConfigError if it is none."""
    if not _LICENCE.fullmatch(licence.lower()):
        raise ConfigError(
            f"a licence must be an identifier such as apache-2.0 or other, got {licence!r:.80}"
        )
    return licence.lower()


def base_licence(config: Mapping[str, Any]) -> str:
    """Return the licence that the card of the base model names; empty if none is known."""
    path = str(config.get("model", {}).get("path", ""))
    if not path or path.startswith("https://"):
        return ""
    try:
        revision = str(config["model"].get("revision", ""))
        folder = open_folder(
            parse_source(path, key="model.path"), key="model.path", revision=revision
        )
        if CARD not in folder.sizes:
            return ""
        head = folder.read(CARD, 0, min(_HEAD_BYTES, folder.sizes[CARD]))
    except PlanishError as error:
        logger.warning("licence of the base model not known error=%s", error)
        return ""
    match = _LICENCE_LINE.match(head.decode("utf-8", "replace").replace("\r\n", "\n"))
    return match[1].lower() if match and _LICENCE.fullmatch(match[1].lower()) else ""


def model_card(
    title: str, root: str, run: Mapping[str, Any], manifest: Manifest, licence: str
) -> str:
    """Return the card as Markdown, the same for the same records; an empty licence is left out."""
    config: Mapping[str, Mapping[str, Any]] = run["config"]
    model, data = config.get("model", {}), config.get("curate", {})
    base, is_hub_base = _public_name(str(model.get("path", "")), "model.path")
    dataset, is_hub_dataset = _public_name(str(data.get("dataset", "")), "curate.dataset")
    algorithm = str(config.get("algorithm", {}).get("name", ""))
    version = int(manifest.attributes["policy_version"])
    is_adapted = model.get("lora_rank")
    fields = ["library_name: transformers", "pipeline_tag: text-generation"]
    fields += [f"license: {licence}"] if licence else []
    fields += [f"base_model: {base}"] if is_hub_base else []
    fields += ["datasets:", f"- {dataset}"] if is_hub_dataset else []
    fields += ["tags:", "- planish", "- reinforcement-learning"]
    fields += [f"- {algorithm}"] if algorithm else []
    facts = {
        "base model": base or "none: a small model made for the run",
        "licence": licence or "not known: ask whom the base model belongs to",
        "data": dataset or f"generated tasks, {data.get('task', '')}",
        "verifier": str(data.get("verifier", "")),
        "preset": str(run.get("preset", "")) or "none",
        "algorithm": algorithm,
        **({"low-rank adapters": f"rank {model['lora_rank']}, merged"} if is_adapted else {}),
        "seed": str(config.get("run", {}).get("seed", "")),
        "iterations before this policy": str(version),
        "policy": f"sha256 {manifest.sha256} of manifest.json",
        "train state": manifest.parents.get("state", "none: no update yet"),
        "configuration": f"sha256 {run.get('config_sha256', '')}",
        "code": f"planish {run.get('code_version', '')}",
    }
    lines = ["---", *fields, "---", f"# {code_span(title)}", ""]
    lines += [f"Policy {version} of a run of reinforcement learning with planish.", ""]
    lines += ["| | |", "| --- | --- |"]
    for name, value in facts.items():
        cell = code_span(value).replace("|", r"\|")
        lines.append(f"| {name} | {cell} |")
    return "\n".join([*lines, "", *accuracy_table(root, version)])


def _public_name(address: str, key: str) -> tuple[str, bool]:
    """Return the public part of an address, and True if that is a name on the hub."""
    if not address:
        return "", False
    source = parse_source(address, key=key)
    if source.kind == "hub":
        return source.place, True
    return source.place.partition("?")[0].rstrip("/").rpartition("/")[2], False


def accuracy_table(root: str, exported: int) -> list[str]:
    """Return the accuracies of all evaluated policies as Markdown; that of `exported` is marked."""
    sets: dict[str, dict[int, EvalReport]] = {}
    for name, version, uri in evaluations(root):
        sets.setdefault(name, {})[version] = read_report(EvalReport, uri)
    if not sets:
        return ["No policy of the run has been evaluated.", ""]
    return [line for name, own in sorted(sets.items()) for line in _set_table(name, own, exported)]


def _set_table(name: str, reports: Mapping[int, EvalReport], exported: int) -> list[str]:
    newest = reports[max(reports)]
    conditions = newest.attributes.get("conditions", {})
    told = {
        "temperature": conditions.get("temperature"),
        "top-p": conditions.get("top_p"),
        "at most tokens": conditions.get("max_response_tokens"),
    }
    samples = newest.scalars["num_samples"]
    scores = ["greedy"] if "greedy" in newest.scalars else []
    passes = [score for score in newest.scalars if score.startswith("pass@")]
    scores += sorted(passes, key=lambda score: int(score[5:]))[1:]
    lines = [
        f"## Accuracy on {name or 'held-out prompts'}",
        "",
        f"{newest.scalars['num_prompts']:.0f} prompts, {samples:.0f} samples each"
        + "".join(f", {what} {value}" for what, value in told.items() if value is not None)
        + ". The error is one standard error of sampling, prompts held fixed.",
        "",
        "| " + " | ".join(["policy", f"avg@{samples:.0f}", *scores]) + " |",
        "| " + " | ".join(["---:"] * (2 + len(scores))) + " |",
    ]
    for version, report in sorted(reports.items()):
        scalars = report.scalars
        error = scalars.get("accuracy_standard_error")
        spread = f" +- {100 * error:.1f}" if error is not None else ""
        cells = [f"{100 * scalars['accuracy']:.1f} %{spread}"]
        cells += [f"{100 * scalars[n]:.1f} %" if n in scalars else "" for n in scores]
        label = f"**{version}, this one**" if version == exported else str(version)
        lines.append("| " + " | ".join([label, *cells]) + " |")
    return [*lines, ""]
