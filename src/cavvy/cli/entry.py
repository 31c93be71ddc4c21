"""The first module of the `cavvy` command. Before the command runs and after it has ended, Ctrl-C
ends the process at once, because an import or an exit that it interrupts would print a traceback.
"""

import _signal  # type: ignore[import-not-found]  # built in; `signal` needs milliseconds to import
from os import _exit

_INTERRUPTED = 130  # the exit code that shells report for an interrupt
_given = _signal.getsignal(_signal.SIGINT)  # a shell starts background commands without a handler
if _given is _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, lambda number, frame: _exit(_INTERRUPTED))


def main() -> None:
    """Run the CLI. The `cavvy` script calls this function."""
    from cavvy.cli.main import main as run

    ends = _signal.getsignal(_signal.SIGINT)
    try:
        _signal.signal(_signal.SIGINT, _given)
        run()
    except KeyboardInterrupt:
        _exit(_INTERRUPTED)
    finally:
        _signal.signal(_signal.SIGINT, ends)
