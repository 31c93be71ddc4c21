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

A name with a model as its fourth part marks a slot of tokens: the two numbers are the prompts and
the completions, and four numbers at the end of the slot are the cached part of the prompts, the
part that the gateway estimated, and the prompts and completions of answers that have begun. The
gateway counts the tokens of an answer before it passes on the bytes that state them. If the process
is killed, the next gateway counts the answers that had begun by their estimates.
"""

import fcntl
import mmap
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

from cavvy.capabilities.serving.bills import KeyWork, RequestWork
from cavvy.domain.ledger import TokenUse
from cavvy.domain.values import replace

_SLOT = 256
_CHUNK = 65_536  # a multiple of every page size
_CHUNKS_MAX = 256
_NAME_AT, _NAME_MAX = 18, _SLOT - 18
_TOKENS_AT = _SLOT - 32
_TOKEN_NAME_MAX = _TOKENS_AT - _NAME_AT
_DAY = "@day"  # in place of a replica: what a key has spent on a day
_FORMAT = b"cavvy-counts-1\n\0"
_EPOCH_AT, _BOOT_AT, _BOOT_BYTES = 16, 32, 64
_BOOT_FILE = Path("/proc/sys/kernel/random/boot_id")
_LOCK_S, _PAUSE_S = 5.0, 0.05  # until a former gateway has ended
_NO_BOOT = bytes(_BOOT_BYTES)

Count = memoryview  # of two integers: requests, microseconds
_Name = tuple[str, ...]  # replica and key, and the model if the slot counts tokens


class TokenCount:
    """The tokens of a client's key and a model at a replica."""

    __slots__ = ("_more", "_sums")

    def __init__(self, slot: memoryview) -> None:
        self._sums = slot[:16].cast("Q")  # prompt, completion
        self._more = slot[_TOKENS_AT:].cast("Q")  # cached, estimated; begun: prompt, completion

    def describe(self) -> TokenUse:
        (prompt, completion), (cached, estimated, *_) = self._sums, self._more
        return TokenUse(prompt=prompt, cached=cached, completion=completion, estimated=estimated)

    def add(self, use: TokenUse) -> None:
        self._sums[0] += use.prompt
        self._sums[1] += use.completion
        self._more[0] += use.cached
        self._more[1] += use.estimated

    def begin(self, prompt: int, completion: int) -> None:
        """Change the estimated tokens of answers that have begun."""
        self._more[2] = max(0, self._more[2] + prompt)
        self._more[3] = max(0, self._more[3] + completion)

    def resume(self) -> None:
        """Count the answers that had begun when the former process was killed."""
        prompt, completion = self._more[2], self._more[3]
        self._more[2] = self._more[3] = 0
        self.add(TokenUse(prompt=prompt, completion=completion, estimated=prompt + completion))


class KeptCounts:
    """The counts of a gateway. Without a `path`, or if another process uses the file, the counts
    are lost when this process ends."""

    def __init__(self, path: Path | None = None) -> None:
        self.epoch = token_hex(8)
        self._chunks: list[mmap.mmap] = []
        self._free: list[Count] = []
        # by service, then by replica and key
        self._used: dict[str, dict[_Name, Count]] = {}
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

    def find_day(self, service: str, key: str) -> Count:
        """Return the day, in days since 1970, and the micro-dollars that the key spent on it."""
        return self.find(service, _DAY, key)

    def find_tokens(self, service: str, replica: str, key: str, model: str) -> TokenCount:
        """Return the tokens of a model; a name that is too long loses its end."""
        room = _TOKEN_NAME_MAX - len(f"{service}\n{replica}\n{key}\n".encode())
        model = model.encode()[: max(room, 0)].decode(errors="ignore").replace("\n", " ")
        own = self._used.setdefault(service, {})
        known = own.get((replica, key, model))
        if known is None:
            known = own[replica, key, model] = self._take((service, replica, key, model))
        return TokenCount(known)

    def resume(self, service: str) -> Mapping[str, Mapping[str, Count]]:
        """Return the service's counts from the previous gateway, by replica and key."""
        found: dict[str, dict[str, Count]] = {}
        for (replica, key, *model), slot in self._used.get(service, {}).items():
            if not model and replica != _DAY:
                found.setdefault(replica, {})[key] = slot[:16].cast("Q")
        return found

    def resume_tokens(self, service: str) -> Mapping[str, Mapping[tuple[str, str], TokenCount]]:
        """Return the service's tokens from the previous gateway, by replica, then by key and
        model.
        """
        found: dict[str, dict[tuple[str, str], TokenCount]] = {}
        for (replica, key, *model), slot in self._used.get(service, {}).items():
            if model:
                found.setdefault(replica, {})[key, model[0]] = TokenCount(slot)
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
                if len(name) == 4:
                    TokenCount(slot).resume()

    def _mark(self, boot: bytes) -> None:
        """Mark the file as in use: write the ID of the machine's current boot into it."""
        self._chunks[0][_BOOT_AT : _BOOT_AT + _BOOT_BYTES] = boot
        self._chunks[0].flush()

    def _take(self, name: _Name) -> Count:
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
        slot[:] = bytes(_SLOT)
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
    tokens: dict[_Name, dict[str, TokenUse]] = {}
    for at in range(_SLOT, len(data) - _SLOT + 1, _SLOT):
        slot = memoryview(data)[at : at + _SLOT]
        if (name := _read_name(slot)) is None:
            continue
        service, replica, key, *model = name
        if replica == _DAY:
            continue
        if model:
            tokens.setdefault(name[:3], {})[model[0]] = TokenCount(slot).describe()
        else:
            counts = found.setdefault(service, {}).setdefault(replica, {})
            counts[key] = describe(slot[:16].cast("Q"))
    for (service, replica, key), uses in tokens.items():
        counts = found.setdefault(service, {}).setdefault(replica, {})
        known = counts.get(key, KeyWork(requests=0, work_us=0))
        counts[key] = replace(known, tokens=uses)
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


def _read_name(slot: memoryview) -> _Name | None:
    length = int.from_bytes(slot[16:18], "little")
    parts = bytes(slot[_NAME_AT : _NAME_AT + length]).decode(errors="replace").split("\n")
    return tuple(parts) if len(parts) in (3, 4) else None


def _read_boot() -> bytes:
    """Return the ID of this boot of the machine. If the machine has no boot ID, return a random ID,
    which differs in each process.
    """
    try:
        text = _BOOT_FILE.read_bytes().strip()
    except OSError:
        text = str(os.getpid()).encode()
    return text[:_BOOT_BYTES].ljust(_BOOT_BYTES, b"\0")
