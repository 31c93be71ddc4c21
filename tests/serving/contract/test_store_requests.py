"""The bills of replicas, divided among requests: exact whatever is killed, on all databases."""

import random
from collections import Counter
from collections.abc import Awaitable, Callable
from copy import deepcopy
from datetime import timedelta
from typing import cast

import pytest
from tests.contract.store_suite import NOW, after, begin, make_charge, submit

from cavvy.capabilities.serving.bill_rows import bills_of
from cavvy.capabilities.serving.bills import KeyWork, RequestWork, name_api
from cavvy.capabilities.serving.control.request_bills import COUNTED_SINCE, RequestBills
from cavvy.capabilities.serving.replicas import ReplicaState, ServiceReplica
from cavvy.capabilities.serving.service_rows import services_of
from cavvy.capabilities.serving.stored_services import ServiceKey, StoredService
from cavvy.control.budgets import post_discounts
from cavvy.costs.discounts import parse_discounts
from cavvy.domain.jobs import Attempt, AttemptPhase
from cavvy.domain.ledger import QuantityUnit, TokenUse
from cavvy.domain.services import FallbackApi, FallbackRule, ServiceSpec
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.values import replace
from cavvy.store.base import AtomicWrite, LedgerFilter, StaleVersion
from cavvy.store.drivers import DatabaseSession
from cavvy.store.sql import Store

ALL = LedgerFilter()
TASK = TaskSpec(name="chat", run="serve", service=ServiceSpec(port=80), tags={"service": "chat"})
KEYS = (ServiceKey(id="k1", sha256="", label="web", created_at=NOW),)


async def start(store: Store, job_id: str) -> tuple[ServiceReplica, Attempt]:
    job = await submit(store, job_id, name=job_id, user="ada", task=replace(TASK, name=job_id))
    replica = ServiceReplica(
        id=job_id,
        service="chat",
        revision=1,
        state=ReplicaState.READY,
        ordered_at=NOW,
        ready_at=after(20),
    )
    return replica, await begin(store, job)


def make_service(*replicas: ServiceReplica) -> StoredService:
    return StoredService(
        project="p", name="chat", id="s1", task=TASK, created_at=NOW, replicas=replicas, keys=KEYS
    )


def work(epoch: str = "g", requests: int = 1, **work_s: dict[str, float]) -> RequestWork:
    counts = {
        replica: {
            key: KeyWork(requests=requests, work_us=int(seconds * 1e6))
            for key, seconds in of_key.items()
        }
        for replica, of_key in work_s.items()
    }
    return {epoch: counts}


def tell(found: RequestWork | None) -> Callable[[], Awaitable[RequestWork | None]]:
    async def read() -> RequestWork | None:
        return found

    return read


async def count_requests(store: Store) -> int:
    lines = await store.ledger_lines(ALL)
    return sum(each.entry.quantity for each in lines if each.entry.unit is QuantityUnit.REQUESTS)


async def sums(store: Store, *by: str) -> dict[tuple[str, ...], int]:
    found = await store.sum_ledger(ALL, by)
    return {tuple(each.groups.values()): each.amount.micros for each in found}


async def test_the_first_answers_of_a_service_are_in_the_ledger_at_once(store: Store) -> None:
    """Who tries a service looks for its tokens; later ones are divided with the next charges."""
    replica, attempt = await start(store, "r1")
    service, bills = make_service(replica), RequestBills(store)
    await store.commit(AtomicWrite(charges=[make_charge(attempt, 1001, until=100)]))
    await bills.divide(service, tell(None), after(100))
    await bills.divide(service, tell({}), after(101), answered=True)
    await bills.divide(service, tell(work(r1={"k1": 30.0})), after(103), answered=True)
    assert await count_requests(store) == 0, "the service was looked at a moment ago"
    await store.commit(AtomicWrite(charges=[make_charge(attempt, 1051, until=105)]))
    await bills.divide(service, tell(work(r1={"k1": 30.0})), after(106), answered=True)
    first = await count_requests(store)
    assert first > 0
    await store.commit(AtomicWrite(charges=[make_charge(attempt, 1101, until=110)]))
    await bills.divide(service, tell(work(r1={"k1": 30.0, "": 5.0})), after(115), answered=True)
    assert await count_requests(store) == first


async def test_requests_cold_start_and_idle_add_up_to_the_bill(store: Store) -> None:
    replica, attempt = await start(store, "r1")
    service, bills = make_service(replica), RequestBills(store)
    await store.commit(AtomicWrite(charges=[make_charge(attempt, 1001, until=100)]))
    told = tell(work(r1={"k1": 30.0, "": 10.0}))
    await bills.divide(service, told, after(100))
    await bills.divide(service, told, after(110))  # not due
    await RequestBills(store).divide(service, told, after(120))  # another server
    expected = {"request": 400, "cold start": 200, "idle": 401, "node": 0}
    assert await sums(store, "service", "kind") == {
        ("chat", kind): amount for kind, amount in expected.items()
    }
    assert (await sums(store, "service", "key"))["chat", "web"] == 300
    assert await sums(store, "user", "job") == {("ada", "r1"): 1001}
    assert await store.spent("p") == await store.spent("p", after(-1))
    # the service ends, and later the provider corrects the bill
    await store.commit(AtomicWrite(charges=[make_charge(attempt, 1501, until=150)]))
    await bills.divide(service, tell(None), after(150), last=True)
    done = replace(attempt, phase=AttemptPhase.ENDED, ended_at=after(150))
    await store.commit(AtomicWrite(attempts=[done]))
    assert await bills_of(store).late_replicas() == []
    await store.commit(AtomicWrite(charges=[make_charge(attempt, 1400, until=140)]))
    assert await bills_of(store).late_replicas() == ["r1"]
    await bills.sweep()
    found = await sums(store, "kind")
    assert found["idle",] + found["request",] + found["cold start",] == 1400
    await post_discounts(store, parse_discounts("fake:10%"), after(200))
    (total,) = await store.sum_ledger(ALL, ("service",))
    assert (total.amount.micros, total.jobs) == (1260, 1)


async def test_what_an_api_answered_is_billed_once(store: Store) -> None:
    api = FallbackApi(model="big", prices=(1_000_000, 3_000_000))  # $1 and $3
    spec = replace(TASK.service or ServiceSpec(), fallbacks=(FallbackRule(api=api),))
    task = replace(TASK, service=spec, tags={"team": "nlp"})
    service = replace(make_service(), task=task, user="ada")

    def told(prompt: int, requests: int) -> Callable[[], Awaitable[RequestWork | None]]:
        use = TokenUse(prompt=prompt, cached=1, completion=50)
        count = KeyWork(requests=requests, work_us=1, tokens={"tiny": use})
        return tell({"g": {name_api(api.url, api.model): {"k1": count}}})

    bills = RequestBills(store)
    await bills.divide(service, told(100, 1), after(100))
    await RequestBills(store).divide(service, told(100, 1), after(200))  # another server
    assert await sums(store, "provider", "service", "key", "user", "instance") == {
        ("api.openai.com", "chat", "web", "ada", "big"): 250
    }
    # budgets for a tag count it, as they count the replicas
    assert await sums(store, "tag:team") == {("nlp",): 250}
    without = replace(service, task=TASK)  # an update, since when the API had requests
    await bills.divide(without, told(300, 3), after(300), last=True)
    await RequestBills(store).divide(service, told(100, 1), after(400), last=True)  # is older
    assert await sums(store, "kind") == {("request",): 450}
    assert await count_requests(store) == 3
    (tokens,) = (await store.meters.sum_tokens(ALL, ("key",))).values()
    assert tokens == {"tiny": TokenUse(prompt=300, cached=1, completion=50)}
    assert (await store.spent("p")).micros == 450
    # without a price, tokens and requests are counted
    free = FallbackRule(api=replace(api, url="https://free.example/v1", prices=None))
    service = replace(service, task=replace(TASK, service=replace(spec, fallbacks=(free,))))
    other = KeyWork(requests=2, work_us=1, tokens={"tiny": TokenUse(prompt=7)})
    assert free.api is not None
    told_free = tell({"g": {name_api(free.api.url, free.api.model): {"": other}}})
    await RequestBills(store).divide(service, told_free, after(500))
    assert await count_requests(store) == 5
    assert (await store.spent("p")).micros == 450


async def test_requests_of_a_fallback_are_billed_by_the_labels_of_their_keys(store: Store) -> None:
    replica, attempt = await start(store, "r1")
    app = ServiceKey(id="k9", sha256="", label="app", created_at=NOW)
    secret = replace(app, id="k8", label="of another project")
    front = replace(make_service(), name="front", id="s2", keys=(app,))
    foreign = replace(front, project="q", id="s3", keys=(secret,))
    for each in (front, foreign):
        await services_of(store).put(each)
    await store.commit(AtomicWrite(charges=[make_charge(attempt, 1000, until=100)]))
    told = tell(work(r1={"k1": 10.0, "k9": 10.0, "k8": 10.0}))
    await RequestBills(store).divide(make_service(replica), told, after(100))
    found = await sums(store, "key")
    assert {key for (key,) in found} == {"", "web", "app", "k8"}


async def test_bills_from_before_requests_were_counted_stay_as_they_were(store: Store) -> None:
    """An update finds replicas that ended long ago, and one that runs."""
    await store.put_fact(COUNTED_SINCE, str(after(100).replace(tzinfo=None)))
    replica, attempt = await start(store, "r1")
    _, old = await start(store, "old")
    ended = replace(old, phase=AttemptPhase.ENDED, ended_at=after(50))
    charges = [make_charge(attempt, 1000, until=100), make_charge(old, 500, until=50)]
    await store.commit(AtomicWrite(charges=charges, attempts=[ended]))
    bills, service = RequestBills(store), make_service(replica)
    assert await bills_of(store).late_replicas() == ["old"]
    await bills.sweep()
    await bills.divide(service, tell(work(r1={"k1": 3.0})), after(100))
    assert await bills_of(store).late_replicas() == []
    assert await sums(store, "kind") == {("node",): 1500}
    await store.commit(AtomicWrite(charges=[make_charge(attempt, 1200, until=200)]))
    await bills.divide(service, tell(work(r1={"k1": 28.0})), after(200))
    assert await sums(store, "kind") == {("node",): 1500, ("request",): 50, ("idle",): 150}
    await store.commit(AtomicWrite(charges=[make_charge(old, 400, until=40)]))
    await bills.sweep()
    assert (await sums(store))[()] == 1600


class LosingStore:
    """Loses the reply of a write, or refuses it, as a server that is killed does."""

    def __init__(self, store: Store, dice: random.Random) -> None:
        read, write = store.database

        async def lose(change: Callable[[DatabaseSession], object]) -> object:
            if dice.random() < 0.2:
                raise ConnectionError("killed before the write")
            done = await write(change)
            if dice.random() < 0.2:
                raise ConnectionError("killed after the write")
            return done

        self.database = read, lose
        self.fact = store.fact


@pytest.mark.parametrize("seed", range(6))
async def test_random_histories_with_kills_add_up(store: Store, seed: int) -> None:
    """Servers are killed before and after writes, gateways are replaced, reports are late, bills are
    corrected, and prices jump. Each request is counted once.
    """
    dice = random.Random(seed)
    started = [await start(store, f"r{number}") for number in range(3)]
    service = make_service(*(replica for replica, _ in started))
    counts: dict[str, dict[str, dict[str, KeyWork]]] = {}
    told: RequestWork = {}
    epoch, billed, rate = 0, Counter[str](), 1000
    for step in range(1, 25):
        now = after(60 * step)
        for replica, attempt in started:
            if dice.random() < 0.7:
                more = dice.randrange(rate) - (rate // 3 if dice.random() < 0.2 else 0)
                billed[attempt.id] = max(0, billed[attempt.id] + more)
                charge = make_charge(attempt, billed[attempt.id], until=60 * step)
                await store.commit(AtomicWrite(charges=[charge]))
            of_key = counts.setdefault(str(epoch), {}).setdefault(replica.id, {})
            for key in ("k1", ""):
                known = of_key.get(key, KeyWork(requests=0, work_us=0))
                of_key[key] = KeyWork(
                    requests=known.requests + dice.randrange(3),
                    work_us=known.work_us + dice.randrange(20_000_000),
                )
        if dice.random() < 0.2:  # another gateway
            epoch += 1
        if dice.random() < 0.7:  # otherwise, the last report is still there
            told = deepcopy(counts)
        if dice.random() < 0.2:
            rate = rate * 10 if rate < 10**6 else 1000
        losing = cast(Store, LosingStore(store, dice))
        try:
            await RequestBills(losing).divide(service, tell(told), now)
        except ConnectionError:
            continue
        found = await sums(store, "kind")
        parts = sum(found.get((kind,), 0) for kind in ("request", "idle", "cold start"))
        assert parts == sum(billed.values())
    await RequestBills(store).divide(service, tell(counts), after(9999), last=True)
    assert await count_requests(store) == sum(
        each.requests
        for of_epoch in counts.values()
        for of_key in of_epoch.values()
        for each in of_key.values()
    )
    found = await sums(store, "subject")
    assert sum(found.values()) == sum(billed.values())
    assert (
        sum(
            amount
            for (subject,), amount in (await sums(store, "subject")).items()
            if subject.startswith("r0-1")
        )
        == billed["r0-1"]
    )


async def test_requests_of_a_replica_that_ended_are_counted_by_the_next_server(
    store: Store,
) -> None:
    """The server that knew the replica was killed, and the gateway that counted was replaced."""
    replica, attempt = await start(store, "r1")
    await store.commit(AtomicWrite(charges=[make_charge(attempt, 1000, until=100)]))
    told = work(requests=5, r1={"k1": 30.0})
    await RequestBills(store).divide(make_service(replica), tell(told), after(100))
    done = replace(attempt, phase=AttemptPhase.ENDED, ended_at=after(150))
    await store.commit(
        AtomicWrite(attempts=[done], charges=[make_charge(attempt, 1500, until=150)])
    )
    more = {**work(requests=9, r1={"k1": 40.0}), **work("h", requests=2, r1={"k1": 5.0})}
    bills = RequestBills(store)
    await bills.divide(make_service(), tell(more), after(200))
    assert await count_requests(store) == 11
    assert (await sums(store, "kind"))["request",] == 450
    await bills.sweep()
    later = {**more, **work("h", requests=4, r1={"k1": 5.0})}
    await bills.divide(make_service(), tell(more), after(300))
    await bills.divide(make_service(), tell(later), after(400))
    await bills.divide(make_service(), tell(later), after(500), last=True)
    assert await count_requests(store) == 13
    assert sum((await sums(store, "kind")).values()) == 1500


async def test_a_service_without_a_gateway_is_divided_when_its_counts_are_known(
    store: Store,
) -> None:
    replica, attempt = await start(store, "r1")
    service, bills = make_service(replica), RequestBills(store)
    await store.commit(AtomicWrite(charges=[make_charge(attempt, 1000, until=100)]))
    await bills.divide(service, tell(None), after(100))
    assert await sums(store, "kind") == {("node",): 1000}
    await bills.divide(service, tell(work(requests=3, r1={"": 1.0})), after(101))
    assert await count_requests(store) == 3


async def test_each_of_many_replicas_is_divided_as_a_replica_that_runs(store: Store) -> None:
    replica, attempt = await start(store, "r0")
    others = [replace(replica, id=f"r{number}") for number in range(1, 60)]
    service, bills = make_service(replica, *others), RequestBills(store)
    await store.commit(AtomicWrite(charges=[make_charge(attempt, 1000, until=100)]))
    await bills.divide(service, tell(work(r0={"": 40.0})), after(100))
    expected = {"request": 400, "cold start": 200, "idle": 400, "node": 0}
    assert await sums(store, "kind") == {(kind,): amount for kind, amount in expected.items()}
    assert set(bills.rates) == {"r0"}


async def test_a_service_waits_for_the_bills_of_its_replicas(store: Store) -> None:
    """The last charge comes when the provider has removed the replica."""
    replica, attempt = await start(store, "r1")
    ended = replace(replica, state=ReplicaState.ENDED, ended_at=after(100))
    service, bills = make_service(ended), RequestBills(store)
    await store.commit(AtomicWrite(attempts=[replace(attempt, phase=AttemptPhase.ENDING)]))
    (ending,) = await store.attempts("r1")
    assert not await bills.is_billed(service, after(101))
    assert await bills.is_billed(service, after(500)), "the provider does not answer"
    done = replace(ending, phase=AttemptPhase.ENDED, ended_at=after(102))
    await store.commit(
        AtomicWrite(attempts=[done], charges=[make_charge(attempt, 1000, until=102)])
    )
    assert await bills.is_billed(service, after(102))
    await bills.divide(service, tell(work(requests=6, r1={"": 1.0})), after(102), last=True)
    assert await count_requests(store) == 6


async def test_a_division_begins_with_the_last_one(store: Store) -> None:
    replica, attempt = await start(store, "r1")
    await store.commit(AtomicWrite(charges=[make_charge(attempt, 1001, until=100)]))
    (bill,) = await bills_of(store).list([replica.id])
    assert (bill.until - bill.since, bill.divided) == (timedelta(seconds=100), None)
    await RequestBills(store).divide(make_service(replica), tell(None), after(100), last=True)
    (again,) = await bills_of(store).list([replica.id])
    assert again.divided is not None
    with pytest.raises(StaleVersion):
        await bills_of(store).divide(replace(again.divided, version=0), {}, {})
    assert (again.divided.version, len(await store.ledger_lines(ALL))) == (1, 4)


async def test_tokens_are_added_up_by_key_and_model_once(store: Store) -> None:
    replica, attempt = await start(store, "r1")
    service, bills = make_service(replica), RequestBills(store)

    async def divide(until: int, *prompts: int, last: bool = False) -> None:
        uses = [TokenUse(prompt=each, cached=1, completion=2 * each) for each in prompts]
        tokens = dict(zip(("m", "n"), uses, strict=False))
        counts = {"k1": KeyWork(requests=1, work_us=1, tokens=tokens)}
        told = tell({"g": {"r1": {**counts, "": replace(counts["k1"], tokens={"m": uses[0]})}}})
        await store.commit(AtomicWrite(charges=[make_charge(attempt, 10 * until, until=until)]))
        await bills.divide(service, told, after(until), last=last)
        await RequestBills(store).divide(service, told, after(until), last=last)  # another server

    await divide(100, 5)
    await divide(200, 7, 3)
    await divide(86_400, 8, 3, last=True)
    m, n = TokenUse(prompt=8, cached=1, completion=16), TokenUse(prompt=3, cached=1, completion=6)
    by_key = await store.meters.sum_tokens(ALL, ("service", "key"))
    assert by_key == {("chat", "web"): {"m": m, "n": n}, ("chat", ""): {"m": m}}
    whole = await store.meters.sum_tokens(ALL, ())
    assert whole == {(): {"m": TokenUse(prompt=16, cached=2, completion=32), "n": n}}
    later = LedgerFilter(projects="p", since=after(86_400), until=after(86_401))
    ((group, uses),) = (await store.meters.sum_tokens(later, ("user", "kind", "month"))).items()
    assert group[:2] == ("ada", "request")
    assert uses["m"].prompt == 2
    assert await store.meters.sum_tokens(replace(later, projects="other"), ("user",)) == {}


async def test_tokens_of_a_replica_that_costs_nothing_are_stored(store: Store) -> None:
    replica, attempt = await start(store, "r1")
    await store.commit(AtomicWrite(charges=[make_charge(attempt, 0, until=100)]))
    counts = {"k1": KeyWork(requests=1, work_us=1, tokens={"m": TokenUse(prompt=5)})}
    told = tell({"g": {"r1": counts}})
    await RequestBills(store).divide(make_service(replica), told, after(100))
    found = await store.meters.sum_tokens(ALL, ("service", "key"))
    assert found == {("chat", "web"): {"m": TokenUse(prompt=5)}}
