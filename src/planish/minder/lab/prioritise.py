"""Order of metrics: a decision tree ranks the metrics by how well they separate faults.

Source: Minder, arXiv 2411.01791, section 4.3. The feature of a labelled window and metric is the
largest normal score over the machines; metrics nearer to the root of a CART are tried first. Depth,
leaf size, weights and the treatment of ties are ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from planish.base.errors import ConfigError
from planish.minder.detect.config import MinderConfig
from planish.minder.detect.denoise import WINDOW
from planish.minder.detect.distances import normal_scores
from planish.minder.detect.frame import F32, F64, I64, Frame, Mask
from planish.minder.detect.preprocess import Limits, prepare
from planish.minder.lab.cases import Case

_STRIDE_SECONDS = 30
"""Seconds between two windows of a frame that train the tree."""
_MAX_DEPTH = 8
_MIN_SAMPLES_LEAF = 20


@dataclass(frozen=True)
class Ranked:
    """The rank of one metric."""

    metric: str
    depth: int | None
    """Depth of its node nearest to the root; None if the tree does not use the metric."""
    importance: float
    """Share of the tree's decrease in entropy."""


@dataclass(frozen=True)
class Order:
    """The metrics in order, and the tree."""

    ranked: tuple[Ranked, ...]
    """The metric nearest to the root first; metrics that the tree does not use come last."""
    tree: str
    """Text of the tree, a line for each test."""


def features(
    frame: Frame,
    config: MinderConfig,
    limits: Limits,
    *,
    board: str = "",
    stride: int = _STRIDE_SECONDS,
) -> tuple[F64, I64]:
    """Return the features of one frame's windows, and the starts of the windows.

    Returns:
        [W, M], `max_i |z_ij|` over the machines of the window's mean, for each configured metric;
        0 for a metric that can not be used;
        [W] unix seconds.
    """
    prepared = prepare(frame, config, limits, board=board)
    first = np.arange(0, max(0, frame.num_seconds - WINDOW + 1), stride)
    result = np.zeros((len(first), len(config.detect.metrics)))
    rows = first[:, None] + np.arange(WINDOW)
    for column, name in enumerate(config.detect.metrics):
        if name not in prepared.values:
            continue
        known = ~prepared.masked[name][rows].any(axis=1)
        means = prepared.values[name][rows].mean(axis=1)
        result[:, column] = largest_scores(means, known)
    return result, frame.ts[first]


def largest_scores(values: F32, known: Mask) -> F32:
    """Return the largest |z| over the machines in each row of [W, N]."""
    largest: F32 = np.abs(normal_scores(values, known)).max(axis=1, initial=0.0)
    return largest


def labelled(cases: Iterable[Case], config: MinderConfig, limits: Limits) -> tuple[F64, Mask]:
    """Return features [W, M] and labels [W] of the windows of many cases."""
    parts, labels = [], []
    for case in cases:
        found, starts = features(case.frame, config, limits, board=case.board)
        parts.append(found)
        truth = case.truth
        # A window belongs to the fault if all its seconds do.
        is_inside = (starts >= truth.onset) & (starts + WINDOW - 1 <= truth.halt)
        labels.append(is_inside & truth.faulty)
    if not parts:
        return np.zeros((0, len(config.detect.metrics))), np.zeros(0, bool)
    return np.concatenate(parts), np.concatenate(labels)


def rank(metrics: Sequence[str], found: F64, labels: Mask, *, seed: int = 0) -> Order:
    """Return the order of metrics by a tree fitted to features [W, M] and labels [W].

    Raises:
        ConfigError: there is no window with a fault, or none without.
    """
    from sklearn.tree import DecisionTreeClassifier, export_text

    if labels.all() or not labels.any():
        raise ConfigError(
            "the order of metrics needs windows with and without a fault, got "
            f"{int(labels.sum())} of {len(labels)} with one; give more cases"
        )
    tree = DecisionTreeClassifier(
        criterion="entropy",
        max_depth=_MAX_DEPTH,
        min_samples_leaf=_MIN_SAMPLES_LEAF,
        class_weight="balanced",
        random_state=seed,
    )
    tree.fit(found, labels)
    nodes = tree.tree_
    depths: dict[int, int] = {}
    todo = [(0, 0)]
    while todo:
        node, depth = todo.pop()
        column = int(nodes.feature[node])
        if column < 0:
            continue
        depths[column] = min(depth, depths.get(column, depth))
        todo += [(int(nodes.children_left[node]), depth + 1)]
        todo += [(int(nodes.children_right[node]), depth + 1)]
    ranked = [
        Ranked(name, depths.get(column), float(tree.feature_importances_[column]))
        for column, name in enumerate(metrics)
    ]

    def place(one: Ranked) -> tuple[int, float, str]:
        return (_MAX_DEPTH + 1 if one.depth is None else one.depth, -one.importance, one.metric)

    text = export_text(tree, feature_names=list(metrics), class_names=["healthy", "fault"])
    return Order(tuple(sorted(ranked, key=place)), str(text))
