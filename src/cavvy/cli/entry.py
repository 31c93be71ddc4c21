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
    during the callback would be ignored. With this hook, it comes again after the callback, so that
    `finally` clauses run. While Python exits, the hook writes the buffered output and ends the
    process.
    """
    if fault.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(fault)
    elif not _interrupt_again():
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (AttributeError, OSError, ValueError):
                continue  # the stream is missing, broken or closed
        _exit(_INTERRUPTED)


def _interrupt_again() -> bool:
    """Send Ctrl-C to the main thread once that has left the hook. Return False if it cannot be."""
    from threading import Thread, main_thread
    from time import sleep

    def send() -> None:
        while (main := main_thread().ident) is not None:
            frame = sys._current_frames().get(main)
            while frame is not None and frame.f_code is not _report.__code__:
                frame = frame.f_back
            if frame is None:
                _signal.pthread_kill(main, _signal.SIGINT)
                return
            del frame  # whose variables would live longer
            sleep(0.001)

    try:
        Thread(target=send, daemon=True).start()
    except RuntimeError:  # Python exits
        return False
    return True
