"""What nodes for other clusters contribute."""

from cavvy.frame.capability import Capability, Command

_HERE = "cavvy.capabilities.clusters"
CAPABILITY = Capability(
    name="clusters",
    summary="Let clusters of Kubernetes and Slurm order nodes from a pool.",
    commands=(
        Command(
            name="pool serve-kubernetes",
            place=f"{_HERE}.kubernetes:serve",
            summary="Let the autoscaler of a Kubernetes cluster order nodes from pools.",
        ),
        Command(
            name="pool slurm-conf",
            place=f"{_HERE}.slurm:conf",
            summary="Print how Slurm orders nodes from a pool.",
        ),
        Command(
            name="pool slurm-resume",
            place=f"{_HERE}.slurm:resume",
            summary="Order nodes for Slurm, which calls this.",
        ),
        Command(
            name="pool slurm-suspend",
            place=f"{_HERE}.slurm:suspend",
            summary="Release nodes of Slurm, which calls this.",
        ),
    ),
    docs=("reference/cluster-pools.md",),
    routes=(f"{_HERE}.routes:router",),
)
