"""Checks that the buckets of a task are in the regions that `resources.regions` allows."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from cavvy.catalog.regions import is_region
from cavvy.domain.tasks import Resources, Task, Transfer

# the provider of a bucket by its URL scheme
BUCKET_PROVIDERS = {"s3": "aws", "gs": "gcp", "az": "azure"}


class OutsideBucket(NamedTuple):
    """A bucket in a region that the task does not allow. `field` is "inputs" or "outputs"."""

    field: str
    url: str
    region: str
    allowed: Sequence[str]

    def __str__(self) -> str:
        return (
            f"{self.url} is in {self.region}, but `resources.regions` allows only "
            f"{', '.join(self.allowed)}"
        )


def list_outside(
    inputs: Sequence[Transfer], outputs: Sequence[Transfer], needs: Resources
) -> Iterator[OutsideBucket]:
    """The buckets whose stated region one of the task's alternatives does not allow."""
    named = [("inputs", each.source, each.region) for each in inputs]
    named += [("outputs", each.target, each.region) for each in outputs]
    for field, url, region in named:
        provider = BUCKET_PROVIDERS.get(urlsplit(url).scheme)
        if provider is None or region is None:
            continue
        for need in needs.choices:
            inside = [each for each in need.regions if is_region(each, provider, region, None)]
            if need.regions and not inside:
                yield OutsideBucket(field, url, region, need.regions)
                break


def list_unplaced(task: Task) -> Sequence[str]:
    """The buckets whose region is unknown although the task allows only some regions."""
    if not any(need.regions for need in task.resources.choices):
        return ()
    named = [(each.source, each.region) for each in task.inputs]
    named += [(each.target, each.region) for each in task.outputs]
    if task.checkpoint is not None and task.checkpoint.storage is not None:
        named.append((task.checkpoint.storage, None))
    return [
        url
        for url, region in dict(named).items()
        if region is None and urlsplit(url).scheme in BUCKET_PROVIDERS
    ]


def say_unplaced(task: Task) -> str:
    """A sentence about the buckets of `list_unplaced`, without a full stop; "" if there are
    none.
    """
    urls = list_unplaced(task)
    if not urls:
        return ""
    return (
        f"Cavvy does not know whether these buckets are in `resources.regions`: {', '.join(urls)}; "
        "`region` of an input or output states it"
    )
