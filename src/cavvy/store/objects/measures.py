"""Requests the regions of buckets, and measures data in buckets by listing the objects. Several
calls to storage services run at the same time, with one time limit for all calls.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import TimeoutError as TooSlow
from datetime import datetime
from functools import partial
from typing import TypeVar

from cavvy.domain.values import Struct
from cavvy.store.objects import locations
from cavvy.store.objects.azure import AzureContainer, AzureDirectory
from cavvy.store.objects.base import ObjectDenied, ObjectError, ObjectMissing, ObjectTryAgain
from cavvy.store.objects.locations import open_place
from cavvy.store.objects.s3 import XmlBucket
from cavvy.store.objects.threads import start_apart

T = TypeVar("T")
# the endpoints in the cloud whose accounts AzureDirectory can query
_AZURE = ".blob.core.windows.net"
_OWN_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
# only data at URLs that start like this can be measured
MEASURED = ("s3://", "gs://", "az://", "hf://")
_MOST_PAGES = 50  # maximum number of listing pages, of 1,000 objects each
_MIB = 1 << 20


def call_all(
    calls: Mapping[str, Callable[[], T]], patience_s: float
) -> Mapping[str, T | ObjectError]:
    """Make the calls, and return the result or the error of each call; block for at most
    `patience_s` seconds in total. A call that has no result within this time gets the result
    ObjectTryAgain. The call's thread continues, but does not delay the end of the process.
    """
    asked = {name: start_apart(call, "storage-call") for name, call in calls.items()}
    until = time.monotonic() + patience_s
    found: dict[str, T | ObjectError] = {}
    for name, answer in asked.items():
        left = max(0.0, until - time.monotonic())
        try:
            found[name] = answer.result(left)
        except TooSlow:
            found[name] = ObjectTryAgain(f"the storage did not answer within {patience_s:g} s")
        except ObjectError as error:
            found[name] = error
    return found


class FoundRegions(Struct, frozen=True, kw_only=True):
    """Maps the URL of each bucket either to its region in `regions` or, if the storage reports
    none, to the reason in `problems`.
    """

    regions: Mapping[str, str]
    problems: Mapping[str, str]


def find_regions(
    urls: Sequence[str], keys: Mapping[str, str], now: Callable[[], datetime], patience_s: float
) -> FoundRegions:
    """Query the region of each bucket; block for at most `patience_s` seconds in total."""
    calls = {url: partial(find_region, url, keys, now) for url in urls}
    answers = call_all(calls, patience_s)
    return FoundRegions(
        regions={url: each for url, each in answers.items() if isinstance(each, str)},
        problems={url: str(each) for url, each in answers.items() if not isinstance(each, str)},
    )


def find_region(url: str, keys: Mapping[str, str], now: Callable[[], datetime]) -> str:
    """Return the region of a bucket in lower case, such as `eu-west-1`; `eu` for a multi-region of
    Google. Raises ObjectError, with the reason, for a storage that does not report its region.
    """
    if url.startswith("s3:") and any(keys.get(each) for each in _OWN_ENDPOINTS):
        raise ObjectDenied("the bucket has a custom endpoint that does not belong to AWS")
    place = open_place(url, keys, now).place
    if isinstance(place, AzureContainer):
        if not place.root.endswith(_AZURE):
            raise ObjectDenied("the container has a custom endpoint that does not belong to Azure")
        return AzureDirectory().find_region(place.account, keys)
    if not isinstance(place, XmlBucket):
        raise ObjectDenied("the storage does not report its region")
    return place.region()


def find_sizes(
    urls: Sequence[str], keys: Mapping[str, str], now: Callable[[], datetime], patience_s: float
) -> Mapping[str, int | ObjectError]:
    """Return, for each URL, the size of its objects in MiB or the reason why the size is unknown.
    The call blocks for at most `patience_s` seconds in total.
    """
    return call_all({url: partial(_measure, url, keys, now) for url in urls}, patience_s)


def _measure(url: str, keys: Mapping[str, str], now: Callable[[], datetime]) -> int:
    """Return the size of the objects at the URL in MiB. Raises ObjectError."""
    if not url.startswith(MEASURED):
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
