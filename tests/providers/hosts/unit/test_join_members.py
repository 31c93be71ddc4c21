"""Who may join, and the numbered lines between a joined machine and us."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest

from cavvy.providers.abilities import JoinTerms
from cavvy.providers.base import NotFound, Refused
from cavvy.providers.hosts.connection import CannotConnect
from cavvy.providers.hosts.fleet.host_link import HostSetup
from cavvy.providers.hosts.remote_calls import LinkLost
from cavvy.providers.join.host_link import JoinLink
from cavvy.providers.join.members import MachineRegister
from cavvy.providers.join.sessions import MachineSessions
from cavvy.providers.state import MemoryProviderState

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
REMOTE = HostSetup(root="/r", cache="/c", agent=("a",), supervisor=("s",))


class Clock:
    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> datetime:
        return self.now


async def test_a_token_is_good_for_one_machine_and_for_its_time() -> None:
    clock, state = Clock(), MemoryProviderState()
    members = MachineRegister(state, clock)
    rack = {"rack": "r1"}
    token, expires = await members.invite(
        JoinTerms(name=None, group="lab", valid=HOUR, labels=rack)
    )
    assert expires == NOON + HOUR
    member, own = await members.enter(token, "nonce", "Gpu Box.example.com")
    assert (member.name, member.group, member.labels) == ("gpu-box", "lab", rack)
    assert await members.enter(token, "nonce", "gpu-box") == (member, own)  # a lost answer
    with pytest.raises(Refused, match="gpu-box has used"):
        await members.enter(token, "another", "gpu-box")
    late, _ = await members.invite(JoinTerms(name=None, group=None, valid=HOUR))
    clock.now += HOUR
    with pytest.raises(Refused, match="has expired"):
        await members.enter(late, "nonce", "x")
    assert (await members.enter(token, "nonce", "gpu-box"))[1] == own  # it joined in time
    with pytest.raises(Refused, match="unknown"):
        await members.enter("made-up", "nonce", "x")
    kept = [each.body for name in ("machines", "invitations") for each in await state.read(name)]
    assert not any(secret in body for secret in (token, own) for body in kept)


async def test_a_session_begins_when_the_machine_joins() -> None:
    clock = Clock()
    members = MachineRegister(MemoryProviderState(), clock)
    token, _ = await members.invite(JoinTerms(name=None, group=None, valid=HOUR, session=12 * HOUR))
    clock.now += HOUR / 2
    member, _ = await members.enter(token, "nonce", "colab")
    assert member.ends_at == NOON + 12.5 * HOUR
    clock.now += HOUR
    assert (await members.enter(token, "nonce", "colab"))[0].ends_at == member.ends_at


async def test_names_are_free_or_refused_and_a_dismissed_token_opens_nothing() -> None:
    state = MemoryProviderState()
    members = MachineRegister(state, Clock())
    tokens = [
        (await members.invite(JoinTerms(name=None, group=None, valid=HOUR)))[0] for _ in range(2)
    ]
    named, _ = await members.invite(JoinTerms(name="box", group=None, valid=HOUR))
    owns = [
        (await members.enter(token, f"nonce{number}", "box"))[1]
        for number, token in enumerate(tokens)
    ]
    assert sorted(members.all) == ["box", "box-2"]
    with pytest.raises(Refused, match="box has already joined"):
        await members.enter(named, "nonce", "x")
    with pytest.raises(Refused, match="a-z"):
        await members.invite(JoinTerms(name="../x", group=None, valid=HOUR))
    with pytest.raises(Refused, match="cannot be the value of label rack"):
        await members.invite(JoinTerms(name="y", group=None, valid=HOUR, labels={"rack": "r 1"}))
    again = MachineRegister(state, Clock())  # the next server
    assert (await again.find(owns[0])).name == "box"
    await again.drop("box")
    with pytest.raises(Refused, match="dismissed"):
        await again.find(owns[0])
    with pytest.raises(NotFound):
        await again.drop("box")
    assert (await MachineRegister(state, Clock()).find(owns[1])).name == "box-2"


@dataclass
class _Nothing:
    """An answer without content."""


def play(scenario: "Callable[[JoinLink, list[str | None]], object]") -> None:
    async def run() -> None:
        changed: list[str | None] = []
        await scenario(
            JoinLink(
                "m", changed.append, Clock(), MachineSessions("join", MemoryProviderState(), None)
            ),
            changed,
        )  # type: ignore[misc]  # each is a coroutine

    asyncio.run(run())


def test_lines_come_once_and_in_order_whatever_is_repeated() -> None:
    async def scenario(line: JoinLink, changed: list[str | None]) -> None:
        with pytest.raises(CannotConnect):
            await line.ask("look", _Nothing)
        line.begin("s1", REMOTE)
        asked = asyncio.create_task(line.ask("look", _Nothing))
        ((number, text),) = await line.listen("s1", 0, 5) or ()
        assert (number, '"do":"look"' in text) == (1, True)
        assert await line.listen("s1", 0, 0) == [(1, text)]  # its answer was lost
        assert await line.listen("s1", 1, 0) == []
        assert line.take("s1", 2, ['{"changed":"later"}']) == 1  # a gap: asked for again
        assert line.take("s1", 1, ['{"changed":"g"}', '{"id":1,"answer":{}}']) == 3
        assert line.take("s1", 1, ['{"changed":"g"}', '{"id":1,"answer":{}}']) == 3
        await asked
        assert changed == [None, "g"]

    play(scenario)


def test_a_new_session_drops_what_was_asked_of_the_old_one() -> None:
    async def scenario(line: JoinLink, changed: list[str | None]) -> None:
        line.begin("s1", REMOTE)
        asked = asyncio.create_task(line.ask("look", _Nothing))
        listening = asyncio.create_task(line.listen("s1", 1, 20))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        line.begin("s2", REMOTE)
        with pytest.raises(LinkLost):
            await asked
        assert await listening is None
        assert line.take("s1", 1, ["{}"]) is None
        assert line.up

    play(scenario)
