"""Determines how the work of a rank ended, and when the rank's agent may exit."""

from __future__ import annotations

import signal
import time

from .outbox import time_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .config import ConfigFields
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
