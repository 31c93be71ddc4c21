"""The parts that the manifests of all managed endpoints share."""

from collections.abc import Mapping

from cavvy.providers.abilities import (
    ANSWERS_REQUESTS,
    CHECKS_TASKS,
    CLOSEABLE,
    RUNS_AGENTS_HERE,
    WHO_AM_I,
)
from cavvy.providers.base import Feature

ENDPOINT_ABILITIES = (CHECKS_TASKS, WHO_AM_I, CLOSEABLE, RUNS_AGENTS_HERE, ANSWERS_REQUESTS)


def list_unsupported_of_endpoints(cloud: str, *, container: str, api: str) -> Mapping[Feature, str]:
    """Return the features that managed endpoints lack, with the reasons. `container` is the cloud's
    page about containers, and `api` is the cloud's page about the fields of endpoints.
    """
    alone = f"an endpoint runs the image alone, without Cavvy's agent ({container})"
    return {
        Feature.GANG: "the instances of an endpoint do not work together on a request; "
        f"`service.replicas` creates more endpoints ({api})",
        Feature.BUILD: alone,
        Feature.CAPACITY: f"{cloud} does not report free capacity; an endpoint without capacity "
        f"fails, and Cavvy tries the next best offer ({api})",
        Feature.VOLUMES: f"an endpoint attaches no disks of the task ({api})",
        Feature.MOUNTS: f"an endpoint mounts no folders ({api})",
        Feature.NETWORK: f"{cloud} does not report the speed of the network, and offers no choice "
        f"of networks ({api})",
        Feature.DISK: f"{cloud} selects the type of the disk ({api})",
        Feature.SELF_END: "an endpoint is billed until it is deleted, and contains nothing that "
        f"could delete it ({api})",
        Feature.RESULTS: alone,
        Feature.NOTICE: f"an endpoint is not reclaimed, because it is not spot ({api})",
    }
