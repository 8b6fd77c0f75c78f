"""Findings: machines that were candidates in consecutive windows for long enough.

Source: Minder, arXiv 2411.01791, section 4.5 (continuity of four minutes). The paper has one faulty
machine; silence, roles, turns, several machines and events of the whole job are ours.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planish.minder.detect.config import MinderConfig
from planish.minder.detect.denoise import WINDOW, Denoiser
from planish.minder.detect.distances import (
    MAX_MASKED_SHARE,
    Trace,
    activity,
    candidates,
    floor_of,
    floors_of,
    of_group,
    threshold,
    thresholds,
    without,
)
from planish.minder.detect.frame import COARSE_SECONDS, F32, F64, I64, Frame, Job, Mask
from planish.minder.detect.metrics_table import BUSY, DEVICES, METRICS, WORK
from planish.minder.detect.preprocess import OUTAGE_SHARE, Prepared, are_dead
from planish.minder.detect.result import (
    Candidate,
    Evidence,
    Finding,
    Kind,
    Result,
    job_wide,
    make_result,
)
from planish.minder.detect.runs import (
    BEYOND_TURNS,
    FEWEST_WINDOWS,
    LONG_TURN,
    Rule,
    Run,
    long_runs,
    runs_of,
    turn_of,
)
from planish.minder.detect.two_modes import BLOCK_SECONDS, find_parts

_MAX_ROUNDS = 3
"""Most rounds of one call; each round looks for faulty machines without those found before."""
_JOB_WIDE_SHARE = 0.05
"""Share of faulty machines above which, if they are more than two, the whole job has an event."""
_NEXT_SHARE = 0.2
"""Largest share of the faulty machine's distance that the next machine may have in an aliased
metric; also the largest share of the needed time."""
_ALIKE_SHARE = 0.35
"""Smallest share of the faulty machine's distance at which another machine counts as a second
case."""
_WORK_SHARE = 0.2
"""A machine may only be in another phase of its iteration if its tensor cores differ by more than
this share of the difference in the other GPU metric."""
_PAIR_SHARE = 0.5
"""Largest share of the faulty machine's distance that the next machine may have, if slow samples
cannot explain the difference."""
_THIRD_SHARE = 0.12
"""Largest share of the faulty machine's distance that the third machine may have."""
_OTHER_SHARE = 0.5
"""Largest share of the needed time that another machine may have been a candidate in another
aliased metric. Also: share of a run's windows in which another metric must show the machine."""
_RAMP_SHARE = 0.55
"""A rise is gradual if more than one minus this share of it is there before the run begins: rows of
a rollout run out one by one, while a fault begins at once."""
_STAGGERED_SECONDS = 45
"""Seconds by which GPUs become less busy later than another metric changes, if rows run out."""
_AGAIN = 1.25
"""Factor by which several runs of a machine must be longer in total than a single run. All runs of
any other machine must be less than a third of that total."""
_SIDE_RISE = 0.15
"""Largest rise of a host's CPU, as a share, that is taken for other work, e.g. a backup."""
_YOUNG_PARTS = 1.3
"""Factor by which a group must differ for longer while turns are not known."""


@dataclass(frozen=True)
class View:
    """The inputs from which findings are made."""

    prepared: Prepared
    traces: Mapping[str, Trace]
    groups: Sequence[I64]
    """Groups of machines that are compared with each other, as column numbers."""
    config: MinderConfig
    ignored: Mask
    """[W], True for windows in which no machine may be a candidate."""
    job: Job
    compared: Mapping[str, F32]
    """Map from metric to the compared values [T, N]."""

    @property
    def frame(self) -> Frame:
        """The measurements before preprocessing."""
        return self.prepared.frame

    @property
    def silent(self) -> Mask:
        """[N], True for machines that have stopped sending samples."""
        after = self.config.preprocess.silent_after_seconds
        return np.asarray((self.prepared.silent_seconds > after) & (after > 0))

    @property
    def job_wide_limit(self) -> int:
        """Most faulty machines that are named one by one; more are an event of the whole job."""
        return int(job_wide_limit(self.frame.num_machines))


def job_wide_limit(machines: int) -> float:
    """Return the number of faulty machines of a job above which the whole job has an event."""
    return max(2.0, _JOB_WIDE_SHARE * machines)


def may_be_aliased(name: str, view: View) -> bool:
    """Return whether slow sampling may make healthy machines differ in a metric for minutes.

    If a GPU is sampled once in a whole number of its iterations, all of its samples show the same
    phase of an iteration. This phase differs between machines.
    """
    held = np.median(view.prepared.intervals.get(name, 1.0)) > COARSE_SECONDS
    return bool(held) and METRICS[name].is_gpu and view.config.detect.gap_tolerance > 0


def conclude(view: View, denoisers: Mapping[str, Denoiser], started: float) -> Result:
    """Return the result of a call from the traces of its metrics.

    `started` is `time.perf_counter()` at the beginning of the call.
    """
    config, rules, frame = view.config, view.config.detect, view.frame
    end = int(frame.ts[-1]) + 1 if frame.num_seconds else 0
    silent = view.silent
    unmodelled = {name: "no model" for name in view.prepared.values if name not in view.traces}
    used = {name: denoisers[METRICS[name].name] for name in view.traces}
    facts = {
        "skipped": {**view.prepared.skipped, **unmodelled},
        "known": dict(view.prepared.known),
        "model_ids": {name: f"{model.name}:{model.version}" for name, model in used.items()},
        "silent": tuple(np.array(frame.machines)[silent].tolist()),
        "clipped": dict(view.prepared.clipped),
        "broken": dict(view.prepared.broken),
        "intervals": {
            name: round(float(np.median(each)), 1)
            for name, each in view.prepared.intervals.items()
            if np.median(each) > COARSE_SECONDS
        },
        "theta": threshold(rules.theta, rules.kappa, frame.num_machines),
    }
    frozen = np.isin(frame.machines, view.prepared.frozen)
    limit = max(1.0, OUTAGE_SHARE * frame.num_machines)
    after = config.preprocess.silent_after_seconds
    if frozen.sum() > limit or (
        silent.sum() > limit and not are_dead(view.prepared, view.job.named, after)
    ):
        facts["silent"] = tuple(np.array(frame.machines)[silent | frozen].tolist())
        facts["broken"] = {}
        return make_result(frame, config, "outage", started, **facts)
    seconds = view.prepared.silent_seconds.astype(int)
    findings = [
        _finding(view, column, "", end - int(seconds[column]), int(seconds[column]), "silent")
        for column in np.flatnonzero(silent & (seconds > rules.continuity_seconds)).tolist()
    ]
    findings += _without_devices(view, {finding.machine for finding in findings})
    if not view.traces and not findings:
        few = frame.num_machines < rules.min_machines
        status = "too_few_machines" if few else "skipped"
        return make_result(frame, config, status, started, **facts)
    facts["candidates"] = ()
    turns: dict[str, dict[str, int]] = {}
    for number in range(_MAX_ROUNDS if rules.exhaustive else 1):
        named = _named(view, {finding.machine for finding in findings})
        if number == 0:
            facts["candidates"] = _ongoing(view, named)
            turns = _turns(view, named)
        # The machine found in this round explains others; only the first round looks for turns.
        new = _round(view, named, is_first=number == 0)
        findings += new
        if not new:
            break
    findings += _part_findings(view, turns)
    if rules.exhaustive and len({f.machine for f in findings}) > view.job_wide_limit:
        findings = [job_wide(findings)]
    blamed = {finding.machine for finding in findings}
    facts["turns"] = {
        metric: kept
        for metric, by_machine in turns.items()
        if (kept := {name: turn for name, turn in by_machine.items() if name not in blamed})
    }
    findings.sort(key=lambda finding: (finding.confirmed_at, finding.machine))
    status = "fault" if findings else "ok"
    return make_result(frame, config, status, started, findings=tuple(findings), **facts)


def _finding(
    view: View, column: int, metric: str, start: int, seconds: int, kind: Kind = "dissimilar"
) -> Finding:
    """Return a finding that does not come from a run of candidates."""
    needed = view.config.detect.continuity_seconds
    machine = view.frame.machines[column]
    return Finding(machine, metric, kind, start, start + needed, float(seconds), 0.0)


def _without_devices(view: View, named: Collection[str]) -> list[Finding]:
    """Return the machines that have lacked the series of a GPU for long enough but still send
    others.
    """
    frame, findings = view.frame, []
    for place, count in enumerate(frame.values.get(DEVICES, np.zeros((0, 0))).T):
        machine, seen = frame.machines[place], np.flatnonzero(np.isfinite(count))
        whole = np.flatnonzero(count >= view.job.devices.get(machine, 0))
        first = int(whole[-1]) + 1 if len(whole) else 0
        seconds = int(seen[-1]) + 1 - first if len(seen) else 0
        if seconds > view.config.detect.continuity_seconds and machine not in named:
            findings.append(_finding(view, place, DEVICES, int(frame.ts[first]), seconds))
    return findings


@dataclass(frozen=True)
class _Named:
    """The candidates of one metric. `unknown` [W] marks windows of which too little is known."""

    trace: Trace
    candidates: Mask
    unknown: Mask
    rule: Rule
    runs: Mapping[int, Sequence[Run]]
    """Map from machine to its runs in order of time; only machines with at least `FEWEST_WINDOWS`
    windows."""
    floor: F64
    """[W, N], smallest distance that counts."""
    share: F64
    """[W], see `activity`."""
    least: float
    """Configured floor of the metric."""

    def again(self, both: Collection[int], *, is_young: bool) -> list[Run]:
        """Return one run for the machine that was a candidate repeatedly while no other machine
        was.

        Its length is the total of the machine's runs, divided by `_AGAIN` unless the machine is in
        `both`, i.e. a metric of GPUs and another metric show it. While the job `is_young`, only a
        machine in `both` has such a run.
        """
        totals = sorted(
            (sum(run.length for run in found if run.length >= FEWEST_WINDOWS), machine)
            for machine, found in self.runs.items()
        )
        (most, _), (total, machine) = [(0, 0), (0, 0), *totals][-2:]
        weighed = total if machine in both else int(total / _AGAIN) * (not is_young)
        if weighed <= self.rule.needed[machine] or total <= 3 * most:
            return []
        found = self.runs[machine]
        run = Run(machine, found[0].first, found[-1].last, weighed)
        rows = slice(run.first, run.last + 1)
        is_far = self.trace.above[rows, machine].mean() > self.floor[rows, machine].mean()
        return [run] if is_far else []


def _named(view: View, excluded: set[str]) -> dict[str, _Named]:
    """Return the candidates by metric without the `excluded` machines, found in an earlier
    round.
    """
    rules = view.config.detect
    gone = np.array([name in excluded for name in view.frame.machines])
    theta = thresholds(rules, view.groups, gone)
    result = {}
    for name, trace in view.traces.items():
        rest = without(trace, gone, view.groups)
        share = activity(name, view.prepared, rules)
        floor = floors_of(name, view.frame.machines, share, rules, view.job)
        far = rest.present & (rest.above > floor)
        named = candidates(rest, theta, far, only_most_unlike=rules.only_most_unlike)
        named[view.ignored] = False
        kept = np.count_nonzero(~gone)
        absent = kept - rest.present.sum(axis=1)
        unknown = (absent > MAX_MASKED_SHARE * kept) | view.ignored
        rule = Rule.of(name, view.prepared, share, rules)
        rule = replace(rule, resting=rule.resting & ~view.ignored)
        result[name] = _Named(
            rest,
            named,
            unknown,
            rule,
            runs_of(named, rule, unknown, rest.present, far),
            floor,
            share,
            floor_of(name, rules),
        )
    return result


def may_be_phase(run: Run, name: str, named: Mapping[str, _Named]) -> bool:
    """Return whether a machine may differ only because its samples meet another phase of an
    iteration.

    Its tensor cores then differ too, since they rest in every phase in which a GPU does less.
    """
    work = named.get(name.replace(METRICS[name].name, WORK))
    if work is None or work is named[name]:
        return True
    rows = slice(run.first, run.last + 1)
    theirs = work.trace.above[rows, run.machine].mean()
    return bool(theirs > _WORK_SHARE * _away(run, named[name])[run.machine])


def is_alone(
    run: Run,
    name: str,
    named: Mapping[str, _Named],
    aliased: Collection[str],
    interval: int,
    is_phase: bool,
) -> bool:
    """Return whether no other machine is nearly as far away or a candidate for nearly as long.

    In `aliased` metrics other machines may have runs too. If another metric also shows the machine,
    only machines with a similar distance count against it. If `is_phase` is False (see
    `may_be_phase`), runs of other machines are not compared. A run that ended before the last call,
    `interval` seconds ago, is rejected: the time before it leaves the window, and if its machine
    was alone, an earlier call has found it.
    """
    metric, rows = named[name], slice(run.first, run.last + 1)
    away = _away(run, metric)
    others = np.arange(len(away)) != run.machine
    share = _NEXT_SHARE if is_phase else _PAIR_SHARE
    if (away[others] > share * away[run.machine]).any():
        return False
    if not is_phase:
        return True
    since = len(metric.trace.scores) - 1 - run.last
    if since > interval + metric.rule.samples[run.machine]:
        return False
    rest = named.keys() - aliased
    shown = [named[key].candidates[rows, run.machine].mean() for key in rest]
    is_shown = max(shown, default=0) > _OTHER_SHARE
    for key in aliased:
        one = named[key]
        # Without floors all metrics have the same unit.
        unit = one.least / metric.least if np.isfinite(metric.least) else 1.0
        distance = _ALIKE_SHARE * away[run.machine] * unit if is_shown else 0.0
        longest = (_NEXT_SHARE if one is metric else _OTHER_SHARE) * one.rule.needed
        if is_shown:
            longest = np.full_like(longest, _ALIKE_SHARE * run.length)
        for machine, theirs in one.runs.items():
            for their in theirs if others[machine] else ():
                is_long = their.length > longest[machine]
                if is_long and _away(their, one)[machine] > distance:
                    return False
    return True


def _away(run: Run, metric: _Named) -> F64:
    """Return [N], each machine's mean distance above the median machine over the windows of a run
    in which the run's machine was a candidate.
    """
    trace, flags = metric.trace, metric.candidates[run.first : run.last + 1, run.machine]
    rows = run.first + np.flatnonzero(flags)
    present = trace.present[rows]
    total = (trace.above[rows] * present).sum(axis=0, dtype=np.float64)
    mean: F64 = total / np.maximum(1, present.sum(axis=0))
    return mean


def is_one_of_many(run: Run, metric: _Named) -> bool:
    """Return whether at least two other machines are far away too, so that their work differs.

    In a rollout, rows end at different moments on each machine and some machines wait for the rest.
    A single fault leaves the peers of the machine alike.
    """
    away = _away(run, metric)
    others = np.sort(np.delete(away, run.machine))[::-1]
    # A window of one repeated sample averages no noise.
    noise = np.sqrt(max(1.0, metric.rule.samples[run.machine] / WINDOW))
    least = max(noise * metric.least, _THIRD_SHARE * away[run.machine])
    return len(others) > 1 and bool(others[1] > least)


def _is_ramp(run: Run, trace: Trace, busy: Iterable[_Named], held: float) -> bool:
    """Return whether a machine's difference grew slowly, as in a rollout whose rows end one by one.

    Its power then falls long before it is less `busy`, while a fault changes all metrics at once.
    Slow sampling stretches the rise by `held` seconds.
    """
    for metric in busy:
        theirs = metric.runs.get(run.machine, ())
        begins = [one.first for one in theirs if one.first <= run.last and one.last >= run.first]
        if begins and begins[0] > run.first + _STAGGERED_SECONDS:
            return True
    begin = run.first - WINDOW
    above = trace.above[:, run.machine]
    before = above[max(0, begin - FEWEST_WINDOWS) : max(0, begin)]
    earlier = above[: max(0, begin - FEWEST_WINDOWS)]
    usual = np.median(earlier) if len(earlier) else 0.0
    first = above[run.first : run.first + FEWEST_WINDOWS].mean()
    during = above[run.first : run.last + 1]
    most = np.quantile(during, 0.9)
    few, many = (int((during > share * most).argmax()) for share in (0.25, 0.75))
    rise = (1 - _RAMP_SHARE) * (first - usual)
    is_near = len(before) > WINDOW and before.mean() - usual > rise
    return bool(is_near or many - few > FEWEST_WINDOWS + held)


def _is_beside(run: Run, name: str, view: View, named: Mapping[str, _Named]) -> bool:
    """Return whether a host has a little other work beside a job that goes on as before.

    If a machine is dead, the hosts of the other machines wait for it in different ways, and each
    of them counts as one that has other work.
    """
    if METRICS[name].is_gpu or METRICS[name].transform != "none":
        return False
    rows = slice(run.first, run.last + 1)
    for other, metric in named.items():
        if other != name and metric.candidates[rows, run.machine].mean() > _OTHER_SHARE:
            return False
    if view.silent.any():
        return True
    for other, metric in named.items():
        if METRICS[other].is_gpu and metric.share[rows].mean() < view.config.detect.rest_share:
            return False
    values = view.compared[name][rows]
    rise = float((values[:, run.machine] - np.median(values, axis=1)).mean())
    return 0 < rise < _SIDE_RISE


def _turns(view: View, named: Mapping[str, _Named]) -> dict[str, dict[str, int]]:
    """Return the length in seconds of the longest run that has ended, by metric and machine."""
    turns: dict[str, dict[str, int]] = {}
    for name, metric in named.items():
        newest = len(metric.candidates) - 1 - metric.rule.gap_tolerance
        for machine, found in metric.runs.items():
            ended = [run.length for run in found if run.last < newest]
            longest = max(ended, default=0)
            if longest >= FEWEST_WINDOWS:
                turns.setdefault(name, {})[view.frame.machines[machine]] = longest
    return turns


def _round(view: View, named: Mapping[str, _Named], *, is_first: bool) -> list[Finding]:
    """Return the machines that were candidates for long enough, over all metrics.

    A long run names its machine unless one of these explains it, in this order: the samples of a
    young job may meet another phase of an iteration; in an aliased metric, other machines are as
    far away; the machines differ in turn, for about as long, or split or gradually, which makes the
    needed time longer; two other machines are far away too; the host has other work beside the job;
    the run was over before the last call. Each of them rejects a run on its own, so their order
    changes no finding: cheap ones stand before those that read other metrics.
    """
    rules, frame = view.config.detect, view.frame
    interval = view.config.service.interval_seconds
    aliased = {name for name in named if may_be_aliased(name, view)}
    busy = [named[name] for name in named if METRICS[name].name in BUSY]
    # If a group of machines has differed for this long, groups of the job have different work.
    is_split = any(turns.get("", 0) >= 2 * LONG_TURN for turns in view.job.turns.values())
    shown: dict[bool, set[int]] = {True: set(), False: set()}
    for name, metric in named.items():
        totals = metric.candidates.sum(axis=0)
        shown[METRICS[name].is_gpu] |= {*np.flatnonzero(totals > metric.rule.needed).tolist()}
    both = shown[True] & shown[False]
    findings: dict[str, Finding] = {}
    for name, metric in named.items():
        trace, is_aliased = metric.trace, name in aliased
        known = view.job.turns.get(name, {})
        is_asked = is_first and rules.exhaustive and not is_aliased
        again = metric.again(both, is_young=view.job.is_young) if is_asked else []
        for run in [*long_runs(metric.runs, metric.rule), *again]:
            is_phase = is_aliased and may_be_phase(run, name, named)
            is_from_start = run.first <= metric.rule.samples[run.machine] and view.job.is_young
            if is_phase and is_from_start:
                # In a young job a fault can not be told from another phase of an iteration.
                continue
            if is_aliased and not is_alone(run, name, named, aliased, interval, is_phase):
                continue
            times = sum(run.first <= one.first <= run.last for one in metric.runs[run.machine])
            machine = frame.machines[run.machine]
            usual = turn_of(name, known, machine, is_again=times > 1)
            # The machines of a young job may differ in turn, which is not known yet.
            is_slight = _away(run, metric)[run.machine] < 1.75 * metric.least
            needed = metric.rule.needed[run.machine]
            # The tensor cores of a machine also do less when its rows run out.
            is_ramp = (is_phase or not is_aliased) and _is_ramp(
                run, trace, busy, needed - rules.continuity_seconds
            )
            is_gradual = METRICS[name].is_gpu and (is_ramp or (is_from_start and is_slight))
            if is_gradual or is_split:
                usual = max(usual, BEYOND_TURNS * needed)
            if rules.exhaustive and (run.length <= usual * times or is_one_of_many(run, metric)):
                continue
            if rules.exhaustive and _is_beside(run, name, view, named):
                continue
            start = int(frame.ts[run.first])
            end = int(frame.ts[run.last]) + WINDOW + int(metric.rule.samples[run.machine])
            is_over = end <= view.job.asked
            if is_over and machine not in view.job.named:
                continue
            evidence = {}
            for other, theirs in named.items():
                mine = theirs.candidates[:, run.machine]
                above = theirs.trace.above[mine, run.machine]
                distance = float(np.median(above)) if mine.any() else 0.0
                evidence[other] = Evidence(float(mine.mean()), distance)
            cells = (slice(run.first, run.last + 1), run.machine)
            finding = Finding(
                machine=machine,
                metric=name,
                kind="dissimilar",
                run_start=start,
                confirmed_at=start + int(needed) + WINDOW - 1,
                duration_s=float(run.last - run.first + WINDOW),
                score_mean=float(trace.scores[cells][trace.present[cells]].mean()),
                evidence=evidence,
            )
            findings.setdefault(finding.machine, finding)
        if findings and not rules.exhaustive:
            return list(findings.values())[:1]
    return list(findings.values())


def _ongoing(view: View, named: Mapping[str, _Named]) -> tuple[Candidate, ...]:
    """Return the candidates of the newest windows with runs of at least `FEWEST_WINDOWS`."""
    ongoing = []
    for name, metric in named.items():
        newest = len(metric.candidates) - 1 - metric.rule.gap_tolerance
        for machine, found in metric.runs.items():
            for run in found[-1:]:
                if run.length < FEWEST_WINDOWS or run.last < newest:
                    continue
                score = float(metric.trace.scores[run.last, machine])
                since = int(view.frame.ts[run.first])
                machine_name = view.frame.machines[machine]
                ongoing.append(Candidate(machine_name, name, since, run.length, score))
    return tuple(sorted(ongoing, key=lambda c: (-c.seconds, c.machine, c.metric)))


def _part_findings(view: View, turns: dict[str, dict[str, int]]) -> list[Finding]:
    """Return the machines of a group that differs from the rest of the job.

    Durations of groups that no longer differ go into `turns`.
    """
    rules, frame = view.config.detect, view.frame
    if not (rules.exhaustive and rules.two_modes) or rules.floors is None:
        return []
    # A window is stored at its first second.
    ignored = np.append(view.ignored, np.zeros(WINDOW - 1, bool))
    for name in view.traces:
        if may_be_aliased(name, view):
            continue
        unknown = set(view.job.unknown.get(name, ()))
        has_no_role = np.array([machine in unknown for machine in frame.machines])
        for columns in view.groups:
            # Baselines learn the differences that are there from the beginning.
            if 2 * np.count_nonzero(has_no_role[columns]) > len(columns):
                continue
            parts = find_parts(
                frame.ts,
                of_group(view.compared[name], columns),
                of_group(view.prepared.masked[name], columns),
                ignored,
                gap=floor_of(name, rules),
                smallest=view.job_wide_limit + 1,
                max_masked=MAX_MASKED_SHARE,
            )
            known = view.job.turns.get(name, {})
            needed = rules.continuity_seconds * (_YOUNG_PARTS if view.job.is_young else 1.0)
            if turn_of(name, known, "") or known.get(""):
                needed = BEYOND_TURNS * max(rules.continuity_seconds, known.get("", 0))
            end = int(frame.ts[-1]) + 1 - 2 * BLOCK_SECONDS
            for part in parts:
                if _is_by_design(columns[part.columns], columns, view):
                    continue
                if part.seconds <= needed:
                    if part.stop < end:
                        mine = turns.setdefault(name, {})
                        mine[""] = max(mine.get("", 0), part.seconds)
                    continue
                return [
                    _finding(view, n, name, part.start, part.seconds)
                    for n in columns[part.columns].tolist()
                ]
    return []


def _is_by_design(part: I64, columns: I64, view: View) -> bool:
    """Return whether the machines of a part share a role that no other machine has."""
    mine = np.isin(columns, part)
    for name, offsets in view.job.baseline.items():
        role = np.array([offsets.get(view.frame.machines[n], 0.0) for n in columns])
        low, high = sorted((role[mine], role[~mine]), key=lambda side: float(side.mean()))
        if low.max() + floor_of(name, view.config.detect) < high.min():
            return True
    return False
