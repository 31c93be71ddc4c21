"""Removes the values of secrets from a stream of bytes, even if a value is split over several
chunks."""

from __future__ import annotations

import re

# minimum bytes of a value that is hidden; hiding shorter values would make logs unreadable, and the
# gaps would reveal the values
SHORTEST = 4
SHORTEST_LINE = 8  # minimum bytes of a single line of a secret that is hidden on its own
MASK = b"***"


TYPE_CHECKING = False
if TYPE_CHECKING:
    from .documents import WorkConfig


def make_redactor(work: WorkConfig) -> Redactor:
    """Return the redactor for this work's secrets."""
    login = (work.image_login or "").partition(":")[2]
    keys = {value for each in work.inputs for value in each.keys.values()}
    return Redactor([*work.secrets.values(), *([login] if login else []), *keys])


class Redactor:
    """Removes secrets from a stream. `feed` returns the bytes that are safe to show so far; `flush`
    returns the remaining bytes at the end of the stream.
    """

    def __init__(self, secrets: list[str]) -> None:
        values = set()
        for secret in secrets:
            values.add(secret.strip().encode())
            values.update(
                line.strip().encode()
                for line in secret.splitlines()
                if len(line.strip()) >= SHORTEST_LINE
            )
        self._values = sorted(
            (value for value in values if len(value) >= SHORTEST), key=len, reverse=True
        )
        self._pattern = (
            re.compile(b"|".join(re.escape(value) for value in self._values))
            if self._values
            else None
        )
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Return the data, with each complete secret replaced by a mask. The last bytes are held
        until the next call if they may be the beginning of a secret.
        """
        if self._pattern is None:
            return data
        data = self._held + data
        parts, at, hold = [], 0, self._hold_from(data, 0)
        for match in self._pattern.finditer(data):
            if match.start() < at:
                continue
            if match.start() >= hold:  # a longer secret may begin at this position
                break
            parts += [data[at : match.start()], MASK]
            at = match.end()
            if at > hold:
                hold = self._hold_from(data, at)
        self._held = data[hold:]
        return b"".join(parts) + data[at:hold]

    def flush(self) -> bytes:
        """Return the bytes that `feed` has held. The caller calls this method at the end of the
        stream."""
        held, self._held = self._held, b""
        return self._pattern.sub(MASK, held) if self._pattern else held

    def text(self, text: str) -> str:
        """Redact the secrets in a text such as a reason or an event, and repair the text's
        Unicode."""
        data = text.encode("utf-8", "replace")
        return (self._pattern.sub(MASK, data) if self._pattern else data).decode("utf-8", "replace")

    def _hold_from(self, data: bytes, start: int) -> int:
        """Return the first position at or after `start` at which an incomplete secret may begin."""
        longest = 0
        for value in self._values:
            for size in range(min(len(value) - 1, len(data) - start), longest, -1):
                if data.endswith(value[:size]):
                    longest = size
                    break
        return len(data) - longest
