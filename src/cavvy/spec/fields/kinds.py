"""The kinds of values in a task file. A kind reads a node of the file, reports the node's mistakes,
and provides the JSON Schema of its values.

A `SectionSpec` is a table with one `FieldSpec` for each key. The parser, the schema for editors and
the reference page all use these objects. `fields.yaml` contains the documentation of the keys.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypedDict, TypeVar

from cavvy.domain.units import TooMuch, UnitError, read_number
from cavvy.domain.values import Struct, field, replace
from cavvy.spec.problems import ProblemNotes, listed, nearest, shown, slug
from cavvy.spec.tree import ListNode, MapNode, Node, ScalarNode, describe

T = TypeVar("T")
Schema = Mapping[str, object]

# The schema of an expression such as ${{ params.lr }}, which may replace any value.
EXPRESSION: Schema = {"$ref": "#/$defs/expression"}
STRING: Schema = {"type": "string"}
TEXT_OR_NUMBER: Schema = {"type": ["string", "number"]}
_SLUG = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


class WrongValue(ValueError):
    """Raised if a value is invalid. The function that reads the value raises this error, and the
    kind adds the value's position.
    """

    def __init__(self, message: str, *, suggestion: str = "", expected: str | None = None) -> None:
        super().__init__(message)
        self.suggestion = suggestion
        self.expected = expected  # if None, the message uses the `words` of the kind


class ValueKind(Protocol):
    """A kind of value that a field can have; checks and converts nodes of the parsed file."""

    @property
    def words(self) -> str:
        """A description of the expected value."""

    @property
    def schema(self) -> Schema:
        """The JSON Schema of accepted values."""

    def takes(self, node: Node) -> bool:
        """Return whether this kind can read a node of this form (one value, list or table)."""

    def read(self, node: Node, notes: ProblemNotes) -> Any:
        """Return the value. If the value is invalid, add a problem to `notes` and return None."""


class ScalarKind(Struct, frozen=True):
    """A single value. `parse` converts the value, or raises WrongValue or UnitError. `instead` says
    how to write a list or table as one value.
    """

    words: str
    parse: Callable[[ScalarNode], Any]
    schema: Schema = field(default_factory=lambda: STRING)
    instead: str = ""

    def takes(self, node: Node) -> bool:
        return isinstance(node, ScalarNode)

    def read(self, node: Node, notes: ProblemNotes) -> Any:
        if not isinstance(node, ScalarNode):
            message = f"{describe(node)} where one value was expected"
            notes.add(node.mark, message, expected=self.words, suggestion=self.instead)
            return None
        try:
            return self.parse(node)
        except WrongValue as error:
            expected = self.words if error.expected is None else error.expected
            notes.add(node.mark, str(error), expected=expected, suggestion=error.suggestion)
        except UnitError as error:
            # `words` describes the expected value better than most unit errors do.
            known = isinstance(error, TooMuch)
            message = str(error) if known else f"cannot use {describe(node)}"
            notes.add(node.mark, message, expected=self.words)
        return None


class ListKind(Struct, frozen=True):
    """A list of items of one kind. With `single`, one item may be written without a list. With
    `flat`, each item is read as a tuple, and the value is the concatenation of these tuples.
    """

    item: ValueKind
    single: bool = False
    flat: bool = False

    @property
    def words(self) -> str:
        return (
            f"{self.item.words}, or a list of these"
            if self.single
            else f"a list, each {self.item.words}"
        )

    @property
    def schema(self) -> Schema:
        schema: Schema = {"type": "array", "items": self.item.schema}
        return {"anyOf": [self.item.schema, schema]} if self.single else schema

    def takes(self, node: Node) -> bool:
        return isinstance(node, ListNode) or (self.single and self.item.takes(node))

    def read(self, node: Node, notes: ProblemNotes) -> tuple[Any, ...] | None:
        if isinstance(node, ListNode):
            items = self._read_items(node, notes)
        elif self.single:
            one = self.item.read(node, notes)
            items = [] if one is None else [one]
            if one is None:
                return None
        else:
            suggestion = "write `- ` before the value" if isinstance(node, ScalarNode) else ""
            if isinstance(self.item, SectionSpec):
                suggestion = self.item.example
            message = f"{describe(node)} where a list was expected"
            notes.add(node.mark, message, expected=self.words, suggestion=suggestion)
            return None
        return tuple(each for part in items for each in part) if self.flat else tuple(items)

    def _read_items(self, node: ListNode, notes: ProblemNotes) -> list[Any]:
        found, seen = list[Any](), set[Any]()
        for item in node.items:
            if (value := self.item.read(item, notes)) is None:
                continue
            try:
                repeated = value in seen
                seen.add(value)
            except TypeError:  # a value that contains a table
                repeated = value in found
            if repeated:
                message = f"{describe(item)} is in the list twice"
                notes.add(item.mark, message, suggestion="delete one")
            found.append(value)
        return found


class MapKind(Struct, frozen=True):
    """A table whose keys the author chooses. `check_key` raises WrongValue for an invalid key."""

    words: str
    check_key: Callable[[str], object]
    value: ValueKind
    key_schema: Schema = field(default_factory=lambda: STRING)

    @property
    def schema(self) -> Schema:
        return {
            "type": "object",
            "propertyNames": self.key_schema,
            "additionalProperties": self.value.schema,
        }

    def takes(self, node: Node) -> bool:
        return isinstance(node, MapNode)

    def read(self, node: Node, notes: ProblemNotes) -> dict[str, Any] | None:
        if not isinstance(node, MapNode):
            notes.add(
                node.mark, f"{describe(node)} where a table was expected", expected=self.words
            )
            return None
        result: dict[str, Any] = {}
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


class EitherKind(Struct, frozen=True):
    """A value of one of several kinds. The first kind that can read the node's form is used."""

    kinds: tuple[ValueKind, ...]

    @property
    def words(self) -> str:
        return "; or ".join(kind.words for kind in self.kinds)

    @property
    def schema(self) -> Schema:
        return {"anyOf": [kind.schema for kind in self.kinds]}

    def takes(self, node: Node) -> bool:
        return any(kind.takes(node) for kind in self.kinds)

    def read(self, node: Node, notes: ProblemNotes) -> Any:
        for kind in self.kinds:
            if kind.takes(node):
                return kind.read(node, notes)
        notes.add(node.mark, f"{describe(node)} is not allowed here", expected=self.words)
        return None


class FieldDocs(TypedDict, total=False):
    """The documentation of one key in `fields.yaml`."""

    help: str
    example: str
    default: str  # a description of the default value
    instead: str  # what else may be meant; follows the example in an error


class FieldSpec(Struct, frozen=True):
    """One key of a section. The function `section` sets `name` and `path`."""

    kind: ValueKind
    required: bool = False
    refused: str = ""  # why the key is not supported yet; "" if it is supported
    # The attributes that the value sets. If there are several, the value is a tuple with one entry
    # for each. None stands for the attribute with the key's name. () means that another function
    # reads the value.
    to: tuple[str, ...] | None = None
    name: str = ""
    path: str = ""  # the path of the section, with dots between the keys

    @property
    def docs(self) -> FieldDocs:
        docs: FieldDocs = section_docs(self.path).get(self.name, {})
        return docs

    @property
    def help(self) -> str:
        return self.docs.get("help") or str(section_docs(self.name)["$help"])

    @property
    def default(self) -> str:
        return self.docs.get("default", "")

    @property
    def example(self) -> str:
        example = self.docs.get("example", "")
        return f"{self.name}: {example}" if example else ""

    def spread(self, value: Any) -> dict[str, Any]:
        """Return the attributes that the value sets, as a dictionary by attribute name."""
        names = (self.name,) if self.to is None else self.to
        return dict(zip(names, (value,) if len(names) == 1 else value, strict=True))


@cache
def section_docs(path: str) -> Mapping[str, Any]:
    """Return the documentation of a section and its keys in `fields.yaml`. The file is first read
    when an error message or a documentation page needs its text.
    """
    docs = _read_docs()[path or "task"]
    base = section_docs(docs["$as"]) if "$as" in docs else {}
    return {**base, **docs, "$hints": {**base.get("$hints", {}), **docs.get("$hints", {})}}


@cache
def _read_docs() -> Mapping[str, Mapping[str, Any]]:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    docs: Mapping[str, Mapping[str, Any]] = yaml.load(
        Path(__file__).with_name("fields.yaml").read_bytes(), Loader=loader
    )
    return docs


class SectionSpec(Struct, frozen=True):
    """A table with known keys. `build` converts the table to a domain object and may report more
    problems.
    """

    path: str  # the section's path, with dots between the keys; "" for the whole file
    build: Callable[["SectionReader"], Any]
    fields: tuple[FieldSpec, ...]

    @property
    def help(self) -> str:
        return str(section_docs(self.path)["$help"])

    @property
    def hints(self) -> Mapping[str, str]:
        """Maps each key of another tool to the key of this section that replaces it."""
        advice: Mapping[str, str] = section_docs(self.path)["$hints"]
        return {key: text for keys, text in advice.items() for key in keys.split()}

    @property
    def words(self) -> str:
        return f"a table with {listed((each.name for each in self.fields), 'and')}"

    @property
    def example(self) -> str:
        """Return how to write the section, with an example, or "" without one."""
        above, _, name = self.path.rpartition(".")
        docs = section_docs(above).get(name, {}) if name else {}
        example, more = docs.get("example", ""), docs.get("instead", "")
        return f"write, for example, `{name}: {example}`{more and f'; {more}'}" if example else ""

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

    def read(self, node: Node, notes: ProblemNotes) -> Any:
        if not isinstance(node, MapNode):
            name = f"`{self.path}` is" if self.path else "the file is"
            message = f"{name} {describe(node)}"
            notes.add(node.mark, message, expected=self.words, suggestion=self.example)
            return None
        table = SectionReader(self, node, notes)
        table.check_keys()
        return self.build(table)


class SectionReader:
    """Reads one section of one file. The methods refer to fields by their keys."""

    def __init__(self, section: SectionSpec, node: MapNode, notes: ProblemNotes) -> None:
        self.section = section
        self.node = node
        self.notes = notes
        self._fields = {each.name: each for each in section.fields}
        self._nodes = {key.text: value for key, value in node.entries}
        self._values: dict[str, Any] = {}  # of the fields that were read

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a field, or `default` if the field is absent or invalid."""
        if name not in self._values:
            self._values[name] = self._read(name)
        value = self._values[name]
        return default if value is None else value

    def _read(self, name: str) -> Any:
        wanted, node = self._fields[name], self._nodes.get(name)
        if node is None or (isinstance(node, ScalarNode) and node.value is None and node.plain):
            return None
        return wanted.kind.read(node, self.notes)

    def values(self) -> dict[str, Any]:
        """Return a dictionary that maps each attribute to the value from the field that sets the
        attribute. Absent and invalid values are left out.
        """
        found: dict[str, Any] = {}
        for each in self.section.fields:
            if each.to != () and (value := self.get(each.name)) is not None:
                found |= each.spread(value)
        return found

    def make(self, kind: Callable[..., T], /, **others: object) -> T | None:
        """Create a `kind` from the values of all fields. Returns None if a required field is absent
        or invalid. `others` are defaults for attributes that the fields do not set.
        """
        values = self.values()
        required = [
            next(iter(each.to or (each.name,))) for each in self.section.fields if each.required
        ]
        return kind(**{**others, **values}) if all(name in values for name in required) else None

    def has(self, name: str) -> bool:
        node = self._nodes.get(name)
        return node is not None and not (isinstance(node, ScalarNode) and node.value is None)

    def has_all(self, *names: str) -> bool:
        return all(map(self.has, names))

    def wrong(self, name: str, message: str, *, expected: str = "", suggestion: str = "") -> None:
        """Add a problem at the key of a field, or at the section if the key is absent."""
        mark = next((key.mark for key, _ in self.node.entries if key.text == name), self.node.mark)
        self.notes.add(mark, message, expected=expected, suggestion=suggestion)

    def find_one(self, wanted: tuple[str, ...], what: str) -> str:
        """Return the name of the one field in `wanted` that is present. If none or several of these
        fields are present, add a problem and return "".
        """
        given = [each for each in wanted if self.has(each)]
        if len(given) == 1:
            return given[0]
        names = listed([f"`{each}`" for each in wanted], "and" if len(wanted) > 2 else "or")
        expected = f"one of {names}" if len(wanted) > 2 else names
        self.notes.add(
            self.node.mark,
            f"{what} names {'two sources' if given else 'no source'}",
            expected=expected,
        )
        return ""

    def reject_beside(self, owner: str, others: Iterable[str]) -> None:
        """Add a problem for each field in `others` that the task file contains. The field `owner`
        makes these fields meaningless.
        """
        for each in others:
            if self.has(each):
                self.wrong(each, f"`{each}` has no meaning with `{owner}`", suggestion="delete it")

    def list_others(self, fitting: Collection[str]) -> Sequence[str]:
        """Return the fields of this section that are not among these."""
        return [each for each in self._fields if each not in fitting]

    def check_keys(self) -> None:
        # Keys that were suggested in place of unknown keys; they are not reported as missing.
        meant = ""
        for key, _ in self.node.entries:
            match self._fields.get(key.text):
                case None:
                    meant += self._unknown(key)
                case FieldSpec(refused=reason) if reason and self.has(key.text):
                    message = f"{self._name(key.text)} is not supported yet: {reason}"
                    self.notes.add(key.mark, message, suggestion="delete it")
                case FieldSpec(required=True) as each if not self.has(key.text):
                    self.notes.add(
                        key.mark, f"{self._name(key.text)} is empty", expected=each.kind.words
                    )
                case _:
                    pass
        for each in self.section.fields:
            if each.required and self.node.get(each.name) is None and f"`{each.name}" not in meant:
                example = f"write `{each.example}`" if each.example else ""
                message = f"{self._name(each.name)} is missing"
                self.notes.add(
                    self.node.mark, message, expected=each.kind.words, suggestion=example
                )

    def _name(self, key: str) -> str:
        return f"`{self.section.path}.{key}`" if self.section.path else f"`{key}`"

    def _unknown(self, key: ScalarNode) -> str:
        where = f" in `{self.section.path}`" if self.section.path else ""
        hint = self.section.hints.get(key.text, "")
        close = nearest(key.text, self._fields)
        suggestion = hint or (f"did you mean `{close}`?" if close else "")
        suggestion = suggestion or self.notes.place_key(key.text, self.section.path)
        expected = "" if hint or close else f"one of {', '.join(sorted(self._fields))}"
        self.notes.add(
            key.mark,
            f"unknown key {shown(key.text)}{where}",
            expected=expected,
            suggestion=suggestion,
        )
        return suggestion


def _describe_field(each: FieldSpec) -> Schema:
    text = each.help + (f" Default: {each.default}." if each.default else "")
    if each.refused:
        text = f"Not supported yet: {each.refused}. {text}"
    schema = each.kind.schema
    # JSON Schema has no keyword for "not supported yet"; `deprecated` is the closest.
    struck: Schema = {"deprecated": True} if each.refused else {}
    return {
        "description": text,
        **struck,
        **(schema if "$ref" not in schema else {"allOf": [schema]}),
    }


# Kinds of simple values


def read_text(node: ScalarNode) -> str:
    """Return the text of a scalar as it is written, so that `3.10` does not become 3.1. Raises
    WrongValue if there is no value.
    """
    if node.plain and node.value is None:
        raise WrongValue("a value is missing", suggestion="write '' for an empty text")
    if "\0" in node.text:
        raise WrongValue("a NUL byte cannot be passed to a program", suggestion="delete it")
    return node.text


def filled(text: str) -> str:
    if not text.strip():
        raise WrongValue("the text is empty")
    return text


def matching(pattern: str, wrong: str, *, expected: str | None = None) -> Callable[[str], str]:
    """Return a function that checks whether a string matches a pattern. If the string does not
    match, the error has the message `wrong`.
    """

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise WrongValue(f"{shown(text)} {wrong}", expected=expected)
        return text

    return check


def text_kind(
    words: str, check: Callable[[str], Any] = filled, *, numbers: bool = False
) -> ScalarKind:
    """Return a kind for strings. `check` returns the string, which it may change, or raises
    WrongValue.

    With `numbers`, the JSON Schema also accepts numbers, which are read as strings.
    """
    return ScalarKind(
        words, lambda node: check(read_text(node)), TEXT_OR_NUMBER if numbers else STRING
    )


def check_slug(text: str) -> str:
    """Check that a string is a valid name, and return it. Raises WrongValue."""
    if _SLUG.fullmatch(text):
        return text
    close = slug(text)
    reason = "is longer than 63 characters" if len(text) > 63 else "cannot be a name"
    raise WrongValue(f"{shown(text)} {reason}", suggestion=f"write {close}" if close else "")


def whole(low: int, high: int, words: str = "") -> ScalarKind:
    """Return a kind for whole numbers from `low` to `high`, both included."""

    def parse(node: ScalarNode) -> int:
        if not re.fullmatch(r"[-+]?[0-9]{1,18}", node.text.strip()):
            raise WrongValue(f"{describe(node)} is not a whole number in range")
        number = int(node.text)
        if not low <= number <= high:
            raise WrongValue(f"{number:,} is too {'small' if number < low else 'large'}")
        return number

    integer: Schema = {"type": "integer", "minimum": low, "maximum": high}
    words = words or f"a whole number from {low:,} to {high:,}"
    return ScalarKind(words, parse, {"anyOf": [integer, EXPRESSION]})


def advise_point(text: str) -> str:
    """Return a suggestion for a number with a decimal comma, such as `99,9 %`, or ""."""
    if not re.fullmatch(r"[0-9]+,[0-9]+ *[A-Za-z%]*", text.strip()):
        return ""
    return f"write {text.strip().replace(',', '.').replace(' ', '')}"


def number(words: str, low: float, high: float, *, above: bool = False) -> ScalarKind:
    """Return a kind for numbers from `low` to `high`. With `above`, `low` itself is not allowed."""

    def parse(node: ScalarNode) -> float:
        try:
            value = read_number(node.text)
        except ValueError:
            hint = advise_point(node.text)
            raise WrongValue(f"{describe(node)} is not a number", suggestion=hint) from None
        if not low <= value <= high or (above and value <= low):
            raise WrongValue(f"{node.text} is out of bounds")
        return value

    bounds: Schema = {
        "type": "number",
        ("exclusiveMinimum" if above else "minimum"): low,
        "maximum": high,
    }
    return ScalarKind(words, parse, {"anyOf": [bounds, EXPRESSION]})


def choice(enum: type[StrEnum], slips: Mapping[str, StrEnum] = {}) -> ScalarKind:
    """Return a kind for the values of an enum. `slips` are names that other tools use for these
    values.
    """
    names = [member.value for member in enum]

    def parse(node: ScalarNode) -> StrEnum:
        if node.text in names:
            return enum(node.text)
        meant = slips.get(node.text.lower()) or nearest(node.text, names)
        raise WrongValue(
            f"{describe(node)} is not one of the choices",
            suggestion=f"did you mean `{meant}`?" if meant else "",
        )

    return ScalarKind(listed(names), parse, {"anyOf": [{"enum": names}, EXPRESSION]})


def read_flag(node: ScalarNode) -> bool:
    if not isinstance(node.value, bool):
        raise WrongValue(f"{describe(node)} is neither true nor false")
    return node.value


NAME = text_kind("a name of a-z, 0-9 and -", check_slug, numbers=True)
FLAG = ScalarKind("true or false", read_flag, {"anyOf": [{"type": "boolean"}, EXPRESSION]})


def named_texts(
    words: str,
    check_key: Callable[[str], object],
    key_schema: Schema = STRING,
    *,
    missing: str,
    hint: str = "write '' for an empty value",
) -> MapKind:
    """Return a kind for tables of strings. `missing` is the error message for a key without a
    value.
    """

    def parse(node: ScalarNode) -> str:
        if node.value is None and node.plain:
            raise WrongValue(missing, suggestion=hint)
        return read_text(node)

    value = ScalarKind("a string", parse, {"type": ["string", "number", "boolean"]})
    return MapKind(words, check_key, value, key_schema)


def either(alone: ScalarKind, make: Callable[[Any], Any], table: SectionSpec) -> EitherKind:
    """Return a kind for a section that may also be written as a single value. `make` converts the
    single value to the value of the section.
    """
    return EitherKind(
        (ScalarKind(alone.words, lambda node: make(alone.parse(node)), alone.schema), table)
    )


def list_kinds(keys: type) -> dict[str, ValueKind | FieldSpec]:
    """Return the kinds in the annotations of a typed dictionary, `Annotated["type", kind]`."""
    return {name: each.__metadata__[0] for name, each in keys.__annotations__.items()}


def section(
    path: str, build: Callable[[SectionReader], Any], /, **fields: ValueKind | FieldSpec
) -> SectionSpec:
    """Create a section with these keys, in this order."""
    rows = (
        replace(each if isinstance(each, FieldSpec) else FieldSpec(each), name=name, path=path)
        for name, each in fields.items()
    )
    return SectionSpec(path, build, tuple(rows))
