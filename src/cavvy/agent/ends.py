"""Determines how the work of a rank ended, why an agent was lost together with its work (because of
the node, or because the work ended its agent), and when the rank's agent may exit. `MOVES` contains
every change of the states of a rank's agent, with its reason.

On a machine that runs jobs as one user and offers no process namespaces, the work can kill its own
agent. If this counted as a failure of the node, the work would be repeated for free. The agent
therefore records, before the work begins, what changes if the node fails: the boot, and how often
the kernel has killed processes because memory ran out.
"""

from __future__ import annotations

import json
import os
import signal
import time
from enum import Enum

from .control_client import complain
from .disk import read_text, write_whole
from .outbox import time_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .config import AgentConfig, ConfigFields
    from .documents import WorkConfig


EX_TEMPFAIL = 75  # from sysexits.h: the task has saved a checkpoint and asks to be run again
LONGEST_ERROR = 1000  # maximum characters of a reported error
# Signals that end a program by default and are usually sent by another program. A shell reports
# signal N as exit code 128 + N.
DEADLY = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGILL,
    signal.SIGTRAP,
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGKILL,
    signal.SIGUSR1,
    signal.SIGSEGV,
    signal.SIGUSR2,
    signal.SIGPIPE,
    signal.SIGALRM,
    signal.SIGTERM,
    signal.SIGXCPU,
    signal.SIGXFSZ,
    signal.SIGVTALRM,
    signal.SIGPROF,
    signal.SIGSYS,
)

LOST = "the agent was killed together with its work"
KILLED = 137  # 128 + SIGKILL


class AgentState(Enum):
    """The state of one rank's agent. `RankRunner` performs only the state changes in MOVES, and
    ignores requests for any other state change.
    """

    WAITING = "waiting"  # waiting for its claim to be granted
    WORKING = "working"
    ENDING = "ending"  # something asked the work to end; the agent may have sent it a signal
    RECLAIMED = "reclaimed"  # like ENDING, but the provider may have sent the signal
    OVER = "over"  # the outcome is known; the log is being delivered
    EXITED = "exited"  # the log is delivered, and the exit is in the outbox
    DISMISSED = "dismissed"  # another agent has the claim: nothing is left to report


_GOING = (AgentState.WORKING, AgentState.ENDING, AgentState.RECLAIMED)
DONE = (AgentState.OVER, AgentState.EXITED, AgentState.DISMISSED)
REPORTED = (AgentState.EXITED, AgentState.DISMISSED)

MOVES: dict[tuple[AgentState, AgentState], str] = {
    (AgentState.WAITING, AgentState.WORKING): "the claim was granted",
    (
        AgentState.WAITING,
        AgentState.OVER,
    ): "an earlier agent began the work, or this agent cannot start it",
    (AgentState.WAITING, AgentState.EXITED): "an earlier agent queued the report of the exit",
    (
        AgentState.WORKING,
        AgentState.ENDING,
    ): "a stop or notice arrived, a limit was reached, or the lease expired",
    (AgentState.WORKING, AgentState.RECLAIMED): "the provider signalled the node",
    (AgentState.ENDING, AgentState.RECLAIMED): "the provider has also signalled the node",
    **{(state, AgentState.OVER): "the work and its processes have ended" for state in _GOING},
    (AgentState.OVER, AgentState.EXITED): "the whole log was delivered",
    **{
        (state, AgentState.DISMISSED): "the control plane assigned the rank to another agent"
        for state in AgentState
        if state is not AgentState.DISMISSED
    },
}


def may_leave(leaves_after_s: float, silent_s: float, *, stored: bool) -> bool:
    """Return whether the agent may exit after its work although the server does not respond. An
    early exit releases the node, which would otherwise be billed until its lease expires. Exiting
    early is safe if the work's result, log and messages are `stored` outside the node.
    """
    return stored and 0 < leaves_after_s <= silent_s


def describe_failure(fields: ConfigFields) -> str:
    """Describe how a task failed, according to the task's message `failed`. Raises BadConfig."""
    rank, ranks = fields.read("rank", "int"), fields.read("ranks", "int")
    error = fields.read("error", "str")[:LONGEST_ERROR]
    return f"rank {rank} of {ranks} failed: {error}" if ranks > 1 else f"the task failed: {error}"


def judge(code: int, ending: tuple[str, str] | None) -> tuple[str, int, str]:
    """Return the outcome, exit code and reason of work that has ended. `ending` is the outcome and
    reason if the agent ended the work, or None if the agent did not end the work.

    Exit code 0 after a signal from the agent does not mean that the work succeeded. In this case,
    the control plane decides from the work's reports.
    """
    if ending is not None:
        return ending[0], code, ending[1]
    if code == 0:
        return "succeeded", code, ""
    if code == EX_TEMPFAIL:
        return "preempted", code, "the task asked to be run again (exit code 75)"
    if code - 128 in DEADLY:
        number = signal.Signals(code - 128)
        return (
            "exit",
            code,
            f"the task was killed by signal {number:d} ({number.name}; exit code {code})",
        )
    return "exit", code, f"the task ended with exit code {code}"


def describe_notice(seconds: float, reason: str) -> dict[str, object]:
    """Return the notice for the task, which says that its work must end within `seconds`."""
    deadline = time_text(time.time() + seconds)
    return {"seconds": seconds, "deadline": deadline, "reason": reason}


def serve_on(work: WorkConfig | None, seconds: float) -> float:
    """Return for how many seconds the work continues after a notice that the node ends in
    `seconds`. The result is 0 if the work does not answer requests. If the work has answered all of
    its requests earlier, the control plane stops it earlier.
    """
    if work is None or not work.serves:
        return 0.0
    return max(0.0, seconds - work.grace_s)


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
