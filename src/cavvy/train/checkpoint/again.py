"""Ends or restarts a process that has saved its state and must be run again."""

import logging
import multiprocessing
import os
import stat
import sys

from cavvy.train.checkpoint.agent import tell_again
from cavvy.train.checkpoint.notice import AGAIN
from cavvy.train.world import ATTEMPT, RankWorld


def run_again(world: RankWorld) -> None:
    """If torchrun started this process, run the program again in the same process. The process must
    not exit, because torchrun ends all ranks when one rank exits, and treats exit code 75 as a
    failure. The connections to other ranks are closed. When the restarted program joins the process
    group, it waits for the other ranks.

    Raises: SystemExit: torchrun did not start this process, or the script itself (not Cavvy) joined
    the process group. A group that the script joined cannot be joined again.
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
            continue  # This is the descriptor that listed the folder; it is already closed.
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def leave() -> None:
    """Exit with the exit code for "run me again". The function also notifies Cavvy's agent
    directly, because a launcher such as torchrun replaces this exit code with its own.

    Raises: SystemExit: always.
    """
    tell_again()
    raise SystemExit(AGAIN)
