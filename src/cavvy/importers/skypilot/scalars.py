"""Rules for scalars, which follow the types of JSON Schema, as SkyPilot does: a number is not a
string, and true is not a number.
"""

from collections.abc import Iterable
from functools import partial

from cavvy.importers import shapes
from cavvy.spec.problems import listed, shown
from cavvy.spec.tree import ScalarNode

text = partial(shapes.make_text, shapes.is_string)
FLAG = shapes.make_flag(lambda node: isinstance(node.value, bool))
TEXT = text()


def choice(names: Iterable[str], *, any_case: bool = True) -> shapes.ScalarRule:
    """Return a rule that permits only the given words."""
    known = list(names)

    def check(value: str) -> str:
        if value in known or (any_case and value.lower() in {name.lower() for name in known}):
            return ""
        return shapes.no_choice(shown(value), value, known)

    return text(listed(known), check=check)


def whole(
    low: float | None = None, high: float | None = None, *, exact: bool = False
) -> shapes.ScalarRule:
    """Return a rule for a whole number from `low` to `high`. With `exact`, 2.0 is rejected,
    although JSON Schema accepts it as a whole number.
    """

    def test(node: ScalarNode) -> str:
        value = node.value
        if isinstance(value, float) and value.is_integer() and not exact:
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            return f"{shapes.describe_value(node)} is not a whole number"
        return _check_bounds(value, low, high)

    return shapes.ScalarRule(_bounded("a whole number", low, high), test)


def number(
    low: float | None = None, high: float | None = None, *, above: bool = False
) -> shapes.ScalarRule:
    """Return a rule for a number from `low` to `high`. With `above`, the number must be greater
    than `low`.
    """

    def test(node: ScalarNode) -> str:
        if isinstance(node.value, bool) or not isinstance(node.value, int | float):
            return f"{shapes.describe_value(node)} is not a number"
        if above and low is not None and node.value <= low:
            return f"{node.text} is too small"
        return _check_bounds(node.value, low, high)

    return shapes.ScalarRule(
        f"a number above {low:g}" if above else _bounded("a number", low, high), test
    )


def _check_bounds(value: float, low: float | None, high: float | None) -> str:
    """Return the error message for a number outside its bounds; "" for a number within its
    bounds.
    """
    if low is not None and not value >= low:
        return f"{value} is too small"
    if high is not None and not value <= high:
        return f"{value} is too large"
    return ""


def _bounded(words: str, low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f"{words} from {low:g} to {high:g}"
    return f"{words} of at least {low:g}" if low is not None else words
