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
  trap only after its command has ended. What a shell has started in the background is left to its
  trap. The shell of the task is stopped like one without a trap, since its trap is the agent's,
  unless the commands of the task set one.
* A launcher ends its ranks by itself, after a time of its own: torchrun after 30 s, mpirun after a
  second. So its ranks get the signal instead, if one of them has a handler. A process is also a
  launcher if it has told processes below it their ranks, the first one included.
* A wrapper, such as `uv run`, `dumb-init` or a profiler, is a program of its own above another one
  that has a handler, which gets the signal instead. An interpreter such as Python is no wrapper,
  because scripts also start other programs as helpers.
* A program that a script is connected with by a pipe, as in `python train.py | ffmpeg`, is left to
  the script.
* `make` is stopped like a shell, since it would start its next recipe.
* The data workers of PyTorch do not count: they have a handler even if their program has none.
* If only shells and launchers have a handler, every process gets the signal, except the shell of
  the task. A shell with a trap that waits only for what it has started in the background counts.

What got no signal gets it when it installs a handler, or as soon as what got it has ended.

The signal would end an interpreter that still imports its libraries, before it can install its
handler. So, on a notice, a program that was started within the last 30 s has the rest of this time
to install one (`is_starting`).
"""

from __future__ import annotations

import os
import re
import signal
import time

from ..disk import read_process
from .environment import SHELL_LINE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_TERM = 1 << (signal.SIGTERM - 1)
_INT = 1 << (signal.SIGINT - 1)  # a script's shell lets its background commands ignore it
# PyTorch's data workers handle these signals, but not the others of Python's faulthandler.
_WORKER = sum(1 << (each - 1) for each in (signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV))
_FAULTS = sum(1 << (each - 1) for each in (signal.SIGABRT, signal.SIGILL))
# The variables by which launchers tell a process its rank on this node, or in all.
_LOCAL = b"LOCAL_RANK"
RANKS = (_LOCAL, b"OMPI_COMM_WORLD_RANK", b"PMIX_RANK", b"PMI_RANK")
HANDLERS, MAIN, ALL = "handlers", "main", "all"
SHELLS = ("sh", "bash", "dash", "ash", "busybox", "zsh", "ksh", "fish")
# Programs that start others, and end them in less than the time that these have. `timeout` signals
# its whole process group.
LAUNCHERS = (
    *("torchrun", "accelerate", "deepspeed", "horovodrun", "timeout", "make"),
    *("mpirun", "mpiexec", "orterun", "prterun", "prte", "orted", "prted", "mpiexec.hydra"),
    *("hydra_pmi_proxy", "hydra_bstrap_proxy", "srun"),
    # scripts that run programs: they pass the signal on too late, or not at all
    *("parallel", "supervisord", "honcho", "snakemake", "conda", "mamba", "npm", "wandb"),
)
# Launchers that start the next program when one has ended, and pass nothing between them: they are
# stopped as shells are.
STAGERS = ("make", "gmake")
LAUNCHER_MODULES = (
    *("torch.distributed.run", "torch.distributed.launch", "deepspeed.launcher.launch"),
    *("deepspeed.launcher.runner", "accelerate.commands.launch", "horovod.runner.launch"),
)
# Programs that run scripts, perhaps with a number behind the name, such as python3.12.
INTERPRETERS = ("python", "pypy", "perl", "ruby", "node", "julia", "R", "Rscript", "php", "lua")
STARTS_S = 30.0  # within which a script imports its libraries and installs its handler
_TRAP = re.compile(  # the command may be quoted, and then has other words of its own
    r"""(?:^|[;&|({\n])\s*trap\s(?:'[^']*'|"[^"]*"|[^\n'"])*?\b(?:SIG)?(?:TERM|15)\b"""
)
_WORDS = 6  # of a command line; a launcher is among the first: `python -u -m torch.distributed.run`


class Targets:
    """What gets SIGTERM at once (`first`), which shells are stopped (`held`), and what gets SIGTERM
    when the `programs` among the first have ended (`left`)."""

    def __init__(
        self, first: list[int], held: list[int], left: list[int], programs: list[int]
    ) -> None:
        self.first = first
        self.held = held
        self.left = left
        # a process ID can be used again, so each is kept with the time of its start
        self._awaited = {pid: _started(pid) for pid in programs}
        self.programs = programs
        self._known = {pid: _started(pid) for pid in left}

    def add_late(self, found: Targets | None) -> list[int]:
        """Return the processes that were there at first, and have a handler only now."""
        new = [
            pid
            for pid in (found.first if found else ())
            if pid not in self.first and self._known.get(pid) == _started(pid) != b""
        ]
        self.first += new
        self._awaited |= {
            pid: self._known[pid] for pid in new if found is not None and pid in found.programs
        }
        return new

    def list_running(self) -> list[int]:
        """Return the processes that were signalled first and still run."""
        return [pid for pid, began in self._awaited.items() if _started(pid) == began != b""]

    def have_ended(self) -> bool:
        """Whether every program that was signalled first has ended."""
        return not self.list_running()


def choose(root: int, children: dict[int, list[int]], notify: str = HANDLERS) -> Targets | None:
    """Return what to signal of a process and its descendants, or None if every process is to get
    the signal, since none but shells and launchers has a handler, or the task says so in `notify`.
    `children` maps the ID of each process to those of its children.
    """
    if notify == ALL:
        return None
    if notify == MAIN:
        return _choose_main(root, children)
    first, held = _walk(root, children)
    programs = [pid for pid in first if _is_program(pid, children)]
    if not programs:
        return None
    beside = _find_piped(programs)
    first, programs = ([pid for pid in each if pid not in beside] for each in (first, programs))
    everything = [root, *_below(root, children)]
    rest = [pid for pid in everything if pid not in first]
    return Targets(first, held, rest, programs)


def find_work(root: int, children: dict[int, list[int]], entry: str) -> int:
    """Return the process that the shell of the script `entry` has started, or 0."""
    for pid in _below(root, children) if entry else ():
        if is_shell(pid) and entry in _read_words(pid)[1:]:
            return next(iter(children.get(pid, [])), 0)
    return 0


def find_first(root: int, children: dict[int, list[int]]) -> int:
    """Return the shell of the task, or the program in its place, or 0. It may be below processes
    that only wait for it, outside of the work's namespaces, and beside orphans that these have
    adopted.
    """
    found, todo = 0, [root]
    for pid in todo:
        if is_own_shell(pid):
            return pid
        if is_fork(pid):
            todo += children.get(pid, [])
        else:
            found = found or pid
    return found


def adopt(first: int, children: dict[int, list[int]]) -> dict[int, list[int]]:
    """Return the children of each process, in which the orphans of the work are children of its
    first process. Programs that `nohup` has started in a script that has ended are orphans."""
    mine, orphans = [os.getpid()], list[int]()
    for parent in mine:
        for pid in children.get(parent, []):
            (mine if is_fork(pid) else orphans).append(pid)
    orphans = [pid for pid in orphans if pid != first]
    return {**children, first: [*children.get(first, []), *orphans]}


def list_awaited(shell: int, children: dict[int, list[int]]) -> list[int]:
    """Return what a shell waits for before its next command."""
    return [pid for pid in children.get(shell, []) if not _is_aside(pid, shell)]


def _choose_main(root: int, children: dict[int, list[int]]) -> Targets | None:
    """Choose what the commands of `run` have started directly, but not in the background, such as
    a server that the program uses, unless all is there. If some of these have a handler, as in
    `python train.py | tee log`, the others do not get the signal yet."""
    started = children.get(root, []) if is_own_shell(root) else [root]
    started = [pid for pid in started if pid == root or not _is_aside(pid, root)] or started
    programs = [pid for pid in started if catches(pid)] or started
    if not programs:
        return None
    held = [root] if root not in programs else []  # the shell of the task
    rest = [pid for pid in (root, *_below(root, children)) if pid not in programs]
    return Targets([*programs], held, rest, programs)


def _is_program(pid: int, children: dict[int, list[int]]) -> bool:
    """Whether what handles the signal in this process is the user's: no launcher, and no shell,
    unless its trap is in charge of a program in the background that has a handler, or that is all
    that the shell waits for."""
    if is_shell(pid):
        below = children.get(pid, [])
        aside = [each for each in below if _is_aside(each, pid)]
        return any(map(catches, aside)) or (aside != [] and len(aside) == len(below))
    return not _passes_on(pid, children)


def _find_piped(programs: list[int]) -> list[int]:
    """Return the programs, such as `ffmpeg`, that read what a script writes, or the reverse. The
    script could not go on without them, and they end with it."""
    scripts = [pid for pid in programs if is_interpreter(pid)]
    others = [pid for pid in programs if pid not in scripts and not is_shell(pid)]
    ends = {pid: [_read_link(pid, f"fd/{file}") for file in range(3)] for pid in programs}
    return [
        pid
        for pid in others
        if any(
            reader[0].startswith("pipe:") and reader[0] in writer[1:]
            for each in scripts
            for reader, writer in ((ends[pid], ends[each]), (ends[each], ends[pid]))
        )
    ]


def is_starting(root: int, children: dict[int, list[int]]) -> bool:
    """Whether a script of this tree was started so recently that its handler may still come. Below
    an interpreter, only the ranks of a launcher count, since helpers come and go."""
    passes = is_shell(root) or is_fork(root)
    if not passes and is_interpreter(root) and not _passes_on(root, children):
        return not catches(root) and _read_age(root) < STARTS_S
    return any(is_starting(each, children) for each in children.get(root, []))


def _passes_on(pid: int, children: dict[int, list[int]]) -> bool:
    """Whether programs below this one are what the user wrote."""
    return is_launcher(pid) or _wraps(pid, children) or has_ranks(pid, children)


def _wraps(pid: int, children: dict[int, list[int]]) -> bool:
    exe = _read_exe(pid)
    return bool(exe and not is_interpreter(pid)) and any(
        catches(each) and not is_shell(each) and _read_exe(each) not in ("", exe)
        for each in _below(pid, children)
    )


def _walk(pid: int, children: dict[int, list[int]]) -> tuple[list[int], list[int]]:
    """Return the processes to signal in this tree, and the shells to stop."""
    caught = catches(pid)
    shell = is_shell(pid)
    if caught and not shell and not _passes_on(pid, children):
        return [pid], []
    first: list[int] = []
    held: list[int] = []
    if shell and is_own_shell(pid):
        caught = _has_own_trap(pid)
    traps = caught and shell
    for child in children.get(pid, []):
        if traps and _is_aside(child, pid):
            continue
        more, stopped = _walk(child, children)
        first += more
        held += stopped
    if caught and (shell or not first):
        return [pid, *first], held
    if first and (shell or _read_name(pid) in STAGERS):
        held.append(pid)
    return first, held


def _below(root: int, children: dict[int, list[int]]) -> Iterable[int]:
    todo = [root]
    while todo:
        below = children.get(todo.pop(), [])
        yield from below
        todo += below


def catches(pid: int) -> bool:
    """Whether the process has a handler for SIGTERM, or blocks it since it waits for it by
    `sigwait` or `signalfd`, and is no data worker of PyTorch."""
    caught = _read_mask(pid, b"SigCgt:")
    helps = caught & _WORKER == _WORKER and not caught & _FAULTS
    return bool(caught & _TERM or _read_mask(pid, b"SigBlk:") & _TERM) and not helps


def _is_aside(pid: int, shell: int) -> bool:
    """Whether a shell has started this process in the background: without its own input, and
    ignoring SIGINT. In a container, all work ignores SIGINT, but has a pipe as its input."""
    if not _ignores(shell, _INT):
        return _ignores(pid, _INT)
    return _read_link(pid, "fd/0") == os.devnull != _read_link(shell, "fd/0")


def _ignores(pid: int, signals: int) -> bool:
    return bool(_read_mask(pid, b"SigIgn:") & signals)


def _read_mask(pid: int, name: bytes) -> int:
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            line = next((each for each in file if each.startswith(name)), b"")
    except OSError:
        return 0
    return int(line.split()[1], 16) if line else 0


def has_ranks(pid: int, children: dict[int, list[int]]) -> bool:
    """Whether the process has told processes below it their ranks. If they lack the first one, the
    process is this one itself, as with Lightning."""
    own = _read_ranks(pid)
    told = {each for below in _below(pid, children) for each in _read_ranks(below)} - own
    local = {each for each in told if each.startswith(_LOCAL + b"=")}
    return bool(told - local) or _LOCAL + b"=0" in local


def _read_ranks(pid: int) -> set[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return {each for each in file.read().split(b"\0") if each.partition(b"=")[0] in RANKS}
    except OSError:
        return set()  # a process of another user


def is_own_shell(pid: int) -> bool:
    """Whether this is the shell that runs the task's commands, whose trap is the agent's unless the
    commands set one (`_has_own_trap`)."""
    return is_shell(pid) and SHELL_LINE in _read_words(pid)


def _has_own_trap(shell: int) -> bool:
    """Whether the commands of a task, which its shell reads from a file, set a trap."""
    words = _read_words(shell)
    script = words[words.index(SHELL_LINE) + 1 :]
    try:
        with open(script[0], encoding="utf-8", errors="replace") as file:
            return sets_trap(file.read())
    except (IndexError, OSError):
        return False


def sets_trap(commands: str) -> bool:
    """Whether commands of a shell set a trap for SIGTERM."""
    return bool(_TRAP.search(commands))


def is_fork(pid: int) -> bool:
    """Whether this is a process of the agent, and not the work's: it has the same command line."""
    return _read_words(pid) == _read_words(os.getpid())


def is_shell(pid: int) -> bool:
    return _read_name(pid) in SHELLS


def is_interpreter(pid: int) -> bool:
    return _read_name(pid).rstrip("0123456789.") in INTERPRETERS


def _read_name(pid: int) -> str:
    return os.path.basename(_read_exe(pid))


def _read_exe(pid: int) -> str:
    """Return the path of a process's program, or "" for a process of another user."""
    return _read_link(pid, "exe").split(" (deleted)")[0]  # as after an update


def _read_link(pid: int, name: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/{name}")
    except OSError:
        return ""


def is_launcher(pid: int) -> bool:
    """Whether the program, or the script or module that an interpreter runs, is a launcher. A rank
    that its launcher has forked is none, and neither are the rank's own forks (`torchrun.py`): they
    have the command line of the launcher."""
    return _are_launcher(_read_words(pid)[:_WORDS]) and not _is_rank_fork(pid)


def _are_launcher(words: list[str]) -> bool:
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


def _is_rank_fork(pid: int) -> bool:
    """Whether a process has a rank, and the command line of its parent."""
    fields = read_process(pid)
    same = bool(fields) and _read_words(pid) == _read_words(int(fields[1]))
    return same and any(each.startswith(_LOCAL + b"=") for each in _read_ranks(pid))


def _read_words(pid: int) -> list[str]:
    """Return the command line of a process."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read(4096).decode(errors="replace").split("\0")
    except OSError:
        return []


def _read_age(pid: int) -> float:
    """Return the seconds since the process was started."""
    began = _started(pid)
    if not began:
        return STARTS_S
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(began) / os.sysconf("SC_CLK_TCK")


def _started(pid: int) -> bytes:
    """When the process was started, or nothing if it has ended."""
    fields = read_process(pid)
    return fields[19] if fields and fields[0] not in (b"Z", b"X") else b""
