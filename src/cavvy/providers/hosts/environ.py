"""Prepares the environment variables of programs that a provider starts."""

import os
import sys
from collections.abc import Collection, Mapping
from pathlib import Path


def clean_environ(
    environ: Mapping[str, str],
    names: Collection[str],
    prefixes: tuple[str, ...] = ("LC_",),
    *,
    own: str | None = None,
) -> dict[str, str]:
    """Return the variables with these names and prefixes, without traces of the server's own
    virtual or conda environment.

    `own` is the folder of the server's environment. If `own` is "", the server runs in no virtual
    or conda environment; if `own` is None, the environment of this process is used. The
    environment's folders are removed from PATH, because a job that finds the server's pip could
    overwrite the server's packages.
    """
    if own is None:
        own = _find_own()
    return {
        name: _without(value, own) if name in ("PATH", "LD_LIBRARY_PATH") else value
        for name, value in environ.items()
        if name in names or name.startswith(prefixes)
    }


def _find_own() -> str:
    """Return the folder of this Python's virtual or conda environment, or "" if this Python
    runs outside such environments.
    """
    apart = sys.prefix != sys.base_prefix or Path(sys.prefix, "conda-meta").is_dir()
    return sys.prefix if apart else ""


def _without(path: str, own: str) -> str:
    """Return the PATH without the environment's folders, but with the folder that contains the
    command `conda`."""
    if not own:
        return path
    root = os.path.realpath(own)
    return os.pathsep.join(
        folder
        for folder in path.split(os.pathsep)
        if os.path.dirname(os.path.realpath(folder)) != root
        or os.path.basename(folder) == "condabin"
    )
