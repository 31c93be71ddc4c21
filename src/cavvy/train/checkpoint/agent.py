"""Reports to Cavvy's agent over the notification socket, if an agent is running."""

import json
import os
import socket


def tell_cost(seconds: float) -> None:
    """Report how long a save paused the computation. The control plane derives the checkpoint
    interval from the length of the pause.
    """
    _send({"saved": {"seconds": seconds}})


def tell_again() -> None:
    """Report that the state is saved and that the task must be run again. The agent ignores the
    exit code of the task's launcher after this report.
    """
    _send({"again": {}})


def tell_started() -> None:
    """Report that this process has started. The report cancels a failure that an earlier process
    with the same number reported: that failure is no longer the reason for the job's end.
    """
    _send({"started": {"process": _read_process()}})


def tell_failed(rank: int, ranks: int, error: str) -> None:
    """Report which rank failed first, and its error. The agent adds the rank and the error to the
    reason for the job's end.
    """
    facts = {"rank": rank, "ranks": ranks, "error": error, "process": _read_process()}
    _send({"failed": facts})


def _read_process() -> int:
    """Return the number of this process on its node."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def _send(message: dict[str, object]) -> None:
    path = os.environ.get("CAVVY_NOTICE")
    if not path:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line_out:
            line_out.settimeout(0.2)
            line_out.connect(path)
            line_out.sendall(json.dumps(message).encode() + b"\n")
    except OSError:
        return  # The agent is too old or has exited. The run still uses its own measurement.
