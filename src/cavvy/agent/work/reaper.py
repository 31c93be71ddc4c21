"""The reaper: a small process that is the agent's child and the work's parent. The reaper ends all
processes of the work if the agent dies.

The reaper is a fork of the agent, and adopts all orphans of the work. The agent and the reaper
communicate over a socket pair. The agent sends the letter T, H or K to request SIGTERM, SIGHUP or
SIGKILL for the work; `signal_targets` chooses which processes get SIGTERM. N requests SIGTERM as
well, but if the work's program still starts, the reaper sends no signal. It reports `starting`, and
`started` when the program has a handler or has had the time to install one. The agent then sends T.
When the programs that got SIGTERM have ended while a shell is stopped that would start the next
command, the reaper reports `halted`. The agent answers with C if the work has said that it is
complete, so that the shell goes on, and otherwise with E. If the agent's end of the socket pair
closes, the agent is dead. When the work's first process has ended, the reaper reports one line,
`exit CODE OOM ASKED`. CODE is the process's exit code. OOM is the number of processes that the
kernel killed because the work used too much memory. ASKED is 1 if the work received SIGTERM before
it ended, else 0.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable

from ..disk import open_own, read_process
from ..loop import make_wake_pipe
from .alone import reap
from .cgroup import count_oom_kills
from .signal_targets import (
    ALL,
    HANDLERS,
    Targets,
    adopt,
    choose,
    find_first,
    find_work,
    is_own_shell,
    is_starting,
    list_awaited,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .view import WorkView

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
SWEEP_MS = 10
LOOK_MS = 50  # how often is looked whether what got SIGTERM first has ended
LATE_LOOKS = 10  # after so many looks, handlers are searched for that were installed meanwhile
HALT_S = 0.5  # maximum time in which a shell has stopped
ANSWER_S = 5.0  # how long an answer of the agent is awaited before the work ends
AFTER_S = 5.0  # how long after this the rest is left alone: a launcher looks at its ranks
LINUX = os.uname().sysname == "Linux"
# Signals whose default action programs expect. The agent may have inherited a different action.
_DEFAULTED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGHUP,
    signal.SIGCHLD,
    signal.SIGPIPE,
    signal.SIGXFSZ,
)


class ChildCommand:
    """A program, or a function of the agent, to start as a child process, with its folder and
    environment."""

    def __init__(
        self,
        argv: list[str],
        env: dict[str, str],
        cwd: str,
        call: Callable[[int], int] | None = None,
    ) -> None:
        self.argv = argv
        self.env = env
        self.cwd = cwd
        self.call = call  # a function to run instead of the program: channel -> exit code
        self.view: WorkView | None = None  # what the program sees; None if it sees everything
        # the reaper of running work, if the program enters that work's namespaces; 0 if the program
        # gets its own namespaces
        self.beside = 0
        self.cgroup: str | None = (
            None  # folder of the control group to enter, and to remove at the end
        )
        self.cleanup: list[str] | None = (
            None  # a program to run at the end, such as the command that removes the container
        )
        # the script of a shell that `call` starts, if the work's shell is a child of this shell
        self.entry = ""
        self.notify = "handlers"  # which processes get SIGTERM: see `signal_targets`
        self.channel = -1  # the file descriptor of a channel that only `call` writes to
        # whether child processes of the program may continue to run after the program has ended
        self.leaves = False
        self.status_path: str | None = (
            None  # the file in which the exit code is recorded before it is reported
        )


def report(
    channel: int, outcome: str, reason: str, code: int | None = None, *, reused: bool = False
) -> int:
    """Write the result of a step to the step's channel. Return the exit code of the step's process.
    An empty `outcome` means success.
    """
    import json

    result = {"outcome": outcome, "exit_code": code, "reason": reason, "reused": reused}
    os.write(channel, (json.dumps(result) + "\n").encode())
    return 1 if outcome else 0


def guard(command: ChildCommand, control: int, output: int, keep: int) -> None:
    """Act as the reaper: run the work until it ends, then exit. `keep` is the descriptor of the
    agent's lock, which stays locked until every process of the work has ended.
    """
    os.setsid()  # a signal to the agent's process group must not kill the reaper
    agent = os.getppid()
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: _pass_on(agent))
    _close_all_but({0, 1, 2, control, output, keep, command.channel})
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    wake, _ = make_wake_pipe()
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    reaper = os.getpid()
    work = os.fork()
    if work == 0:
        _become(command, output, reaper)
    os.close(output)
    if command.channel >= 0:
        os.close(command.channel)
    Reaper(work, control, wake, command).run()
    _clean_up(command, control)
    os._exit(0)


def _clean_up(command: ChildCommand, control: int) -> None:
    """Remove the container and the control group of work that has ended."""
    if command.cleanup:
        null = os.open(os.devnull, os.O_RDWR)
        actions = [(os.POSIX_SPAWN_DUP2, null, fd) for fd in (0, 1, 2)]
        pid = os.posix_spawn(command.cleanup[0], command.cleanup, command.env, file_actions=actions)
        os.waitpid(pid, 0)
    busy = command.cgroup is not None and not removed_group(command.cgroup)
    # tell the agent that the work has ended; the agent need not wait for the cleanup below
    os.close(control)
    for _ in range(100):
        if not busy or command.cgroup is None:
            return
        select.select([], [], [], 0.02)
        busy = not removed_group(command.cgroup)


class Reaper:
    """Waits until all child processes have ended, and handles the agent's requests meanwhile."""

    def __init__(self, work: int, control: int, wake: int, command: ChildCommand) -> None:
        self._work = work
        self._control = control
        self._wake = wake
        self._status_path = command.status_path
        self._cgroup = command.cgroup
        self._leaves = command.leaves
        # A function of the agent waits for the program that it starts, such as a container engine's
        # client, which gets SIGTERM too, also where the function has a handler.
        self._passes = command.call is not None
        self._notify, self._entry = command.notify, command.entry
        # whether the work's first process is not reaped yet; only then is its process ID valid
        self._alive = True
        self._asked = False  # whether the work was asked to end and is in its grace period
        # whether the work's first process was still running when the end was requested
        self._interrupted = False
        self._killing = False
        self._starting = False  # whether the signal waits for the start of the work's program
        self._signalled = False
        # what got SIGTERM first, until it has ended, and for a while after it
        self._targets: Targets | None = None
        self._looks = 0  # while it runs
        # the agent's answer to `halted`, and when it is given up
        self._answer, self._answer_until = b"", 0.0
        self._left_until = 0.0  # when what did not get SIGTERM first gets it

    def run(self) -> None:
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while self._reap():
            if self._killing:
                self._kill()
            if self._starting:
                self._look_at_start()
            self._go_on_asking()
            for fd, _ in poll.poll(self._patience()):
                if fd == self._wake:
                    os.read(fd, 512)
                elif not self._obey():
                    poll.unregister(fd)

    def _patience(self) -> int | None:
        if self._killing:
            return SWEEP_MS
        return None if self._targets is None and not self._starting else LOOK_MS

    def _reap(self) -> bool:
        """Reap all child processes that have ended. Return False when no child process is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._work:
                self._ended(exit_code(status))

    def _ended(self, code: int) -> None:
        self._alive = self._starting = False
        if self._status_path and not self._killing:
            try:
                with open(self._status_path, "w", opener=open_own) as file:
                    file.write(f"{code} {self._interrupted:d}\n")
            except OSError as error:  # The disk is full; the agent receives the code below.
                _tell(f"cannot record the exit code: {error}")
        kills = count_oom_kills(self._cgroup) if self._cgroup else 0
        self._report(b"exit %d %d %d\n" % (code, kills, self._interrupted))
        if self._asked:
            # a program that got the signal may still save, with its helpers
            busy = set(self._targets.list_running() if self._targets is not None else ())
            for pid in {*descendants(os.getpid())} - busy - {*descendants(*busy)}:
                _signal(pid, signal.SIGTERM)
        elif not self._leaves:
            self._killing = True

    def _obey(self) -> bool:
        """Handle the agent's requests; return False when the agent is dead."""
        try:
            letters = os.read(self._control, 64)
        except OSError:
            letters = b""
        if b"T" in letters or b"N" in letters:
            # reap first: a process that has already ended was not ended by this signal
            self._reap()
            self._asked, self._interrupted = True, self._alive
            if self._alive and not self._signalled:
                self._ask(patient=b"T" not in letters)
        for letter in (b"C", b"E"):
            if letter in letters:
                self._answer = letter
        if b"H" in letters and self._alive:
            _signal_group(self._work, signal.SIGHUP)
            _signal_group(self._work, signal.SIGCONT)  # a stopped program receives no signal
        if b"K" in letters or not letters:
            self._killing = True
        return bool(letters)

    def _choose(self) -> Targets | None:
        children = list_children()
        root = self._find_root(children)
        if not root:
            return None
        found = choose(root, children, self._notify)
        if found is None and self._notify == HANDLERS and not self._passes:
            found = choose(root, adopt(root, children), self._notify)
        return found

    def _choose_all(self) -> Targets | None:
        """Choose every process but the shell of the task, or None if there is no such shell."""
        children = list_children()
        shell = self._find_root(children)
        if not is_own_shell(shell):
            return None
        others = [pid for pid in descendants(os.getpid()) if pid != shell]
        return Targets(others, [shell], [shell], list_awaited(shell, children))

    def _find_starting(self) -> bool:
        children = list_children()
        root = self._find_root(children)
        return bool(root) and is_starting(root, children)

    def _find_root(self, children: dict[int, list[int]]) -> int:
        """Return the process below which the user's programs are, or 0 if no such is here."""
        if self._passes:
            return find_work(self._work, children, self._entry)
        return find_first(self._work, children)

    def _report(self, line: bytes) -> None:
        try:
            os.write(self._control, line)
        except OSError:
            self._killing = True  # the agent has died

    def _look_at_start(self) -> None:
        """Report when the work's program can handle the signal, or will not."""
        if self._choose() is not None or not self._find_starting():
            self._starting = False
            self._report(b"started\n")

    def _ask(self, *, patient: bool) -> None:
        """Send SIGTERM to what has a handler for it, or else to every process of the work."""
        self._targets = self._choose()
        waits = patient and self._targets is None and self._notify != ALL
        self._starting = waits and self._find_starting()
        if self._starting:
            self._report(b"starting\n")
            return
        self._signalled = True
        stopped = self._stop_shells(self._choose)
        if self._targets is None and self._notify != ALL:
            self._targets = self._choose_all()
            stopped += self._stop_shells(self._choose_all)
        if self._targets is None:
            apart = [pid for pid in descendants(os.getpid()) if not _in_group(pid, self._work)]
            if self._passes and not self._entry:
                apart = []  # podman's container, which gets the signal by its client
            _signal_group(self._work, signal.SIGTERM)
            for pid in apart:  # such as a program that was started by setsid
                _signal(pid, signal.SIGTERM)
        for pid in self._targets.first if self._targets is not None else ():
            _signal(pid, signal.SIGTERM)
        for pid in stopped:
            if self._targets is None or pid not in self._targets.held:
                _signal(pid, signal.SIGCONT)

    def _stop_shells(self, choose: Callable[[], Targets | None]) -> list[int]:
        """Stop the shells that would start their next command, and choose again, since a shell may
        have started it meanwhile. Return what was stopped."""
        stopped: list[int] = []
        while self._targets is not None:
            new = [pid for pid in self._targets.held if pid not in stopped]
            if not new:
                break
            # the outer ones first: with `set -m`, a shell goes on when its command is stopped
            for pid in reversed(new):
                halt(pid)
            stopped += new
            self._targets = choose()
        return stopped

    def _go_on_asking(self) -> None:
        """When what got SIGTERM first has ended, end the shells that were stopped, and soon after
        this what is left, such as a launcher that has not noticed the end of its ranks."""
        targets = self._targets
        if targets is None:
            return
        if not targets.have_ended():
            self._looks += 1
            if self._looks % LATE_LOOKS == 0 and self._alive:
                for pid in targets.add_late(self._choose()):
                    _signal(pid, signal.SIGTERM)
            return
        alive = {self._work, *descendants(os.getpid())}
        held = [pid for pid in targets.held if pid in alive]
        if held and self._awaits_answer():
            return
        if held:
            complete = self._answer == b"C"
            self._release(held, {*targets.left} & alive, end=not complete)
            if complete:
                self._targets = None
                return
        targets.held.clear()
        now = time.monotonic()
        self._left_until = self._left_until or now + AFTER_S
        if now >= self._left_until:
            self._targets = None
            for pid in {*targets.left} & alive:
                _signal(pid, signal.SIGTERM)

    def _release(self, held: list[int], others: set[int], *, end: bool) -> None:
        """Let the shells that were stopped go on, and end them if the work is not complete."""
        for pid in held:
            if end:
                _signal(pid, signal.SIGTERM)
            _signal(pid, signal.SIGCONT)
        for pid in others:  # `sudo` stops itself when its command is stopped
            _signal(pid, signal.SIGCONT)

    def _awaits_answer(self) -> bool:
        """Ask the agent whether the work has said that it is complete; return whether to wait."""
        now = time.monotonic()
        if not self._answer_until:
            self._answer_until = now + ANSWER_S
            self._report(b"halted\n")
        return not self._answer and now < self._answer_until

    def _kill(self) -> None:
        self._targets = None
        if self._alive:
            _signal_group(self._work, signal.SIGKILL)
        self._signal_rest(signal.SIGKILL)

    def _signal_rest(self, number: int) -> None:
        for pid in descendants(os.getpid()):
            _signal(pid, number)


def descendants(*roots: int) -> list[int]:
    """Return the IDs of all processes below these reapers. Orphaned processes are included, because
    reapers adopt them.
    """
    children = list_children()
    found, todo = [], [*roots]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def list_children() -> dict[int, list[int]]:
    """Return the IDs of the children of each process."""
    children: dict[int, list[int]] = {}
    try:
        names = os.listdir("/proc")
    except FileNotFoundError:
        return {}  # without /proc, only the process group can be signalled
    for name in names:
        if name.isdigit() and (fields := read_process(int(name))):
            children.setdefault(int(fields[1]), []).append(int(name))
    return children


def list_first(reaper: int) -> list[int]:
    """Return the oldest child of a reaper, and its descendants in the order of their starts. While
    the work's first process runs, the oldest child is that process, or the process that waits for
    it outside of the work's process namespace.
    """
    found = [(pid, read_process(pid)) for pid in descendants(reaper)]
    begun = sorted((int(each[19]), pid, int(each[1])) for pid, each in found if each)
    first = next((pid for _, pid, parent in begun if parent == reaper), 0)
    below = {first, *descendants(first)} if first else set()
    return [pid for _, pid, _ in begun if pid in below]


def exit_code(status: int) -> int:
    """Return the exit code in a wait status, or 128 + N if signal N ended the program."""
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def removed_group(folder: str) -> bool:
    """Remove a control group; return whether the group no longer exists. A control group can be
    busy for some milliseconds after its last process has ended.
    """
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def sweep() -> None:
    """Kill and reap all processes below this process, which must be a reaper. The calling process
    uses this function if another process has killed the reaper of the work, which would otherwise
    end the work's processes.
    """
    for _ in range(500):
        for pid in descendants(os.getpid()):
            _signal(pid, signal.SIGKILL)
        if not reap():
            return
        select.select([], [], [], 0.01)


def prctl(option: int, value: int) -> bool:
    """Call prctl(2) through the C library, because Python does not offer it; return whether the
    call succeeded."""
    if not LINUX:
        return False
    try:
        import _ctypes  # loads five times as fast as ctypes

        # None is this program, as in ctypes.CDLL(None)
        program = _ctypes.dlopen(None, 0)  # type: ignore[arg-type]
        address = _ctypes.dlsym(program, "prctl")
        return bool(_ctypes.call_function(address, (option, value, 0, 0, 0)) == 0)
    except (ImportError, AttributeError, OSError):
        return _slow_prctl(option, value)


def _slow_prctl(option: int, value: int) -> bool:
    try:
        import ctypes

        return bool(ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0)
    except (ImportError, AttributeError, OSError):
        return False


def _name(command: ChildCommand) -> str:
    return command.argv[0] if command.argv else "the work"


def _become(command: ChildCommand, output: int, reaper: int) -> None:
    """Run the command in the work's first process; never returns."""
    code = 126
    try:
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != reaper:
            os._exit(137)  # the parent had died before the death signal was set
        if command.cgroup is not None:
            with open(command.cgroup + "/cgroup.procs", "w") as file:
                file.write("0")
        # from here on, errors are written to the output of the command
        for target in (1, 2):
            os.dup2(output, target)
        if command.view is not None:
            if command.beside:
                prctl(PR_SET_DUMPABLE, 0)  # the work must not read this agent's memory
                command.view.join(lambda: list_first(command.beside))
            else:
                command.view.take()
            # changing the user clears the death signal, so set it again
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        for number in _DEFAULTED:
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.chdir(command.cwd)
        if command.call is not None:
            os._exit(command.call(command.channel))
        os.execvpe(command.argv[0], command.argv, command.env)
    except FileNotFoundError:
        code = 127
        _tell(f"cannot start {_name(command)}: no such command or folder")
    except OSError as error:
        _tell(f"cannot start {_name(command)}: {error.strerror}")
    except BaseException as error:  # noqa: BLE001
        # after any error, this process must not continue as an agent
        _tell(f"cannot start the work: {type(error).__name__}: {error}")
    finally:
        os._exit(code)


def _tell(text: str) -> None:
    try:
        os.write(2, (f"cavvy: {text}\n").encode())
    except OSError:
        return  # the disk is full


def _pass_on(agent: int) -> None:
    """Forward SIGTERM to the agent. A signal that is meant for the agent can reach the reaper,
    because the agent and the reaper have the same command line.
    """
    if os.getppid() == agent:
        _signal(agent, signal.SIGTERM)


def halt(pid: int) -> None:
    """Stop a process, and wait until it has stopped: until then it may start another one."""
    _signal(pid, signal.SIGSTOP)
    until = time.monotonic() + HALT_S
    while (fields := read_process(pid)) and fields[0] not in (b"T", b"t", b"Z", b"X"):
        if time.monotonic() >= until:
            return
        time.sleep(0.001)


def _signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        # The process has not created its group yet, or the group contains processes of another
        # user.
        _signal(group, number)


def _in_group(pid: int, group: int) -> bool:
    try:
        return os.getpgid(pid) == group
    except ProcessLookupError:
        return True


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def _close_all_but(keep: set[int]) -> None:
    for name in os.listdir(
        "/dev/fd" if os.path.isdir("/dev/fd") else "/proc/self/fd"
    ):  # a minimal root file system may lack one of these folders
        if int(name) not in keep:
            try:
                os.close(int(name))
            except OSError:
                continue  # the descriptor that was used to list the folder
