"""The main program of one rank's agent."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import sys
import time

from .config import AgentConfig, BadConfig, read_config
from .control_client import complain
from .disk import open_private, read_process, read_text, write_whole
from .ends import blame_node
from .kept_program import clear_records
from .loop import EventLoop
from .runner import RankRunner
from .tunnel import close_tunnel

LOCK_WAIT_S = 15.0
ENDS = (signal.SIGTERM, signal.SIGINT)
KEPT = (
    "lock",
    "agent.json",
    "config.json",
    "token",
    "cache",
)  # files of a rank's folders that are kept for the node's next work
USAGE = (
    "usage: python -I -S agent.pyz [--deliver | --sweep] CONFIG, or --separates FOLDER SHOWN, or "
    "--protects FOLDER SHOWN"
)


def main(arguments: list[str]) -> int:
    """Run the agent and return its exit code: 0 if no work remains, 2 if the configuration is
    wrong.

    With `--deliver`, the exit code is EX_TEMPFAIL if messages remain because the server did not
    answer, and 1 if messages remain for a different reason.

    With `--separates`, only test whether this machine can separate work, and print the obstacle, if
    any. With `--protects`, only print what this machine can do to hide a folder. With `--sweep`,
    only remove the MIG instances of killed agents. With `--forks`, start agents on request, as
    `fork_server` describes.
    """
    if arguments[:1] == ["--protects"] and len(arguments) == 3:
        from .work.hide import find_ability

        sys.stdout.write(find_ability(*arguments[1:]) + "\n")
        sys.stdout.flush()
        return 0
    if arguments[:1] == ["--separates"] and len(arguments) == 3:
        from .work.separate import find_obstacle

        sys.stdout.write(find_obstacle(*arguments[1:]) + "\n")
        sys.stdout.flush()
        return 0
    if arguments[:1] == ["--sweep"]:
        from .mig import sweep

        return 0 if sweep() else 1
    if arguments[:1] == ["--forks"]:
        from .fork_server import serve_forks

        return serve_forks(main)
    deliver = "--deliver" in arguments
    paths = [argument for argument in arguments if argument != "--deliver"]
    if len(paths) != 1:
        complain(USAGE)
        return 2
    try:
        config = read_config(paths[0])
    except (BadConfig, OSError) as error:
        complain(str(error))
        return 2
    try:
        for folder in (config.home, config.private):
            os.makedirs(folder, mode=0o700, exist_ok=True)
        lock = take_lock(config.private)
        if lock is None:
            return 0
        if not config.instance:
            return serve(config, lock, deliver)
        from .mig import hold_instance

        with hold_instance(config, makes=not deliver and not has_started(config)) as held:
            return serve(held, lock, deliver)
    except (OSError, ValueError, KeyError) as error:
        complain(f"cannot continue: {error}")
        blame_node(config)
        return 1


def serve(config: AgentConfig, lock: int, deliver: bool) -> int:
    """Run the job's work. While the node is kept warm, also run the work of other jobs. Each job's
    work gets a new runner, as if a new agent had been started.
    """
    code, runner = act(config, lock, deliver, None)
    while runner.keep_s > 0 and code == 0:
        if runner.kept_program is None:
            clear(config)
        else:
            clear_records(config)
        code, runner = act(config, lock, False, runner)
    return code


def clear(config: AgentConfig) -> None:
    """Remove all files of the finished work. If the work has put a symbolic link in the place of
    one of the agent's files, remove the link, too. The claim is removed first, so that a later
    agent sends no reports about this work.
    """
    from .work.trees import remove_tree

    for folder in dict.fromkeys((config.private, config.home)):
        with os.scandir(folder) as found:
            entries = [entry for entry in found if entry.name not in KEPT or entry.is_symlink()]
        for entry in sorted(entries, key=lambda entry: entry.name != "claim"):
            remove_tree(entry.path)


def act(
    config: AgentConfig, lock: int, deliver: bool, before: RankRunner | None
) -> tuple[int, RankRunner]:
    """Run one job's work. If an earlier agent has already started the work, only
    deliver that agent's messages.

    Return the exit code, and the runner, which says for how long more work is awaited afterwards.
    `before` is the runner of the earlier work on this node, or None.
    """
    loop = EventLoop(lock)
    kept = None if before is None else before.kept_program
    runner = RankRunner(loop, config, take_nonce(config.private), kept)
    for number in ENDS:
        loop.on_signal(number, runner.terminated)
    if config.taken is not None and config.taken.signal is not None:
        loop.on_signal(signal.Signals[f"SIG{config.taken.signal}"], runner.warned)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)
    if deliver or has_started(config):
        runner.recover(patient=not deliver)
    else:
        runner.claim(None if before is None else before.keep_s)
    loop.run()
    close_tunnel(config)
    if runner.keep_s:
        # Block signals: those that arrive from now on are handled by the next agent.
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
        loop.close()
    mark_debt(config, runner.owes)
    if not deliver or not runner.owes:
        return 0, runner
    return 1 if runner.link.answered else os.EX_TEMPFAIL, runner


def has_started(config: AgentConfig) -> bool:
    """Return whether an earlier agent has started the work."""
    return os.path.exists(config.started_file) or os.path.exists(config.exit_file)


def mark_debt(config: AgentConfig, owes: bool) -> None:
    """Create a marker file if messages are undelivered; otherwise remove the file. The program that
    started the agent checks for the marker file.
    """
    if owes:
        write_whole(config.undelivered_file, "")
    elif os.path.exists(config.undelivered_file):
        os.unlink(config.undelivered_file)


def take_lock(folder: str) -> int | None:
    """Lock this rank's private folder and return the open file, or None if another agent holds the
    lock.

    Wait for a while if necessary, because the reaper of a killed agent holds the lock until the
    work has ended.
    """
    lock = open_private(folder + "/lock")
    until = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > until or agent_lives(folder):
                return None
            select.select([], [], [], 0.05)
    write_whole(
        folder + "/agent.json", json.dumps({"pid": os.getpid(), "start": start_time(os.getpid())})
    )
    return lock


def agent_lives(folder: str) -> bool:
    """Return whether the agent that wrote agent.json is still alive. A later process with the same
    process ID is not regarded as this agent.
    """
    try:
        with open(folder + "/agent.json", encoding="utf-8") as file:
            agent = json.load(file)
        os.kill(agent["pid"], 0)
    except (OSError, ValueError, KeyError):
        return False
    return bool(agent["start"] == start_time(agent["pid"]))


def start_time(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot, or None if the process is dead
    or the system has no /proc.
    """
    fields = read_process(pid)
    return int(fields[19]) if fields and fields[0] != b"Z" else None


def take_nonce(folder: str) -> str:
    """Return the random value (nonce) that identifies this agent's claim. The nonce is stored, so
    that the agent can repeat the same claim after a restart or a lost response.
    """
    path = folder + "/claim"
    nonce = read_text(path)
    if not nonce:
        nonce = os.urandom(16).hex()
        write_whole(path, nonce)
    return nonce
