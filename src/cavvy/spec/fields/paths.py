"""Checks paths in a task file. A path in a task file is relative to the working folder, or absolute
on the node.
"""

import re

from cavvy.spec.fields.kinds import WrongValue, filled
from cavvy.spec.problems import shown

_SCHEME_LIKE = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_SYSTEM = frozenset(
    [
        "/",
        "/proc",
        "/sys",
        "/dev",
        "/etc",
        "/usr",
        "/bin",
        "/sbin",
        "/lib",
        "/lib64",
        "/boot",
        "/run",
    ]
)


def inner_path(text: str) -> str:
    """Check and normalize a path within the working folder. Raises WrongValue."""
    path = filled(text).strip().rstrip("/") or "/"
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if path.startswith(("/", "~")):
        wrong, hint = "is not within the working folder", "write a relative path"
    elif ".." in parts:
        wrong, hint = "leads out of the working folder", "write a path without .."
    elif not parts:
        wrong, hint = "is the working folder itself", "name a folder inside the working folder"
    elif _SCHEME_LIKE.match(path):
        wrong, hint = "is a URL", "name a folder; Cavvy stores its files outside of the node"
    else:
        return "/".join(parts)
    raise WrongValue(f"{shown(text)} {wrong}", suggestion=hint)


def check_path(text: str) -> str:
    """Check and normalize a path on the node: an absolute path, or a path within the working
    folder. Raises WrongValue.
    """
    path = text.strip()
    if not path.startswith("/"):
        return inner_path(path)
    clean = _full(path)
    if clean in _SYSTEM:
        raise WrongValue(
            f"{shown(path)} is a system path: a volume there would hide the node's own files",
            suggestion="use another folder, such as /data",
        )
    return clean


def check_folder(text: str) -> str:
    """Check and normalize the absolute path of a folder on the node. Raises WrongValue."""
    path = text.strip()
    if path.startswith("~"):
        raise WrongValue(
            f"{shown(text)}: ~ is only expanded by a shell", suggestion="write the path in full"
        )
    if not path.startswith("/"):
        raise WrongValue(
            f"{shown(text)} is not an absolute path",
            suggestion="use `workdir` for files next to the task file",
        )
    return _full(path)


def _full(path: str) -> str:
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts or ":" in path:
        raise WrongValue(
            f"{shown(path)} is not a plain path", suggestion="write the path without .. and colons"
        )
    return "/" + "/".join(parts)
