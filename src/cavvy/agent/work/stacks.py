"""Takes the stacks of the work's Python processes with py-spy, and reads the dumps of PyTorch's
flight recorder, to find out which rank hangs, and where.

Only the main thread of a process counts: it calls the collectives of PyTorch, or a data loader.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import shutil
import stat
import subprocess
import sys
import time
import zlib

from ..disk import open_own, read_process
from .cpu_uses import CpuUses
from .deadlocks import is_deadlocked
from .python_start import LAUNCHER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from typing import Any

TOOL = "py-spy"
MOST_PROCESSES = 64
MOST_TEXT = 200_000  # characters of all stacks in the log
LIMIT_S = 10.0  # of one call of the tool
ROUNDS, PAUSE_S = 4, 4.0  # a process whose stack differs between rounds does not hang
# Devices of GPUs. A process that waits for one may keep a CPU busy, so that its use says nothing.
GPUS = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")
PPID, START = 1, 19  # indexes of the fields of /proc/PID/stat after the program's name
# Files of PyTorch in which a rank waits for others, and the name of the wait; "" for the name of
# the function.
WAITS = {
    "torch/distributed/distributed_c10d.py": "",
    "torch/distributed/rendezvous.py": "rendezvous",
    "torch/autograd/graph.py": "backward",
    "torch/cuda/__init__.py": "synchronize",
}
DATA_LOADER = "torch/utils/data/dataloader.py"
DATA_WORKER = "torch/utils/data/_utils/worker.py"
# Files whose frames show that a process only starts other processes or helps one.
HELPERS = (
    "multiprocessing/resource_tracker.py",
    "multiprocessing/forkserver.py",
    "multiprocessing/popen_",
    DATA_WORKER,
    "torch/utils/data/_utils/pin_memory.py",
    "torch/multiprocessing/spawn.py",
    "torch/distributed/elastic/",
    "torch/distributed/run.py",
    "torch/distributed/launcher/",
    "subprocess.py",
)
RANKS = f"/{LAUNCHER}.py"  # the file that starts ranks for PyTorch's launchers
# Processes of the agent itself, which run the work.
OWN = "/agent/work/reaper.py"
# of the dumps of the flight recorder
BUFFERS = (b"TORCH_FR_BUFFER_SIZE", b"TORCH_NCCL_TRACE_BUFFER_SIZE")
FILES = (b"TORCH_FR_DUMP_TEMP_FILE", b"TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
PIPE = b"TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
USUAL = ("/tmp/nccl_trace_rank_", "{}/torch/comm_lib_trace_rank_", "{}/torch/nccl_trace_rank_")
WAIT_S = 20.0  # torch looks at its pipe every second, and needs seconds to name frames
POLL_S = 0.2
LARGEST = 64 << 20  # bytes of a dump; 2000 entries with stacks take 2 MB
MOST_ENTRIES = 100_000
MOST_GROUPS = 4
LONGEST, LONGEST_PATH = 100, 1000  # characters of a name and of a text
MEMORY = 512 << 20  # more bytes of this process while it reads a dump
LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python", "<frozen ")


def report_stacks(path: str, pids: Collection[int], rank: int) -> int:
    """Print the stacks as one line of JSON: `stacks` has the place of each process, `moved` whether
    one of them does not hang, `deadlocked` whether nothing can wake any of them, `text` the stacks
    or why there are none. `path` is the PATH of the
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
        return _look_without_tool(pids, programs)
    since, asked = time.time(), ask_for_dumps(programs)
    uses = CpuUses(pids)
    seen: dict[int, list[dict[str, Any]]] = {}
    moved, faults, own, dead = set[int](), list[str](), set[int](), True
    for turn in range(ROUNDS):
        if turn:
            uses.rest(PAUSE_S)
            dead = dead and is_deadlocked({*pids} - own)  # the tool has stopped no thread lately
        for pid in programs if not turn else list(seen):
            frames, fault = dump(tool, pid)
            if any(each["file"].endswith(OWN) for each in frames):
                own.add(pid)
                continue
            if fault:
                faults.append(fault)
            if frames and seen.get(pid) and seen[pid] != frames:
                moved.add(pid)
            if frames or pid not in seen:
                seen[pid] = frames
    main = {pid: frames for pid, frames in seen.items() if not is_helper(frames)}
    if not any(main.values()):  # a program that waits for others that it has started
        main = {pid: frames for pid, frames in seen.items() if frames} or main
    works = find_working({*pids}, main, moved, uses.list_busy())
    stacks = []
    if any(main.values()):
        flights = {} if works else read_flights(programs, asked, since)
        stacks = [
            {
                **flights.get(pid, {}),
                **describe(main[pid] or read_state(pid), list_workers(pid, seen)),
                "rank": number,
                "world": world,
                "works": pid in works,
                "mark": make_mark(pid, main[pid]),
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
    return {
        "stacks": stacks,
        "moved": bool(works),
        "deadlocked": dead and not works,
        "text": text,
    }


def _look_without_tool(pids: Collection[int], programs: list[int]) -> dict[str, Any]:
    """Return what is known without stacks: the use of CPUs, locks, and PyTorch's recorder."""
    uses, dead = CpuUses(pids), is_deadlocked(pids)
    uses.rest(PAUSE_S)
    works = find_working({*pids}, {}, set(), uses.list_busy())
    return {
        "stacks": list_flights(programs),
        "moved": bool(works),
        "deadlocked": dead and is_deadlocked(pids),
        "text": f"no stacks: {TOOL} is installed neither with the task nor with Cavvy on this node",
    }


def find_working(
    pids: set[int],
    main: dict[int, list[dict[str, Any]]],
    moved: set[int],
    busy: set[int],
) -> set[int]:
    """Return which processes do work of their own: those of `main` whose stacks have changed, or
    that compute, or one of whose children computes, and that wait for no other rank; and others
    that compute without being a child of one of them."""
    found = {pid for pid in moved & main.keys() if not find_call(main[pid])}
    for pid in busy:
        root = next((at for at in list_parents(pid, pids) if at in main), pid)
        if not find_call(main.get(root, [])) and not has_gpu(pid):
            found.add(root)
    return found


def list_parents(pid: int, among: set[int]) -> Iterator[int]:
    """Yield a process, and those of the work that have started it, the nearest first."""
    told = set[int]()
    while pid in among and pid not in told:
        told.add(pid)
        yield pid
        pid = int((read_process(pid) or [b"", b"0"])[PPID])


def has_gpu(pid: int) -> bool:
    """Return whether a process has opened a GPU."""
    try:
        opened = [os.readlink(each.path) for each in os.scandir(f"/proc/{pid}/fd")]
    except OSError:
        return False
    return any(path.startswith(GPUS) for path in opened)


def list_workers(pid: int, seen: dict[int, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the frames of a worker of the data loader in which a process waits, or []."""
    if not any(DATA_LOADER in each["file"] for each in seen[pid]):
        return []
    for other, frames in seen.items():
        if any(DATA_WORKER in each["file"] for each in frames) and pid in list_parents(
            other, {*seen}
        ):
            own = [each for each in frames if not is_library(each["file"])]
            if own:
                return own
    return []


def make_mark(pid: int, frames: list[dict[str, Any]]) -> int:
    """Return a number that stays the same while the main thread waits at one place: of its frames,
    their variables, and its use of a CPU."""
    try:
        with open(f"/proc/{pid}/task/{pid}/stat", "rb") as file:
            ticks = file.read().rpartition(b")")[2].split()[11:13]
    except OSError:
        ticks = []
    return zlib.crc32(repr((frames, ticks)).encode())


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
    main = find_main(threads, pid)
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
    # a rank that was forked has the frames of its launcher below its own
    own = next((at for at, each in enumerate(frames) if each["file"].endswith(RANKS)), len(frames))
    is_rank = any(each["name"] == "be_rank" for each in frames[own:])
    frames = frames[:own] if is_rank and own else frames
    return frames, "" if frames else f"{TOOL}: process {pid} has no main thread"


def find_main(threads: list[dict[str, Any]], pid: int) -> dict[str, Any]:
    """Return the main thread, or {}. py-spy knows names of threads only if the program has imported
    `threading`, and IDs of the system only where it may read them: those that Python has kept,
    which are of its own PID namespace. Every other thread of Python begins in `threading`, or with
    a function of a library.
    """
    own = {pid, *read_own_numbers(pid)}
    marks: list[Callable[[dict[str, Any]], bool]] = [
        lambda each: each.get("os_thread_id") in own,
        lambda each: each.get("thread_name") == "MainThread",
        lambda each: bool(each.get("frames")) and each["frames"][-1]["name"] == "<module>",
        lambda each: len(threads) == 1,
    ]
    return next((each for mark in marks for each in threads if mark(each)), {})


def read_own_numbers(pid: int) -> list[int]:
    """Return the numbers of a process in its PID namespaces, [] if it is gone."""
    try:
        with open(f"/proc/{pid}/status") as file:
            lines = [line.split() for line in file if line.startswith("NSpid:")]
    except OSError:
        return []
    return [int(number) for line in lines for number in line[1:]]


def is_helper(frames: list[dict[str, Any]]) -> bool:
    """Return whether the process only starts others, or helps one: its innermost frames say so."""
    return any(part in each["file"] for each in frames for part in HELPERS)


def describe(frames: list[dict[str, Any]], worker: Collection[Any] = ()) -> dict[str, Any]:
    """Return where a process is: its innermost frame outside of libraries, that of the `worker` for
    which it waits, and the operation of PyTorch in which it waits for other ranks, or ""."""
    place = _name_place(frames)
    if worker:
        place += f", waiting for a data worker at {_name_place([*worker])}"
    return {"place": place[:200], "call": find_call(frames)}


def _name_place(frames: list[dict[str, Any]]) -> str:
    own_code = [each for each in frames if not is_library(each["file"])]
    at = (own_code or frames)[0]
    line = f":{at['line']}" if at["line"] else ""
    return f"{os.path.basename(at['file'])}{line} in {at['name']}"


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


class PlainUnpickler(pickle.Unpickler):
    """Reads a dump of the flight recorder (NCCL's, and Gloo's since PyTorch 2.8): which collectives
    each rank has called last. Torch writes dumps when a collective times out
    (TORCH_NCCL_DUMP_ON_TIMEOUT), and when something is written to the pipe that
    TORCH_NCCL_DEBUG_INFO_PIPE_FILE names.

    A dump is a pickle, which could run any code: only plain containers, numbers and texts are read.
    Lists of numbers that torch has typed become plain lists; anything else that a pickle names is
    refused.
    """

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch.jit._pickle" and name in ("build_intlist", "build_doublelist"):
            return list
        raise pickle.UnpicklingError(f"the dump names {module}.{name}")


def ask_for_dumps(pids: Collection[int]) -> set[int]:
    """Ask the processes that have a pipe for a dump, and return them."""
    asked = set()
    for pid in pids:
        env = read_env(pid)
        pipe, rank = env.get(PIPE), env.get(b"RANK", b"")
        if pipe and rank.isdigit() and _write_pipe(pid, os.fsdecode(pipe + rank) + ".pipe"):
            asked.add(pid)
    return asked


def read_flights(
    pids: Collection[int], asked: Collection[int], since: float
) -> dict[int, dict[str, Any]]:
    """Return what `read_flight` returns for each process that has a dump. Those that were asked at
    the time `since` have WAIT_S for a newer one.
    """
    found: dict[int, dict[str, Any]] = {}
    until = time.monotonic() + WAIT_S
    while True:
        for pid in pids:
            if pid not in found and (flight := read_flight(pid, since if pid in asked else 0)):
                found[pid] = flight
        if found.keys() >= {*asked} or time.monotonic() > until:
            break
        time.sleep(POLL_S)
    older = {pid: read_flight(pid) for pid in asked if pid not in found}
    return {**found, **{pid: flight for pid, flight in older.items() if flight}}


def _write_pipe(pid: int, path: str) -> bool:
    """Write to a pipe, if the user of the process owns it: its name is the work's own text."""
    path = _inside(pid, path)
    try:
        owner = os.stat(f"/proc/{pid}").st_uid
        found = os.lstat(path)
        if not stat.S_ISFIFO(found.st_mode) or found.st_uid != owner:
            return False
        with open(path, "wb", buffering=0, opener=_open_to_write) as pipe:
            found = os.fstat(pipe.fileno())
            if not stat.S_ISFIFO(found.st_mode) or found.st_uid != owner:
                return False
            pipe.write(b"1\n")
        return True
    except OSError:
        return False


def _open_to_write(path: str, flags: int) -> int:
    return os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def read_flight(pid: int, since: float = 0) -> dict[str, Any]:
    """Return what a process has called last in each of its groups, `collectives`, and the line of
    its program that called the newest, `place`; {} without a dump of this process since a time.
    """
    env = read_env(pid)
    number = os.fsdecode(env.get(b"RANK", b""))
    if not number.isdigit():
        return {}
    named = [os.fsdecode(env[name]) for name in FILES if env.get(name)]
    if not named and any(env.get(name, b"0").strip() not in (b"", b"0") for name in BUFFERS):
        cache = os.fsdecode(env.get(b"XDG_CACHE_HOME") or env.get(b"HOME", b"/") + b"/.cache")
        named = [each.format(cache) for each in USUAL]
    for path in named:
        found = _load(pid, _inside(pid, path + number), since)
        if found:
            return found
    return {}


def _inside(pid: int, path: str) -> str:
    """Return the path as the process sees it, which may be in a container."""
    return f"/proc/{pid}/root{path}" if path.startswith("/") else f"/proc/{pid}/cwd/{path}"


def _load(pid: int, path: str, since: float) -> dict[str, Any]:
    try:
        with open(path, "rb", opener=open_own) as file:
            facts = os.fstat(file.fileno())
            own = facts.st_uid == os.stat(f"/proc/{pid}").st_uid
            if not stat.S_ISREG(facts.st_mode) or not own or facts.st_size > LARGEST:
                return {}
            # an earlier process may have had this rank; times of files may be a tick older
            if facts.st_mtime < max(find_start(pid), since) - 1:
                return {}
            raw = file.read(LARGEST)
    except (OSError, ValueError, IndexError):  # IndexError: the process has ended
        return {}
    return parse_dump(raw)


def find_start(pid: int) -> float:
    """Return when a process started, in seconds since 1970."""
    fields = read_process(pid) or []
    since_boot = int(fields[START]) / os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot


def parse_dump(raw: bytes) -> dict[str, Any]:
    """Return what `read_flight` returns, from the bytes of a dump; {} if they are none. A few bytes
    can describe much, so the memory of this process is limited meanwhile.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + MEMORY
    if soft == resource.RLIM_INFINITY or soft > limit:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        return _parse(raw)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        dump = PlainUnpickler(io.BytesIO(raw)).load()
        entries = dump["entries"][-MOST_ENTRIES:]
        newest: dict[str, dict[str, Any]] = {}
        for each in entries:
            if each.get("is_p2p"):
                continue
            group = _text(each["process_group"][0])[:LONGEST]
            number = int(each["collective_seq_id"])
            if group not in newest or number > newest[group]["collective_seq_id"]:
                newest[group] = each
        # groups in which something hangs first, the newest first
        order = sorted(newest, key=lambda group: (_is_done(newest[group]), -_age(newest[group])))
        found = [_describe(group, newest[group]) for group in order[:MOST_GROUPS]]
        return {"collectives": found, "place": _find_place(newest[order[0]])} if found else {}
    except Exception:  # noqa: BLE001  # the work's own bytes may be anything
        return {}


def _text(value: object) -> str:
    """Raises TypeError for a container: one that contains itself has a text without an end."""
    if not isinstance(value, str | int):
        raise TypeError
    return str(value)[:LONGEST_PATH]


def _describe(group: str, entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "group": group,
        "number": min(max(0, int(entry["collective_seq_id"])), 2**53),
        "call": _text(entry["profiling_name"]).rpartition(":")[2][:LONGEST],
        "done": _is_done(entry),
    }


def _is_done(entry: dict[str, Any]) -> bool:
    return entry.get("state") == "completed" or bool(entry.get("retired"))


def _age(entry: dict[str, Any]) -> int:
    return int(entry.get("time_created_ns") or 0)


def _find_place(entry: dict[str, Any]) -> str:
    """Return the innermost line of the program's own code that called the collective, or ""."""
    for each in entry.get("frames") or ():
        path = _text(each["filename"])
        if not is_library(path):
            line = int(each["line"])
            return f"{os.path.basename(path)}:{line} in {_text(each['name'])}"[:200]
    return ""


def is_library(file: str) -> bool:
    """Return whether a file is not the program's own. Libraries may poll while they wait."""
    return any(part in file for part in LIBRARIES)


def read_env(pid: int) -> dict[bytes, bytes]:
    """Return the variables with which a process started, {} if they cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            pairs = [each.partition(b"=") for each in file.read().split(b"\0")]
        return {name: value for name, _, value in pairs}
    except OSError:
        return {}
