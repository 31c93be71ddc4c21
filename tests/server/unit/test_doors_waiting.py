"""Which connections without a request wait, are cut, or are left out; and in which order those that
wait may use the event loop.
"""

import asyncio
import socket

import pytest

from cavvy.server import turns as turns_module
from cavvy.server.turns import (
    HANDSHAKE_S,
    SERVED_S,
    WAITING,
    WAITING_EACH,
    HandshakeQueue,
    Turns,
    Waiting,
    find_origin,
)


class Clock:
    now = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(turns_module.time, "monotonic", lambda: made.now)
    return made


def fill(waiting: Waiting, count: int, address: str = "") -> list[int]:
    """Add connections, each from its own address or all from one; returns those that are cut."""
    cut: list[int] = []
    for number in range(count):
        own = address or f"10.0.{number // 250}.{number % 250}"
        waiting.add(number, own, lambda n=number: cut.append(n))
    return cut


@pytest.mark.parametrize(("count", "address"), [(WAITING, ""), (WAITING_EACH, "10.9.9.9")])
def test_a_crowd_is_served_before_more_get_a_place(clock: Clock, count: int, address: str) -> None:
    waiting = Waiting()
    cut = fill(waiting, count, address)
    assert not waiting.make_room("10.9.9.9")
    waiting.remove(0)  # it has sent its request
    assert waiting.make_room("10.9.9.9")
    waiting.add("new", "10.9.9.9", lambda: None)
    assert not waiting.make_room("10.9.9.9")
    assert not cut


@pytest.mark.parametrize(("count", "address"), [(WAITING, ""), (WAITING_EACH, "10.9.9.9")])
def test_connections_that_stay_silent_keep_nobody_out(
    clock: Clock, count: int, address: str
) -> None:
    waiting = Waiting()
    cut = fill(waiting, count, address)
    clock.now += SERVED_S
    assert waiting.make_room("10.9.9.9")
    assert cut == [0]


def test_silent_connections_of_one_address_keep_no_other_out(clock: Clock) -> None:
    waiting = Waiting()
    cut = fill(waiting, WAITING_EACH, "10.0.0.1")
    assert waiting.make_room("10.0.0.2")
    assert not cut


def test_a_listener_that_cannot_let_wait_cuts_the_oldest_at_once(clock: Clock) -> None:
    waiting = Waiting()
    cut = fill(waiting, WAITING_EACH, "10.9.9.9")
    assert waiting.make_room("10.9.9.9", patient=False)
    assert cut == [0]


def test_a_connection_keeps_one_place_when_its_handshake_ends(clock: Clock) -> None:
    waiting = Waiting()
    cut = fill(waiting, WAITING_EACH, "10.9.9.9")
    clock.now += SERVED_S
    waiting.add(0, "10.9.9.9", lambda: cut.append(-1))
    assert waiting.make_room("10.9.9.9")
    assert cut == [1]


@pytest.mark.parametrize(
    ("peer", "origin"),
    [
        ("", ""),
        (("10.1.2.3", 99), "10.1.2.3"),
        (("2001:db8:1:2:3:4:5:6", 99, 0, 0), "2001:db8:1:2::/64"),
        (("::ffff:10.1.2.3", 99, 0, 0), "10.1.2.3"),
        (("fe80::1%eth0", 99, 0, 2), "fe80::/64"),
    ],
)
def test_connections_count_for_their_machine(peer: object, origin: str) -> None:
    assert find_origin(peer) == origin


def test_a_full_queue_leaves_out_connections_of_the_address_with_the_most() -> None:
    queue, made = HandshakeQueue(most=8), dict[str, list[socket.socket]]()
    for address, count in (("few", 2), ("many", 20), ("one", 1)):
        for _ in range(count):
            made.setdefault(address, []).append(socket.socket())
            queue.add(address, made[address][-1])
    left = {address: [each.fileno() >= 0 for each in all_] for address, all_ in made.items()}
    assert left == {"few": [True] * 2, "many": [True] * 5 + [False] * 15, "one": [True]}
    taken = [queue.take("many"), queue.take("few")]
    assert taken == [made["many"][0], made["few"][0]]
    assert "one" in queue
    for connection in taken:
        connection.close()
    queue.close()
    assert "one" not in queue
    assert all(each.fileno() < 0 for all_ in made.values() for each in all_)


async def test_addresses_take_turns() -> None:
    done: list[str] = []
    turns, over = Turns(), asyncio.Event()
    for number in range(20):
        turns.add("flood", lambda n=number: done.append(f"flood {n}"), HANDSHAKE_S)
    turns.add("one", lambda: done.append("one"), HANDSHAKE_S)
    turns.add("flood", over.set)
    await over.wait()
    assert len(done) == 21
    turns.add("one", lambda: done.append("later"))
    over.clear()
    turns.add("one", over.set)
    await over.wait()
    assert done[:3] == ["flood 0", "one", "flood 1"]
    assert done[-1] == "later"


def test_others_use_the_loop_between_the_turns() -> None:
    """A handshake is a batch of its own, and a batch ends before the next one begins."""

    async def run() -> int:
        turns, over, seen = Turns(), asyncio.Event(), 0
        for _ in range(10):
            turns.add("flood", lambda: None, HANDSHAKE_S)
        turns.add("flood", over.set)
        while not over.is_set():
            seen += 1
            await asyncio.sleep(0)
        return seen

    assert asyncio.run(run()) >= 10
