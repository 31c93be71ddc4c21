"""Joined machines: any machine that reaches the control plane can join with one pasted command."""

from collections.abc import Mapping
from datetime import timedelta

from cavvy.providers.abilities import (
    CHECKS_TASKS,
    CLOSEABLE,
    REPLACES_NODES,
    SERVES_NODES,
    SHARES_HOSTS,
    SIGNALS_CHANGES,
    WHO_AM_I,
)
from cavvy.providers.base import Feature, Manifest
from cavvy.providers.settings import isolation_setting, lost_setting, price_setting

UNSUPPORTED: Mapping[Feature, str] = {
    Feature.SPOT: "joined machines have one price, so there are no spot offers",
    Feature.VOLUMES: "jobs use the existing folders of a machine; no volumes can be attached",
    Feature.NETWORK: "Cavvy neither measures nor configures the network between joined machines",
    Feature.DISK: "jobs share the disk that holds Cavvy's folder on a machine; the type of the "
    "disk cannot be chosen",
    Feature.SELF_END: "an agent ends its work when its lease is over, but the machine stays on",
    Feature.CAPACITY: "free capacity is derived from the jobs' allocations, not reported by the "
    "machines",
}

MANIFEST = Manifest(
    name="join",
    title="machines that joined with a pasted command",
    cloud="cavvy.providers.join.provider:JoinProvider",
    no_project_accounts="a machine joins with a token of the server; there is no other credential",
    unsupported=UNSUPPORTED,
    abilities=(
        SHARES_HOSTS,
        SIGNALS_CHANGES,
        CHECKS_TASKS,
        WHO_AM_I,
        SERVES_NODES,
        REPLACES_NODES,
        CLOSEABLE,
    ),
    visibility_delay=timedelta(0),
    docs="docs/guides/join.md",
    settings=(
        price_setting(),
        isolation_setting(),
        lost_setting(
            "A machine that has not called the server for this long counts as dead: its jobs are "
            "retried elsewhere, and its remaining work is ended when the machine calls again."
        ),
    ),
)
