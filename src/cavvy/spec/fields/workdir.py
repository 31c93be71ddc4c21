"""The field `workdir`: a local folder, or a commit of a git repository."""

import re

from cavvy.domain.tasks import Workdir
from cavvy.spec.fields.kinds import (
    FieldSpec,
    SectionReader,
    WrongValue,
    either,
    section,
    text_kind,
)
from cavvy.spec.problems import shown
from cavvy.spec.support import NOT_YET

_GIT_URL = re.compile(r"(?:https?|ssh|git|file)://\S+|[A-Za-z0-9._-]+@[A-Za-z0-9.-]+:\S+")
_REF = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,100}")
_COMMIT = re.compile(r"[0-9a-f]{7,64}")


def _check_git(text: str) -> str:
    url = text.strip()
    if not _GIT_URL.fullmatch(url) or url.startswith("-"):
        raise WrongValue(
            f"{shown(text)} is not a git URL", suggestion="for a folder, write `workdir: FOLDER`"
        )
    if re.match(r"[a-z]+://[^/@]*:[^/@]+@", url):
        raise WrongValue(
            "the URL contains a password",
            suggestion="use a credential helper or SSH; Cavvy stores task files unencrypted",
        )
    return url


def is_commit(ref: str) -> bool:
    """Return whether a git reference is the hash of a commit."""
    return _COMMIT.fullmatch(ref) is not None


def _check_commit(text: str) -> str:
    if not is_commit(text.lower()):
        raise WrongValue(
            f"{shown(text)} is not a commit",
            suggestion=(
                "a branch or tag can move; `git ls-remote URL NAME` shows its current commit"
            ),
        )
    return text.lower()


def _read_workdir(text: str) -> Workdir:
    text = text.strip()
    if not text:
        raise WrongValue("the text is empty", suggestion="write `.` for the folder of this file")
    if not (_GIT_URL.fullmatch(text) or text.endswith(".git")):
        if text.startswith("~"):
            raise WrongValue(
                f"{shown(text)}: ~ is only expanded by a shell",
                suggestion="write the path in full, or relative to this file",
            )
        return Workdir(path=text)
    url, at, point = text.rpartition("@")
    # A URL such as git@host:path also contains an @. The text after the last @ is a commit only if
    # it has no slash and no colon.
    if not at or "/" in point or ":" in point or not _GIT_URL.fullmatch(url):
        url, point = text, ""
    url = _check_git(url)
    if not point:
        raise WrongValue(
            "the commit is missing",
            suggestion=(
                f"write {url}@COMMIT; `git ls-remote {url}` lists the commits of its branches and "
                "tags"
            ),
        )
    if _COMMIT.fullmatch(point.lower()):
        return Workdir(git=url, commit=point.lower())
    hint = (
        (f"`git ls-remote {url} {point}` shows its current commit") if _REF.fullmatch(point) else ""
    )
    raise WrongValue(
        f"{shown(point)} is not supported yet: {NOT_YET['workdir.ref']}", suggestion=hint
    )


def _build(table: SectionReader) -> Workdir | None:
    if not table.has("commit") and not table.has("ref"):
        git = table.get("git")
        hint = f"`git ls-remote {git}` lists the commits of its branches and tags" if git else ""
        table.notes.add(
            table.node.mark, "the commit is missing", expected="`commit`", suggestion=hint
        )
    return table.make(Workdir)


_TABLE = section(
    "workdir",
    _build,
    git=FieldSpec(text_kind("a git URL", _check_git), required=True),
    commit=text_kind("a commit's hash", _check_commit, numbers=True),
    ref=FieldSpec(
        text_kind("a branch or tag", numbers=True), refused=NOT_YET["workdir.ref"], to=()
    ),
)
WORKDIR = either(
    text_kind("a folder, or a git URL with @COMMIT", _read_workdir),
    lambda workdir: workdir,
    _TABLE,
)
