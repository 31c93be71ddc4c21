"""Each class has a name of its own, and no identifier uses a word that the project replaced
by the field's term.
"""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3] / "src" / "cavvy"

# Words that other words have replaced, as parts of an identifier: what to write instead.
REPLACED = {
    "guardian": "reaper",
    "herd": "fleet",
    "honoured": "supported",
    "house": "app_state",
    "lacks": "unsupported",
    "outlook": "forecast",
    "parcel": "bundle",
    "parcels": "bundles",
    "plant": "control_plane",
    "porter": "login_helper",
    "prospects": "candidates",
    "reliefs": "standbys",
    "scene": "uow",
    "scrubber": "redactor",
    "shaky": "fault_injection",
    "shelf": "downloads",
    "sights": "observations",
    "standpoint": "job_progress",
    "steward": "supervisor",
    "stray": "orphan",
    "surroundings": "dependencies",
    "tale": "trace",
    "timetable": "schedules",
    "vault": "bucket_checkpoints",
}


def test_each_class_has_a_name_of_its_own() -> None:
    """Private and nested classes and those of templates count as well."""
    places, written = defaultdict(list), Counter[str]()
    for path in ROOT.rglob("*.py"):
        written.update(re.findall(r"\bclass\s+(\w+)", path.read_text()))
    twice = "|".join(name for name, count in written.items() if count > 1)
    for path, tree in _trees(re.compile(rf"\bclass\s+({twice})\b").search):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_identifier_uses_a_replaced_word() -> None:
    found = [
        f"{where}: {name} ({word}: {REPLACED[word]})"
        for where, name in _identifiers()
        for word in REPLACED.keys() & _words(name)
    ]
    assert found == []


def _trees(wanted: Callable[[str], object]) -> Iterator[tuple[Path, ast.Module]]:
    """The files whose text is wanted: to parse all of them takes ten seconds."""
    for path in sorted(ROOT.rglob("*.py")):
        if wanted(text := path.read_text()):
            yield path.relative_to(ROOT), ast.parse(text)


def _identifiers() -> Iterator[tuple[str, str]]:
    for path in sorted(ROOT.rglob("*.py")):
        for part in path.relative_to(ROOT).with_suffix("").parts:
            yield str(path.relative_to(ROOT)), part
    for path, tree in _trees(lambda text: REPLACED.keys() & _words(text)):
        for node in ast.walk(tree):
            names = (
                getattr(node, "name", None),
                getattr(node, "id", None),
                getattr(node, "attr", None),
                getattr(node, "arg", None),
            )
            yield from (
                (f"{path}:{getattr(node, 'lineno', 0)}", name)
                for name in names
                if isinstance(name, str)
            )


def _words(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)}
