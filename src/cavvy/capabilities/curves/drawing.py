"""Draws curves with the characters of a terminal: each holds two by four dots (Unicode's Braille
patterns, U+2800 and following).
"""

from collections.abc import Sequence

from cavvy.domain.units import format_number

_BLANK = 0x2800
# the bits of the dots of a character, by column and row (The Unicode Standard, chapter 21.1)
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))


def draw(
    lines: Sequence[tuple[Sequence[float], Sequence[float]]], width: int, height: int
) -> list[str]:
    """Return the rows of a plot of lines, each with its horizontal and vertical values, in a box of
    `width` by `height` characters, with the bounds of both axes beside it.
    """
    across = [value for xs, _ in lines for value in xs]
    up = [value for _, ys in lines for value in ys]
    left, right, low, high = min(across), max(across), min(up), max(up)
    labels = (
        {0: format_number(high), height - 1: format_number(low)}
        if height > 1
        else {0: format_number(high)}
    )
    margin = max(map(len, labels.values()))
    columns = max(8, width - margin - 2)
    dots = [[0] * columns for _ in range(height)]

    def place(x: float, y: float) -> tuple[int, int]:
        return (
            round((x - left) / ((right - left) or 1) * (2 * columns - 1)),
            round((high - y) / ((high - low) or 1) * (4 * height - 1)),
        )

    for xs, ys in lines:
        before: tuple[int, int] | None = None
        for x, y in zip(xs, ys, strict=True):
            at = place(x, y)
            for column, row in _between(before or at, at):
                dots[row // 4][column // 2] |= _DOTS[column % 2][row % 4]
            before = at
    rows = [
        f"{labels.get(number, ''):>{margin}} ┤{''.join(chr(_BLANK + each) for each in row)}".rstrip(
            chr(_BLANK)
        )
        for number, row in enumerate(dots)
    ]
    first, last = format_number(left), format_number(right)
    gap = " " * max(1, columns - len(first) - len(last))
    return [*rows, f"{'':>{margin}}  {first}{gap}{last}"]


def _between(one: tuple[int, int], two: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the dots of a straight line."""
    (x, y), steps = one, max(abs(two[0] - one[0]), abs(two[1] - one[1]), 1)
    return [
        (x + round((two[0] - x) * each / steps), y + round((two[1] - y) * each / steps))
        for each in range(steps + 1)
    ]
