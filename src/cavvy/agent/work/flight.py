"""Reads the dumps of PyTorch's flight recorder (NCCL's, and Gloo's since PyTorch 2.8): which
collectives each rank has called last. Torch writes them when a collective times out
(TORCH_NCCL_DUMP_ON_TIMEOUT), and when something is written to the pipe that
TORCH_NCCL_DEBUG_INFO_PIPE_FILE names.

A dump is a pickle, which could run any code: only plain containers, numbers and texts are read.
"""

from __future__ import annotations

import io
import os
import pickle
import resource
import stat
import time

from ..disk import open_own, read_process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Any

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
START = 19  # index of the field of /proc/PID/stat after the program's name


class PlainUnpickler(pickle.Unpickler):
    """Reads a pickle of containers, numbers and texts. Lists of numbers that torch has typed become
    plain lists; anything else that a pickle names is refused.
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
