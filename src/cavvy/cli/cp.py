"""`cavvy cp`: copies files and folders to and from a job's node; interrupted copies resume."""

import asyncio
import errno
import hashlib
import os
import posixpath
import stat
import sys
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, BinaryIO

import click

from cavvy.cli.reach.received import (
    PART,
    CopyItem,
    Landing,
    check_room,
    read_item,
    read_listing,
    stays_inside,
)
from cavvy.cli.reach.session import project_option
from cavvy.cli.reach.tunnel import with_tunnel
from cavvy.cli.view.failure import CommandFailure, escape_controls

if TYPE_CHECKING:
    from cavvy.client.tunnel.mux import NodeTunnel

_PIECE = 256 * 1024
_AHEAD = 8  # chunks in flight
_NAMED = 5  # skipped links that the message names; the others are counted


@click.command("cp")
@click.argument("source", metavar="SOURCE")
@click.argument("target", metavar="TARGET")
@project_option
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
def command(source: str, target: str, project: str, quiet: bool) -> None:
    """Copy a file or folder to or from a job's node: one of the two is NAME[:RANK]:PATH.

    cavvy cp digits:out/weights.pt . · cavvy cp data/ digits:1:/tmp/data

    A relative path on a node starts in the job's folder. Files from a node are written below
    TARGET only: other names are refused, links that lead out of the folder are skipped, and
    setuid bits are dropped. A file appears when it is complete; an interrupted copy resumes
    if the part that was copied is unchanged.
    """
    there, here = _read_side(source), _read_side(target)
    if (there is None) == (here is None):
        raise CommandFailure(
            "one of SOURCE and TARGET must be on a node, and the other on this machine",
            "NAME:PATH and NAME:RANK:PATH are on a node; write ./a:b for a local file name with "
            "a colon",
            exit_code=2,
        )
    bar = _Bar(quiet or not sys.stderr.isatty())
    try:
        if there is not None:
            far, path = there
            name = _name_copy(far, path)
            with_tunnel(project, far, lambda tunnel: _fetch(tunnel, path, target, name, bar))
        elif here is not None:
            far, path = here
            with_tunnel(
                project, far, lambda tunnel: _send(tunnel, Path(source).expanduser(), path, bar)
            )
    except OSError as error:  # of a local file; errors of the node are CommandFailures already
        if error.filename is None:
            raise
        raise CommandFailure(
            f"{str(error.filename).removesuffix(PART)}: {error.strerror}"
        ) from error
    bar.done()


def _read_side(text: str) -> tuple[str, str] | None:
    """(NAME or NAME:RANK, path) of a path on a node; None for a local one."""
    first, colon, rest = text.partition(":")
    if not colon or "/" in first or first in ("", ".", ".."):
        return None
    rank, colon, path = rest.partition(":")
    return (f"{first}:{rank}", path or ".") if colon and rank.isdigit() else (first, rest or ".")


class _Bar:
    """Progress on one line of the terminal."""

    def __init__(self, silent: bool) -> None:
        self._silent = silent
        self.total = self.copied = self.files = 0

    def move(self, size: int) -> None:
        from cavvy.cli.view.formatting import show_size

        self.copied += size
        if not self._silent:
            share = f" {100 * self.copied // self.total}%" if self.total else ""
            sys.stderr.write(f"\r{show_size(self.copied)} of {show_size(self.total)}{share} ")
            sys.stderr.flush()

    def done(self) -> None:
        from cavvy.cli.view.formatting import show_size

        end = "" if self._silent else "\r\033[K"
        files = "file" if self.files == 1 else "files"
        sys.stderr.write(f"{end}{self.files} {files}, {show_size(self.copied)}\n")


async def _fetch(tunnel: "NodeTunnel", path: str, to_path: str, name: str, bar: _Bar) -> None:
    """`name`: of the copy in a folder that exists."""
    top = read_item("", (await tunnel.call("stat", path=path))[0])
    target, items = Path(to_path).expanduser(), [top]
    in_folder = target.is_dir()
    target = target / name if in_folder else target
    if top.kind == stat.S_IFDIR:
        _, data = await tunnel.call("walk", path=path)
        items = read_listing(top, data)
        target.parent.mkdir(parents=True, exist_ok=True)
    elif top.kind != stat.S_IFREG:
        raise CommandFailure(f"{path} is not a file or folder")
    elif to_path.endswith("/") and not in_folder:
        raise CommandFailure(
            f"{to_path}: there is no such folder here", "create it first, or omit the final /"
        )
    elif not target.parent.is_dir():
        raise CommandFailure(f"{target}: {os.strerror(errno.ENOENT)}")
    bar.total = sum(item.size for item in items if item.kind == stat.S_IFREG)
    with Landing(target.parent) as landing:
        await _receive(tunnel, path, landing, target.name, items, bar)
    out = [
        f"{each.path} -> {each.link}"
        for each in items
        if each.link is not None and not stays_inside(each)
    ]
    if out:
        more = f" and {len(out) - _NAMED} more" if len(out) > _NAMED else ""
        raise CommandFailure(
            "these links may lead out of the folder and were skipped: "
            + escape_controls(", ".join(out[:_NAMED]) + more),
            "everything else was copied; copy their targets by name",
        )


def _name_copy(job: str, path: str) -> str:
    """The name of a copy of `path` in a folder, from the user's arguments alone: a node that chose
    the name could choose `.bashrc`.
    """
    name = PurePosixPath(posixpath.normpath(path)).name
    return job.partition(":")[0] if name in ("", "..", "~") else name


async def _receive(
    tunnel: "NodeTunnel",
    path: str,
    landing: Landing,
    name: str,
    items: Sequence[CopyItem],
    bar: _Bar,
) -> None:
    for item in items:
        far, to = (f"{each}/{item.path}" if item.path else each for each in (path, name))
        if item.kind == stat.S_IFDIR:
            landing.make_folder(to)
        elif item.kind == stat.S_IFREG:
            await _fetch_file(tunnel, far, landing, to, item, bar)
        elif item.link is not None and stays_inside(item):
            landing.make_link(to, item.link)
    for item in reversed(items):  # a folder's times are set after its contents are written
        if item.kind == stat.S_IFDIR:
            landing.finish_folder(f"{name}/{item.path}" if item.path else name, item)


async def _fetch_file(
    tunnel: "NodeTunnel", path: str, landing: Landing, to: str, item: CopyItem, bar: _Bar
) -> None:
    handle = (await tunnel.call("open", path=path))[0].get("handle")
    asked: list[asyncio.Task[tuple[dict[str, object], bytes]]] = []
    try:
        with landing.write(to, item) as file:
            start = await _same_start(tunnel, path, file, item.size)
            check_room(file, path, item.size - start)
            bar.move(start)
            file.truncate(start)
            file.seek(start)
            offsets = iter(range(start, item.size, _PIECE))

            def ask() -> None:
                offset = next(offsets, None)
                if offset is not None:
                    asked.append(
                        asyncio.ensure_future(
                            tunnel.call("read", handle=handle, offset=offset, size=_PIECE)
                        )
                    )

            for _ in range(_AHEAD):
                ask()
            while asked:
                _, data = await asked.pop(0)
                ask()
                if len(data) != min(_PIECE, item.size - file.tell()):
                    raise CommandFailure(f"{path} changed while it was copied", "copy it again")
                file.write(data)
                bar.move(len(data))
        bar.files += 1
    finally:
        for each in asked:
            each.cancel()
        await tunnel.call("close", handle=handle)


async def _same_start(tunnel: "NodeTunnel", path: str, part: BinaryIO, size: int) -> int:
    """The length of a partial copy if it matches the start of the node's file, else 0."""
    length = os.fstat(part.fileno()).st_size
    if not 0 < length <= size:
        return 0
    said, _ = await tunnel.call("hash", path=path, size=length)
    return length if said.get("sha256") == await asyncio.to_thread(_hash, part, length) else 0


async def _send(tunnel: "NodeTunnel", source: Path, path: str, bar: _Bar) -> None:
    from cavvy.client.tunnel.mux import RemoteError

    if not source.exists():
        raise CommandFailure(f"{source}: there is no such file or folder")
    items = _walk(source)
    try:
        if read_item("", (await tunnel.call("stat", path=path))[0]).kind == stat.S_IFDIR:
            path = f"{path}/{source.resolve().name}"
    except RemoteError:  # it will be created
        if path.endswith("/") and not stat.S_ISDIR(items[0].mode):
            hint = "create it first, for example with `cavvy exec`, or omit the final /"
            raise CommandFailure(f"{path}: there is no such folder on the node", hint) from None
    bar.total = sum(item.size for item in items if stat.S_ISREG(item.mode))
    for item in items:
        to = f"{path}/{item.path}" if item.path else path
        if stat.S_ISDIR(item.mode):
            await tunnel.call("mkdir", path=to, parents=True)
        elif item.link is not None:
            await tunnel.call("link", path=to, target=item.link, replace=True)
        elif stat.S_ISREG(item.mode):
            await _send_file(tunnel, source / item.path if item.path else source, to, item, bar)
    for item in reversed(items):
        if stat.S_ISDIR(item.mode):
            to = f"{path}/{item.path}" if item.path else path
            await tunnel.call("set", path=to, mode=stat.S_IMODE(item.mode), mtime=item.mtime)


async def _send_file(
    tunnel: "NodeTunnel", source: Path, to: str, item: CopyItem, bar: _Bar
) -> None:
    from cavvy.client.tunnel.mux import RemoteError

    part, start = to + PART, 0
    try:
        there = read_item("", (await tunnel.call("stat", path=part))[0]).size
        if 0 < there <= item.size:
            said, _ = await tunnel.call("hash", path=part, size=there)
            with source.open("rb") as file:
                ours = await asyncio.to_thread(_hash, file, there)
            start = there if said.get("sha256") == ours else 0
    except RemoteError:
        start = 0
    said, _ = await tunnel.call(
        "open", path=part, mode="write", create=True, truncate=not start, permissions=0o600
    )
    handle = said.get("handle")
    sent: list[asyncio.Task[tuple[dict[str, object], bytes]]] = []
    try:
        bar.move(start)
        with source.open("rb") as file:
            file.seek(start)
            offset = start
            while data := file.read(_PIECE):
                sent.append(
                    asyncio.ensure_future(tunnel.call("write", data, handle=handle, offset=offset))
                )
                offset += len(data)
                bar.move(len(data))
                if len(sent) >= _AHEAD:
                    await sent.pop(0)
            for each in sent:
                await each
        if offset != item.size:
            raise CommandFailure(f"{source} changed while it was copied", "copy it again")
        await tunnel.call("set", handle=handle, mode=stat.S_IMODE(item.mode), mtime=item.mtime)
    finally:
        for each in sent:
            each.cancel()
        await tunnel.call("close", handle=handle)
    await tunnel.call("rename", path=part, target=to)
    bar.files += 1


def _walk(source: Path) -> Sequence[CopyItem]:
    top = source.stat()
    items = [CopyItem(path="", mode=top.st_mode, size=top.st_size, mtime=top.st_mtime)]
    if not stat.S_ISDIR(top.st_mode):
        return items
    for folder, inner, names in os.walk(source):
        for name in sorted([*inner, *names]):
            path = Path(folder, name)
            found = path.lstat()
            link = os.readlink(path) if path.is_symlink() else None
            relative = str(path.relative_to(source))
            items.append(
                CopyItem(
                    path=relative,
                    mode=found.st_mode,
                    size=found.st_size,
                    mtime=found.st_mtime,
                    link=link,
                )
            )
    return items


def _hash(file: BinaryIO, size: int) -> str:
    found, left = hashlib.sha256(), size
    file.seek(0)
    while left and (part := file.read(min(1 << 20, left))):
        found.update(part)
        left -= len(part)
    return found.hexdigest()
