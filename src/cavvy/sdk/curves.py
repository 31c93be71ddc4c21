"""`cavvy.log`: reports values of a training script to the agent of its node, so that they become
curves. It uses the socket `$CAVVY_NOTICE`, no network and no package but the standard library.
"""

import base64
import json
import os
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import SupportsFloat

from cavvy.sdk.examples import MOST_BYTES, Example, find_example

_PATIENCE_S = 5.0  # for which a busy agent is waited for
_MOST_BYTES = 60_000  # of a message; the agent reads up to 64 KiB
_PART_BYTES = 40_000  # of a picture or the like in a message, in base64
_DEEPEST = 8  # tables in tables


def log(values: Mapping[str, object], *, step: float | None = None) -> None:
    """Report values, such as `cavvy.log({"loss": 0.3, "acc": 0.9}, step=12)`.

    Values are numbers, or what `float` takes, such as a tensor with one element; NaN and infinity
    are shown as gaps. Pictures of PIL, figures of matplotlib, arrays with two or three dimensions
    and tables of pandas are shown by step, and so are `cavvy.Picture`, `cavvy.Audio`,
    `cavvy.Text`, `cavvy.Table` and `cavvy.Histogram`: up to 1 MiB each. Tables in tables get names
    such as `train/loss`. Without `step`, values are counted. Each process of a node has curves of
    its own, by the variable LOCAL_RANK. Outside a job, nothing is kept, and a note says so once.

    Raises TypeError for a value that is none of these, and ValueError for one that is too large.
    """
    number = None if step is None else _to_float("step", step)
    found = flatten(values)
    examples = {name: each for name, value in found.items() if (each := find_example(value))}
    numbers = {
        name: _to_float(name, value) for name, value in found.items() if name not in examples
    }
    encoded = {name: (each.kind, _encode(name, each)) for name, each in examples.items()}
    if numbers or not encoded:
        _door.send(numbers, number)
    for name, (kind, data) in encoded.items():
        _door.show(name, kind, data, number)


def flatten(values: Mapping[str, object], prefix: str = "", depth: int = 0) -> dict[str, object]:
    """Return the values of tables in tables by name."""
    found: dict[str, object] = {}
    for name, value in values.items():
        full = f"{prefix}{name}"
        if isinstance(value, Mapping) and depth < _DEEPEST:
            found |= flatten(value, f"{full}/", depth + 1)
        else:
            found[full] = value
    return found


def _encode(name: str, example: Example) -> bytes:
    """Raises TypeError, ValueError."""
    try:
        data = example.encode()
    except (TypeError, ValueError, OverflowError, OSError) as error:
        kind = ValueError if isinstance(error, (ValueError, OverflowError)) else TypeError
        raise kind(f"cavvy.log: `{name}` cannot be shown: {error}") from error
    if len(data) > MOST_BYTES:
        raise ValueError(f"cavvy.log: `{name}` has more than {MOST_BYTES:,} bytes")
    return data


def _to_float(name: str, value: object) -> float:
    if isinstance(value, str) or not isinstance(value, SupportsFloat):
        raise TypeError(f"cavvy.log: `{name}` is {value!r:.100}, but must be a number")
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TypeError(
            f"cavvy.log: `{name}` is {value!r:.100}, but must be one number: {error}"
        ) from error


class _Door:
    """The connection to the agent of this node, of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._line: socket.socket | None = None
        self._process = 0  # whose connection it is: a fork needs its own
        self._noted = False

    def send(self, values: Mapping[str, float], step: float | None) -> bool:
        """Send values; return whether an agent took them."""
        path = os.environ.get("CAVVY_NOTICE", "")
        if not path:
            self._note("this is no job of Cavvy")
            return False
        return self._send_all(
            path,
            [
                {"logged": {"values": piece, "step": step, "process": _process()}}
                for piece in _cut(values)
            ],
        )

    def show(self, name: str, kind: str, data: bytes, step: float | None) -> bool:
        """Send what is no number, in parts; return whether an agent took it."""
        path = os.environ.get("CAVVY_NOTICE", "")
        if not path:
            self._note("this is no job of Cavvy")
            return False
        key = os.urandom(8).hex()
        about = {"key": key, "name": name[:1000], "kind": kind, "step": step, "process": _process()}
        parts = range(0, len(data), _PART_BYTES)
        lines = [
            {
                "shown": {
                    **about,
                    "part": base64.b64encode(data[at : at + _PART_BYTES]).decode(),
                    "more": at + _PART_BYTES < len(data),
                }
            }
            for at in parts
        ]
        return self._send_all(path, lines)

    def _send_all(self, path: str, lines: Sequence[object]) -> bool:
        with self._lock:
            for line in lines:
                try:
                    self._write(path, json.dumps(line).encode() + b"\n")
                except OSError as error:
                    self._close()
                    self._note(f"the agent of this node does not answer: {error}")
                    return False
        return True

    def _write(self, path: str, data: bytes) -> None:
        if self._line is None or self._process != os.getpid():
            self._close()
            self._line, self._process = _connect(path), os.getpid()
        self._drop_messages(self._line)
        try:
            self._line.sendall(data)
        except (BrokenPipeError, ConnectionResetError):  # the agent was started again
            self._close()
            self._line = _connect(path)
            self._line.sendall(data)

    def _drop_messages(self, line: socket.socket) -> None:
        """Drop what the agent tells all programs of the task, so that it need not keep it."""
        line.setblocking(False)
        try:
            line.recv(65_536)
        except BlockingIOError:
            pass
        finally:
            line.settimeout(_PATIENCE_S)

    def _close(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    def _note(self, why: str) -> None:
        if not self._noted:
            self._noted = True
            sys.stderr.write(f"note: cavvy.log keeps no values: {why}\n")


def _process() -> int:
    rank = os.environ.get("LOCAL_RANK", "")
    return int(rank) if rank.isdecimal() else 0


def _connect(path: str) -> socket.socket:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    line.settimeout(_PATIENCE_S)
    try:
        line.connect(path)
    except OSError:
        line.close()
        raise
    return line


def _cut(values: Mapping[str, float]) -> list[dict[str, float]]:
    """Return the values in pieces that fit into a message."""
    pieces: list[dict[str, float]] = [{}]
    size = 0
    for name, value in values.items():
        own = 6 * len(name) + 40  # characters may be escaped
        if size + own > _MOST_BYTES and pieces[-1]:
            pieces.append({})
            size = 0
        pieces[-1][name[:1000]] = value
        size += own
    return pieces


_door = _Door()
