"""The manifest of this provider; imports nothing that reads the machine."""

from collections.abc import Mapping
from datetime import timedelta

from cavvy.providers.abilities import (
    CHECKS_TASKS,
    CLOSEABLE,
    SHARES_HOSTS,
    SIGNALS_CHANGES,
    WHO_AM_I,
)
from cavvy.providers.base import Feature, Manifest
from cavvy.providers.settings import flag, number

UNSUPPORTED: Mapping[Feature, str] = {
    Feature.SPOT: "this machine is never taken away for a lower price, so it has no spot offers",
    Feature.VOLUMES: "this machine has no volumes to attach by name; give the `host` folder or the "
    "`nfs` export",
    Feature.NETWORK: "all ranks are on one machine, whose network Cavvy does not measure",
    Feature.DISK: "jobs share the disk that holds Cavvy's folder; its type cannot be chosen",
    Feature.SELF_END: "an agent ends its work when its lease is over, but the machine stays on",
    Feature.CAPACITY: "what is free is known from the jobs that hold it, not from the machine",
    Feature.NOTICE: "nothing takes this machine away; a shutdown gives processes only its own "
    "short notice",
}

MANIFEST = Manifest(
    name="local",
    title="this machine",
    docs="docs/guides/this-machine.md",
    unsupported=UNSUPPORTED,
    abilities=(SHARES_HOSTS, SIGNALS_CHANGES, CHECKS_TASKS, WHO_AM_I, CLOSEABLE),
    shares_files=True,
    visibility_delay=timedelta(0),
    settings=(
        number(
            "price_usd_hr",
            "Jobs are charged this for each accelerator that they hold, or once if "
            "they hold none. "
            "Above 0 a job needs consent as on any paid offer.",
            default=0,
            unit="USD per hour",
        ),
        number(
            "cpus",
            "Jobs together get at most this many CPUs. Unset: all that the server may use.",
            minimum=0.1,
            unit="CPUs",
        ),
        number(
            "memory_gib",
            "Jobs together get at most this much memory. Unset: all that the server may use.",
            minimum=0.1,
            unit="GiB",
        ),
        flag("accelerators", "`false` offers none of this machine's accelerators.", default=True),
        flag(
            "hand_over_checkpoints",
            "`true`: checkpoints are handed to the server whole, as from a machine "
            "elsewhere, and a job "
            "that is killed while it writes one goes on from the one before. `false`: jobs write "
            "to the server's own "
            "folder and continue from the files there.",
        ),
    ),
)
