"""A session on the login node: starts `login_helper.py` there, here or through SSH, and asks it for
things.

The line is made when it is needed and made again after it broke; what was under way then fails with
TryAgain.
"""

import asyncio
import os
import shlex
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from cavvy.domain.tasks import Scalar
from cavvy.providers.base import ProviderError, Refused, TryAgain
from cavvy.providers.hosts.environ import clean_environ

_KEPT = frozenset(
    {
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "LANG",
        "LANGUAGE",
        "TZ",
        "TMPDIR",
        "SLURM_CONF",
        "PBS_CONF_FILE",
    }
)
_SSH = (
    "ssh",
    "-T",
    "-o",
    "BatchMode=yes",
    "-o",
    "ConnectTimeout=15",
    "-o",
    "ServerAliveInterval=15",
)
_CALL_S = 60.0
_NO_COMMAND = 127  # as shells say it
_STDERR_BYTES = 4000
_PROGRAM = (Path(__file__).parent / "login_helper.py").read_bytes()
_BOOT = (
    "import sys; exec(compile(sys.stdin.buffer.read(%d), 'cavvy-login-helper', 'exec'), "
    "{'__name__': "
    "'__main__'})"
)
_HOPELESS = (
    "Permission denied",
    "Host key verification failed",
    "Could not resolve hostname",
    "not found",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HelperHello:
    """Who and where the login-node helper is. `folder` is the shared folder's full path."""

    folder: str
    uid: int
    host: str
    python: str
    tools: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """How a command ended; `code` None: it did not answer in time."""

    code: int | None
    out: str
    err: str

    @property
    def said(self) -> str:
        """What it complained of, in one line."""
        return " ".join((self.err or self.out).split())[:600]


@dataclass(frozen=True, slots=True)
class MailLetter:
    """A request of an agent that arrived in the mail."""

    path: str
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LoginNode:
    """How to come to the login node: `host` "" is this machine."""

    host: str
    ssh_options: Sequence[str]
    python: str
    folder: str
    tools: tuple[str, ...]

    def command(self) -> Sequence[str]:
        login_helper = [self.python, "-I", "-S", "-c", _BOOT % len(_PROGRAM)]
        return (
            [*_SSH, *self.ssh_options, self.host, shlex.join(login_helper)]
            if self.host
            else login_helper
        )

    def say_missing(self, tool: str) -> str:
        """That the login node lacks a command, and what to do."""
        if not self.host:
            return (
                f"this machine has no {tool}: name the cluster's login node by the setting `host`"
            )
        return (
            f"the login node {self.host} has no {tool}: `ssh {self.host} which {tool}` must find it"
        )


def read_words(settings: Mapping[str, Scalar], name: str) -> Sequence[str]:
    """The words of a setting, as a shell reads them. Raises Refused."""
    text = str(settings.get(name, ""))
    try:
        return shlex.split(text)
    except ValueError as error:
        raise Refused(f"{name} = {text!r}: {str(error).lower()}") from error


def read_where(settings: Mapping[str, Scalar], tools: tuple[str, ...]) -> LoginNode:
    """As a batch system's settings say; `tools` are its commands."""
    return LoginNode(
        host=str(settings.get("host", "")),
        ssh_options=read_words(settings, "ssh_options"),
        python=str(settings.get("python", "")) or "python3",
        folder=str(settings.get("folder", "")) or "~/.cavvy-cluster",
        tools=tools,
    )


class _Line:
    """One living login-node helper."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.waiting: dict[int, asyncio.Future[object]] = {}
        self.letters: asyncio.Queue[MailLetter | None] = asyncio.Queue()
        self.stderr = b""
        self.broken = False
        self.hello: HelperHello | None = None
        self.tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._complaints())]

    def send(self, head: Mapping[str, object], data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode({**head, "size": len(data)}) + b"\n" + data)

    async def _read(self) -> None:
        stdout = self.process.stdout
        assert stdout is not None
        try:
            while line := await stdout.readline():
                head: dict[str, Any] = msgspec.json.decode(line)
                data = await stdout.readexactly(head["size"])
                if "mail" in head:
                    self.letters.put_nowait(MailLetter(head["mail"], data))
                else:
                    self._answered(head)
        except (OSError, ValueError, asyncio.IncompleteReadError):
            pass  # whatever it was, the line is of no use any more
        await self._end()

    def _answered(self, head: dict[str, Any]) -> None:
        waiting = self.waiting.pop(head["id"], None)
        if waiting is None or waiting.done():
            return
        if "error" not in head:
            waiting.set_result(head["result"])
        elif head["kind"] == "passing":
            waiting.set_exception(TryAgain(head["error"]))
        else:
            waiting.set_exception(Refused(head["error"]))

    async def _complaints(self) -> None:
        assert self.process.stderr is not None
        while data := await self.process.stderr.read(4096):
            self.stderr = (self.stderr + data)[-_STDERR_BYTES:]

    async def _end(self) -> None:
        self.broken = True
        self.letters.put_nowait(None)
        self._kill()
        await self.process.wait()
        await asyncio.wait([self.tasks[1]], timeout=1)
        said = " ".join(self.stderr.decode("utf-8", "replace").split())[-600:]
        error: ProviderError = TryAgain(
            f"the line to the login node broke: {said or 'without a word'}"
        )
        if self.hello is None and any(text in said for text in _HOPELESS):
            error = Refused(f"the login node cannot be used: {said}")
        for waiting in self.waiting.values():
            if not waiting.done():
                waiting.set_exception(error)
        self.waiting.clear()

    def _kill(self) -> None:
        # Not by `Process.kill`, which looks whether it has ended and so takes its exit code from
        # asyncio.
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)

    async def close(self) -> None:
        self._kill()
        await asyncio.wait(self.tasks)


class LoginSession:
    """Asks the login-node helper. Every method raises TryAgain and Refused."""

    def __init__(self, where: LoginNode) -> None:
        self._where = where
        self._line: _Line | None = None
        self._starting = asyncio.Lock()
        self._numbers = count(1)

    async def hello(self) -> HelperHello:
        line = await self._connected()
        assert line.hello is not None
        return line.hello

    async def run(
        self,
        argv: Sequence[str],
        data: bytes = b"",
        *,
        timeout_s: float = 30,
        env: Mapping[str, str] | None = None,
    ) -> CommandResult:
        """Run a command on the login node. Raises TryAgain where it has no such command, or not
        yet.
        """
        told = await self._ask(
            "run", data, argv=list(argv), timeout_s=timeout_s, env=dict(env or {})
        )
        done = msgspec.convert(told, CommandResult)
        if done.code == _NO_COMMAND:
            raise TryAgain(self._where.say_missing(argv[0]))
        return done

    async def make(self, path: str, files: Mapping[str, bytes], unless: Sequence[str] = ()) -> bool:
        """Make a folder with files, all at once; False where it is there already, or one of
        `unless` is.
        """
        parts = [[name, len(data)] for name, data in files.items()]
        return bool(
            await self._ask(
                "make", b"".join(files.values()), path=path, unless=list(unless), files=parts
            )
        )

    async def write(self, files: Mapping[str, bytes], *, keep: bool = False) -> None:
        parts = [[path, len(data)] for path, data in files.items()]
        await self._ask("write", b"".join(files.values()), files=parts, keep=keep)

    async def has(self, path: str) -> bool:
        return bool(await self._ask("has", path=path))

    async def read(self, paths: Sequence[str]) -> dict[str, str]:
        return msgspec.convert(await self._ask("read", paths=list(paths)), dict[str, str])

    async def tree(self, root: str, names: Sequence[str]) -> dict[str, dict[str, str]]:
        return msgspec.convert(
            await self._ask("tree", root=root, names=list(names)), dict[str, dict[str, str]]
        )

    async def texts(self, root: str) -> dict[str, str]:
        return msgspec.convert(await self._ask("texts", root=root), dict[str, str])

    async def drop(self, paths: Sequence[str], trash: str) -> None:
        await self._ask("drop", paths=list(paths), trash=trash)

    async def reply(self, letter: MailLetter, data: bytes) -> None:
        await self._ask("reply", data, letter=letter.path)

    @asynccontextmanager
    async def mail(self, folder: str) -> AsyncIterator[asyncio.Queue[MailLetter | None]]:
        """Letters as they come; None when the line broke."""
        line = await self._connected()
        await self._ask("mail", folder=folder)
        yield line.letters

    async def close(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            await line.close()

    async def _ask(self, operation: str, data: bytes = b"", /, **arguments: object) -> object:
        line = await self._connected()
        return await self._ask_over(line, operation, data, arguments)

    async def _ask_over(
        self, line: _Line, operation: str, data: bytes, arguments: Mapping[str, object]
    ) -> object:
        number = next(self._numbers)
        waiting = line.waiting[number] = asyncio.get_running_loop().create_future()
        try:
            line.send({"id": number, "op": operation, **arguments}, data)
            if line.broken:
                raise TryAgain("the line to the login node broke")
            async with asyncio.timeout(_CALL_S):
                return await waiting
        except TimeoutError:
            raise TryAgain(f"the login node did not answer within {_CALL_S:.0f} s") from None
        except OSError as error:
            raise TryAgain(f"the line to the login node broke: {error}") from error
        finally:
            line.waiting.pop(number, None)

    async def _connected(self) -> _Line:
        async with self._starting:
            if self._line is not None and not self._line.broken:
                return self._line
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._where.command(),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    env=_environ(),
                    start_new_session=True,  # a Ctrl-C at a terminal is not meant for it
                    limit=16 * 1024 * 1024,
                )
            except OSError as error:
                raise Refused(
                    f"{self._where.command()[0]} cannot be started here: {error}"
                ) from error
            assert process.stdin is not None
            process.stdin.write(_PROGRAM)
            line = _Line(process)
            arguments = {"folder": self._where.folder, "tools": list(self._where.tools)}
            try:
                line.hello = msgspec.convert(
                    await self._ask_over(line, "hello", b"", arguments), HelperHello
                )
            except ProviderError:
                await line.close()
                raise
            self._line = line
            return line


def _environ() -> dict[str, str]:
    """What the login-node helper and its commands see of the server's environment, which may
    hold secrets.
    """
    return clean_environ(os.environ, _KEPT, ("LC_", "SSH_"))
