"""Commands and embedded servers of tests that come from a process which has imported their modules.

A server spends half a second of CPU time on its imports, and tests start hundreds. One process for
each test process imports once and forks: what it forks has the arguments, environment, folder,
files, session and network that `subprocess.Popen` would have given it, but for the command line and
environment that /proc shows. Where a caller differs in what a fork cannot take over (another Python,
other namespaces, limits), the real command starts. So it does in tests that want it, as by
`run_python`. See docs/adr/0098.
"""

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import json
import os
import pkgutil
import resource
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.system.namespaces import enter
from tests.system.tied import in_starter, start_tied

CLI = [sys.executable, "-c", "from cavvy.cli.main import main; main()"]
SERVER = [sys.executable, "-P", "-m", "cavvy.server.embedded"]
_ROOT = Path(__file__).resolve().parents[2]
# Variables that a fork would read too late begin with one of these.
_PARSED_AT_START = ("PYTHON", "LD_", "LC_", "LANG", "MALLOC_")
# What commands and servers use of ours, and what servers use late of others.
_PACKAGES = (
    *("cavvy.cli", "cavvy.api", "cavvy.server", "cavvy.control", "cavvy.store", "cavvy.spec"),
    *("cavvy.providers.local", "cavvy.providers.hosts"),
)
_LATE = ("uvloop", "yaml", "uvicorn.lifespan.off", "uvicorn.protocols.http.httptools_impl")
_PROGRAMS = (".__main__", "cavvy.cli.entry")  # which act when they are imported
_WIRE = "/proc/thread-self/ns/net"
_HIGH_FD = 500  # above those that a caller passes on
_address = ""  # of the process that forks; it knows its own, and its children inherit it
_forker: "subprocess.Popen[bytes] | None" = None
_starting = threading.Lock()
_begun_with: list[Any] = []  # what surrounded it when it began


class PreparedPopen(subprocess.Popen[Any]):
    """A process that another one forks for us; its exit code comes from there."""

    _link: socket.socket

    def _execute_child(self, *given: Any) -> None:
        args, _, _, _, pass_fds, cwd, env = given[:7]
        pipes = given[10:16]  # of stdin the child's end and ours; of the others ours and its
        own = [pipes[0], pipes[3], pipes[5]]
        mask = os.umask(0o77)
        os.umask(mask)
        ask = {
            "args": list(args),
            "env": dict(os.environ if env is None else env),
            "cwd": str(cwd or os.getcwd()),
            "umask": mask,
            "fds": [0, 1, 2, *pass_fds],
        }
        files = [number if fd == -1 else fd for number, fd in enumerate(own)]
        self._link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._link.connect(_address)
        body = json.dumps(ask).encode()
        wire = os.open(_WIRE, os.O_RDONLY)
        socket.send_fds(self._link, [len(body).to_bytes(4, "big")], [wire, *files, *pass_fds])
        os.close(wire)
        self._link.sendall(body)
        self.pid = int.from_bytes(_receive(self._link, 4), "big")
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]  # of the standard library

    def __del__(self) -> None:
        self._link.close()
        if self.returncode is None:
            self.returncode = -signal.SIGKILL  # nobody wants to know it
        super().__del__()

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None and select.select([self._link], [], [], 0)[0]:
            self._read_code()
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self.returncode is None:
            if not select.select([self._link], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self._read_code()
        assert self.returncode is not None
        return self.returncode

    def _read_code(self) -> None:
        with self._link:
            code = _receive(self._link, 4)
        # the process that forks was killed: nobody knows how its child ended
        self.returncode = int.from_bytes(code, "big", signed=True) if code else -signal.SIGKILL


def popen(args: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
    """`subprocess.Popen`, of a prepared process where the program and the caller allow it."""
    known = list(args[: len(SERVER)]) == SERVER or list(args[: len(CLI)]) == CLI
    alone = options.get("start_new_session") and options.keys().isdisjoint({"preexec_fn", "user"})
    environ: Mapping[str, str] = options.get("env") or os.environ
    if known and alone:
        _prepare(environ)
        if _surroundings(environ) == _begun_with:
            return PreparedPopen(args, **options)
    return subprocess.Popen(args, **options)


def write_command(folder: Path) -> None:
    """Write `cavvy` into a folder, for the PATH of shells: the command comes from the process that
    forks, and gets the signals that its shell sends. Where `popen` would start the real command,
    so does the shell.
    """
    _prepare(os.environ)
    if _surroundings(os.environ) != _begun_with:
        return  # shells find the real command
    text = _COMMAND.format(python=sys.executable, address=_address, cli=CLI, wire=_WIRE)
    folder.mkdir(exist_ok=True)
    (folder / "cavvy").write_text(text)
    (folder / "cavvy").chmod(0o755)


_COMMAND = """#!{python} -IS
import json, os, signal, socket, sys
mask = os.umask(0o77)
os.umask(mask)
link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
link.connect({address!r})
ask = {{"args": {cli!r} + sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd()}}
body = json.dumps({{**ask, "umask": mask, "fds": [0, 1, 2]}}).encode()
wire = os.open({wire!r}, os.O_RDONLY)
socket.send_fds(link, [len(body).to_bytes(4, "big")], [wire, 0, 1, 2])
link.sendall(body)
pid = int.from_bytes(link.recv(4), "big")
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: os.kill(pid, number))
code = int.from_bytes(link.recv(4) or b"\\xff" * 4, "big", signed=True)
sys.exit(code if code >= 0 else 128 - code)
"""


def _prepare(environ: Mapping[str, str]) -> None:
    """Start the process that forks, unless there is one."""
    global _address, _begun_with, _forker
    with _starting:
        if _address and (_forker is None or _forker.poll() is None):
            return
        kept = {key: value for key, value in environ.items() if not key.startswith("CAVVY_")}
        folder = tempfile.mkdtemp(prefix="cavvy-prepared-")
        address = f"{folder}/socket"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(address)
            listener.listen(64)
            forker = start_tied(
                [sys.executable, "-P", "-c", _PROGRAM, _ROOT, listener.fileno(), address],
                env=kept,
                pass_fds=(listener.fileno(),),
                stdin=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        atexit.register(_stop, forker, folder, os.getpid())
        _forker, _address, _begun_with = forker, address, in_starter(_surroundings, kept)


def _stop(forker: "subprocess.Popen[bytes]", folder: str, owner: int) -> None:
    if os.getpid() == owner:  # and no fork of it
        forker.kill()
        forker.wait()
        shutil.rmtree(folder, ignore_errors=True)


_PROGRAM = """
import sys
sys.path.append(sys.argv[1])
from tests.system import prepared
prepared.serve(int(sys.argv[2]), sys.argv[3])()
"""


def _surroundings(environ: Mapping[str, str]) -> list[Any]:
    """What a process has from its parent, and a fork of another one has not."""
    spaces = sorted({*os.listdir("/proc/thread-self/ns")} - {"net"})  # which it is told
    return [
        [os.readlink(f"/proc/thread-self/ns/{name}") for name in spaces],
        os.readlink("/proc/self/root"),
        Path("/proc/self/cgroup").read_text(),
        [os.getresuid(), os.getresgid(), os.getgroups()],
        [resource.getrlimit(number) for number in _limits()],
        sorted(each for each in environ.items() if each[0].startswith(_PARSED_AT_START)),
    ]


@functools.cache
def _limits() -> list[int]:
    return sorted({getattr(resource, name) for name in dir(resource) if name[:7] == "RLIMIT_"})


# The process that forks


def serve(fd: int, address: str) -> Callable[[], None]:
    """Fork for each connection. This returns in each child, with what the child is to do."""
    global _address, _begun_with
    _import_all()
    _address, _begun_with = address, _surroundings(os.environ)
    use()
    listener = socket.socket(fileno=fd)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    children: dict[int, tuple[int, socket.socket]] = {}
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                link = listener.accept()[0]
                ask, files = _read(link)
                pid = os.fork()
                if pid == 0:
                    # what is collected later would close a file of the child's with its number
                    for own in (selector, listener, link, *(each for _, each in children.values())):
                        own.close()
                    return functools.partial(_run, ask, files)
                for file in files:
                    os.close(file)
                child = os.pidfd_open(pid)
                children[child] = pid, link
                selector.register(child, selectors.EVENT_READ)
                _send(link, pid)
            else:
                selector.unregister(key.fd)
                os.close(key.fd)
                pid, link = children.pop(key.fd)
                _send(link, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                link.close()


def _import_all() -> None:
    for name in _PACKAGES:
        package = importlib.import_module(name)
        for found in pkgutil.walk_packages(package.__path__, f"{name}."):
            if not found.name.endswith(_PROGRAMS):
                importlib.import_module(found.name)
    for name in _LATE:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def _read(link: socket.socket) -> tuple[dict[str, Any], list[int]]:
    head, files, *_ = socket.recv_fds(link, 4, 64)
    body = _receive(link, int.from_bytes(head, "big"))
    return json.loads(body), list(files)


def _run(ask: dict[str, Any], files: list[int]) -> None:
    """Become the child: take over files, folder, environment and session, then run the program."""
    wire, *files = files
    if os.fstat(wire).st_ino != os.stat(_WIRE).st_ino:
        enter(wire)
    os.setsid()
    streams: list[Any] = []
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, _HIGH_FD) for file in files]
    for file, number in zip(high, ask["fds"], strict=True):
        os.dup2(file, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in ask["fds"]:
            with contextlib.suppress(OSError):
                os.close(int(name))
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        number, old = len(streams), getattr(sys, name)
        # open until the end, as those that they replace
        new = open(number, mode, encoding=old.encoding, errors=old.errors, closefd=False)  # noqa: SIM115
        streams.append(new)
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)
    sys.stderr.reconfigure(line_buffering=True)
    os.umask(ask["umask"])
    os.chdir(ask["cwd"])
    os.environ.clear()
    os.environ.update(ask["env"])
    time.tzset()
    sys.path.remove(str(_ROOT))
    if ask["args"][: len(SERVER)] == SERVER:
        from cavvy.server.embedded import main as serve_api

        sys.argv = [SERVER[-1], *ask["args"][len(SERVER) :]]
        _end(serve_api())
    from cavvy.cli.main import main

    sys.path.insert(0, "")
    sys.argv = ["-c", *ask["args"][len(CLI) :]]
    try:
        main()
    except SystemExit as done:
        if done.code is not None and not isinstance(done.code, int):
            raise
        _end(done.code or 0)
    _end(0)


def _end(code: int) -> None:
    """Exit as usual, but leave it to the kernel to free what is shared with the process that
    forked, which would be copied first.
    """
    if threading.active_count() > 1:
        sys.exit(code)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if not stream.closed:
            stream.flush()
    os._exit(code)


def _receive(link: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = link.recv(count - len(data))
        if not part:
            return b""
        data += part
    return data


def _send(link: socket.socket, number: int) -> None:
    """The other end does not need to be there any more."""
    with contextlib.suppress(OSError):
        link.sendall(number.to_bytes(4, "big", signed=True))


def use() -> None:
    """Start embedded servers of this process by `popen`."""
    from cavvy.client import launch

    launch.start_process = popen
