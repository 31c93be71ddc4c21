"""YAML to a tree with places: what YAML 1.2 means, and what is refused."""

import pytest

from cavvy.spec.problems import ProblemNotes, SpecError
from cavvy.spec.tree import (
    MAX_CHARACTERS,
    MAX_NODES,
    ListNode,
    MapNode,
    Node,
    ScalarNode,
    check_single,
    compose_all,
    read_scalar,
)


def tree(text: str) -> Node:
    notes = ProblemNotes("f.yaml", text)
    documents = compose_all(text, notes)
    root = check_single(documents, notes) if documents else None
    notes.check()
    assert root is not None
    return root


def problem(text: str) -> str:
    with pytest.raises(SpecError) as caught:
        tree(text)
    return str(caught.value)


def plain(node: Node) -> object:
    match node:
        case ScalarNode():
            return node.value
        case ListNode():
            return [plain(item) for item in node.items]
        case MapNode():
            return {key.text: plain(value) for key, value in node.entries}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("on", "on"),
        ("yes", "yes"),
        ("true", True),
        ("False", False),
        ("~", None),
        ("", None),
        ("012", 12),
        ("0o17", 15),
        ("0x1F", 31),
        ("1e-3", 0.001),
        (".5", 0.5),
        ("10:30", "10:30"),
        ("1_000", "1_000"),
        ("2030-01-01", "2030-01-01"),
        ("9" * 301, "9" * 301),
        (".inf", ".inf"),
    ],
)
def test_scalars_are_read_as_yaml_1_2_does(text: str, value: object) -> None:
    read = read_scalar(text)
    assert read == value
    assert type(read) is type(value)


def test_quotes_make_text() -> None:
    assert plain(tree("a: '1'\nb: \"true\"\nc: !!str 5")) == {"a": "1", "b": "true", "c": "5"}


def test_marks_count_characters_and_lines_from_one() -> None:
    root = tree("é: x\nb:\n  - 'ü' \n  - zwei")
    assert isinstance(root, MapNode)
    items = root.get("b")
    assert isinstance(items, ListNode)
    assert [(item.mark.line, item.mark.column) for item in items.items] == [(3, 5), (4, 5)]
    value = root.get("é")
    assert value is not None
    assert (value.mark.line, value.mark.column, value.mark.width) == (1, 4, 1)


def test_anchors_and_merge_keys() -> None:
    text = "base: &b {x: 1, y: 2}\nown: {<<: *b, y: 3}\nboth: {<<: [{x: 8}, *b]}\nagain: *b"
    assert plain(tree(text)) == {
        "base": {"x": 1, "y": 2},
        "own": {"y": 3, "x": 1},
        "both": {"x": 8, "y": 2},
        "again": {"x": 1, "y": 2},
    }


def test_a_duplicate_key_names_both_places() -> None:
    said = problem("a: 1\nb: 2\na: 3")
    assert "f.yaml:3:1: the key 'a' appears twice" in said
    assert "first appears at line 1" in said


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("a: 1\n---\nb: 2", ":3:1:", "second document"),
        ("a:\n\tb: 1", ":2:1:", "a tab cannot indent"),
        ("a: b: c", ":1:5:", "colon where a key is not allowed"),
        ("a: *x", ":1:4:", "no anchor"),
        ("a: &x [*x]", ":1:8:", "inside the value that it refers to"),
        ("a: !foo 1", ":1:4:", "tag '!foo'"),
        ("a: !!python/object:os.system []", ":1:4:", "tag '!!python/object:os.system'"),
        ("a: 'x", ":1:6:", "never closed"),
        ("a: [1", ":1:4:", "not closed"),
        ("{", ":1:2:", "a bracket is not closed"),
        ("a: {\n\n", ":1:5:", "a bracket is not closed"),
        ("a: 1\n b: 2", ":2:", "colon where a key is not allowed"),
        ("? [1]\n: 2", ":1:3:", "cannot be a key"),
        ("a: {b: ${{ params.x }}}", ":1:", "in quotes"),
        ("run: @x", ":1:6:", "put the value in quotes"),
        ("a: \0", ":1:4:", "a NUL byte"),
        ("ab\ncd: \x07", ":2:5:", "U+0007"),
        ("a: \ud800", ":1:4:", "U+D800"),
        ("", ":1:1:", "empty"),
        ("# only a comment", ":1:1:", "empty"),
        ("[" * 100 + "]" * 100, ":1:42:", "nested deeper"),
        ("a: {<<: 3}", ":1:9:", "cannot be merged"),
    ],
)
def test_what_is_no_task_file_is_explained_at_its_place(text: str, place: str, words: str) -> None:
    said = problem(text)
    assert said.startswith(f"f.yaml{place}"), said
    assert words in said


def test_aliases_cannot_blow_up() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 20)]
    assert f"more than {MAX_NODES:,} values" in problem("\n".join(lines))


def test_aliases_of_a_long_text_cannot_blow_up() -> None:
    lines = [f"a: &a {'x' * 1000}", f"b: &b [{', '.join(['*a'] * 100)}]"]
    lines.append(f"c: [{', '.join(['*b'] * 100)}]")
    assert f"more than {MAX_CHARACTERS:,} characters" in problem("\n".join(lines))


def test_the_caret_stands_under_its_target() -> None:
    lines = problem("ab: 1\nxy: !t é").splitlines()
    assert lines[1].index("!") == lines[2].index("^")


def test_a_long_line_is_shown_around_its_fault() -> None:
    lines = problem(f"a: '{'x' * 500}' !t").splitlines()
    assert len(lines[1]) < 130
