"""Gives access to folders on an SFTP server. Only the control plane connects to the server; nodes
never receive the login of the SFTP server.

asyncssh runs in a thread with its own event loop, because all functions of this module block.
"""

import asyncio
import posixpath
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

from cavvy.domain.targets import EVERY
from cavvy.http_client import TargetDenied, connect_allowed, list_allowed
from cavvy.store.objects.base import ObjectDenied, ObjectInfo, ObjectMissing, ObjectTryAgain
from cavvy.store.objects.threads import start_apart

if TYPE_CHECKING:
    import asyncssh

T = TypeVar("T")
_PATIENCE_S = 60.0


class SftpServer:
    """One server, given as `[user@]host[:port]`. Keys are absolute paths. Each call opens a new
    connection. `targets` are the private targets that may be called.
    """

    def __init__(self, where: str, keys: Mapping[str, str], targets: str = EVERY) -> None:
        user, at, host = where.rpartition("@")
        self._where = host
        name, colon, port = host.rpartition(":")
        found = (name, int(port)) if colon and port.isdecimal() else (host, 22)
        self._host, self._port = found[0].strip("[]"), found[1]
        self._user = user if at else keys.get("SFTP_USER", "")
        self._keys = keys
        self._targets = targets

    def head(self, key: str) -> ObjectInfo | None:
        async def look(sftp: "asyncssh.SFTPClient") -> ObjectInfo | None:
            import asyncssh

            try:
                seen = await sftp.stat(key)
            except asyncssh.SFTPNoSuchFile:
                return None
            if seen.type == asyncssh.FILEXFER_TYPE_DIRECTORY:
                return None
            return _found(key, seen)

        return self._do(look)

    def list(
        self, prefix: str, after: str = "", limit: int = 1000
    ) -> tuple[Sequence[ObjectInfo], str]:
        async def walk(sftp: "asyncssh.SFTPClient") -> tuple[Sequence[ObjectInfo], str]:
            import asyncssh

            found: list[ObjectInfo] = []
            todo = [prefix.rstrip("/") or "/"]
            while todo:
                folder = todo.pop()
                async for entry in sftp.scandir(folder):
                    name = str(entry.filename)
                    path = posixpath.join(folder, name)
                    if entry.attrs.type == asyncssh.FILEXFER_TYPE_DIRECTORY and name not in (
                        ".",
                        "..",
                    ):
                        todo.append(path)
                    elif entry.attrs.type == asyncssh.FILEXFER_TYPE_REGULAR:
                        found.append(_found(path, entry.attrs))
            return sorted(found, key=lambda each: each.key), ""

        return self._do(walk)

    def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        async def read(sftp: "asyncssh.SFTPClient") -> bytes:
            async with sftp.open(key, "rb") as file:
                content: Any = await file.read(-1 if length is None else length, offset)
                return bytes(content)  # the stubs do not know that the mode is "rb"

        return self._do(read)

    def write(self, key: str, offset: int, data: bytes, size: int) -> None:
        part = f"{key}.cavvy-part"

        async def send(sftp: "asyncssh.SFTPClient") -> None:
            await sftp.makedirs(posixpath.dirname(key) or "/", exist_ok=True)
            import asyncssh

            flags = (
                asyncssh.FXF_WRITE | asyncssh.FXF_CREAT | (asyncssh.FXF_TRUNC if offset == 0 else 0)
            )
            async with sftp.open(part, flags, encoding=None) as file:
                await file.write(data, offset)
            if offset + len(data) < size:
                return
            seen = await sftp.stat(part)
            if seen.size != size:
                raise ObjectTryAgain(f"{self._where}: {key} has {seen.size} of {size} bytes")
            try:
                await sftp.posix_rename(part, key)
            except asyncssh.SFTPOpUnsupported:
                with suppress(asyncssh.SFTPNoSuchFile):
                    await sftp.remove(key)
                await sftp.rename(part, key)

        self._do(send)

    def _do(self, work: "Callable[[asyncssh.SFTPClient], Awaitable[T]]") -> T:
        """Run `work` on a connection, in a thread with its own event loop, and return the
        result.
        """
        return start_apart(lambda: asyncio.run(self._connected(work)), "sftp").result()

    async def _connected(self, work: "Callable[[asyncssh.SFTPClient], Awaitable[T]]") -> T:
        import asyncssh

        try:
            with await asyncio.to_thread(self._dial) or nullcontext() as sock:
                async with (
                    asyncio.timeout(_PATIENCE_S),
                    asyncssh.connect(self._host, self._port, sock=sock, **self._options()) as line,
                    line.start_sftp_client() as sftp,
                ):
                    return await work(sftp)
        except TargetDenied as error:
            raise ObjectDenied(str(error)) from error
        except asyncssh.SFTPNoSuchFile as error:
            raise ObjectMissing(f"{self._where}: {error.reason}") from error
        except (
            asyncssh.PermissionDenied,
            asyncssh.SFTPPermissionDenied,
            asyncssh.HostKeyNotVerifiable,
        ) as error:
            raise ObjectDenied(f"{self._where}: {error}") from error
        except ValueError as error:  # a key, a host name or a user name with a wrong form
            raise ObjectDenied(f"{self._where}: {error}") from error
        except (asyncssh.Error, OSError, TimeoutError) as error:
            raise ObjectTryAgain(f"{self._where}: {error or 'no answer'}") from error

    def _dial(self) -> socket.socket | None:
        """Connect to an allowed address. If every private target may be called, return None:
        asyncssh then connects, and finds hosts in `~/.ssh/config` of the server's user. Raises
        TargetDenied, OSError.
        """
        if self._targets != EVERY:
            address = self._host, self._port
            return connect_allowed(address, _PATIENCE_S, targets=self._targets)
        with suppress(OSError):
            list_allowed(self._host, self._port, EVERY)
        return None

    def _options(self) -> dict[str, Any]:
        import asyncssh

        options: dict[str, Any] = {}
        if self._user:
            options["username"] = self._user
        if "SFTP_PASSWORD" in self._keys:
            options["password"] = self._keys["SFTP_PASSWORD"]
        if "SFTP_PRIVATE_KEY" in self._keys:
            options["client_keys"] = [asyncssh.import_private_key(self._keys["SFTP_PRIVATE_KEY"])]
        if "SFTP_KNOWN_HOSTS" in self._keys:
            options["known_hosts"] = asyncssh.import_known_hosts(self._keys["SFTP_KNOWN_HOSTS"])
        return options


def _found(key: str, seen: "asyncssh.SFTPAttrs") -> ObjectInfo:
    changed = datetime.fromtimestamp(seen.mtime, UTC) if seen.mtime is not None else None
    return ObjectInfo(key=key, size=seen.size, tag=f"{seen.mtime}-{seen.size}", changed_at=changed)
