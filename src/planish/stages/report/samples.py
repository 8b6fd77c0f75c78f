"""Choose a few rollouts to read: before and after, early and late, right and wrong.

The choice is deterministic: the first prompt, in order of prompt id, that shows the case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from planish import store
from planish.records import layout
from planish.records.io import read_manifest, read_set
from planish.records.prompts import PromptSet
from planish.records.reports import EvalReport
from planish.records.rewards import RewardSet
from planish.records.rollouts import ENDED, RolloutSet
from planish.stages.report.facts import ReportFacts, Sample, SampleComparison
from planish.stages.report.reader import Reader

MAX_SET_BYTES = 256 << 20
RESPONSES_PER_COLUMN = 2
"""Number of responses shown for one policy and prompt."""

Groups = dict[str, list[Sample]]
"""Prompt id, in order, to responses."""
Texts = dict[str, str]


def sample_comparisons(reader: Reader, facts: ReportFacts) -> list[SampleComparison]:
    """Return comparisons from the sets that can be read; missing sets give fewer comparisons."""
    root, comparisons = reader.root, _held_out(reader, facts)
    texts = _prompt_texts(reader, layout.prompts(root), "the training prompts")
    groups = {}
    for i in dict.fromkeys([*facts.iterations[:1], *facts.iterations[-1:]]):
        what = f"sample rollouts of iteration {i}"
        found = reader.attempt(what, partial(_iteration_groups, root, i, texts), None)
        if found:
            groups[i] = found
    return comparisons + _training(groups)


def _fits(uri: str) -> bool:
    return sum(shard.bytes for shard in read_manifest(uri).shards) <= MAX_SET_BYTES


def _prompt_texts(reader: Reader, uri: str, what: str) -> Texts:
    def read() -> Texts:
        if not _fits(uri):
            return {}
        prompts = read_set(PromptSet, uri)
        return {
            key: "\n".join(message["content"] for message in messages)
            for key, messages in zip(prompts.prompt_id, prompts.messages, strict=True)
        }

    return reader.attempt(what, read, {})


def _rows(
    rollouts: RolloutSet, accuracy: Sequence[float], extracted: Sequence[str], texts: Texts
) -> Groups:
    """Return finished rows by prompt; leave out unfinished and failed rows."""
    lengths = rollouts.response_tokens.lengths
    groups: Groups = {}
    for row in range(rollouts.num_rows):
        if rollouts.finish[row] in ENDED:
            sample = Sample(
                prompt_id=rollouts.prompt_id[row],
                prompt=texts.get(rollouts.prompt_id[row], ""),
                answer=rollouts.answer[row],
                response=rollouts.response[row],
                is_correct=bool(accuracy[row] > 0),
                extracted=extracted[row],
                num_tokens=int(lengths[row]),
            )
            groups.setdefault(sample.prompt_id, []).append(sample)
    return dict(sorted(groups.items()))


def _iteration_groups(root: str, iteration: int, texts: Texts) -> Groups:
    uri, scores_uri = layout.rollouts(root, iteration, 0), layout.rewards(root, iteration)
    if not (_fits(uri) and _fits(scores_uri)):
        return {}
    rollouts = read_set(RolloutSet, uri, with_optional=False)
    rewards = read_set(RewardSet, scores_uri)
    # Rewards are in order of the shards, so the rows of shard 0 are the first.
    return _rows(rollouts, rewards.accuracy.tolist(), rewards.extracted, texts)


def _evaluation_groups(root: str, version: int, texts: Texts, report: EvalReport) -> Groups:
    """Return the sampled rollouts of an evaluation, with the marks of its report."""
    files = store.list_uris(f"{layout.evaluation(root, version)}/")
    sets = (uri.rpartition("/")[0] for uri in files if uri.endswith("/manifest.json"))
    uri = next((s for s in sets if read_manifest(s).schema.startswith("rollouts/")), "")
    if not uri or not _fits(uri):
        return {}
    rollouts = read_set(RolloutSet, uri, with_optional=False)
    marks = "".join(report.attributes.get("marks", ()))
    if len(marks) != rollouts.num_rows:
        return {}
    extracted = rollouts.extracted or [""] * rollouts.num_rows
    return _rows(rollouts, [mark == "1" for mark in marks], extracted, texts)


def _held_out(reader: Reader, facts: ReportFacts) -> list[SampleComparison]:
    if not facts.before or not facts.after:
        return []
    place = layout.evaluation_prompts(reader.root)
    texts = _prompt_texts(reader, place, "the held-out prompts")
    first, last = versions = min(facts.evaluations), max(facts.evaluations)
    before, after = (
        reader.attempt(
            f"sample rollouts of the evaluation of policy {version}",
            partial(_evaluation_groups, reader.root, version, texts, facts.evaluations[version]),
            Groups(),
        )
        for version in versions
    )
    cases = (
        ("Learned: wrong before, right after", False, True),
        ("Not yet: wrong before and after", False, False),
        ("Lost: right before, wrong after", True, False),
    )
    comparisons = []
    for title, was_right, is_right in cases:
        key = _clearest(before, after, was_right, is_right)
        if key is not None:
            columns = [
                (f"policy {first}, before", _column(before[key], prefer=was_right)),
                (f"policy {last}, after", _column(after[key], prefer=is_right)),
            ]
            comparisons.append(SampleComparison(f"Held-out prompt. {title}", columns))
    return comparisons


def _clearest(before: Groups, after: Groups, was_right: bool, is_right: bool) -> str | None:
    """Return the prompt that shows the case most clearly; the lowest prompt id breaks ties."""
    found = []
    for key in before.keys() & after.keys():
        old, new = (
            float(np.mean([sample.is_correct for sample in samples]))
            for samples in (before[key], after[key])
        )
        if (old >= 0.5) == was_right and (new >= 0.5) == is_right:
            clarity = abs(new - old) if was_right != is_right else 1 - max(old, new)
            found.append((-clarity, key))
    return min(found)[1] if found else None


def _training(groups: Mapping[int, Groups]) -> list[SampleComparison]:
    mixed = {
        number: [
            key
            for key, samples in own.items()
            if 0 < sum(sample.is_correct for sample in samples) < len(samples)
        ]
        for number, own in groups.items()
    }
    shared = sorted(set.intersection(*map(set, mixed.values()))) if len(mixed) > 1 else []
    if shared:
        columns = [(f"iteration {n}", _pair(groups[n][shared[0]])) for n in groups]
        return [SampleComparison("One training prompt, early and late", columns)]
    comparisons = []
    for place, (number, keys) in zip(("early", "late"), mixed.items(), strict=False):
        if keys:
            right, wrong = _pair(groups[number][keys[0]])
            title = f"Training prompt, {place} (iteration {number})"
            comparisons.append(SampleComparison(title, [("right", [right]), ("wrong", [wrong])]))
    return comparisons


def _column(samples: Sequence[Sample], *, prefer: bool) -> list[Sample]:
    """Return the responses with the verdict `prefer` first, all different."""
    shown: dict[str, Sample] = {}
    for sample in sorted(samples, key=lambda sample: sample.is_correct != prefer):
        shown.setdefault(sample.response, sample)
    return list(shown.values())[:RESPONSES_PER_COLUMN]


def _pair(samples: Sequence[Sample]) -> list[Sample]:
    right = next(sample for sample in samples if sample.is_correct)
    wrong = next(sample for sample in samples if not sample.is_correct)
    return [right, wrong]
