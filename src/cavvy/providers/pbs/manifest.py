"""The manifest of the PBS provider."""

from cavvy.providers.batch.manifest import make_manifest, seconds
from cavvy.providers.settings import text

MANIFEST = make_manifest(
    "pbs",
    "PBS",
    image="a cluster's nodes start the agent as a plain process; load what the task needs in its "
    "`setup`",
    limit="its walltime ends",
    settings=(
        text(
            "queues",
            "Names separated by commas; only these are used. Unset: all that accept and start "
            "jobs.",
        ),
        text(
            "spot_queues", "Names of queues whose jobs may be preempted; they are offered as spot."
        ),
        text("gpu", "The model of the nodes' GPUs, such as `H100`. Unset: `gpu_resource` says."),
        text(
            "gpu_resource",
            "The resource in which the cluster's nodes name the model of their GPUs.",
            "gpu_type",
        ),
        text("account", "The account that jobs are charged to (`-A`). Unset: none is named."),
        text("qsub_options", "More options of `qsub`, such as `-P vision`."),
        seconds(
            "kill_delay_s",
            10,
            "How long the cluster waits between SIGTERM and SIGKILL (its `kill_delay`).",
        ),
    ),
)
