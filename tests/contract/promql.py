"""Reads names out of PromQL, as far as tests of rules and dashboards need it."""

import re

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_SELECTOR = re.compile(r"\{[^{}]*\}")
_RANGE = re.compile(r"\[[^\[\]]*\]")
_GROUPING = re.compile(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^()]*\)")
_OFFSET = re.compile(r"\boffset\s+\w+")
_FUNCTION = re.compile(r"(?<![\w:])\w+\s*(?=\()")
_NUMBER = re.compile(r"(?<![\w:])\d[\w.]*(-\d+)?")
_NAME = re.compile(r"[a-zA-Z_:][\w:]*")
_WORDS = {"and", "or", "unless", "bool", "by", "without", "on", "ignoring", "group_left", "inf"}


def metric_names(expression: str) -> set[str]:
    """Return the names of the metrics that an expression reads.

    Example:
        >>> sorted(metric_names('sum by (a) (rate(x_total{b="c"}[5m])) / on (a) y:z offset 2h'))
        ['x_total', 'y:z']
    """
    named = re.findall(r'__name__\s*=\s*"([\w:]+)"', expression)
    text = _STRING.sub("", expression)
    for pattern in (_SELECTOR, _RANGE, _OFFSET, _GROUPING):
        text = pattern.sub(" ", text)
    # An aggregation keeps its word when the grouping stands between it and the bracket.
    text = re.sub(r"(?<![\w:])(sum|min|max|avg|count|quantile|topk)\b(?![\w:])", " ", text)
    text = _NUMBER.sub(" ", _FUNCTION.sub(" ", text))
    return set(_NAME.findall(text)) - _WORDS | set(named)
