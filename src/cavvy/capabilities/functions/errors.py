"""What can go wrong with calls of functions.

CavvyError
  NotSendable     an argument, a result or a function cannot be sent to another process
  AppBroken       the app's code cannot be loaded where it runs
  CallFailed      the function raised something that cannot be loaded here
  CallTimeout     the call took longer than `timeout`
  CallCancelled   the call was cancelled
  CallDeadlock    a function waits for a call of itself, whose process it holds
  WorkerLost      the process or node that ran the call ended, again and again
"""

from cavvy.sdk.errors import CavvyError


class NotSendable(CavvyError, TypeError):
    """Raised if an argument, a result or a function cannot be sent to another process. The message
    names the object, and where it is."""


class AppBroken(CavvyError):
    """Raised if the app's code cannot be loaded where it runs, for example since a package is
    missing there."""


class CallFailed(CavvyError):
    """Raised if the function raised an exception that cannot be loaded here. The message has the
    exception's type and text; a note has its traceback."""


class CallTimeout(CavvyError, TimeoutError):
    """Raised if the call took longer than its `timeout`, or if a result did not arrive in time."""


class CallCancelled(CavvyError):
    """Raised if the call was cancelled."""


class CallDeadlock(CavvyError):
    """Raised if a function calls itself, or another one that does, and waits for the result: it
    holds the process in which that call would run."""


class WorkerLost(CavvyError):
    """Raised if the process or node that ran the call ended, in each of several attempts."""


KINDS: dict[str, type[CavvyError]] = {
    each.__name__: each
    for each in (
        *(NotSendable, AppBroken, CallFailed, CallTimeout),
        *(CallCancelled, CallDeadlock, WorkerLost),
    )
}
