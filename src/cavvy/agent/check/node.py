"""Runs the whole check of one rank's node in a separate process, because a faulty GPU driver can
hang forever."""

from __future__ import annotations

import os
import time

from ..config import AgentConfig
from ..documents import CheckConfig, WorkConfig
from ..notices.faults import GPU, LINK, read_kernel
from ..work.environment import device_variables
from ..work.reaper import report
from .gpus import GpuFault, check_gpus
from .links import SlowLink, check_links

LIMIT_S = 180.0  # seconds for the whole check
LATELY_S = 600.0  # age in seconds of the oldest kernel messages that are read


def check_node(config: AgentConfig, work: WorkConfig, channel: int) -> int:
    """Write each measurement to `channel` as a line `check TEXT`, then the result as JSON. The
    task's own variables are left out, because they could make the driver load any library.
    """
    os.environ.update(device_variables(config))  # the indices of the GPUs assigned to the work
    outcome = reason = ""
    try:
        # Check the links first. If the GPU check failed first, the other ranks would wait for this
        # one in vain.
        if work.nodes > 1:
            _tell(channel, check_links(_wanted(work), work, config.rank))
        _check_gpus(config, work, channel)
    except GpuFault as error:
        outcome, reason = GPU, str(error)
    except SlowLink as error:
        outcome, reason = LINK, str(error)
    except OSError as error:
        outcome, reason = "node", f"the node check failed to run: {error}"
    return report(channel, outcome, reason)


def _check_gpus(config: AgentConfig, work: WorkConfig, channel: int) -> None:
    if not work.accelerators_per_node:
        return
    if config.vendor not in ("", "nvidia"):
        _tell(channel, f"only NVIDIA GPUs can be checked, not {config.vendor} GPUs")
        return
    fault = read_kernel(time.monotonic() - LATELY_S)
    if fault:
        raise GpuFault(f"the kernel log reports {fault}")
    for line in check_gpus(_wanted(work), work.accelerators_per_node):
        _tell(channel, line)


def _wanted(work: WorkConfig) -> CheckConfig:
    assert work.check is not None
    return work.check


def _tell(channel: int, text: str) -> None:
    os.write(channel, f"check {text}\n".encode())
