"""Parses YAML text into a tree in which every node has its position in the file.

Scalars follow YAML 1.2: only true and false are booleans, so `no`, `on` and `yes` are strings, and
10:30 is not a number. Anchors and merge keys are supported. Duplicate keys, several documents,
unknown tags and aliases that expand to too many nodes are refused.
"""

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from cavvy.domain.tasks import Scalar
from cavvy.domain.values import Struct, replace
from cavvy.spec.problems import ProblemNotes, SourceMark, shown

if TYPE_CHECKING:
    from yaml.error import MarkedYAMLError
    from yaml.events import AliasEvent, Event, ScalarEvent

# The server reads every text within these limits in about a second. Every use of an alias counts.
MAX_CHARACTERS = 1 << 20
MAX_NODES = 30_000
# the same limits without libyaml, which takes six times as long
MAX_CHARACTERS_WITHOUT_LIBYAML = 1 << 18
MAX_NODES_WITHOUT_LIBYAML = 10_000
MAX_DEPTH = 40


class ScalarNode(Struct, frozen=True, kw_only=True):
    """One value. `text` is the original text, and `value` is its meaning in YAML 1.2 (None stands
    for null).
    """

    mark: SourceMark
    text: str
    value: Scalar | None
    plain: bool = True  # whether the value is written without quotes


class MapNode(Struct, frozen=True, kw_only=True):
    """A mapping: its keys and their values, in the order of the file. Keys are unique."""

    mark: SourceMark
    entries: tuple[tuple[ScalarNode, "Node"], ...]

    def get(self, key: str) -> "Node | None":
        return next((value for name, value in self.entries if name.text == key), None)


class ListNode(Struct, frozen=True, kw_only=True):
    """A list of values."""

    mark: SourceMark
    items: tuple["Node", ...]


Node = ScalarNode | MapNode | ListNode


def check_single(documents: "Sequence[Node]", notes: ProblemNotes) -> Node | None:
    """Return the only document that is not empty, or the first if all are. If there is a second
    such document, add a problem and return None.
    """
    documents = list_filled(documents)
    if len(documents) > 1:
        hint = "a file can contain only one task: delete the `---` above, or write a second file"
        notes.add(documents[1].mark, "a second document begins here", suggestion=hint)
        return None
    return documents[0]


def list_filled(documents: "Sequence[Node]") -> "Sequence[Node]":
    """Return the documents that are not empty, such as one after a last `---`; or all, if none is
    filled.
    """
    filled = [
        each for each in documents if not (isinstance(each, ScalarNode) and each.value is None)
    ]
    return filled or documents


def compose_all(
    text: str, notes: ProblemNotes, *, repeated: "list[ScalarNode] | None" = None
) -> "tuple[Node, ...]":
    """Parse all documents in `text` into trees. If the text has a syntax error, the error is added
    to `notes` and the result is ().

    If the list `repeated` is given, the text is read as PyYAML does without libyaml: the last value
    of a duplicate key is used, and the key is added to `repeated`. If `repeated` is given, PyYAML's
    own parser reads the text, and this parser reports a tab between words as an error.
    """
    most = MAX_CHARACTERS if repeated is None else MAX_CHARACTERS_WITHOUT_LIBYAML
    if len(text) > most:
        notes.outside(
            notes.file, f"the file has {len(text):,} characters", expected=f"at most {most:,}"
        )
        return ()
    if not _readable(text, notes):
        return ()
    import yaml

    loader = (
        yaml.SafeLoader if repeated is not None else getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    )
    try:
        return tuple(_Composer(yaml.parse(text, Loader=loader), notes, repeated).documents())
    except yaml.MarkedYAMLError as error:
        _explain(error, notes)
    except yaml.YAMLError as error:
        notes.add(SourceMark(line=1, column=1), f"this is not YAML: {error}")
    except _Hopeless:
        pass
    return ()


def read_scalar(text: str) -> Scalar | None:
    """Return the value of an unquoted scalar in YAML 1.2 (core schema)."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _OTHER_BASE.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


def to_value(node: Node) -> object:
    """Return the content of a node as dicts, lists and plain values."""
    match node:
        case ScalarNode():
            return node.value
        case ListNode():
            return [to_value(item) for item in node.items]
        case MapNode():
            return {key.text: to_value(value) for key, value in node.entries}


def read_table(text: str, file: str = "") -> dict[str, Any] | None:
    """Parse a text as YAML 1.2 and return its plain values, or None if the text is not a single
    table. With the name of the file, a text that is not YAML raises SpecError.
    """
    notes = ProblemNotes(file or "the file", text)
    documents = compose_all(text, notes)
    if file and text.strip():
        notes.check()
    root = check_single(documents, notes) if documents else None
    return (
        {key.text: to_value(value) for key, value in root.entries}
        if isinstance(root, MapNode)
        else None
    )


def describe(node: Node) -> str:
    """Describe a node for an error message: "a list", "the text 'x'"."""
    match node:
        case ScalarNode(value=None):
            return "nothing"
        case ScalarNode(value=bool()):
            return f"the truth value {node.text}"
        case ScalarNode(value=int() | float()):
            return f"the number {shown(node.text)[1:-1]}"
        case ScalarNode():
            return f"the text {shown(node.text)}"
        case ListNode():
            return "a list"
        case MapNode():
            return "a table of keys and values"


_WORDS: dict[str, Scalar | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
# Extremely long numbers remain strings, because Python refuses to convert them and no field can use
# them.
_INTEGER = re.compile(r"[-+]?[0-9]{1,300}")
_OTHER_BASE = re.compile(r"0o[0-7]{1,100}|0x[0-9a-fA-F]{1,100}")
_FLOAT = re.compile(
    r"[-+]?(?:\.[0-9]{1,300}|[0-9]{1,300}(?:\.[0-9]{0,300})?)(?:[eE][-+]?[0-9]{1,9})?"
)
_TEXT_TAGS = frozenset({"!", "tag:yaml.org,2002:str"})
_PLAIN = re.compile("[\t\n\r\x20-\x7e]*")
_UNREADABLE = "[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]"


class _Hopeless(Exception):
    """Raised after a syntax error was added to the notes, because no tree can be built."""


def _readable(text: str, notes: ProblemNotes) -> bool:
    # Most files are plain, and the other pattern takes milliseconds to compile.
    match = None if _PLAIN.fullmatch(text) else re.search(_UNREADABLE, text)
    if match is None:
        return True
    before = text[: match.start()]
    line = before.count("\n") + 1
    name = "a NUL byte" if match[0] == "\0" else f"the character U+{ord(match[0]):04X}"
    mark = SourceMark(line=line, column=match.start() - (before.rfind("\n") + 1) + 1)
    notes.add(
        mark,
        f"a YAML file cannot contain {name}",
        suggestion="delete the character, and check that this is a text file in UTF-8",
    )
    return False


class _Composer:
    """Builds the trees of all documents of a file from the parser's events."""

    def __init__(
        self, events: "Iterator[Event]", notes: ProblemNotes, repeated: list[ScalarNode] | None
    ) -> None:
        self._events = events
        self._notes = notes
        self._repeated = repeated
        self._most = MAX_NODES if repeated is None else MAX_NODES_WITHOUT_LIBYAML
        self._anchors: dict[str, tuple[Node, int, int]] = {}
        self._open: set[str] = set()
        self._count = 0
        self._characters = 0

    def documents(self) -> Iterator[Node]:
        from yaml import events

        next(self._events)  # Skip the start of the stream.
        count = 0
        while not isinstance(next(self._events), events.StreamEndEvent):
            self._anchors.clear()
            yield self._node(next(self._events), 0)
            next(self._events)  # Skip the end of the document.
            count += 1
        if not count:
            self._notes.add(
                SourceMark(line=1, column=1),
                "the file is empty",
                suggestion="`cavvy init` writes a starter file",
            )

    def _node(self, event: "Event", depth: int) -> Node:
        from yaml import events

        self._count += 1
        if self._count > self._most:
            self._fail(
                event,
                f"the file has more than {self._most:,} values once its aliases are followed",
                "shorten the file, or use fewer aliases",
            )
        if self._characters > MAX_CHARACTERS:
            self._fail(
                event,
                f"the file has more than {MAX_CHARACTERS:,} characters once its aliases are "
                "followed",
                "use fewer aliases",
            )
        if depth > MAX_DEPTH:
            self._fail(event, f"nested deeper than {MAX_DEPTH} levels", "use fewer levels")
        if isinstance(event, events.AliasEvent):
            return self._alias(event)
        anchor = getattr(event, "anchor", None)
        before, characters = self._count, self._characters
        if anchor is not None:
            self._open.add(anchor)
        if isinstance(event, events.ScalarEvent):
            node: Node = self._scalar(event)
        elif isinstance(event, events.SequenceStartEvent):
            self._refuse_tag(event, "tag:yaml.org,2002:seq")
            node = ListNode(mark=_mark(event), items=tuple(self._items(depth)))
        else:
            self._refuse_tag(event, "tag:yaml.org,2002:map")
            node = MapNode(mark=_mark(event), entries=self._entries(depth))
        if anchor is not None:
            self._open.discard(anchor)
            size = self._count - before + 1
            self._anchors[anchor] = (node, size, self._characters - characters)
        return node

    def _alias(self, event: "AliasEvent") -> Node:
        if event.anchor in self._anchors:
            node, size, characters = self._anchors[event.anchor]
            self._count += size
            self._characters += characters
            return node
        if event.anchor in self._open:
            self._fail(
                event,
                f"the alias *{event.anchor} is inside the value that it refers to",
                "write the value out",
            )
        self._fail(
            event,
            f"the alias *{event.anchor} has no anchor &{event.anchor} before it",
            f"put &{event.anchor} before the value, or quote a text that begins with *",
        )
        raise AssertionError

    def _scalar(self, event: "ScalarEvent") -> ScalarNode:
        self._characters += len(event.value)
        plain = not event.style and event.tag is None
        if event.tag is not None and event.tag not in _TEXT_TAGS:
            self._note_tag(event, event.tag)
        start, end = event.start_mark, event.end_mark
        width = max(1, end.column - start.column) if start and end and start.line == end.line else 1
        value = read_scalar(event.value) if plain else event.value
        return ScalarNode(
            mark=replace(_mark(event), width=width), text=event.value, value=value, plain=plain
        )

    def _items(self, depth: int) -> Iterator[Node]:
        from yaml.events import SequenceEndEvent

        while not isinstance(event := next(self._events), SequenceEndEvent):
            yield self._node(event, depth + 1)

    def _entries(self, depth: int) -> tuple[tuple[ScalarNode, Node], ...]:
        from yaml.events import MappingEndEvent

        entries: dict[str, tuple[ScalarNode, Node]] = {}
        merged: list[Node] = []
        while not isinstance(event := next(self._events), MappingEndEvent):
            key = self._node(event, depth + 1)
            value = self._node(next(self._events), depth + 1)
            if not isinstance(key, ScalarNode) or (key.plain and key.value is None):
                self._notes.add(
                    key.mark, f"{describe(key)} cannot be a key", expected="a word before the colon"
                )
            elif key.plain and key.text == "<<":
                merged.append(value)
            elif key.text in entries and self._repeated is not None:
                self._repeated.append(key)
                entries[key.text] = (key, value)
            elif key.text in entries:
                self._duplicate(key, entries[key.text][0])
            else:
                entries[key.text] = (key, value)
        for node in merged:
            self._merge(node, entries)
        return tuple(entries.values())

    def _merge(self, node: Node, entries: dict[str, tuple[ScalarNode, Node]]) -> None:
        """Apply YAML's merge key `<<`. The table's own keys take precedence over the keys of the
        merged tables. Among merged tables, the first table takes precedence.
        """
        for source in node.items if isinstance(node, ListNode) else (node,):
            if isinstance(source, MapNode):
                for key, value in source.entries:
                    entries.setdefault(key.text, (key, value))
            else:
                expected = "an alias of a table, as in `<<: *base`"
                self._notes.add(
                    source.mark, f"{describe(source)} cannot be merged", expected=expected
                )

    def _duplicate(self, key: ScalarNode, first: ScalarNode) -> None:
        self._notes.add(
            key.mark,
            f"the key {shown(key.text)} appears twice",
            suggestion=f"the key first appears at line {first.mark.line}; keep one of the two",
        )

    def _refuse_tag(self, event: "Event", allowed: str) -> None:
        tag = getattr(event, "tag", None)
        if tag not in (None, "!", allowed):
            self._note_tag(event, str(tag))

    def _note_tag(self, event: "Event", tag: str) -> None:
        written = tag.replace("tag:yaml.org,2002:", "!!")
        self._notes.add(
            _mark(event), f"the YAML tag {shown(written)} is not supported", suggestion="delete it"
        )

    def _fail(self, event: "Event", message: str, suggestion: str = "") -> None:
        self._notes.add(_mark(event), message, suggestion=suggestion)
        raise _Hopeless


def _mark(event: "Event") -> SourceMark:
    start = event.start_mark
    assert start is not None  # The parser sets a start mark on every event.
    return SourceMark(line=start.line + 1, column=start.column + 1, index=start.index)


# Each tuple has a part of a message of libyaml or PyYAML, an explanation for the author, and a
# suggested fix.
_EXPLAINED = (
    (
        "tab between",
        "a tab instead of a space",
        "use a space, or delete the tab if it is at the end of the line",
    ),
    ("tab", "a tab cannot indent YAML", "use spaces, two for each level"),
    (
        "cannot start any token",
        "a value cannot begin with this character",
        "put the value in quotes",
    ),
    (
        "mapping values are not allowed",
        "a colon where a key is not allowed",
        "check the indentation, or quote the text",
    ),
    (
        "could not find expected ':'",
        "a key without a colon",
        "write `key: value`, with a space after the colon",
    ),
    (
        "did not find expected ':'",
        "a key without a colon",
        "write `key: value`, with a space after the colon",
    ),
    (
        "did not find expected key",
        "the indentation does not fit the lines above",
        "align all keys of the table",
    ),
    (
        "did not find expected '-' indicator",
        "the indentation does not fit the list above",
        "align the `-` signs of the list",
    ),
    (
        "did not find expected ',' or",
        "a bracket or brace is not closed, or a comma is missing",
        "close it, or quote the value if it contains a bracket or brace, as in '${NAME}'",
    ),
    ("unexpected end of stream", "a quote is opened and never closed", "close it"),
    (
        "did not find expected node content",
        "a value is missing, or a bracket is not closed",
        "write it",
    ),
    (
        "block sequence entries are not allowed",
        "a list cannot begin here",
        "put the list on indented lines of its own",
    ),
    (
        "did not find expected <document start>",
        "this line does not continue the value above, and is not `key: value`",
        "write `key: value` lines; in a text over several lines, indent each line",
    ),
    (
        "invalid Unicode character escape code",
        "an escape sequence stands for no character",
        "use single quotes",
    ),
    ("incompatible YAML document", "this YAML version is not supported", "delete the %YAML line"),
    ("undefined tag handle", "a value begins with `!`", "put the value in quotes"),
    (
        "unknown escape character",
        "an unknown escape sequence in double quotes",
        "use single quotes",
    ),
)


def _explain(error: "MarkedYAMLError", notes: ProblemNotes) -> None:
    begun = error.context_mark
    mark = _place_error(error, notes)
    line = notes.lines[mark.line - 1]
    problem = str(error.problem)
    if "\t" in line[: len(line) - len(line.lstrip())]:
        problem = "tab"
    elif line[mark.column - 1 : mark.column] == "\t":
        problem = "tab between"
    message, suggestion = problem, ""
    for fragment, meaning, remedy in _EXPLAINED:
        if fragment in problem:
            message, suggestion = meaning, remedy
            break
    if "${{" in line:
        suggestion = "inside of { } or [ ], put `${{ … }}` in quotes"
    if begun is not None and begun.line + 1 != mark.line:
        message += f" (this part begins at line {begun.line + 1})"
    notes.add(mark, f"this is not YAML: {message}", suggestion=suggestion)


def _place_error(error: "MarkedYAMLError", notes: ProblemNotes) -> SourceMark:
    """Return the position of the error. If the error is on an empty line, return an earlier
    position on a line that contains text.
    """
    for place in (error.problem_mark or error.context_mark, error.context_mark):
        # The parser detects an unclosed bracket or quote only at the end of the file. The error is
        # shown where the bracket or quote begins.
        mark = SourceMark(line=place.line + 1, column=place.column + 1) if place else None
        if mark and mark.line <= len(notes.lines) and notes.lines[mark.line - 1].strip():
            return mark
    last = max((at for at, line in enumerate(notes.lines) if line.strip()), default=0)
    return SourceMark(line=last + 1, column=len(notes.lines[last]) + 1)
