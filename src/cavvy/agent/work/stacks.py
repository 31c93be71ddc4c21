"""Takes the stacks of the work's Python processes with py-spy, to find out which rank hangs, and
where.

Only the main thread of a process counts: it calls the collectives of PyTorch, or a data loader.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time

from ..disk import read_process
from .flight import ask_for_dumps, is_library, read_env, read_flights

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from typing import Any

TOOL = "py-spy"
MOST_PROCESSES = 64
MOST_TEXT = 200_000  # characters of all stacks in the log
LIMIT_S = 10.0  # of one call of the tool
ROUNDS, PAUSE_S = 4, 4.0  # a process whose stack differs between rounds does not hang
PPID, START = 1, 19  # indexes of the fields of /proc/PID/stat after the program's name
# Files of PyTorch in which a rank waits for others, and the name of the wait; "" for the name of
# the function.
WAITS = {
    "torch/distributed/distributed_c10d.py": "",
    "torch/distributed/rendezvous.py": "rendezvous",
    "torch/autograd/graph.py": "backward",
    "torch/cuda/__init__.py": "synchronize",
}
# Files whose frames show that a process only starts other processes or helps one.
HELPERS = (
    "multiprocessing/resource_tracker.py",
    "multiprocessing/forkserver.py",
    "multiprocessing/popen_",
    "torch/utils/data/_utils/worker.py",
    "torch/utils/data/_utils/pin_memory.py",
    "torch/multiprocessing/spawn.py",
    "torch/distributed/elastic/",
    "torch/distributed/run.py",
    "torch/distributed/launcher/",
    "subprocess.py",
)
# Processes of the agent itself, which run the work.
OWN = "/agent/work/reaper.py"


def report_stacks(path: str, pids: Collection[int], rank: int) -> int:
    """Print the stacks as one line of JSON: `stacks` has the place of each process, `moved` whether
    one of them does not hang, `text` the stacks or why there are none. `path` is the PATH of the
    work, and `rank` that of the node. Runs in a process of its own.
    """
    found = take_stacks(path, pids, rank)
    os.write(1, (json.dumps(found) + "\n").encode())
    return 0


def take_stacks(path: str, pids: Collection[int], rank: int) -> dict[str, Any]:
    """Return what `report_stacks` prints."""
    tool = find_tool(path)
    programs = sorted(pid for pid in pids if is_python(pid))[:MOST_PROCESSES]
    if not tool:
        text = f"no stacks: {TOOL} is installed neither with the task nor with Cavvy on this node"
        return {"stacks": list_flights(programs), "moved": False, "text": text}
    since, asked = time.time(), ask_for_dumps(programs)
    seen: dict[int, list[dict[str, Any]]] = {}
    moved, faults = set[int](), list[str]()
    for turn in range(ROUNDS):
        if turn:
            time.sleep(PAUSE_S)
        for pid in programs if not turn else list(seen):
            frames, fault = dump(tool, pid)
            if any(each["file"].endswith(OWN) for each in frames):
                continue
            if fault:
                faults.append(fault)
            if frames and seen.get(pid) and seen[pid] != frames:
                moved.add(pid)
            if frames or pid not in seen:
                seen[pid] = frames
    main = {pid: frames for pid, frames in seen.items() if not is_helper(frames)}
    stacks = []
    if any(main.values()):
        flights = {} if moved & set(main) else read_flights(programs, asked, since)
        stacks = [
            {
                **flights.get(pid, {}),
                **describe(main[pid] or read_state(pid)),
                "rank": number,
                "world": world,
            }
            for pid, number, world in _number(main, rank)
        ]
    text = (
        "\n".join(_list_lines(seen))[:MOST_TEXT]
        if any(seen.values())
        else f"no stacks: {'; '.join(faults[:1])}"
    )
    if not programs:
        text = "no stacks: the work runs no Python program"
    return {"stacks": stacks, "moved": bool(moved & set(main)), "text": text}


def list_flights(pids: Collection[int]) -> list[dict[str, Any]]:
    """Return where the ranks are by their flight recorders alone."""
    since = time.time()
    told: dict[int, dict[str, Any]] = {}
    for pid, found in read_flights(pids, ask_for_dumps(pids), since).items():
        rank, world = read_rank(pid)
        if rank is not None and rank not in told:
            newest = found["collectives"][0]
            call = "" if newest["done"] else newest["call"]
            place = found["place"] or "an unknown line"
            told[rank] = {**found, "place": place, "call": call, "rank": rank, "world": world}
    return [*told.values()]


def choose_path(path: str, *, apart: bool) -> str:
    """Return the PATH on which the tool may be. It sees all that the agent sees, so work that is
    kept apart must not choose it: not with its own PATH, nor with a folder that it can write."""
    return os.environ.get("PATH", "") if apart else path


def find_tool(path: str) -> str:
    """Return the path of py-spy, from this PATH or beside the agent's Python, or ""."""
    folders = [*path.split(os.pathsep), os.path.dirname(sys.executable)]
    return shutil.which(TOOL, path=os.pathsep.join(filter(os.path.isabs, folders))) or ""


def is_python(pid: int) -> bool:
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")).startswith("python")
    except OSError:
        return False


def dump(tool: str, pid: int) -> tuple[list[dict[str, Any]], str]:
    """Return the frames of the main thread, the innermost first, and "", or [] and the reason."""
    try:
        done = subprocess.run(
            [tool, "dump", "--json", "--locals", "--pid", str(pid)],
            capture_output=True,
            timeout=LIMIT_S,
            check=False,
        )
        threads = json.loads(done.stdout) if done.returncode == 0 else None
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return [], f"{TOOL}: {error}"
    if threads is None:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines() or ["it failed"]
        return [], f"{TOOL}: {said[0][:200]}"
    main: dict[str, Any] = next(
        (each for each in threads if each.get("os_thread_id") == pid),
        next((each for each in threads if each.get("thread_name") == "MainThread"), {}),
    )
    frames = [
        {
            "name": each["name"],
            "file": each["filename"],
            "line": each["line"],
            # A loop that works at one line changes its variables. They are only compared.
            "variables": None if is_library(each["filename"]) else each.get("locals"),
        }
        for each in main.get("frames", ())
    ]
    return frames, "" if frames else f"{TOOL}: process {pid} has no main thread"


def is_helper(frames: list[dict[str, Any]]) -> bool:
    """Return whether the process only starts others, or helps one: its innermost frames say so."""
    return any(part in each["file"] for each in frames for part in HELPERS)


def describe(frames: list[dict[str, Any]]) -> dict[str, Any]:
    """Return where a process is: its innermost frame outside of libraries, and the operation of
    PyTorch in which it waits for other ranks, or ""."""
    own_code = [each for each in frames if not is_library(each["file"])]
    at = (own_code or frames)[0]
    line = f":{at['line']}" if at["line"] else ""
    place = f"{os.path.basename(at['file'])}{line} in {at['name']}"
    return {"place": place[:200], "call": find_call(frames)}


def read_state(pid: int) -> list[dict[str, Any]]:
    """Return a frame that stands for a process whose stack cannot be read."""
    state = (read_process(pid) or [b"?"])[0].decode()
    what = "a stop by a signal" if state in ("T", "t") else f"the kernel's state {state}"
    return [{"name": what, "file": "an unknown line", "line": 0}]


def find_call(frames: list[dict[str, Any]]) -> str:
    """Return the operation of PyTorch in which a rank waits for other ranks, or ""."""
    for at, each in enumerate(frames):
        for file, name in WAITS.items():
            if each["file"].endswith(file):
                if name:
                    return name
                outer = at
                while outer + 1 < len(frames) and "torch/distributed/" in frames[outer + 1]["file"]:
                    outer += 1
                called = [f for f in frames[at : outer + 1] if f["file"].endswith(file)]
                return str(called[-1]["name"])[:100]
    return ""


def _number(found: dict[int, list[dict[str, Any]]], node: int) -> Iterator[tuple[int, int, int]]:
    """Yield each process with its rank among all processes of the job, and the number of them: the
    variables that its launcher has set, or else its place among those that started on this node,
    and 0. Of several processes with the same rank, only the first counts.
    """
    order = sorted(found, key=lambda pid: int((read_process(pid) or [b"0"] * (START + 1))[START]))
    told = set[int]()
    for pid in order:
        rank, world = read_rank(pid)
        if rank is not None and rank not in told:
            told.add(rank)
            yield pid, rank, world
    rest = [] if told else [pid for pid in order if found[pid]]
    parents = {int((read_process(pid) or [b"", b"0"])[PPID]) for pid in rest}
    started = [pid for pid in rest if pid not in parents]  # their parents only start them
    for at, pid in enumerate(started):
        yield pid, node * len(started) + at, 0


def read_rank(pid: int) -> tuple[int | None, int]:
    """Return the variables RANK and WORLD_SIZE of a process; None and 0 where they are unknown."""
    try:
        env = read_env(pid)
        return int(env[b"RANK"]), int(env.get(b"WORLD_SIZE", b"0"))
    except (KeyError, ValueError):
        return None, 0


def _list_lines(seen: dict[int, list[dict[str, Any]]]) -> Iterator[str]:
    for pid, frames in seen.items():
        rank, _ = read_rank(pid)
        yield f"process {pid}" + ("" if rank is None else f", rank {rank}")
        for each in frames:
            yield f"    {each['name']} ({each['file']}:{each['line']})"
