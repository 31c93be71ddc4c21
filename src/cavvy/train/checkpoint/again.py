"""Ends or restarts a process that has saved its state and is to be run again."""

import logging
import multiprocessing
import os
import stat
import sys

from cavvy.train.checkpoint.agent import tell_again
from cavvy.train.checkpoint.notice import AGAIN
from cavvy.train.world import ATTEMPT, RankWorld


def run_again(world: RankWorld) -> None:
    """Run the program again in this process if torchrun has started it, because torchrun ends all
    ranks when one exits, and treats exit code 75 as a failure. The connections to other ranks are
    closed. The new program waits for the other ranks when it joins them.

    Raises: SystemExit: torchrun has not started this process, or the script itself has joined the
    ranks, which it cannot do twice.
    """
    if not world.can_join_again:
        leave()
    for child in multiprocessing.active_children():
        child.terminate()
    os.environ[ATTEMPT] = str(int(os.environ.get(ATTEMPT, "0")) + 1)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    for number in map(int, os.listdir("/dev/fd")):
        try:
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                os.set_inheritable(number, False)
        except OSError:
            continue  # the descriptor of the folder listing, which is already closed
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def leave() -> None:
    """Raises: SystemExit: with the exit code for "run me again". Cavvy's agent also gets a message,
    because a launcher such as torchrun replaces this exit code with another.
    """
    tell_again()
    raise SystemExit(AGAIN)
