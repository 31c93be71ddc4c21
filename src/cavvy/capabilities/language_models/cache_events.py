"""What engines publish about their caches: how many tokens they have stored, and when they have
forgotten all. vLLM and SGLang publish these key-value events with ZeroMQ (`--kv-events-config`).

An event names blocks of tokens, and the gateway has no tokenizer. It counts: what an engine has
stored and what no prompt of this gateway explains are prompts of others, or answers. They take the
place of prompts that the replica was believed to hold; see `CacheRouter.store`. In replays with
`benchmarks/cache_routing.py --unseen`, a table that knew each block reused at most 0.02 more.

A message has three frames: a topic, a number that grows by one, and [time, events] in msgpack. The
events are arrays or maps, by the engine's version: `vllm/distributed/kv_events.py` at 0.32,
`sglang/srt/disaggregation/kv_events.py`. The frames are those of ZMTP 3.0
(https://rfc.zeromq.org/spec/23), of which a subscriber needs little.
"""

import asyncio
import logging
from asyncio import StreamReader
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Annotated

import msgspec

from cavvy.capabilities.serving.gateway.config import ReplicaAddress
from cavvy.domain.values import Struct

# a signature, version 3.0, the mechanism without keys, and "no server"
_GREETING = b"\xff\0\0\0\0\0\0\0\0\x7f\x03\0" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03SUB"
_ALL_TOPICS = b"\0\x01\x01"
_MORE, _LONG, _COMMAND = 1, 2, 4  # flags of a frame
_FRAMES_MAX = 3
# One message of SGLang has an event for each token of a prompt, with pages of one token.
_MESSAGE_MAX = 8 << 20
_BLOCKS_MAX = 1 << 17  # of one event, and of a cache whose size is measured
_EVENTS_MAX = 1 << 17  # of one message; one could have an event in each byte
_BLOCK_TOKENS_MAX = 1 << 16
# A message takes as much time as so many bytes a second: an engine that floods is read slowly.
# Messages, commands and events count as so many bytes at least.
_BYTES_PER_S, _MESSAGE_LEAST, _EVENT_LEAST = 4 << 20, 4 << 10, 64
_TURN = 4 << 10  # bytes of events, after which other requests get their turn
_TIMEOUT_S = 5.0
_LOOK_S = 5.0  # between two looks whether the replica is still used
_PAUSE_S, _PAUSE_MAX_S = 1.0, 60.0  # between two attempts to connect
_log = logging.getLogger(__name__)

_Hashes = Annotated[list[int | bytes], msgspec.Meta(max_length=_BLOCKS_MAX)]
_Size = Annotated[int, msgspec.Meta(ge=1, le=_BLOCK_TOKENS_MAX)]


class _Stored(Struct, frozen=True, array_like=True, tag="BlockStored"):
    block_hashes: _Hashes
    parent: msgspec.Raw
    token_ids: msgspec.Raw  # never read
    block_size: _Size
    lora_id: msgspec.Raw = msgspec.Raw()
    medium: str | None = None


class _Removed(Struct, frozen=True, array_like=True, tag="BlockRemoved"):
    block_hashes: _Hashes
    medium: str | None = None


class _Cleared(Struct, frozen=True, array_like=True, tag="AllBlocksCleared"):
    pass


class _StoredMap(Struct, frozen=True, tag="BlockStored"):
    block_hashes: _Hashes
    block_size: _Size
    medium: str | None = None
    group_idx: int | None = None


class _RemovedMap(Struct, frozen=True, tag="BlockRemoved"):
    block_hashes: _Hashes
    medium: str | None = None
    group_idx: int | None = None


class _ClearedMap(Struct, frozen=True, tag="AllBlocksCleared"):
    pass


class _Batch(Struct, frozen=True, array_like=True):
    ts: msgspec.Raw
    events: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=_EVENTS_MAX)]


_decode_batch = msgspec.msgpack.Decoder(_Batch).decode
_decode_array = msgspec.msgpack.Decoder(_Stored | _Removed | _Cleared).decode
_decode_map = msgspec.msgpack.Decoder(_StoredMap | _RemovedMap | _ClearedMap).decode


class EventError(Exception):
    """Raised if what a replica sends are no events. The text says why."""


class CacheChange(Struct, frozen=True):
    """So many tokens were stored, or all were forgotten before. `holds` is how many tokens the full
    cache holds, if this has been found out."""

    stored: int = 0
    cleared: bool = False
    holds: int | None = None


class EventReader:
    """Turns the messages of one engine into changes of its cache."""

    def __init__(self) -> None:
        self._next: int | None = None  # the number of the next message
        self._held: set[int] | None = set()  # hashes of blocks; None: too many to be counted
        self._full = 0  # the most blocks that were held when one was removed
        self._size = 1  # tokens of a block

    def read(self, frames: list[bytes]) -> Iterator[CacheChange | None]:
        """Yield the changes of a message, and None after each _TURN. Raises EventError."""
        if len(frames) != _FRAMES_MAX or len(frames[1]) != 8:
            raise EventError("a message has not the three parts of key-value events")
        number = int.from_bytes(frames[1], "big")
        if self._next is not None and number < self._next:  # the engine has started again
            self._forget()
            yield CacheChange(cleared=True)
        elif number != self._next:
            self._forget()  # of the messages between, nothing is known
        self._next = number + 1
        try:
            events = _decode_batch(frames[2]).events
        except (msgspec.DecodeError, RecursionError) as error:
            raise EventError(f"a message is no list of events: {error}") from error
        done = 0
        for each in events:
            data = bytes(each)
            if (change := self._read_one(data)) is not None:
                yield change
            done += max(_EVENT_LEAST, len(data))
            if done >= _TURN:
                yield None
                done = 0

    def _read_one(self, data: bytes) -> CacheChange | None:
        is_map = data[:1] >= b"\xde" or data[:1] < b"\x90"
        try:
            event = _decode_map(data) if is_map else _decode_array(data)
        except (msgspec.DecodeError, RecursionError):
            return None  # a kind of event that is not known here
        if isinstance(event, _Cleared | _ClearedMap):
            self._forget()
            return CacheChange(cleared=True)
        if event.medium not in (None, "GPU") or getattr(event, "group_idx", None):
            return None  # copies in other memory, or a further part of the same tokens
        if isinstance(event, _Stored | _StoredMap):
            self._size = event.block_size
            self._hold(event.block_hashes)
            return CacheChange(stored=len(event.block_hashes) * event.block_size)
        return self._remove(event.block_hashes)

    def _hold(self, hashes: list[int | bytes]) -> None:
        if self._held is not None:
            self._held.update(map(hash, hashes))
            if len(self._held) > _BLOCKS_MAX:
                self._held = None

    def _remove(self, hashes: list[int | bytes]) -> CacheChange | None:
        """A block that was stored since the gateway listens is removed when all older ones are gone
        and the cache is full, so what was stored since then is its size."""
        if self._held is None:
            return None
        count = len(self._held)
        self._held.difference_update(map(hash, hashes))
        if len(self._held) == count or count <= self._full:
            return None
        self._full = count
        return CacheChange(holds=count * self._size)

    def _forget(self) -> None:
        self._held, self._full = set(), 0


async def watch_events(
    address: ReplicaAddress, is_used: Callable[[], bool], tell: Callable[[CacheChange], None]
) -> None:
    """Listen to the events of a replica until it is not used any longer. If they cannot be read,
    this is logged once, and tried again."""
    reader, pause_s, told = EventReader(), _PAUSE_S, False
    while is_used():
        begun = monotonic()
        try:
            await _listen(address, is_used, reader, tell)
            return
        except (OSError, EOFError, TimeoutError, EventError) as error:
            if not told:
                text = "the key-value events of a replica cannot be read, so its cache is guessed: "
                extra = {"replica": address.id, "port": address.events_port}
                _log.warning("%s%s", text, str(error) or type(error).__name__, extra=extra)
            lasted = monotonic() - begun > _PAUSE_MAX_S
            told, pause_s = True, _PAUSE_S if lasted else min(2 * pause_s, _PAUSE_MAX_S)
        await asyncio.sleep(pause_s)


async def _listen(
    address: ReplicaAddress,
    is_used: Callable[[], bool],
    reader: EventReader,
    tell: Callable[[CacheChange], None],
) -> None:
    """Raises OSError, EOFError, TimeoutError, EventError."""
    async with asyncio.timeout(_TIMEOUT_S):
        stream, writer = await asyncio.open_connection(address.host, address.events_port)
    reading: asyncio.Future[list[bytes]] | None = None
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            await _greet(stream, writer)
        while is_used():
            reading = reading or asyncio.ensure_future(_read_message(stream))
            await asyncio.wait((reading,), timeout=_LOOK_S)
            if not reading.done():
                continue
            frames, reading = reading.result(), None
            turns = 0
            for change in reader.read(frames):
                if change is None:
                    turns += 1
                    await asyncio.sleep(0)
                else:
                    tell(change)
            await _rest(max(sum(map(len, frames)), turns * _TURN))
    finally:
        if reading is not None:
            reading.cancel()
            await asyncio.wait((reading,))
        writer.close()


async def _rest(size: int) -> None:
    await asyncio.sleep(max(_MESSAGE_LEAST, size) / _BYTES_PER_S)


async def _greet(stream: StreamReader, writer: asyncio.StreamWriter) -> None:
    """Agree on ZMTP without keys, and ask for all topics."""
    writer.write(_GREETING)
    theirs = await stream.readexactly(len(_GREETING))
    if theirs[:1] != b"\xff" or theirs[9:11] < b"\x7f\x03" or theirs[12:32] != _GREETING[12:32]:
        raise EventError("the port does not speak ZMTP 3 without keys")
    writer.write(_READY)
    flags, body = await _read_frame(stream, _MESSAGE_LEAST)
    if not flags & _COMMAND or not body.startswith(b"\x05READY"):
        raise EventError("the port does not speak ZMTP 3 without keys")
    writer.write(_ALL_TOPICS)


async def _read_message(stream: StreamReader) -> list[bytes]:
    frames: list[bytes] = []
    left = _MESSAGE_MAX
    while True:
        flags, body = await _read_frame(stream, left)
        if flags & _COMMAND:
            await _rest(len(body))
            continue
        frames.append(body)
        left -= len(body)
        if not flags & _MORE:
            return frames
        if len(frames) == _FRAMES_MAX:
            raise EventError("a message has not the three parts of key-value events")


async def _read_frame(stream: StreamReader, most: int) -> tuple[int, bytes]:
    flags = (await stream.readexactly(1))[0]
    size = int.from_bytes(await stream.readexactly(8 if flags & _LONG else 1), "big")
    if flags & ~(_MORE | _LONG | _COMMAND) or size > most:
        raise EventError("a frame is not valid or too large")
    return flags, await stream.readexactly(size)
