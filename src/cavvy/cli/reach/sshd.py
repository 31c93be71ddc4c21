"""An SSH server on standard input and output. The server runs each request on a node, through the
node's tunnel.

The server runs as the ProxyCommand of an SSH client. The client needs no authentication, because
the user who started this process can already access the node. All nodes show the same host key,
which is kept in the state folder.
"""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import asyncssh

from cavvy.agent.access.frames import ERR
from cavvy.cli.reach.tunnel import exit_code, read_input, write_all
from cavvy.client.state import default_home
from cavvy.client.tunnel import NodeTunnel, RemoteError, TunnelChannel, TunnelLost, join

_PIECE = 64 * 1024
_CONFLICTS = {"TERM"}


def host_key() -> Path:
    """Return the file with the host key of all nodes. The file is created on first use."""
    path = Path(default_home()) / "ssh_host_key"
    if not path.exists():
        key = asyncssh.generate_private_key("ssh-ed25519", comment="cavvy")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = path.with_name(f"ssh_host_key.{os.getpid()}")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(key.export_private_key())
        os.rename(fresh, path)
        path.with_suffix(".pub").write_bytes(key.export_public_key())
    return path


async def serve_stdio(tunnel: NodeTunnel) -> None:
    """Serve until the client disconnects or the tunnel is lost."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    key = await asyncio.to_thread(host_key)
    pumps = [
        asyncio.create_task(_inward(ours)),
        asyncio.create_task(_outward(ours)),
    ]  # The SSH handshake requires a host key.
    connection = await asyncssh.run_server(
        theirs,
        server_factory=lambda: _SshServer(tunnel),
        server_host_keys=[str(key)],
        process_factory=lambda process: _serve(tunnel, process),
        sftp_factory=lambda channel: NodeFiles(channel, tunnel),
        allow_scp=True,
        encoding=None,
        line_editor=False,
        keepalive_interval=0,
        login_timeout=30,
    )
    lost = asyncio.create_task(tunnel.lost.wait())
    closed = asyncio.create_task(connection.wait_closed())
    await asyncio.wait([lost, closed, pumps[1]], return_when=asyncio.FIRST_COMPLETED)
    connection.close()
    for task in (*pumps, lost, closed):
        task.cancel()
    if tunnel.lost.is_set() and tunnel.problem:
        raise TunnelLost(tunnel.problem)


async def _inward(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    arrived = read_input()
    while data := await arrived.get():
        await loop.sock_sendall(sock, data)
    sock.shutdown(socket.SHUT_WR)


async def _outward(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    while data := await loop.sock_recv(sock, _PIECE):
        await asyncio.to_thread(write_all, 1, data)


class _SshServer(asyncssh.SSHServer):
    """Accepts the client without authentication, and opens TCP connections that start at the
    node.
    """

    def __init__(self, tunnel: NodeTunnel) -> None:
        self._tunnel = tunnel

    def begin_auth(self, username: str) -> bool:
        return False

    def connection_requested(
        self, dest_host: str, dest_port: int, orig_host: str, orig_port: int
    ) -> Callable[[Any, Any], Awaitable[None]]:
        async def carry(
            reader: "asyncssh.SSHReader[bytes]", writer: "asyncssh.SSHWriter[bytes]"
        ) -> None:
            try:
                channel = await self._tunnel.connect(dest_host, dest_port)
            except (RemoteError, TunnelLost):
                writer.close()
                return
            with suppress(asyncssh.Error):
                await join(channel, reader, writer)

        return carry


async def _serve(tunnel: NodeTunnel, process: "asyncssh.SSHServerProcess[bytes]") -> None:
    """Serve one session: a shell or a command."""
    term = process.get_terminal_type()
    columns, rows, _, _ = process.get_terminal_size()
    pty = {"term": term, "cols": columns, "rows": rows} if term else None
    env = {key: value for key, value in process.env.items() if key not in _CONFLICTS}
    try:
        channel = await tunnel.run(line=process.command, env=env, pty=pty)
    except (RemoteError, TunnelLost) as error:
        process.stderr.write(f"cavvy: {error}\n".encode())
        process.exit(255)
        return
    sending = asyncio.create_task(_send(channel, process))
    try:
        while (piece := await channel.read()) is not None:
            kind, data = piece
            stream = process.stderr if kind == ERR else process.stdout
            stream.write(data)
            await stream.drain()
    except (TunnelLost, OSError, asyncssh.Error):
        channel.close()
    finally:
        sending.cancel()
    if channel.exit is not None and channel.exit.signal is not None and pty is None:
        process.exit_with_signal(channel.exit.signal)
    else:
        process.exit(exit_code(channel.exit))


async def _send(channel: TunnelChannel, process: "asyncssh.SSHServerProcess[bytes]") -> None:
    while True:
        try:
            data = await process.stdin.read(_PIECE)
        except asyncssh.TerminalSizeChanged as changed:
            channel.control(cols=changed.width, rows=changed.height)
            continue
        except asyncssh.SignalReceived as received:
            channel.control(signal=received.signal)
            continue
        except asyncssh.BreakReceived:
            continue
        if not data:
            channel.end()
            return
        await channel.write(data)


class NodeFiles(asyncssh.SFTPServer):
    """SFTP access to the node's files, with one call over the tunnel per operation. Relative paths
    start in the job's folder.
    """

    def __init__(self, channel: "asyncssh.SSHServerChannel[bytes]", tunnel: NodeTunnel) -> None:
        super().__init__(channel)
        self._tunnel = tunnel

    async def _do(self, op: str, **fields: Any) -> dict[str, object]:
        said, _ = await self._tunnel.call(op, **fields)
        return said

    def exit(self) -> None:
        """Tell the node that the client has finished without an error."""
        with suppress(OSError):
            self.channel.exit(0)

    async def open(self, path: bytes, pflags: int, attrs: asyncssh.SFTPAttrs) -> object:
        reads, writes = bool(pflags & asyncssh.FXF_READ), bool(pflags & asyncssh.FXF_WRITE)
        said = await self._do(
            "open",
            path=_text(path),
            mode="both" if reads and writes else "write" if writes else "read",
            create=bool(pflags & asyncssh.FXF_CREAT),
            truncate=bool(pflags & asyncssh.FXF_TRUNC),
            new=bool(pflags & asyncssh.FXF_EXCL),
            append=bool(pflags & asyncssh.FXF_APPEND),
            permissions=attrs.permissions if attrs.permissions is not None else 0o666,
        )
        return said["handle"]

    async def close(self, file_obj: object) -> None:
        await self._do("close", handle=file_obj)

    async def read(self, file_obj: object, offset: int, size: int) -> bytes:
        _, data = await self._tunnel.call("read", handle=file_obj, offset=offset, size=size)
        if len(data) > size:
            raise asyncssh.SFTPFailure("the node sent more data than requested")
        return data

    async def write(self, file_obj: object, offset: int, data: bytes) -> int:
        await self._tunnel.call("write", data, handle=file_obj, offset=offset)
        return len(data)

    async def lstat(self, path: bytes) -> asyncssh.SFTPAttrs:
        return _attrs(await self._do("stat", path=_text(path), follow=False))

    async def stat(self, path: bytes) -> asyncssh.SFTPAttrs:
        return _attrs(await self._do("stat", path=_text(path)))

    async def fstat(self, file_obj: object) -> asyncssh.SFTPAttrs:
        return _attrs(await self._do("stat", handle=file_obj))

    async def setstat(self, path: bytes, attrs: asyncssh.SFTPAttrs) -> None:
        await self._do("set", path=_text(path), **_wanted(attrs))

    async def fsetstat(self, file_obj: object, attrs: asyncssh.SFTPAttrs) -> None:
        await self._do("set", handle=file_obj, **_wanted(attrs))

    async def scandir(self, path: bytes) -> AsyncIterator[asyncssh.SFTPName]:
        import json

        for name in (b".", b".."):
            yield asyncssh.SFTPName(name, attrs=await self.lstat(path + b"/" + name))
        _, data = await self._tunnel.call("list", path=_text(path))
        for name, found in json.loads(data):
            if name in ("", ".", "..") or "/" in name or "\0" in name:
                raise asyncssh.SFTPFailure(f"the node sent an invalid file name: {name!r}")
            yield asyncssh.SFTPName(os.fsencode(name), attrs=_attrs(found))

    async def remove(self, path: bytes) -> None:
        await self._do("remove", path=_text(path))

    async def mkdir(self, path: bytes, attrs: asyncssh.SFTPAttrs) -> None:
        await self._do("mkdir", path=_text(path), permissions=attrs.permissions or 0o777)

    async def rmdir(self, path: bytes) -> None:
        await self._do("rmdir", path=_text(path))

    async def realpath(self, path: bytes) -> bytes:
        return os.fsencode(str((await self._do("resolve", path=_text(path)))["path"]))

    async def rename(self, oldpath: bytes, newpath: bytes) -> None:
        await self._do("rename", path=_text(oldpath), target=_text(newpath), replace=False)

    async def posix_rename(self, oldpath: bytes, newpath: bytes) -> None:
        await self._do("rename", path=_text(oldpath), target=_text(newpath))

    async def readlink(self, path: bytes) -> bytes:
        return os.fsencode(str((await self._do("readlink", path=_text(path)))["target"]))

    async def symlink(self, oldpath: bytes, newpath: bytes) -> None:
        await self._do("link", path=_text(newpath), target=_text(oldpath))

    async def link(self, oldpath: bytes, newpath: bytes) -> None:
        await self._do("link", path=_text(newpath), target=_text(oldpath), hard=True)


def _text(path: bytes) -> str:
    return os.fsdecode(path) or "."


def _attrs(said: dict[str, object]) -> asyncssh.SFTPAttrs:
    def whole(name: str) -> int:
        return int(float(str(said[name])))

    mode = whole("mode")
    return asyncssh.SFTPAttrs(
        type=_kind(mode),
        size=whole("size"),
        uid=whole("uid"),
        gid=whole("gid"),
        permissions=mode,
        atime=whole("atime"),
        mtime=whole("mtime"),
    )


def _kind(mode: int) -> int:
    import stat

    if stat.S_ISDIR(mode):
        return asyncssh.FILEXFER_TYPE_DIRECTORY
    if stat.S_ISLNK(mode):
        return asyncssh.FILEXFER_TYPE_SYMLINK
    return asyncssh.FILEXFER_TYPE_REGULAR if stat.S_ISREG(mode) else asyncssh.FILEXFER_TYPE_SPECIAL


def _wanted(attrs: asyncssh.SFTPAttrs) -> dict[str, object]:
    return {
        "size": attrs.size,
        "uid": attrs.uid,
        "gid": attrs.gid,
        "mode": attrs.permissions,
        "atime": attrs.atime,
        "mtime": attrs.mtime,
    }
