"""Checks what was read from another tool's file by the rules of Cavvy's own task file, so that
bounds stand in one place."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from cavvy.domain.tasks import TaskSpec
from cavvy.spec.problems import ProblemNotes, SourceMark
from cavvy.spec.writing import make_keys

# keys whose values are as the author wrote them, or are checked elsewhere
_UNCHECKED = ("name", "run", "setup", "workdir", "volumes", "project", "after", "group")


def check_task(
    task: TaskSpec, marks: Mapping[str, SourceMark], elsewhere: SourceMark, notes: ProblemNotes
) -> None:
    """Add the problems of a task to `notes`, at the marks of its keys, such as nodes or
    resources.memory. A key without a mark is at `elsewhere`.
    """
    from cavvy.spec import SpecError, parse_own
    from cavvy.spec.tree import compose_all

    for key, table in _list_alone(make_keys(task)):
        text = json.dumps({"run": "true", **table})
        apart = ProblemNotes(notes.file, text, notes.now)
        try:
            parse_own(compose_all(text, apart), apart, notes.file, {})
        except SpecError as error:
            for each in error.problems:
                notes.add(
                    marks.get(key, elsewhere),
                    each.message if key in marks else f"{key}: {each.message}",
                    expected=each.expected,
                    suggestion=each.suggestion,
                )


def _list_alone(keys: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each key with a table that has only this key, and what it needs to be valid."""
    for key, value in keys.items():
        if key in _UNCHECKED:
            continue
        if key in ("resources", "limits") and isinstance(value, dict):
            for inner, own in value.items():
                yield f"{key}.{inner}", {key: {inner: own}}
        elif key == "parallel":
            yield key, {key: value, "array": "0-1"}
        elif key == "image":
            yield key, {key: value, "workdir": "."}
        else:
            yield key, {key: value}
