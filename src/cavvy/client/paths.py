"""The paths, queries and keys of requests."""

import os
import re
import time
from collections.abc import Collection

from cavvy.client.errors import ApiError

# IDs of jobs: 16 characters of Crockford's base 32 in lower case. The first ten characters of an
# ID encode the time at which the ID was created.
#
# Clients also use IDs of this form as idempotency keys, so that a repeated submission creates only
# one job.
DIGITS = "0123456789abcdefghjkmnpqrstvwxyz"
# Number of digits of each part. Ten digits hold 50 bits of milliseconds, which is enough until the
# year 37648.
_TIME, _RANDOM = 10, 6
_FORM = re.compile(f"[{DIGITS}]{{{_TIME + _RANDOM}}}")
PATTERN = f"^{_FORM.pattern}$"


def make_id(now_s: float, noise: bytes) -> str:
    """Create an ID. IDs sort by time. `now_s` is in seconds since 1970; `noise` consists of at
    least four random bytes.
    """
    return _write_id(now_s, int.from_bytes(noise[:4], "big") >> 2)


def _write_id(now_s: float, random: int) -> str:
    number = (round(now_s * 1000) << (5 * _RANDOM)) | random
    digits = []
    for _ in range(_TIME + _RANDOM):
        number, digit = divmod(number, 32)
        digits.append(DIGITS[digit])
    return "".join(reversed(digits))


def make_key() -> str:
    """Create an idempotency key for one submission and its retries."""
    return make_id(time.time(), os.urandom(4))


def make_keys(count: int) -> list[str]:
    """Create the idempotency keys of the tasks of one request. They are different, and in the order
    in which their jobs wait."""
    from random import SystemRandom

    now_s = time.time()
    random = sorted(SystemRandom().sample(range(1 << (5 * _RANDOM)), count))
    return [_write_id(now_s, each) for each in random]


def read_time(job_id: str) -> float | None:
    """Return the time that an ID encodes, in seconds since 1970. Returns None if the text is not an
    ID.
    """
    if not _FORM.fullmatch(job_id):
        return None
    number = 0
    for digit in job_id[:_TIME]:
        number = number * 32 + DIGITS.index(digit)
    return number / 1000


_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")


def quote(text: str) -> str:
    """Percent-encode one path segment or query value."""
    return "".join(chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in text.encode())


def query(**values: object) -> str:
    """Return the query part of a URL. A list becomes one key-value pair per item. Values that are
    None or False are left out.
    """
    pairs = [
        f"{name}={quote(_plain_text(each))}"
        for name, value in values.items()
        for each in (
            value if isinstance(value, Collection) and not isinstance(value, str) else [value]
        )
        if each is not None and each is not False
    ]
    return "?" + "&".join(pairs) if pairs else ""


def _plain_text(value: object) -> str:
    if value is True:
        return "true"
    return f"{value:g}" if isinstance(value, float) else str(value)


def machine_path(project: str, name: str) -> str:
    return f"{project_path(project)}/machines/{segment('machine', name)}"


def project_path(name: str) -> str:
    return f"/v1/projects/{segment('project', name)}"


def job_path(project: str, name: str) -> str:
    return f"{project_path(project)}/jobs/{segment('job', name)}"


def segment(kind: str, name: str) -> str:
    """Return a name as one segment of a path. Raises ApiError if the name would change the rest of
    the path."""
    if name.strip(".") and "/" not in name:
        return quote(name)
    raise ApiError("invalid-request", f"{name!r} cannot be the name of a {kind}", status=422)
