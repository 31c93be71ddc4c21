"""The tools whose files are read."""

from enum import StrEnum


class Dialect(StrEnum):
    """The tool that a file was written for."""

    CAVVY = "Cavvy"
    SKYPILOT = "SkyPilot"
    DSTACK = "dstack"
    KUBERNETES = "Kubernetes"
    SLURM = "Slurm"
    PBS = "PBS"
    COMPOSE = "Compose"
