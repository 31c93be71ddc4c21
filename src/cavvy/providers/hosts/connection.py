"""A connection to a host through the user's own `ssh`, or to a shell on this machine.

Each connection is one local process, which runs a shell on the host. `start` replaces the shell
with a program, which exchanges frames over the process's standard input and output. If `control` is
set, the process is also an OpenSSH master: later commands, forwarded sockets and probes use the
connection of this process.

The connection raises these errors, grouped by the caller's reaction:

* CannotConnect(TryAgain): the host does not answer, and no request was sent; a later call may
  succeed. The subclass HostUnknown means that the host's name has no address.
* LoginRefused(Refused): a person must act, because the host key is unknown or has changed, or
  because the host accepts no key of the user.
"""

import asyncio
import os
import re
import shlex
import signal
import stat
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cavvy.domain.values import Struct
from cavvy.providers.base import Refused, TryAgain
from cavvy.providers.hosts.environ import clean_environ
from cavvy.providers.hosts.supervisor.frames import FrameReader, encode_frame

_KEPT = frozenset({
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "SLURM_CONF",
    "PBS_CONF_FILE",
})  # fmt: skip
_MARK = b"cavvy-link"  # printed by the shell; the login shell may print other lines before it
_SHELL = ("sh", "-c", f'echo {_MARK.decode()}; read -r command && eval "exec $command"')
_STDERR_BYTES = 4000
_STDOUT_BYTES = 1 << 20  # the maximum output of a command; the facts of a host need only a few KiB
_WITNESS_S = 5
_END_S = 1
CONNECT_TIMEOUT_S = 10
# the time limit in seconds, including jump hosts and the start of the login shell
OPEN_TIMEOUT_S = 60
_RULES = """\
BatchMode yes
ConnectTimeout {connect_s}
ServerAliveInterval 5
ServerAliveCountMax 3
StrictHostKeyChecking {checking}
UserKnownHostsFile {known_hosts}
LogLevel ERROR
ControlPersist no
ClearAllForwardings yes
PermitLocalCommand no
RemoteCommand none
RequestTTY no
"""


def make_sockets() -> "TemporaryDirectory[str]":
    """Create a folder with a short path for the sockets and configurations of `ssh`. It is in a
    folder that agents on this machine hide from their work (`agent.work.protect`), because a job
    could use the sockets, and add programs to the configurations.
    """
    parent = Path(f"/tmp/cavvy-ssh-{os.getuid()}")
    with suppress(OSError):
        parent.mkdir(mode=0o700, exist_ok=True)
        found = parent.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
            return TemporaryDirectory(dir=parent, prefix="")
    return TemporaryDirectory(prefix="cavvy-", dir="/tmp")  # another user has taken the name


class CannotConnect(TryAgain):
    """Raised if the host does not answer now."""


class HostUnknown(CannotConnect):
    """Raised if the host's name has no address."""


class LoginRefused(Refused):
    """Raised if the host refuses the login; a person must act."""


class HostAddress(Struct, frozen=True, kw_only=True):
    """The address of a host. If `ssh` is empty, the host is this machine."""

    name: str  # the host's name in messages
    ssh: Sequence[str] = ()  # the ssh command without the destination
    destination: str = ""
    control: Path | None = None  # the path for a master's socket, which must not exist yet
    host_key_hint: str = ""  # added to the message about an unknown host key
    ours: bool = False  # True: Cavvy started the machine, and logs in with its own key


class HostConnection:
    """An open connection. `said` is the last error output of the host and of `ssh`."""

    def __init__(self, address: HostAddress, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.address = address
        self._process, self._input, self._output = process, process.stdin, process.stdout
        self._stderr = b""
        self._complaints = asyncio.create_task(self._collect())

    @property
    def said(self) -> str:
        lines = self._stderr.decode("utf-8", "replace").splitlines()
        return " ".join(line.strip() for line in lines if line.strip("@ "))[-600:]

    @property
    def exit_code(self) -> int | None:
        """The exit code of the program or of `ssh`; None while the connection is open."""
        return self._process.returncode

    def start(self, argv: Sequence[str], given: bytes = b"") -> None:
        """Replace the host's shell with a program, which first reads `given` from its standard
        input. The program's arguments must not contain line breaks.
        """
        self._input.write(shlex.join(argv).encode() + b"\n" + given)

    def send(self, head: dict[str, Any], data: bytes = b"") -> None:
        self._input.write(encode_frame(head, data))

    async def frames(self) -> AsyncIterator[tuple[dict[str, Any], bytes]]:
        """Yield the program's frames until the connection is lost."""
        reader = FrameReader()
        with suppress(OSError, ValueError):  # after either error, the connection is unusable
            while data := await self._output.read(1 << 18):
                for frame in reader.feed(data):
                    yield frame

    async def run(self, argv: Sequence[str], given: bytes = b"", *, timeout_s: float) -> bytes:
        """Run a command on the host over this connection and return the command's output, at most
        `_STDOUT_BYTES`. Raises CannotConnect.
        """
        process = await self._share(shlex.join(argv))
        try:
            async with asyncio.timeout(timeout_s):
                out, err = await _converse(process, given)
        except TimeoutError:
            raise CannotConnect(
                f"{self.address.name}: {argv[0]} did not finish on the host in time"
            ) from None
        finally:
            await _end(process)
        if len(out) > _STDOUT_BYTES:
            raise CannotConnect(
                f"{self.address.name}: {argv[0]} printed more than {_STDOUT_BYTES} bytes"
            )
        if process.returncode != 0:
            complaint = err.decode("utf-8", "replace").strip()[-500:]
            raise CannotConnect(
                f"{self.address.name}: {argv[0]} failed on the host: "
                f"{complaint or process.returncode}"
            )
        return out

    async def forward(self, path: str, address: str, *, cancel: bool = False) -> None:
        """Forward the socket with this path on the host to a local address: unix:/path or
        http(s)://host:port. Raises Refused.
        """
        local = address.removeprefix("unix:").partition("://")
        target = (local[2] or local[0]).rstrip("/").replace("%", "%%")
        action = "cancel" if cancel else "forward"
        process = await self._share("-O", action, "-R", f"{path}:{target}")
        _, err = await process.communicate()
        if process.returncode != 0:
            raise Refused(
                f"{self.address.name}: the SSH server does not forward Unix sockets "
                f"({err.decode('utf-8', 'replace').strip()[-200:]}); agents need this forwarding: "
                "set `AllowStreamLocalForwarding yes` in its sshd_config"
            )

    async def reaches(self, address: str, port: int) -> bool:
        """Check from this host whether an SSH server answers at the address."""
        where = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        process = await self._share("-W", where)
        assert process.stdout is not None
        try:
            async with asyncio.timeout(_WITNESS_S):
                return bool(await process.stdout.read(1))
        except TimeoutError:
            return False
        finally:
            await _end(process)

    def close(self) -> None:
        """Close the connection immediately. Agents on the host keep running."""
        _kill(self._process)
        if self.address.control is not None:
            self.address.control.unlink(missing_ok=True)

    async def closed(self) -> None:
        """Wait until the local process has ended."""
        await self._process.wait()
        await asyncio.wait([self._complaints], timeout=_END_S)
        self._complaints.cancel()

    async def wait_open(self) -> None:
        """Wait until the host's shell answers. Raises CannotConnect, LoginRefused."""
        try:
            while line := await self._output.readline():
                if line.strip() == _MARK:
                    return
        except ValueError as error:  # the line is longer than the reader's limit
            raise CannotConnect(
                f"{self.address.name}: the login shell prints a line of more than 64 KiB"
            ) from error
        await self.closed()
        raise explain(self.address, self.said)

    async def _share(self, *words: str) -> asyncio.subprocess.Process:
        """Run `ssh` with `words`, which are options or a command, over the master's connection."""
        options = words if words[0].startswith("-") else ()
        command = () if options else words
        # If the master has ended, `ssh` would open a new connection. A proxy command that fails
        # prevents this.
        shared = ("ssh", "-F", "none", "-T", "-S", str(self.address.control))
        alone = ("-o", "ProxyCommand=false", "-o", "LogLevel=ERROR")
        return await spawn([*shared, *alone, *options, self.address.destination, *command])

    async def _collect(self) -> None:
        assert self._process.stderr is not None
        while data := await self._process.stderr.read(4096):
            self._stderr = (self._stderr + data)[-_STDERR_BYTES:]


async def open_connection(address: HostAddress, *, timeout_s: float) -> HostConnection:
    """Connect. Raises CannotConnect, LoginRefused, Refused."""
    argv = list(_SHELL)
    if address.ssh:
        master = ["-M", "-S", str(address.control)] if address.control is not None else []
        argv = [*address.ssh, *master, "--", address.destination, shlex.join(_SHELL)]
    link = HostConnection(address, await spawn(argv))
    try:
        async with asyncio.timeout(timeout_s):
            await link.wait_open()
    except BaseException as error:
        link.close()
        await link.closed()
        if isinstance(error, TimeoutError):
            raise CannotConnect(f"{address.name}: no answer within {timeout_s:g} s") from None
        raise
    return link


def write_rules(checking: str, known_hosts: Iterable[str]) -> str:
    """Return the first lines of an OpenSSH configuration, which contain Cavvy's requirements.
    `checking` is the value of StrictHostKeyChecking; `known_hosts` lists the paths of files with
    known host keys.
    """
    return _RULES.format(
        connect_s=CONNECT_TIMEOUT_S,
        checking=checking,
        known_hosts=" ".join(f'"{name}"' for name in known_hosts),
    )


def explain(address: HostAddress, said: str) -> CannotConnect | LoginRefused:
    """Return the error for a failed connection, derived from the output of `ssh`."""
    name = address.name
    if "Host key verification failed" in said:
        if address.ours:
            return LoginRefused(f"{name}: the host key differs from the recorded key ({said})")
        return LoginRefused(
            f"{name}: the host key is not in known_hosts, or differs from the key there ({said}). "
            f"Run `ssh {name}` once and compare the key{address.host_key_hint}"
        )
    if "Permission denied" in said or "Too many authentication failures" in said:
        if address.ours:
            return LoginRefused(f"{name}: the host does not accept this server's key ({said})")
        return LoginRefused(
            f"{name}: none of your keys is accepted ({said}). Make `ssh {name}` work without a "
            "password: run ssh-copy-id, or ssh-add if your key has a passphrase"
        )
    if "configuration option" in said or re.search(r": line \d+:", said):
        return LoginRefused(f"{name}: {said}")
    if found := re.search(r"Could not resolve hostname \S+ (.*)", said):
        return HostUnknown(
            f"{name}: the name has no address ({found[1]}); add a `Host {name}` with its HostName "
            "to ~/.ssh/config, or use its address"
        )
    return CannotConnect(
        f"{name}: the host cannot be reached: {said or 'the connection was closed'}"
    )


async def spawn(argv: Sequence[str]) -> asyncio.subprocess.Process:
    """Start a program with pipes, without the server's secret environment variables. Raises
    Refused.
    """
    pipe = asyncio.subprocess.PIPE
    try:
        return await asyncio.create_subprocess_exec(
            *argv,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            env=clean_environ(os.environ, _KEPT, ("LC_", "SSH_")),
            start_new_session=True,  # a Ctrl-C at the server's terminal must not reach the program
        )
    except (OSError, ValueError) as error:  # ValueError: an argument contains a null byte
        if argv[0] == "ssh" and isinstance(error, FileNotFoundError):
            raise Refused(
                "this machine has no OpenSSH client: install the package openssh-client (Debian, "
                "Ubuntu) or openssh-clients (Fedora, RHEL)"
            ) from error
        raise Refused(f"{argv[0]} cannot be started on this machine: {error}") from error


async def _converse(process: asyncio.subprocess.Process, given: bytes) -> tuple[bytes, bytes]:
    """Do what `Process.communicate` does, but end a program that prints more than `_STDOUT_BYTES`,
    and keep only the last `_STDERR_BYTES` of the error output.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    source, output, errors = process.stdin, process.stdout, process.stderr

    async def feed() -> None:
        with suppress(BrokenPipeError, ConnectionResetError):
            source.write(given)
            await source.drain()
        source.close()

    async def read() -> bytes:
        kept = bytearray()
        while len(kept) <= _STDOUT_BYTES and (data := await output.read(1 << 16)):
            kept += data
        if len(kept) > _STDOUT_BYTES:
            await _end(process)
        return bytes(kept)

    async def complain() -> bytes:
        kept = b""
        while data := await errors.read(4096):
            kept = (kept + data)[-_STDERR_BYTES:]
        return kept

    _, out, err = await asyncio.gather(feed(), read(), complain())
    await process.wait()
    return out, err


def _kill(process: asyncio.subprocess.Process) -> None:
    # `Process.kill` would hide the exit code from asyncio.
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


async def _end(process: asyncio.subprocess.Process) -> None:
    _kill(process)
    await process.wait()
