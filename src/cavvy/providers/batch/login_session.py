"""A session with the login node. The session starts `login_helper.py`, on this machine or through
SSH, and sends requests to this program.

The session is opened when it is needed, and opened again after its connection has broken. If the
connection breaks, all unanswered requests raise TryAgain.

Relays the agents' mail. Each letter is a file with a request to the control plane, and the relay
writes the answer to another file.
"""

import asyncio
import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from cavvy.domain.tasks import Scalar
from cavvy.domain.values import Struct, field, replace
from cavvy.providers.base import ProviderError, Refused, TryAgain
from cavvy.providers.hosts.connection import (
    HostAddress,
    HostConnection,
    HostUnknown,
    open_connection,
)
from cavvy.providers.hosts.remote_calls import RemoteCalls
from cavvy.providers.hosts.supervisor import frames

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
_NO_COMMAND = 127  # the exit code of shells for an unknown command
_NO_PROGRAM = (126, _NO_COMMAND)
_FRAMES = Path(frames.__file__).read_bytes()
_PROGRAM = (Path(__file__).parent / "login_helper.py").read_bytes()
_BOOT = (  # the helper and the module that it imports are sent through standard input
    f"import sys; read = sys.stdin.buffer.read; frames = type(sys)('{frames.__name__}'); "
    f"exec(read({len(_FRAMES)}), frames.__dict__); sys.modules[frames.__name__] = frames; "
    f"exec(compile(read({len(_PROGRAM)}), 'cavvy-login-helper', 'exec'), "
    "{'__name__': '__main__'})"
)
_BECOME = (Path(__file__).parent / "become_user.py").read_bytes()
_SUDO = ("sudo", "-n", "-H", "-u")
_T = TypeVar("_T")
_NOTHING = type(None)

# seconds to wait for an answer; longer than an agent's longest poll (30 s) and than the minute
# after which agents repeat a request
_ANSWER_S = 120.0
_ROUTES = (b"GET /agent/v1/", b"POST /agent/v1/", b"PUT /agent/v1/")
_AT_ONCE = 256  # maximum number of concurrent requests, most of which are long polls


class HelperHello(Struct, frozen=True, kw_only=True):
    """The first message of the login-node helper, with facts about the login node. `folder` is the
    full path of the shared folder.
    """

    folder: str
    uid: int
    host: str
    python: str
    tools: tuple[str, ...]


class CommandResult(Struct, frozen=True, kw_only=True):
    """The result of a command. `code` is the exit code, or None if the command did not end in
    time.
    """

    code: int | None
    out: str
    err: str

    @property
    def said(self) -> str:
        """The command's error output, or the command's standard output if the error output is
        empty, as one line.
        """
        return " ".join((self.err or self.out).split())[:600]


class MailLetter(Struct, frozen=True):
    """A request from an agent, received as a file."""

    path: str
    data: bytes


class LoginNode(Struct, frozen=True, kw_only=True):
    """The settings for the connection to the login node. If `host` is "", the login node is this
    machine. In `folder`, `~` is the home folder of the user, and `%u` the user.
    """

    host: str
    ssh_options: Sequence[str]
    python: str
    folder: str
    tools: tuple[str, ...]
    user: str = ""  # the Unix user of the helper; "" for the user of the login

    @property
    def address(self) -> HostAddress:
        if not self.host:
            return HostAddress(name="this machine")
        return HostAddress(name=self.host, ssh=[*_SSH, *self.ssh_options], destination=self.host)

    def say_missing(self, tool: str) -> str:
        """Return the error message for a login node that lacks a command."""
        if not self.host:
            return f"this machine has no {tool}; set `host` to the cluster's login node"
        return (
            f"the login node {self.host} has no {tool}; make sure that `ssh {self.host} which "
            f"{tool}` finds it"
        )


def read_words(settings: Mapping[str, Scalar], name: str) -> Sequence[str]:
    """Split a setting into words, as a shell does. Raises Refused."""
    text = str(settings.get(name, ""))
    try:
        return shlex.split(text)
    except ValueError as error:
        raise Refused(f"{name} = {text!r}: {error}") from error


def read_where(settings: Mapping[str, Scalar], tools: tuple[str, ...]) -> LoginNode:
    """Return the login node that a batch system's settings describe. `tools` are the commands that
    the login node must have.
    """
    return LoginNode(
        host=str(settings.get("host", "")),
        ssh_options=read_words(settings, "ssh_options"),
        python=str(settings.get("python", "")) or "python3",
        folder=str(settings.get("folder", "")) or "~/.cavvy-cluster",
        tools=tools,
    )


class _OpenLogin(Struct):
    """An open session with a login-node helper."""

    link: HostConnection
    calls: RemoteCalls
    refusals: Sequence[int] = _NO_PROGRAM  # exit codes of a program that cannot be used
    letters: asyncio.Queue[MailLetter | None] = field(default_factory=asyncio.Queue)
    reading: asyncio.Task[None] | None = None
    hello: HelperHello | None = None

    async def read(self) -> None:
        """Read frames until the connection breaks."""
        async for head, data in self.link.frames():
            if "mail" in head:
                self.letters.put_nowait(MailLetter(head["mail"], data))
            else:
                self.calls.take(head)
        self.link.close()
        await self.link.closed()
        error: ProviderError = TryAgain(
            f"the connection to the login node broke: {self.link.said or 'without a message'}"
        )
        if self.hello is None and self.link.exit_code in self.refusals:
            error = Refused(f"the login node cannot be used: {self.link.said}")
        self.reading = None
        self.letters.put_nowait(None)
        self.calls.give_up(error)

    async def ask(self, do: str, kind: type[_T], data: bytes = b"", **fields: object) -> _T:
        return await self.calls.ask(
            lambda head: self.link.send(head, data), do, kind, timeout_s=_CALL_S, **fields
        )


class LoginSession:
    """Sends requests to the login-node helper. Every method may raise TryAgain or Refused. With a
    `user` of the login node, `own` is the session of the login itself.
    """

    def __init__(self, where: LoginNode, own: "LoginSession | None" = None) -> None:
        self._where = where
        self._own = own
        self._login: _OpenLogin | None = None
        self._starting = asyncio.Lock()

    def for_user(self, user: str) -> "LoginSession":
        """Return a session in which the helper runs as this user of the login node. The login must
        be root, or be allowed to run `sudo -n -u USER`.
        """
        return LoginSession(replace(self._where, user=user), self)

    async def hello(self) -> HelperHello:
        hello = (await self._connected()).hello
        assert hello is not None
        return hello

    async def run(
        self,
        argv: Sequence[str],
        data: bytes = b"",
        *,
        timeout_s: float = 30,
        env: Mapping[str, str] | None = None,
    ) -> CommandResult:
        """Run a command on the login node. Raises TryAgain if the command is not found, because the
        command may be installed later.
        """
        done = await self._ask(
            "run", CommandResult, data, argv=list(argv), limit_s=timeout_s, env=dict(env or {})
        )
        if done.code == _NO_COMMAND:
            raise TryAgain(self._where.say_missing(argv[0]))
        return done

    async def make(self, path: str, files: Mapping[str, bytes], unless: Sequence[str] = ()) -> bool:
        """Create a folder with files atomically. Return False if the folder, or one of the paths in
        `unless`, exists.
        """
        parts = [[name, len(data)] for name, data in files.items()]
        data = b"".join(files.values())
        return await self._ask("make", bool, data, path=path, unless=list(unless), files=parts)

    async def write(self, files: Mapping[str, bytes], *, keep: bool = False) -> None:
        parts = [[path, len(data)] for path, data in files.items()]
        await self._ask("write", _NOTHING, b"".join(files.values()), files=parts, keep=keep)

    async def has(self, path: str) -> bool:
        return await self._ask("has", bool, path=path)

    async def read(self, paths: Sequence[str]) -> dict[str, str]:
        return await self._ask("read", dict[str, str], paths=list(paths))

    async def tree(self, root: str, names: Sequence[str]) -> dict[str, dict[str, str]]:
        return await self._ask("tree", dict[str, dict[str, str]], root=root, names=list(names))

    async def texts(self, root: str) -> dict[str, str]:
        return await self._ask("texts", dict[str, str], root=root)

    async def drop(self, paths: Sequence[str], trash: str) -> None:
        await self._ask("drop", _NOTHING, paths=list(paths), trash=trash)

    async def reply(self, letter: MailLetter, data: bytes) -> None:
        await self._ask("reply", _NOTHING, data, letter=letter.path)

    @asynccontextmanager
    async def mail(self, folder: str) -> AsyncIterator[asyncio.Queue[MailLetter | None]]:
        """Open the queue of agents' letters (request files). None in the queue means that the
        connection broke.
        """
        login = await self._connected()
        await login.ask("mail", _NOTHING, folder=folder)
        yield login.letters

    async def close(self) -> None:
        login, self._login = self._login, None
        if login is not None:
            await _close(login)

    async def _ask(self, do: str, kind: type[_T], data: bytes = b"", **fields: object) -> _T:
        return await (await self._connected()).ask(do, kind, data, **fields)

    async def _make_program(self) -> tuple[Sequence[str], bytes]:
        """Return the arguments that start the helper, and its standard input."""
        python = [self._where.python, "-I", "-S", "-c"]
        if self._own is None:
            return [*python, _BOOT], _FRAMES + _PROGRAM
        names = f"{{'__name__': '__main__', 'user': {self._where.user!r}, 'boot': {_BOOT!r}}}"
        start = (
            f"import sys; exec(compile(sys.stdin.buffer.read({len(_BECOME)}), "
            f"'cavvy-become-user', 'exec'), {names})"
        )
        root = (await self._own.hello()).uid == 0
        before = [] if root else [*_SUDO, self._where.user, "--"]
        return [*before, *python, start], _BECOME + _FRAMES + _PROGRAM

    async def _connected(self) -> _OpenLogin:
        async with self._starting:
            if self._login is not None and self._login.reading is not None:
                return self._login
            try:
                link = await open_connection(self._where.address, timeout_s=_CALL_S)
            except HostUnknown as error:
                raise Refused(str(error)) from error
            argv, given = await self._make_program()
            link.start(argv, given)
            login = _OpenLogin(link, RemoteCalls())
            if self._where.user:  # 1 is the exit code of sudo if it is not permitted
                login.refusals = (1, *_NO_PROGRAM)
            login.reading = asyncio.create_task(login.read())
            try:
                login.hello = await login.ask(
                    "hello",
                    HelperHello,
                    folder=self._where.folder.replace("%u", self._where.user or "cavvy"),
                    tools=list(self._where.tools),
                )
            except BaseException:
                await _close(login)
                raise
            self._login = login
            return login


async def _close(login: _OpenLogin) -> None:
    login.link.close()
    if login.reading is not None:
        await asyncio.wait([login.reading])


async def relay_mail(login_session: LoginSession, folder: str, server: str) -> None:
    """Relay requests until cancelled, or until the connection to the login node breaks. Raises
    TryAgain, Refused.
    """
    room = asyncio.Semaphore(_AT_ONCE)
    async with login_session.mail(folder) as letters:
        try:
            async with asyncio.TaskGroup() as group:
                while (letter := await letters.get()) is not None:
                    await room.acquire()
                    group.create_task(_relay(login_session, letter, server, room))
                raise TryAgain("the connection to the login node broke")
        except* ProviderError as errors:
            raise errors.exceptions[0] from None


async def _relay(
    login_session: LoginSession, letter: MailLetter, server: str, room: asyncio.Semaphore
) -> None:
    try:
        answer = await ask(server, letter.data)
        # an error is ignored, because the agent repeats its request; `read` notices a lost
        # connection
        with suppress(ProviderError):
            await login_session.reply(letter, answer)
    finally:
        room.release()


async def ask(server: str, request: bytes) -> bytes:
    """Forward one request unchanged and return the answer. Return the status 404 for a route that
    agents do not use, and 502 if the control plane cannot be reached.
    """
    if not request.startswith(_ROUTES):
        return _made("404 Not Found")  # letters may use only the agents' routes
    line, _, rest = request.partition(b"\r\n")
    try:
        async with asyncio.timeout(_ANSWER_S):
            reader, writer = await connect_to(server)
            try:
                writer.write(line + b"\r\nConnection: close\r\n" + rest)
                await writer.drain()
                return await reader.read() or _made("502 Bad Gateway")
            finally:
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()
    except (OSError, TimeoutError):
        return _made("502 Bad Gateway")


async def connect_to(server: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if server.startswith("unix:"):
        return await asyncio.open_unix_connection(server.removeprefix("unix:"))
    url = urlsplit(server)
    tls = url.scheme == "https"
    return await asyncio.open_connection(
        url.hostname, url.port or (443 if tls else 80), ssl=tls or None
    )


def _made(status: str) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{{}}".encode()
