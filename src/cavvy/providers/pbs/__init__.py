"""The provider for PBS clusters: each gang is one batch job, with an agent on each of its nodes."""

from cavvy.providers.batch.manifest import make_manifest, seconds
from cavvy.providers.settings import text

MANIFEST = make_manifest(
    "pbs",
    "PBS",
    cloud="cavvy.providers.pbs.system:make_provider",
    image="nodes run the work as plain processes, not in images; load environment modules in the "
    "task's `setup`",
    limit="its walltime ends",
    settings=(
        text(
            "queues",
            "The queues to use, separated by commas. If this is unset, Cavvy uses all queues that "
            "accept and start jobs.",
        ).for_setup(),
        text("spot_queues", "Queues whose jobs may be preempted; they are offered as spot."),
        text(
            "gpu",
            "The model of the nodes' GPUs, such as `H100`. Without this setting, Cavvy reads the "
            "model from the node resource that `gpu_resource` names.",
        ),
        text(
            "gpu_resource",
            "The name of the node resource that contains the model of the GPUs.",
            "gpu_type",
        ),
        text(
            "topology",
            "The node resources that `topology` of tasks uses, such as `rack=rack_id`: all nodes "
            "of a job have the same value of the resource (`place=group`).",
        ),
        text(
            "account", "The account for jobs (`-A`). If this is unset, jobs have no `-A` option."
        ).for_setup(),
        text("qsub_options", "Additional options of `qsub`, such as `-P vision`."),
        seconds(
            "kill_delay_s",
            10,
            "How long the cluster waits between SIGTERM and SIGKILL (its `kill_delay`).",
        ),
    ),
)
