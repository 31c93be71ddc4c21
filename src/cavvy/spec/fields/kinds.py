"""The kinds of values a task file is made of: each reads one node, explains what is wrong, and
gives its JSON Schema.

A `SectionSpec` is a table of `FieldSpec`s; the parser, the schema for editors and the reference
page all read the same one.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, Protocol, TypeVar, overload

from cavvy.domain.units import TooMuch, UnitError
from cavvy.spec.problems import ProblemNotes, SourceMark, listed, nearest, shown
from cavvy.spec.tree import ListNode, MapNode, Node, ScalarNode, describe

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
E = TypeVar("E", bound=StrEnum)
Schema = Mapping[str, object]

# Any value of the file may be left to a parameter.
EXPRESSION: Schema = {"$ref": "#/$defs/expression"}


class WrongValue(ValueError):
    """A value that cannot be used; raised by the function that reads it, noted with its place by
    its kind.
    """

    def __init__(self, message: str, *, suggestion: str = "", expected: str | None = None) -> None:
        super().__init__(message)
        self.suggestion = suggestion
        self.expected = expected  # None: as the kind says


class ValueKind(Protocol[T_co]):
    """How one sort of value is read."""

    @property
    def words(self) -> str:
        """What is expected, for people."""

    @property
    def schema(self) -> Schema:
        """JSON Schema of what is accepted."""

    def takes(self, node: Node) -> bool:
        """Whether a node has the form (one value, list, table) that this kind reads."""

    def read(self, node: Node, notes: ProblemNotes) -> T_co | None:
        """The value, or None after a problem was noted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarKind(Generic[T_co]):
    """One scalar. `parse` raises WrongValue or UnitError."""

    words: str
    parse: Callable[[ScalarNode], T_co]
    schema: Schema

    def takes(self, node: Node) -> bool:
        return isinstance(node, ScalarNode)

    def read(self, node: Node, notes: ProblemNotes) -> T_co | None:
        if not isinstance(node, ScalarNode):
            notes.add(
                node.mark, f"{describe(node)} where one value was expected", expected=self.words
            )
            return None
        try:
            return self.parse(node)
        except WrongValue as error:
            expected = self.words if error.expected is None else error.expected
            notes.add(node.mark, str(error), expected=expected, suggestion=error.suggestion)
        except UnitError as error:
            # `words` says what was expected.
            known = isinstance(error, TooMuch)
            message = str(error) if known else f"cannot use {describe(node)}"
            notes.add(node.mark, message, expected=self.words)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ListKind(Generic[T_co]):
    """A list of one kind; a single one may stand without its list where `single`."""

    item: ValueKind[T_co]
    single: bool = False
    unique: bool = True

    @property
    def words(self) -> str:
        return (
            f"{self.item.words}, or a list of such"
            if self.single
            else f"a list, each {self.item.words}"
        )

    @property
    def schema(self) -> Schema:
        schema: Schema = {"type": "array", "items": self.item.schema}
        return {"anyOf": [self.item.schema, schema]} if self.single else schema

    def takes(self, node: Node) -> bool:
        return isinstance(node, ListNode) or (self.single and self.item.takes(node))

    def read(self, node: Node, notes: ProblemNotes) -> tuple[T_co, ...] | None:
        if isinstance(node, ListNode):
            return self._read_items(node, notes)
        if self.single:
            one = self.item.read(node, notes)
            return None if one is None else (one,)
        suggestion = "write `- ` before it" if isinstance(node, ScalarNode) else ""
        message = f"{describe(node)} where a list was expected"
        notes.add(node.mark, message, expected=self.words, suggestion=suggestion)
        return None

    def _read_items(self, node: ListNode, notes: ProblemNotes) -> tuple[T_co, ...]:
        seen: list[T_co] = []
        for item in node.items:
            value = self.item.read(item, notes)
            if value is None:
                continue
            if self.unique and value in seen:
                notes.add(
                    item.mark, f"{describe(item)} is in the list twice", suggestion="delete one"
                )
            seen.append(value)
        return tuple(seen)


@dataclass(frozen=True, slots=True, kw_only=True)
class MapKind(Generic[T_co]):
    """A table whose keys the author chooses. `check_key` raises WrongValue."""

    check_key: Callable[[str], None]
    value: ValueKind[T_co]
    words: str
    key_schema: Schema

    @property
    def schema(self) -> Schema:
        return {
            "type": "object",
            "propertyNames": self.key_schema,
            "additionalProperties": self.value.schema,
        }

    def takes(self, node: Node) -> bool:
        return isinstance(node, MapNode)

    def read(self, node: Node, notes: ProblemNotes) -> dict[str, T_co] | None:
        if not isinstance(node, MapNode):
            notes.add(
                node.mark, f"{describe(node)} where a table was expected", expected=self.words
            )
            return None
        result: dict[str, T_co] = {}
        for key, child in node.entries:
            try:
                self.check_key(key.text)
            except WrongValue as error:
                notes.add(
                    key.mark, str(error), expected=error.expected or "", suggestion=error.suggestion
                )
            value = self.value.read(child, notes)
            if value is not None:
                result[key.text] = value
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class EitherKind(Generic[T_co]):
    """The first kind that takes the node's form."""

    kinds: tuple[ValueKind[T_co], ...]

    @property
    def words(self) -> str:
        return "; or ".join(kind.words for kind in self.kinds)

    @property
    def schema(self) -> Schema:
        return {"anyOf": [kind.schema for kind in self.kinds]}

    def takes(self, node: Node) -> bool:
        return any(kind.takes(node) for kind in self.kinds)

    def read(self, node: Node, notes: ProblemNotes) -> T_co | None:
        for kind in self.kinds:
            if kind.takes(node):
                return kind.read(node, notes)
        notes.add(node.mark, f"{describe(node)} cannot stand here", expected=self.words)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldSpec(Generic[T_co]):
    """One key of a section. `help` and `example` go to the reference page and the schema."""

    name: str
    kind: ValueKind[T_co]
    help: str
    example: str = ""
    default: str = ""  # in words
    required: bool = False
    refused: str = ""  # why nothing honours it yet


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionSpec(Generic[T_co]):
    """A table with known keys. `build` makes the domain's value of it and may note more
    problems.
    """

    path: str  # dotted, "" is the whole file
    help: str
    fields: tuple[FieldSpec[object], ...]
    build: Callable[["SectionReader"], T_co]
    hints: Mapping[str, str] = field(
        default_factory=dict
    )  # keys of other tools -> what to write here

    @property
    def words(self) -> str:
        return f"a table with {listed((each.name for each in self.fields), 'and')}"

    @property
    def schema(self) -> Schema:
        properties = {each.name: _describe_field(each) for each in self.fields}
        required = [each.name for each in self.fields if each.required]
        schema: dict[str, object] = {
            "type": "object",
            "additionalProperties": False,
            "properties": properties,
        }
        return {**schema, "required": required} if required else schema

    def takes(self, node: Node) -> bool:
        return isinstance(node, MapNode)

    def read(self, node: Node, notes: ProblemNotes) -> T_co | None:
        if not isinstance(node, MapNode):
            name = f"`{self.path}` is" if self.path else "the file is"
            notes.add(node.mark, f"{name} {describe(node)}", expected=self.words)
            return None
        table = SectionReader(self, node, notes)
        table.check_keys()
        return self.build(table)


class SectionReader:
    """One section of one file while it is read; `get` reads a field and None stands for absent
    or wrong.
    """

    def __init__(self, section: SectionSpec[object], node: MapNode, notes: ProblemNotes) -> None:
        self.section = section
        self.node = node
        self.notes = notes

    @overload
    def get(self, wanted: FieldSpec[T], default: T) -> T: ...
    @overload
    def get(self, wanted: FieldSpec[T]) -> T | None: ...
    def get(self, wanted: FieldSpec[T], default: T | None = None) -> T | None:
        node = self.node.get(wanted.name)
        if node is None or (isinstance(node, ScalarNode) and node.value is None and node.plain):
            return default
        value = wanted.kind.read(node, self.notes)
        return default if value is None else value

    def has(self, wanted: FieldSpec[object]) -> bool:
        node = self.node.get(wanted.name)
        return node is not None and not (isinstance(node, ScalarNode) and node.value is None)

    def mark(self, wanted: FieldSpec[object]) -> SourceMark:
        """Where a field's key stands; the section's own place where it is absent."""
        return next(
            (key.mark for key, _ in self.node.entries if key.text == wanted.name), self.node.mark
        )

    def wrong(
        self, wanted: FieldSpec[object], message: str, *, expected: str = "", suggestion: str = ""
    ) -> None:
        self.notes.add(self.mark(wanted), message, expected=expected, suggestion=suggestion)

    def find_one(self, wanted: Sequence[FieldSpec[T]], what: str) -> FieldSpec[T] | None:
        """Which of these fields is there; notes where it is none, or several."""
        given = [each for each in wanted if self.has(each)]
        if len(given) == 1:
            return given[0]
        names = listed([f"`{each.name}`" for each in wanted], "and" if len(wanted) > 2 else "or")
        expected = f"one of {names}" if len(wanted) > 2 else names
        self.notes.add(
            self.node.mark,
            f"{what} names {'two sources' if given else 'no source'}",
            expected=expected,
        )
        return None

    def reject_beside(self, owner: FieldSpec[object], others: Iterable[FieldSpec[object]]) -> None:
        """Note each of these fields that is there: with `owner` it means nothing."""
        for each in others:
            if self.has(each):
                self.wrong(
                    each,
                    f"`{each.name}` has no meaning with `{owner.name}`",
                    suggestion="delete it",
                )

    def check_keys(self) -> None:
        known = {each.name: each for each in self.section.fields}
        meant = ""  # what unknown keys were told to be: not missing as well
        for key, _ in self.node.entries:
            match known.get(key.text):
                case None:
                    meant += self._unknown(key, known)
                case FieldSpec(refused=reason) as each if reason and self.has(each):
                    message = f"{self._name(key.text)} is not honoured yet: {reason}"
                    self.notes.add(key.mark, message, suggestion="delete it")
                case FieldSpec(required=True) as each if not self.has(each):
                    self.notes.add(
                        key.mark, f"{self._name(key.text)} is empty", expected=each.kind.words
                    )
                case _:
                    pass
        for each in self.section.fields:
            if each.required and self.node.get(each.name) is None and f"`{each.name}" not in meant:
                example = f"write `{each.example.splitlines()[0]}`" if each.example else ""
                message = f"{self._name(each.name)} is missing"
                self.notes.add(
                    self.node.mark, message, expected=each.kind.words, suggestion=example
                )

    def _name(self, key: str) -> str:
        return f"`{self.section.path}.{key}`" if self.section.path else f"`{key}`"

    def _unknown(self, key: ScalarNode, known: Iterable[str]) -> str:
        where = f" in `{self.section.path}`" if self.section.path else ""
        hint = self.section.hints.get(key.text, "")
        close = nearest(key.text, known)
        suggestion = hint or (f"did you mean `{close}`?" if close else "")
        if not suggestion:
            from cavvy.spec.fields.hints import elsewhere

            suggestion = elsewhere(key.text, self.section.path)
        expected = "" if hint or close else f"one of {', '.join(sorted(known))}"
        self.notes.add(
            key.mark,
            f"unknown key {shown(key.text)}{where}",
            expected=expected,
            suggestion=suggestion,
        )
        return suggestion


def _describe_field(each: FieldSpec[object]) -> Schema:
    text = each.help + (f" Default: {each.default}." if each.default else "")
    if each.refused:
        text = f"Not honoured yet: {each.refused}. {text}"
    schema = each.kind.schema
    struck: Schema = (
        {"deprecated": True} if each.refused else {}
    )  # as near as a schema comes to "not yet"
    return {
        "description": text,
        **struck,
        **(schema if "$ref" not in schema else {"allOf": [schema]}),
    }


# The plain kinds.


def read_text(node: ScalarNode) -> str:
    """A scalar's text as written, so that `3.10` stays 3.10."""
    if node.plain and node.value is None:
        raise WrongValue("a value is missing", suggestion="write '' for an empty text")
    if "\0" in node.text:
        raise WrongValue("a NUL byte cannot be passed to a program", suggestion="delete it")
    return node.text


def filled(text: str) -> str:
    if not text.strip():
        raise WrongValue("the text is empty")
    return text


def text_kind(
    words: str, check: Callable[[str], str] = filled, *, pattern: str = "", numbers: bool = False
) -> ScalarKind[str]:
    """A text that `check` accepts and perhaps changes; it raises WrongValue.

    `numbers`: what looks like a number to YAML is welcome as well.
    """
    schema: dict[str, object] = {"type": ["string", "number"] if numbers else "string"}
    if pattern:
        schema = {"anyOf": [{**schema, "pattern": pattern}, EXPRESSION]}
    return ScalarKind(words=words, parse=lambda node: check(read_text(node)), schema=schema)


def whole(low: int, high: int, words: str = "") -> ScalarKind[int]:
    """A whole number within bounds, inclusive."""
    expected = words or f"a whole number from {low:,} to {high:,}"

    def parse(node: ScalarNode) -> int:
        if not re.fullmatch(r"[-+]?[0-9]{1,18}", node.text.strip()):
            raise WrongValue(f"{describe(node)} is not a whole number within reach")
        number = int(node.text)
        if not low <= number <= high:
            raise WrongValue(f"{number:,} is too {'small' if number < low else 'large'}")
        return number

    integer: Schema = {"type": "integer", "minimum": low, "maximum": high}
    return ScalarKind(words=expected, parse=parse, schema={"anyOf": [integer, EXPRESSION]})


def number(words: str, low: float, high: float, *, above: bool = False) -> ScalarKind[float]:
    """A number within bounds; `above`: strictly more than `low`."""

    def parse(node: ScalarNode) -> float:
        try:
            value = float(node.text)
        except ValueError:
            raise WrongValue(f"{describe(node)} is not a number") from None
        if not low <= value <= high or (above and value <= low):
            raise WrongValue(f"{node.text} is out of bounds")
        return value

    bounds: Schema = {
        "type": "number",
        ("exclusiveMinimum" if above else "minimum"): low,
        "maximum": high,
    }
    return ScalarKind(words=words, parse=parse, schema={"anyOf": [bounds, EXPRESSION]})


def choice(enum: type[E], slips: Mapping[str, E] = {}) -> ScalarKind[E]:
    """One of an enum's values; `slips` are what other tools call them."""
    names = [member.value for member in enum]

    def parse(node: ScalarNode) -> E:
        if node.text in names:
            return enum(node.text)
        meant = slips.get(node.text.lower()) or nearest(node.text, names)
        raise WrongValue(
            f"{describe(node)} is no choice here",
            suggestion=f"did you mean `{meant}`?" if meant else "",
        )

    return ScalarKind(
        words=listed(names), parse=parse, schema={"anyOf": [{"enum": names}, EXPRESSION]}
    )
