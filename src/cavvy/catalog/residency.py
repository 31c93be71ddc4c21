"""Checks that the buckets of a task are in regions that `resources.regions` allows."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from cavvy.catalog.regions import is_region, locate
from cavvy.domain.tasks import CheckpointPolicy, ResourceSpec, TaskSpec, Transfer
from cavvy.domain.values import replace

OUTSIDE_HINT = "use a bucket in an allowed region, or change `resources.regions`"
# the provider that each URL scheme of a bucket belongs to
BUCKET_PROVIDERS = {"s3": "aws", "gs": "gcp", "az": "azure"}
# the cloud in which a managed service runs jobs: its regions, buckets and prices of egress apply
_CLOUDS = {
    "aws-batch": "aws",
    "azure-batch": "azure",
    "azureml": "azure",
    "azureml-endpoints": "azure",
    "azureml-notebooks": "azure",
    "ecs": "aws",
    "sagemaker": "aws",
    "sagemaker-endpoints": "aws",
    "sagemaker-notebooks": "aws",
    "tpu": "gcp",
    "vertex": "gcp",
    "vertex-endpoints": "gcp",
    "vertex-workbench": "gcp",
}


class OutsideBucket(NamedTuple):
    """A bucket in a region that the task does not allow. `field` is "inputs", "outputs" or
    "checkpoint".
    """

    field: str
    url: str
    region: str
    allowed: Sequence[str]

    def __str__(self) -> str:
        return (
            f"{self.url} is in {self.region}, but `resources.regions` allows only "
            f"{', '.join(self.allowed)}"
        )


def find_cloud(provider: str) -> str:
    """Return the cloud of a managed service, or the provider itself for all other providers."""
    return _CLOUDS.get(provider, provider)


def list_outside(
    inputs: Sequence[Transfer],
    outputs: Sequence[Transfer],
    needs: ResourceSpec,
    checkpoint: CheckpointPolicy | None = None,
) -> Iterator[OutsideBucket]:
    """Return the buckets in a region that at least one alternative of the task does not allow."""
    named = [("inputs", each.source, each.region) for each in inputs]
    named += [("outputs", each.target, each.region) for each in outputs]
    if checkpoint is not None and checkpoint.storage is not None:
        named.append(("checkpoint", checkpoint.storage, checkpoint.region))
    return _list_outside(named, needs)


def _list_outside(
    named: Sequence[tuple[str, str, str | None]], needs: ResourceSpec
) -> Iterator[OutsideBucket]:
    for field, url, region in named:
        provider = BUCKET_PROVIDERS.get(urlsplit(url).scheme)
        if provider is None or region is None:
            continue
        for need in needs.choices:
            inside = [each for each in need.regions if is_region(each, provider, region, None)]
            if need.regions and not inside:
                yield OutsideBucket(field, url, region, need.regions)
                break


def list_unplaced(task: TaskSpec) -> Sequence[str]:
    """Return the buckets whose region is unknown. The result is empty if the task allows all
    regions."""
    if not any(need.regions for need in task.resources.choices):
        return ()
    named = [(each.source, each.region) for each in task.inputs]
    named += [(each.target, each.region) for each in task.outputs]
    if task.checkpoint is not None and task.checkpoint.storage is not None:
        named.append((task.checkpoint.storage, task.checkpoint.region))
    return [
        url
        for url, region in dict(named).items()
        if region is None and urlsplit(url).scheme in BUCKET_PROVIDERS
    ]


def is_located(url: str, region: str) -> bool:
    """Return whether the country or the area of a bucket's region is known."""
    return locate(BUCKET_PROVIDERS[urlsplit(url).scheme], region) != (None, None)


def explain_unlocated(found: Mapping[str, str]) -> Mapping[str, str]:
    """Return the reason why a bucket's location is unknown, by the bucket's URL. `found` maps URLs
    to regions. Buckets with a known location are omitted.
    """
    return {
        url: f"the bucket is in {region}, whose location Cavvy does not know"
        for url, region in found.items()
        if not is_located(url, region)
    }


def list_found_outside(task: TaskSpec, found: Mapping[str, str]) -> Iterator[OutsideBucket]:
    """Yield the buckets in regions that at least one alternative of the task does not allow.
    `found` maps URLs to regions. The result omits a bucket if the location of the bucket's region
    is unknown.
    """
    for url in list_unplaced(task):
        region = found.get(url)
        if region is None or not is_located(url, region):
            continue
        field = "inputs" if any(each.source == url for each in task.inputs) else "outputs"
        if all(url not in (each.source, each.target) for each in (*task.inputs, *task.outputs)):
            field = "checkpoint"
        yield from _list_outside([(field, url, region)], task.resources)


def list_unknown(task: TaskSpec) -> Sequence[str]:
    """Return the buckets whose region is unknown but needed, either to check `resources.regions` or
    to compute the price of copies whose size is known.
    """
    ends = [(each, each.source) for each in task.inputs]
    ends += [(each, each.target) for each in task.outputs]
    sized = [url for each, url in ends if each.region is None and each.size_mib is not None]
    buckets = [url for url in sized if urlsplit(url).scheme in BUCKET_PROVIDERS]
    return list(dict.fromkeys([*list_unplaced(task), *buckets]))


def fill_regions(task: TaskSpec, found: Mapping[str, str]) -> TaskSpec:
    """Return the task with the regions in `found` (by URL) for inputs, outputs and checkpoints that
    state no region."""

    def fill(transfer: Transfer, url: str) -> Transfer:
        return replace(transfer, region=transfer.region or found.get(url))

    inputs = tuple(fill(each, each.source) for each in task.inputs)
    outputs = tuple(fill(each, each.target) for each in task.outputs)
    kept = task.checkpoint
    if kept is not None and kept.storage is not None and kept.region is None:
        kept = replace(kept, region=found.get(kept.storage))
    return replace(task, inputs=inputs, outputs=outputs, checkpoint=kept)


def say_unplaced(task: TaskSpec, problems: Mapping[str, str] | None = None) -> str:
    """Return a sentence about the buckets of `list_unplaced`, without a full stop, or "" if there
    are none. After a look-up of regions, `problems` maps each bucket's URL to the reason why its
    region is unknown. If `problems` is given, buckets that are not in `problems` are omitted.
    """
    urls = list_unplaced(task)
    if problems is not None:
        urls = [f"{url} ({problems[url]})" for url in urls if url in problems]
    if not urls:
        return ""
    return (
        f"Cavvy does not know whether these buckets are in `resources.regions`: {', '.join(urls)}; "
        "set `region` of the input, output or checkpoint to the region where the bucket is"
    )
