"""Measures sandboxes on this machine: the time from `create` to the first output, what many at once
take, and what is left after everything was killed.

    python benchmarks/sandboxes.py [--rounds 50] [--many 200]

A server of its own is started in a temporary folder. Prints lines of JSON.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

_CALLER = """
import sys, time
began = time.perf_counter()
import cavvy
made = cavvy.Sandbox.create(timeout="1m")
print(next(iter(made.exec("echo", "hello").stdout)).strip(), time.perf_counter() - began)
made.terminate()
"""
_HOLDER = """
import sys, time
import cavvy
for _ in range(int(sys.argv[1])):
    cavvy.Sandbox.create(timeout=float(sys.argv[2])).exec("sh", "-c", "touch x; sleep 1000")
print("there", flush=True)
time.sleep(1000)
"""
_LEFT_S = 30.0  # for which the end of all sandboxes is awaited


def say(what: str, **figures: object) -> None:
    print(json.dumps({"what": what, "load": round(os.getloadavg()[0], 1), **figures}), flush=True)


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile in milliseconds."""
    return round(sorted(values)[min(len(values) - 1, int(len(values) * share))] * 1000, 1)


def measure_start(rounds: int) -> None:
    """Measure one sandbox after another, and then programs that connect first."""
    import cavvy

    began = time.perf_counter()
    with cavvy.Sandbox.create() as made:
        next(iter(made.exec("echo", "hello").stdout))
        say("first sandbox, whose job starts", seconds=round(time.perf_counter() - began, 2))
    for words in (("echo", "hello"), ("python3", "-c", "print(1)")):
        created, total = [], []
        for _ in range(rounds):
            began = time.perf_counter()
            made = cavvy.Sandbox.create()
            created.append(time.perf_counter() - began)
            next(iter(made.exec(*words).stdout))
            total.append(time.perf_counter() - began)
            made.terminate()
        say(
            f"create to first output of {words[0]}",
            p50_ms=percentile(total, 0.5),
            p99_ms=percentile(total, 0.99),
            create_p50_ms=percentile(created, 0.5),
        )
    found = []
    for _ in range(max(3, rounds // 10)):
        done = subprocess.run([sys.executable, "-c", _CALLER], capture_output=True, text=True)
        found.append(float(done.stdout.split()[1]))
    say(
        "create to first output in a new program, with `import cavvy`",
        p50_ms=percentile(found, 0.5),
    )


def measure_many(many: int) -> None:
    """Measure sandboxes that live at the same time, each with a program."""
    import cavvy

    first = cavvy.Sandbox.create()
    zygote = find_zygote()
    before, free_before = set(list_children(zygote)), read_available_mib()
    cpu = read_cpu_s(zygote)
    began = time.perf_counter()
    made: list[Any] = []

    def create(count: int) -> None:
        for _ in range(count):
            each = cavvy.Sandbox.create(timeout="2m")
            next(iter(each.exec("sh", "-c", "echo there; exec sleep 1000").stdout))
            made.append(each)

    threads = [Thread(target=create, args=(many // 8,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - began
    inside = sorted(set(list_children(zygote)) - before)
    programs = [each for pid in inside for each in list_children(pid)]
    taken = free_before - read_available_mib()
    own = [read_own_mib(pid) for pid in inside]
    say(
        f"{len(inside)} at once",
        seconds=round(took, 2),
        own_mib_each=round(sum(own) / len(own), 2),
        own_mib_most=round(max(own), 2),
        machine_mib_each=round(taken / len(inside), 2),
        program_mib_each=round(sum(map(read_own_mib, programs)) / len(programs), 2),
        zygote_cpu_ms_each=round((read_cpu_s(zygote) - cpu) * 1000 / len(inside), 2),
    )
    for each in made:
        each.terminate()
    first.terminate()
    say("after they were terminated", left=len(set(list_children(zygote)) - before))


def measure_kills(home: str) -> None:
    """Kill processes with SIGKILL, and count what is left of the sandboxes."""
    for what, seconds in (("server, agent and caller", 4.0), ("all, with the host", 600.0)):
        holder = subprocess.Popen(
            [sys.executable, "-c", _HOLDER, "20", str(seconds)], stdout=subprocess.PIPE
        )
        assert holder.stdout is not None
        holder.stdout.readline()
        zygote = find_zygote()
        inside = list_below(zygote)
        host = read_parent(zygote)
        spare = set(inside) | (find_work(host) if what.startswith("server") else set())
        killed = [holder.pid, *(each for each in find_processes(home) if each not in spare)]
        if host not in spare:
            killed += [host]
        for pid in killed:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        holder.wait()
        began = time.perf_counter()
        while any(map(is_alive, inside)) and time.perf_counter() - began < _LEFT_S:
            time.sleep(0.02)
        root = Path(f"/proc/{host}/cwd/.cavvy/sandboxes/root")
        say(
            f"killed: {what}",
            processes_killed=len(killed),
            sandboxes=20,
            processes_inside=len(inside),
            left=sum(map(is_alive, inside)),
            seconds=round(time.perf_counter() - began, 2),
            files_left=len(os.listdir(root)) if root.exists() else 0,
        )
        for pid in (*find_processes(home), host):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def find_processes(home: str) -> list[int]:
    """Return the processes of the server and its agents: those with its folder in a word or
    variable."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            text = (path / "cmdline").read_bytes() + (path / "environ").read_bytes()
            if home.encode() in text and int(path.name) != os.getpid():
                found.append(int(path.name))
    return found


def find_work(host: int) -> set[int]:
    """Return the processes of the host's job: those that see the same processes."""
    found, own = set(), os.readlink(f"/proc/{host}/ns/pid")
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.readlink(path / "ns" / "pid") == own:
                found.add(int(path.name))
    return found


def find_zygote() -> int:
    """Return the newest process of this server that makes sandboxes."""
    home = os.environ["CAVVY_HOME"].encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if len(words) > 2 and words[2].endswith(b"zygote.py") and words[2].startswith(home):
                found.append(int(path.parent.name))
    return max(each for each in found if read_parent(each) not in found and is_alive(each))


def list_children(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def list_below(pid: int) -> list[int]:
    children = list_children(pid)
    return children + [each for child in children for each in list_below(child)]


def read_parent(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])
    return 0


def is_alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    return False


def read_cpu_s(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def read_own_mib(pid: int) -> float:
    """Return the memory that only this process has, in MiB."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(line.split()[1]) for line in text.splitlines() if "Private" in line) / 1024


def read_available_mib() -> float:
    text = Path("/proc/meminfo").read_text()
    return int(text.split("MemAvailable:")[1].split()[0]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--many", type=int, default=200)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cavvy-sandboxes-", ignore_cleanup_errors=True) as top:
        os.environ["CAVVY_HOME"] = home = f"{top}/home"
        os.chdir(top)
        try:
            measure_start(given.rounds)
            measure_many(given.many)
            measure_kills(home)
        finally:
            for pid in find_processes(home):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
