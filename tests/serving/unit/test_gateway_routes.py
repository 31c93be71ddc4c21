"""What the server tells the gateway of all services: one of them cannot stop the others."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from cavvy.capabilities.serving.gateway.config import (
    BatchTerms,
    GatewayConfigError,
    GatewayLimits,
    ReplicaAddress,
    RoutingTerms,
    ServiceRoute,
    check_routes,
)
from cavvy.capabilities.serving.gateway.haproxy.configuration import (
    HOLD,
    HaproxyListener,
    is_direct,
    list_direct,
    write_configuration,
)
from cavvy.capabilities.serving.replicas import ReplicaState, ServiceReplica
from cavvy.capabilities.serving.server.front import PublishedService
from cavvy.capabilities.serving.server.gateway_route import list_routes, make_address, make_route
from cavvy.capabilities.serving.stored_services import ServiceKey, StoredService
from cavvy.domain.services import (
    BatchRule,
    FallbackApi,
    FallbackRule,
    RateScope,
    ReplicaCount,
    ReplicaRole,
    RequestRate,
    ServiceSpec,
)
from cavvy.domain.tasks import ReplicaGroup, ResourceSpec, TaskSpec
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def make(name: str, age_s: int, **spec: Any) -> StoredService:
    task = TaskSpec(name=name, run="serve", service=ServiceSpec(port=1, **spec))
    at = NOW - timedelta(seconds=age_s)
    return StoredService(project="p", name=name, id=name, task=task, created_at=at)


def test_the_older_of_two_services_with_a_host_name_keeps_it() -> None:
    newer = make("newer", 1, hosts=("A.example", "b.example"), keys=True)
    only = make("only", 0, hosts=("a.example",))
    routes = list_routes([newer, only, make("older", 2, hosts=("a.example",)), make("none", 3)])
    check_routes(routes)
    assert [(each.name, each.hosts, each.prefix) for each in routes] == [
        ("none", (), "/p/none"),
        ("older", ("a.example",), ""),
        ("newer", ("b.example",), ""),
        ("only", (), "/p/only"),
    ]
    assert [each.keyed for each in routes] == [False, False, True, False]


def test_a_service_that_the_gateway_would_refuse_is_closed() -> None:
    rate = RequestRate(requests=1, each=RateScope.HEADER, header="x" * 101)
    bad, good = list_routes([make("bad", 1, rates=(rate,)), make("good", 0)])
    assert (bad.name, bad.prefix, bad.keyed, bad.keys, bad.rates) == ("bad", "/p/bad", True, (), ())
    assert (good.name, good.keyed) == ("good", False)


def test_a_service_that_gets_whole_paths_passes_the_gateway() -> None:
    (route,) = list_routes([make("a", 1, strip_prefix=False)])
    assert (route.prefix, route.removed_prefix) == ("/p/a", "")
    assert not is_direct(route)


def test_requests_that_are_joined_pass_the_gateway() -> None:
    rule = BatchRule(most=8, wait=timedelta(milliseconds=20), input="in", output="out")
    [route] = list_routes([make("joined", 0, hosts=("a.example",), batch=rule)])
    assert route.batch == BatchTerms(max=8, wait_s=0.02, input="in", output="out")
    [plain] = list_routes([make("plain", 0, hosts=("a.example",))])
    assert (is_direct(route), is_direct(plain)) == (False, True)


def test_requests_stay_where_replicas_may_be_and_keys_state_a_place() -> None:
    limits: dict[str, Any] = {"tokens_per_min": 9, "micros_per_day": 8, "weight": 2.0}
    key = ServiceKey(id="a", sha256="0" * 64, residency="de", created_at=NOW, **limits)
    anywhere, stays = list_routes(
        [make("anywhere", 1), replace(make("stays", 0, residency="eu", keys=True), keys=(key,))]
    )
    assert {"eu", "us", "jp"} <= set(anywhere.places or ())
    assert {"eu", "de"} <= set(stays.places or ())
    assert "us" not in (stays.places or ())
    assert [each.residency for each in stays.keys] == ["de"]
    assert {name: getattr(stays.keys[0], name) for name in limits} == limits
    assert stays.keys[0].priority == 1


def test_fallbacks_are_services_that_exist_and_apis_that_the_places_permit() -> None:
    api = FallbackApi(model="big", secret="KEY", prices=(1, 2))
    rules = (FallbackRule(api=api), *(FallbackRule(service=each) for each in ("b", "none")))
    own = make("a", 3, hosts=("a.example",), fallbacks=rules)
    bound = make("bound", 2, residency="eu", fallbacks=rules)
    route, other, stays = list_routes([own, make("b", 1), bound])[:3]
    first, second = route.fallbacks
    assert (first.url, first.label, first.credential) == (api.url, "api.openai.com", "p/KEY")
    assert (first.service, first.model, first.prices) == (None, "big", (1, 2))
    assert (second.service, second.label) == ("b", "b")
    assert not is_direct(route)
    routes = {each.name: each.fallbacks for each in (route, other, stays)}
    assert [(each.service, each.stays) for each in routes["bound"]] == [("b", False)]
    assert second.stays
    named = replace(own, task=replace(own.task, resources=ResourceSpec(regions=("eu",))))
    assert list_routes([named])[0].fallbacks == ()


def test_other_regions_change_the_routes_of_other_services() -> None:
    """Both may run in the same known places, but only one of them stays in the region."""
    published = []
    for regions in (("us-east-1",), ("us-east-1", "us")):
        plain = make("b", 0)
        bound = replace(plain, task=replace(plain.task, resources=ResourceSpec(regions=regions)))
        published.append(PublishedService(service=bound, route=make_route(bound), replicas=()))
    one, other = published
    assert one.route == other.route
    assert one.is_same_route(one)
    assert not one.is_same_route(other)


def test_groups_state_how_many_requests_they_may_have() -> None:
    one, two = ReplicaCount(least=1, most=1), ReplicaCount(least=0, most=2)
    groups = (
        ReplicaGroup(name="r", role=ReplicaRole.ROUTER, replicas=one, concurrency=500),
        ReplicaGroup(name="a", role=ReplicaRole.WORKER, replicas=two, concurrency=100),
        ReplicaGroup(name="b", role=ReplicaRole.WORKER, replicas=one),
    )
    plain = make("g", 0, concurrency=4, replicas=ReplicaCount(most=3))
    grouped = replace(plain, task=replace(plain.task, replica_groups=groups))
    assert [each.slots_max for each in list_routes([plain])] == [12]
    assert [each.slots_max for each in list_routes([grouped])] == [204]


def test_the_gateway_knows_what_replicas_cost() -> None:
    """Keys have limits in dollars, whether responses state prices or not."""
    replica = ServiceReplica(
        id="r",
        service="chat",
        revision=1,
        state=ReplicaState.READY,
        ordered_at=NOW,
        rate=HourlyRate(7),
    )
    assert make_address(make("chat", 1), replica, 80, 0).rate_micros == 7


def test_haproxy_leaves_language_models_to_the_gateway_which_counts_their_tokens() -> None:
    [route] = list_routes([make("llm", 0, hosts=("a.example",), models=("m",))])
    assert not is_direct(route)


def test_haproxy_leaves_replicas_at_several_distances_to_the_gateway() -> None:
    near, far = (
        ReplicaAddress(id=each, host="127.0.0.1", port=1, tier=tier)
        for each, tier in (("near", 1), ("far", 2))
    )
    assert list_direct([near, far]) == ()
    assert list_direct([near]) == (replace(near, tier=0),), "another tier adds no server again"


def test_haproxy_sets_no_limit_to_the_wait_for_a_first_replica() -> None:
    """The gateway does: a service may permit hours."""
    listener = HaproxyListener(
        host="127.0.0.1", port=1, socket=Path("s"), gateway_host="127.0.0.1", gateway_port=2
    )
    text = write_configuration(listener, (), GatewayLimits())
    hold = text.partition(f"backend {HOLD}\n")[2].partition("\n\n")[0]
    assert "timeout server 86400000ms" in hold
    assert "timeout tunnel 86400000ms" in hold


def test_joined_requests_cannot_be_separated_by_routing() -> None:
    route = ServiceRoute(name="both", batch=BatchTerms(), routing=RoutingTerms(by="header"))
    with pytest.raises(GatewayConfigError, match="`batch` and `routing` exclude each other"):
        check_routes((route,))


def test_callers_learn_why_no_replica_is_ready() -> None:
    failed = replace(make("a", 0), failures=3, problem="exit code 1", replicas=())
    assert "before they are ready: exit code 1; `cavvy logs a`" in make_route(failed).failing
    for other in (replace(failed, failures=2), make("a", 1), replace(failed, wanted=False)):
        assert make_route(other).failing == ""
