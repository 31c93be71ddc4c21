"""What maintenance of hosts means for their work: pure decisions."""

from datetime import UTC, datetime, timedelta

from tests.records import FIXED, TASK, make_attempt_record, make_job_record

from cavvy.control.decide.maintenance import make_work
from cavvy.control.decide.standby import HANDOVER
from cavvy.domain.allocations import Host
from cavvy.domain.maintenance import NodeState
from cavvy.domain.offers import Offer
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.scheduler.maintenance import NodeWork, close_hosts, close_offers, decide_drain

NOW = datetime(2026, 1, 1, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
WORK = NodeWork(gang="g", notice=MINUTE)
HOSTS = [
    Host(name=f"ssh/{name}", cpus=8, memory_mib=1024, devices=("0", "1"), group="ssh/rack")
    for name in ("a", "b")
]
CORDONED = NodeState(name="ssh/a", cordoned_at=NOW, user="ann", reason="fan")


def test_work_that_saves_leaves_at_once_and_other_work_at_the_end() -> None:
    work = [
        NodeWork(gang="saves", notice=MINUTE, saves=True),
        NodeWork(gang="ends", notice=2 * MINUTE),
        NodeWork(gang="idle", notice=MINUTE, idle=True),
        NodeWork(gang="goes", notice=MINUTE, leaving=True),
        NodeWork(gang="went", notice=MINUTE, leaving=True, idle=True),
    ]
    step = decide_drain(work, NOW + 10 * MINUTE, NOW)
    assert step.leave == {"saves": NOW + MINUTE}
    assert step.release == ["idle"]
    assert step.again_at == NOW + 8 * MINUTE, "the notice ends when the host is to be empty"
    later = decide_drain(work[1:2], NOW + 10 * MINUTE, NOW + 8 * MINUTE)
    assert later.leave == {"ends": NOW + 10 * MINUTE}
    assert later.again_at is None


def test_work_gets_its_whole_notice_even_if_no_time_is_left() -> None:
    for by in (NOW, NOW - MINUTE, NOW + MINUTE / 2):
        assert decide_drain([WORK], by, NOW).leave == {"g": NOW + MINUTE}
    assert decide_drain([], NOW, NOW).again_at is None


def test_a_cordoned_host_is_not_ready_and_says_why() -> None:
    closed, other = close_hosts(HOSTS, {"ssh/a": CORDONED, "ssh/gone": CORDONED})
    assert (closed.ready, closed.cordoned) == (False, True)
    assert closed.problem == "cordoned by ann (fan)"
    assert other is HOSTS[1]
    (back, _) = close_hosts(HOSTS, {"ssh/a": NodeState(name="ssh/a")})
    assert back is HOSTS[0], "a state without an order changes nothing"


def test_a_sick_device_is_not_used() -> None:
    host = close_hosts(HOSTS, {"ssh/a": NodeState(name="ssh/a", sick={"0": "Xid 79"})})[0]
    assert (host.devices, host.ready, host.notes) == (("1",), True, ("0: Xid 79",))


def test_a_device_that_its_driver_calls_faulty_is_not_used() -> None:
    sick = replace(HOSTS[0], sick=(("1", "3 errors"), ("gone", "x")), kinds=("gpu", "gpu"))
    host = close_hosts([sick, HOSTS[1]], {})[0]
    assert (host.devices, host.kinds, host.notes) == (("0",), ("gpu",), ("1: 3 errors",))
    offers = [
        Offer(
            provider="ssh",
            region="rack",
            zone=zone,
            instance_type="gpu",
            accelerator="gpu",
            accelerator_count=count,
            rate=HourlyRate(0),
            shared=True,
            capacity=1 if zone else 2,
        )
        for zone in ("a", None)
        for count in (1, 2)
    ]
    hosts = [host, HOSTS[1]]
    assert [each.capacity for each in close_offers(offers, hosts, {"ssh/a"})] == [1, 0, 2, 1]


def test_offers_have_the_capacity_of_the_hosts_that_are_left() -> None:
    offers = [
        Offer(
            provider="ssh",
            region="rack",
            zone=zone,
            instance_type="x",
            rate=HourlyRate(0),
            shared=True,
            capacity=capacity,
        )
        for zone, capacity in (("a", 1), ("b", 1), (None, 2))
    ]
    hosts = close_hosts(HOSTS, {"ssh/a": CORDONED})
    assert [each.capacity for each in close_offers(offers, hosts, {"ssh/a"})] == [0, 1, 1]
    assert close_offers(offers, HOSTS, set()) == offers


def test_work_gets_the_grace_of_its_task() -> None:
    def notice(minutes: int) -> timedelta:
        job = make_job_record(NOW, task=replace(TASK, grace=minutes * MINUTE))
        return make_work(make_attempt_record(NOW, FIXED), job).notice

    assert notice(5) == 5 * MINUTE
    assert notice(0) == HANDOVER
