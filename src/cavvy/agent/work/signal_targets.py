"""Chooses which processes of the work get SIGTERM when the work is asked to end.

The program that the user wrote gets the signal, and what serves this program runs on until the
program has ended: a `DataLoader` whose workers have died raises an error in the program before the
program can save. For example, of `bash run.sh`, its `python train.py` and the four workers of this
script, only `python train.py` gets the signal, because bash has no handler for SIGTERM, and the
workers are children of a process that has one. /proc/PID/status says which processes have one.

* A process without a handler passes the signal on to the processes below it. A shell among these
  is stopped (SIGSTOP), so that it does not go on with its next command when its program has ended.
* A process with a handler gets the signal, and the processes below it do not.
* A shell with a trap gets the signal, and so do the processes below it, because a shell runs its
  trap only after its command has ended.
* A launcher ends its ranks by itself, after a time of its own: torchrun after 30 s, mpirun after a
  second. So its ranks get the signal instead, if one of them has a handler.
* If only shells and launchers have a handler, every process gets the signal.

What got no signal gets it as soon as what got it has ended.
"""

from __future__ import annotations

import os
import signal

from ..disk import read_process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_TERM = 1 << (signal.SIGTERM - 1)
SHELLS = ("sh", "bash", "dash", "ash", "busybox", "zsh", "ksh", "fish")
# Programs that start others, and end them in less than the time that these have. `timeout` signals
# its whole process group.
LAUNCHERS = (
    *("torchrun", "accelerate", "deepspeed", "horovodrun", "timeout", "make"),
    *("mpirun", "mpiexec", "orterun", "prterun", "prte", "orted", "prted", "mpiexec.hydra"),
    *("hydra_pmi_proxy", "hydra_bstrap_proxy", "srun"),
)
LAUNCHER_MODULES = (
    *("torch.distributed.run", "torch.distributed.launch", "deepspeed.launcher.launch"),
    *("deepspeed.launcher.runner", "accelerate.commands.launch", "horovod.runner.launch"),
)
_WORDS = 6  # of a command line; a launcher is among the first: `python -u -m torch.distributed.run`


class Targets:
    """What gets SIGTERM at once (`first`), which shells are stopped (`held`), and what gets SIGTERM
    when all of `first` that are no shells have ended (`left`)."""

    def __init__(self, first: list[int], held: list[int], left: list[int]) -> None:
        self.first = first
        self.held = held
        self.left = left
        # a process ID can be used again, so each is kept with the time of its start
        self._awaited = {pid: _started(pid) for pid in first if not is_shell(pid)}

    def have_ended(self) -> bool:
        """Whether every process that was signalled first has ended, except shells."""
        return all(_started(pid) != began for pid, began in self._awaited.items())


def choose(root: int, children: dict[int, list[int]]) -> Targets | None:
    """Return what to signal of a process and its descendants, or None if every process is to get
    the signal, since none but shells and launchers has a handler. `children` maps the ID of each
    process to those of its children.
    """
    first, held = _walk(root, children)
    if not any(not is_shell(pid) and not is_launcher(pid) for pid in first):
        return None
    everything = [root, *_below(root, children)]
    rest = [pid for pid in everything if pid not in first]
    return Targets(first, held, rest)


def _walk(pid: int, children: dict[int, list[int]]) -> tuple[list[int], list[int]]:
    """Return the processes to signal in this tree, and the shells to stop."""
    caught = catches(pid)
    if caught and not is_shell(pid) and not is_launcher(pid):
        return [pid], []
    first: list[int] = []
    held: list[int] = []
    for child in children.get(pid, []):
        more, stopped = _walk(child, children)
        first += more
        held += stopped
    if caught and (is_shell(pid) or not first):
        return [pid, *first], held
    if first and is_shell(pid):
        held.append(pid)
    return first, held


def _below(root: int, children: dict[int, list[int]]) -> Iterable[int]:
    todo = [root]
    while todo:
        below = children.get(todo.pop(), [])
        yield from below
        todo += below


def catches(pid: int) -> bool:
    """Whether the process has a handler for SIGTERM."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            line = next((each for each in file if each.startswith(b"SigCgt:")), b"")
    except OSError:
        return False
    return bool(int(line.split()[1], 16) & _TERM) if line else False


def is_shell(pid: int) -> bool:
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")) in SHELLS
    except OSError:
        return False


def is_launcher(pid: int) -> bool:
    """Whether the program, or the script or module that an interpreter runs, is a launcher."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(4096).decode(errors="replace").split("\0")[:_WORDS]
    except OSError:
        return False
    if not words or not words[0]:
        return False
    if os.path.basename(words[0]) in LAUNCHERS:
        return True
    for place, word in enumerate(words[1:], 1):
        if word == "-m":
            return words[place + 1 : place + 2] != [] and words[place + 1] in LAUNCHER_MODULES
        if not word.startswith("-"):  # the script of an interpreter
            return os.path.basename(word) in LAUNCHERS
    return False


def _started(pid: int) -> bytes:
    """When the process was started, or nothing if it has ended."""
    fields = read_process(pid)
    return fields[19] if fields and fields[0] not in (b"Z", b"X") else b""
