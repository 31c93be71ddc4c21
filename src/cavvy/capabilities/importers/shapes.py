"""Rules for values in files of other tools. Each rule checks one node of the tree and adds its
mistakes to the notes.

Cavvy's own files are read by `spec.fields`, whose field kinds also convert and document the values.
This module only checks the files of other tools, including keys that Cavvy does not support.

Converts unquoted values by the rules of YAML 1.1. SkyPilot and dstack both use PyYAML, which
reads `no` as false and 010 as 8.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from cavvy.domain.values import Struct, field, replace
from cavvy.spec.problems import ProblemNotes, listed, nearest, shown
from cavvy.spec.tree import ListNode, MapNode, Node, ScalarNode, describe

if TYPE_CHECKING:
    from yaml import SafeLoader

from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

# A function that returns the mistake in a value, or "" if there is none.
Test = Callable[[ScalarNode], str]
Rule = Callable[[MapNode, ProblemNotes], None]


class ShapeRule(Protocol):
    """A rule for one node."""

    @property
    def words(self) -> str:
        """A description of the expected value."""

    def fits(self, node: Node) -> bool:
        """Return whether the node has the form (one value, list or table) that this rule checks."""

    def check(self, node: Node, path: str, notes: ProblemNotes) -> None:
        """Add all mistakes of the node, whose dotted path is `path`, to `notes`."""


class ScalarRule(Struct, frozen=True):
    """A single value that `test` accepts."""

    words: str
    test: Test

    def fits(self, node: Node) -> bool:
        return isinstance(node, ScalarNode)

    def check(self, node: Node, path: str, notes: ProblemNotes) -> None:
        if not isinstance(node, ScalarNode):
            notes.add(node.mark, f"{_name(path)} is {describe(node)}", expected=self.words)
        elif problem := self.test(node):
            notes.add(node.mark, f"{_name(path)}: {problem}", expected=self.words)


class AnyRule(Struct, frozen=True, kw_only=True):
    """A rule that accepts any value, because the file's tool does not check the value either."""

    words: str = "anything"

    def fits(self, node: Node) -> bool:
        return True

    def check(self, node: Node, path: str, notes: ProblemNotes) -> None:
        return None


class ListRule(Struct, frozen=True):
    """A list whose items all follow the same rule."""

    item: ShapeRule
    least: int = 0
    most: int | None = None
    unique: bool = False

    @property
    def words(self) -> str:
        return f"a list, each {self.item.words}"

    def fits(self, node: Node) -> bool:
        return isinstance(node, ListNode)

    def check(self, node: Node, path: str, notes: ProblemNotes) -> None:
        if not isinstance(node, ListNode):
            hint = "write `- ` before the value" if self.item.fits(node) else ""
            notes.add(
                node.mark,
                f"{_name(path)} is {describe(node)}",
                expected=self.words,
                suggestion=hint,
            )
            return
        if bound := _explain_count(len(node.items), self.least, self.most):
            notes.add(node.mark, f"{_name(path)} has {len(node.items)} entries", expected=bound)
        seen: set[object] = set()
        for number, item in enumerate(node.items):
            self.item.check(item, f"{path}[{number}]", notes)
            if self.unique and isinstance(item, ScalarNode):
                if item.value in seen:
                    notes.add(
                        item.mark,
                        f"{_name(path)}: {describe(item)} appears twice",
                        suggestion="delete one",
                    )
                seen.add(item.value)


class TableRule(Struct, frozen=True, kw_only=True):
    """A table. A key that is not in `fields` must follow the rule `other`; if `other` is
    None, the key is an error.
    """

    fields: Mapping[str, ShapeRule] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    other: ShapeRule | None = None
    key: str = ""  # a regular expression for the keys that are not in `fields`
    least: int = 0
    most: int | None = None
    nulls: bool = False  # whether a key without a value counts as missing
    hints: Mapping[str, str] = field(default_factory=dict)
    rule: Rule | None = None  # an additional check that runs only if there are no other mistakes

    @property
    def words(self) -> str:
        if not self.fields:
            return "a table of keys and values"
        return f"a table with {listed(list(self.fields)[:8], 'and')}"

    def fits(self, node: Node) -> bool:
        return isinstance(node, MapNode)

    def check(self, node: Node, path: str, notes: ProblemNotes) -> None:
        if not isinstance(node, MapNode):
            notes.add(node.mark, f"{_name(path)} is {describe(node)}", expected=self.words)
            return
        before = len(notes)
        for key, value in node.entries:
            self._check_entry(key, value, path, notes)
        start = f"{path}." if path else ""
        for name in self.required:
            found = node.get(name)
            if found is None or (self.nulls and is_null(found)):
                notes.add(node.mark, f"`{start}{name}` is missing")
        count = len(node.entries)
        if bound := _explain_count(count, self.least, self.most):
            notes.add(node.mark, f"{_name(path)} has {count} keys", expected=bound)
        if self.rule is not None and len(notes) == before:
            self.rule(node, notes)

    def _check_entry(self, key: ScalarNode, value: Node, path: str, notes: ProblemNotes) -> None:
        inner = f"{path}.{key.text}" if path else key.text
        known = key.text in self.fields
        if self.nulls and is_null(value) and (known or self.other is not None):
            return
        if known:
            self.fields[key.text].check(value, inner, notes)
        elif self.other is None or (self.key and not re.fullmatch(self.key, key.text)):
            self._unknown(key, path, notes)
        else:
            self.other.check(value, inner, notes)

    def _unknown(self, key: ScalarNode, path: str, notes: ProblemNotes) -> None:
        where = f" in `{path}`" if path else ""
        if self.key and self.other is not None:
            notes.add(
                key.mark,
                f"{shown(key.text)} cannot be a key{where}",
                expected=f"such as {self.key}",
            )
            return
        close = nearest(key.text, self.fields)
        hint = self.hints.get(key.text, "") or (f"did you mean `{close}`?" if close else "")
        expected = "" if hint else f"one of {', '.join(sorted(self.fields))}"
        notes.add(
            key.mark, f"unknown key {shown(key.text)}{where}", expected=expected, suggestion=hint
        )


class OneOfRule(Struct, frozen=True):
    """A value that follows at least one of several rules."""

    shapes: tuple[ShapeRule, ...]

    @property
    def words(self) -> str:
        return "; or ".join(dict.fromkeys(shape.words for shape in self.shapes))

    def fits(self, node: Node) -> bool:
        return any(shape.fits(node) for shape in self.shapes)

    def check(self, node: Node, path: str, notes: ProblemNotes) -> None:
        possible = [shape for shape in self.shapes if shape.fits(node)]
        if not possible:
            notes.add(node.mark, f"{_name(path)} is {describe(node)}", expected=self.words)
            return
        best: ProblemNotes | None = None
        if len(possible) > 1 and not is_null(node):
            possible = [shape for shape in possible if shape is not NULL]
        for shape in possible:
            tried = notes.scratch()
            shape.check(node, path, tried)
            if not len(tried):
                return
            best = tried if best is None or len(tried) < len(best) else best
        if isinstance(node, ScalarNode) and len(possible) > 1:
            expected = "; or ".join(dict.fromkeys(shape.words for shape in possible))
            notes.add(node.mark, f"{_name(path)}: cannot use {describe(node)}", expected=expected)
        elif best is not None:
            notes.adopt(best)


def is_null(node: Node) -> bool:
    return isinstance(node, ScalarNode) and node.value is None


NULL = ScalarRule(
    "nothing",
    lambda node: "" if node.value is None else f"{describe(node)} where no value is allowed",
)


def alternatives(shape: ShapeRule) -> tuple[ShapeRule, ...]:
    return shape.shapes if isinstance(shape, OneOfRule) else (shape,)


def optional(shape: ShapeRule) -> OneOfRule:
    """Return a rule that also accepts a key without a value."""
    return OneOfRule((*alternatives(shape), NULL))


def _explain_count(count: int, least: int, most: int | None) -> str:
    """Return a text for the limit that the number of entries violates, or "" if the number violates
    no limit."""
    if count < least:
        return f"at least {least}"
    return f"at most {most}" if most is not None and count > most else ""


def _name(path: str) -> str:
    return f"`{path}`" if path else "the file"


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


class UnquotedDate(str):
    """The value of an unquoted YAML date or time. Tools such as dstack do not accept an unquoted
    date as a string.
    """

    __slots__ = ()


def recast(node: Node, notes: ProblemNotes) -> Node:
    """Return the tree with the values that PyYAML's safe loader would return."""
    import yaml

    return _recast(node, notes, yaml.SafeLoader(""))


def _recast(node: Node, notes: ProblemNotes, loader: "SafeLoader") -> Node:
    match node:
        case ScalarNode(plain=True):
            return replace(node, value=_resolve(node, notes, loader))
        case ScalarNode():
            return node
        case ListNode():
            return replace(node, items=tuple(_recast(item, notes, loader) for item in node.items))
        case MapNode():
            entries = (
                (_recast_key(key, loader), _recast(value, notes, loader))
                for key, value in node.entries
            )
            return replace(node, entries=tuple(entries))


def _recast_key(key: ScalarNode, loader: "SafeLoader") -> ScalarNode:
    """Rename a key to "True" or "False" if YAML 1.1 reads it as a boolean, such as `on` or `no`.
    PyYAML does the same.
    """
    value = _resolve(key, ProblemNotes("", ""), loader) if key.plain else key.value
    return replace(key, text=str(value)) if isinstance(value, bool) else key


def _resolve(
    node: ScalarNode, notes: ProblemNotes, loader: "SafeLoader"
) -> str | int | float | bool | None:
    import yaml

    # the type stubs do not cover this attribute
    tag = loader.resolve(yaml.ScalarNode, node.text, (True, False))  # type: ignore[no-untyped-call]
    if tag == "tag:yaml.org,2002:str":
        return node.text
    try:
        value = loader.construct_object(yaml.ScalarNode(tag, node.text))
    except (ValueError, OverflowError, yaml.YAMLError):
        notes.add(
            node.mark,
            f"{shown(node.text)} looks like a number or a date to YAML, but is not a valid one",
            suggestion="quote it",
        )
        return node.text
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return UnquotedDate(value)


Bounded = Callable[..., ShapeRule]  # the arguments are `low`, `high` and, if requested, `above`


class KeyTables:
    """The keys that another tool allows, from the file `keys.yaml` in the folder of its importer.
    Each shape is created when it is first used.

    An entry of `keys.yaml` describes a shape, which is the set of allowed values. The possible
    shapes are:

    * a word: a shape that the importer defines, or the name of another entry of the file
    * a word with its arguments, such as `whole 1..8`, `number above 0` or `one-of aws gcp`
    * `list of SHAPE`, or `{$list: SHAPE, $least: 1}`
    * `{$match: PATTERN, $words: WHAT}`: a string that matches a regular expression
    * a list: any of these shapes
    * a table. A key that is written `key!` is required; a key that is written `key?` may have no
      value. `$with` names entries whose keys are added to the table; the other `$` keys are the
      options of a `TableRule`.
    """

    def __init__(
        self,
        file: Path,
        *,
        shapes: Mapping[str, ShapeRule],
        text: Callable[..., ScalarRule],
        bounded: Mapping[str, Bounded],
        chosen: Mapping[str, Callable[[Iterable[str]], ShapeRule]],
        rules: Iterable[Rule],
    ) -> None:
        import yaml

        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        self._entries: dict[str, Any] = yaml.load(file.read_text(), Loader=loader)
        self._known: dict[str, ShapeRule] = {"any": AnyRule(), "nothing": NULL, **shapes}
        self._text = text
        self._bounded = bounded
        self._chosen = chosen
        self._rules = {each.__name__.removeprefix("_check_"): each for each in rules}

    def table(self, name: str) -> TableRule:
        shape = self[name]
        assert isinstance(shape, TableRule)
        return shape

    def __getitem__(self, name: str) -> ShapeRule:
        if name not in self._known:
            self._known[name] = self._make(self._entries[name])
        return self._known[name]

    def _make(self, written: Any) -> ShapeRule:
        match written:
            case str():
                return self._make_word(written)
            case list():
                made = [self._make(each) for each in written]
                return OneOfRule(tuple(inner for each in made for inner in alternatives(each)))
            case {"$match": pattern, **words}:
                return self._text(words.get("$words", "a string"), pattern=pattern)
            case {"$list": item, **options}:
                return ListRule(self._make(item), **_plain(options))
            case _:
                return self._make_table(self._with(written))

    def _make_word(self, text: str) -> ShapeRule:
        word, _, rest = text.partition(" ")
        if text in self._known or text in self._entries:
            return self[text]
        if word == "list":
            return ListRule(self._make(rest.removeprefix("of ")))
        if word in self._chosen:
            return self._chosen[word](rest.split())
        make = self._bounded[word]
        if rest.startswith("above "):
            make, rest = partial(make, above=True), rest.removeprefix("above ")
        bounds = [float(Fraction(end)) if end else None for end in rest.split("..")]
        return make(*bounds) if rest else make()

    def _with(self, written: Mapping[str, Any]) -> dict[str, Any]:
        """Return the table with additional keys: `$with` contains the names of other entries, whose
        keys are added.
        """
        found: dict[str, Any] = {}
        for key, value in written.items():
            for name in value.split() if key == "$with" else ():
                found |= self._with(self._entries[name])
            if key != "$with":
                found[key] = value
        return found

    def _make_table(self, written: Mapping[str, Any]) -> TableRule:
        options = _plain({key: value for key, value in written.items() if key.startswith("$")})
        if "other" in options:
            options["other"] = self._make(options["other"])
        if "rule" in options:
            options["rule"] = self._rules[options["rule"]]
        keys = [key for key in written if not key.startswith("$")]
        fields = {key.rstrip("!?"): self._make(written[key]) for key in keys}
        fields |= {key[:-1]: optional(fields[key[:-1]]) for key in keys if key.endswith("?")}
        required = tuple(key[:-1] for key in keys if key.endswith("!"))
        return TableRule(fields=fields, required=required, **options)


def _plain(options: Mapping[Any, Any]) -> dict[str, Any]:
    return {key.removeprefix("$"): value for key, value in options.items()}
