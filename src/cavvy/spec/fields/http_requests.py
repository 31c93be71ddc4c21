"""Checks the parts of HTTP requests in a task file: paths, headers and bodies."""

import re

from cavvy.domain.queued_calls import names_parent
from cavvy.spec.fields.kinds import WrongValue, filled
from cavvy.spec.problems import shown

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
