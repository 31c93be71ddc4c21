"""Checks the places that a task file names: paths, which are relative to the working folder or
absolute on the node, and URLs, such as the sources of `inputs` and the targets of `outputs`; also
the paths, headers and bodies of HTTP requests.
"""

import re
from urllib.parse import unquote, urlsplit

from cavvy.domain.tasks import URL_SCHEMES
from cavvy.spec.fields.kinds import WrongValue, filled
from cavvy.spec.problems import listed, shown

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_OTHERS = {
    "gcs": "gs",
    "r2": "s3",
    **dict.fromkeys(("azure", "abfs", "abfss", "wasb", "wasbs"), "az"),
    **dict.fromkeys(("scp", "ssh"), "sftp"),
}
_READ_ONLY = ("http", "https", "hf")
_HUB = re.compile(
    r"hf://(datasets/)?[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._%@/+ -]*", re.ASCII
)

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


def names_parent(path: str) -> bool:
    """Return whether a path contains the segment `..`, which could lead to another service."""
    return ".." in unquote(path).replace("\\", "/").partition("?")[0].split("/")


def read_source(text: str) -> str:
    """Check the source of an input. Raises WrongValue."""
    return _read(text, URL_SCHEMES)


def read_target(text: str) -> str:
    """Check the target of an output. Raises WrongValue."""
    return _read(text, tuple(each for each in URL_SCHEMES if each not in _READ_ONLY))


def _read(text: str, schemes: tuple[str, ...]) -> str:
    clean = text.strip()
    match = _SCHEME.match(clean)
    if match is None or match[1].lower() == "file":
        path = clean[len(match[0]) :] if match else clean
        if not path.startswith("/"):
            hint = (
                "use `workdir` for files next to the task file; this folder is frozen and sent "
                "with the job"
            )
            raise WrongValue(f"{shown(text)} is not an absolute path", suggestion=hint)
        return path
    scheme = match[1].lower()
    if scheme not in schemes:
        known = listed(f"{each}://" for each in schemes)
        if scheme in _READ_ONLY:
            raise WrongValue(
                f"{shown(text)}: Cavvy cannot write to "
                f"{'the Hugging Face Hub' if scheme == 'hf' else 'web servers'}",
                expected=f"an absolute path, {known}",
            )
        close = _OTHERS.get(scheme, "")
        meant = f"write {close}://" if close else "fetch the data in `setup` or `run`"
        raise WrongValue(
            f"{shown(text)}: the scheme {match[0]} is not supported",
            expected=f"an absolute path, {known}",
            suggestion=meant,
        )
    _check(text, clean, scheme)
    return scheme + clean[len(match[1]) :]


def _check(text: str, url: str, scheme: str) -> None:
    try:
        parts = urlsplit(url)
    except ValueError:
        raise WrongValue(f"{shown(text)} is not a URL") from None
    if not parts.netloc or parts.netloc.startswith(("@", ":")):
        what = "host" if scheme in ("sftp", *_READ_ONLY) else "bucket"
        raise WrongValue(f"{shown(text)} has no {what}")
    if "@" in parts.netloc and (scheme != "sftp" or ":" in parts.netloc.rpartition("@")[0]):
        raise WrongValue(
            "the URL contains a login, but Cavvy stores task files unencrypted",
            suggestion="set the login with `cavvy secret set`",
        )
    if parts.netloc.rpartition("@")[2].startswith("-") or parts.netloc.startswith("-"):
        raise WrongValue(
            f"{shown(text)}: the name after :// begins with -", expected="a host or bucket"
        )
    if re.search(r"[\x00-\x20]", url):
        raise WrongValue(
            f"{shown(text)} contains a space or a control character", suggestion="write %20"
        )
    if ".." in unquote(parts.path).split("/"):
        raise WrongValue(f"{shown(text)} contains ..", suggestion="write the path without ..")
    if scheme == "hf" and not _HUB.fullmatch(url):
        raise WrongValue(
            f"{shown(text)} names no repository",
            suggestion="write hf://ORGANISATION/NAME@REVISION/",
        )
    if scheme in _READ_ONLY and parts.path in ("", "/"):
        raise WrongValue(f"{shown(text)} does not name a file")
    if scheme in ("s3", "gs", "az") and (parts.query or parts.fragment):
        raise WrongValue(
            f"{shown(text)} contains ? or #",
            suggestion="if the object's name contains this character, write %3F or %23",
        )


_MOST_BODY = 1 << 16  # bytes


# the characters that RFC 9110 permits, in sections 5.1 and 5.5
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


_HEADER_VALUE = re.compile(r"[\t -~]*")


_FRAMING = ("connection", "content-length", "transfer-encoding")  # headers that the sender sets


def read_path(text: str) -> str:
    text = filled(text)
    if not text.startswith("/") or any(char.isspace() for char in text):
        raise WrongValue(f"{shown(text)} is not a path", suggestion="write a path such as /health")
    return text


def read_called_path(text: str) -> str:
    if names_parent(text):
        raise WrongValue(f"{shown(text)} contains ..", suggestion="write the path without ..")
    return read_path(text)


def read_body(text: str) -> str:
    if len(text.encode()) > _MOST_BODY:
        raise WrongValue(f"the text has more than {_MOST_BODY:,} bytes")
    return text


def check_header_name(name: str) -> str:
    """Return the name. Raises WrongValue if a file cannot set a header with this name."""
    if _HEADER_NAME.fullmatch(name) is None:
        raise WrongValue(f"{shown(name)} is not a valid name of a header")
    if name.lower() in _FRAMING:
        raise WrongValue(f"Cavvy sets the header {name} itself", suggestion="delete the header")
    return name


def check_header_value(value: str) -> str:
    """Return the value. Raises WrongValue if the value is not valid in a header."""
    if _HEADER_VALUE.fullmatch(value) is None:
        raise WrongValue("the header contains characters that are not ASCII, or a line break")
    return value


def inner_path(text: str) -> str:
    """Check and normalize a path within the working folder. Raises WrongValue."""
    path = filled(text).strip().rstrip("/") or "/"
    parts: list[str] = []
    for part in path.split("/"):
        if part == ".." and parts and parts[-1] != "..":
            parts.pop()
        elif part not in ("", "."):
            parts.append(part)
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


def read_place(text: str) -> str:
    """Check and normalize a path on the node: an absolute path, or a path within the home folder or
    the working folder. Raises WrongValue.
    """
    path = text.strip()
    if path.startswith("~/"):
        return f"~/{inner_path(path[2:].lstrip('/'))}"
    return check_path(path)


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
