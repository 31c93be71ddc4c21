"""Decides why an agent was lost together with its work: because of the node, or because the work
ended its agent.

On a machine that runs jobs as one user and offers no process namespaces, the work can kill its own
agent. If this counted as a failure of the node, the work would be repeated for free. The agent
therefore records, before the work begins, what changes if the node fails: the boot, and how often
the kernel has killed processes because memory ran out.
"""

from __future__ import annotations

import json
import os

from .control_client import complain
from .disk import read_text, write_whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .config import AgentConfig
    from .documents import WorkConfig

LOST = "the agent was killed together with its work"
KILLED = 137  # 128 + SIGKILL


def describe_start(config: AgentConfig, work: WorkConfig) -> str:
    """Return the record of the work's start that `judge_lost` reads later."""
    # Elsewhere, a batch system or the provider may kill the agent.
    on_host = config.private != config.home and (not config.taken or config.taken.unless)
    alone = config.separates or (config.covers and config.alone) or work.image is not None
    reachable = bool(on_host and not alone)
    start = {"reachable": reachable, "boot": _read_boot(), "oom_kills": _count_kills()}
    return json.dumps({**start, "kept": config.kept if keeps_entries(config, work) else ""})


def keeps_entries(config: AgentConfig, work: WorkConfig) -> bool:
    """Return whether the new entries of home folders are in the folder `config.kept` while the work
    runs."""
    return bool(config.covers and config.kept and not config.separates and work.image is None)


def find_kept(record: str) -> str:
    """Return the folder with the new entries of home folders of work that was lost with its agent,
    or "" if there is none."""
    try:
        return str(json.loads(record)["kept"])
    except (ValueError, KeyError, TypeError):
        return ""


def judge_lost(record: str, lost: str = LOST) -> tuple[str, int | None, str]:
    """Return the outcome, exit code and reason of work that was lost with its agent, or with
    another process of the agent; `lost` says what was lost. `record` is what `describe_start`
    returned, or the text of an older agent.
    """
    try:
        start = json.loads(record)
        remains = (start["boot"], start["oom_kills"]) == (_read_boot(), _count_kills())
        if not (start["reachable"] and remains and start["boot"]):
            return "node", None, lost
    except (ValueError, KeyError, TypeError):
        return "node", None, lost
    reason = (
        f"{lost}, while the node neither ran out of memory nor restarted. The work runs as the "
        "agent's user and may have done this, so it counts as a failure of the work"
    )
    return "exit", KILLED, reason


def blame_node(config: AgentConfig) -> None:
    """Record that this agent has failed by itself, so that its end is not the work's fault."""
    if os.path.exists(config.started_file):
        try:
            write_whole(config.started_file, "")
        except OSError as error:
            complain(f"cannot record the failure: {error}")


def _read_boot() -> str:
    return read_text("/proc/sys/kernel/random/boot_id")


def _count_kills() -> int | None:
    """Return how many processes the kernel has killed since boot because memory ran out, or None if
    the kernel does not count them.
    """
    for line in read_text("/proc/vmstat").splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill":
            return int(value)
    return None
