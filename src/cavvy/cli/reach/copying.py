"""Copies files and folders to and from a job's node; interrupted copies resume."""

import asyncio
import errno
import hashlib
import os
import posixpath
import stat
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import aclosing, suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from cavvy.cli.reach.received import (
    PREVIEW_BYTES,
    PREVIEWS,
    CopyItem,
    agree_to_arrival,
    check_room,
    find_obeyed,
    find_obeyed_files,
    is_git_folder,
    is_in_git_folder,
    name_some,
    read_item,
    read_listing,
    read_unlisted,
    stays_inside,
)
from cavvy.cli.reach.tunnel import with_tunnel
from cavvy.cli.view.failure import CommandFailure, escape_controls, note_out
from cavvy.cli.view.formatting import show_size
from cavvy.client.landing import PART, Landing, Receipts, name_part

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine, Iterable, Iterator

    from cavvy.client.tunnel import NodeTunnel

_PIECE = 256 * 1024
_CHECKPOINT = "checkpoint"  # the folder of a snapshot in which the server lays a checkpoint
_NAMED = 10  # files of a checkpoint in a hint
_AHEAD = 8  # maximum number of chunks in flight
_T = TypeVar("_T")


def copy(source: str, target: str, project: str, quiet: bool, *, replace: bool = False) -> None:
    """Copy `source` to `target`. One of SOURCE and TARGET is NAME[:RANK]:PATH; the other is a local
    path. With `replace`, the user agrees to what arrives in a folder of theirs. Raises
    CommandFailure.
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
            with_tunnel(
                project, far, lambda tunnel: _fetch(tunnel, path, target, name, bar, replace)
            )
        elif here is not None:
            far, path = here
            with_tunnel(
                project, far, lambda tunnel: _send(tunnel, Path(source).expanduser(), path, bar)
            )
    except OSError as error:
        # This error is local, because errors on the node are already CommandFailures.
        if error.filename is None:
            raise
        raise CommandFailure(
            f"{str(error.filename).removesuffix(PART)}: {error.strerror}"
        ) from error
    bar.done()


def copy_checkpoint(name: str, target: str, project: str, quiet: bool) -> None:
    """Copy the newest checkpoint of a job, also of an ended one, or the file or folder of it that
    NAME:PATH names. A folder arrives in the new or empty folder `target`, or in a new one with the
    folder's or the job's name in it; a file at `target`, or in it. Raises CommandFailure, ApiError.
    """
    from cavvy.cli.reach.names import find_job
    from cavvy.cli.reach.session import session
    from cavvy.client.blobs import download_files, read_snapshot
    from cavvy.client.model_folder import make_model_folder

    name, _, path = name.partition(":")
    path = posixpath.normpath(f"/{path}").strip("/")
    bar = _Bar(quiet or not sys.stderr.isatty())
    with session() as client:
        job = find_job(client, project, name)
        made = make_model_folder(client, job.project, job.name, [], _CHECKPOINT)
        wanted = _choose_files(job.name, path, [each.path for each in made.files])
        to, is_file = Path(target).expanduser(), wanted == {path: PurePosixPath(path).name}
        folder = _choose_file(to, wanted[path]) if is_file else _choose_folder(to, path or job.name)
        sizes = {wanted[each.path]: each.size for each in made.files if each.path in wanted}
        bar.total = sum(sizes.values())

        def note(file: str) -> None:
            bar.files += 1
            bar.move(sizes.get(file, 0))

        # The part is that of this checkpoint: a later one does not go on with its files.
        part = folder.with_name(name_part(f"{folder.name}.{made.snapshot[:16]}"))
        found = {f"{_CHECKPOINT}/{inside}": arrives for inside, arrives in wanted.items()}
        try:
            entries = read_snapshot(client, job.project, made.snapshot)
            files = [
                (found[each.path], each.sha256, each.size)
                for each in entries
                if each.sha256 and each.path in found
            ]
            download_files(client, job.project, files, part, note)
            if is_file:
                (part / wanted[path]).replace(folder)
                part.rmdir()
            else:
                part.replace(folder)
        except OSError as error:
            raise CommandFailure(f"{error.filename or folder}: {error.strerror}") from error
    bar.done()
    if obeyed := find_obeyed_files(sizes):
        _note_obeyed(obeyed)


def _choose_files(job: str, path: str, files: Sequence[str]) -> dict[str, str]:
    """Return the wanted files of a checkpoint, each with its name in the copy: all of them, the one
    at `path`, or those in the folder `path`. Raises CommandFailure if there are none.
    """
    if not path:
        return {each: each for each in files}
    if path in files:
        return {path: PurePosixPath(path).name}
    inside = {each: each.removeprefix(f"{path}/") for each in files if each.startswith(f"{path}/")}
    if not inside:
        shown, left = sorted(files)[:_NAMED], max(0, len(files) - _NAMED)
        names = escape_controls(", ".join(shown)) + (f" and {left:,} more" if left else "")
        raise CommandFailure(
            f"the newest checkpoint of {job} has no {escape_controls(path)}", f"it has {names}"
        )
    return inside


def _choose_file(target: Path, name: str) -> Path:
    """Return where a file of a checkpoint arrives: at `target`, or as `name` in this folder."""
    target = target / name if target.is_dir() else target
    if target.exists() or target.is_symlink():
        message = f"{escape_controls(str(target))} exists, and is not replaced"
        raise CommandFailure(message, "name a file that does not exist yet", 2)
    if not target.parent.is_dir():
        raise CommandFailure(f"{target}: {os.strerror(errno.ENOENT)}")
    _refuse_git(target)
    return target


def _choose_folder(target: Path, name: str) -> Path:
    """Return the new or empty folder for files of a checkpoint: `target`, or `name` in it."""
    if target.is_dir() and any(target.iterdir()):
        target /= PurePosixPath(name).name
    if target.is_symlink() or target.is_file() or (target.is_dir() and any(target.iterdir())):
        message = f"{escape_controls(str(target))} exists, and a checkpoint needs a new folder"
        raise CommandFailure(message, "name a folder that does not exist yet", 2)
    _refuse_git(target)
    return target


def _read_side(text: str) -> tuple[str, str] | None:
    """Return the parts (NAME or NAME:RANK, path) of a path on a node, or None for a local path."""
    from cavvy.domain.units import is_whole

    first, colon, rest = text.partition(":")
    if not colon or "/" in first or first in ("", ".", ".."):
        return None
    rank, colon, path = rest.partition(":")
    return (f"{first}:{rank}", path or ".") if colon and is_whole(rank) else (first, rest or ".")


class _Bar:
    """Shows the progress of a copy on one line of the terminal."""

    def __init__(self, silent: bool) -> None:
        self._silent = silent
        self.total = self.copied = self.files = 0

    def move(self, size: int) -> None:
        self.copied += size
        if not self._silent:
            share = f" {100 * self.copied // self.total}%" if self.total else ""
            sys.stderr.write(f"\r{show_size(self.copied)} of {show_size(self.total)}{share} ")
            sys.stderr.flush()

    def done(self) -> None:
        end = "" if self._silent else "\r\033[K"
        files = "file" if self.files == 1 else "files"
        sys.stderr.write(f"{end}{self.files} {files}, {show_size(self.copied)}\n")


async def _fetch(
    tunnel: "NodeTunnel", path: str, to_path: str, name: str, bar: _Bar, replace: bool
) -> None:
    """Copy from the node to this machine. If `to_path` is an existing folder, the copy is created
    in this folder as `name`.
    """
    top = read_item("", (await tunnel.call("stat", path=path))[0])
    target, items, unlisted = Path(to_path).expanduser(), [top], list[tuple[str, str]]()
    in_folder = target.is_dir()
    target = target / name if in_folder else target
    if top.kind == stat.S_IFDIR:
        said, data = await tunnel.call("walk", path=path)
        items, unlisted = read_listing(top, data), read_unlisted(said)
        target.parent.mkdir(parents=True, exist_ok=True)
    elif top.kind != stat.S_IFREG:
        raise CommandFailure(f"{path} is not a file or folder")
    elif to_path.endswith("/") and not in_folder:
        raise CommandFailure(
            f"{to_path}: there is no such folder here",
            "create the folder first, or omit the final /",
        )
    elif not target.parent.is_dir():
        raise CommandFailure(f"{target}: {os.strerror(errno.ENOENT)}")
    _refuse_git(target)
    items, kept = _keep_repositories(items, target)
    bar.total = sum(item.size for item in items if item.kind == stat.S_IFREG)
    with Receipts(target) as receipts, Landing(target.parent) as landing:
        if top.kind == stat.S_IFDIR:  # the user has named a file, but not the files of a folder
            same = await _agree(tunnel, path, target, items, receipts, replace)
            items = [item for item in items if item.path not in same]
        await _receive(tunnel, path, landing, target.name, items, bar, receipts)
    _tell_obeyed(items)
    _tell_skipped(items, unlisted)
    if kept:
        raise CommandFailure(
            f"these exist here and were not replaced: {name_some(kept)}; git would run the "
            "programs that the node's settings and hooks name",
            "all other files were copied; to copy them too, copy into a new folder",
        )
    out = [
        f"{each.path} -> {each.link}"
        for each in items
        if each.link is not None and not stays_inside(each)
    ]
    if out:
        raise CommandFailure(
            f"these links may lead out of the folder and were skipped: {name_some(out)}",
            "all other files were copied; to copy the links' targets too, give the targets' paths",
        )


def _refuse_git(target: Path) -> None:
    if is_in_git_folder(target):
        raise CommandFailure(
            f"{escape_controls(str(target))} is in a git folder, and nothing was copied; git would "
            "run the programs that the node's settings and hooks name",
            "copy into a new folder",
        )


async def _agree(
    tunnel: "NodeTunnel",
    path: str,
    target: Path,
    items: Sequence[CopyItem],
    receipts: Receipts,
    replace: bool,
) -> set[str]:
    """Ask the user about what arrives in a folder of theirs. Returns the files of the user that are
    the same on the node: they stay, since the node could send other bytes than it has told of.
    Raises CommandFailure.
    """
    known = {item.path: item for item in items if item.path and _is_copied(item)}
    new, changed = receipts.find_doubtful(known)
    differing, same = dict[str, bytes | None](), set[str]()
    for each in changed:
        item = known[each]
        if item.kind == stat.S_IFREG:
            if await _is_same(tunnel, path, target, item):
                same.add(each)
                continue
            small = item.size <= PREVIEW_BYTES and len(differing) < PREVIEWS
            differing[each] = await _peek(tunnel, _below(path, item)) if small else None
        elif item.link is not None and _link_of(target / each) != item.link:
            differing[each] = None
    await asyncio.to_thread(agree_to_arrival, target, new, differing, replace=replace)
    return same


def _is_copied(item: CopyItem) -> bool:
    known = item.kind in (stat.S_IFDIR, stat.S_IFREG)
    return known or (item.link is not None and stays_inside(item))


async def _is_same(tunnel: "NodeTunnel", path: str, target: Path, item: CopyItem) -> bool:
    from cavvy.client.tunnel import RemoteError

    own = target / item.path
    if own.is_symlink() or not own.is_file() or own.stat().st_size != item.size:
        return False
    with own.open("rb") as file, suppress(RemoteError):  # it has gone: the copy will tell
        said, _ = await tunnel.call("hash", path=_below(path, item), size=item.size)
        return said.get("sha256") == await asyncio.to_thread(_hash, file, item.size)
    return False


async def _peek(tunnel: "NodeTunnel", path: str) -> bytes:
    handle = (await tunnel.call("open", path=path))[0].get("handle")
    try:
        _, data = await tunnel.call("read", handle=handle, offset=0, size=PREVIEW_BYTES)
    finally:
        await tunnel.call("close", handle=handle)
    return data


def _link_of(path: Path) -> str | None:
    return os.readlink(path) if path.is_symlink() else None


def _keep_repositories(
    items: "Iterable[CopyItem]", target: Path
) -> tuple[list[CopyItem], list[str]]:
    """Leave out each `.git` and each repository without a `.git` that exist here, with all that is
    in them. Returns the entries to copy, and the paths that are left out.
    """
    chosen, kept, within = list[CopyItem](), list[str](), set[str]()
    for item in items:
        if item.path and item.path.rpartition("/")[0] in within:
            within.add(item.path)
        elif is_git_folder(target / item.path):
            kept.append(item.path or target.name)
            within.add(item.path)
        else:
            chosen.append(item)
    return chosen, kept


def _tell_obeyed(items: Sequence[CopyItem]) -> None:
    """Tell the user which copied files can make programs on this machine run other programs."""
    if obeyed := find_obeyed(items):
        _note_obeyed(obeyed)


def _note_obeyed(names: Sequence[str]) -> None:
    note_out(
        "git, shells and editors here may run programs that these name: "
        f"{name_some(names)}; Cavvy's own commands run none of them. Look at them before "
        "you use such a tool in the copy"
    )


def _tell_skipped(items: "Iterable[CopyItem]", unlisted: Sequence[tuple[str, str]]) -> None:
    """Tell the user which special files were skipped. Raises CommandFailure if a folder could not
    be listed, because its files are missing in the copy. `unlisted` contains the paths of such
    folders with the reasons.
    """
    known = (stat.S_IFDIR, stat.S_IFREG, stat.S_IFLNK)
    special = [each.path for each in items if each.kind not in known]
    if special:
        sys.stderr.write(
            f"note: these pipes, sockets or devices were skipped: {name_some(special)}\n"
        )
    if unlisted:
        named = name_some([f"{path or '.'} ({reason})" for path, reason in unlisted])
        raise CommandFailure(
            f"the files of these folders were not copied: {named}",
            "make the folders readable, and copy them again; all other files were copied",
        )


def _name_copy(job: str, path: str) -> str:
    """Return the name for a copy of `path` in a folder. The name depends only on the user's
    arguments: a node must not be able to choose a name such as `.bashrc`.
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
    receipts: Receipts,
) -> None:
    for item in items:
        there, here = _below(path, item), _below(name, item)
        if item.kind == stat.S_IFDIR:
            landing.make_folder(here)
        elif item.kind == stat.S_IFREG:
            await fetch_file(tunnel, there, landing, here, item, bar)
        elif item.link is not None and stays_inside(item):
            landing.make_link(here, item.link)
        else:
            continue
        receipts.note(item.path)
    # Set the folder's attributes last, because writing a folder's contents changes the folder's
    # times.
    for item in reversed(items):
        if item.kind == stat.S_IFDIR:
            landing.finish_folder(_below(name, item), item.mode, item.mtime)


def _below(top: str, item: CopyItem) -> str:
    return f"{top}/{item.path}" if item.path else top


async def fetch_file(
    tunnel: "NodeTunnel",
    path: str,
    landing: Landing,
    to: str,
    item: CopyItem,
    bar: "_Bar | None" = None,
) -> None:
    """Fetch one file; a copy that was interrupted continues. Raises CommandFailure if the file
    changes meanwhile, RemoteError and TunnelLost.
    """
    bar = bar or _Bar(True)
    handle = (await tunnel.call("open", path=path))[0].get("handle")
    try:
        with landing.write(to, item.mode, item.mtime) as file:
            start = await _common_start(tunnel, path, file, os.fstat(file.fileno()).st_size, item)
            check_room(file, path, item.size - start)
            bar.move(start)
            file.truncate(start)
            file.seek(start)
            reads = (
                tunnel.call("read", handle=handle, offset=offset, size=_PIECE)
                for offset in range(start, item.size, _PIECE)
            )
            async with aclosing(overlap(reads)) as answers:
                async for _, data in answers:
                    if len(data) != min(_PIECE, item.size - file.tell()):
                        raise _changed(path)
                    file.write(data)
                    bar.move(len(data))
            if not item.size:
                await _check_empty(tunnel, path, handle)
        bar.files += 1
    finally:
        await tunnel.call("close", handle=handle)


async def _check_empty(tunnel: "NodeTunnel", path: str, handle: object) -> None:
    """Raise CommandFailure if a file of size 0 has content, as the files of /proc have."""
    _, data = await tunnel.call("read", handle=handle, offset=0, size=1)
    if data:
        raise CommandFailure(
            f"{path} states the size 0 but has content, so it is not copied",
            "print its content with `cavvy exec NAME -- cat PATH`",
        )


async def overlap(calls: "Iterable[Coroutine[Any, Any, _T]]") -> "AsyncGenerator[_T, None]":
    """Yield the results in the order of the calls, with at most `_AHEAD` calls running at the same
    time.
    """
    flight: deque[asyncio.Task[_T]] = deque()
    try:
        for call in calls:
            flight.append(asyncio.create_task(call))
            if len(flight) == _AHEAD:
                yield await flight.popleft()
        while flight:
            yield await flight.popleft()
    finally:
        for each in flight:
            each.cancel()


def _changed(path: object) -> CommandFailure:
    return CommandFailure(f"{path} changed while it was copied", "copy it again")


async def _common_start(
    tunnel: "NodeTunnel", path: str, file: BinaryIO, length: int, item: CopyItem
) -> int:
    """Return the number of bytes that need not be copied again. If the file begins with the same
    `length` bytes as the partial copy, the result is `length`, the size of the partial copy.
    Otherwise, the result is 0.
    """
    if not 0 < length <= item.size:
        return 0
    found, _ = await tunnel.call("hash", path=path, size=length)
    return length if found.get("sha256") == await asyncio.to_thread(_hash, file, length) else 0


async def _send(tunnel: "NodeTunnel", source: Path, path: str, bar: _Bar) -> None:
    if not source.exists():
        raise CommandFailure(f"{source}: there is no such file or folder")
    unlisted: list[tuple[str, str]] = []
    items = _walk(source, unlisted)
    if items[0].kind not in (stat.S_IFDIR, stat.S_IFREG):
        raise CommandFailure(f"{source} is not a file or folder")
    path = await _find_target(tunnel, source, path)
    bar.total = sum(item.size for item in items if item.kind == stat.S_IFREG)
    for item in items:
        to = _below(path, item)
        if item.kind == stat.S_IFDIR:
            await tunnel.call("mkdir", path=to, parents=True)
        elif item.link is not None:
            await tunnel.call("link", path=to, target=item.link, replace=True)
        elif item.kind == stat.S_IFREG:
            await _send_file(tunnel, source / item.path, to, item, bar)
    for item in reversed(items):
        if item.kind == stat.S_IFDIR:
            mode = stat.S_IMODE(item.mode)
            await tunnel.call("set", path=_below(path, item), mode=mode, mtime=item.mtime)
    _tell_skipped(items, unlisted)


async def _find_target(tunnel: "NodeTunnel", source: Path, path: str) -> str:
    """Return the path of the copy on the node: `path` or, if `path` is a folder, a path in this
    folder.
    """
    from cavvy.client.tunnel import RemoteError

    try:
        kind = read_item("", (await tunnel.call("stat", path=path))[0]).kind
        if kind == stat.S_IFDIR:
            return f"{path}/{source.resolve().name}"
        if kind != stat.S_IFREG:  # a copy would replace a device, pipe or socket
            raise CommandFailure(f"{path} is not a file or folder on the node")
    except RemoteError:  # The target does not exist and will be created.
        if path.endswith("/") and not source.is_dir():
            hint = "create the folder first, for example with `cavvy exec`, or omit the final /"
            raise CommandFailure(f"{path}: there is no such folder on the node", hint) from None
    return path


async def _send_file(
    tunnel: "NodeTunnel", source: Path, to: str, item: CopyItem, bar: _Bar
) -> None:
    part = await stage_file(tunnel, source, to, item, bar)
    await tunnel.call("rename", path=part, target=to)
    bar.files += 1


async def stage_file(
    tunnel: "NodeTunnel", source: Path, to: str, item: CopyItem, bar: "_Bar | None" = None
) -> str:
    """Send a file under the name of an incomplete file, and return this path. Raises CommandFailure
    if the file changes meanwhile, RemoteError and TunnelLost.
    """
    from cavvy.client.tunnel import RemoteError

    bar = bar or _Bar(True)
    folder, name = posixpath.split(to)
    part, start = posixpath.join(folder, name_part(name)), 0
    with source.open("rb") as file:
        try:
            there = read_item("", (await tunnel.call("stat", path=part))[0])
            start = await _common_start(tunnel, part, file, there.size, item)
        except RemoteError:  # There is no partial copy.
            pass
        opened, _ = await tunnel.call(
            "open", path=part, mode="write", create=True, truncate=not start, permissions=0o600
        )
        handle = opened.get("handle")
        try:
            bar.move(start)
            file.seek(start)
            async with aclosing(overlap(_write_all(tunnel, handle, file, bar))) as answers:
                async for _ in answers:
                    pass
            if file.tell() != item.size:
                raise _changed(source)
            await tunnel.call("set", handle=handle, mode=stat.S_IMODE(item.mode), mtime=item.mtime)
        finally:
            await tunnel.call("close", handle=handle)
    return part


def _write_all(
    tunnel: "NodeTunnel", handle: object, file: BinaryIO, bar: _Bar
) -> "Iterator[Coroutine[Any, Any, object]]":
    while data := file.read(_PIECE):
        bar.move(len(data))
        yield tunnel.call("write", data, handle=handle, offset=file.tell() - len(data))


def _walk(source: Path, unlisted: list[tuple[str, str]]) -> Sequence[CopyItem]:
    """Return all entries below a local folder. Folders that cannot be listed are added to
    `unlisted`, with the reasons.
    """

    def note(error: OSError) -> None:
        unlisted.append((os.path.relpath(error.filename, source), error.strerror or ""))

    paths = [source]
    if source.is_dir():
        for folder, inner, names in os.walk(source, onerror=note):
            paths += [Path(folder, name) for name in sorted([*inner, *names])]
    return [
        _local_item(path, "" if path is source else str(path.relative_to(source))) for path in paths
    ]


def _local_item(path: Path, name: str) -> CopyItem:
    """Return the attributes of a local file. For a symbolic link, return the attributes of the link
    itself, unless the user gave the link as the path to copy.
    """
    found = path.lstat() if name else path.stat()
    link = os.readlink(path) if stat.S_ISLNK(found.st_mode) else None
    return CopyItem(
        path=name, mode=found.st_mode, size=found.st_size, mtime=found.st_mtime, link=link
    )


def _hash(file: BinaryIO, size: int) -> str:
    found, left = hashlib.sha256(), size
    file.seek(0)
    while left and (part := file.read(min(1 << 20, left))):
        found.update(part)
        left -= len(part)
    return found.hexdigest()
