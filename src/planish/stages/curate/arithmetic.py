"""Worked traces of arithmetic: the character-by-character solutions that a small model can learn.

Every trace ends in `=` and the result; the verifier `trace` judges it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ColumnExpression:
    """Two operands, 0 or more, and one of `+ - *`, solved column by column from the right.

    Example:
        >>> ColumnExpression(48, "+", 24).trace()
        '8+4+0=12;4+2+1=7=72'
        >>> ColumnExpression(52, "-", 17).trace()
        '12-7-0=5;5-1-1=3=35'
        >>> ColumnExpression(24, "*", 5).trace()
        '4*5+0=20;2*5+2=12=120'
    """

    left: int
    operator: str
    right: int

    @property
    def prompt(self) -> str:
        """Text that the policy sees."""
        return f"{self.left}{self.operator}{self.right}="

    @property
    def result(self) -> int:
        """Exact result."""
        if self.operator == "+":
            return self.left + self.right
        return self.left - self.right if self.operator == "-" else self.left * self.right

    @property
    def family(self) -> str:
        """Family for the split: equal for expressions that differ only in the order of operands."""
        low, high = sorted((self.left, self.right))
        return f"{low}{self.operator}{high}"

    def fault(self, max_digits: int) -> str | None:
        """Return the reason code if column traces do not cover this expression, else None."""
        if max(self.left, self.right) >= 10**max_digits:
            return f"operand_over_{max_digits}_digits"
        if self.operator == "-" and self.result < 0:
            return "negative_result"
        if self.operator == "*" and min(self.left, self.right) > 9:
            return "no_factor_of_one_digit"
        return None

    def trace(self) -> str:
        """Return the columns from the right (`digit, digit, carry in = value`), then the result."""
        if self.operator == "*":
            number, digit = (self.left, self.right) if self.right <= 9 else (self.right, self.left)
            columns = _product_columns(number, digit)
        else:
            columns = _sum_columns(self.left, self.right, minus=self.operator == "-")
        return ";".join(columns) + f"={self.result}"


def _digits(number: int, width: int) -> list[int]:
    return [int(digit) for digit in reversed(str(number).zfill(width))]


def _sum_columns(left: int, right: int, *, minus: bool) -> list[str]:
    width = max(len(str(left)), len(str(right)))
    carry = 0
    columns = []
    for a, b in zip(_digits(left, width), _digits(right, width), strict=True):
        if minus:
            # A column that borrows shows its ten: 12-7-0=5.
            borrow = a < b + carry
            top = a + 10 * borrow
            columns.append(f"{top}-{b}-{carry}={top - b - carry}")
            carry = int(borrow)
        else:
            total = a + b + carry
            columns.append(f"{a}+{b}+{carry}={total}")
            carry = total // 10
    return columns


def _product_columns(number: int, digit: int) -> list[str]:
    carry = 0
    columns = []
    for a in _digits(number, 1):
        total = a * digit + carry
        columns.append(f"{a}*{digit}+{carry}={total}")
        carry = total // 10
    return columns
