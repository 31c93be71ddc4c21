"""Keeps the numbers of requests in a file that outlives the gateway's process.

The file is mapped into memory, so each count needs only one write to memory, and the operating
system keeps the count if the process is killed. The next gateway of the same folder continues all
counts under the same epoch, so the counts of an epoch only grow. After a restart of the machine,
the file may lack counts that were already reported. All counts start at 0 under a new epoch after a
restart of the machine, unless the last gateway ended in an orderly way.

The file has slots of 256 bytes. The first slot is the header: the format, the epoch and, only while
a gateway uses the file, the machine's boot ID. Each slot after the header contains two numbers of 8
bytes, the length of a name, and the name. In a slot, the first number counts requests, and the
second number is the part of the replica's time, in microseconds, that these requests used. The name
consists of the service, the replica and the client's key. A length of 0 marks a free slot.
"""

import fcntl
import mmap
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import cast

from cavvy.domain.request_bills import KeyWork, RequestWork

_SLOT = 256
_CHUNK = 65_536  # a multiple of every page size
_CHUNKS_MAX = 256
_NAME_AT, _NAME_MAX = 18, _SLOT - 18
_FORMAT = b"cavvy-counts-1\n\0"
_EPOCH_AT, _BOOT_AT, _BOOT_BYTES = 16, 32, 64
_BOOT_FILE = Path("/proc/sys/kernel/random/boot_id")
_LOCK_S, _PAUSE_S = 5.0, 0.05  # until a former gateway has ended
_NO_BOOT = bytes(_BOOT_BYTES)

Count = memoryview  # of two integers: requests, microseconds


class KeptCounts:
    """The counts of a gateway. Without a `path`, or if another process uses the file, the counts
    are lost when this process ends."""

    def __init__(self, path: Path | None = None) -> None:
        self.epoch = token_hex(8)
        self._chunks: list[mmap.mmap] = []
        self._free: list[Count] = []
        # by service, then by replica and key
        self._used: dict[str, dict[tuple[str, str], Count]] = {}
        self._file = -1
        if path is not None:
            self._open(path)

    @property
    def kept(self) -> bool:
        """Whether the counts are in a file."""
        return self._file >= 0

    def find(self, service: str, replica: str, key: str) -> Count:
        """Return the counts of a client's key at a replica; the caller increases these counts."""
        own = self._used.setdefault(service, {})
        known = own.get((replica, key))
        if known is None:
            known = own[replica, key] = self._take((service, replica, key))
        return known[:16].cast("Q")

    def resume(self, service: str) -> Mapping[str, Mapping[str, Count]]:
        """Return the service's counts from the previous gateway, by replica and key."""
        found: dict[str, dict[str, Count]] = {}
        for (replica, key), slot in self._used.get(service, {}).items():
            found.setdefault(replica, {})[key] = slot[:16].cast("Q")
        return found

    def forget(self, service: str, replica: str) -> None:
        """Free the slots of a replica that no longer exists."""
        own = self._used.get(service, {})
        for name in [each for each in own if each[0] == replica]:
            self._release(own.pop(name))

    def keep_only(self, services: Mapping[str, object]) -> None:
        """Free the slots of every service that is not in `services`."""
        for service in [each for each in self._used if each not in services]:
            for slot in self._used.pop(service).values():
                self._release(slot)

    def close(self) -> None:
        """Write the file to the disk, and record in the file that it is complete."""
        if self._file < 0:
            return
        for chunk in self._chunks:
            chunk.flush()
        self._mark(_NO_BOOT)
        fcntl.flock(self._file, fcntl.LOCK_UN)  # the chunks have copies of the descriptor
        os.close(self._file)
        self._file = -1

    def _open(self, path: Path) -> None:
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return
        try:
            _lock(file)
            size = os.fstat(file).st_size
            if size < _CHUNK or not _is_usable(os.pread(file, _SLOT, 0), _read_boot()):
                os.ftruncate(file, 0)
                size = 0
            self._file = file
            for number in range(size // _CHUNK):
                self._map(number)
            if not size:
                self._grow()
        except OSError:
            os.close(file)
            self._file = -1
            self._chunks.clear()
            return
        if size:
            self.epoch = _read_epoch(self._chunks[0])
        else:
            self._chunks[0][_EPOCH_AT:_BOOT_AT] = self.epoch.encode()
            self._chunks[0][:_EPOCH_AT] = _FORMAT  # last, so a file with a format has an epoch
        self._mark(_read_boot())
        for slot in self._list_slots(0, len(self._chunks)):
            name = _read_name(slot)
            if name is None:
                self._free.append(slot)
            else:
                self._used.setdefault(name[0], {})[name[1:]] = slot

    def _mark(self, boot: bytes) -> None:
        """Mark the file as in use: write the ID of the machine's current boot into it."""
        self._chunks[0][_BOOT_AT : _BOOT_AT + _BOOT_BYTES] = boot
        self._chunks[0].flush()

    def _take(self, name: tuple[str, str, str]) -> Count:
        """Return a slot with this name, or memory of this process if no slot is available."""
        text = "\n".join(name).encode()
        if self._file < 0 or len(text) > _NAME_MAX:
            return memoryview(bytearray(_SLOT))
        if not self._free:
            try:
                self._grow()
            except OSError:  # the disk is full
                return memoryview(bytearray(_SLOT))
            self._free += self._list_slots(len(self._chunks) - 1, len(self._chunks))
        slot = self._free.pop()
        slot[:_NAME_AT] = bytes(_NAME_AT)
        slot[_NAME_AT : _NAME_AT + len(text)] = text
        slot[16:18] = len(text).to_bytes(2, "little")
        return slot

    def _release(self, slot: Count) -> None:
        if isinstance(slot.obj, mmap.mmap):
            slot[16:18] = bytes(2)
            self._free.append(slot)

    def _grow(self) -> None:
        """Add a chunk of free slots. The chunk's disk blocks are allocated before the chunk is
        mapped, because a write to a mapped chunk on a full disk would kill the process. Raises
        OSError.
        """
        number = len(self._chunks)
        if number >= _CHUNKS_MAX:
            raise OSError("there are too many counts")
        if os.pwrite(self._file, bytes(_CHUNK), number * _CHUNK) < _CHUNK:
            raise OSError("the disk is full")
        self._map(number)

    def _map(self, number: int) -> None:
        self._chunks.append(mmap.mmap(self._file, _CHUNK, offset=number * _CHUNK))

    def _list_slots(self, first: int, last: int) -> Iterator[Count]:
        for number in range(first, last):
            view = memoryview(self._chunks[number])
            for at in range(0 if number else _SLOT, _CHUNK, _SLOT):
                yield view[at : at + _SLOT]


def read_work(path: Path) -> Mapping[str, RequestWork]:
    """Return the counts in a gateway's file, by service. The counts can be read even while no
    gateway is running.
    """
    try:
        data = path.read_bytes()
    except OSError:
        return {}
    if not _is_usable(data[:_SLOT], _read_boot()):
        return {}
    found: dict[str, dict[str, dict[str, KeyWork]]] = {}
    for at in range(_SLOT, len(data) - _SLOT + 1, _SLOT):
        slot = memoryview(data)[at : at + _SLOT]
        if (name := _read_name(slot)) is not None:
            service, replica, key = name
            found.setdefault(service, {}).setdefault(replica, {})[key] = describe(
                slot[:16].cast("Q")
            )
    epoch = _read_epoch(data)
    return {service: {epoch: work} for service, work in found.items()}


def describe(count: Count) -> KeyWork:
    return KeyWork(requests=count[0], work_us=count[1])


def _lock(file: int) -> None:
    """Lock the file. Wait for a while if the previous gateway has not ended yet. Raises OSError."""
    give_up = time.monotonic() + _LOCK_S
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if time.monotonic() > give_up:
            raise OSError("another gateway uses the counts")
        time.sleep(_PAUSE_S)


def _is_usable(header: bytes, boot: bytes) -> bool:
    """Return whether the counts in the file are complete: the last gateway ended in an orderly way,
    or the machine was not restarted after that gateway ended.
    """
    used_in = header[_BOOT_AT : _BOOT_AT + _BOOT_BYTES]
    return header[:_EPOCH_AT] == _FORMAT and used_in in (_NO_BOOT, boot)


def _read_epoch(header: bytes | mmap.mmap) -> str:
    return header[_EPOCH_AT:_BOOT_AT].decode(errors="replace")


def _read_name(slot: memoryview) -> tuple[str, str, str] | None:
    length = int.from_bytes(slot[16:18], "little")
    parts = bytes(slot[_NAME_AT : _NAME_AT + length]).decode(errors="replace").split("\n")
    return cast(tuple[str, str, str], tuple(parts)) if len(parts) == 3 else None


def _read_boot() -> bytes:
    """Return the ID of this boot of the machine. If the machine has no boot ID, return a random ID,
    which differs in each process.
    """
    try:
        text = _BOOT_FILE.read_bytes().strip()
    except OSError:
        text = str(os.getpid()).encode()
    return text[:_BOOT_BYTES].ljust(_BOOT_BYTES, b"\0")
