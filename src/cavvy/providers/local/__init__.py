"""The provider for this machine: jobs use its CPUs, memory and accelerators; agents are
processes.
"""

from collections.abc import Mapping
from datetime import timedelta

from cavvy.providers.abilities import (
    CHECKS_TASKS,
    CLOSEABLE,
    HOLDS_VOLUMES,
    KEEPS_FOLDERS,
    REPLACES_NODES,
    SHARES_HOSTS,
    SIGNALS_CHANGES,
    WHO_AM_I,
)
from cavvy.providers.base import Feature, Manifest
from cavvy.providers.settings import flag, isolation_setting, number

UNSUPPORTED: Mapping[Feature, str] = {
    Feature.SPOT: "this machine has no cheaper preemptible capacity, so it has no spot offers",
    Feature.NETWORK: "all ranks are on one machine, whose network Cavvy does not measure",
    Feature.DISK: "jobs share the disk that holds Cavvy's folder; the type of the disk cannot be "
    "chosen",
    Feature.SELF_END: "an agent ends its work when its lease is over, but the machine stays on",
    Feature.CAPACITY: "free capacity is derived from the jobs' allocations, not reported by the "
    "machine",
    Feature.NOTICE: "this machine is never reclaimed; when it shuts down, the operating system "
    "gives processes only a short notice",
}

MANIFEST = Manifest(
    name="local",
    title="this machine",
    cloud="cavvy.providers.local.provider:LocalProvider",
    no_project_accounts="this provider is the server's own machine, and needs no credential",
    unsupported=UNSUPPORTED,
    abilities=(
        SHARES_HOSTS,
        SIGNALS_CHANGES,
        HOLDS_VOLUMES,
        KEEPS_FOLDERS,
        CHECKS_TASKS,
        WHO_AM_I,
        REPLACES_NODES,
        CLOSEABLE,
    ),
    shares_files=True,
    makes_volumes=True,
    visibility_delay=timedelta(0),
    docs="docs/guides/this-machine.md",
    settings=(
        number(
            "price_usd_hr",
            "Jobs pay this price for each accelerator that they use, or once if they use none. "
            "If the price is above 0, a job needs consent to costs, as for any paid offer.",
            default=0,
            unit="USD per hour",
        ),
        number(
            "cpus",
            "The maximum number of CPUs for all jobs together. The default is all CPUs that the "
            "server may use.",
            minimum=0.1,
            unit="CPUs",
        ),
        number(
            "memory_gib",
            "The maximum memory for all jobs together. The default is all memory that the server "
            "may use.",
            minimum=0.1,
            unit="GiB",
        ),
        flag(
            "accelerators", "If `false`, this machine's accelerators are not offered.", default=True
        ),
        flag(
            "hide_server",
            "If `true`, jobs and the commands that users run in them do not see the server's "
            "folder with its token, key and database. Without an image, jobs also cannot change "
            "settings, programs and start files of the machine, its user and Cavvy, and cannot "
            "gain privileges: `mount`, `sudo` and `apt-get` fail. This needs Linux namespaces; "
            "`cavvy check local` shows whether they are available. A task with an image is refused "
            "if one of the task's volumes contains the server's folder.",
            default=True,
        ),
        isolation_setting(),
        flag(
            "hand_over_checkpoints",
            "If `true`, what jobs have finished in their checkpoint folders is uploaded to the "
            "server, as on a remote machine, and a job killed during a save continues from the "
            "previous version of the file. If `false`, jobs write to the server's own folder and "
            "continue from the files there, also from a file that a kill has cut short.",
        ),
    ),
)
