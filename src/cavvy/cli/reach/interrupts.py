"""Ctrl-C while the server answers a request that starts something: what it has started is named."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import click


@contextmanager
def held_interrupt() -> Iterator[Callable[[], bool]]:
    """Until the context ends, only remember the first Ctrl-C, since the server may act on a request
    whose answer the command no longer waits for. Yields a function that tells whether Ctrl-C was
    pressed. The second Ctrl-C, or an error after the first, ends the request as usual: with
    KeyboardInterrupt.
    """
    pressed = False

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            click.echo("\n`cavvy ps` shows whether the server has started it", err=True)
            raise KeyboardInterrupt
        pressed = True
        click.echo("\nwaiting for the server's answer; Ctrl-C again gives up", err=True)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    former = signal.signal(signal.SIGINT, remember)
    try:
        yield lambda: pressed
    except Exception as error:
        if pressed:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, former)


def leave_if(interrupted: bool, project: str, names: Sequence[str], is_array: bool = False) -> None:
    """If Ctrl-C was pressed while the server queued these jobs, name them and exit."""
    if not interrupted or not names:
        return
    from cavvy.cli.reach.follow import leave_running

    again = "wait" if is_array or len(names) > 1 else "logs -f"
    with leave_running(project, " ".join(names), again):
        raise KeyboardInterrupt
