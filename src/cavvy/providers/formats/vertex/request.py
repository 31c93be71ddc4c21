"""Builds the specification of a custom job of Vertex AI.

Fields and limits are from the discovery document of aiplatform v1.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from enum import StrEnum
from math import ceil
from typing import Any

from cavvy.domain.values import Struct, field
from cavvy.providers.formats.program import escape_references

VARIABLES = 100  # maximum number of variables of a container
ANY_RESERVATION = "ANY_RESERVATION"  # any reservation that fits the machines

# (the catalog's name, memory in GiB or 0 if there is only one size) -> accelerator type in
# MachineSpec
_ACCELERATORS = {
    ("P4", 0): "NVIDIA_TESLA_P4",
    ("P100", 0): "NVIDIA_TESLA_P100",
    ("V100", 0): "NVIDIA_TESLA_V100",
    ("T4", 0): "NVIDIA_TESLA_T4",
    ("L4", 0): "NVIDIA_L4",
    ("A100", 40): "NVIDIA_TESLA_A100",
    ("A100", 80): "NVIDIA_A100_80GB",
    ("H100", 0): "NVIDIA_H100_80GB",
    ("H200", 0): "NVIDIA_H200_141GB",
    ("B200", 0): "NVIDIA_B200",
    ("GB200", 0): "NVIDIA_GB200",
    ("RTX-PRO-6000", 0): "NVIDIA_RTX_PRO_6000",
}
_MEGA = "NVIDIA_H100_MEGA_80GB"  # the accelerator type of the machines a3-megagpu-8g
# Kind of machine types without accelerators -> the smallest number of CPUs:
# https://cloud.google.com/vertex-ai/docs/training/configure-compute
_LEAST_CPUS = {"standard": 4, "highmem": 2, "highcpu": 16}
_CPU_TYPE = re.compile(r"(e2|n1|n2|c2)-(standard|highmem|highcpu)-(\d+)")
_GPU_FAMILIES = ("a2-", "a3-", "a4-", "g2-", "g4-")
# The catalog's name of an N1 machine with GPUs, such as n1-standard-8-t4x1.
_WITH_GPUS = re.compile(r"(n1-\w+-\d+)-\w+x\d+")


class Strategy(StrEnum):
    """How Vertex AI provisions the machines of a job."""

    STANDARD = "STANDARD"
    SPOT = "SPOT"
    FLEX_START = "FLEX_START"


class CustomJobRequest(Struct, frozen=True, kw_only=True):
    """The values of a request to Vertex AI. All machines have the same type; the first machine is
    in its own worker pool. `waits` applies to FLEX_START.
    """

    image: str
    command: Sequence[str]
    # Vertex AI does not replace references in the values
    environment: Mapping[str, str] = field(default_factory=dict)
    machine_type: str
    accelerator_type: str | None = None
    accelerators: int = 0
    nodes: int = 1
    disk_gib: int | None = None
    strategy: Strategy = Strategy.STANDARD
    longest_run: timedelta | None = None  # None: the service's default of 7 days
    longest_wait: timedelta | None = None
    retries: bool = True  # whether Vertex AI starts the job again after faults of Vertex AI
    restarts: bool = False  # whether all machines are restarted if one was restarted
    service_account: str | None = None
    network: str | None = None
    # projects/PROJECT/zones/ZONE/reservations/NAME, or ANY_RESERVATION; None for none
    reservation: str | None = None
    output_uri: str | None = None


def find_accelerator(machine_type: str, name: str, memory_mib: int) -> str | None:
    """Return Vertex AI's name for the catalog's accelerator on this machine type, or None if Vertex
    AI has no such accelerator.
    """
    if machine_type.startswith("a3-megagpu"):
        return _MEGA
    return _ACCELERATORS.get((name, 0)) or _ACCELERATORS.get((name, round(memory_mib / 1024)))


def is_custom_job_type(machine_type: str) -> bool:
    """Return whether custom jobs can use this machine type of the catalog."""
    if machine_type.startswith(_GPU_FAMILIES) or _WITH_GPUS.fullmatch(machine_type):
        return True
    found = _CPU_TYPE.fullmatch(machine_type)
    return found is not None and int(found[3]) >= _LEAST_CPUS[found[2]]


def strip_gpus(machine_type: str) -> str:
    """Return Google's name of a machine type: the catalog's name without the attached GPUs."""
    found = _WITH_GPUS.fullmatch(machine_type)
    return found[1] if found else machine_type


def make_custom_job(job: CustomJobRequest) -> dict[str, Any]:
    """Return the CustomJobSpec of the job."""
    pools = [_make_pool(job, 1)]
    if job.nodes > 1:
        pools.append(_make_pool(job, job.nodes - 1))
    spec: dict[str, Any] = {"workerPoolSpecs": pools, "scheduling": _make_scheduling(job)}
    if job.output_uri is not None:
        spec["baseOutputDirectory"] = {"outputUriPrefix": job.output_uri}
    if job.service_account is not None:
        spec["serviceAccount"] = job.service_account
    if job.network is not None:
        spec["network"] = job.network
    return spec


def _make_pool(job: CustomJobRequest, count: int) -> dict[str, Any]:
    machine: dict[str, Any] = {"machineType": job.machine_type}
    if job.accelerator_type is not None:
        machine["acceleratorType"] = job.accelerator_type
        machine["acceleratorCount"] = job.accelerators
    if job.reservation is not None:
        machine["reservationAffinity"] = _make_affinity(job.reservation)
    pool: dict[str, Any] = {"machineSpec": machine, "replicaCount": count}
    if job.disk_gib is not None:
        pool["diskSpec"] = {"bootDiskSizeGb": max(job.disk_gib, 100)}
    pool["containerSpec"] = {
        "imageUri": job.image,
        "command": list(job.command),
        "env": [
            {"name": name, "value": escape_references(text)}
            for name, text in job.environment.items()
        ],
    }
    return pool


def _make_affinity(reservation: str) -> dict[str, Any]:
    if reservation == ANY_RESERVATION:
        return {"reservationAffinityType": ANY_RESERVATION}
    return {
        "reservationAffinityType": "SPECIFIC_RESERVATION",
        "key": "compute.googleapis.com/reservation-name",
        "values": [reservation],
    }


def _make_scheduling(job: CustomJobRequest) -> dict[str, Any]:
    scheduling: dict[str, Any] = {"strategy": str(job.strategy)}
    if job.longest_run is not None:
        scheduling["timeout"] = f"{ceil(job.longest_run.total_seconds())}s"
    if job.longest_wait is not None and job.strategy is Strategy.FLEX_START:
        scheduling["maxWaitDuration"] = f"{ceil(job.longest_wait.total_seconds())}s"
    if not job.retries:
        scheduling["disableRetries"] = True
    elif job.restarts:
        scheduling["restartJobOnWorkerRestart"] = True
    return scheduling
