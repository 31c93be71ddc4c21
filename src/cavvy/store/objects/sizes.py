"""Measures data in buckets by listing the objects, within one time limit for all listings."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial

from cavvy.store.objects import locations
from cavvy.store.objects.base import ObjectDenied, ObjectError, ObjectMissing
from cavvy.store.objects.deadline import call_all

BUCKETS = ("s3://", "gs://", "az://")  # only data at URLs that start like this can be measured
_MOST_PAGES = 50  # maximum number of listing pages, of 1,000 objects each
_MIB = 1 << 20


def find_sizes(
    urls: Sequence[str], keys: Mapping[str, str], now: Callable[[], datetime], patience_s: float
) -> Mapping[str, int | ObjectError]:
    """Return, for each URL, the size of its objects in MiB or the reason why the size is unknown.
    The call blocks for at most `patience_s` seconds in total.
    """
    return call_all({url: partial(_measure, url, keys, now) for url in urls}, patience_s)


def _measure(url: str, keys: Mapping[str, str], now: Callable[[], datetime]) -> int:
    """Return the size of the objects at the URL in MiB. Raises ObjectError."""
    if not url.startswith(BUCKETS):
        raise ObjectDenied("the objects cannot be listed from this server")
    opened = locations.open_place(url, keys, now)
    place, key, total, after = opened.place, opened.key, 0, ""
    one = place.head(key) if key and not key.endswith("/") else None
    if one is not None and one.size is not None:
        return max(1, round(one.size / _MIB))
    prefix = key if key.endswith("/") or not key else f"{key}/"
    for _ in range(_MOST_PAGES):
        objects, after = place.list(prefix, after)
        total += sum(each.size or 0 for each in objects)
        if not after:
            break
    else:
        raise ObjectDenied(f"the URL has more than {_MOST_PAGES * 1000:,} objects")
    if not total:
        raise ObjectMissing("no object exists there")
    return max(1, round(total / _MIB))
