"""Reads small YAML files of other tools that are no task files, with a limit on their size, their
levels and their aliases."""

from pathlib import Path
from typing import Any

import yaml

from cavvy.spec.tree import MAX_DEPTH

# libyaml takes a thousandth of the time for text that is nested deeply
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MOST_BYTES = 1 << 20


def read_table(path: Path, text: str, kind: str) -> dict[str, Any]:
    """Return the table of a file; `kind` says what it is, such as "MLflow project". Raises
    ValueError.
    """
    if len(text) > _MOST_BYTES:
        raise ValueError(f"{path}: the file is too long for an {kind}")
    documents = load_plain(path, text)
    if not isinstance(documents, dict):
        raise ValueError(f"{path}: the file is no {kind}: expected a table as YAML")
    return documents


def load_plain(path: Path, text: str) -> object:
    """Return what a text says, without aliases of tables and lists. Raises ValueError."""
    try:
        _check_aliases(path, text)
        return yaml.load(text, _LOADER)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ValueError(f"{path}:{line}: this is no YAML: {error.problem}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{path}: this is no YAML: {error}") from None


def _check_aliases(path: Path, text: str) -> None:
    """Refuse aliases of tables and lists, which can stand for more than fits into memory, and text
    that is nested too deeply to be read."""
    scalars: set[str] = set()
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            line = event.start_mark.line + 1 if event.start_mark else 1
            raise ValueError(f"{path}:{line}: nested deeper than {MAX_DEPTH} levels")
        if isinstance(event, yaml.ScalarEvent) and event.anchor:
            scalars.add(event.anchor)
        elif isinstance(event, yaml.CollectionStartEvent) and event.anchor:
            scalars.discard(event.anchor)
        elif isinstance(event, yaml.AliasEvent) and event.anchor not in scalars:
            message = f"*{event.anchor} is no alias of a single value; write the values out"
            raise ValueError(f"{path}: {message}")
