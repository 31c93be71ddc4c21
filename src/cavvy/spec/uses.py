"""Matches the entries of `setup.uses` with the files of a snapshot. The module is used to check a
task and to compute the key of a reusable setup.
"""

import os
from collections.abc import Collection, Sequence

from cavvy.spec.problems import nearest


def is_used(path: str, uses: Sequence[str]) -> bool:
    """Return whether the file `path` is an entry of `uses`, or is inside a folder that is an
    entry.
    """
    return any(path == use or path.startswith(use + "/") for use in uses)


def explain_unused(paths: Collection[str], uses: Sequence[str]) -> list[tuple[str, str]]:
    """Return a message and a suggested fix for each entry of `uses` that matches no file of the
    folder.
    """
    return [
        (
            f"`setup.uses` names {use}, which is not in the frozen working folder ({len(paths):,} "
            "files)",
            _suggest(use, paths),
        )
        for use in uses
        if not any(is_used(path, (use,)) for path in paths)
    ]


def _suggest(use: str, paths: Collection[str]) -> str:
    if any(letter in use for letter in "*?["):
        return "patterns are not supported: list the files, or their folder"
    close = nearest(os.path.basename(use), {os.path.basename(path) for path in paths})
    found = (
        next((path for path in sorted(paths) if os.path.basename(path) == close), None)
        if close
        else None
    )
    meant = f"did you mean `{found}`? If not, " if found else ""
    return (
        f"{meant}check that the file exists and that neither .gitignore nor .cavvyignore "
        "excludes it"
    )
