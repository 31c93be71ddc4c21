"""`python -m remuda.tuning.probe SOCKET SCRIPT [ARGUMENTS]`: runs the script, and asks at SOCKET what to do with it."""

import os
import runpy
import sys
import traceback

from remuda.tuning.probe.child import Channel, Done, Probe


def main() -> int:
    where, script, *arguments = sys.argv[1:]
    channel = Channel(where)
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    try:
        with Probe(channel).installed():
            runpy.run_path(script, run_name="__main__")
    except Done:
        return 0
    except BaseException as error:
        channel.say({"failed": "".join(traceback.format_exception_only(error)).strip()})
        raise
    channel.say({"failed": "the script ended before it was measured: does it train in `run.batches` of remuda.train?"})
    return 1


if __name__ == "__main__":
    sys.exit(main())
