"""What the manifests of managed services of one family have in common: jobs, endpoints and
notebooks. The module imports nothing that calls a service.

Arguments that are pages are addresses of the cloud's documentation, for the reasons why features
are missing.
"""

from collections.abc import Mapping
from datetime import timedelta
from functools import partial

from cavvy.providers.abilities import (
    ANSWERS_REQUESTS,
    CHECKS_TASKS,
    CLOSEABLE,
    RUNS_AGENTS_HERE,
    WHO_AM_I,
)
from cavvy.providers.base import Feature, Manifest, explain_results
from cavvy.providers.vm.abilities import TOGETHER

JobManifest = partial(
    Manifest,
    layer="cavvy.providers.managed.provider:make_provider",
    abilities=TOGETHER,
    visibility_delay=timedelta(minutes=1),
)
NotebookManifest = partial(JobManifest, docs="docs/guides/notebooks.md", only_sessions=True)
EndpointManifest = partial(
    Manifest,
    docs="docs/guides/managed-endpoints.md",
    layer="cavvy.providers.managed.endpoint_provider:make_provider",
    abilities=(CHECKS_TASKS, WHO_AM_I, CLOSEABLE, RUNS_AGENTS_HERE, ANSWERS_REQUESTS),
    only_services=True,
    visibility_delay=timedelta(minutes=1),
    options={"image": "the image for this task; see the setting `image`"},
)


def list_unsupported_by_jobs(job: str, *, page: str, disk: str) -> Mapping[Feature, str]:
    """Return the features that the jobs of managed services lack. `job` is the service's word for a
    job, with an article, such as "a training job". `page` is a page about it, and `disk` a page
    about its disk.
    """
    return {
        Feature.BUILD: f"{job} is a container, and Cavvy does not let this container start other "
        f"containers ({page})",
        Feature.TUNNEL: f"{job} is a container without the permission to create a WireGuard "
        f"interface ({page})",
        Feature.REPAIR: f"the instances of {job} are requested together, and none of them can be "
        f"replaced ({page})",
        Feature.RESULTS: explain_results(
            f"the disk of {job} is deleted when the job ends ({disk})", "the job"
        ),
    }


def list_unsupported_by_endpoints(
    service: str, *, container: str, api: str
) -> Mapping[Feature, str]:
    """Return the features that managed endpoints lack. `service` is the name of the service.
    `container` is a page about containers, and `api` a page about the fields of endpoints.
    """
    alone = f"an endpoint runs the image alone, without Cavvy's agent ({container})"
    return {
        Feature.GANG: "the instances of an endpoint do not work together on a request; "
        f"`service.replicas` creates more endpoints ({api})",
        Feature.BUILD: alone,
        Feature.CAPACITY: f"{service} does not report free capacity; an endpoint without capacity "
        f"fails, and Cavvy tries the next best offer ({api})",
        Feature.VOLUMES: f"an endpoint attaches no disks of the task ({api})",
        Feature.MOUNTS: f"an endpoint mounts no folders ({api})",
        Feature.NETWORK: f"{service} does not report the speed of the network, and offers no "
        f"choice of networks ({api})",
        Feature.DISK: f"{service} selects the type of the disk ({api})",
        Feature.SELF_END: "an endpoint is billed until it is deleted, and contains nothing that "
        f"could delete it ({api})",
        Feature.RESULTS: alone,
        Feature.NOTICE: f"an endpoint is not reclaimed, because it is not spot ({api})",
    }


def list_unsupported_by_notebooks(
    service: str, notebook: str, *, images: str, api: str, deletion: str
) -> Mapping[Feature, str]:
    """Return the features that managed notebooks lack. `notebook` is the service's word for a
    notebook, with an article, such as "a notebook instance". Three arguments are pages: `images`
    about the images of notebooks, `api` about the call that creates a notebook, and `deletion`
    about the objects that are deleted with a notebook.
    """
    image = f"{notebook} has {service}'s own image ({images})"
    return {
        Feature.IMAGE: image,
        Feature.BUILD: image,
        Feature.LOGIN: image,
        Feature.SPOT: f"{service}'s API has no spot option for {notebook} ({api})",
        Feature.CAPACITY: f"{service} does not report free capacity; {notebook} without capacity "
        f"fails, and Cavvy tries the next best offer ({api})",
        Feature.REPAIR: f"a session has one node, {notebook} ({api})",
        Feature.RESULTS: f"{notebook} is deleted with its disk when the session ends ({deletion}). "
        "If the server is unreachable when the session ends, the results are stored in the bucket "
        "in `checkpoint.storage` or `server.results_url`",
        Feature.NOTICE: f"{notebook} is not reclaimed, because there is no spot option ({api})",
    }
