"""Translates the fields that all importers share: names, tags, prices and the working folder."""

import re

from cavvy.domain.tasks import Workdir
from cavvy.domain.units import HourlyRate
from cavvy.importers.kept_keys import TranslationNotes
from cavvy.importers.readers import as_text, child, entries, text_at
from cavvy.spec.fields.http_requests import check_header_name, check_header_value
from cavvy.spec.fields.kinds import WrongValue
from cavvy.spec.fields.paths import check_path
from cavvy.spec.problems import SourceMark, slug
from cavvy.spec.tree import Node, ScalarNode

# Requests that a replica processes at the same time; SkyServe and dstack do not limit them.
UNBOUNDED = 1000


def read_name(table: Node, kept_keys: TranslationNotes) -> str | None:
    """Return the job's name, reduced to the characters that Cavvy allows, or None if the file has
    no name.
    """
    name = text_at(table, "name")
    plain = None if name is None else slug(name)
    if plain != name:
        reason = f"names may contain only a-z, 0-9 and -; the job is called {plain}"
        kept_keys.note_at(table, "name", reason)
    return plain


def tell_value(name: str, *, is_variable: bool) -> str:
    """Return how to set the value of a secret. A variable without a value can also be set on the
    command line.
    """
    stored = f"set the value with `cavvy secret set {name}`"
    return (
        f"{stored}, or set the value for one job with --env {name}=VALUE" if is_variable else stored
    )


def find_header_problem(name: str, value: str) -> str:
    """Return why a probe cannot send an HTTP header, or "" if the probe can send it."""
    try:
        check_header_value(value)
        check_header_name(name)
    except WrongValue as error:
        return str(error)
    return ""


def read_place(text: str) -> str:
    """Return the path of a mounted file or folder on the node: an absolute path, or a path within
    the home folder or the working folder. Raises WrongValue.
    """
    if text.startswith("~/") and ".." not in text.split("/"):
        return text.rstrip("/")
    return check_path(text)


def read_tags(table: Node, key: str) -> dict[str, str]:
    return {
        name.text: as_text(value)
        for name, value in entries(child(table, key))
        if isinstance(value, ScalarNode)
    }


def read_price(table: Node, key: str) -> HourlyRate | None:
    """Return the price under a key, in dollars per hour, or None if the key is absent."""
    price = text_at(table, key)
    return HourlyRate(round(float(price) * 1_000_000)) if price else None


def read_commit(
    url: str,
    ref: str | None,
    key: str,
    mark: SourceMark,
    advice: str,
    kept_keys: TranslationNotes,
) -> Workdir:
    """Return a working folder from a git repository. If `ref` is a branch or tag instead of a
    commit, the key is reported as unsupported until the task is submitted. At submission, `cavvy
    run` looks up the current commit of the branch or tag.
    """
    commit = (ref or "").lower()
    if not is_commit(commit):
        reason = (
            "a branch or tag can move: `cavvy run` submits its current commit; to pin a commit, "
            f"{advice}"
        )
        kept_keys.refuse(mark, key, reason, until_submitted=True)
        return Workdir(git=url, commit=ref)
    return Workdir(git=url, commit=commit)


def is_commit(ref: str) -> bool:
    """Return whether a git reference is the hash of a commit."""
    return re.fullmatch(r"[0-9a-f]{7,64}", ref) is not None
