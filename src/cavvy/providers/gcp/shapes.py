"""The catalog's machines that are not plain machine types of Compute Engine: N1 machines with
attached GPUs, and TPU slices of one host.
"""

import re

from cavvy.domain.values import Struct

_N1 = re.compile(r"(n1-[a-z]+-\d+)-([a-z]+\d+)x(\d+)")
# https://cloud.google.com/compute/docs/gpus#gpu-models
_GPUS = {"t4": "nvidia-tesla-t4", "v100": "nvidia-tesla-v100"}
# Compute Engine has machine types for slices of v5p and v6e only. Slices of older TPUs, and slices
# of several hosts, need other APIs: https://cloud.google.com/compute/docs/tpus/tpu-machines
_TPUS = {
    "tpu-v5p-8": "ct5p-hightpu-4t",
    "tpu-v6e-1": "ct6e-standard-1t",
    "tpu-v6e-4": "ct6e-standard-4t",
    "tpu-v6e-8": "ct6e-standard-8t",
}


class MachineShape(Struct, frozen=True):
    """A machine type, and the GPUs to attach to it. `gpu` is Google's name of the GPU type, or ""
    if no GPU is attached.
    """

    machine_type: str
    gpu: str = ""
    gpus: int = 0


def find_shape(name: str) -> MachineShape | None:
    """Return the shape for a catalog name such as n1-standard-8-t4x1 or tpu-v6e-8, which is not a
    Compute Engine machine type. Returns None for a Compute Engine machine type.
    """
    if name in _TPUS:
        return MachineShape(_TPUS[name])
    found = _N1.fullmatch(name)
    if found is None or found[2] not in _GPUS:
        return None
    return MachineShape(found[1], _GPUS[found[2]], int(found[3]))
