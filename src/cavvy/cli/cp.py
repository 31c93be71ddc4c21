"""`cavvy cp`: files and folders to and from a job's node; what was broken off is taken up again."""

import asyncio
import hashlib
import json
import os
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, BinaryIO

import click

from cavvy.cli.reach.session import project_option
from cavvy.cli.reach.tunnel import with_tunnel
from cavvy.cli.view.failure import Failure

if TYPE_CHECKING:
    from cavvy.client.tunnel.mux import Tunnel

_PIECE = 256 * 1024
_AHEAD = 8  # pieces on their way at once
_PART = ".cavvy-part"  # what a file is called until it is whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One file, folder or link to be copied; `path` is relative to what was named, "" itself."""

    path: str
    mode: int
    size: int
    mtime: float
    link: str | None = None


@click.command("cp")
@click.argument("source", metavar="SOURCE")
@click.argument("target", metavar="TARGET")
@project_option
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
def command(source: str, target: str, project: str, quiet: bool) -> None:
    """Copy a file or folder to or from a job's node: one of the two is NAME[:RANK]:PATH.

    cavvy cp digits:out/weights.pt . · cavvy cp data/ digits:1:/tmp/data

    A relative path is one in the job's folder. Files appear whole or not at all; one that was
    broken off goes on where it stopped, if what is there is the same.
    """
    there, here = _read_side(source), _read_side(target)
    if (there is None) == (here is None):
        raise Failure(
            "one of SOURCE and TARGET must be on a node, and one here",
            "NAME:PATH or NAME:RANK:PATH is on a node; write ./a:b for a file here that has a "
            "colon",
            exit_code=2,
        )
    bar = _Bar(quiet or not sys.stderr.isatty())
    try:
        if there is not None:
            far, path = there
            with_tunnel(project, far, lambda tunnel: _fetch(tunnel, path, target, bar))
        elif here is not None:
            far, path = here
            with_tunnel(
                project, far, lambda tunnel: _send(tunnel, Path(source).expanduser(), path, bar)
            )
    except OSError as error:  # of a file here; what the node says has become a failure already
        if error.filename is None:
            raise
        raise Failure(f"{str(error.filename).removesuffix(_PART)}: {error.strerror}") from error
    bar.done()


def _read_side(text: str) -> tuple[str, str] | None:
    """(NAME or NAME:RANK, path) of what is on a node; None for what is here."""
    first, colon, rest = text.partition(":")
    if not colon or "/" in first or first in ("", ".", ".."):
        return None
    rank, colon, path = rest.partition(":")
    return (f"{first}:{rank}", path or ".") if colon and rank.isdigit() else (first, rest or ".")


class _Bar:
    """How much is done, on one line of the terminal."""

    def __init__(self, silent: bool) -> None:
        self._silent = silent
        self.total = self.copied = self.files = 0

    def move(self, size: int) -> None:
        from cavvy.cli.view.shown import show_size

        self.copied += size
        if not self._silent:
            share = f" {100 * self.copied // self.total}%" if self.total else ""
            sys.stderr.write(f"\r{show_size(self.copied)} of {show_size(self.total)}{share} ")
            sys.stderr.flush()

    def done(self) -> None:
        from cavvy.cli.view.shown import show_size

        end = "" if self._silent else "\r\033[K"
        sys.stderr.write(f"{end}{self.files} file(s), {show_size(self.copied)}\n")


async def _fetch(tunnel: "Tunnel", path: str, to_path: str, bar: _Bar) -> None:
    top = _item("", (await tunnel.call("stat", path=path))[0])
    target = Path(to_path).expanduser()
    if to_path.endswith("/") and not stat.S_ISDIR(top.mode) and not target.is_dir():
        raise Failure(
            f"{to_path}: there is no such folder here", "make it first, or leave the / out"
        )
    items = [top]
    if stat.S_ISDIR(top.mode):
        _, data = await tunnel.call("walk", path=path)
        items += [_item(name, found) for name, found in json.loads(data)]
    if target.is_dir():
        resolved = str((await tunnel.call("resolve", path=path))[0]["path"])
        target = target / (PurePosixPath(resolved).name or "root")
    bar.total = sum(item.size for item in items if stat.S_ISREG(item.mode))
    for item in items:
        to = target / item.path if item.path else target
        if stat.S_ISDIR(item.mode):
            to.mkdir(parents=True, exist_ok=True)
        elif item.link is not None:
            if to.is_symlink():
                to.unlink()
            to.symlink_to(item.link)
        elif stat.S_ISREG(item.mode):
            await _fetch_file(tunnel, f"{path}/{item.path}" if item.path else path, to, item, bar)
    for item in reversed(items):  # folders get their times when nothing more is written in them
        if item.link is None and (stat.S_ISREG(item.mode) or stat.S_ISDIR(item.mode)):
            to = target / item.path if item.path else target
            os.chmod(to, stat.S_IMODE(item.mode))
            os.utime(to, (item.mtime, item.mtime))


async def _fetch_file(tunnel: "Tunnel", path: str, to: Path, item: Item, bar: _Bar) -> None:
    part = to.with_name(to.name + _PART)
    handle = (await tunnel.call("open", path=path))[0]["handle"]
    try:
        start = await _same_start(tunnel, path, part, item.size)
        bar.move(start)
        with _open(part) as file:
            file.truncate(start)
            file.seek(start)
            offsets = iter(range(start, item.size, _PIECE))
            asked: list[asyncio.Task[tuple[dict[str, object], bytes]]] = []

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
                file.write(data)
                bar.move(len(data))
            file.flush()
            if file.tell() != item.size:
                raise Failure(f"{path} changed while it was copied", "copy it again")
        os.replace(part, to)
        bar.files += 1
    finally:
        await tunnel.call("close", handle=handle)


async def _same_start(tunnel: "Tunnel", path: str, part: Path, size: int) -> int:
    """How much of a file that was broken off is what the node has."""
    if not part.exists() or not 0 < part.stat().st_size <= size:
        return 0
    length = part.stat().st_size
    said, _ = await tunnel.call("hash", path=path, size=length)
    return length if said["sha256"] == await asyncio.to_thread(_hash, part, length) else 0


async def _send(tunnel: "Tunnel", source: Path, path: str, bar: _Bar) -> None:
    from cavvy.client.tunnel.mux import FarError

    if not source.exists():
        raise Failure(f"{source}: there is no such file or folder")
    items = _walk(source)
    try:
        there = (await tunnel.call("stat", path=path))[0]
        if stat.S_ISDIR(int(there["mode"])):
            path = f"{path}/{source.resolve().name}"
    except FarError:  # it is made
        if path.endswith("/") and not stat.S_ISDIR(items[0].mode):
            hint = "make it first, as by `cavvy exec`, or leave the / out"
            raise Failure(f"{path}: there is no such folder on the node", hint) from None
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


async def _send_file(tunnel: "Tunnel", source: Path, to: str, item: Item, bar: _Bar) -> None:
    from cavvy.client.tunnel.mux import FarError

    part, start = to + _PART, 0
    try:
        there = int((await tunnel.call("stat", path=part))[0]["size"])
        if 0 < there <= item.size:
            said, _ = await tunnel.call("hash", path=part, size=there)
            start = there if said["sha256"] == await asyncio.to_thread(_hash, source, there) else 0
    except FarError:
        start = 0
    handle = (
        await tunnel.call(
            "open", path=part, mode="write", create=True, truncate=not start, permissions=0o600
        )
    )[0]["handle"]
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
            raise Failure(f"{source} changed while it was copied", "copy it again")
        await tunnel.call("set", handle=handle, mode=stat.S_IMODE(item.mode), mtime=item.mtime)
    finally:
        for each in sent:
            each.cancel()
        await tunnel.call("close", handle=handle)
    await tunnel.call("rename", path=part, target=to)
    bar.files += 1


def _open(part: Path) -> BinaryIO:
    return open(os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b")


def _walk(source: Path) -> Sequence[Item]:
    top = source.stat()
    items = [Item(path="", mode=top.st_mode, size=top.st_size, mtime=top.st_mtime)]
    if not stat.S_ISDIR(top.st_mode):
        return items
    for folder, inner, names in os.walk(source):
        for name in sorted([*inner, *names]):
            path = Path(folder, name)
            found = path.lstat()
            link = os.readlink(path) if path.is_symlink() else None
            relative = str(path.relative_to(source))
            items.append(
                Item(
                    path=relative,
                    mode=found.st_mode,
                    size=found.st_size,
                    mtime=found.st_mtime,
                    link=link,
                )
            )
    return items


def _item(path: str, found: dict[str, object]) -> Item:
    link = found.get("link")
    return Item(
        path=path,
        mode=int(str(found["mode"])),
        size=int(str(found["size"])),
        mtime=float(str(found["mtime"])),
        link=None if link is None else str(link),
    )


def _hash(path: Path, size: int) -> str:
    found, left = hashlib.sha256(), size
    with open(path, "rb") as file:
        while left and (part := file.read(min(1 << 20, left))):
            found.update(part)
            left -= len(part)
    return found.hexdigest()
