"""IDs of jobs: 16 characters of Crockford's base 32 in lower case. The first ten characters of an
ID encode the time at which the ID was created.

Clients also use IDs of this form as idempotency keys, so that a repeated submission creates only
one job.
"""

import os
import re
import time

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
    random = int.from_bytes(noise[:4], "big") >> 2
    number = (round(now_s * 1000) << (5 * _RANDOM)) | random
    digits = []
    for _ in range(_TIME + _RANDOM):
        number, digit = divmod(number, 32)
        digits.append(DIGITS[digit])
    return "".join(reversed(digits))


def make_key() -> str:
    """Create an idempotency key for one submission and its retries."""
    return make_id(time.time(), os.urandom(4))


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
