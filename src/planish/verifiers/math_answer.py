"""Finds the final answer of a response and compares it: integers by rule, the rest in a child.

The verifier searches the whole response for the form that the prompt requests. Then it searches the
last 300 characters for the other forms, and for any answer that math-verify finds.

Source: DAPO, arXiv 2503.14476, section 2.4 (rule-based reward) and its published normalisation.
"""

from __future__ import annotations

import functools
import logging
import re
from typing import Any

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
"""Length of a response's end that is searched for answers in other forms than requested."""
MAX_DIGITS = 64
MAX_ANSWER_CHARS = 1000
MAX_DEPTH = 16
"""Deepest nesting of brackets in a comparison, since the time to parse grows quickly with it."""

FORMS = {"line": "`Answer:`", "box": r"`\boxed{}`", "hash": "`####`", "tags": "`<answer>`"}
"""Answer forms that prompts request, in the order in which responses are searched."""
_LABEL = re.compile(
    "(?:answer|\u7b54(?:\u6848|\u3048)?)([\"'\u201c\u201d\u2019*_`\\s]*)[:\uff1a]", re.IGNORECASE
)
"""Labels before an answer, in English, Chinese and Japanese."""
_ASKED = {
    "line": _LABEL,
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
"""Map from `data_source` of verl to the form that verl's published rule reads."""

_VALUE = re.compile(
    r"\$\$.+?\$\$|\$\s*\\(?:begin|boxed)\{(?:\\.|[^$\\])+\$|\\\[.+?\\\]|\\\(.+?\\\)|\\begin\{.+?\\end\{[^\n]*"
    r"|[^\n]+",
    re.DOTALL,
)
_JSON_VALUE = re.compile(r"\"(?:[^\"\\]|\\.)*\"|[^,}\n]*")
_CONTENT = {
    "hash": re.compile(r"####(?![ \t*]*[A-Za-z]{2})([^\n]*)"),
    "tags": re.compile(r"<answer>(?:((?:(?!<answer>).)*?)</answer>)?", re.DOTALL),
}
"""Map from form to the pattern of its content, for forms whose content is in one place."""
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*")
_INTEGER = re.compile(r"[+-]?[0-9]+")
_INTEGRAL_DECIMAL = re.compile(r"([+-]?[0-9]+)\.0+")
_PLAIN = re.compile(r"[+-]?[0-9]+(?:\.[0-9]+)?")
_GROUPED = re.compile(r"[+-]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_SPACED = (
    "(?:(?<=(?<![\\w.,])[0-9])|(?<=(?<![\\w.,])[0-9]{2})|(?<=(?<![\\w.,])[0-9]{3})|"
    "(?<=[ '\u00a0\u2009\u202f][0-9]{3}))[ '\u00a0\u2009\u202f]"
    "(?=[0-9]{3}(?:[ '\u00a0\u2009\u202f][0-9]{3})*(?!\\w))"
)
"""Separators between groups of three digits."""
_JOINED = "(?<![\\w.])[0-9]+(?:[-\u2010-\u2015][0-9]+){2,}(?![\\w.])"
_OPAQUE = re.compile(
    f"{_JOINED}|[0-9][ap]m$|^[0-9]+[-\u2010-\u2015][0-9]+$|[0-9]_[0-9]", re.MULTILINE
)
"""Texts that equal only the same text, e.g. digits joined by hyphens, or a number with its base."""
_FORMULA = re.compile(
    r"\$\$(.+?)\$\$|(?<!\\)\$(.+?)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL
)
_WORDS = re.compile(
    r"(?!.*\b(?:or|and|not|dozen|hundred|thousand|[mbtr]+illion)\b)[A-Za-z\s.:'*$]*",
    re.IGNORECASE | re.DOTALL,
)
_DISPLAY = re.compile(r"\\(?:begin|end)\{(?:align|equation|gather|multline|split)(?:ed)?\*?\}")
_CURRENCY = re.compile(
    "[\u00a2-\u00a5\u058f\u060b\u09f2\u09f3\u0e3f\u17db\u20a0-\u20c0\ufdfc\uff04\uffe0\uffe1\uffe5"
    "\uffe6]|\\\\(?:pounds|(?:text)?(?:sterling|euro|yen|rupee))(?![A-Za-z])(?:\\{\\})?"
    "|\\b(?:US|CA|AU|NZ|HK|NT|SG|[ACRS])(?=\\\\?\\$\\s*[0-9])"
    "|\\b(?:[A-Z]{3}|Rs\\.?|kr\\.?)(?=\\s*[+-]?[0-9])|(?<=[0-9])\\s*(?:[A-Z]{3}|Rs|kr|z\u0142)\\b"
)
_DAY_HALF = (
    r"(?i)(?<=[0-9])(?:\s|\\[,;: ]|~)*(\\(?:text|mathrm|textrm)\{{\s*)?{}\.?\s?m\b\.?(?(1)\s*\}})"
)
"""Pattern of the mark that makes a time of day one before or after noon."""
_SIGNS = str.maketrans(
    {
        "\u00b2": "^2",
        "\u00b3": "^3",
        "\u00d7": "\\times ",
        "\u03c0": "\\pi ",
        "\u2205": "\\emptyset ",
        "\u221e": "\\infty ",
        "\u2264": "\\le ",
        "\u2265": "\\ge ",
    }
)
"""Unicode sign to its LaTeX form."""
_SURFACE = {
    r"\\?\$": "",
    r"\\varnothing\b": r"\\emptyset",
    r"\\colon\b": ":",
    r"\\bar(?=\{)|\\dot(?=\{[0-9]\})": r"\\overline",
    r"\b([a-z])\s*=([^=]*?)(?:\\q?quad\b|[\s,])*(?:,|\bor\b|\band\b)(?:\\q?quad\b|\s)*\1\s*=": (
        r"\1=\2, "
    ),
    "\u221a\\s*(?:\\(([^()]*)\\)|([0-9]+))": r"\\sqrt{\1\2}",
    r"\\(?:displaystyle|(?:text)?color\{\w+\})": "",
    r"(?<=[0-9])\s*\^\s*\{?\s*(\\(?:text|mathrm|textrm)\{)?(?:st|nd|rd|th)\b(?(1)\})\}?": "",
    _DAY_HALF.format("a"): "am",
    _DAY_HALF.format("p"): "pm",
    "\u2212|(?<![0-9])[\u2010-\u2013](?=[0-9.])": "-",
    r"(?<!\\)\\[!,]": "",
    r"\{,\}": ",",
    r"(?<!\\)\\[;:> ]|~": " ",
    "(?:\\^\\s*(?:\\\\circ|\\{\\s*\\\\circ\\s*\\})|\\\\degree|\u00b0)"
    "(?:\\s*(?:\\\\(?:text|mathrm)\\{\\s*[CF]\\s*\\}|[CF]\\b))?": "",
    r"(?<=[0-9})i])\s*\\(?:text|mathrm|textrm|mbox)\{(?!\s*[ie]\s*\}|.*\b(?:or|and|[mbtr]+illion|"
    r"dozen|hundred|thousand)\b)[A-Za-z\s./]*(?:\^[23])?\}(?:\^\{?[23]\}?)?(?=[\s.$]*$)": "",
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|underline)\{([^{}]*)\}": r"\1",
    r"(?i)(?<=[0-9])(?:_\{\(?(\w+)\)?\}|\s*\(?(?:in )?base[ -]?([0-9]+)\)?)": r"_\1\2",
    _SPACED: "",
    r"(?<![\w.,])([0-9]+) ([0-9]+)\s*/\s*([0-9]+)(?!\w)": r"\1\\frac{\2}{\3}",
    r"(?<=[0-9}])\s+(?=i(?![A-Za-z]))": "",
}
"""Patterns of parts without a value (degrees, units, wrappers, spaces), each with its
replacement."""
_EQUALS = re.compile(r"(?<![<>!:=\\])=(?!=)")
_NAMED = re.compile(r"\|?\\?[A-Za-z][A-Za-z' ]*(?:_\w|_\{[^{}]*\})?'*(?:\(\w+\))?\|?|[^A-Za-z]*")
"""Left side of a ground truth that is a name or empty."""
_COMMAND = re.compile(r"\\[A-Za-z]+")
_SPACE = re.compile(r"(?<![0-9A-Za-z.\s])\s+|\s+(?![0-9A-Za-z.\s])")
_FUNCTION = re.compile(r"(?<![A-Za-z\\])[A-Za-z]'*\(\w+\)(?=\s*=)")
_UNITS = (
    "apples|cents|centimeters|clips|cups|days|degrees|dollars|euros|gallons|grams|hours|hrs|"
    "integers|kg|kilograms|liters|minutes|mins|months|mph|people|percent|points|pounds|seconds|"
    "square|sq|students|ways|weeks|years"
)
_LENGTHS = (
    "[ckm]?m|(?:kilo|centi|milli)?met(?:er|re)s?|inch(?:es)?|in|feet|foot|ft|miles?|yards?|units?"
)
_UNIT = re.compile(
    rf"(?<=[0-9}})i])\s*(?:(?:{_UNITS}|{_LENGTHS})\b(?:\^\{{?[23]\}}?|/[a-z]+)?\s*)+$",
    re.IGNORECASE,
)
_UNIT_POWER = re.compile(
    rf"(?<![A-Za-z])({_LENGTHS}|s)(?:\^\{{?-?[1-3]\}}?|[23\u00b2\u00b3])(?!\w)"
)

# Patterns for an equation that ends in a number.
_IMPLIES = re.compile(
    r"\\(?:implies|iff|therefore|(?:Long)?[Rr]ightarrow)(?![A-Za-z])|=>|[\u21d2\u2234]"
    r"|\b(?:so|thus|hence|therefore)\b"
)
_SIDES = re.compile(rf"{_EQUALS.pattern}|\\equiv(?![A-Za-z])|\u2261")
_MODULO = re.compile(r"\(?\s*\\?[pb]?mod\s*\{?\s*[0-9]+\s*\}?\s*\)?[\s.]*$")
_BRACKETS = re.compile(r"[(\[{][^()\[\]{}]*[)\]}]|\\begin\b(?:(?!\\begin\b).)*?\\end\b", re.DOTALL)
_LIST = re.compile(
    r"(?<![0-9]),(?!\s*=)|,(?![0-9]{3}(?![0-9])|\s*=)|;|\b(?:and|or)\b|\\\\(?!\s*(?:=|$))|\\q?quad\b"
    r"|[0-9]\s+\\?[A-Za-z](?:_\w+)?\s*="
)
_STRUCTURE = re.compile(r"\\(?:[dt]?frac|sqrt|cdot|times|pi)(?![A-Za-z])")
_MULTIPLE = re.compile(
    r"(?![A-Z]{2,}\^\{?2\}?$)[^A-Za-z|!\\]*"
    r"(?P<name>(?:\\(?:alpha|beta|gamma|delta|theta|lambda|mu|rho|phi|omega)|[A-Z]{2,}|[A-Za-z])"
    r"(?:_\w+|_\{[^{}]*\})?'*)(?![\w({])"
    r"(?:[^A-Za-z|!\\]|(?P=name))*|(?P<words>)[0-9.]+\s*[A-Za-z]{4,}(?: [A-Za-z]+)*"
)
"""Left side of an equation for a multiple of one name, such as `2x`; the right side is then no
answer."""
_CHOSEN = re.compile(
    r"\s*(?:option|choice)?\s*\(?(?-i:([A-Z]))(?:[).:]+(?!.*(?-i:\b[A-Z]\b)).*)?", re.I | re.S
)
"""A choice by its letter, with or without its text, and no other letter."""

# Patterns for one number among words.
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,3}(?:,[0-9]{2,3})*,[0-9]{3}(?![0-9,])|[0-9]+)(?:\.[0-9]+)?")
_DECIMAL_COMMA = re.compile(r"(?<![0-9.,(\[{])([0-9]+),([0-9]{1,2}|[0-9]{4,})(?![0-9.,)\]}])")
_NEGATIVE = re.compile(r"\b(?:negative|minus)\s+(?=[0-9])", re.IGNORECASE)
_STRANGE = re.compile(
    r"[\x00-\x08\x0e-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff]"
    r"|[\\^_<>|=+*~@&\u00b1\u00b7\u00d7\u00f7\u2200-\u22ff]|[^\D0]"
    r"|[^\W\d_]0|\.0|(?<![^\W_])[a-z][\s,;(]*0|0[)\]}]*!|/(?![^\W\d_])|(?<![^\W_])-|-(?![^\W\d_])"
    rf"|0(?!(?:st|nd|rd|th|[ap]?m|[ghslnjwv]|{_UNITS}|{_LENGTHS})\b)[a-z\u0370-\u03ff]"
    r"|0[\s-]+(?![mghslnjwv]\b)[a-z\u0370-\u03ff](?![^\W_])"
    "|0\\s*[\u00b2\u00b3\u00b9\u00bc-\u00be\u2070-\u209f\u2150-\u218f\u4e07\u4ebf\u5104\u5146\u5341"
    "\u534a\u5343\u767e\u842c\ub9cc\uc5b5\ucc9c]"
    r"|n't\b|0.*\band\b|\b(?:or|not|never|cannot|neither|nor|wrong|incorrect|than|between|half|twice|"
    r"double|triple|dozen|hundred|thousand|[mbtr]+illion|lakh|crore|halves|thirds|f(?:our|if)ths|"
    r"tenths|hundredths|thousandths|pi|sqrt|root|squared|cubed|factorial|power|mod|modulo|base|log|"
    r"ln|sin|cos|tan|infinity|plus|minus|negative)\b",
    re.IGNORECASE | re.DOTALL,
)
"""Signs that a text is more than one number among words; the number itself is replaced by 0."""


def asked_form(prompt: str, data_source: str = "") -> str | None:
    """Return the form of answer that a prompt requests: a key of `FORMS`, or None.

    The last form that the prompt names counts, unless `data_source` of verl chooses a published
    rule.
    """
    if data_source in _GRADED_AS:
        return _GRADED_AS[data_source]
    named = ((m.end(), form) for form, mark in _ASKED.items() for m in mark.finditer(prompt))
    return max(named, default=(0, None))[1]


def extract_answer(response: str, form: str = "line") -> str | None:
    """Return the text of the final answer in one of the `FORMS`; None if no form occurs.

    `form` is searched first, in the whole response; the other forms in its last 300 characters. The
    last match of a form counts. If that match is empty or cut off, the result is empty: there is no
    answer, and an earlier match does not count.
    """
    for name in (form, *FORMS):
        text = response if name == form else response[-TAIL_CHARS:]
        if name == "box":
            found = last_boxed(text)
        elif name == "line":
            found = _last_line(text)
        else:
            found = [None, *_CONTENT[name].findall(text)][-1]
        if found is not None:
            return str(found).strip()
    return None


def _last_line(text: str) -> str | None:
    """Return the text after the last label, on its line or below; in JSON, the string after it."""
    labels = list(_LABEL.finditer(text))
    if not labels:
        return None
    behind = text[labels[-1].end() :]
    is_json = '"' in labels[-1][1]
    value = (_JSON_VALUE if is_json else _VALUE).match(behind.lstrip("*_` \t\r\n"))
    found = value[0] if value else ""
    return found.replace("\\\\", "\\") if is_json else found


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}` of `text`, "" if it is cut off, or None."""
    marks = list(_BOX.finditer(text))
    return _box_at(text, marks[-1].end())[0] if marks else None


def _box_at(text: str, start: int) -> tuple[str, int]:
    """Return the content of the box whose mark ends at `start`, and the end of the box."""
    if not text.startswith("{", start):
        bare = re.split(r"[\s$\\]", text[start:], maxsplit=1)[0]
        return bare, start + len(bare)
    depth = 0
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[start + 1 : brace.start()], brace.end()
    return "", len(text)


def _opened(text: str, spans: list[tuple[int, str, int]]) -> str:
    """Replace each span (start, content, end) by its content; drop the words around a single
    span.
    """
    for start, content, end in reversed(spans):
        before, after = text[:start], text[end:]
        if len(spans) == 1 and _WORDS.fullmatch(before) and _WORDS.fullmatch(after):
            before = after = ""
        text = before + content + after
    return text


def _plain(text: str) -> str:
    r"""Remove currencies, boxes, delimiters, `\text{}` and quotes around an answer."""
    text = _CURRENCY.sub("  ", text[-MAX_ANSWER_CHARS:].translate(_SIGNS))
    text, count = _DISPLAY.subn("", text)
    text = text.replace("&", "") if count else text
    text = _opened(text, [(box.start(), *_box_at(text, box.end())) for box in _BOX.finditer(text)])
    formulas = _FORMULA.finditer(text)
    text = _opened(text, [(f.start(), f[f.lastindex or 0], f.end()) for f in formulas])
    for pattern, instead in [*_SURFACE.items()] * 3:
        text = re.sub(pattern, instead, text)
    return text.strip("*`\"'\u201c\u201d \t\n").rstrip("\\")


def _masked(text: str) -> str:
    """Return a text of equal length with dots in place of bracketed parts; deep or open brackets
    stay.
    """
    for _ in range(MAX_DEPTH):
        text = _BRACKETS.sub(lambda found: "." * len(found[0]), text)
    return text


def _value(text: str, *, is_truth: bool) -> str:
    """Return the last side of an equation; the whole text if it is no equation or a list of them.

    The left side of a ground truth must be empty or a name. The left side of an answer may be
    anything but a multiple of one name.
    """
    masked = _masked(text)
    signs = list(_SIDES.finditer(masked))
    if not signs or _LIST.search(masked[: signs[-1].end()]):
        return text
    left = _STRUCTURE.sub("2", text[: signs[0].start()]).strip()
    if is_truth:
        is_cut = bool(_NAMED.fullmatch(left))
    else:
        multiple = _MULTIPLE.fullmatch(left)
        is_cut = not multiple or not re.search(
            r"[-0-9^/]", left.replace(multiple["name"] or " ", "")
        )
    return text[signs[-1].end() :] if is_cut else text


def normalise_answer(text: str, *, cut: bool = True, is_truth: bool = True) -> str:
    r"""Reduce an answer to the form that is compared.

    The result has no boxes, delimiters of formulas and wrappers such as `\text{}`, no single name
    before the only `=`, no currencies, units, degrees, periods at the end, and no thousands commas
    or spaces of plain numbers. Other spaces go too, except a space between two digits or letters,
    so that `5 7` is not 57. `cut` takes the right side of an equation, for a ground truth only if
    its left side is one name.

    Example:
        >>> normalise_answer(r"x = $\boxed{1{,}234}$ dollars.")
        '1234'
    """
    text = _plain(text)
    if text.count("=") > 1 and "\\begin" not in text:
        text = re.sub(r",?(?:\s+and\s+|\s*(?:\\q?quad\b|\\\\(?!\s*=)))", ",", text)
    text = re.sub(r"\\q?quad\b", " ", text)
    text = (_value(text, is_truth=is_truth) if cut else text).rstrip(".* \t\n")
    text = _UNIT.sub("", text).removesuffix("\\%").removesuffix("%")
    text = _SPACE.sub("", text).rstrip(".")
    return text.replace(",", "") if _GROUPED.fullmatch(text) else text


def number_in(text: str) -> str | None:
    """Return the only number in an answer among words, signs of currency and units.

    A chain of equations gives its last number, with any left side. A list of equations, or an
    equation for a multiple of a name, gives None.

    Example:
        >>> number_in("$m+n = 256+37 = 293$ cm"), number_in("12 500 per day"), number_in("2x = 14")
        ('293', '12500', None)
    """
    text = _value(_MODULO.sub("", _IMPLIES.split(_plain(text))[-1]), is_truth=False)
    text = _NEGATIVE.sub("-", text.strip("*_ \t\n").replace("**", ""))
    text = _DECIMAL_COMMA.sub(r"\1.\2", _UNIT_POWER.sub(r"\1", text))
    numbers = _NUMBER.findall(text)
    if len(numbers) != 1 or _STRANGE.search(_NUMBER.sub("0", text)):
        return None
    return str(numbers[0]).replace(",", "")


def as_integer(text: str, options: VerifierOptions) -> int | None:
    """Return the integer that `text` spells in at most 64 ASCII digits, or None."""
    if options.accept_integral_decimals and (match := _INTEGRAL_DECIMAL.fullmatch(text)):
        text = match[1]
    if not _INTEGER.fullmatch(text) or len(text.lstrip("+-")) > MAX_DIGITS:
        return None
    return int(text)


@functools.lru_cache(maxsize=4096)
def _asked(text: str, gold: str, seconds: float) -> Any:
    """Return the result of `math_library.judge`; None if it was not ready in time.

    The result is cached, since responses of a group often share their answers. OSError: the child
    process ended.
    """
    try:
        reply = shared_verifier("planish.verifiers.math_library:judge").ask(text, gold, seconds)
    except TimeoutError:
        logger.warning("verifier timeout")
        return None
    except OSError as error:
        logger.warning("verifier crash error=%r", str(error))
        raise
    return reply["value"] if "value" in reply else reply["score"]


def _find(response: str, answer: str, form: str, options: VerifierOptions) -> Verdict | str:
    """Return the extracted answer, or the verdict if there is no answer."""
    given = extract_answer(response, form)
    if given is None:
        tail = re.sub(_SPACED, "", re.sub(_JOINED, " ", response[-TAIL_CHARS:]))
        try:
            given = _asked(tail, "", options.timeout_seconds) if tail.strip() else ""
        except OSError:
            return failed()
        if given is None:
            return timed_out()
    if not given:
        return not_found()
    texts = _plain(given), _plain(answer)
    defined, wanted = (set(_FUNCTION.findall(text)) for text in texts)
    if defined and wanted and defined != wanted:
        return wrong(given)
    expected = normalise_answer(answer)
    if re.fullmatch(r"\(?[A-Z]\)?", expected):
        given = _CHOSEN.sub(r"\1", texts[0])
    if _PLAIN.fullmatch(expected) and (number := number_in(given)):
        return number
    seen = normalise_answer(given, cut="=" not in expected, is_truth=False)
    if _OPAQUE.search("\n".join(texts)):
        return (right if seen == expected else wrong)(seen)
    return seen


def verify_integer(
    response: str, answer: str, options: VerifierOptions, form: str = "line"
) -> Verdict:
    """Compare the extracted answer with an integer; other ground truths compare as text."""
    expected = normalise_answer(answer)
    if not expected:
        return failed()
    seen = _find(response, answer, form, options)
    return seen if isinstance(seen, Verdict) else _by_rule(seen, expected, options)


def _by_rule(seen: str, expected: str, options: VerifierOptions) -> Verdict:
    wanted, given = as_integer(expected, options), as_integer(seen, options)
    is_right = seen == expected if wanted is None else given == wanted
    return (right if is_right else wrong)(seen)


def verify_math(
    response: str, answer: str, options: VerifierOptions, form: str = "line"
) -> Verdict:
    """Compare mathematically: by rule if a rule decides, else by math-verify in a child."""
    expected = normalise_answer(answer)
    if not expected or len(answer) > MAX_ANSWER_CHARS:
        return failed()
    seen = _find(response, answer, form, options)
    if isinstance(seen, Verdict):
        return seen
    ruled = _by_rule(seen, expected, options)
    both_integers = _INTEGER.fullmatch(seen) and _INTEGER.fullmatch(expected)
    if ruled.accuracy == 1.0 or both_integers or not _is_comparable(seen, expected):
        return ruled
    # A late comparison counts against the response, unless the ground truth alone also takes far
    # too long. Otherwise a busy machine would cause verifier errors.
    try:
        is_equal = _asked(seen, expected, options.timeout_seconds)
        if is_equal is not None:
            return (right if is_equal else wrong)(seen)
        if _asked("0", expected, 6 * options.timeout_seconds) is not None:
            return timed_out(seen)
    except OSError:
        return failed(seen)
    told = f"the answer {answer!r:.80} takes too long to read"
    return failed(seen, timeout=True, reason=told)


def _is_comparable(text: str, expected: str) -> bool:
    """Return False for texts that must equal nothing: open or deep brackets, non-ASCII digits,
    several answers.

    For equations math-verify may compare only the last right side. So an equation equals no value,
    unless it is between numbers, and several equations without a comma equal nothing.
    """
    *sides, _ = _EQUALS.split(_COMMAND.sub("", text))
    named = [side for side in sides if re.search("[A-Za-z]", side)]
    if (named and "=" not in expected) or (len(named) > 1 and not re.search("[,;]", text)):
        return False
    refused = re.search("[^\\D0-9]|[\u2010-\u2015]|boxed", text)
    if "," not in expected:
        refused = refused or re.search("(?i: or )", text)
    return bool(text) and not refused and not re.search(r"[{}(\[]", _masked(text))
