"""A job, an attempt of it and offers, for tests that care for some of their fields."""

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta
from functools import cache
from typing import Any

from cavvy.domain.jobs import Attempt, JobRecord
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.providers.base import AgentEndpoint, GangSpec
from cavvy.providers.hosts.fleet.machines import SupervisorFacts
from cavvy.store.snapshot.reader import list_prices


def make_offer(place: str, micros: int, **fields: Any) -> Offer:
    """An offer of "PROVIDER/REGION/TYPE" or "PROVIDER/REGION/ZONE/TYPE" for so much an hour."""
    provider, region, *zone, kind = place.split("/")
    where = {"provider": provider, "region": region, "zone": zone[0] if zone else None}
    return Offer(**where, instance_type=kind, rate=HourlyRate(micros), **fields)


TASK = TaskSpec(name="n", run="x")
FIXED = make_offer("fake/r/a/m", 1_000_000, vcpus=8, memory_mib=32768)
FACTS = SupervisorFacts(  # of a host
    system="Linux", hostname="x", user="ann", python="3.9.2", address="10.0.0.1", cpus=8,
    memory_mib=4096, disk_gib=100,
)  # fmt: skip
SPOT = replace(FIXED, purchase=Purchase.SPOT, rate=HourlyRate(300_000))


def pick_prices(types: Collection[str] | None = None) -> Callable[[str], Sequence[Offer]]:
    """A reader of the catalog's prices of these types, or of all, which reads each provider's once."""

    @cache
    def read(provider: str) -> Sequence[Offer]:
        found = list_prices(provider)
        return found if types is None else [each for each in found if each.instance_type in types]

    return read


def make_gang_spec(offer: Offer, **changes: Any) -> GangSpec:
    """The gang `rm-1` of one node at this offer."""
    usual = {"name": "rm-1", "installation": "i", "nodes": 1, "lease": timedelta(hours=1)}
    agent = AgentEndpoint(address="unix:/x", token="t")
    return GangSpec(**{"offer": offer, "agent_endpoint": agent, **usual, **changes})


def make_job_record(now: datetime, **changes: Any) -> JobRecord:
    """The job `j` of the project `p`, submitted now."""
    usual = {"id": "j", "project": "p", "name": "n", "task": TASK}
    return JobRecord(**{**usual, "submitted_at": now, "since": now, **changes})


def make_attempt_record(now: datetime, offer: Offer, **changes: Any) -> Attempt:
    """The first attempt of the job `j`, made now: the gang `g` of one node at this offer."""
    usual = {"id": "j-1", "job_id": "j", "project": "p", "number": 1, "gang": "g", "nodes": 1}
    return Attempt(**{**usual, "offer": offer, "created_at": now, "since": now, **changes})


def words_of(states: Mapping[Any, str]) -> list[tuple[str, Any]]:
    """Each word by which an API names a state, and the state, of a table of STATE: "WORD WORD"."""
    return [(word, state) for state, words in states.items() for word in words.split()]
