"""Packs the agent into an archive for nodes without a Cavvy installation, and builds the command
that starts the agent. Only servers use this module.
"""

from __future__ import annotations

import io
import os
import sys
import zipfile

HERE = os.path.dirname(os.path.abspath(__file__))
LEFT_OUT = "bundle.py"


def make_command() -> list[str]:
    """Return the command that starts the agent from this installation; the caller appends the path
    of the configuration file.

    The command runs the installed files instead of an archive, because Python can cache the
    compiled form of files but not of archive entries.
    """
    return [sys.executable, "-I", "-S", os.path.join(HERE, "__main__.py")]


def make_archive(folder: str = HERE) -> bytes:
    """Return a zip application that contains the files of `folder`, by default the agent's folder.
    The
    archive's entries are sorted and have no timestamps, so that equal sources give equal bytes.

    Python 3.8 or later runs the archive with `python -I -S agent.pyz CONFIG`.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(list_sources(folder)):
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.create_system, entry.external_attr = 3, 0o100644 << 16
            with open(os.path.join(folder, name), "rb") as file:
                archive.writestr(entry, file.read())
    return buffer.getvalue()


def list_sources(folder: str = HERE) -> list[str]:
    """Return the relative paths of the files to pack."""
    found = []
    for inner, _, names in os.walk(folder):
        relative = os.path.relpath(inner, folder)
        found += [
            os.path.normpath(os.path.join(relative, name)) for name in names if name.endswith(".py")
        ]
    return [name for name in found if name != LEFT_OUT]
