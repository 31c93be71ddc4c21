"""Measures `cavvy dev`: the CPU time from the command to the prompt, the time until a lost shell is
back, and a mirrored folder against rsync.

    python benchmarks/dev_session.py --rounds 5    # needs rsync and ssh

The session is a job of this machine. rsync copies the same files to the same node, over plain `ssh
dev`, which leads through the same tunnel. Each round measures both with new folders, one after
the other, in turns. Ratios are of medians. `alone` is rsync between two local folders, without ssh.
"""

import argparse
import os
import re
import select
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.system import prepared
from tests.system.server_state import kill_server
from tests.system.trust import User, user_at

FILES, FOLDERS = 10_000, 100
STATES = ("all new", "nothing new", "100 changed")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder, user_at(Path(folder) / "user") as user:
        user.variables["HOME"] = folder
        user.popen = subprocess.Popen
        user.cli("dev", "--no-open")
        user.cli("ssh", "--setup")
        cpu = [time_prompt(user) for _ in range(rounds)]
        print(f"{'CPU s from the command to the prompt':44}{statistics.median(cpu):8.2f}   <= 2")
        back, same = time_return(user)
        print(f"{'s until a shell is back after kill -9':44}{back:8.2f}   same shell: {same}")
        measure_copies(user, Path(folder), rounds)
        user.cli("machines", "stop", "dev", "--yes")


class Shell:
    """`cavvy dev` in a terminal."""

    def __init__(self, user: User) -> None:
        self.fd, theirs = os.openpty()
        self.process = subprocess.Popen(
            [*prepared.CLI, "dev"],
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


def measure_copies(user: User, folder: Path, rounds: int) -> None:
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
    for state in STATES:
        own, other = (statistics.median(times[f"{name}, {state}"]) for name in ("sync", "rsync"))
        print(f"  {state:16} sync {own:6.2f}   rsync {other:6.2f}   ratio {own / other:5.2f}")
    print(f"  rsync of all between local folders: {statistics.median(times['alone']):.2f}")


def make_files(source: Path) -> None:
    for number in range(FILES):
        file = source / f"d{number % FOLDERS}" / f"f{number}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(os.urandom(512).hex().encode())


def run_there(user: User, line: str) -> str:
    return user.cli("exec", "dev", "--", "sh", "-c", line)


if __name__ == "__main__":
    main()
