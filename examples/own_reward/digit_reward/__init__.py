"""A reward of one's own: whole numbers, with a part of the point for each right digit."""


def digits(response: str, answer: str) -> float:
    """Return the share of digits of the answer that the response has in place, from the right.

    The last word of the response counts; one of another length than the answer is wrong.

    Example:
        >>> digits("12+30=42", "42"), digits("12+30=41", "42"), digits("forty-two", "42")
        (1.0, 0.5, 0.0)
    """
    words = response.replace("=", " ").split()
    if not words or len(words[-1]) != len(answer):
        return 0.0
    return sum(a == b for a, b in zip(words[-1], answer, strict=True)) / len(answer)
