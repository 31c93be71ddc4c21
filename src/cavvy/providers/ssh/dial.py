"""Makes SSH connections as the user's own `ssh` would: their configuration, keys, jump hosts and
known hosts.

Errors, by what the caller does next:

* CannotConnect(TryAgain)  nobody answers now; a later call may
* LoginRefused(Refused)        a person must act: an unknown or changed host key, no accepted key
"""

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import asyncssh

from cavvy.providers.hosts.fleet.host_link import CannotConnect, LoginRefused
from cavvy.providers.ssh.inventory import InventoryHost

CONNECT_TIMEOUT_S = 10
KEEPALIVE_S, KEEPALIVES = 5, 3  # a line that was cut without a word is noticed after their product
_PORT = 22
asyncssh.set_log_level(logging.WARNING)  # it tells of every channel else


@dataclass(frozen=True, slots=True, kw_only=True)
class SshOptions:
    """How this user reaches hosts."""

    ssh_config: Path
    accept_new: bool
    known_hosts: Path  # keys of hosts that were accepted when they were new


@dataclass(frozen=True, slots=True, kw_only=True)
class SshConnection:
    """A connection, with the jump hosts' connections that carry it, and whom it reached."""

    connection: asyncssh.SSHClientConnection
    through: tuple[asyncssh.SSHClientConnection, ...]
    user: str
    address: str
    port: int

    def close(self) -> None:
        for each in (self.connection, *reversed(self.through)):
            each.close()

    async def gone(self) -> None:
        """Wait until all of it is closed."""
        for each in (self.connection, *reversed(self.through)):
            await each.wait_closed()


async def dial(entry: InventoryHost, ways: SshOptions) -> SshConnection:
    """Connect. Raises CannotConnect, LoginRefused."""
    target, overrides = entry.address or entry.name, _overrides(entry)
    through: list[asyncssh.SSHClientConnection] = []
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            read = await _read_options(target, ways, overrides)
            jumps = entry.jump or read.tunnel
            for jump in jumps.split(",") if isinstance(jumps, str) else ():
                user, at, where = jump.rpartition("@")
                name, colon, port = where.partition(":")
                own: dict[str, object] = {"username": user} if at else {}
                own |= {"port": int(port)} if colon else {}
                through.append(await _connect(name, ways, own, through))
            connection = await _connect(target, ways, overrides, through)
    except BaseException as error:
        for each in reversed(through):
            each.close()
        problem = _explain(entry.name, error)
        if problem is None:
            raise
        raise problem from error
    return SshConnection(
        connection=connection,
        through=tuple(through),
        user=read.username,
        address=read.host or target,
        port=read.port or _PORT,
    )


def _overrides(entry: InventoryHost) -> dict[str, object]:
    given: dict[str, object] = {"username": entry.user, "port": entry.port}
    if entry.identity_file is not None:
        given["client_keys"] = [str(Path(entry.identity_file).expanduser())]
    return {name: value for name, value in given.items() if value is not None}


async def _read_options(
    target: str, ways: SshOptions, overrides: dict[str, object]
) -> asyncssh.SSHClientConnectionOptions:
    """What the SSH configuration says of a host."""
    config = [str(ways.ssh_config)] if ways.ssh_config.is_file() else None
    options: asyncssh.SSHClientConnectionOptions = (
        await asyncssh.SSHClientConnectionOptions.construct(config=config, host=target, **overrides)
    )
    return options


async def _connect(
    target: str,
    ways: SshOptions,
    overrides: dict[str, object],
    through: list[asyncssh.SSHClientConnection],
) -> asyncssh.SSHClientConnection:
    read = await _read_options(target, ways, overrides)
    known = _known_hosts(read.known_hosts, ways)
    accepting = known is not None and ways.accept_new
    return await asyncssh.connect(
        target,
        config=[str(ways.ssh_config)] if ways.ssh_config.is_file() else None,
        known_hosts=known,
        client_factory=_acceptor(known, ways.known_hosts)
        if accepting and known is not None
        else None,
        tunnel=through[-1] if through else None,
        password_auth=False,
        kbdint_auth=False,
        ignore_encrypted=True,
        keepalive_interval=KEEPALIVE_S,
        keepalive_count_max=KEEPALIVES,
        **overrides,
    )


def _known_hosts(read: object, ways: SshOptions) -> bytes | None:
    """The known_hosts files together; None where the user's configuration switches the check
    off.
    """
    if read is None:
        return None
    names = (
        [read] if isinstance(read, str) else list(read) if isinstance(read, (list, tuple)) else []
    )
    paths = [Path(str(name)).expanduser() for name in names] or [
        Path("~/.ssh/known_hosts").expanduser()
    ]
    return b"\n".join(
        path.read_bytes() for path in (*paths, ways.known_hosts) if os.access(path, os.R_OK)
    )


def _acceptor(known: bytes, file: Path) -> Callable[[], asyncssh.SSHClient]:
    class Acceptor(asyncssh.SSHClient):
        """Trusts the key of a host that has none yet, and writes it down."""

        def validate_host_public_key(
            self, host: str, addr: str, port: int, key: asyncssh.SSHKey
        ) -> bool:
            if any(asyncssh.match_known_hosts(known, host, addr, port)[0]):
                return False
            name = host if port == _PORT else f"[{host}]:{port}"
            with open(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as out:
                out.write(name.encode() + b" " + key.export_public_key("openssh").strip() + b"\n")
            return True

    return Acceptor


def _explain(name: str, error: BaseException) -> CannotConnect | LoginRefused | None:
    match error:
        case asyncssh.HostKeyNotVerifiable():
            return LoginRefused(
                f"{name}: its host key is not in known_hosts, or is another one than there "
                f"({error.reason}). "
                f'Run `ssh {name}` once and compare the key, or set host_keys = "accept-new" for '
                "new hosts"
            )
        case asyncssh.PermissionDenied():
            return LoginRefused(
                f"{name}: no key of yours is accepted ({error.reason}). Make `ssh {name}` work "
                "without a password: "
                "ssh-copy-id, or ssh-add for a key with a passphrase"
            )
        case ValueError():  # a key or a line of the SSH configuration that makes no sense
            return LoginRefused(f"{name}: {error}")
        case TimeoutError():
            return CannotConnect(f"{name}: it does not answer within {CONNECT_TIMEOUT_S} s")
        case socket.gaierror():
            return CannotConnect(
                f"{name}: no address is known for it ({error.strerror}): give it a `Host {name}` "
                "with its HostName in "
                "~/.ssh/config, or its address in the inventory"
            )
        case asyncssh.Error() | OSError():
            return CannotConnect(f"{name}: it cannot be reached: {_say(error)}")
        case _:
            return None


def _say(error: Exception) -> str:
    """In the system's words where it has some; asyncio says only that a call failed."""
    number = getattr(error, "errno", None)
    return os.strerror(number) if isinstance(number, int) and number > 0 else str(error)
