"""Starts the ranks of this node for torchrun, and keeps what it has imported while the job replaces
a lost node.

`python_start.py` runs this in the processes that start ranks with PyTorch: torchrun itself,
`python -m torch.distributed.run`, `accelerate launch`. Such a process has imported PyTorch when it
knows what to start. It then forks its ranks, which run the program, and need not import PyTorch
again. If another node of the job is lost, the ranks end, and the process stays: the ranks of the
next attempt are forked from it, too. It has run none of the program, and has used no accelerator,
so that a copy of it can do all that a new process can. Where this is not so, or the launcher is
asked for something that this does not do, PyTorch starts the ranks (`find_obstacle`).
`kept_program.py` has the messages between this process and the agent. `cavvy.train` keeps programs
in the same way without a launcher.

The agent copies this file to the node's folder. On the node, the file runs without the rest of
Cavvy, on Python 3.9 or later.
"""

from __future__ import annotations

import atexit
import dataclasses
import gc
import hashlib
import io
import json
import os
import re
import runpy
import select
import signal
import socket
import sys
import threading
import types
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, TracebackType
    from typing import Any, NoReturn

WAIT_S = 60.0  # seconds in which the agent answers that the process leaves, or stays
KILL_S = 30.0  # seconds that the other ranks have to end when one has failed, as with torchrun
_LONGEST = 4096  # bytes of the description of a lost connection
_ENDS = (signal.SIGTERM, signal.SIGINT)
_PASSED_ON = (*_ENDS, signal.SIGUSR1)
GIVEN = "given.json"  # the variables that the agent gave the job's commands, with digests
ROOM = "CAVVY_RANK_ROOM"  # the agent fills it with blanks (`environment.py`)
_PORTS = ("29500", "29400")  # what PyTorch's launchers use when they are told none
# Variables that the agent changes, or the launcher has read; the rest names no other node.
_TOLD_PREFIXES = ("CAVVY_", "PET_")
_TOLD = {
    *("MASTER_ADDR", "MASTER_PORT", "HOSTNAME"),
    *("SSH_CLIENT", "SSH_CONNECTION", "no_proxy", "NO_PROXY"),
}
# With 1, PyTorch counts GPUs without using them.
_COUNTS = "PYTORCH_NVML_BASED_CUDA_CHECK"
_ENV_START, _ENV_END = 47, 48  # indexes of the fields of /proc/PID/stat after the program's name
_TRIAL_S = 60  # seconds that a copy of the launcher has to import what the ranks have imported
_FOLDERS = ("_root_log_dir", "_run_log_dir")  # empty unless output is written there
# What is done here of a configuration of PyTorch's launcher; the rest must be as by default.
_DONE = {
    *("min_nodes", "max_nodes", "nproc_per_node", "run_id", "role", "max_restarts", "logs_specs"),
    *("rdzv_backend", "rdzv_endpoint", "rdzv_configs", "rdzv_timeout", "local_addr"),
    *("monitor_interval", "start_method", "numa_options"),
}


class NodeRanks:
    """The ranks of this node, and the connection to the agent, or None if it keeps no program. What
    is said on this connection is written once more in `train/rejoin.py`, since neither may import
    the other; a test compares both.
    """

    def __init__(self, place: RankPlace, line: socket.socket | None) -> None:
        self._place, self._line = place, line
        self._rest = b""
        self._ranks: dict[int, socket.socket] = {}  # process ID -> what the rank says of its error
        self._failed = 0  # exit code of the first rank that has failed, negative for a signal
        self._error = ""  # how its connection to another rank was lost
        self._asked = False  # whether the agent has asked the ranks to end
        self._signalled = 0  # the signal from elsewhere that has, or 0
        self._handlers: dict[int, Any] = {}
        self._ahead = ImportsAhead()
        self._woken, self._wakes = socket.socketpair()  # the second gets a byte for each signal
        for each in (self._woken, self._wakes):
            each.setblocking(False)

    def run(self) -> tuple[socket.socket, int] | None:
        """Fork the ranks until they end for good, and exit with the first failed one's code, or
        return None. Return, in each rank, its number on this node, and the socket on which it
        describes the error that ends it."""
        self._take_signals()
        while True:
            self._failed, self._error, self._asked = 0, "", False
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            gc.freeze()  # the collector would write to each object, which copies its page
            # a signal that arrives now waits until there are ranks that get it
            before = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
            if self._signalled:  # before there was a rank that could get it
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                self._leave(-self._signalled)
                return None
            for local in range(self._place.count):
                mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
                pid = os.fork()
                if not pid:
                    mine.close()
                    self._become_rank(local)
                    signal.pthread_sigmask(signal.SIG_SETMASK, before)
                    return its, local
                its.close()
                self._ranks[pid] = mine
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            self._await_ranks()
            self._ahead.stop()
            # ranks that save when they are asked to end may end with 0
            stays = bool(self._failed or self._asked) and not self._signalled
            stays = stays and not self._ahead.is_spoiled
            if not stays or not self._wait_for_rejoin():
                self._leave(self._failed)
                return None

    def _become_rank(self, local: int) -> None:
        for each in (self._line, *self._ranks.values()):
            if each is not None:
                each.close()
        self._return_signals()
        variables = self._place.name_rank(os.environ, local)
        os.environ.update(variables)
        show_variables(variables)
        if not local:  # all ranks run the same program
            self._ahead.note()
        if "numpy.random" in sys.modules:  # the ranks would draw the same numbers
            sys.modules["numpy.random"].seed()

    def _take_signals(self) -> None:
        """Pass signals on from here. The end of a rank is a signal, too: older kernels, and Pythons
        that were built for these, have no pidfds."""
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        for number in _PASSED_ON:
            self._handlers[number] = signal.signal(number, self._pass_on)
        self._handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)

    def _return_signals(self) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        for each in (self._woken, self._wakes):
            each.close()

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._signalled = self._signalled or (number if number in _ENDS else 0)
        self._signal(number)

    def _signal(self, number: int) -> None:
        for pid in self._ranks:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _await_ranks(self) -> None:
        """Wait for the end of all ranks. If one fails, the others are ended."""
        poll, ready = select.poll(), list[int]()
        poll.register(self._woken, select.POLLIN)
        if self._line is not None:
            poll.register(self._line, select.POLLIN)
        while self._reap():  # first: what has already ended was not ended by what is heard now
            if self._line is not None and self._line.fileno() in ready:
                self._hear_regroup(poll)
            ending = bool(self._failed or self._asked or self._signalled)
            wait_s = KILL_S if self._failed else None if ending else self._ahead.pause_s
            ready = [fd for fd, _ in poll.poll(wait_s and wait_s * 1000)]
            is_wake = ready == [self._woken.fileno()]
            if not ending and (not ready or (is_wake and self._ahead.is_trying)):
                self._ahead.look()
            elif not ready and not (self._asked or self._signalled):
                self._signal(signal.SIGKILL)
            if self._woken.fileno() in ready:
                self._woken.recv(4096)

    def _reap(self) -> bool:
        """Note which ranks have ended, and end the others if one has failed by itself. Return
        whether one still runs."""
        told = bool(self._failed or self._asked or self._signalled)
        codes: dict[int, int] = {}
        for pid in self._ranks:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
        self._failed = self._failed or next(filter(None, codes.values()), 0)
        if self._failed and not told:
            self._error = self._find_error(codes)
        for pid in codes:
            self._ranks.pop(pid).close()
        if self._failed and not told:
            self._signal(signal.SIGTERM)
        return bool(self._ranks)

    def _find_error(self, codes: dict[int, int]) -> str:
        """Return how a connection was lost, or "" if one of these ranks has failed otherwise, which
        is then why the others have lost theirs."""
        said = {pid: _read_error(line) for pid, line in self._ranks.items()}
        errors = [text or "" for pid, text in said.items() if text is not None or codes.get(pid)]
        return errors[0] if all(errors) else ""

    def _hear_regroup(self, poll: select.poll) -> None:
        assert self._line is not None
        heard = self._read()
        if heard is None:
            poll.unregister(self._line)
        elif "regroup" in heard:
            self._asked = True
            self._signal(signal.SIGTERM)

    def _wait_for_rejoin(self) -> bool:
        """Tell the agent that the ranks have ended, and take the variables of the next attempt.
        Return False if the process must leave."""
        if self._line is None:
            return False
        with suppress(OSError):
            self._say({"apart": {"code": _as_shell(self._failed), "error": self._error}})
        poll, answered = select.poll(), False
        poll.register(self._line, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        while ready := poll.poll(None if answered else WAIT_S * 1000):
            if self._woken.fileno() in [fd for fd, _ in ready]:
                self._woken.recv(4096)
                if self._signalled:
                    return False
                continue
            heard = self._read()
            if heard is None or "leave" in heard:
                return False
            answered = answered or "stay" in heard
            if "rejoin" in heard:
                os.environ.update(heard["rejoin"]["env"])
                return True
        return False

    def _read(self) -> dict[str, Any] | None:
        """Return what the agent has said, by kind; None if the connection is closed."""
        assert self._line is not None
        try:
            data = self._line.recv(65536)
        except OSError:
            data = b""
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        said: dict[str, Any] = {}
        for line in lines:
            said.update(json.loads(line))
        return said

    def _say(self, line: dict[str, object]) -> None:
        if self._line is not None:
            _send(self._line, line)

    def _leave(self, code: int) -> None:
        with suppress(OSError):
            self._say({"keeps": {"kept": 0}})
        if self._line is not None:
            self._line.close()
        self._return_signals()
        if code < 0:
            with suppress(OSError):  # SIGKILL has no handler
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        if code:
            sys.exit(_as_shell(code))


class ImportsAhead:
    """Imports here, while the ranks work, what they have imported of PyTorch, so that the ranks of
    the next attempt have it, too. It is tried in a copy of this process first, in which a module
    may start threads or processes, or use an accelerator: such a module is left to the ranks. So is
    all that is no part of PyTorch, which may read a rank's variables when it is imported.
    """

    def __init__(self) -> None:
        self.is_spoiled = False  # whether this process can no longer be copied
        self.pause_s: float = 2  # until the next look, which grows when the ranks have started
        self._file = os.memfd_create("cavvy imports")  # names of modules, a line each
        self._inode = os.fstat(self._file).st_ino
        self._size = 0
        self._tried: set[str] = set()
        self._trial: tuple[int, io.TextIOWrapper] | None = None  # process, and what it writes

    @property
    def is_trying(self) -> bool:
        """Whether a trial runs, whose end is a signal."""
        return self._trial is not None

    def note(self) -> None:
        """Write down what this rank imports from now on."""
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Find nothing: the finders of Python do."""
        if name.startswith("torch."):
            with suppress(OSError):  # a program may close all files, and open its own
                if os.fstat(self._file).st_ino == self._inode:
                    os.write(self._file, name.encode() + b"\n")

    def look(self) -> None:
        """Import what the ranks have imported, if they have imported nothing since the last look:
        then they are past their start."""
        if self._trial is not None:
            self._end_trial()
            return
        size, before = os.fstat(self._file).st_size, self._size
        self._size = size
        if size != before or self.is_spoiled:
            return
        self.pause_s = min(2 * self.pause_s, 300)
        names = dict.fromkeys(os.pread(self._file, size, 0).decode().splitlines())
        fresh = [each for each in names if each not in sys.modules and each not in self._tried]
        self._tried.update(fresh)
        if fresh:
            self._try(fresh)

    def stop(self) -> None:
        """End a trial that runs, since this process has something else to do."""
        if self._trial is not None:
            (pid, line), self._trial = self._trial, None
            line.close()
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _try(self, names: list[str]) -> None:
        """Import modules in a copy, up to the first one that does more than a copy could repeat."""
        reads, writes = os.pipe()
        line = open(reads)  # noqa: SIM115 - until the trial ends
        pid = os.fork()
        if pid:
            os.close(writes)
            self._trial = pid, line
            return
        with suppress(BaseException):
            signal.set_wakeup_fd(-1)
            for number in (*_PASSED_ON, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            os.nice(19)
            signal.alarm(_TRIAL_S)
            threads, good = _count_threads(), list[str]()
            for each in names:
                _import(each)
                if _count_threads() > threads or _list_children():
                    break
                good.append(each)
            if not _has_used_gpu():
                with open(writes, "w") as file:
                    file.write("\n".join(good))
        os._exit(0)

    def _end_trial(self) -> None:
        """Import what a trial has found good, if it has ended."""
        assert self._trial is not None
        pid, line = self._trial
        if os.waitpid(pid, os.WNOHANG)[0]:
            self._trial = None
            with line:
                good = line.read().split()
            for each in good:
                _import(each)
            self.is_spoiled = bool(find_uncopied())


def _import(name: str) -> None:
    """Import a module without its warnings, which the ranks have given. What cannot be imported is
    left to the ranks."""
    import importlib
    import warnings

    unset = _COUNTS not in os.environ
    os.environ.setdefault(_COUNTS, "1")
    try:
        with warnings.catch_warnings(), suppress(Exception):
            warnings.simplefilter("ignore")
            importlib.import_module(name)
    finally:
        if unset:
            os.environ.pop(_COUNTS, None)


def _count_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _list_children() -> list[str]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return file.read().split()


@dataclasses.dataclass(frozen=True)
class RankPlace:
    """How many ranks this node has, and what else torchrun tells a rank."""

    count: int
    port: str = ""  # of rank 0 where it is not $MASTER_PORT
    role: str = "default_role"
    run: str = "none"

    def name_rank(self, env: Any, local: int) -> dict[str, str]:
        """Return the variables by which torchrun tells a rank its place. Rank 0 holds the store."""
        node, nodes = int(env["NODE_RANK"]), int(env["NNODES"])
        rank, size = str(node * self.count + local), str(nodes * self.count)
        return {
            "RANK": rank,
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": str(self.count),
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": size,
            "ROLE_NAME": self.role,
            "GROUP_RANK": str(node),
            "GROUP_WORLD_SIZE": str(nodes),
            "MASTER_ADDR": env["MASTER_ADDR"],
            "MASTER_PORT": self.port or env["MASTER_PORT"],
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": self.run,
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": env.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }


def replace_launch(api: Any) -> None:
    """Let the ranks be started here that PyTorch would start. `api` is PyTorch's module with the
    function through which all of its launchers go."""
    plain = api.launch_agent
    set_here = _COUNTS not in os.environ
    os.environ.setdefault(_COUNTS, "1")

    def launch(config: Any, entrypoint: Any, args: list[Any], *rest: Any, **more: Any) -> Any:
        if set_here:
            os.environ.pop(_COUNTS, None)
        changed = list_changed(os.environ)
        why = find_obstacle(config, entrypoint, args, os.environ, changed) or find_uncopied()
        if why:
            note = "cavvy: if a node is lost, the ranks of the others import PyTorch again, since"
            print(f"{note} {why}", file=sys.stderr, flush=True)
            _take_place()
            return plain(config, entrypoint, args, *rest, **more)
        return start_ranks(config, args)

    api.launch_agent = launch


def _take_place() -> None:
    """Tell the agent that this launcher cannot be kept. Otherwise, the next one of the commands
    would be the first that can be, and new nodes begin at this one."""
    line = connect()
    if line is not None:
        with line, suppress(OSError):
            _send(line, {"keeps": {"kept": 0}})


def list_changed(env: Any, folder: str = os.path.dirname(os.path.abspath(__file__))) -> list[str]:
    """Return the variables that the job's commands have set or changed: those whose digests are not
    in the file of the agent in the folder of this file (`environment.py`)."""
    try:
        with open(os.path.join(folder, GIVEN)) as file:
            given = json.load(file)
    except (OSError, ValueError):
        given = {}
    return [name for name, value in env.items() if given.get(name) != digest_of(value)]


def digest_of(value: str) -> str:
    return hashlib.sha256(os.fsencode(value)).hexdigest()


def find_obstacle(
    config: Any, entrypoint: Any, args: list[Any], env: Any, changed: list[str]
) -> str:
    """Return why PyTorch must start the ranks, or "". `changed` are the variables that the job's
    commands have set."""
    if not {"NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"} <= env.keys():
        return "variables of the job are missing"
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in _DONE and (value or None) != (_find_default(field) or None):
            return f"the launcher has {field.name}={value!r}"
    logs = getattr(config, "logs_specs", None)
    if logs is not None and any(
        value for name, value in vars(logs).items() if name not in _FOLDERS
    ):
        return "the launcher has options for logs"
    if config.max_restarts:
        return "the launcher may restart the ranks by itself"
    if not isinstance(entrypoint, str) or entrypoint != sys.executable or args[:1] != ["-u"]:
        return "the launcher does not start a script of its own Python"
    program = args[1] if len(args) > 1 else ""
    if program != "-m" and not _is_script(program):
        return f"{program or 'nothing'} is no script"
    if _has_options(env):
        return "the launcher's Python has options that its ranks would not have"
    if getattr(config, "numa_options", None) is not None and _find_binding() is None:
        return "the launcher has options for NUMA"
    return _find_other_place(config, env) or _find_stale(args, env, changed)


def _find_other_place(config: Any, env: Any) -> str:
    """Return how the launcher sees the nodes otherwise than the job, or ""."""
    if not config.min_nodes == config.max_nodes == int(env["NNODES"]):
        return "the launcher was not told the job's number of nodes"
    known = config.rdzv_configs.keys() <= {"rank", "timeout"}
    if config.rdzv_backend not in ("static", "c10d") or not known:
        return "the launcher has a rendezvous of its own"
    if int(config.rdzv_configs.get("rank", env["NODE_RANK"])) != int(env["NODE_RANK"]):
        return "the launcher was told another rank than the node's"
    host, port = _split(config.rdzv_endpoint)
    if host != env["MASTER_ADDR"]:
        return "the launcher was told another address than $MASTER_ADDR"
    if port not in (env["MASTER_PORT"], *_PORTS):
        return "the launcher was told another port than $MASTER_PORT"
    return ""


def _find_stale(args: list[Any], env: Any, changed: list[str]) -> str:
    """Return what of the arguments and variables a repair would change, or ""."""
    hosts = [*filter(None, env.get("CAVVY_HOSTS", "").split(","))]
    alone = r"(?<![\w.-])(?<!\w/)"  # a folder may have the name of a node
    places = {
        "the address of a node": [rf"{alone}{re.escape(host)}(?!\w)" for host in hosts],
        "the value of $MASTER_PORT": [rf"(?<!\d){re.escape(env['MASTER_PORT'])}(?!\d)"],
    }
    for what, patterns in places.items():
        found = re.compile("|".join(patterns) or r"(?!)")
        if any(found.search(str(word)) for word in args):
            return f"the program's arguments have {what}"
        for name in changed:
            told = name in _TOLD or name.startswith(_TOLD_PREFIXES)
            if not told and found.search(env[name]):
                return f"${name} has {what}"
    return ""


def _has_options(env: Any) -> bool:
    """Return whether this Python has options that one with the same variables would not have."""
    flags = sys.flags
    set_here = flags.isolated or flags.ignore_environment or flags.no_user_site
    warned = [*filter(None, env.get("PYTHONWARNINGS", "").split(","))]
    optimized = flags.optimize and not env.get("PYTHONOPTIMIZE")
    # -P also changes where a rank finds modules
    safe = getattr(flags, "safe_path", False)
    return bool(set_here or optimized or safe or sys._xoptions or sys.warnoptions != warned)


def _split(endpoint: str) -> tuple[str, str]:
    host, _, port = endpoint.strip().rpartition(":")
    return host.strip("[]"), port


def _find_default(field: dataclasses.Field[Any]) -> Any:
    if field.name == "shutdown_timeout":
        return int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _is_script(path: str) -> bool:
    """Return whether this is a file with Python's source; Python also runs archives and folders."""
    try:
        with open(path, "rb") as file:
            return b"\0" not in file.read(1024)
    except OSError:
        return False


def _find_binding() -> Callable[..., Any] | None:
    """Return PyTorch's function that binds a process to the CPUs near its GPU."""
    with suppress(ImportError):
        from torch.numa import binding

        name = "_maybe_apply_numa_binding_to_current_process"
        found: Callable[..., Any] | None = getattr(binding, name, None)
        return found
    return None


def find_uncopied() -> str:
    """Return what a copy of this process would lack, or "". Only a copy knows of its GPUs."""
    if threading.active_count() > 1 or threading.current_thread() is not threading.main_thread():
        return "the launcher has several threads"
    return "the launcher has used a GPU" if _has_used_gpu() else ""


def _has_used_gpu() -> bool:
    import torch

    pid = os.fork()
    if not pid:
        kinds = (getattr(torch, kind, None) for kind in ("cuda", "xpu"))
        bad = [getattr(kind, "_is_in_bad_fork", None) for kind in kinds]
        os._exit(int(any(each is not None and each() for each in bad)))
    return bool(os.waitpid(pid, 0)[1])


def start_ranks(config: Any, args: list[Any]) -> dict[int, Any]:
    """Start the ranks, and return what PyTorch returns when they have ended without an error. Does
    not return in the ranks."""
    port = _split(config.rdzv_endpoint)[1]
    place = RankPlace(
        count=config.nproc_per_node,
        port="" if port == os.environ["MASTER_PORT"] else port,
        role=config.role,
        run=config.run_id,
    )
    rank = NodeRanks(place, connect()).run()
    if rank is not None:
        be_rank(*rank, config, args[1:])
    return dict.fromkeys(range(place.count))


def be_rank(parent: socket.socket, local: int, config: Any, words: list[Any]) -> NoReturn:
    """Run the program in a new rank, and exit as a process of its own would. What the launcher does
    after its ranks is not done."""
    from torch.distributed.elastic.utils.api import macros

    code = 0
    try:
        if getattr(config, "numa_options", None) is not None and (bind := _find_binding()):
            bind(gpu_index=local, numa_options=config.numa_options)
        if threads := os.environ.get("OMP_NUM_THREADS"):
            _limit_threads(threads)
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError):
                stream.reconfigure(write_through=True)  # type: ignore[union-attr] # as with -u
        program, *rest = macros.substitute(words, str(local))
        if module := program == "-m":
            program, *rest = rest
        sys.argv = [program, *rest]
        run_program(program, module=module)
    except SystemExit as end:
        code = _find_code(end)
    except KeyboardInterrupt:
        code = -signal.SIGINT
        sys.excepthook(*sys.exc_info())
    except BaseException as error:  # noqa: BLE001 - the end of the program
        code = 1
        sys.excepthook(type(error), error, _cut(error.__traceback__))
        lost = f"{type(error).__name__}: {error}" if is_lost_connection(error) else ""
        with suppress(OSError):
            parent.send(lost.encode(errors="replace")[:_LONGEST] + b"\n")
    _exit(code)


def _limit_threads(count: str) -> None:
    """Obey a variable that was set after PyTorch was imported."""
    import torch

    if count.isdigit() and int(count):
        torch.set_num_threads(int(count))


def _find_code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    print(end.code, file=sys.stderr)
    return 1


def _cut(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that is the program's own."""
    last = trace
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == __file__:
            last = trace.tb_next or trace
        trace = trace.tb_next
    return last


def _exit(code: int) -> NoReturn:
    """Exit as Python does at its end, but leave the functions of the launcher alone."""
    try:
        threading._shutdown()  # type: ignore[attr-defined] # awaits the program's threads
        atexit._run_exitfuncs()
    finally:
        try:
            _close_files()
        finally:
            if code < 0:
                signal.signal(-code, signal.SIG_DFL)
                os.kill(os.getpid(), -code)
            os._exit(_as_shell(code))


def _close_files() -> None:
    """Write what files that the program has left open still have in memory. Those of other kinds,
    such as `gzip`, write their end when they are closed."""
    files = [each for each in gc.get_objects() if issubclass(type(each), io.IOBase)]
    for each in (*files, sys.stdout, sys.stderr):
        with suppress(Exception):
            each.flush()
    for each in files:
        if type(each).__module__ not in ("_io", "io"):
            with suppress(Exception):
                each.close()


def show_variables(variables: dict[str, str]) -> None:
    """Show others the variables of this process, which it got after it was started. What they see
    in /proc/PID/environ is the memory in which the variables were at first. The agent looks there
    for the ranks of a job that hangs, or must end."""
    os.environ.pop(ROOM, None)
    try:
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        first, end = int(fields[_ENV_START]) - 1, int(fields[_ENV_END])  # each begins after a 0
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(first)
            block = memory.read(end - first)
            at = block.find(b"\0" + ROOM.encode() + b"=") + 1
            room = block.find(b"\0", at) - at
            if at and room > 0:
                memory.seek(first + at)
                memory.write(_fill(variables, room))
    except (OSError, ValueError, IndexError):
        return  # a kernel that shows no such memory


def _fill(variables: dict[str, str], room: int) -> bytes:
    """Return as many of the variables as fit, in as many bytes as there are."""
    text = b""
    for name, value in variables.items():
        each = os.fsencode(f"{name}={value}") + b"\0"
        text += each if len(text + each) <= room else b""
    return text.ljust(room, b"\0")


def connect() -> socket.socket | None:
    """Tell the agent that this process can be kept, if the agent keeps programs."""
    env = os.environ
    if env.get("CAVVY_REJOINS") != "1" or "CAVVY_NOTICE" not in env:
        return None
    try:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        line.connect(env["CAVVY_NOTICE"])
        _send(line, {"keeps": {"kept": 1}})
    except OSError:
        return None  # the agent has exited
    return line


def _send(line: socket.socket, said: dict[str, object]) -> None:
    line.sendall(json.dumps(said).encode() + b"\n")


def run_program(program: str, *, module: bool) -> None:
    """Run a script or a module as the main one, as `python PROGRAM` does."""
    path = os.path.abspath(program)
    if module:
        sys.path[0] = os.getcwd()
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        return
    sys.path[0] = os.path.dirname(path)
    main_module = types.ModuleType("__main__")
    main_module.__file__ = path
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    sys.modules["__main__"] = main_module
    exec(code, main_module.__dict__)


def is_lost_connection(error: BaseException) -> bool:
    """Return whether the error is a failed collective, which may be the result of another rank's
    failure. gloo reports it as a RuntimeError that names gloo's source file."""
    import torch.distributed as dist

    of_torch = isinstance(error, getattr(dist, "DistError", ()))
    return of_torch or (isinstance(error, RuntimeError) and "third_party/gloo" in str(error))


def _read_error(line: socket.socket) -> str | None:
    """Return what a rank has said of the error that ends it: how its connection was lost, or "" for
    another error; None if it has said nothing."""
    line.setblocking(False)
    try:
        return line.recv(_LONGEST + 1).decode(errors="replace")[:-1]
    except OSError:
        return None


def _as_shell(code: int) -> int:
    return 128 - code if code < 0 else code
