"""The entry point of the `cavvy` command. Python imports this module first. Before the command runs
and after it has ended, Ctrl-C ends the process immediately. By default, Python would print a
traceback if Ctrl-C interrupted an import or the exit.
"""

import _signal  # type: ignore[import-not-found]  # built in; `signal` needs milliseconds to import
import sys
from os import _exit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sys import UnraisableHookArgs

_INTERRUPTED = 130  # the exit code that shells report for an interrupt
_given = _signal.getsignal(_signal.SIGINT)  # shells make background commands ignore Ctrl-C
if _given is _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, lambda number, frame: _exit(_INTERRUPTED))


def main() -> None:
    """Run the CLI. The `cavvy` script calls this function."""
    sys.unraisablehook = _report
    from cavvy.cli.main import main as run

    ends = _signal.getsignal(_signal.SIGINT)
    try:
        _signal.signal(_signal.SIGINT, _given)
        run()
    except KeyboardInterrupt:
        _exit(_INTERRUPTED)
    finally:
        _signal.signal(_signal.SIGINT, ends)


def _report(fault: "UnraisableHookArgs") -> None:
    """Handle an exception in a function that the interpreter calls automatically, such as the
    callback of a weak reference. Python prints an exception in a callback and continues, so Ctrl-C
    during the callback would be ignored. With this hook, Ctrl-C ends the process. The hook first
    writes the command's buffered output; `finally` clauses do not run.
    """
    if fault.exc_type is KeyboardInterrupt:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (AttributeError, OSError, ValueError):
                continue  # the stream is missing, broken or closed
        _exit(_INTERRUPTED)
    sys.__unraisablehook__(fault)
