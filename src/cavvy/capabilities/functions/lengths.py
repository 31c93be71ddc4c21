"""Lengths of time as users write them.

This file also runs on nodes, so it imports only the standard library and files that do.
"""

import re
from datetime import timedelta

from cavvy.sdk.errors import InvalidArgument

Length = str | int | float | timedelta
_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")


def read_length(value: Length, what: str) -> float:
    """Return a length of time in seconds: a number, a timedelta, or a string such as "1h30m".
    Raises InvalidArgument.
    """
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
        return float(value)
    if isinstance(value, str):
        text = value.replace(" ", "")
        parts = _PART.findall(text)
        if parts and "".join(number + unit for number, unit in parts) == text:
            return float(sum(float(number) * _UNITS[unit] for number, unit in parts))
    raise InvalidArgument(
        f"{what}={value!r} is no length of time", 'write it as 90, "90s" or "10m"'
    )
