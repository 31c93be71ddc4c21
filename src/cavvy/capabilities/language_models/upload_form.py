"""Reads the form (multipart/form-data) with which a client uploads a file."""

import re
from collections.abc import Callable

_FORM = re.compile(rb'(?i)multipart/form-data\s*;.*?\bboundary=(?:"([^"]+)"|([^\s;"]+))')
_NAME = re.compile(rb'(?i)\r\ncontent-disposition:[^\r]*;\s*name="([^"\r]*)"')
_FILENAME = re.compile(rb'(?i)\r\ncontent-disposition:[^\r]*;\s*filename="([^"\r]*)"')
_FIELDS_MAX, _FIELD_MAX = 50, 65_536  # fields of a form, and bytes of each except the file


def find_boundary(content_type: bytes) -> bytes | None:
    """Return what separates the fields of a form, or None if the type is not that of a form."""
    found = _FORM.match(content_type)
    return (found[1] or found[2]) if found else None


class FormError(Exception):
    """Raised if the body is not a form that can be read."""


class UploadForm:
    """Reads a form whose field `file` is passed on piece by piece to `write`."""

    def __init__(self, boundary: bytes, write: Callable[[bytes], None]) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None  # None: the form has no file
        self.ended = False
        self._mark = b"\r\n--" + boundary
        self._write = write
        self._data = b"\r\n"
        self._name: str | None = ""  # of the part that is read; None: its head is read
        self._value = b""

    def feed(self, data: bytes) -> None:
        """Raises FormError."""
        if self.ended:
            return  # bytes behind a form have no meaning
        self._data += data
        while not self.ended and (self._read_head() if self._name is None else self._read_part()):
            pass

    def _read_head(self) -> bool:
        end = self._data.find(b"\r\n\r\n")
        if end < 0:
            if len(self._data) > _FIELD_MAX:
                raise FormError("the head of a field is too large")
            return False
        head, self._data = self._data[: end + 2], self._data[end + 4 :]
        name, file = _NAME.search(head), _FILENAME.search(head)
        self._name = name[1].decode(errors="replace") if name else ""
        if self._name == "file":
            if self.filename is not None:
                raise FormError("the form has two files")
            self.filename = file[1].decode(errors="replace")[:255] if file else "file"
        if len(self.fields) > _FIELDS_MAX:
            raise FormError(f"the form has more than {_FIELDS_MAX} fields")
        return True

    def _read_part(self) -> bool:
        at = self._data.find(self._mark)
        if at < 0:
            keep = len(self._data) - len(self._mark) + 1
            if keep > 0:
                self._take(self._data[:keep])
                self._data = self._data[keep:]
            return False
        self._take(self._data[:at])
        self._data = self._data[at:]
        if len(self._data) < len(self._mark) + 2:
            return False
        after = self._data[len(self._mark) : len(self._mark) + 2]
        if after not in (b"--", b"\r\n"):
            raise FormError("the form has bytes behind a boundary")
        if self._name and self._name != "file":
            self.fields[self._name] = self._value.decode(errors="replace")
        self._value, self._data = b"", self._data[len(self._mark) :]
        self._name, self.ended = None, after == b"--"
        return True

    def _take(self, data: bytes) -> None:
        if self._name == "file":
            if data:
                self._write(data)
            return
        self._value += data
        if len(self._value) > _FIELD_MAX:
            raise FormError(f"the field {self._name!r} is too large")
