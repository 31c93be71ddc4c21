"""The rules that several importers use to check single values. Each importer decides which values
it accepts as strings or as true.
"""

from collections.abc import Callable, Iterable

from cavvy.importers.shapes import ScalarRule
from cavvy.importers.yaml11 import UnquotedDate
from cavvy.spec.problems import nearest, shown
from cavvy.spec.tree import ScalarNode, describe

NodeTest = Callable[[ScalarNode], bool]


def describe_value(node: ScalarNode) -> str:
    """Describe a value of the file for an error message, with its type in YAML 1.1. An unquoted
    `yes` is a boolean in YAML 1.1; `describe` would call `yes` a string.
    """
    if isinstance(node.value, bool) and node.text.lower() not in ("true", "false"):
        return f"{node.text}, which YAML reads as {str(node.value).lower()},"
    return describe(node)


def is_string(node: ScalarNode) -> bool:
    """Return whether YAML reads the value as a string."""
    return isinstance(node.value, str) and not isinstance(node.value, UnquotedDate)


def make_text(
    is_text: NodeTest,
    words: str = "a string",
    *,
    pattern: str = "",
    fits: Callable[[str], object] | None = None,
    check: Callable[[str], str] | None = None,
) -> ScalarRule:
    """Return a rule for a string that matches `pattern` and for which `fits` returns true. `check`
    returns the problem of a string, or "".
    """
    import re

    def test(node: ScalarNode) -> str:
        if not is_text(node):
            return f"{describe_value(node)} is not a string"
        value = str(node.value)
        if (pattern and not re.search(pattern, value)) or (fits is not None and not fits(value)):
            return f"cannot use {shown(value)}"
        return check(value) if check else ""

    return ScalarRule(words, test)


def fitting(words: str, fits: Callable[[ScalarNode], object]) -> ScalarRule:
    """Return a rule for a value for which `fits` returns true."""
    return ScalarRule(words, lambda node: "" if fits(node) else f"cannot use {shown(node.text)}")


def make_flag(is_flag: NodeTest) -> ScalarRule:
    def test(node: ScalarNode) -> str:
        return "" if is_flag(node) else f"{describe_value(node)} is neither true nor false"

    return ScalarRule("true or false", test)


def no_choice(what: str, word: str, known: Iterable[str]) -> str:
    """Return the error message for a word that is not one of the choices."""
    close = nearest(word, known)
    return f"{what} is not one of the choices" + (f"; did you mean {close}?" if close else "")
