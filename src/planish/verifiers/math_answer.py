"""Find the final answer of a response and compare it: integers by rule, the rest in a child.

Only the last 300 characters of the response are read, never the prompt. The form that the prompt
asks for is looked for first, then the other ones, then what math-verify finds in the text.

Source: DAPO, arXiv 2503.14476, section 2.4 (rule-based reward) and its published normalisation.
"""

from __future__ import annotations

import functools
import logging
import re

from planish.verifiers.own import shared_verifier
from planish.verifiers.verdict import (
    Verdict,
    VerifierOptions,
    failed,
    not_found,
    right,
    timed_out,
    wrong,
)

logger = logging.getLogger(__name__)

TAIL_CHARS = 300
"""How much of the end of a response is searched for an answer."""
MAX_DIGITS = 64
MAX_ANSWER_CHARS = 1000
MAX_DEPTH = 16
"""Deepest nesting of brackets that is compared; the time to parse grows quickly with it."""

FORMS = {"line": "`Answer:`", "box": r"`\boxed{}`", "hash": "`####`", "tags": "`<answer>`"}
"""How prompts ask for an answer, in the order in which responses are searched."""
_ASKED = {
    "line": re.compile(r"answer[*_]*\s*:", re.IGNORECASE),
    "box": re.compile(r"\\(?:boxed|fbox)\b"),
    "hash": re.compile(r"####(?!\s*[A-Z][a-z])"),
    "tags": re.compile(r"</answer>"),
}
_GRADED_AS = {
    "openai/gsm8k": "hash",
    "lighteval/MATH": "box",
    "DigitalLearningGmbH/MATH-lighteval": "box",
    "HuggingFaceH4/MATH-500": "box",
    "hiyouga/geometry3k": "box",
    "math_dapo": "line",
}
"""`data_source` of verl to the form that its published rule reads."""

_ANSWER = re.compile(
    r"Answer[*_]*\s*:[\s*_]*(\$\$.+?\$\$|\\\[.+?\\\]|\\begin\{.+?\\end\{[^\n]*|[^\n]+)",
    re.IGNORECASE | re.DOTALL,
)
_HASH = re.compile(r"####(?![ \t*]*[A-Za-z]{2})([^\n]+)")
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*")
_INTEGER = re.compile(r"[+-]?[0-9]+")
_INTEGRAL_DECIMAL = re.compile(r"([+-]?[0-9]+)\.0+")
_GROUPED = re.compile(r"[+-]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_FORMULA = re.compile(
    r"\$\$(.+?)\$\$|(?<!\\)\$(.+?)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL
)
_WORDS = re.compile(
    r"(?!.*\b(?:or|and|not|dozen|hundred|thousand|[mbtr]+illion)\b)[A-Za-z\s.:'*$]*",
    re.IGNORECASE | re.DOTALL,
)
_DISPLAY = re.compile(r"\\(?:begin|end)\{(?:align|equation|gather|multline|split)(?:ed)?\*?\}")
_MINUS = re.compile("\u2212|(?<![0-9])[\u2010-\u2013](?=[0-9.])")
_DEGREES = re.compile(
    "(?:\\^\\s*(?:\\\\circ|\\{\\s*\\\\circ\\s*\\})|\\\\degree|\u00b0)"
    r"(?:\s*(?:\\(?:text|mathrm)\{\s*[CF]\s*\}|[CF]\b))?"
)
_TEXT_UNIT = re.compile(
    r"(?<=[0-9])\s*\\(?:text|mathrm|textrm|mbox)\{(?!\s*[ie]\s*\}|.*\b(?:or|and|[mbtr]+illion|dozen|"
    r"hundred|thousand)\b)[A-Za-z\s./]*\}(?:\^\{?[23]\}?)?(?=[\s.$]*$)"
)
_WRAPPER = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\{([^{}]*)\}")
_EQUALS = re.compile(r"(?<![<>!:=\\])=(?!=)")
_NAME = re.compile(r"\|?\\?[A-Za-z][A-Za-z' ]*(?:_\w|_\{[^{}]*\})?'*(?:\(\w+\))?\|?")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_INDEX = re.compile(r"_\w|_\{[^{}]*\}|(?<=[A-Za-z])\(\w+\)")
_SPACE = re.compile(r"(?<![0-9A-Za-z.])\s+|\s+(?![0-9A-Za-z.])")
_UNITS = (
    "apples|cents|centimeters|clips|cm|days|degrees|dollars|euros|feet|ft|gallons|grams|hours|hrs|"
    "inches|integers|kg|kilometers|kilograms|km|liters|meters|miles|minutes|mins|months|mph|people|"
    "percent|points|pounds|seconds|sq|square|students|units|ways|weeks|yards|years"
)
_UNIT = re.compile(
    rf"(?<=[0-9])\s*(?:(?:{_UNITS})\b(?:\^\{{?[23]\}}?|/[a-z]+)?\s*)+$", re.IGNORECASE
)


def asked_form(prompt: str, data_source: str = "") -> str | None:
    """Return the form in which an answer is asked for: a key of `FORMS`, or None.

    The last form that the prompt names counts, unless `data_source` of verl chooses a published
    rule.
    """
    if data_source in _GRADED_AS:
        return _GRADED_AS[data_source]
    named = {form: [m.end() for m in mark.finditer(prompt)] for form, mark in _ASKED.items()}
    last = {form: ends[-1] for form, ends in named.items() if ends}
    return max(last, key=lambda form: last[form]) if last else None


def extract_answer(response: str, form: str = "line") -> str | None:
    """Return the text of the final answer in one of the `FORMS`; None where there is none of them.

    Of each form the last one counts. A box or tags that are cut off make it empty: no answer, and
    not the one before.

    Only the last 300 characters are searched, for `form` first.
    """
    tail = response[-TAIL_CHARS:]
    for name in (form, *FORMS):
        if name == "box":
            found = last_boxed(tail)
        elif name == "tags":
            _, tag, found = tail.rpartition("<answer>")
            found = found.partition("</answer>")[0] if "</answer>" in found else ""
            found = found if tag else None
        else:
            lines = (_ANSWER if name == "line" else _HASH).findall(tail)
            found = lines[-1] if lines else None
        if found is not None:
            return str(found).strip()
    return None


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}` of `text`, "" where it is cut off, or None."""
    marks = list(_BOX.finditer(text))
    return _box_at(text, marks[-1].end())[0] if marks else None


def _box_at(text: str, start: int) -> tuple[str, int]:
    """Return what a box holds whose mark ends at `start`, and where it ends itself."""
    if not text.startswith("{", start):
        bare = re.compile(r"[^\s$\\]*").match(text, start)
        return (bare[0], bare.end()) if bare else ("", start)
    depth = 0
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[start + 1 : brace.start()], brace.end()
    return "", len(text)


def _unwrap(text: str) -> str:
    """Take away boxes and the signs around formulas; words around a single one go with them."""
    text, count = _DISPLAY.subn("", text)
    text = text.replace("&", "") if count else text
    boxes = list(_BOX.finditer(text))
    for box in reversed(boxes):
        content, end = _box_at(text, box.end())
        before, after = text[: box.start()], text[end:]
        if len(boxes) == 1 and _WORDS.fullmatch(before) and _WORDS.fullmatch(after):
            before = after = ""
        text = before + content + after
    formulas = list(_FORMULA.finditer(text))
    for found in reversed(formulas):
        before, after = text[: found.start()], text[found.end() :]
        if len(formulas) == 1 and _WORDS.fullmatch(before) and _WORDS.fullmatch(after):
            before = after = ""
        text = before + next(part for part in found.groups() if part is not None) + after
    return text.replace("\\$", "").replace("$", "")


def _right_side(text: str) -> str:
    """Cut an equation whose left side is one name or has none; nor may what lies between two `=`.

    So `x=9, y=2` stays whole.
    """
    left, *sides = _EQUALS.split(text)
    has_names = [bool(re.search("[A-Za-z,;]", _COMMAND.sub("", side))) for side in (left, *sides)]
    is_cut = _NAME.fullmatch(left.strip()) or not has_names[0]
    return sides[-1] if sides and is_cut and not any(has_names[1:-1]) else text


def normalise_answer(text: str, *, cut: bool = True) -> str:
    r"""Reduce an answer to the form that is compared.

    Boxes, delimiters of formulas and wrappers such as `\text{}` go; so do one name with the only
    `=`, units, degrees, periods at the end, thousands commas of plain numbers, and spaces. A space
    between two digits or letters stays, so that `5 7` is not 57.

    `cut` takes the right side of an equation whose left side is one name.

    Example:
        >>> normalise_answer(r"x = $\boxed{1{,}234}$ dollars.")
        '1234'
    """
    text = _MINUS.sub("-", _unwrap(text[-MAX_ANSWER_CHARS:]))
    text = re.sub(r"(?<!\\)\\[!,]", "", text).replace("{,}", ",")
    if text.count("=") > 1 and "\\begin" not in text:
        text = re.sub(r",?\s+and\s+|\\q?quad\b|\\\\", ",", text)
    text = re.sub(r"(?<!\\)\\(?:[;:> ]|q?quad\b)|~", " ", text)
    text = _TEXT_UNIT.sub("", _DEGREES.sub("", text).strip())
    for _ in range(4):
        text, count = _WRAPPER.subn(r"\1", text)
        if count == 0:
            break
    text = text.strip("* \t\n")
    text = (_right_side(text) if cut else text).rstrip(". \t\n").rstrip("* \t")
    text = _UNIT.sub("", text).removesuffix("\\%").removesuffix("%")
    text = _SPACE.sub("", text).rstrip(".")
    return text.replace(",", "") if _GROUPED.fullmatch(text) else text


def as_integer(text: str, options: VerifierOptions) -> int | None:
    """Return the integer that `text` spells in at most 64 ASCII digits, or None."""
    if options.accept_integral_decimals and (match := _INTEGRAL_DECIMAL.fullmatch(text)):
        text = match[1]
    if not _INTEGER.fullmatch(text) or len(text.lstrip("+-")) > MAX_DIGITS:
        return None
    return int(text)


@functools.lru_cache(maxsize=4096)
def _asked(text: str, gold: str, seconds: float) -> float | str | None:
    """Return what `math_library.judge` says; None where it did not in time, which stays so."""
    child = shared_verifier("planish.verifiers.math_library:judge")
    try:
        reply = child.ask(text, gold, seconds)
    except TimeoutError:
        logger.warning("verifier timeout seconds=%g", seconds)
        return None
    except OSError as error:
        logger.warning("verifier crash error=%r", str(error))
        raise
    said: float | str = reply["value"] if "value" in reply else reply["score"]
    return said


def in_child(text: str, gold: str, seconds: float) -> float | str:
    """Return what `math_library.judge` says of a text; responses of a group share their answers.

    Raises:
        TimeoutError: it did not in time.
        OSError: its process ended.
    """
    said = _asked(text, gold, seconds)
    if said is None:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return said


def _find(response: str, expected: str, form: str, options: VerifierOptions) -> Verdict | str:
    """Return the answer as it is compared with `expected`, or the verdict where there is none."""
    given = extract_answer(response, form)
    if given is None:
        try:
            given = str(in_child(response[-TAIL_CHARS:], "", options.timeout_seconds))
        except TimeoutError:
            return timed_out()
        except OSError:
            return failed()
    if not given:
        return not_found()
    has_equation = "=" in expected
    seen = normalise_answer(given, cut=not has_equation)
    left, *sides = _EQUALS.split(seen)
    # `m+n=7` is 7, as DAPO and math-verify have it; `2x=14` is not 14.
    is_named = len(sides) == 1 and not re.search(r"[0-9^;]", _INDEX.sub("", left))
    return sides[0] if is_named and not has_equation else seen


def verify_integer(
    response: str, answer: str, options: VerifierOptions, form: str = "line"
) -> Verdict:
    """Compare the extracted answer with an integer; other ground truths compare as text."""
    expected = normalise_answer(answer)
    if not expected:
        return failed()
    seen = _find(response, expected, form, options)
    return seen if isinstance(seen, Verdict) else _by_rule(seen, expected, options)


def _by_rule(seen: str, expected: str, options: VerifierOptions) -> Verdict:
    wanted, given = as_integer(expected, options), as_integer(seen, options)
    if wanted is not None:
        return right(seen) if given == wanted else wrong(seen)
    return right(seen) if seen == expected else wrong(seen)


def verify_math(
    response: str, answer: str, options: VerifierOptions, form: str = "line"
) -> Verdict:
    """Compare mathematically: by rule where it decides, else in a killable child process."""
    expected = normalise_answer(answer)
    if not expected or len(answer) > MAX_ANSWER_CHARS:
        return failed()
    seen = _find(response, expected, form, options)
    if isinstance(seen, Verdict):
        return seen
    ruled = _by_rule(seen, expected, options)
    both_integers = None not in (as_integer(seen, options), as_integer(expected, options))
    if ruled.accuracy == 1.0 or both_integers or not _is_comparable(seen, expected):
        return ruled
    try:
        is_equal = in_child(seen, expected, options.timeout_seconds)
        return right(seen) if is_equal else wrong(seen)
    except TimeoutError:
        pass
    except OSError:
        return failed(seen)
    # The response is to blame, unless the ground truth takes far longer against anything: a busy
    # machine must not make an error of it.
    try:
        in_child("0", expected, 6 * options.timeout_seconds)
    except TimeoutError:
        return failed(
            seen, timeout=True, reason=f"the answer {answer!r:.80} takes too long to read"
        )
    except OSError:
        return failed(seen)
    return timed_out(seen)


def _is_comparable(text: str, expected: str) -> bool:
    """Refuse what must equal nothing: open or deep brackets, non-ASCII digits, several answers.

    Of equations math-verify may compare the last right side alone: none equals a value, unless it
    is between numbers, and several without a comma equal nothing.
    """
    braces = brackets = 0
    for character in text:
        braces += {"{": 1, "}": -1}.get(character, 0)
        brackets += {"(": 1, "[": 1, ")": -1, "]": -1}.get(character, 0)
        if braces < 0 or max(braces, brackets) > MAX_DEPTH:
            return False
        if character.isdigit() and not character.isascii():
            return False
    lowered = f" {text.lower()} "
    sides = _EQUALS.split(text)[:-1]
    named = [side for side in sides if re.search("[A-Za-z]", _COMMAND.sub("", side))]
    if (named and "=" not in expected) or (len(named) > 1 and not re.search("[,;]", text)):
        return False
    return braces == 0 and bool(text) and " or " not in lowered and "boxed" not in lowered
