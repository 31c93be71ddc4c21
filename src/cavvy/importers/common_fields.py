"""What the importers translate alike: names, tags, prices and the working folder."""

import re

from cavvy.domain.tasks import Workdir
from cavvy.domain.units import HourlyRate
from cavvy.importers.kept_keys import TranslationNotes
from cavvy.importers.readers import as_text, child, entries, text_at
from cavvy.spec.problems import SourceMark, slug
from cavvy.spec.tree import Node, ScalarNode


def read_name(table: Node, kept_keys: TranslationNotes) -> str | None:
    """The job's name in our letters; None where the file has none."""
    name = text_at(table, "name")
    plain = None if name is None else slug(name)
    if plain != name:
        reason = f"names are of a-z, 0-9 and - here; the job is called {plain}"
        kept_keys.note_at(table, "name", reason)
    return plain


def read_tags(table: Node, key: str) -> dict[str, str]:
    return {
        name.text: as_text(value)
        for name, value in entries(child(table, key))
        if isinstance(value, ScalarNode)
    }


def read_price(table: Node, key: str) -> HourlyRate | None:
    """A key's dollars per hour."""
    price = text_at(table, key)
    return HourlyRate(round(float(price) * 1_000_000)) if price else None


def read_folder(path: str, key: str, mark: SourceMark, kept_keys: TranslationNotes) -> Workdir:
    """A working folder on this machine."""
    if path.startswith("~"):
        reason = "~ is another folder for everyone; write the path relative to this file"
        kept_keys.refuse(mark, key, reason)
    return Workdir(path=path)


def read_commit(
    url: str,
    commit: str | None,
    key: str,
    mark: SourceMark,
    reason: str,
    kept_keys: TranslationNotes,
) -> Workdir:
    """A git repository; refused with `reason` where it names no commit."""
    if commit is not None and re.fullmatch(r"[0-9a-f]{7,64}", commit):
        return Workdir(git=url, commit=commit)
    kept_keys.refuse(mark, key, reason)
    return Workdir(git=url)
