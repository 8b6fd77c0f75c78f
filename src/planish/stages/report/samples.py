"""Choose a few rollouts worth reading: before against after, early against late, right and wrong.

The choice is deterministic: the first prompt in order of its id that shows the case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from planish import store
from planish.records import layout
from planish.records.io import read_manifest, read_set
from planish.records.prompts import PromptSet
from planish.records.rewards import RewardSet
from planish.records.rollouts import FinishReason, RolloutSet
from planish.stages.report.facts import ReportFacts, Sample, SampleComparison

if TYPE_CHECKING:
    from planish.stages.report.gather import Reader

MAX_SET_BYTES = 256 << 20
"""Larger sets are not read for samples."""
MAX_VERIFIED_GROUPS = 64
"""Held-out prompts whose responses are verified again, to choose samples from."""
RESPONSES_PER_COLUMN = 2
"""Responses shown of one policy for one prompt."""

Groups = dict[str, list[Sample]]


def sample_comparisons(reader: Reader, facts: ReportFacts) -> list[SampleComparison]:
    """Read the sets that samples come from and choose; missing sets give fewer comparisons."""
    comparisons = _held_out(reader, facts)
    trained = dict.fromkeys([*facts.iterations[:1], *facts.iterations[-1:]])
    groups = {i: _iteration_groups(reader, i) for i in trained}
    texts = _prompt_texts(reader, layout.prompts(reader.root), "the training prompts")
    return comparisons + _training({i: found for i, found in groups.items() if found}, texts)


def _fits(uri: str) -> bool:
    return sum(shard.bytes for shard in read_manifest(uri).shards) <= MAX_SET_BYTES


def _prompt_texts(reader: Reader, uri: str, what: str) -> dict[str, str]:
    def read() -> dict[str, str]:
        if not _fits(uri):
            return {}
        prompts = read_set(PromptSet, uri)
        return {
            key: "\n".join(message["content"] for message in messages)
            for key, messages in zip(prompts.prompt_id, prompts.messages, strict=True)
        }

    return reader.attempt(what, read, {})


def _rows(rollouts: RolloutSet, accuracy: Sequence[float], extracted: Sequence[str]) -> Groups:
    """Group rows by prompt; unfinished or failed rows are left out."""
    lengths = rollouts.response_tokens.lengths
    groups: Groups = {}
    for row in range(rollouts.num_rows):
        if rollouts.finish[row] not in (FinishReason.STOP, FinishReason.LENGTH):
            continue
        sample = Sample(
            prompt_id=rollouts.prompt_id[row],
            prompt="",
            answer=rollouts.answer[row],
            response=rollouts.response[row],
            is_correct=bool(accuracy[row] > 0),
            extracted=extracted[row],
            num_tokens=int(lengths[row]),
        )
        groups.setdefault(sample.prompt_id, []).append(sample)
    return dict(sorted(groups.items()))


def _iteration_groups(reader: Reader, iteration: int) -> Groups:
    """Return the groups of the first rollout shard of an iteration with their verdicts."""

    def read() -> Groups:
        uri = layout.rollouts(reader.root, iteration, 0)
        scores_uri = layout.rewards(reader.root, iteration)
        if not (_fits(uri) and _fits(scores_uri)):
            return {}
        rollouts = read_set(RolloutSet, uri, with_optional=False)
        rewards = read_set(RewardSet, scores_uri)
        # Rewards lie in shard order, so that the rows of shard 0 come first.
        return _rows(rollouts, rewards.accuracy.tolist(), rewards.extracted)

    return reader.attempt(f"sample rollouts of iteration {iteration}", read, {})


def _held_out(reader: Reader, facts: ReportFacts) -> list[SampleComparison]:
    """Compare the first and the last evaluated policy on the same held-out prompts."""
    if len(facts.evaluations) < 2:
        return []
    first, last = facts.evaluations[0].version, facts.evaluations[-1].version
    before = _evaluation_groups(reader, first)
    after = _evaluation_groups(reader, last)
    if not before or not after:
        return []
    texts = _prompt_texts(reader, layout.evaluation_prompts(reader.root), "the held-out prompts")
    cases = (
        ("Learned: wrong before, right after", False, True),
        ("Not yet: wrong before and after", False, False),
        ("Lost: right before, wrong after", True, False),
    )
    comparisons = []
    for title, was_right, is_right in cases:
        key = _first(before, after, was_right, is_right)
        if key is not None:
            columns = [
                (f"policy {first}, before", _column(before[key], texts, prefer=was_right)),
                (f"policy {last}, after", _column(after[key], texts, prefer=is_right)),
            ]
            comparisons.append(SampleComparison(f"Held-out prompt. {title}", columns))
    return comparisons


def _first(before: Groups, after: Groups, was_right: bool, is_right: bool) -> str | None:
    """Return the prompt that shows the case most clearly; ties by prompt id."""
    best: tuple[float, str] | None = None
    for key in before.keys() & after.keys():
        old, new = (
            float(np.mean([sample.is_correct for sample in samples]))
            for samples in (before[key], after[key])
        )
        if (old >= 0.5) != was_right or (new >= 0.5) != is_right:
            continue
        clarity = abs(new - old) if was_right != is_right else 1 - max(old, new)
        if best is None or (-clarity, key) < (-best[0], best[1]):
            best = (clarity, key)
    return None if best is None else best[1]


def _evaluation_groups(reader: Reader, version: int) -> Groups:
    """Return the sampled rollouts that lie beside an evaluation, with their verdicts."""

    def read() -> Groups:
        from planish.verifiers import VerifierOptions, verify_many

        files = store.list_uris(f"{layout.evaluation(reader.root, version)}/")
        sets = (uri.rpartition("/")[0] for uri in files if uri.endswith("/manifest.json"))
        uri = next((s for s in sets if read_manifest(s).schema == RolloutSet.SCHEMA), "")
        if not uri or not _fits(uri):
            return {}
        rollouts = read_set(RolloutSet, uri, with_optional=False)
        rollouts = rollouts.take_groups(range(min(rollouts.num_groups, MAX_VERIFIED_GROUPS)))
        verdicts = verify_many(rollouts.to_verify(), VerifierOptions())
        return _rows(rollouts, [v.accuracy for v in verdicts], [v.extracted for v in verdicts])

    return reader.attempt(f"sample rollouts of the evaluation of policy {version}", read, {})


def _training(groups: Mapping[int, Groups], texts: Mapping[str, str]) -> list[SampleComparison]:
    """Show a right and a wrong response of the first and of the last iteration."""
    mixed = {
        number: [
            key
            for key, samples in comparisons.items()
            if 0 < sum(sample.is_correct for sample in samples) < len(samples)
        ]
        for number, comparisons in groups.items()
    }
    shared = sorted(set.intersection(*map(set, mixed.values()))) if len(mixed) > 1 else []
    if shared:
        columns = [(f"iteration {n}", _pair(groups[n][shared[0]], texts)) for n in groups]
        return [SampleComparison("One training prompt, early and late", columns)]
    comparisons = []
    for place, (number, keys) in zip(("early", "late"), mixed.items(), strict=False):
        if keys:
            right, wrong = _pair(groups[number][keys[0]], texts)
            columns = [("right", [right]), ("wrong", [wrong])]
            comparisons.append(
                SampleComparison(f"Training prompt, {place} (iteration {number})", columns)
            )
    return comparisons


def _with_prompt(sample: Sample, texts: Mapping[str, str]) -> Sample:
    return replace(sample, prompt=texts.get(sample.prompt_id, ""))


def _column(samples: Sequence[Sample], texts: Mapping[str, str], *, prefer: bool) -> list[Sample]:
    """Return the responses with the verdict `prefer` first, all different."""
    shown: dict[str, Sample] = {}
    for sample in sorted(samples, key=lambda sample: sample.is_correct != prefer):
        shown.setdefault(sample.response, _with_prompt(sample, texts))
    return list(shown.values())[:RESPONSES_PER_COLUMN]


def _pair(samples: Sequence[Sample], texts: Mapping[str, str]) -> list[Sample]:
    """Return one right and one wrong response."""
    right = next(sample for sample in samples if sample.is_correct)
    wrong = next(sample for sample in samples if not sample.is_correct)
    return [_with_prompt(right, texts), _with_prompt(wrong, texts)]
