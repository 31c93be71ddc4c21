"""Describes how to avoid a cost: the command, or the key of the task file."""

from cavvy.domain.units import format_duration
from cavvy.planner.advice import Waste, WasteKind


def describe_remedy(waste: Waste, job: str) -> str:
    """Return the command that avoids the cost, or the change to make in the task file before the
    next run. `job` contains the arguments that name the job.
    """
    offer = waste.offer
    match waste.kind:
        case WasteKind.IDLE_GPU:
            return _end_idle(waste, job)
        case WasteKind.UNUSED_MEMORY if offer is not None:
            return f"resources: {{instance: {offer.instance_type}}}"
        case WasteKind.STARVED:
            return (
                f"add CPUs or data loaders, because the GPU waits for data (`cavvy profile {job}` "
                "shows more)"
            )
        case WasteKind.LARGE_GPU if offer is not None:
            return f"cavvy run TASK.YAML --gpu {offer.accelerator}:{offer.accelerators_text}"
        case WasteKind.SPOT:
            return "cavvy run TASK.YAML --spot"
        case WasteKind.CHECKPOINTS if waste.every is not None:
            return f"checkpoint: {{every: {format_duration(waste.every)}}}"
        case WasteKind.KEPT if waste.machine is not None and waste.machine.idle_now:
            return f"cavvy machines stop {job}"
        case WasteKind.KEPT if waste.machine is not None:
            return f"cavvy machines keep {job} 10m"
        case WasteKind.KEPT:
            return "cavvy run TASK.YAML --keep 10m"
        case WasteKind.VOLUME if waste.volume is not None and waste.volume.provider == "aws":
            volume = waste.volume
            return f"aws ec2 delete-volume --region {volume.region} --volume-id {volume.id}"
        case _:
            return "cavvy gc --remove"


def _end_idle(waste: Waste, job: str) -> str:
    if waste.ranks:
        told = ", ".join(map(str, waste.ranks))
        return f"reduce `nodes`, because rank {told} does not use its GPUs (cavvy status {job})"
    return f"cavvy stop {job}" if waste.unfinished else "limits: {idle: {gpu: 5%, for: 30m}}"
