"""Measures `cavvy dev`: the CPU time from the command to the prompt, the time until a session in a
pool has a prompt, the time until a lost shell is back, and a mirrored folder against rsync.

    python benchmarks/dev_session.py --rounds 5    # needs rsync and ssh

The session is a job of this machine. rsync copies the same files to the same node, over plain `ssh
dev`, which leads through the same tunnel. Each round measures both with new folders, one after
the other, in turns. Ratios are of medians. `alone` is rsync between two local folders, without ssh.
Ends with 1 if a bar is missed.
"""

import argparse
import os
import re
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from measure import record, table

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.system import prepared
from tests.system.server_state import kill_server
from tests.system.trust import User, user_at

FILES, FOLDERS = 10_000, 100
STATES = ("all new", "nothing new", "100 changed")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder, user_at(Path(folder) / "user") as user:
        user.variables["HOME"] = folder
        user.popen = subprocess.Popen
        claims = [claim_node(user, number) for number in range(rounds)]
        user.cli("dev", "--no-open")
        user.cli("ssh", "--setup")
        cpu = [time_prompt(user) for _ in range(rounds)]
        back, same = time_return(user)
        ratios = measure_copies(user, Path(folder), rounds)
        user.cli("machines", "stop", "dev", "--yes")
        user.cli("pool", "rm", "team")
    judged = (
        ("CPU seconds from the command to the prompt", statistics.median(cpu), 2.0, "s"),
        ("from `dev --pool` to a new session's prompt", statistics.median(claims), 10.0, "s"),
        ("another shell after kill -9 of the server", 0.0 if same else 1.0, 0.0, ""),
        *((f"sync / rsync, {state}", ratio, 1.3, "") for state, ratio in ratios.items()),
    )
    rows: list[tuple[str, float, object, str, str]] = [
        (what, figure, bar, unit, record(what, figure, bar, unit))
        for what, figure, bar, unit in judged
    ]
    rows.append(("until a shell is back after kill -9", back, "-", "s", ""))
    table(f"cavvy dev, medians of {rounds}", ("what", "figure", "bar", "unit", ""), rows)
    return 1 if any(row[-1] == "MISSED" for row in rows) else 0


class Shell:
    """`cavvy dev` in a terminal."""

    def __init__(self, user: User, *options: str) -> None:
        self.fd, theirs = os.openpty()
        self.process = subprocess.Popen(
            [*prepared.CLI, "dev", *options],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=user.environ | {"TERM": "xterm"},
            cwd=user.work,
            start_new_session=True,
        )
        os.close(theirs)
        self.seen = ""

    def ask(self, mark: str) -> str:
        """The number of the shell's process."""
        os.write(self.fd, f'echo "<{mark}:$$"">"\n'.encode())
        while (found := re.search(rf"<{mark}:(\d+)>", self.seen)) is None:
            if not select.select([self.fd], [], [], 120)[0]:
                raise SystemExit(self.seen)
            self.seen += os.read(self.fd, 65536).decode(errors="replace")
        return found[1]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.fd)


def claim_node(user: User, number: int) -> float:
    """The seconds from `cavvy dev --pool` to the first command of a new session."""
    if not number:
        user.cli("pool", "apply", user.task("{name: team, max: 2, resources: {cpu: 1}}"), "--yes")
    began = time.monotonic()
    shell = Shell(user, "--pool", "team", "--machine", f"claim-{number}")
    shell.ask("claimed")
    took = time.monotonic() - began
    shell.close()
    user.cli("stop", f"claim-{number}", "--yes")
    return took


def time_prompt(user: User) -> float:
    shell = Shell(user)
    shell.ask("first")
    words = Path(f"/proc/{shell.process.pid}/stat").read_text().rpartition(")")[2].split()
    shell.close()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def time_return(user: User) -> tuple[float, bool]:
    shell = Shell(user)
    before = shell.ask("before")
    began = time.monotonic()
    kill_server(user.home)
    while "connected again" not in shell.seen:
        shell.seen += os.read(shell.fd, 65536).decode(errors="replace")
    after = shell.ask("after")
    took = time.monotonic() - began
    shell.close()
    return took, before == after


def measure_copies(user: User, folder: Path, rounds: int) -> dict[str, float]:
    """The seconds of `--sync` as multiples of those of rsync, by state."""
    config = folder / ".ssh" / "config.d" / "cavvy"
    there = user.cli("exec", "dev", "--", "pwd").strip()
    times: dict[str, list[float]] = {}

    def timed(name: str, act: Callable[..., object], *given: object) -> None:
        began = time.monotonic()
        act(*given)
        times.setdefault(name, []).append(time.monotonic() - began)

    def rsync(*words: object) -> None:
        argv = ["rsync", "-a", "--delete", *map(str, words)]
        subprocess.run(argv, check=True, env=user.environ, stdout=subprocess.DEVNULL)

    def sync(source: object) -> None:
        done = user.cli("dev", "--no-open", "--sync", str(source))
        assert "sync:" in done, done

    for number in range(rounds):
        source = folder / f"source-{number}"
        make_files(source)
        run_there(user, f"find {there} -mindepth 1 -delete; rm -rf {there}/../rsynced")
        for state in STATES:
            if state == "100 changed":
                for file in list(source.rglob("f*"))[::100]:
                    file.write_text(file.read_text() + "changed")
            for turn in ("rsync", "sync") if number % 2 else ("sync", "rsync"):
                far = ("-e", f"ssh -F {config}", f"{source}/", f"dev:{there}/../rsynced/")
                timed(f"{turn}, {state}", *((rsync, *far) if turn == "rsync" else (sync, source)))
        timed("alone", rsync, f"{source}/", f"{folder}/alone-{number}/")
        count = run_there(user, "find . -name 'f*' -type f | wc -l")
        assert int(count) == FILES, count
        shutil.rmtree(source)
    print(f"\n{FILES} files of 1 KiB, medians of {rounds}, in seconds")
    ratios = {}
    for state in STATES:
        own, other = (statistics.median(times[f"{name}, {state}"]) for name in ("sync", "rsync"))
        ratios[state] = own / other
        print(f"  {state:16} sync {own:6.2f}   rsync {other:6.2f}   ratio {own / other:5.2f}")
    print(f"  rsync of all between local folders: {statistics.median(times['alone']):.2f}")
    return ratios


def make_files(source: Path) -> None:
    for number in range(FILES):
        file = source / f"d{number % FOLDERS}" / f"f{number}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(os.urandom(512).hex().encode())


def run_there(user: User, line: str) -> str:
    return user.cli("exec", "dev", "--", "sh", "-c", line)


if __name__ == "__main__":
    sys.exit(main())
