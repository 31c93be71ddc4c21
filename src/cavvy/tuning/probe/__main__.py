"""`python -m cavvy.tuning.probe SOCKET SCRIPT [ARGUMENTS]` runs the script and receives commands
through SOCKET.
"""

import sys
import traceback

from cavvy.tracer.script import run_script
from cavvy.tuning.probe.child import NO_LOOP, ProbeChannel, ProbeDone, ScriptProbe


def main() -> int:
    where, script, *arguments = sys.argv[1:]
    channel = ProbeChannel(where)
    try:
        probe = ScriptProbe(channel)
        with probe.installed():
            _run_to_its_end(script, arguments)
            if probe.plain.finish():
                return 0
    except ProbeDone:
        return 0
    except BaseException as error:
        channel.say({"failed": "".join(traceback.format_exception_only(error)).strip()})
        raise
    channel.say({"failed": f"the script ended before it was measured: {NO_LOOP}"})
    return 1


def _run_to_its_end(script: str, arguments: list[str]) -> None:
    """Run the script. If the script exits without an error, return as if it had reached its end."""
    try:
        run_script(script, arguments)
    except SystemExit as error:
        if error.code not in (None, 0):
            raise


if __name__ == "__main__":
    sys.exit(main())
