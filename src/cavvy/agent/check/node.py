"""The whole check of one rank's node, in a process of its own: a sick driver can hang for ever."""

from __future__ import annotations

import os
import time

from ..config import AgentConfig, CheckConfig, WorkConfig
from ..notices.faults import GPU, LINK, read_kernel
from ..work.reaper import report
from .gpus import GpuFault, check_gpus
from .links import SlowLink, check_links

LIMIT_S = 180.0  # for all of it
LATELY_S = 600.0  # the kernel's log is read back so far


def check_node(config: AgentConfig, work: WorkConfig, env: dict[str, str], channel: int) -> int:
    """Tell what was measured as lines `check TEXT` on `channel`, and at the end the result as
    JSON.
    """
    os.environ.update(env)  # which GPUs are the work's
    outcome = reason = ""
    try:
        # Links first: no rank waits for one whose GPU has failed.
        if work.nodes > 1:
            _tell(channel, check_links(_wanted(work), work, config.rank))
        _check_gpus(config, work, channel)
    except GpuFault as error:
        outcome, reason = GPU, str(error)
    except SlowLink as error:
        outcome, reason = LINK, str(error)
    except OSError as error:
        outcome, reason = "node", f"the check of the node could not be made: {error}"
    return report(channel, outcome, reason)


def _check_gpus(config: AgentConfig, work: WorkConfig, channel: int) -> None:
    if not work.accelerators_per_node:
        return
    if config.vendor not in ("", "nvidia"):
        _tell(channel, f"GPUs of {config.vendor} cannot be checked; only NVIDIA's can")
        return
    fault = read_kernel(time.monotonic() - LATELY_S)
    if fault:
        raise GpuFault(f"the kernel told of {fault} lately")
    for line in check_gpus(_wanted(work), work.accelerators_per_node):
        _tell(channel, line)


def _wanted(work: WorkConfig) -> CheckConfig:
    assert work.check is not None
    return work.check


def _tell(channel: int, text: str) -> None:
    os.write(channel, f"check {text}\n".encode())
