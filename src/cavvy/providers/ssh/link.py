"""The line to one host: an SSH connection that is kept, the supervisor at its far end, and the
tunnel for agents.

Errors, by what the caller does next:

* CannotConnect, LoginRefused  of `dial`: nothing was asked of the host
* LinkLost(TryAgain)       the line broke after something was asked: perhaps it was done
* TryAgain, Refused        what the supervisor answered
"""

import asyncio
import os
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TypeVar

import asyncssh
import msgspec

from cavvy.providers.base import Refused, TryAgain
from cavvy.providers.hosts import bundles
from cavvy.providers.hosts.bundles import Bundle
from cavvy.providers.hosts.fleet.host_link import (
    ASK_TIMEOUT_S,
    Asked,
    CannotConnect,
    HostSetup,
    LinkLost,
    SupervisorAnswer,
    give_answer,
    give_up,
)
from cavvy.providers.hosts.fleet.machines import SupervisorFacts
from cavvy.providers.ssh.dial import SshConnection, SshOptions, dial
from cavvy.providers.ssh.inventory import InventoryHost

_T = TypeVar("_T")
SETUP_TIMEOUT_S = 90  # bringing a Python over a slow line
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 15.0  # between tries to connect
# of the time between two failed tries at most so much counts as silence: we may have slept
_COUNTED_S = 60.0
_WITNESS_TIMEOUT_S = 5
_LONGEST_SOCKET = 100  # bytes of a Unix socket's path, with a margin to the kernel's 108


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkDependencies:
    """What every link of a provider needs."""

    ways: SshOptions
    mark: str  # names the installation in folders
    agent: Callable[[], Bundle | None]  # None: no agents are started from here
    server_address: str  # where agents' requests go; "" where nothing is carried
    cache: Path
    now: Callable[[], datetime]
    changed: Callable[[str, str | None], None]  # host, and a gang or None for all


class SshLink:
    """One host. `ask` connects where it must; a host that did not answer is asked again after a
    pause only.
    """

    def __init__(self, entry: InventoryHost, base: LinkDependencies) -> None:
        self.entry = entry
        self.setup: HostSetup | None = None
        self.dialled: SshConnection | None = None
        self.problem = ""  # why it is not connected
        self.let_in = True  # False: somebody answers and does not let us in
        self.heard_at: datetime | None = None
        self.silent_since: datetime | None = None
        self.silent_s = 0.0  # how long it has not been reached, as far as we tried
        self._base = base
        self._process: asyncssh.SSHClientProcess[bytes] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._asked: Asked = {}
        self._number = 0
        self._reached: tuple[str, int] | None = None
        self._opening = asyncio.Lock()
        self._failed_at = 0.0  # on the loop's clock, as below
        self._pause_s = 0.0

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def up(self) -> bool:
        return self._process is not None

    @property
    def due(self) -> bool:
        """Whether it is time to try to connect."""
        return not self.up and asyncio.get_running_loop().time() >= self._failed_at + self._pause_s

    @property
    def target(self) -> tuple[str, int]:
        """Address and port of its SSH server, as far as we know them."""
        return self._reached or (self.entry.address or self.entry.name, self.entry.port or 22)

    async def connect(self) -> HostSetup:
        """Be connected. Raises CannotConnect, at once within the pause after a failure, and
        LoginRefused.
        """
        async with self._opening:
            if self.up and self.setup is not None:
                return self.setup
            if not self.due:
                raise CannotConnect(self.problem)
            try:
                async with asyncio.timeout(SETUP_TIMEOUT_S):
                    return await self._open()
            except (TryAgain, Refused, asyncssh.Error, OSError) as error:
                self._drop()
                text = str(error) or f"{self.entry.name} did not answer within {SETUP_TIMEOUT_S} s"
                self._count_failure(text, answered=isinstance(error, Refused))
                if isinstance(error, (TryAgain, Refused)):
                    raise
                raise CannotConnect(f"{self.entry.name}: {text}") from error
            except BaseException:
                self._drop()
                raise

    async def ask(self, do: str, kind: type[_T], **fields: object) -> _T:
        """Have the supervisor do something. Raises what this module's head lists, and NoCapacity
        for what is in use.
        """
        await self.connect()
        process = self._process
        if process is None:
            raise CannotConnect(self.problem or f"{self.entry.name}: the connection is lost")
        self._number += 1
        number, future = self._number, asyncio.get_running_loop().create_future()
        self._asked[number] = future
        try:
            process.stdin.write(msgspec.json.encode({"id": number, "do": do, **fields}) + b"\n")
            async with asyncio.timeout(ASK_TIMEOUT_S):
                raw = await future
        except (TimeoutError, OSError, asyncssh.Error) as error:
            raise LinkLost(
                f"{self.entry.name}: the connection was lost before it answered"
            ) from error
        finally:
            self._asked.pop(number, None)
        self.heard_at = self._base.now()
        return msgspec.json.decode(raw, type=kind)

    async def read_facts(self) -> SupervisorFacts:
        """What the host has; its drivers may take seconds. Raises as `ask`."""
        setup = await self.connect()
        out = await self._run([*setup.supervisor, "facts", setup.root])
        return msgspec.json.decode(out.strip().rpartition(b"\n")[2], type=SupervisorFacts)

    async def reaches(self, address: str, port: int) -> bool:
        """Whether that host's SSH port answers from here: a second witness of its being alive."""
        if self.dialled is None:
            return False
        try:
            async with asyncio.timeout(_WITNESS_TIMEOUT_S):
                _, writer = await self.dialled.connection.open_connection(
                    address, port, encoding=None
                )
        except (TimeoutError, OSError, asyncssh.Error):
            return False
        writer.close()
        return True

    async def can_relay(self) -> str:
        """Why agents there could not reach us, "" where they could, or where the host cannot be
        asked.
        """
        if self.setup is None or not self.up:
            return ""
        path = f"{self.setup.root}/s-{os.urandom(8).hex()}"
        try:
            listener = await self._forward(path, "unix:/nonexistent")
            listener.close()
            await self._run(["rm", "-f", path])
        except (Refused, TryAgain) as error:
            return str(error).removeprefix(f"{self.entry.name}: ")
        return ""

    def hang_up(self) -> None:
        """Let the line go; what was launched goes on."""
        self._drop()

    async def close(self) -> None:
        """Hang up and wait until the line is gone."""
        dialled = self.dialled
        self._drop()
        if dialled is not None:
            await dialled.gone()

    # Setting up

    async def _open(self) -> HostSetup:
        self.dialled = await dial(self.entry, self._base.ways)
        self._reached = (self.dialled.address, self.dialled.port)
        setup = await self._prepare()
        command = shlex.join([*setup.supervisor, "serve", setup.root])
        self._process = await self.dialled.connection.create_process(command, encoding=None)
        self.setup = setup
        self._reading = asyncio.create_task(
            self._read(self._process), name=f"ssh {self.entry.name}"
        )
        if self._base.server_address:
            await self._relay(setup)
        self.heard_at = self._base.now()
        self.problem, self.let_in, self.silent_since, self.silent_s, self._pause_s = (
            "",
            True,
            None,
            0.0,
            0.0,
        )
        self._base.changed(self.entry.name, None)
        return setup

    async def _prepare(self) -> HostSetup:
        """Make our folder on the host and bring what it does not have yet."""
        supervisor, agent = bundles.pack_supervisor(), self._base.agent()
        wanted = [supervisor, *([agent] if agent is not None else [])]
        script = Path(__file__).with_name("bootstrap.sh").read_bytes()
        names = [
            self.entry.folder,
            self._base.mark,
            self.entry.name,
            *(bundle.name for bundle in wanted),
        ]
        packed = sorted(path.name for path in self._base.cache.glob("*.python"))
        out = await self._run(["sh", "-s", *names, *packed], script)
        words = [
            line.split("=", 1) for line in out.decode(errors="replace").splitlines() if "=" in line
        ]
        said = {name: value for name, value in words if name != "has"}
        has = {value for name, value in words if name == "has"}
        if not {"base", "system"} <= said.keys():
            raise CannotConnect(
                f"{self.entry.name}: its shell does not run a plain script; it said {out[-200:]!r}"
            )
        if not said["system"].startswith("Linux "):
            raise Refused(f"{self.entry.name} runs {said['system']}; only Linux hosts can be used")
        folder = said["base"]
        for bundle in wanted:
            if bundle.name not in has:
                await self._bring(bundle, folder, 'mv -f "$1.$$" "$1"')
        python = (
            [said["python"]]
            if "python" in said
            else await self._bring_python(folder, said["system"], has)
        )
        root = f"{folder}/{self._base.mark}/{self.entry.name}"
        if len(root) + len("/s-0123456789abcdef") > _LONGEST_SOCKET:
            raise Refused(
                f"{self.entry.name}: {root} is too long for a socket; set a shorter `folder`"
            )
        start = (*python, "-I", "-S")
        return HostSetup(
            root=root,
            cache=f"{folder}/cache",
            agent=(*start, f"{folder}/{agent.name}") if agent is not None else (),
            supervisor=(*start, f"{folder}/{supervisor.name}"),
        )

    async def _bring_python(self, folder: str, system: str, has: set[str]) -> Sequence[str]:
        if system != bundles.platform():
            raise Refused(
                f"{self.entry.name} has no Python 3.8 or newer, and the one that could be brought "
                "is for "
                f"{bundles.platform()}, not {system}: install python3 there"
            )
        bundle = await asyncio.to_thread(bundles.pack_python, self._base.cache)
        if bundle.name not in has:
            unpack = (
                'mkdir "$1.d$$" && gzip -dc "$1.$$" | tar xf - -C "$1.d$$" && rm "$1.$$" && '
                'mv "$1.d$$" "$1"'
            )
            await self._bring(bundle, folder, unpack)
        (self._base.cache / bundle.name).touch()  # its name is asked for next time
        return bundles.python_command(f"{folder}/{bundle.name}")

    async def _bring(self, bundle: Bundle, folder: str, finish: str) -> None:
        """Write a file on the host under its content's name; it appears whole or not at all."""
        script = (
            f'umask 077; cat > "$1.$$" && [ "$(wc -c < "$1.$$")" -eq "$2" ] && {{ {finish}; '
            f'}} || [ -e "$1" ]'
        )
        await self._run(
            ["sh", "-c", script, "sh", f"{folder}/{bundle.name}", str(len(bundle.content))],
            bundle.content,
        )

    async def _run(self, command: Sequence[str], given: bytes = b"") -> bytes:
        """Run a command to its end; its output. Raises CannotConnect."""
        assert self.dialled is not None
        try:
            done = await self.dialled.connection.run(
                shlex.join(command),
                input=given,
                encoding=None,
                check=False,
                timeout=SETUP_TIMEOUT_S,
            )
        except (asyncssh.Error, OSError) as error:
            raise CannotConnect(f"{self.entry.name}: the connection is lost ({error})") from error
        out, complaint = _bytes(done.stdout), _bytes(done.stderr).decode(errors="replace").strip()
        if done.returncode != 0:
            raise CannotConnect(
                f"{self.entry.name}: {command[0]} failed there: "
                f"{complaint[-500:] or done.returncode}"
            )
        return out

    async def _relay(self, setup: HostSetup) -> None:
        """Let agents there reach the control plane: a socket in a folder of ours, forwarded over
        this connection.

        A fresh socket each time, since a dead connection's may still be there, behind a name that
        stays the same.
        """
        name = f"s-{os.urandom(8).hex()}"
        await self._forward(f"{setup.root}/{name}", self._base.server_address)
        await self._tell_socket(name)

    async def _forward(self, path: str, address: str) -> asyncssh.SSHListener:
        """Have what connects to a socket there arrive at an address here. Raises Refused."""
        assert self.dialled is not None
        connection = self.dialled.connection
        try:
            if address.startswith("unix:"):
                return await connection.forward_remote_path(path, address.removeprefix("unix:"))
            host, _, port = address.partition("://")[2].rstrip("/").rpartition(":")
            return await connection.forward_remote_path_to_port(path, host.strip("[]"), int(port))
        except (asyncssh.ChannelListenError, asyncssh.Error, OSError) as error:
            raise Refused(
                f"{self.entry.name}: its SSH server does not forward Unix sockets ({error}); "
                "agents need it: "
                "set `AllowStreamLocalForwarding yes` in its sshd_config"
            ) from error

    async def _tell_socket(self, name: str) -> None:
        assert self._process is not None
        future = asyncio.get_running_loop().create_future()
        self._asked[0] = future
        self._process.stdin.write(
            msgspec.json.encode({"id": 0, "do": "relay", "socket": name}) + b"\n"
        )
        await future

    # While it is up

    async def _read(self, process: "asyncssh.SSHClientProcess[bytes]") -> None:
        with suppress(asyncssh.Error, OSError, msgspec.MsgspecError):
            while line := await process.stdout.readline():
                if not line.startswith(b"{"):
                    continue  # what a login there says to everybody
                self._heard(msgspec.json.decode(line, type=SupervisorAnswer))
        if self._process is process:
            complaint = b""
            with suppress(asyncssh.Error, OSError, TimeoutError):
                async with asyncio.timeout(1):
                    complaint = await process.stderr.read()
            said = complaint.decode(errors="replace").strip().splitlines()
            self._reading = None
            self._drop()
            self._count_failure(
                f"{self.entry.name}: the connection was lost {said[-1:] or ''}".strip(),
                answered=False,
            )
            self._base.changed(self.entry.name, None)

    def _heard(self, answer: SupervisorAnswer) -> None:
        if answer.changed is not None:
            self._base.changed(self.entry.name, answer.changed)
            return
        give_answer(self._asked, answer, self.entry.name)

    def _drop(self) -> None:
        give_up(self._asked, f"{self.entry.name}: the connection was lost before it answered")
        if self._reading is not None:
            self._reading.cancel()
        if self.dialled is not None:
            self.dialled.close()
        self._process, self._reading, self.dialled = None, None, None

    def _count_failure(self, problem: str, *, answered: bool) -> None:
        now = asyncio.get_running_loop().time()
        if self.silent_since is None:
            self.silent_since = self._base.now()
            self._pause_s = 0.0
        elif not answered:
            self.silent_s += min(now - self._failed_at, _COUNTED_S)
        else:
            self.silent_s = 0.0
        self._pause_s = min(LONGEST_PAUSE_S, self._pause_s * 2 or FIRST_PAUSE_S)
        self.problem, self.let_in, self._failed_at = problem, not answered, now


def _bytes(output: bytes | str | None) -> bytes:
    return output if isinstance(output, bytes) else (output or "").encode()
