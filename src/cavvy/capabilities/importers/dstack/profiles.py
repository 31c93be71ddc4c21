"""Adds the keys of a dstack profile to a configuration.

dstack applies a profile to each run: the profile that `DSTACK_PROFILE` names, or else the default
profile. The keys are appended to the text of the configuration, so that the submitted text is
complete without the file with the profiles.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

from cavvy.capabilities.importers.dstack import TABLES
from cavvy.capabilities.importers.readers import child, entries, flag_at, items, text_at
from cavvy.capabilities.importers.shapes import is_null, recast
from cavvy.domain.values import Struct
from cavvy.spec import read_file
from cavvy.spec.problems import ProblemNotes, SourceMark
from cavvy.spec.translation import KeptKey
from cavvy.spec.tree import Node, check_single, compose_all, to_value

_FILES = (".dstack/profiles.yml", ".dstack/profiles.yaml")
_TRUE = ("1", "true", "on")


class ProfiledText(Struct, frozen=True, kw_only=True):
    """The text of a configuration with the keys of a profile. `note` is None if no key was
    added.
    """

    text: str
    note: KeptKey | None = None


def add_profile(text: str) -> ProfiledText:
    """Return the text of a run's configuration with the keys of its profile appended. A key that
    the configuration has itself is not appended, nor is anything appended to an invalid
    configuration. Raises SpecError if a file with profiles is invalid, or if the named profile does
    not exist.
    """
    wanted = os.environ.get("DSTACK_PROFILE")
    if os.environ.get("DSTACK_NO_PROFILE", "").lower() in _TRUE:
        return ProfiledText(text=text)
    for path in _find_files():
        profile = _choose(path, wanted)
        if profile is not None:
            return _append(text, profile, path)
    if wanted is not None:
        notes = ProblemNotes("DSTACK_PROFILE", wanted)
        notes.outside("DSTACK_PROFILE", f"no file with profiles has a profile {wanted}")
        notes.check()
    return ProfiledText(text=text)


def _find_files() -> Iterator[Path]:
    """Yield the files with profiles that exist, in the order of their priority: in the current
    folder, and in the home folder.
    """
    for folder in dict.fromkeys((Path.cwd(), Path.home())):
        yield from [path for path in (folder / name for name in _FILES) if path.is_file()][:1]


def _choose(path: Path, wanted: str | None) -> Node | None:
    """Return the profile called `wanted`, or the default profile if `wanted` is None. Returns None
    if the file has no such profile. Raises SpecError.
    """
    text = read_file(path)
    notes = ProblemNotes(str(path), text)
    documents = compose_all(text, notes)
    notes.check()
    single = check_single(documents, notes)
    notes.check()
    assert single is not None  # A second document was refused above.
    root = recast(single, notes)
    TABLES["profile_file"].check(root, "", notes)
    notes.check()
    for each in items(child(root, "profiles")):
        if flag_at(each, "default") if wanted is None else text_at(each, "name") == wanted:
            return each
    return None


def _append(text: str, profile: Node, path: Path) -> ProfiledText:
    """Append the keys of a profile to the text of a configuration. Raises SpecError if the text
    does not have one key per line.
    """
    root = compose_all(text, ProblemNotes("", text), repeated=[])[0]
    there = {key.text for key, value in entries(root) if not is_null(value)}
    added = {
        key.text: to_value(value)
        for key, value in entries(profile)
        if key.text not in {"name", "default", *there}
    }
    if not added:
        return ProfiledText(text=text)
    name = text_at(profile, "name")
    if not _takes_lines(text, root.mark):
        notes = ProblemNotes(str(path), text)
        notes.outside(
            str(path),
            f"the profile {name} cannot be added to the configuration",
            expected="a configuration with one key per line",
            suggestion="DSTACK_NO_PROFILE=1 ignores the profile",
        )
        notes.check()
    start = text if text.endswith("\n") else f"{text}\n"
    lines = (f"{key}: {json.dumps(value, default=str)}\n" for key, value in added.items())
    note = KeptKey(
        line=start.count("\n") + 1,
        column=1,
        key="profile",
        reason=f"the profile {name} of {path} adds {', '.join(added)}; DSTACK_NO_PROFILE=1 "
        "ignores the profile",
    )
    return ProfiledText(text=start + "".join(lines), note=note)


def _takes_lines(text: str, start: SourceMark) -> bool:
    """Return whether keys can be appended to the table that starts at `start`: the table has one
    key per line, and nothing ends the document.
    """
    lines = text.split("\n")[start.line - 1 :]
    is_block = start.column == 1 and not lines[0].startswith("{")
    return is_block and not any(line.startswith(("...", "---")) for line in lines[1:])
