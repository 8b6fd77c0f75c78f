"""Thoughts in a response: text inside a thought, or in one that never ends, is not an answer."""

from __future__ import annotations

import re
from collections import deque

AUTO = "auto"

OPENING = (
    "<think> <thinking> <thought> <reasoning> <seed:think> [THINK] \u25c1think\u25b7 "
    "<|begin_of_thought|> <|channel>thought <|channel|>analysis<|message|>"
)
CLOSING = (
    "</think> </thinking> </thought> </reasoning> </seed:think> [/THINK] \u25c1/think\u25b7 "
    "<|end_of_thought|> <channel|> <|channel|>final<|message|>"
)
"""Marks that end the thought of a model; `OPENING` has the marks that begin it, in the same
order."""

OPENS, _CLOSES = ("|".join(map(re.escape, marks.split())) for marks in (OPENING, CLOSING))
"""Patterns of the marks."""
_MARK = re.compile(f"(?P<open>{OPENS})|{_CLOSES}", re.IGNORECASE)
_ENDS = re.compile(r"(?:<[|\uff5c][^<>\s]{1,40}[|\uff5c]>\s*)+$")
_END_CHARS = 200


def after_thought(response: str, answer: str, answer_after: str = AUTO) -> str | None:
    """Return the part of a response that is judged; None if its thought has not ended.

    The part follows the last `answer_after`. For `auto` it follows the last mark that closes a
    thought and is not part of the ground truth. Control tokens at its end, such as `<|im_end|>`,
    are left out.
    """
    text = response[:-_END_CHARS] + _ENDS.sub("", response[-_END_CHARS:])
    if answer_after != AUTO:
        _, mark, behind = text.rpartition(answer_after)
        return behind if mark else None
    last = None if _MARK.search(answer) else deque(_MARK.finditer(text), maxlen=1)
    if not last:
        return text
    return None if last[0]["open"] else text[last[0].end() :]
