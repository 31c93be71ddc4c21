"""What looks at hosts mean for a gang: unknown, lost, over, and in whose words."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from cavvy.domain.values import replace
from cavvy.providers.hosts.fleet.launch_ledger import FleetIntent
from cavvy.providers.hosts.fleet.status import (
    AgentExit,
    GangOnHost,
    HostLook,
    RankSeen,
    RankState,
    RankStatus,
    SilentHost,
    close_gang,
    see_living,
    view_ranks,
)

T0 = datetime(2030, 1, 1, tzinfo=UTC)
NOW = T0 + timedelta(hours=1)
INTENT = FleetIntent(
    name="g",
    installation="i",
    hosts=["a", "b"],
    addresses=["10.0.0.1", "10.0.0.2"],
    launched_at=T0,
    grace_s=1,
    launched=True,
)
RUNS = RankSeen(rank=0, state=RankState.RUNS, pid=7)
OVER = RankSeen(
    rank=0,
    state=RankState.OVER,
    pid=7,
    at=900.0,
    in_order=True,
    exit=AgentExit(exit_code=3, reason="it said 3"),
)


def look(rank: RankSeen | None, number: int = 0, now: float = 1000.0) -> HostLook:
    return HostLook(
        now=now, gangs=[GangOnHost(name="g", ranks=[replace(rank, rank=number)])] if rank else []
    )


def views(
    a: HostLook | SilentHost, b: HostLook | SilentHost, intent: FleetIntent = INTENT
) -> Sequence[RankStatus]:
    found = view_ranks(intent, {"a": a, "b": b}, NOW)
    assert found is not None
    return found


def test_ends_are_on_our_clock_whatever_the_hosts_says() -> None:
    ranks = views(look(OVER, now=1000.0), look(replace(OVER, at=5e9), 1, now=5e9 + 60))
    assert [rank.ended_at for rank in ranks] == [
        NOW - timedelta(seconds=100),
        NOW - timedelta(seconds=60),
    ]


def test_a_silent_host_is_unknown_until_it_is_dead() -> None:
    ranks = views(look(RUNS), SilentHost(problem="b: cut"))
    assert [(rank.known, rank.ended_at) for rank in ranks] == [(True, None), (False, None)]
    assert see_living(INTENT, ranks).reason == "b: cut"
    dead = views(look(RUNS), SilentHost(problem="b: cut", dead=True))
    assert (dead[1].ended_at, dead[1].unseen) == (NOW, True)  # billed until its last sighting
    seen = see_living(INTENT, dead)
    assert seen.nodes[0].ended_at is None
    assert (seen.nodes[1].ended_at, seen.nodes[1].unseen) == (NOW, True)
    assert "counts as dead" in seen.reason


def test_what_was_never_started_is_no_gang_and_what_was_deleted_is_lost() -> None:
    started = replace(INTENT, launched=False)
    assert view_ranks(started, {"a": look(RUNS), "b": look(None)}, NOW) is None
    assert views(look(RUNS), look(None))[1].ended_at == NOW
    removed = views(look(OVER), look(None), replace(started, removing=True))
    assert removed[1].ended_at == T0


def test_the_record_of_an_end() -> None:
    ended = close_gang(
        INTENT, views(look(OVER), look(replace(OVER, exit=AgentExit(exit_code=0)), 1)), NOW
    )
    assert (ended.exit_code, ended.reason, ended.owing) == (3, "it said 3", [])
    assert [rank.engine_id for rank in ended.ranks] == ["a:7", "b:7"]
    killed = replace(OVER, in_order=False, exit=None, complaint="no space")
    assert (
        "killed or failed: no space"
        in close_gang(INTENT, views(look(killed), look(OVER, 1)), NOW).reason
    )
    anew = close_gang(INTENT, views(look(replace(killed, rebooted=True)), look(OVER, 1)), NOW)
    assert anew.reason == "a was rebooted"
    dead = close_gang(INTENT, views(look(OVER), SilentHost(problem="", dead=True)), NOW)
    assert dead.owing == ["b"]
    assert (
        close_gang(replace(INTENT, removing=True), views(look(OVER), look(OVER, 1)), NOW).reason
        == "removed"
    )
