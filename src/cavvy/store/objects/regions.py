"""Finds the regions of buckets by asking their storages, within a time limit for all of them."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooSlow
from dataclasses import dataclass
from datetime import datetime
from threading import Thread

from cavvy.store.objects.base import ObjectDenied, ObjectError
from cavvy.store.objects.locations import open_place
from cavvy.store.objects.s3 import XmlBucket

_OWN_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRegions:
    """The regions of the buckets that told one, and the reasons why the others did not, by URL."""

    regions: Mapping[str, str]
    problems: Mapping[str, str]


def find_regions(
    urls: Sequence[str], keys: Mapping[str, str], now: Callable[[], datetime], patience_s: float
) -> FoundRegions:
    """Ask for the region of each bucket; blocks for at most `patience_s` seconds in total."""
    asked = {url: _start(url, keys, now) for url in dict.fromkeys(urls)}
    until = time.monotonic() + patience_s
    regions, problems = dict[str, str](), dict[str, str]()
    for url, answer in asked.items():
        try:
            regions[url] = answer.result(max(0.0, until - time.monotonic()))
        except TooSlow:
            problems[url] = f"the storage did not answer within {patience_s:g} s"
        except ObjectError as error:
            problems[url] = str(error)
    return FoundRegions(regions=regions, problems=problems)


def find_region(url: str, keys: Mapping[str, str], now: Callable[[], datetime]) -> str:
    """The region of a bucket in lower case, such as `eu-west-1`; `eu` for a multi-region of Google.
    Raises ObjectError, with the reason, for a storage that does not tell it.
    """
    if url.startswith("s3:") and any(keys.get(each) for each in _OWN_ENDPOINTS):
        raise ObjectDenied("the bucket is at an endpoint of its own, and not at AWS")
    place = open_place(url, keys, now).place
    if not isinstance(place, XmlBucket):
        raise ObjectDenied("the storage does not tell its region")
    return place.region()


def _start(url: str, keys: Mapping[str, str], now: Callable[[], datetime]) -> "Future[str]":
    """Look the region up in a thread of its own, which does not delay the end of the process."""
    found: Future[str] = Future()

    def run() -> None:
        try:
            found.set_result(find_region(url, keys, now))
        except Exception as error:  # noqa: BLE001 - raised again by the caller
            found.set_exception(error)

    Thread(target=run, name="bucket-region", daemon=True).start()
    return found
