"""Key-value events: the frames and messages of engines, and what they change in the choice."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import pytest
from tests.waits import patience

from cavvy.capabilities.language_models.cache_events import (
    CacheChange,
    EventError,
    EventReader,
    watch_events,
)
from cavvy.capabilities.language_models.cache_routing import CacheRouter
from cavvy.capabilities.language_models.prompts import Prompt
from cavvy.capabilities.serving.gateway.config import ReplicaAddress
from cavvy.domain.services import RoutingKind
from cavvy.spec.problems import SpecError
from cavvy.task_files import ReadOptions, parse_task

CLEARED = CacheChange(cleared=True)


def stored(count: int, first: int = 0, **more: Any) -> dict[str, Any]:
    hashes: list[int | bytes] = [b"%032d" % each for each in range(first, first + count)]
    event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None}
    return event | {"token_ids": [1] * 16 * count, "block_size": 16, "lora_id": None} | more


def removed(*hashes: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [b"%032d" % each for each in hashes]}


def frames(number: int, *events: object) -> list[bytes]:
    return [b"kv", number.to_bytes(8, "big"), msgspec.msgpack.encode([1.5, events, 0])]


def read(reader: EventReader, number: int, *events: object) -> list[CacheChange]:
    return [each for each in reader.read(frames(number, *events)) if each is not None]


@pytest.mark.parametrize("as_array", [False, True])
def test_both_formats_of_events_are_read(as_array: bool) -> None:
    events = [stored(3), stored(2, 3, medium="CPU"), {"type": "AllBlocksCleared"}]
    sent = [list(each.values()) for each in events] if as_array else events
    assert read(EventReader(), 0, *sent) == [CacheChange(stored=48), CLEARED]


def test_a_full_cache_holds_what_was_stored_until_its_own_blocks_are_removed() -> None:
    reader = EventReader()
    read(reader, 7, stored(4))
    assert read(reader, 8, removed(100, 101)) == []  # stored before the gateway listened
    assert read(reader, 9, stored(6, 4)) == [CacheChange(stored=96)]
    assert read(reader, 10, removed(0)) == [CacheChange(holds=160)]
    assert read(reader, 11, removed(1)) == []


def test_an_engine_that_starts_again_has_forgotten_all() -> None:
    reader = EventReader()
    assert read(reader, 900, stored(1)) == [CacheChange(stored=16)]
    assert read(reader, 0, stored(1)) == [CLEARED, CacheChange(stored=16)]
    assert read(reader, 5, removed(0)) == []  # messages are missing: the count begins again


@pytest.mark.parametrize(
    "message",
    [
        [b""],
        [b"", b"1", b"\x93"],
        [b"", bytes(8), b""],
        [b"", bytes(8), b"\xc1" * 20],
        [b"", bytes(8), b"\x91" * 100_000],
        [b"", bytes(8), msgspec.msgpack.encode({"events": []})],
        [b"", bytes(8), b"\x92\xc0\xdd\0\x02\0\1" + bytes((1 << 17) + 1)],
    ],
)
def test_what_is_no_message_is_refused(message: list[bytes]) -> None:
    with pytest.raises(EventError):
        list(EventReader().read(message))


def test_events_of_any_shape_do_no_harm() -> None:
    odd: list[object] = [
        None,
        [],
        {},
        ["BlockStored"],
        ["New", [1]],
        stored(1, block_size=0),
        stored(1, block_size=1 << 60),
        stored(1, group_idx=1),
        {**stored(1), "block_hashes": [1.5]},
        {**stored(1), "block_hashes": [1] * 200_000},
        removed(),
    ]
    reader = EventReader()
    assert read(reader, 0, *odd, stored(1)) == [CacheChange(stored=16)]
    for number in range(1, 4):
        assert len(read(reader, number, *(stored(65_000, number * 65_000),))) == 1
    assert reader._held is None  # more blocks than the gateway counts


@pytest.mark.parametrize(
    ("event", "count", "turns"),
    [(b"\xc0", 64_000, 1000), (msgspec.msgpack.encode(stored(1000)), 80, 80)],
)
def test_others_get_their_turn_between_many_and_between_large_events(
    event: bytes, count: int, turns: int
) -> None:
    data = b"\x92\xc0\xdd" + count.to_bytes(4, "big") + event * count
    told = list(EventReader().read([b"", bytes(8), data]))
    assert told.count(None) == turns


def make_prompt(*blocks: int) -> Prompt:
    return Prompt(blocks, tuple(range(100, 100 * len(blocks) + 1, 100)), 100 * len(blocks))


def make_router() -> CacheRouter:
    router = CacheRouter(1000)
    router.set_replicas(["r0", "r1"])
    return router


def test_prompts_of_others_take_the_place_of_what_a_replica_held() -> None:
    router, prompt = make_router(), make_prompt(1, 2, 3, 4)
    visit = router.begin(0, prompt, 0.0)
    router.store("r0", 250, 0.1)
    visit.answer(0.2)
    router.store("r0", 150, 0.3)  # the rest of the same prompt
    visit.end()
    assert router.choose(prompt, [0, 0], 1.0) == 0
    router.store("r0", 900, 5.0)
    assert router._caches.find(prompt) == {0: 100}
    router.store("r0", 1 << 60, 6.0)
    assert router._caches.find(prompt) == {}
    assert router.choose(prompt, [0, 0], 7.0) == 1  # the other one had less work
    router.store("unknown", 5, 7.0)


def test_a_prompt_that_failed_or_was_held_explains_nothing_later() -> None:
    router = make_router()
    router.begin(0, make_prompt(1), 0.0).end()
    visit = router.begin(0, make_prompt(2), 0.0)
    visit.answer(0.0)
    visit.end()
    router.store("r0", 900, 60.0)
    assert router._caches.find(make_prompt(2)) == {0: 100}
    router.store("r0", 1, 60.0)
    router.store("r0", 99, 60.0)
    assert router._caches.find(make_prompt(2)) == {}


def test_an_emptied_cache_holds_nothing_and_fills_again() -> None:
    router, prompt = make_router(), make_prompt(1, 2)
    router.begin(0, prompt, 0.0)
    router.clear("r0")
    router.clear("unknown")
    assert router._caches.find(prompt) == {}
    router.begin(0, prompt, 1.0)
    assert router._caches.find(prompt) == {0: 200}


def test_the_measured_size_counts_unless_the_engine_tells_it() -> None:
    router, prompt = make_router(), make_prompt(1, 2, 3, 4)
    router.begin(0, prompt, 0.0)
    router.measure("r0", 200)
    assert router._caches.find(prompt) == {0: 200}
    router.tell("r0", 0, 5000)
    router.measure("r0", 100)
    assert router._caches.find(prompt) == {0: 200}


# a publisher, with the bytes of libzmq

GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01NULL" + bytes(48)
READY = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB"


def frame(data: bytes, flags: int) -> bytes:
    if len(data) > 255:
        return bytes([flags | 2]) + len(data).to_bytes(8, "big") + data
    return bytes([flags, len(data)]) + data


def pack(message: list[bytes]) -> bytes:
    return b"".join(frame(each, at < len(message) - 1) for at, each in enumerate(message))


@asynccontextmanager
async def publishing(*answers: bytes) -> AsyncIterator[tuple[int, list[bytes]]]:
    """A port that sends these bytes to each subscriber, and what subscribers have sent."""
    heard: list[bytes] = []
    running: set[asyncio.Task[None] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        running.add(asyncio.current_task())
        for each in answers:
            writer.write(each)
        with suppress(OSError):
            while data := await reader.read(4096):
                heard.append(data)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], heard
    finally:
        server.close()
        await asyncio.gather(*(each for each in running if each is not None))


async def listen(port: int, enough: int) -> list[CacheChange]:
    found: list[CacheChange] = []
    address = ReplicaAddress(id="r0", host="127.0.0.1", port=1, events_port=port)
    task = asyncio.create_task(watch_events(address, lambda: True, found.append))
    async with patience():
        while len(found) < enough:
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait((task,))
    return found


async def test_a_publisher_of_zeromq_is_heard() -> None:
    ping = b"\x04\x07\x04PING\0\0"
    messages = [pack(frames(0, stored(200))), ping, pack(frames(1, stored(1)))]
    async with publishing(GREETING, READY, *messages) as (port, heard):
        assert await listen(port, 2) == [CacheChange(stored=3200), CacheChange(stored=16)]
        sent = b"".join(heard)
    assert sent[10:16] == b"\x03\0NULL"
    assert sent[64:].endswith(b"\0\0\0\x03SUB\0\x01\x01")


@pytest.mark.parametrize(
    ("flood", "rests"),
    [
        (b"\x04\0" * 300, [0] * 300),
        (pack([b"kv", bytes(8), b"\x92\xc0\xdc\x40\0" + b"\xc0" * (1 << 14)]), [1 << 20]),
    ],
)
async def test_a_flood_of_commands_or_of_small_events_is_read_slowly(
    flood: bytes, rests: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []

    async def rest(size: int) -> None:
        found.append(size)

    monkeypatch.setattr("cavvy.capabilities.language_models.cache_events._rest", rest)
    async with publishing(GREETING, READY, flood, pack(frames(1, stored(1)))) as (port, _):
        assert await listen(port, 1) == [CacheChange(stored=16)]
    assert found[: len(rests)] == rests


@pytest.mark.parametrize(
    ("answers", "what"),
    [
        ([b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(64)], "ZMTP"),
        ([GREETING.replace(b"NULL\0", b"CURVE")], "ZMTP"),
        ([GREETING, b"\x04\x07\x05ERROR\0"], "ZMTP"),
        ([GREETING, READY, b"\x02\xff\xff\xff\xff\xff\xff\xff\xff"], "too large"),
        ([GREETING, READY, pack([b"a"] * 9)], "three parts"),
        ([GREETING, READY, b"\x08\x01a"], "not valid"),
    ],
)
async def test_a_port_without_events_is_told_once(
    answers: list[bytes], what: str, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    monkeypatch.setattr("cavvy.capabilities.language_models.cache_events._PAUSE_S", 0.01)
    caplog.set_level(logging.WARNING)
    tries = 0

    def is_used() -> bool:
        nonlocal tries
        tries += 1
        return tries < 5

    async with publishing(*answers) as (port, _), patience():
        address = ReplicaAddress(id="r0", host="127.0.0.1", port=1, events_port=port)
        await watch_events(address, is_used, lambda change: None)
    assert [what in each.message for each in caplog.records] == [True]


# the service's file


def parse(service: str) -> Any:
    text = f"name: chat\nresources: {{gpu: H100}}\nservice:\n  {service}\n"
    return parse_task(text, options=ReadOptions(serves=True))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_is_told_to_publish_on_this_machine_only(engine: str) -> None:
    task = parse(f"engine: {engine}\n  model: org/m\n  routing: {{events: true}}")
    assert '\\"endpoint\\":\\"tcp://[::ffff:127.0.0.1]:${CAVVY_EVENTS_PORT:-5557}' in task.run
    assert task.service.routing.by is RoutingKind.CACHE
    assert "kv-events" not in parse(f"engine: {engine}\n  model: org/m").run


@pytest.mark.parametrize(
    ("service", "what"),
    [
        ("engine: tgi\n  model: org/m\n  routing: {events: true}", "tgi publishes no events"),
        ("engine: vllm\n  model: org/m\n  routing: {by: load, events: true}", "by: load"),
        (
            "engine: vllm\n  model: org/m\n  options: {kv-events-config: x}\n"
            "  routing: {events: true}",
            "kv-events-config",
        ),
    ],
)
def test_events_that_cannot_be_had_are_refused(service: str, what: str) -> None:
    with pytest.raises(SpecError, match=what):
        parse(service)
