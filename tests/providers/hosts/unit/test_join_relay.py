"""Joined machines and two servers: who has a machine's session, and what passes between servers."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import msgspec
import pytest
from tests.records import FACTS

from cavvy.domain.offers import Purchase
from cavvy.domain.values import Struct
from cavvy.providers.abilities import JoinTerms
from cavvy.providers.base import NoCapacity, NodeEndpoint, ProviderContext, Refused, TryAgain
from cavvy.providers.hosts.connection import CannotConnect
from cavvy.providers.hosts.remote_calls import LinkLost
from cavvy.providers.hosts.supervisor.frames import FrameReader, encode_frame
from cavvy.providers.join import MANIFEST
from cavvy.providers.join.provider import JoinProvider
from cavvy.providers.join.remote.machine import ServerAddresses
from cavvy.providers.join.sessions import (
    BundlesAnswer,
    HelloCall,
    ListenAnswer,
    ListenCall,
    SayAnswer,
    SayCall,
)
from cavvy.providers.state import MemoryProviderState

NOW = datetime(2026, 1, 1, tzinfo=UTC)


class Echo(Struct, frozen=True):
    """A supervisor's answer in these tests."""

    told: str


class Site:
    """Two servers, `a` and `b`, with one database."""

    def __init__(self, root: Path) -> None:
        self.alive, self.asked = {"a", "b"}, 0
        state = MemoryProviderState()
        self.servers = {name: self._make(name, root, state) for name in "ab"}

    def _make(self, name: str, root: Path, state: MemoryProviderState) -> JoinProvider:
        endpoint = NodeEndpoint(
            address=f"https://{name}:1",
            pin="",
            key_pin="",
            agent=lambda: "agent",
            pythons=dict,
            publish=lambda content: "file",
            claim_token=lambda gang, rank: "",
        )
        context = ProviderContext(
            installation="i",
            home=root,
            state=state,
            node_endpoint=endpoint,
            servers=Peers(self, name),
            now=lambda: NOW,
        )
        return JoinProvider(MANIFEST, context)


class Peers:
    """The servers of a site, as one of them sees them."""

    def __init__(self, site: Site, me: str) -> None:
        self.site, self.me = site, me

    @property
    def addresses(self) -> list[str]:
        return [f"https://{name}:1" for name in self.site.alive]

    def is_alive(self, server: str) -> bool:
        return server != self.me and server in self.site.alive

    async def ask(self, server: str, provider: str, call: str, body: bytes) -> bytes:
        assert provider == "join"
        if server not in self.site.alive:
            raise OSError("refused")
        self.site.asked += 1
        try:
            return await self.site.servers[server].answer_server(call, body)
        except TryAgain as error:
            raise OSError(str(error)) from error


class Box:
    """The machine. Its calls may go to any server."""

    def __init__(self, site: Site, token: str) -> None:
        self.site, self.token, self.said = site, token, 0

    async def call(self, server: str, call: str, fields: msgspec.Struct | dict[str, str]) -> bytes:
        provider = self.site.servers[server]
        return await provider.answer(call, self.token, msgspec.json.encode(fields))

    async def hello(self, server: str, session: str) -> None:
        self.said = 0
        bundles = await self.call(server, "bundles", {})
        msgspec.json.decode(bundles, type=BundlesAnswer)
        hello = HelloCall(
            session=session, root="/r", cache="/c", start=["python"], folder="/f", facts=FACTS
        )
        await self.call(server, "hello", hello)

    async def listen(self, server: str, session: str, after: int = 0) -> ListenAnswer:
        asked = ListenCall(session=session, after=after, wait_s=5)
        return msgspec.json.decode(await self.call(server, "listen", asked), type=ListenAnswer)

    async def say(self, server: str, session: str, answer: dict[str, object]) -> None:
        line = encode_frame(answer).decode().rstrip()
        said = SayCall(session=session, first=self.said + 1, lines=[line])
        taken = msgspec.json.decode(await self.call(server, "say", said), type=SayAnswer)
        self.said += 1
        assert (taken.next, taken.again) == (self.said + 1, False)

    async def supervise(
        self, hears: str, tells: str, session: str, **answer: object
    ) -> dict[str, object]:
        """Answer the next request, which is heard from one server and answered to another."""
        heard = await self.listen(hears, session)
        ((_, line),) = heard.lines
        ((head, _),) = FrameReader().feed(f"{line}\n".encode())
        await self.say(tells, session, {"id": head["id"], **answer})
        return dict(head)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


async def join(site: Site, server: str, session: timedelta | None = None) -> Box:
    provider = site.servers[server]
    valid = timedelta(hours=1)
    invited = await provider.invite(JoinTerms(name="box", group=None, valid=valid, session=session))
    token = invited.shell.split()[-1]
    entered = await provider.answer("enter", token, b'{"nonce": "n"}')
    box = Box(site, msgspec.json.decode(entered)["token"])
    await box.hello(server, "s1")
    return box


async def states(site: Site) -> dict[str, str]:
    found = {}
    for name, each in site.servers.items():
        (machine,) = await each.machines()
        found[name] = machine.state
    return found


async def ask(site: Site, server: str) -> Echo:
    return await site.servers[server]._lines["box"].ask("look", Echo, deep=[1])


async def during(work: Awaitable[object], wanted: Callable[[], Awaitable[object]]) -> object:
    """Await both at the same time, and return the result of the second."""
    running = asyncio.ensure_future(work)
    try:
        return await wanted()
    finally:
        await running


async def test_a_server_asks_through_the_one_that_has_the_session(site: Site) -> None:
    box = await join(site, "a")
    assert await states(site) == {"a": "up", "b": "up"}
    assert len(await site.servers["b"].hosts()) == 1
    for server, relayed in (("a", 0), ("b", 1)):
        await box.hello("a", "s1")
        await states(site)
        site.asked = 0
        told = box.supervise("a", "a", "s1", answer={"told": server})
        assert await during(told, partial(ask, site, server)) == Echo(server)
        assert site.asked == relayed


@pytest.mark.parametrize(
    ("kind", "error"), [("busy", NoCapacity), ("refused", Refused), ("", TryAgain)]
)
async def test_an_error_keeps_its_kind_between_servers(
    site: Site, kind: str, error: type[Exception]
) -> None:
    box = await join(site, "a")
    await states(site)
    told = box.supervise("a", "a", "s1", error="no", kind=kind)
    with pytest.raises(error, match="box: no") as raised:
        await during(told, lambda: ask(site, "b"))
    assert raised.type is error


async def test_calls_that_a_load_balancer_sends_elsewhere_are_passed_on(site: Site) -> None:
    box = await join(site, "a")
    told = box.supervise("b", "b", "s1", answer={"told": "far"})
    await states(site)
    assert await during(told, lambda: ask(site, "a")) == Echo("far")
    assert site.asked == 2  # `listen` and `say`
    assert (await box.listen("b", "unknown")).again


async def test_a_machine_that_moved_belongs_to_its_new_server(site: Site) -> None:
    box = await join(site, "a")
    await states(site)
    await box.hello("b", "s2")
    await states(site)
    told = box.supervise("b", "b", "s2", answer={"told": "moved"})
    assert await during(told, lambda: ask(site, "a")) == Echo("moved")
    assert (await box.listen("a", "s1")).again


async def test_a_machine_of_a_dead_server_is_down_until_it_calls_another(site: Site) -> None:
    box = await join(site, "a")
    await states(site)
    asked = site.servers["b"]._lines["box"]
    broken = Peers(site, "b")
    broken.is_alive = lambda server: True  # type: ignore[method-assign]  # not noticed yet
    asked._sessions._servers = broken
    site.alive.remove("a")
    with pytest.raises(LinkLost, match="does not answer"):
        await ask(site, "b")
    asked._sessions._servers = Peers(site, "b")
    with pytest.raises(CannotConnect):
        await ask(site, "b")
    assert (await box.listen("b", "s1")).again
    await box.hello("b", "s2")
    assert asked.up
    heard = asyncio.ensure_future(box.listen("b", "s2"))
    with suppress(TimeoutError):
        async with asyncio.timeout(0):
            await ask(site, "b")
    assert (await heard).servers == ["https://b:1"]


async def test_every_server_can_dismiss_and_sees_who_leaves(site: Site) -> None:
    box = await join(site, "a")
    await box.call("b", "leave", {"session": "s1"})
    await site.servers["a"]._tick()
    assert await states(site) == {"a": "leaving", "b": "leaving"}
    await box.call("b", "gone", {"session": "s1"})
    assert await states(site) == {"a": "left", "b": "left"}
    await box.hello("a", "s2")
    assert await states(site) == {"a": "up", "b": "up"}
    await site.servers["b"].dismiss("box")
    await site.servers["a"]._tick()
    assert (await box.listen("a", "s2")).leave
    await box.call("a", "gone", {"session": "s2"})
    assert await site.servers["b"].machines() == []


async def test_servers_and_machines_have_calls_of_their_own(site: Site) -> None:
    await join(site, "a")
    for call, body in (("listen", b"{}"), ("call", b'{"name": "x", "call": "hello", "body": 1}')):
        with pytest.raises(Exception, match=r"cannot make the call|no joined machine"):
            await site.servers["a"].answer_server(call, body)
    with pytest.raises(Refused):
        await site.servers["a"].answer_server("ask", b"[]")


def test_a_machine_tries_the_next_address_once_for_each_failure() -> None:
    known = ServerAddresses("https://first:1", [])
    known.leave("https://first:1")
    assert known.current == "https://first:1"  # it knows no other
    assert known.learn(["https://a:1", "https://first:1"])
    assert not known.learn(["https://a:1", "https://first:1"])
    known.leave("https://first:1")
    known.leave("https://first:1")  # another thread has failed with the same address
    assert known.current == "https://a:1"
    known.learn(["https://b:1"])
    known.leave("https://a:1")  # which is known no more
    assert known.current == "https://first:1"


async def test_a_notebook_that_ends_is_spot_and_leaves_in_time(site: Site) -> None:
    await join(site, "a", session=timedelta(hours=12))
    provider, end = site.servers["a"], NOW + timedelta(hours=12)
    for minutes, capacity in ((60, 1), (10, 0)):
        provider._now = lambda minutes=minutes: end - timedelta(minutes=minutes)
        offers = await provider.offers()
        assert {(each.purchase, each.ends_at, each.capacity) for each in offers} == {
            (Purchase.SPOT, end, capacity)
        }
        await provider._tick()
        assert (await states(site))["a"] == "up"
    provider._now = lambda: end - timedelta(minutes=2)
    await provider._tick()
    assert (await states(site))["a"] == "leaving"
