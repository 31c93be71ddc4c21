"""What the server holds of calls that it runs, and what callers load of their results."""

import asyncio
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import Raw
from msgspec.json import decode, encode

from cavvy.capabilities.functions import dispatcher, wire
from cavvy.capabilities.functions.app import App, Function
from cavvy.capabilities.functions.dispatcher import BrokerSession
from cavvy.capabilities.functions.errors import CallFailed
from cavvy.capabilities.functions.frames import CallFrames, Head, WrongFrame, pack
from cavvy.capabilities.functions.options import FunctionOptions
from cavvy.capabilities.functions.payload import JsonCodec, PickleCodec
from cavvy.capabilities.functions.rows import CallPlace, EndedCall, FunctionCallRow, WaitingCall
from cavvy.capabilities.functions.schema import describe_function
from cavvy.capabilities.functions.stored_calls import CallKeeper, read_kept
from cavvy.capabilities.functions.tunnel import _read_address
from cavvy.client.tunnel import RemoteError
from cavvy.domain.jobs import JobPhase


class Owner:
    """Stands for what stores how calls ended."""

    def __init__(self) -> None:
        self.stored: list[EndedCall] = []
        self.room = 1000

    async def find_room(self, project: str, wanted: int) -> int:
        return self.room

    def note_kept(self, project: str, size: int) -> None:
        self.room -= size

    async def store_ended(self, ended: list[EndedCall]) -> None:
        self.stored += ended


class Writer:
    """Keeps the frames that are sent to the broker."""

    def __init__(self) -> None:
        self._frames, self.sent = CallFrames(), list[Head]()

    def write(self, data: bytes) -> None:
        self.sent += [head for head, _ in self._frames.feed(data)]

    async def drain(self) -> None:
        pass

    def list_numbers(self, op: str) -> list[int]:
        return [each["id"] for each in self.sent if each["op"] == op]


def make_session(calls: int, head: str = "{}") -> tuple[BrokerSession, Owner, Writer]:
    owner, writer = Owner(), Writer()
    given: Any = (owner, None, "functions/team/embed", {"f"}, set(), None, writer)
    session = BrokerSession(*given)
    for number in range(calls):
        call: Any = dict.fromkeys(FunctionCallRow.__struct_fields__, "")
        call |= {"id": f"call{number + 1}", "function": "f", "head": head, "body": b"x"}
        session._send_one(FunctionCallRow(**call))
    return session, owner, writer


async def test_long_results_wait_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "MOST_HELD", 10)
    session, owner, writer = make_session(3)
    for number in (1, 2, 3):
        session._hear({"op": "done", "id": number, "file": True, "size": 6}, b"")
    assert writer.list_numbers("fetch") == [1]
    session._hear({"op": "piece", "id": 1, "more": True}, b"abc")
    session._hear({"op": "piece", "id": 1, "more": False}, b"def")
    assert writer.list_numbers("fetch") == [1]  # it is not stored yet
    await session._put_ended()
    assert [(each.id, each.result) for each in owner.stored] == [("call1", b"abcdef")]
    assert writer.list_numbers("confirm") == [1]
    assert writer.list_numbers("fetch") == [1, 2]


LONG: Head = {"op": "done", "id": 1, "file": True, "size": 9}
PIECE: Head = {"op": "piece", "id": 1, "more": True}


@pytest.mark.parametrize(
    "frames",
    [
        [({"id": 1}, b"")],
        [({"op": "done", "id": [1]}, b"")],
        [({"op": "done", "id": 1, "file": True}, b"")],
        [({**LONG, "size": "many"}, b"")],
        [({**LONG, "size": float("inf")}, b"")],
        [({**LONG, "size": -1}, b"")],
        [(LONG, b""), (LONG, b"")],
        [({**LONG, "id": 2}, b""), (LONG, b""), (LONG, b"")],  # the second one waits
        [(LONG, b""), (PIECE, b"12345"), (PIECE, b"67890")],
        [({"op": "piece", "id": 1, "more": False}, b"")],
        [({"op": "done", "id": 1}, bytes(200_000))],
    ],
)
async def test_a_hostile_broker_only_loses_its_connection(
    frames: list[tuple[Head, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And fills no memory before that."""
    monkeypatch.setattr(dispatcher, "MOST_HELD", 10)
    session, owner, _ = make_session(2)
    session._reader = asyncio.StreamReader()
    for each in frames:
        session._reader.feed_data(pack(*each))
    session._reader.feed_eof()
    with pytest.raises(WrongFrame):
        await session._read()
    assert owner.stored == []


async def test_a_call_that_ends_otherwise_keeps_no_part_of_its_result() -> None:
    session, owner, _ = make_session(1)
    for head, body in ((LONG, b""), (PIECE, b"12345"), ({"op": "failed", "id": 1}, b"")):
        session._hear(head, body)
    assert not any((session._fetched, session._long, session._waiting))
    await session._put_ended()
    assert (owner.stored[0].state, session._held) == ("failed", {})


class Said:
    """Stands for a tunnel to a node whose command prints these pieces."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = [*pieces]

    async def run(self, **_: object) -> "Said":
        return self

    async def read(self) -> tuple[int, bytes] | None:
        return (0, self.pieces.pop(0)) if self.pieces else None


async def test_the_address_of_a_broker_is_short() -> None:
    said: Any = Said(b'{"port": 80, ', b'"key": "k"}')
    assert await _read_address(said) == (80, "k")
    said = Said(*[bytes(1000)] * 100)
    with pytest.raises(RemoteError, match="no address of the broker"):
        await _read_address(said)
    assert len(said.pieces) == 95
    for wrong in (b"", b"[1]", b"{}", b'{"port": [], "key": ""}', b"\xff", b"[" * 4000):
        said = Said(wrong)
        with pytest.raises(RemoteError, match="no address of the broker"):
            await _read_address(said)


async def test_results_for_callers_by_json_must_be_json() -> None:
    session, owner, _ = make_session(3, '{"enc": "json", "reply": "json"}')
    for number, body in ((1, b"[1, null]"), (2, pickle.dumps(1)), (3, b"[" * 100_000)):
        session._hear({"op": "done", "id": number}, body)
    await session._put_ended()
    assert [each.state for each in owner.stored] == ["done", "failed", "failed"]
    assert [each.result for each in owner.stored] == [b"[1, null]", b"", b""]


@pytest.mark.parametrize(
    "ran_s", [1.5, pytest.param(10**400, id="long"), float("inf"), float("nan"), -1, "1", None]
)
async def test_what_a_broker_tells_of_a_failure_can_be_stored(ran_s: object) -> None:
    """An app's error names a file whose name is no UTF-8; the other calls go on."""
    session, owner, _ = make_session(2)
    text = "no file a\udcff"
    told = {"kind": text, "type": text, "text": text, "trace": text, "ran_s": ran_s}
    session._hear({"op": "failed", "id": 1, **told}, b"")
    session._hear({"op": "done", "id": 2}, b"two")
    await session._put_ended()
    failed, done = owner.stored
    end = decode(failed.answer, type=wire.CallEnd)
    assert (failed.state, end.kind, end.text, end.trace) == ("failed", *["no file a?"] * 3)
    assert end.ran_s == (1.5 if ran_s == 1.5 else None)
    assert done.result == b"two"


async def test_a_broker_that_does_not_answer_is_dialled_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dials, looks = [], 30
    queued: Any = SimpleNamespace(id="job", phase=JobPhase.QUEUED)

    def dial(meet: str) -> None:
        dials.append(meet)
        raise TimeoutError

    async def find_jobs(_: list[str]) -> list[Any]:
        nonlocal looks
        looks -= 1
        return [queued] if looks > 0 else []

    async def find_job(*_: object) -> Any:
        return queued

    monkeypatch.setattr(dispatcher, "dial_here", dial)
    monkeypatch.setattr(dispatcher, "is_own_place", lambda _: True)
    monkeypatch.setattr(dispatcher, "_DIAL_S", 0.0)
    monkeypatch.setattr(dispatcher, "_PAUSE_S", 3600.0)
    monkeypatch.setattr(dispatcher, "_DIAL_PAUSE_S", 3600.0)
    state: Any = SimpleNamespace(store=SimpleNamespace(find_jobs=find_jobs))
    owner: Any = None
    calls = dispatcher.AppCalls(owner, state, "functions/team/embed")
    monkeypatch.setattr(calls, "_find_job", find_job)
    document = wire.AppPartAsk(text="", origin=Raw(b"{}"), snapshot="", meet="here", functions=[])
    part: Any = SimpleNamespace(document=encode(document))
    assert await calls._connect(part, set()) is None
    assert dials == ["here"]


async def test_results_that_the_project_has_no_room_for() -> None:
    """The calls fail, and those with short results go on."""
    session, owner, _ = make_session(4)
    owner.room = 5
    for number, size in enumerate((4, 2, 1, 0), 1):
        session._hear({"op": "done", "id": number}, bytes(size))
    await session._put_ended()
    assert [(each.state, len(each.result)) for each in owner.stored] == [
        ("done", 4),
        ("failed", 0),
        ("done", 1),
        ("done", 0),
    ]
    assert "may have 10,737,418,240 bytes" in owner.stored[1].answer
    assert owner.room == 0


class Bomb:
    """A value whose loading runs code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return explode, ()


class Exploded(Exception):
    """Raised if a pickle was loaded."""


def explode() -> None:
    raise Exploded


@pytest.mark.parametrize("state", ["done", "failed"])
def test_who_does_not_trust_an_app_loads_no_pickle(state: str) -> None:
    failed = wire.CallEnd(kind="error", type="ValueError", text="no")
    found = wire.CallResult(
        id="c",
        function="f",
        state=state,
        json=False,
        end=failed if state == "failed" else wire.CallEnd(),
        result=pickle.dumps(Bomb()),
    )
    with pytest.raises(CallFailed):
        read_kept(found, JsonCodec())
    if state == "done":  # who trusts the app does
        with pytest.raises(Exploded):
            read_kept(found, PickleCodec())


def test_the_same_arguments_have_the_same_key() -> None:
    def pay(order: str, amount: int = 1, *rest: int, note: str = "x", **more: int) -> None: ...

    schema, _ = describe_function(pay, bound=False)
    function = Function(App.looked_up("shop"), "pay", None, FunctionOptions())
    keeper = CallKeeper("p", "shop", PickleCodec(), once=True, consent=False, schema=schema)

    def make(*args: Any, **kwargs: Any) -> str:
        return keeper._make_key(function, args, kwargs)

    text = "".join(["no", "te"])  # equal to the name of the argument, and another object
    same = [
        make("a"),
        make("a", 1),
        make(order="a"),
        make("a", note="x"),
        make(amount=1, order="a"),
    ]
    assert len({*same}) == 1
    assert make("note", note="note") == make(text, note=text)
    assert make({"a": 1, "b": [2]}) == make({"b": [2], "a": 1})
    others = [
        ("a", 2),
        ("a", 1, 2),
        ("a", 1.0),
        ("a", True),
        ("a", "1"),
        (["a"],),
        (("a",),),
        ("b",),
    ]
    assert len({*(make(*each) for each in others), make("a", note="y"), *same}) == 10
    assert make("a", 1, 2) != make("a", 1, note=2)
    assert make({1: "a"}) != make({"1": "a"})


class Stored:
    """Stands for the rows of calls: three of each of many tenants, and a call without a key."""

    def __init__(self, tenants: int) -> None:
        keys = [f'["{at}"]' for at in range(tenants) for _ in range(3)]
        self.calls = {
            f"c{at:06}": WaitingCall("f", CallPlace(0, at, f"c{at:06}"), 1, key)
            for at, key in enumerate([*keys, ""])
        }

    async def list_next(
        self, project: str, app: str, function: str, after: CallPlace | None, most: int
    ) -> list[WaitingCall]:
        behind = [each for each in self.calls.values() if after is None or each.place > after]
        return behind[:most]

    async def get(self, project: str, app: str, ids: list[str]) -> list[FunctionCallRow]:
        empty: Any = dict.fromkeys(FunctionCallRow.__struct_fields__, "")
        return [
            FunctionCallRow(
                **empty
                | {"id": each, "function": "f", "head": "{}", "body": b"x"}
                | {"limit_keys": self.calls[each].limit_keys}
            )
            for each in ids
        ]


async def test_keys_without_room_keep_no_other_call_from_being_sent() -> None:
    session, owner, writer = make_session(0)
    stored = Stored(tenants=1000)
    session._owner.rows = owner.rows = stored  # type: ignore[assignment,attr-defined]
    for _ in range(8):
        sent = len(writer.sent)
        session._scan_at = 0.0
        await session._send_more()
        for head in writer.sent[sent:]:
            if head["op"] == "call" and head["key"] != "c003000":
                session._hear({"op": "waits", "id": head["id"], "text": "the limit"}, b"")
        session._hear({"op": "waits", "id": 1, "text": "twice"}, b"")
    sent_keys = {head["key"] for head in writer.sent if head["op"] == "call"}
    assert "c003000" in sent_keys  # although 3,000 calls before it wait for their limits
    assert session._flight["f"] == 1
    assert set(session._held_keys.values()) <= {2, 3}
    first = writer.sent[0]
    session._hear({"op": "done", "id": first["id"]}, b"1")
    await session._put_ended()
    assert session._more
    assert sum(session._held_keys.values()) == len(sent_keys) - 2
