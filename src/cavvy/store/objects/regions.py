"""Requests the regions of buckets from their storages, within one time limit for all requests."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial

from cavvy.domain.values import Struct
from cavvy.store.objects.azure import AzureContainer
from cavvy.store.objects.azure_regions import AzureDirectory
from cavvy.store.objects.base import ObjectDenied
from cavvy.store.objects.deadline import call_all
from cavvy.store.objects.locations import open_place
from cavvy.store.objects.s3 import XmlBucket

# the endpoints in the cloud whose accounts AzureDirectory can query
_AZURE = ".blob.core.windows.net"
_OWN_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")


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
