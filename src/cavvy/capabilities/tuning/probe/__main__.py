"""`python -m cavvy.capabilities.tuning.probe SOCKET SCRIPT [ARGUMENTS]` runs the script and
receives commands through SOCKET.
"""

import sys
import traceback
from multiprocessing.process import BaseProcess
from typing import Any
from unittest.mock import patch

from cavvy.capabilities.estimates.tracer.script import (
    find_ranks,
    is_rank_missing,
    run_script,
    watch_rank_variables,
)
from cavvy.capabilities.tuning.probe.child import NO_LOOP, ProbeChannel, ProbeDone, ScriptProbe

OWN_RANKS = (
    "the script starts its ranks itself, so their steps cannot be measured: change the script so "
    "that torchrun can start it, and pass --ranks N; `cavvy estimate` works for any script"
)


def main() -> int:
    where, script, *arguments = sys.argv[1:]
    channel = ProbeChannel(where)
    missed = set[str]()  # the variables of torchrun that the script did not find
    try:
        probe = ScriptProbe(channel)
        start = _refuse_ranks(channel)
        with (
            probe.installed(),
            watch_rank_variables(missed),
            patch.object(BaseProcess, "start", start),
        ):
            _run_to_its_end(script, arguments)
            if probe.plain.finish():
                return 0
    except ProbeDone:
        return 0
    except BaseException as error:
        text = "".join(traceback.format_exception_only(error)).strip()
        channel.say({"failed": text, "needs_rank": is_rank_missing(error, missed)})
        raise
    channel.say({"failed": f"the script ended before it was measured: {NO_LOOP}"})
    return 1


def _refuse_ranks(channel: ProbeChannel) -> Any:
    """Return a `Process.start` that ends the script instead of starting the process of rank 0,
    because the steps of such a process are not measured.
    """
    before = BaseProcess.start

    def start(process: Any) -> None:
        is_spawned = getattr(process._target, "__module__", "") == "torch.multiprocessing.spawn"
        ranks = [0] if is_spawned else find_ranks(process)
        if ranks and not any(ranks):
            channel.say({"failed": OWN_RANKS})
            raise ProbeDone
        before(process)

    return start


def _run_to_its_end(script: str, arguments: list[str]) -> None:
    """Run the script. If the script exits without an error, return as if it had reached its end."""
    try:
        run_script(script, arguments)
    except SystemExit as error:
        if error.code not in (None, 0):
            raise


if __name__ == "__main__":
    sys.exit(main())
