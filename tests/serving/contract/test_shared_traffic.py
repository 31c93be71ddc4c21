"""The traffic and the requests of services whose gateways belong to several servers on PostgreSQL,
including servers that have been killed.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest
from tests.contract.store_suite import NOW, store_url

from cavvy.capabilities.serving.bills import KeyWork, RequestWork
from cavvy.capabilities.serving.decide.traffic import GatewayCount, ServiceTraffic
from cavvy.capabilities.serving.server.shared_traffic import SharedTraffic
from cavvy.capabilities.serving.stored_services import StoredService
from cavvy.control.share import WorkShare
from cavvy.domain.ledger import TokenUse
from cavvy.domain.services import ServiceSpec
from cavvy.domain.tasks import TaskSpec
from cavvy.store import leases
from cavvy.store.base import StoreError
from cavvy.store.channel import AgentContacts, GatewayReport, GatewayReports, ReplicaChannel
from cavvy.store.drivers import make_driver
from cavvy.store.leases import Replica, ReplicaLeases
from cavvy.store.sql import Store

TASK = TaskSpec(name="chat", run="serve", service=ServiceSpec(port=80))
SERVICE = StoredService(project="p", name="chat", id="s1", task=TASK, created_at=NOW)


@asynccontextmanager
async def server(url: str, name: str) -> AsyncIterator[SharedTraffic]:
    me = Replica(id=name, host="h", pid=1, folder=f"/home/{name}", address=f"unix:/{name}")
    own = ReplicaLeases(url, me)
    share = WorkShare(own, ReplicaChannel(url, name), AgentContacts(url, name))
    await own.join()
    traffic = SharedTraffic(GatewayReports(url, name), share)
    try:
        yield traffic
    finally:
        await traffic.close()
        await own.leave()


def work(requests: int, epoch: str) -> RequestWork:
    return {epoch: {"r1": {"": KeyWork(requests=requests, work_us=10 * requests)}}}


def count(requests: int, epoch: str) -> GatewayCount:
    traffic = ServiceTraffic(at_s=1.0, arrivals=requests, work=work(requests, epoch))
    return GatewayCount(version=1, traffic=traffic)


async def test_requests_of_ended_servers_are_counted_once(tmp_path: Path) -> None:
    """`old` was killed and `new` has taken its gateway over; `far` was killed with its gateway."""
    url = store_url("postgres", tmp_path)
    store = Store(url)
    await store.open()
    await store.close()
    for name, requests, epoch in (("old", 5, "near"), ("far", 3, "elsewhere")):
        async with server(url, name) as killed:
            await killed.tell({"s1": count(requests, epoch)})
    async with server(url, "new") as new:
        assert await new.read_work("s1", None) == {**work(5, "near"), **work(3, "elsewhere")}
        assert await new.read_work("s2", None) is None
        await new.tell({"s1": count(8, "near")})
        both = {**work(8, "near"), **work(3, "elsewhere")}
        assert await new.read_work("s1", None) == both, "this server's last report counts, too"
        assert await new.read_work("s1", work(9, "near")) == {**both, **work(9, "near")}
        assert await new.read_work("s1", work(1, "near")) == both, "a report is never taken back"
        found = await new.read(SERVICE, None)
        assert found is None, "the traffic is that of servers that live"
        await new.forget("s1")
        assert await new.read_work("s1", None) is None


async def test_the_use_of_keys_at_other_gateways_is_told_once(tmp_path: Path) -> None:
    url = store_url("postgres", tmp_path)
    store = Store(url)
    await store.open()
    await store.close()

    def use(tokens: int, epoch: str, replica: str = "r1") -> GatewayCount:
        by_model = {"m": TokenUse(prompt=tokens, completion=1), "": TokenUse()}
        spent = KeyWork(requests=1, work_us=tokens * 10**6, tokens=by_model)
        traffic = ServiceTraffic(at_s=1.0, work={epoch: {replica: {"k1": spent}}})
        return GatewayCount(version=1, traffic=traffic)

    async with server(url, "a") as one, server(url, "b") as other:
        mine, rates = use(50, "mine").traffic.work, {"r1": 3600}
        await one.tell({"s1": use(50, "mine")})
        await other.tell({"s1": use(100, "theirs")})
        assert await one.read_use("s1", mine, rates) == {}, "what was before is not known to be new"
        await other.tell({"s1": use(107, "theirs")})
        assert await one.read_use("s1", mine, rates) == {"k1": (7, 7)}
        assert await one.read_use("s1", mine, rates) == {}
        await other._reports.delete("s1")  # as another server does with old ones
        assert await one.read_use("s1", mine, rates) == {}
        await other.tell({"s1": use(109, "theirs")})
        assert await one.read_use("s1", mine, rates) == {"k1": (2, 2)}
        halves = []
        for tokens in (110, 111):
            await other.tell({"s1": use(tokens, "theirs")})
            halves.append((await one.read_use("s1", mine, {"r1": 1800}))["k1"][1])
        assert sum(halves) == 1
        await other.tell({"s1": use(10**9, "counts of months")})
        assert await one.read_use("s1", mine, rates) == {}
        await other.tell({"s1": use(10**9 + 4, "counts of months", "gone")})
        assert await one.read_use("s1", mine, rates) == {"k1": (10**9 + 5, 0)}
        await one.tell({"s1": use(51, "mine")})
        assert await other.read_use("s1", {}, rates) == {}
        await one.tell({"s1": use(52, "mine")})
        assert await other.read_use("s1", {}, rates) == {"k1": (1, 1)}
        # a server of another version; a DecodeError would end this server's gateway
        await other._reports.put([GatewayReport(service="s2", document='{"version":"2"}')])
        with pytest.raises(StoreError, match="cannot be read"):
            await one.read_use("s2", {}, {})


async def test_the_requests_at_the_gateway_of_an_absent_server_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = store_url("postgres", tmp_path)
    store = Store(url)
    await store.open()
    await store.close()
    async with server(url, "a") as a, server(url, "b") as b:
        busy = ServiceTraffic(at_s=1.0, in_flight=2, replicas={"r1": 2}, whole=True)
        await b.tell({"s1": GatewayCount(version=9, traffic=busy)})
        await a._share._leases.turn()
        with closing(make_driver(url, journal="auto").connect()) as session:
            session.run("UPDATE cavvy_replicas SET until = 0 WHERE id = 'b'")  # it is paused
        await a._share._leases.turn()
        assert a._share.find_server("b") is None
        mine = GatewayCount(version=9, traffic=ServiceTraffic(at_s=1.0, whole=True))
        found = await a.read(SERVICE, mine)
        assert found is not None
        assert (found.in_flight, found.replicas) == (2, {"r1": 2})
        monkeypatch.setattr(leases, "ABSENCE_S", 0.0)
        await a._share._leases.turn()
        found = await a.read(SERVICE, mine)
        assert found is not None
        assert (found.in_flight, found.replicas) == (0, {})
