"""Mirrors a folder of this machine and a folder of a session, in both directions.

Each pass lists both folders, and compares them with what they had after the last pass. What only
one side has changed is copied to the other; what both have changed stays twice: the version of this
machine keeps its name, and the version of the node gets the suffix `.conflict`. A changed file wins
over its deletion. A file that changes while it is copied is left for the next pass.

The node is not trusted, as in `received.py`: it writes only below the folder, never through a link,
and no files that git, Cavvy, shells or editors obey. Those are only sent: what the node does with
them stays there, so that no program of the node decides what leaves this machine. Any other name
may be one that a later command here obeys too (`Makefile`, `conftest.py`, `json.py`). So a name
that is new beside files of the user arrives after a question only, with all that is below it.
"""

import asyncio
import errno
import hashlib
import json
import os
import stat
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING

import msgspec

from cavvy.agent.access.folder_watch import FolderWatch
from cavvy.cli.reach.copying import fetch_file, overlap, stage_file
from cavvy.cli.reach.received import (
    CopyItem,
    is_git_name,
    is_obeyed,
    name_some,
    read_listing,
    stays_inside,
    understand,
)
from cavvy.cli.view.failure import CommandFailure
from cavvy.client.landing import PART, Landing, LandingRefused
from cavvy.client.state import default_home, write_private
from cavvy.domain.values import Struct, field
from cavvy.spec.ignore import RULE_FILES, SKIPPED, IgnoreRules, read_outer_rules
from cavvy.spec.repository import find_ignore_files

if TYPE_CHECKING:
    from cavvy.client.tunnel import NodeTunnel

# Folders and files that stay on their side: what programs create again, and Cavvy's own files.
WITHOUT = (
    *sorted(SKIPPED),
    ".jupyter",
    ".jupyter.log",
    ".code-server",
    ".cavvy-shells",
    ".cavvy-mirror",
)
_MARKER = ".cavvy-mirror"
_BATCH_BYTES = 768 * 1024  # of the files in one call; the node's answers have at most 1 MiB
_BATCH_FILES = 400
_SETTLE_S = 0.1  # a program often writes several files at once
_SLOW_S = 2.0  # seconds between two passes where changes cannot be watched
_EXECUTABLE = 0o100


class FileFacts(Struct, frozen=True, array_like=True):
    """What a file, link or folder was when it was listed; folders have neither size nor time."""

    kind: int
    size: int = 0
    mtime: float = 0
    executable: bool = False
    link: str | None = None


class SyncedEntry(Struct, frozen=True, array_like=True):
    """An entry as it was on both sides after a pass; the times differ between file systems."""

    here: FileFacts
    there: FileFacts


class MirrorStep(StrEnum):
    """What a pass does with one path."""

    SEND = "send"
    FETCH = "fetch"
    DROP_HERE = "drop here"
    DROP_THERE = "drop there"
    COMPARE = "compare"  # both have changed: keep both unless they are equal
    FORGET = "forget"


_CHANGE_HERE = frozenset({MirrorStep.FETCH, MirrorStep.DROP_HERE})
Facts = Mapping[str, FileFacts]


def decide(base: Mapping[str, SyncedEntry], here: Facts, there: Facts) -> dict[str, MirrorStep]:
    """Return the step for each path that is not as it was after the last pass."""
    steps: dict[str, MirrorStep] = {}
    for path in base.keys() | here.keys() | there.keys():
        was, own, other = base.get(path), here.get(path), there.get(path)
        own_new = own != (was and was.here)
        other_new = other != (was and was.there)
        if own is None and other is None:
            steps[path] = MirrorStep.FORGET
        elif own_new and not other_new:
            steps[path] = MirrorStep.DROP_THERE if own is None else MirrorStep.SEND
        elif other_new and not own_new:
            steps[path] = MirrorStep.DROP_HERE if other is None else MirrorStep.FETCH
        elif own_new and own is None:
            steps[path] = MirrorStep.FETCH
        elif own_new and other is None:
            steps[path] = MirrorStep.SEND
        elif own_new:
            steps[path] = MirrorStep.COMPARE
    return steps


class MirrorState(Struct, kw_only=True):
    """The state after the last pass. `marker` is also in a file of the node: if the node has
    another, its folder is not the one of the last pass, and nothing in it counts as deleted.
    """

    marker: str = ""
    entries: dict[str, SyncedEntry] = field(default_factory=dict)
    # What has been ignored here stays here until the user agrees, even after a change of the ignore
    # files; the names of folders end with a slash.
    withheld: set[str] = field(default_factory=set)
    is_empty: bool = False  # whether the folder here was empty at first: a place for what arrives
    agreed: set[str] = field(default_factory=set)  # new names of the node that the user took
    waiting: list[str] = field(default_factory=list)  # those about which to ask


class MirrorCount(Struct, kw_only=True):
    """What one pass has done."""

    sent: int = 0
    fetched: int = 0
    removed: int = 0
    conflicts: list[str] = field(default_factory=list)
    # a folder on one side and a file on the other, which the user must rename
    unmerged: list[str] = field(default_factory=list)
    # changed on the node and left there, because programs here obey files of these names
    obeyed: list[str] = field(default_factory=list)
    # new on the node, in folders of the user, and left there until the user agrees
    new: list[str] = field(default_factory=list)
    # ignored before and not any longer, and left here until the user agrees
    released: list[str] = field(default_factory=list)
    # kept here, because what is there in their place is not mirrored, such as a link that leads out
    replaced: list[str] = field(default_factory=list)
    left: int = 0  # paths that changed meanwhile


class FolderMirror:
    """Mirrors the folder `here` and the node's folder `there`. `name` tells sessions apart. With
    `take_new`, the user agrees to all names that are new on the node.
    """

    def __init__(self, here: Path, there: str, name: str, *, take_new: bool = False) -> None:
        self._here, self._there, self._take_new = here, there, take_new
        key = hashlib.sha256(f"{name}\0".encode() + os.fsencode(here)).hexdigest()[:24]
        self._file = Path(default_home()) / "mirrors" / f"{key}.json"
        self._state = self._load()
        self._told: set[str] = set()
        self._outer = find_ignore_files(here)

    def find_released(self) -> dict[str, int]:
        """Return what is no longer ignored, with the bytes of each file or folder. It stays here
        unless `release` is called. Raises OSError.
        """
        listed = _list_here(self._here, self._read_rules(), self._state.withheld)
        return {
            path: _measure(self._here / path)
            for path in sorted(listed.released)
            if os.path.lexists(self._here / path)
        }

    def release(self, paths: Iterable[str]) -> None:
        """Send these paths with the next pass: the user has agreed."""
        self._state.withheld.difference_update(paths)
        self._save()

    def list_waiting(self) -> list[str]:
        """Return the new names of the node that the last pass left there."""
        return self._state.waiting

    def take(self, names: Iterable[str]) -> None:
        """Fetch these new names with the next pass: the user has agreed."""
        self._state.agreed.update(names)
        self._save()

    def _read_rules(self) -> IgnoreRules:
        outer = read_outer_rules(self._here, self._outer)
        return IgnoreRules(self._here, git_rules=True, outer=outer)

    async def keep(self, tunnel: "NodeTunnel", say: Callable[[str], None]) -> None:
        """Mirror until the tunnel ends. Raises CommandFailure, RemoteError and TunnelLost."""
        watched = await _Changes.watch(tunnel, self._here, self._there)
        clock, again = asyncio.get_running_loop().time, 0
        try:
            while True:
                began = clock()
                count = await self.run(tunnel)
                self._tell(count, say)
                if count.left:
                    await asyncio.sleep(min(_SLOW_S, _SETTLE_S * 2**again))
                    again += 1
                else:
                    again = 0
                    await watched.wait(max(_SETTLE_S, clock() - began))
        finally:
            watched.close()

    async def settle(self, tunnel: "NodeTunnel", say: Callable[[str], None]) -> MirrorCount:
        """Make passes until both folders are equal, at most three. Raises as `run`."""
        total = MirrorCount()
        for _ in range(3):
            count = await self.run(tunnel)
            self._tell(count, say)
            total.sent += count.sent
            total.fetched += count.fetched
            total.removed += count.removed
            if not (count.left or count.conflicts):
                break
        return total

    async def run(self, tunnel: "NodeTunnel") -> MirrorCount:
        """Make one pass. Raises CommandFailure, RemoteError and TunnelLost."""
        rules, withheld = self._read_rules(), self._state.withheld
        listing = asyncio.to_thread(_list_here, self._here, rules, withheld)
        listed, (there, barred, marker) = await asyncio.gather(
            listing, self._list_there(tunnel, rules)
        )
        here, is_new = listed.found, not listed.ignored <= withheld
        withheld |= listed.ignored
        there = _drop_withheld(there, withheld)
        if not (self._state.marker or os.listdir(self._here)):
            self._state.is_empty = True
        if marker is None or marker != self._state.marker or not here or not there:
            # A folder that is new, or empty although it had files, deletes nothing on the other.
            self._state.entries = {}
        made = _Pass(tunnel, self._here, self._there, self._state.entries, here, there)
        steps = decide(self._state.entries, here, there)
        kept = _find_kept(self._here, steps, here)
        replaced = {
            path
            for path, step in steps.items()
            if step is MirrorStep.DROP_HERE and not barred.isdisjoint(_list_above(path))
        }
        takes_all = self._take_new or self._state.is_empty
        new = {} if takes_all else _find_new(steps, self._state, here)
        taken = {
            path: step for path, step in steps.items() if path not in kept | replaced | new.keys()
        }
        count = await made.run(taken)
        if marker is None or marker != self._state.marker:
            self._state.marker = token_hex(16)
            await _mark(tunnel, self._there, self._state.marker)
        count.new = sorted(set(new.values()) - kept)
        if made.changed or is_new or count.new != self._state.waiting:
            self._state.waiting = count.new
            await asyncio.to_thread(self._save)
        count.obeyed, count.released = sorted(kept), sorted(listed.released)
        count.replaced = sorted(replaced & barred)
        return count

    def _tell(self, count: MirrorCount, say: Callable[[str], None]) -> None:
        for path in count.conflicts:
            say(f"{path} changed here and on the node; the node's is saved as {path}.conflict")
        unmerged = [path for path in count.unmerged if path not in self._told]
        obeyed = [path for path in count.obeyed if path not in self._told]
        released = [path for path in count.released if path not in self._told]
        new = [path for path in count.new if path not in self._told]
        replaced = [path for path in count.replaced if path not in self._told]
        self._told.update(unmerged, obeyed, released, new, replaced)
        if replaced:
            say(
                f"on the node, links that lead out of the folder, or pipes, are in the place of "
                f"{name_some(replaced)}: yours stay as they are"
            )
        for path in unmerged:
            say(f"{path} is a folder on one side and a file on the other; rename one")
        if obeyed:
            more = f" and {len(obeyed) - 5} more" if len(obeyed) > 5 else ""
            say(
                f"the node changed {', '.join(obeyed[:5])}{more}, which programs "
                "here obey: yours stay as they are; `cavvy cp` fetches them under another name"
            )
        if new:
            say(
                f"new on the node, beside files of yours: {name_some(new)}; they stay there until "
                "you agree: a terminal asks at the end of the command, and --take-new takes them"
            )
        if released:
            more = f" and {len(released) - 5} more" if len(released) > 5 else ""
            say(
                f"{', '.join(released[:5])}{more} were ignored when the session began, and stay "
                "here; the next `cavvy dev --sync FOLDER` asks whether to send them"
            )

    async def _list_there(
        self, tunnel: "NodeTunnel", rules: IgnoreRules
    ) -> tuple[dict[str, FileFacts], set[str], str | None]:
        """Return what is mirrored of the node's folder, the paths of what can never be, and the
        marker."""
        said, data = await tunnel.call("walk", path=self._there, without=list(WITHOUT))
        if said.get("unlisted"):
            raise CommandFailure(
                f"folders of the session cannot be read: {said['unlisted'][:3]!r}",
                "make them readable, or name them in .cavvyignore",
            )
        top = CopyItem(path="", mode=stat.S_IFDIR, size=0, mtime=0)
        items = await asyncio.to_thread(read_listing, top, data)
        found = {item.path: _facts_of(item) for item in items[1:]}
        marker = found.pop(_MARKER, None)
        text = None
        if marker is not None:
            _, content = await tunnel.call("get", path=self._there, files=[_MARKER], most=64)
            text = content.decode(errors="replace")
        taken = {path: facts for path, facts in found.items() if _takes(path, facts, rules)}
        return taken, {path for path, facts in found.items() if not _can_take(path, facts)}, text

    def _load(self) -> MirrorState:
        try:
            text = self._file.read_bytes()
            with suppress(msgspec.MsgspecError, UnicodeError):  # names that are not UTF-8
                return msgspec.json.decode(text, type=MirrorState)
            return msgspec.convert(json.loads(text), MirrorState)
        except (OSError, ValueError, msgspec.MsgspecError):
            return MirrorState()  # without it, nothing counts as deleted

    def _save(self) -> None:
        self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # msgspec has no text for names that are not UTF-8
        text = json.dumps(msgspec.to_builtins(self._state), separators=(",", ":"))
        write_private(str(self._file), text.encode())


class _Changes:
    """Waits until one of the two folders has changed."""

    def __init__(self, here: FolderWatch | None) -> None:
        self._here, self._event = here, asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def watch(cls, tunnel: "NodeTunnel", here: Path, there: str) -> "_Changes":
        from cavvy.client.tunnel import RemoteError

        own: FolderWatch | None = None
        with suppress(OSError):
            own = FolderWatch(str(here), WITHOUT)
        made = cls(own)
        if own is not None:
            asyncio.get_running_loop().add_reader(own.fileno(), made._read)
        else:
            made._tasks.append(asyncio.create_task(made._tick()))
        try:
            channel = await tunnel.watch(there, WITHOUT)
        except RemoteError:
            made._tasks.append(asyncio.create_task(made._tick()))
            return made

        async def listen() -> None:
            await channel.write(b"\n")
            while await channel.read() is not None:
                made._event.set()
                await channel.write(b"\n")

        made._tasks.append(asyncio.create_task(listen()))
        return made

    def _read(self) -> None:
        assert self._here is not None
        try:
            changed = self._here.read()
        except OSError:  # no room for more watches
            asyncio.get_running_loop().remove_reader(self._here.fileno())
            self._tasks.append(asyncio.create_task(self._tick()))
            return
        if changed:
            self._event.set()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_SLOW_S)
            self._event.set()

    async def wait(self, settle_s: float) -> None:
        """Wait for the next change, and then `settle_s` seconds for those that follow it. Raises
        TunnelLost.
        """
        waits = asyncio.create_task(self._event.wait())
        done, _ = await asyncio.wait([waits, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
        waits.cancel()
        for each in done - {waits}:
            await each  # raises the error with which it ended
        await asyncio.sleep(settle_s)
        self._event.clear()

    def close(self) -> None:
        for each in self._tasks:
            each.cancel()
        if self._here is not None:
            asyncio.get_running_loop().remove_reader(self._here.fileno())
            self._here.close()


class _Pass:
    """One pass. `entries` is brought up to date with each step that succeeds."""

    def __init__(
        self,
        tunnel: "NodeTunnel",
        root: Path,
        far: str,
        entries: dict[str, SyncedEntry],
        here: dict[str, FileFacts],
        there: dict[str, FileFacts],
    ) -> None:
        self._tunnel, self._root, self._far = tunnel, root, far
        self._entries, self._own, self._other = entries, here, there
        self._count = MirrorCount()
        self.changed = False

    async def run(self, steps: Mapping[str, MirrorStep]) -> MirrorCount:
        groups: dict[MirrorStep, list[str]] = {step: [] for step in MirrorStep}
        for path in sorted(steps):
            groups[steps[path]].append(path)
        self.changed = bool(steps)
        for path in groups[MirrorStep.FORGET]:
            self._entries.pop(path, None)
        with Landing(self._root) as landing:
            await self._compare(groups, landing)
            await self._drop_there(
                groups[MirrorStep.DROP_THERE] + self._replaced(groups[MirrorStep.SEND])
            )
            self._drop_here(groups[MirrorStep.DROP_HERE])
            await self._send(groups[MirrorStep.SEND])
            await self._fetch(groups[MirrorStep.FETCH], landing)
        return self._count

    def _replaced(self, paths: Iterable[str]) -> list[str]:
        """Return the paths whose kind changes, so that the old entry goes first."""
        return [
            path
            for path in paths
            if (old := self._other.get(path)) is not None
            and (stat.S_ISDIR(old.kind) != stat.S_ISDIR(self._own[path].kind))
        ]

    # Both sides have changed

    async def _compare(self, groups: dict[MirrorStep, list[str]], landing: Landing) -> None:
        unknown: list[str] = []
        for path in groups[MirrorStep.COMPARE]:
            own, other = self._own[path], self._other[path]
            same = (own.size, own.link) == (other.size, other.link)
            if own.kind == other.kind and same and stat.S_ISREG(own.kind):
                unknown.append(path)
            elif own.kind == other.kind and same:
                self._entries[path] = SyncedEntry(own, other)
            else:
                await self._keep_both(path, groups, landing)
        for batch in _split(unknown, lambda path: 0):
            said, _ = await self._tunnel.call("hashes", path=self._far, files=batch)
            hashes = understand(said.get("sha256"), list[str | None])
            for path, digest in zip(batch, hashes, strict=False):
                if digest is not None and digest == await asyncio.to_thread(self._hash, path):
                    self._entries[path] = SyncedEntry(self._own[path], self._other[path])
                else:
                    await self._keep_both(path, groups, landing)

    async def _keep_both(
        self, path: str, groups: dict[MirrorStep, list[str]], landing: Landing
    ) -> None:
        """Save the node's version under another name on this machine, and then send this
        machine's.
        """
        other = self._other[path]
        if stat.S_IFDIR in (other.kind, self._own[path].kind):
            self._count.unmerged.append(path)
            return
        if other.link is not None:
            groups[MirrorStep.SEND].append(path)  # a link has no content of its own
            return
        name = f"{path}.conflict"
        number = 1
        while name in self._own or name in self._other or os.path.lexists(self._root / name):
            number += 1
            name = f"{path}.conflict-{number}"
        if not await self._fetch_one(path, name, landing):
            self._count.left += 1
            return
        self._count.conflicts.append(path)
        groups[MirrorStep.SEND].append(path)

    def _hash(self, path: str) -> str:
        digest = hashlib.sha256()
        with suppress(OSError), open(self._root / path, "rb") as file:
            while part := file.read(1 << 20):
                digest.update(part)
        return digest.hexdigest()

    # From this machine to the node

    async def _send(self, paths: list[str]) -> None:
        small: list[str] = []
        for path in sorted(paths):
            own = self._own[path]
            if own.size > _BATCH_BYTES:
                await self._send_large(path)
            else:
                small.append(path)  # a folder comes before what is in it
        batches = _split(small, lambda path: self._own[path].size)
        async for batch, wrote in overlap(self._put(batch) for batch in batches):
            for path, mtime in zip(batch, wrote, strict=False):
                self._note_sent(path, mtime)

    async def _put(self, batch: list[str]) -> tuple[list[str], list[float | None]]:
        files, parts, sent = list[object](), list[bytes](), list[str]()
        for path in batch:
            entry = self._describe(path)
            if entry is None:
                self._count.left += 1
                continue
            content = entry.pop("content")
            files.append(entry)
            sent.append(path)
            parts.append(content if isinstance(content, bytes) else b"")
        said, _ = await self._tunnel.call("put", b"".join(parts), path=self._far, files=files)
        return sent, understand(said.get("wrote"), list[float | None])

    def _describe(self, path: str) -> dict[str, object] | None:
        """Return the entry of `put` for a path, or None if it has changed since it was listed."""
        own, was = self._own[path], self._other.get(path)
        expected = None if was is None or stat.S_ISDIR(was.kind) else [was.size, was.mtime]
        entry: dict[str, object] = {"path": path, "was": expected, "content": b""}
        if stat.S_ISDIR(own.kind):
            return entry | {"folder": True}
        if own.link is not None:
            return entry | {"link": own.link}
        try:
            with open(self._root / path, "rb", opener=_open_plain) as file:
                content = file.read(_BATCH_BYTES + 1)
                found = os.fstat(file.fileno())
        except OSError:
            return None
        if len(content) != own.size or found.st_mtime != own.mtime:
            return None
        mode, mtime_ns = stat.S_IMODE(found.st_mode), found.st_mtime_ns
        entry |= {"size": len(content), "mode": mode, "mtime_ns": mtime_ns, "content": content}
        return entry

    async def _send_large(self, path: str) -> None:
        was = self._other.get(path)
        expected = None if was is None or stat.S_ISDIR(was.kind) else [was.size, was.mtime]
        try:
            item = _item_of(path, self._own[path])
            staged = await stage_file(self._tunnel, self._root / path, f"{self._far}/{path}", item)
        except CommandFailure:  # the file has changed
            self._count.left += 1
            return
        entry = {"path": path, "was": expected, "staged": os.path.relpath(staged, self._far)}
        said, _ = await self._tunnel.call("put", path=self._far, files=[entry])
        wrote = understand(said.get("wrote"), list[float | None])
        self._note_sent(path, wrote[0] if wrote else None)

    def _note_sent(self, path: str, mtime: float | None) -> None:
        if mtime is None:
            self._count.left += 1
            return
        own = self._own[path]
        if stat.S_ISDIR(own.kind):
            self._entries[path] = SyncedEntry(own, own)
            return
        there = msgspec.structs.replace(own, mtime=mtime)
        self._entries[path] = SyncedEntry(own, there)
        self._count.sent += 1

    async def _drop_there(self, paths: list[str]) -> None:
        files: list[tuple[str, object]] = []
        for path in sorted(paths, reverse=True):
            was = self._other[path]
            files.append((path, "folder" if stat.S_ISDIR(was.kind) else [was.size, was.mtime]))
        for start in range(0, len(files), _BATCH_FILES):
            batch = files[start : start + _BATCH_FILES]
            said, _ = await self._tunnel.call("drop", path=self._far, files=batch)
            dropped = understand(said.get("dropped"), list[bool])
            for (path, _), gone in zip(batch, dropped, strict=False):
                if gone:
                    self._entries.pop(path, None)
                    self._other.pop(path, None)
                    self._count.removed += 1
                else:
                    self._count.left += stat.S_ISREG(self._other[path].kind)

    # From the node to this machine

    async def _fetch(self, paths: list[str], landing: Landing) -> None:
        small: list[str] = []
        for path in sorted(paths):
            other, own = self._other[path], self._own.get(path)
            if own is not None and stat.S_ISDIR(own.kind) != stat.S_ISDIR(other.kind):
                self._drop_here([path])
                if path in self._own:
                    continue
            if stat.S_ISDIR(other.kind):
                landing.make_folder(path)
                self._entries[path] = SyncedEntry(other, other)
            elif other.link is not None:
                self._fetch_link(path, landing)
            elif other.size > _BATCH_BYTES:
                await self._fetch_one(path, path, landing)
            else:
                small.append(path)
        batches = _split(small, lambda path: self._other[path].size)
        async for batch, got, data in overlap(self._get(batch) for batch in batches):
            at = 0
            for path, facts in zip(batch, got, strict=False):
                if facts is None:
                    self._count.left += 1
                    continue
                content = data[at : at + int(facts[0])]
                at += len(content)
                self._write(path, path, facts, content, landing)

    async def _get(
        self, batch: list[str]
    ) -> tuple[list[str], list[tuple[int, float] | None], bytes]:
        said, data = await self._tunnel.call("get", path=self._far, files=batch, most=_BATCH_BYTES)
        return batch, understand(said.get("got"), list[tuple[int, float] | None]), data

    async def _fetch_one(self, path: str, to: str, landing: Landing) -> bool:
        other = self._other[path]
        if other.size <= _BATCH_BYTES:
            _, got, data = await self._get([path])
            facts = got[0] if got else None
            return facts is not None and self._write(path, to, facts, data, landing)
        item = _item_of(to, other)
        if to == path and not self._is_as_listed(path):
            self._count.left += 1
            return False
        try:
            await fetch_file(self._tunnel, f"{self._far}/{path}", landing, to, item)
        except (CommandFailure, LandingRefused):  # the file has changed
            self._count.left += 1
            return False
        self._note_fetched(path, to, other)
        return True

    def _write(
        self,
        path: str,
        to: str,
        facts: tuple[int, float],
        content: bytes,
        landing: Landing,
    ) -> bool:
        """Write a fetched file, unless the user has changed the file of this name meanwhile."""
        other = msgspec.structs.replace(self._other[path], size=facts[0], mtime=facts[1])
        if len(content) != facts[0] or (to == path and not self._is_as_listed(path)):
            self._count.left += 1
            return False
        item = _item_of(to, other)
        with landing.write(to, item.mode, item.mtime) as file:
            file.truncate(0)
            file.write(content)
        self._note_fetched(path, to, other)
        return True

    def _note_fetched(self, path: str, to: str, other: FileFacts) -> None:
        if to == path:
            own = _facts_here(self._root / path)
            if own is not None:
                self._entries[path] = SyncedEntry(own, other)
            self._count.fetched += 1

    def _fetch_link(self, path: str, landing: Landing) -> None:
        other = self._other[path]
        if self._is_as_listed(path) and other.link is not None:
            with suppress(LandingRefused):  # a file is in the way
                landing.make_link(path, other.link)
                own = _facts_here(self._root / path)
                if own is not None:
                    self._entries[path] = SyncedEntry(own, other)
                    self._count.fetched += 1

    def _is_as_listed(self, path: str) -> bool:
        return _facts_here(self._root / path) == self._own.get(path)

    def _drop_here(self, paths: list[str]) -> None:
        for path in sorted(paths, reverse=True):
            own = self._own[path]
            if not self._is_as_listed(path):
                self._count.left += 1
                continue
            try:
                (os.rmdir if stat.S_ISDIR(own.kind) else os.unlink)(self._root / path)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
                    raise
                continue
            self._entries.pop(path, None)
            self._own.pop(path, None)
            self._count.removed += 1


def _find_kept(root: Path, steps: Mapping[str, MirrorStep], here: Facts) -> set[str]:
    """Return the paths at which the node may change nothing here: files that programs of this
    machine obey, and those to which ignore files are links.
    """
    top, targets = os.path.realpath(root), set[str]()
    for path, facts in here.items():
        if facts.link is not None and path.rpartition("/")[2] in RULE_FILES:
            targets.add(os.path.relpath(os.path.realpath(root / path), top))
    changed = [path for path, step in steps.items() if step in _CHANGE_HERE]
    return {
        path
        for path in changed
        if is_obeyed(path) or any(f"{each}/".startswith(f"{path}/") for each in targets)
    }


def _find_new(steps: Mapping[str, MirrorStep], state: MirrorState, here: Facts) -> dict[str, str]:
    """Return the paths to fetch that neither this machine has had nor the user has agreed to, each
    with the first name on its way that does not exist here.
    """
    new: dict[str, str] = {}
    for path in (path for path, step in steps.items() if step is MirrorStep.FETCH):
        way = list(accumulate(path.split("/"), "{}/{}".format))
        if path not in here and path not in state.entries and state.agreed.isdisjoint(way):
            new[path] = next(each for each in way if each not in here)
    return new


@dataclass(slots=True)
class _Listed:
    """A folder of this machine: what is mirrored, what is ignored now, and what is no longer
    ignored but stays.
    """

    found: dict[str, FileFacts]
    ignored: set[str]
    released: set[str]


def _list_here(root: Path, rules: IgnoreRules, withheld: Container[str]) -> _Listed:
    listed, todo = _Listed({}, set(), set()), [""]
    while todo:
        inside = todo.pop()
        with suppress(FileNotFoundError), os.scandir(root / inside) as entries:
            for entry in entries:
                path = f"{inside}{entry.name}"
                facts = None if entry.name in WITHOUT else _facts_here(entry.path)
                if facts is None:
                    continue
                name = f"{path}/" if stat.S_ISDIR(facts.kind) else path
                if _ignores(name, rules):
                    listed.ignored.add(name)
                elif path in withheld or f"{path}/" in withheld:
                    listed.released.add(name)
                elif _takes(path, facts, rules):
                    listed.found[path] = facts
                    if stat.S_ISDIR(facts.kind):
                        todo.append(name)
    return listed


def _drop_withheld(there: dict[str, FileFacts], withheld: Container[str]) -> dict[str, FileFacts]:
    """Leave out what has been ignored here, with all that is in it. In `there`, a folder comes
    before what is in it.
    """
    left, kept = set[str](), dict[str, FileFacts]()
    for path, facts in there.items():
        if path in withheld or f"{path}/" in withheld or path.rpartition("/")[0] in left:
            left.add(path)
        else:
            kept[path] = facts
    return kept


def _measure(path: Path) -> int:
    """Return the bytes of a file, or of all files below a folder."""
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size
    files = (Path(top, name) for top, _, names in os.walk(path) for name in names)
    return sum(each.lstat().st_size for each in files)


def _facts_here(path: str | Path) -> FileFacts | None:
    try:
        found = os.lstat(path)
        link = os.readlink(path) if stat.S_ISLNK(found.st_mode) else None
    except OSError:
        return None
    return _make_facts(found.st_mode, found.st_size, found.st_mtime, link)


def _facts_of(item: CopyItem) -> FileFacts:
    return _make_facts(item.mode, item.size, item.mtime, item.link)


def _make_facts(mode: int, size: int, mtime: float, link: str | None) -> FileFacts:
    kind = stat.S_IFMT(mode)
    if kind == stat.S_IFDIR:
        return FileFacts(kind)
    return FileFacts(kind, size, mtime, link is None and bool(mode & _EXECUTABLE), link)


def _item_of(path: str, facts: FileFacts) -> CopyItem:
    mode = facts.kind | (0o755 if facts.executable else 0o644)
    return CopyItem(path=path, mode=mode, size=facts.size, mtime=facts.mtime, link=facts.link)


def _takes(path: str, facts: FileFacts, rules: IgnoreRules) -> bool:
    """Return whether an entry is mirrored: no special files, nothing of git, no incomplete files,
    no links that lead out, and nothing that the folder's ignore files name.
    """
    folder, _, name = path.rpartition("/")
    if name.endswith(PART) or _is_left(name) or (folder and _is_left_below(folder)):
        return False
    if not _can_take(path, facts):
        return False
    return not _ignores(f"{path}/" if facts.kind == stat.S_IFDIR else path, rules)


def _can_take(path: str, facts: FileFacts) -> bool:
    """Return whether the entry is of a kind that is mirrored."""
    if facts.kind == stat.S_IFLNK:
        return stays_inside(_item_of(path, facts))
    return facts.kind in (stat.S_IFREG, stat.S_IFDIR)


def _list_above(path: str) -> Iterable[str]:
    """Yield a path and the folders that contain it."""
    while path:
        yield path
        path = path.rpartition("/")[0]


def _ignores(name: str, rules: IgnoreRules) -> bool:
    return rules.ignores_folder(name) if name.endswith("/") else rules.ignores(name)


def _is_left(name: str) -> bool:
    return name in WITHOUT or is_git_name(name)


@lru_cache(maxsize=10_000)
def _is_left_below(folder: str) -> bool:
    """Return whether what is in this folder stays on its side. Most files share their folders."""
    return any(map(_is_left, folder.split("/")))


def _open_plain(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def _split(paths: Iterable[str], size: Callable[[str], int]) -> Iterable[list[str]]:
    """Divide paths into batches for one call each."""
    batch, total = list[str](), 0
    for path in paths:
        if batch and (len(batch) == _BATCH_FILES or total + size(path) > _BATCH_BYTES):
            yield batch
            batch, total = [], 0
        batch.append(path)
        total += size(path)
    if batch:
        yield batch


async def _mark(tunnel: "NodeTunnel", folder: str, marker: str) -> None:
    _, old = await tunnel.call("get", path=folder, files=[_MARKER], most=64)
    was = None
    if old:
        said, _ = await tunnel.call("stat", path=f"{folder}/{_MARKER}", follow=False)
        was = [said.get("size"), said.get("mtime")]
    content = marker.encode()
    entry = {"path": _MARKER, "was": was, "size": len(content), "mode": 0o600, "mtime_ns": 0}
    await tunnel.call("put", content, path=folder, files=[entry])
