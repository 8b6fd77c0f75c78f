"""The evaluate stage: sample, verify and score the policies before, during and after a run."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from planish import store
from planish.base.errors import ObjectMissing
from planish.records import layout
from planish.records.io import finished, read_manifest, read_set, write_set
from planish.records.prompts import PromptSet
from planish.records.refs import Ref, Scalar, parse_pin
from planish.records.reports import (
    BestPolicy,
    EvalReport,
    Scalars,
    evaluation_names,
    pin_best,
    read_report,
    write_report,
)
from planish.records.rollouts import RolloutSet
from planish.run.stage import Artifact, Context, Outcome, execute, read_run
from planish.stages.evaluate.config import EvaluateConfig
from planish.stages.evaluate.score import Judged, rise_error, scalars
from planish.verifiers import VerifierOptions
from planish.verifiers.judging import Judging, Verdicts, to_columns

if TYPE_CHECKING:
    from planish.engines import OpenEngine
    from planish.engines.base import BaseEngine
    from planish.models.tokens import Tokenizer

logger = logging.getLogger(__name__)

HELD_OUT = ""
"""Name that stands for the held-out prompts instead of an evaluation set."""
MARKS = "marks"
"""Attribute of a report with `Judged.marks` of its sampled rollouts."""
CONDITIONS = {
    *("max_prompts", "max_response_tokens", "num_samples", "temperature", "top_p"),
}
"""Settings that must be equal for the scores of two policies to be comparable."""
SAMPLED, GREEDY = "rollouts", "temperature-0"
"""Folders of an evaluation with its sampled and its greedy rollouts."""


def run(
    root: str,
    config_sha256: str,
    baseline_pin: str,
    policy_pin: str,
    evaluation: Artifact,
    metrics: Artifact,
) -> None:
    """Measure the policies before and after a run on held-out prompts and evaluation sets.

    `components/evaluate.py` describes the parameters.
    """

    def work(context: Context) -> Outcome:
        measured = measure(context, (baseline_pin, policy_pin))
        scores = measured.of_best()
        for name, own in measured.scores.items():
            compared = compare(own[0].report, own[-1].report)
            scores |= {metric_name(name, key): value for key, value in compared.items()}
        newest = measured.scores[HELD_OUT][-1].ref
        done = measured.already_done
        return Outcome(refs={"evaluation": newest}, metrics=scores, already_done=done)

    outputs = {"evaluation": evaluation, "metrics": metrics}
    execute("evaluate", work, root=root, config_sha256=config_sha256, outputs=outputs)


def sampling_of(model: str) -> dict[str, float]:
    """Return temperature and top-p of evaluations in the run of a policy; 1 for other models.

    `model` is the address of a policy, without its digest, or of any model.
    """
    root, _, _ = model.rpartition("/policies/")
    is_stored = root.startswith(("s3://", "file://")) and store.exists(layout.run_file(root))
    known = read_run(root)["config"].get("evaluate", {}) if is_stored else {}
    return {name: known.get(name, 1.0) for name in ("temperature", "top_p")}


@dataclass(frozen=True)
class Scored:
    """Scores of one policy on one set of prompts."""

    name: str
    """Name of the set; empty for the held-out prompts."""
    ref: Ref
    report: EvalReport
    is_new: bool
    """True if this attempt computed it."""


@dataclass(frozen=True)
class Measured:
    """Result of an evaluation of several policies."""

    scores: dict[str, list[Scored]]
    """Name of each set of prompts, held-out prompts first, to the scores of each policy."""
    best: BestPolicy | None
    """Best policy of this run so far; None if only a policy of another run was evaluated."""

    @property
    def already_done(self) -> bool:
        """True if this attempt computed nothing."""
        return not any(scored.is_new for own in self.scores.values() for scored in own)

    def of_best(self) -> Scalars:
        """Return the version and the accuracy of the best policy."""
        if self.best is None:
            return {}
        version = float(self.best.policy_version)
        return {"best_accuracy": self.best.accuracy, "best_policy_version": version}


def metric_name(name: str, score: str) -> str:
    """Return the name of a set's score among the metrics of the stage.

    Example:
        >>> metric_name("math-500", "accuracy_after"), metric_name("", "accuracy_after")
        ('math_500_accuracy_after', 'accuracy_after')
    """
    return f"{re.sub('[^a-z0-9]', '_', name)}_{score}" if name else score


def measure(context: Context, pins: Iterable[str], opened: OpenEngine | None = None) -> Measured:
    """Evaluate policies on all sets unless an earlier attempt has, and pin the best of the run.

    `opened` opens the engine if one is needed; the default is `open_engine`.
    """
    names = evaluation_names(context.config)
    scores: dict[str, list[Scored]] = {name: [] for name in names}
    for pin in dict.fromkeys(pins):
        for scored in measure_policy(context, pin, names, opened):
            scores[scored.name].append(scored)
    return Measured(scores, pin_best(context.root, scores[HELD_OUT][-1].report))


def measure_policy(
    context: Context, pin: str, names: Iterable[str], opened: OpenEngine | None = None
) -> Iterator[Scored]:
    """Evaluate a policy on one set after the other; all sets share one engine."""
    config = context.section(EvaluateConfig, "evaluate")
    uri, sha256 = parse_pin(pin)
    version = int(read_manifest(uri, sha256=sha256).attributes["policy_version"])
    # A policy of another root goes to version 0: its own version may exist on this root.
    is_own = uri == layout.policy(context.root, version)
    with ExitStack() as stack:
        served = cache(lambda: stack.enter_context(_open(context, config, pin, opened)))
        for name in names:
            place = layout.evaluation_prompts(context.root, name)
            digest = read_manifest(place).sha256
            folder = layout.evaluation(context.root, version if is_own else 0, name)
            prompts = _prompts(place, digest, config.max_prompts)
            parents = {"policy": sha256, "prompts": digest}
            task = _Task(context, config, name, version, folder, prompts, parents, served)
            yield task.evaluate()


def _prompts(place: str, digest: str, most: int) -> PromptSet:
    prompts = read_set(PromptSet, place, sha256=digest)
    if most:
        order = sorted(range(prompts.num_rows), key=lambda row: prompts.prompt_id[row])
        prompts = prompts.take(sorted(order[:most]))
    return prompts


def compare(before: EvalReport, after: EvalReport) -> Scalars:
    """Return the scores before and after, and the rise of avg@n with its standard error.

    The result has no error if each prompt has a single sample.

    Example:
        >>> compare(EvalReport({"accuracy": 0.25}), EvalReport({"accuracy": 0.5}))
        {'accuracy_before': 0.25, 'accuracy_after': 0.5, 'accuracy_rise': 0.25}
    """
    old, new = before.scalars, after.scalars
    scores: Scalars = {}
    for name in sorted(set(old) & set(new)):
        if name.startswith(("accuracy", "greedy", "pass@", "cons@", "response_length_mean")):
            plain = name.replace("@", "_at_")
            scores[f"{plain}_before"], scores[f"{plain}_after"] = old[name], new[name]
    scores["accuracy_rise"] = new["accuracy"] - old["accuracy"]
    marks: list[Any] = [report.attributes.get(MARKS) for report in (before, after)]
    if all(marks) and "accuracy_standard_error" in new:
        scores["accuracy_rise_standard_error"] = rise_error(marks[0], marks[1])
    return scores


@dataclass(frozen=True)
class _Task:
    context: Context
    config: EvaluateConfig
    name: str
    version: int
    folder: str
    prompts: PromptSet
    parents: dict[str, str]
    served: Callable[[], tuple[BaseEngine, Tokenizer]]

    def evaluate(self) -> Scored:
        uri = f"{self.folder}/{layout.REPORT}"
        attributes = {
            "conditions": {
                **self.config.model_dump(include=CONDITIONS),
                "accept_integral_decimals": self.judging.accept_integral_decimals,
                "answer_after": self.judging.answer_after,
            },
            "config_sha256": self.context.config_sha256,
            "parents": self.parents,
            "policy_version": self.version,
            "seed": self.context.seed,
        }
        try:
            report = read_report(EvalReport, uri)
            is_new = report.attributes != attributes | {MARKS: report.attributes.get(MARKS)}
        except ObjectMissing:
            is_new = True
        if is_new:
            report = self._score(attributes)
        # A second write of equal bytes changes nothing, and returns the digest.
        digest = write_report(uri, report)
        facts: dict[str, Scalar] = {"policy_version": self.version}
        facts |= {k: report.scalars[k] for k in ("accuracy", "greedy") if k in report.scalars}
        logger.info(
            "evaluated policy_version=%d set=%s accuracy=%.4f greedy=%.4f prompts=%d "
            "already_done=%s",
            self.version,
            self.name or "held-out",
            report.scalars["accuracy"],
            report.scalars.get("greedy", float("nan")),
            report.scalars["num_prompts"],
            not is_new,
        )
        return Scored(self.name, Ref(EvalReport.schema, uri, digest, facts), report, is_new)

    @property
    def judging(self) -> VerifierOptions:
        """Options of the verifiers, equal in all stages."""
        return VerifierOptions.of(self.context.config.get("reward", {}))

    def _verdicts(self, rollouts: RolloutSet) -> list[Verdicts]:
        """Return the verdicts on all rollouts; existing verdicts are kept."""
        return Judging(self.judging).complete(rollouts, range(rollouts.num_rows))

    def _score(self, attributes: dict[str, object]) -> EvalReport:
        from planish.engines.measure import check_errors

        config, seed = self.config, self.context.seed
        counts = {SAMPLED: config.num_samples, **({GREEDY: 1} if config.greedy else {})}
        judged = {}
        for name, rollouts in self._rollouts(counts).items():
            verdicts = [own for each in self._verdicts(rollouts) for own in each.values()]
            check_errors(verdicts, config.max_verifier_error_rate)
            judged[name] = Judged(rollouts, verdicts, counts[name])
        sampled, greedy = judged[SAMPLED], judged.get(GREEDY)
        rows: dict[str, list[int]] = {}
        for row, source in enumerate(self.prompts.source):
            rows.setdefault(source, []).append(row)
        sources = {s: scalars(sampled, greedy, rows[s], config, seed) for s in sorted(rows)}
        everything = scalars(sampled, greedy, range(self.prompts.num_rows), config, seed)
        return EvalReport(everything, sources, attributes | {MARKS: sampled.marks()})

    def _rollouts(self, counts: dict[str, int]) -> dict[str, RolloutSet]:
        """Read the rollout sets that an earlier attempt finished, and generate the others."""
        digest, schemas = self.context.config_sha256, (RolloutSet.SCHEMA, *RolloutSet.OLDER)
        sets: dict[str, RolloutSet] = {}
        for name, num_samples in counts.items():
            uri = f"{self.folder}/{name}"
            done = finished(uri, *schemas, parents=self.parents, config_sha256=digest)
            if done is not None:
                sets[name] = read_set(RolloutSet, uri, sha256=done.manifest_sha256)
            else:
                sets[name] = self._generate(uri, num_samples, is_greedy=name == GREEDY)
        return sets

    def _generate(self, uri: str, num_samples: int, *, is_greedy: bool) -> RolloutSet:
        from planish.engines.measure import generate_rollouts
        from planish.engines.requests import Sampling

        engine, tokenizer = self.served()
        sampling = Sampling(
            max_new_tokens=self.config.max_response_tokens,
            temperature=0.0 if is_greedy else self.config.temperature,
            top_p=1.0 if is_greedy else self.config.top_p,
        )
        rollouts = generate_rollouts(
            engine,
            tokenizer,
            self.prompts,
            num_samples=num_samples,
            sampling=sampling,
            run_seed=self.context.seed,
        )
        facts = {
            "config_sha256": self.context.config_sha256,
            "policy_version": self.version,
            "seed": self.context.seed,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        rollouts = replace(rollouts, **to_columns(self._verdicts(rollouts)))
        write_set(uri, rollouts, parents=self.parents, attributes=facts)
        return rollouts


@contextmanager
def _open(
    context: Context, config: EvaluateConfig, pin: str, opened: OpenEngine | None
) -> Iterator[tuple[BaseEngine, Tokenizer]]:
    import torch

    from planish.base.parallel import pick_device
    from planish.engines import open_engine
    from planish.engines.config import EngineConfig
    from planish.engines.requests import ModelRef
    from planish.models.policy import policy_tokenizer

    torch.set_num_threads(config.num_threads)
    device = str(pick_device(config.device))
    tokenizer = policy_tokenizer(pin)
    settings = context.section(EngineConfig, "engine")
    options = {"max_rows": config.max_rows, "device": device}
    with (opened or open_engine)(settings, ModelRef(pin=pin), **options) as engine:
        yield engine, tokenizer
