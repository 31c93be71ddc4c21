"""Builds the manifests of managed services. The module imports nothing that calls a service.

Pages are addresses of the cloud's documentation, for the reasons why features are missing.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta

from cavvy.providers.abilities import (
    ANSWERS_REQUESTS,
    CHECKS_TASKS,
    CLOSEABLE,
    RUNS_AGENTS_HERE,
    WHO_AM_I,
)
from cavvy.providers.base import Feature, Manifest, ProviderSetting
from cavvy.providers.vm.abilities import ABILITIES

JOB_LAYER = "cavvy.providers.managed.provider:make_provider"
_ENDPOINT_LAYER = "cavvy.providers.managed.endpoint_provider:make_provider"
_LISTED = timedelta(minutes=1)  # see `Manifest.visibility_delay`


def list_unsupported_by_jobs(job: str, *, page: str, disk: str) -> Mapping[Feature, str]:
    """Return the features that the jobs of managed services lack. `job` is the service's word for a
    job, such as "a training job". `page` is a page about it, and `disk` a page about its disk.
    """
    return {
        Feature.BUILD: f"{job} is a container, and Cavvy does not let this container start other "
        f"containers ({page})",
        Feature.TUNNEL: f"{job} is a container without the permission to create a WireGuard "
        f"interface ({page})",
        Feature.RESULTS: f"the disk of {job} is deleted when the job ends ({disk}). If the "
        "server is unreachable when the work ends, the results are stored in the bucket in "
        "`checkpoint.storage` or `server.results_url`; without a bucket, the job waits until its "
        "lease ends",
    }


def make_endpoint_manifest(
    name: str,
    title: str,
    *,
    service: str,
    cloud: str,
    rights: str,
    container: str,
    api: str,
    spot: str,
    login: str,
    settings: Sequence[ProviderSetting],
    project_settings: Sequence[str],
    project_key: str = "",
) -> Manifest:
    """Return the manifest of managed endpoints. `service` is the name of the service in reasons.
    `container` is the cloud's page about containers, and `api` the page about the fields of
    endpoints. `spot` and `login` are the reasons why these features are missing. For the other
    arguments, see `Manifest`.
    """
    alone = f"an endpoint runs the image alone, without Cavvy's agent ({container})"
    return Manifest(
        name=name,
        title=title,
        cloud=cloud,
        layer=_ENDPOINT_LAYER,
        docs="docs/guides/managed-endpoints.md",
        abilities=(CHECKS_TASKS, WHO_AM_I, CLOSEABLE, RUNS_AGENTS_HERE, ANSWERS_REQUESTS),
        settings=settings,
        project_settings=project_settings,
        project_key=project_key,
        only_services=True,
        visibility_delay=_LISTED,
        rights=rights,
        options={"image": "the image for this task; see the setting `image`"},
        unsupported={
            Feature.GANG: "the instances of an endpoint do not work together on a request; "
            f"`service.replicas` creates more endpoints ({api})",
            Feature.BUILD: alone,
            Feature.CAPACITY: f"{service} does not report free capacity; an endpoint without "
            f"capacity fails, and Cavvy tries the next best offer ({api})",
            Feature.VOLUMES: f"an endpoint attaches no disks of the task ({api})",
            Feature.MOUNTS: f"an endpoint mounts no folders ({api})",
            Feature.NETWORK: f"{service} does not report the speed of the network, and offers no "
            f"choice of networks ({api})",
            Feature.DISK: f"{service} selects the type of the disk ({api})",
            Feature.SELF_END: "an endpoint is billed until it is deleted, and contains nothing "
            f"that could delete it ({api})",
            Feature.RESULTS: alone,
            Feature.NOTICE: f"an endpoint is not reclaimed, because it is not spot ({api})",
            Feature.SPOT: spot,
            Feature.LOGIN: login,
        },
    )


def make_notebook_manifest(
    name: str,
    title: str,
    *,
    service: str,
    notebook: str,
    cloud: str,
    rights: str,
    images: str,
    api: str,
    deletion: str,
    unsupported: Mapping[Feature, str],
    settings: Sequence[ProviderSetting],
    project_settings: Sequence[str],
    project_key: str = "",
) -> Manifest:
    """Return the manifest of managed notebooks. `service` is the name of the service in reasons,
    and `notebook` its word for a notebook, with an article, such as "a notebook instance". Three
    arguments are pages of the service's documentation: `images` about the images of notebooks,
    `api` about the call that creates a notebook, and `deletion` about the objects that are deleted
    with a notebook. `unsupported` contains further reasons. For the other arguments, see
    `Manifest`.
    """
    image = f"{notebook} has {service}'s own image ({images})"
    return Manifest(
        name=name,
        title=title,
        cloud=cloud,
        layer=JOB_LAYER,
        docs="docs/guides/notebooks.md",
        abilities=ABILITIES,
        settings=settings,
        project_settings=project_settings,
        project_key=project_key,
        only_sessions=True,
        visibility_delay=_LISTED,
        rights=rights,
        unsupported={
            Feature.IMAGE: image,
            Feature.BUILD: image,
            Feature.LOGIN: image,
            Feature.SPOT: f"{service}'s API has no spot option for {notebook} ({api})",
            Feature.CAPACITY: f"{service} does not report free capacity; {notebook} without "
            f"capacity fails, and Cavvy tries the next best offer ({api})",
            Feature.RESULTS: f"{notebook} is deleted with its disk when the session ends "
            f"({deletion}). If the server is unreachable when the session ends, the results are "
            "stored in the bucket in `checkpoint.storage` or `server.results_url`",
            Feature.NOTICE: f"{notebook} is not reclaimed, because there is no spot option ({api})",
            **unsupported,
        },
    )
