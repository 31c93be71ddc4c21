"""A hostile task that tries to decide how its own agent is started. It puts its own texts in the
place of every record that a server or an agent might obey, ends its agent, and waits to be started
again. WAY says how; it prints ESCAPED if it sees a file of the server.
"""

import glob
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable

WAY = os.environ["WAY"]
HOME = os.path.dirname(os.environ["CAVVY_PROGRESS_FILE"])
GANG = os.path.dirname(HOME)
PLACE = GANG.split("/gangs/")[0]  # the provider's folder on this machine
NAME, RANK = os.path.basename(GANG), os.path.basename(HOME)
FOLDERS = [HOME, GANG, f"{PLACE}/agents/{NAME}/{RANK}", f"{PLACE}/agents/{NAME}"]
RECORDS = [
    "config.json",
    "started.json",
    "agent.json",
    "exit.json",
    "dead.json",
    "deliver.json",
    "remover.json",
    "gang.json",
    "removing.json",
    "run.json",
    "left",
    "lock",
    "claim",
    "token",
    "started",
    "status",
    "outbox",
    "undelivered",
    "links",
    "sif",
    "earlier",
    "agent.log",
    "log",
    "tunnel.key",
    "hashes.json",
    "notice.json",
    "advice.json",
    "progress.json",
    "every",
    "hosts",
    "run.sh",
    "phase",
    "notice.sock",
    "inputs",
]
PAUSE_S = 0.005  # leaves the cores to those who are attacked, and no record stays for longer
EXIT = {"outcome": "succeeded", "exit_code": 0, "reason": "", "log_bytes": 0}
CONFIG = {"protocol": 1, "gang": NAME, "rank": int(RANK), "home": HOME, "private": HOME}
INTENT = {"name": NAME, "installation": "", "nodes": 9, "launched_at": "2000-01-01T00:00:00"}


def main() -> None:
    print("attempt", os.environ["CAVVY_ATTEMPT"], flush=True)
    print("separated", is_separated(), flush=True)
    look_around()
    WAYS[WAY]()
    print("tried", flush=True)
    sys.exit(3)


def is_separated() -> bool:
    """Whether the agent, which this work sees as the first process, cannot be ended by it."""
    with open("/proc/1/cmdline") as first:
        return f"/{NAME}/{RANK}/config.json" in first.read()


def look_around() -> None:
    for name in ("token", "key", "agents.key", "cavvy.db"):
        path = PLACE.split("/providers/")[0] + "/" + name
        if os.path.exists(path) and os.access(path, os.R_OK):
            print("ESCAPED", path, flush=True)
    for folder in FOLDERS:
        for name in ("claim", "token", "config.json", "tunnel.key"):
            try:
                with open(f"{folder}/{name}") as file:
                    print("READ", name, len(file.read()), flush=True)
            except OSError:
                continue


def remove_marks() -> None:
    for folder in FOLDERS:
        for name in RECORDS:
            try:
                os.unlink(f"{folder}/{name}")
            except OSError:
                continue


def rewrite() -> None:
    """Forge every record: without the hiding, and with an end that was a success."""
    for folder in FOLDERS:
        for name in RECORDS:
            path = f"{folder}/{name}"
            try:
                with open(path) as file:
                    value = json.load(file)
            except (OSError, ValueError):
                value = {"config": CONFIG, "exit": EXIT, "gang": INTENT}.get(name[:-5], {})
            for field in ("hides", "covers", "separates", "private"):
                value.pop(field, None)
            try:
                with open(path, "w") as file:
                    json.dump(value, file)
            except OSError:
                continue


def end_agent(most: int = 9) -> None:
    """End the agent, the reaper, and the shell that starts the agent on a host: the processes above
    this one that were started with the agent's configuration.
    """
    above, pid = [], os.getppid()
    while pid > 1:
        with open(f"/proc/{pid}/cmdline") as command, open(f"/proc/{pid}/status") as status:
            if f"/{NAME}/{RANK}/config.json" in command.read():
                above.append(pid)
            pid = int(re.search(r"PPid:\s+(\d+)", status.read())[1])  # type: ignore[index]
    above = above[:most]
    for pid in above:
        os.kill(pid, signal.SIGSTOP)  # neither of the two may clean up
    for pid in above:
        os.kill(pid, signal.SIGKILL)


def go_on() -> None:
    """Work that is separated from its agent is not ended with it: it goes on for as long as the
    agent and the server may look. Other work is ended, whenever that is.
    """
    time.sleep(3 if is_separated() else 600)


def rewrite_and_end() -> None:
    rewrite()
    remove_marks()
    rewrite()
    end_agent()
    go_on()


def rewrite_and_go_on() -> None:
    rewrite()
    time.sleep(3)


def end_and_rewrite() -> None:
    if os.environ.get("STAYS") is None:
        command = [sys.executable, os.path.abspath(__file__)]
        if os.fork() == 0:
            os.setsid()
            keep = {"WAY": "stay", "STAYS": "1", "CAVVY_ATTEMPT": "0"}
            names = ("CAVVY_PROGRESS_FILE", "PATH")
            os.execve(command[0], command, keep | {name: os.environ[name] for name in names})
        time.sleep(1)
    end_agent()
    go_on()


def end_and_wait() -> None:
    time.sleep(1)  # until the agent has read the output
    end_agent()
    go_on()


def end_reaper() -> None:
    """End only the reaper, which is the nearest of the processes that `end_agent` ends."""
    time.sleep(1)
    end_agent(most=1)
    go_on()


def write_for_long() -> None:
    """The process that `end_and_rewrite` leaves: rewrite and remove while the server looks."""
    until = time.monotonic() + 6
    while time.monotonic() < until:
        remove_marks()
        rewrite()
        time.sleep(PAUSE_S)


def remove_in_a_loop() -> None:
    if os.fork() == 0:
        while True:
            remove_marks()
            time.sleep(PAUSE_S)
    time.sleep(1)
    end_agent()
    go_on()


def remove_log() -> None:
    print("x" * 200_000, flush=True)
    for folder in FOLDERS:
        for path in glob.glob(f"{folder}/log/*"):
            os.unlink(path)
    time.sleep(1)
    print("y" * 200_000, flush=True)


def replace(make: Callable[[str], object]) -> None:
    """Put something else in the place of each record, with the agent alive."""
    for folder in FOLDERS:
        for name in RECORDS:
            path = f"{folder}/{name}"
            try:
                if os.path.lexists(path) and os.path.isdir(path):
                    os.rename(path, f"{path}.old")
                elif os.path.lexists(path):
                    os.unlink(path)
                make(path)
            except OSError:
                continue
    time.sleep(3)  # the agent and the server look meanwhile


def make_large(path: str) -> None:
    with open(path, "w") as file:
        file.truncate(1 << 40)


WAYS = {
    "rewrite, then end the agent": rewrite_and_end,
    "end the agent, then rewrite": end_and_rewrite,
    "stay": write_for_long,
    "remove marks in a loop": remove_in_a_loop,
    "end the reaper": end_reaper,
    "end the agent": end_and_wait,
    "remove the log": remove_log,
    "links": lambda: replace(lambda path: os.symlink("/etc/passwd", path)),
    "links to nothing": lambda: replace(lambda path: os.symlink("/nowhere/x", path)),
    "pipes": lambda: replace(os.mkfifo),
    "folders": lambda: replace(os.mkdir),
    "large files": lambda: replace(make_large),
    "rewrite": rewrite_and_go_on,
}

if __name__ == "__main__":
    main()
