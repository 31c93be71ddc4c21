"""What Prometheus reads from the server."""

import json
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.api.api.test_api_agents import claim, report
from tests.api.api_state import SCRIPT, Api, open_api, until
from tests.api.team import OWN, make_team
from tests.serving.team_rows import make_service

from cavvy.capabilities.serving.bills import KeyWork, RequestWork, name_api
from cavvy.capabilities.serving.control.request_bills import RequestBills
from cavvy.capabilities.serving.control.requests import ServiceStatus
from cavvy.capabilities.serving.decide.traffic import ServiceTraffic
from cavvy.capabilities.serving.figures import add_service
from cavvy.capabilities.serving.replicas import ReplicaState, ServiceReplica
from cavvy.capabilities.serving.service_rows import services_of
from cavvy.domain.accounts import Role
from cavvy.domain.ledger import TokenUse
from cavvy.domain.services import FallbackApi, FallbackRule, ServiceSpec
from cavvy.domain.values import replace
from cavvy.telemetry import Figures

ROOT = Path(__file__).parents[3]


async def scrape(http: Any, query: str = "", token: str = "") -> dict[str, list[Any]]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    answer = await http.get(f"/metrics{query}", headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/plain; version=")
    families = text_string_to_metric_families(answer.text)
    return {each.name: each.samples for each in families}


async def test_figures_of_a_job_and_its_node(api: Api) -> None:
    first = await api.submit("{name: first, run: 'true'}")
    attempt = await api.attempt(first["id"])
    await claim(api, attempt.gang)
    values = {"cpu_percent": 97.5, "memory_mib": 512, "gpu_percent": 88, "gpu_memory_mib": 9156}
    await report(api, attempt.gang, {"seq": 1, "kind": "telemetry", "values": values})

    async def is_told() -> Any:
        return (await scrape(api.http)).get("cavvy_node_cpu_percent")

    [cpu] = await until(is_told)
    assert cpu.value == 97.5
    assert cpu.labels == {"project": "default", "job_name": "first", "rank": "0"}
    found = await scrape(api.http)
    [whole] = found["DCGM_FI_DEV_GPU_UTIL"]
    assert (whole.value, whole.labels["gpu"]) == (88, "0")
    assert found["DCGM_FI_DEV_FB_USED"][0].value == 9156
    assert [each.value for each in found["cavvy_jobs"]] == [1]
    [gang] = found["cavvy_gangs"]
    assert (gang.labels["provider"], gang.value) == ("fake", 1)
    calls = {
        (each.labels["operation"], each.labels["result"]): each.value
        for each in found["cavvy_provider_calls"]
    }
    assert calls["launch", "ok"] == 1
    assert found["cavvy_provider_call_seconds"]
    assert found["process_cpu_seconds"]
    odd = {"Accept": "application/openmetrics-text; version=a.b"}
    assert (await api.http.get("/metrics", headers=odd)).status_code == 200


async def test_a_caller_reads_only_the_figures_of_its_own_projects(api: Api) -> None:
    team = await make_team(api)
    token = await team.token(("team", Role.ADMIN))
    now = api.app_state.now()
    for name in team.marks:
        replica = ServiceReplica(
            id=f"r-{name}", service=name, revision=1, state=ReplicaState.ENDED, ordered_at=now
        )
        service = replace(make_service(name, now), name="served", id=name, replicas=(replica,))
        await services_of(api.app_state.store).put(service)
    found = await scrape(team.http, token=token)
    projects = {
        sample.labels["project"]
        for samples in found.values()
        for sample in samples
        if "project" in sample.labels
    }
    assert projects == set(OWN)
    assert {each.labels["budget"] for each in found["cavvy_budget_limit_dollars"]} == {
        f"budget-of-{name}-mark" for name in OWN
    }
    assert {each.labels["project"] for each in found["cavvy_spent_dollars"]} == set(OWN)
    assert {each.labels["project"] for each in found["cavvy_service_replicas"]} == set(OWN)
    assert "cavvy_provider_calls" not in found, "they are of all projects"
    assert (await team.http.get("/metrics")).status_code == 401


async def test_a_server_without_the_package_says_what_to_install(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    answer = await api.http.get("/metrics")
    assert (answer.status_code, answer.json()["code"]) == (501, "extra-missing")
    assert answer.json()["hint"].startswith("install it where the server runs: ")


GPU = """[[offers]]
instance_type = "gpu"
region = "de"
price_usd_hr = 9.0
cpus = 64
memory_gib = 256
accelerator = "H100"
accelerators = 1
accelerator_memory_gib = 80
"""
TELEMETRY = {
    **{"cpu_percent": 97.5, "memory_mib": 512, "gpu_percent": 88, "gpu_memory_mib": 9156},
    **{"gpu_power_w": 350, "disk_read_mib_s": 1, "disk_write_mib_s": 2},
    **{"net_in_mib_s": 3, "net_out_mib_s": 4},
}


async def test_each_metric_of_the_servers_part_of_the_page_moves(tmp_path: Path) -> None:
    """In the life of jobs and a service. The values of a service's traffic are made up."""
    page = (ROOT / "docs/reference/metrics.md").read_text().partition("## The gateway")[0]
    moved: set[str] = set()
    async with open_api("sqlite", tmp_path, script=f"{GPU}{SCRIPT}") as api:
        before = await scrape(api.http)

        async def look() -> None:
            for name, samples in (await scrape(api.http)).items():
                known = {tuple(each.labels.items()): each.value for each in before.get(name, [])}
                values = ((tuple(each.labels.items()), each.value) for each in samples)
                if any(value != known.get(labels, 0) for labels, value in values):
                    moved.add(name)

        paid = "{name: paid, run: 'true', resources: {gpu: H100}}"
        made = await api.submit(paid, consent=True)
        await api.submit("{name: late, run: 'true', after: [paid]}")
        attempt = await api.attempt(made["id"])
        await claim(api, attempt.gang)
        await report(api, attempt.gang, {"seq": 1, "kind": "running"})
        await report(api, attempt.gang, {"seq": 2, "kind": "telemetry", "values": TELEMETRY})
        minute = {"kind": "minute", "seconds": 60, "figures": {"work_energy_j": [9e4] * 3}}
        await report(api, attempt.gang, {"seq": 3, **minute})
        await until(lambda: _has(api, "cavvy_attempt_start_seconds"))
        await look()
        ended = {"kind": "exited", "outcome": "succeeded", "exit_code": 0, "log_bytes": 0}
        await report(api, attempt.gang, {"seq": 4, **ended})
        await until(lambda: _has(api, "cavvy_attempts_ended"))
        await api.http.put("/v1/budgets/b", json={"limit_micros": 9, "project": "default"})
        await _use_tokens(api)
        await look()
    figures = Figures()
    add_service(figures, _make_status())
    moved |= {each.name for each in figures.collect() if any(x.value for x in each.samples)}
    listed = {name.removesuffix("_total") for name in find_names(page, "`")}
    assert listed - moved == set()


async def _has(api: Api, name: str) -> bool:
    return name in await scrape(api.http)


async def _use_tokens(api: Api) -> None:
    """Bill a request that the API of a fallback has answered."""
    model = FallbackApi(model="big", prices=(1_000_000, 3_000_000))
    service = make_service("default", api.app_state.now())
    spec = ServiceSpec(port=80, fallbacks=(FallbackRule(api=model),))
    service = replace(service, task=replace(service.task, service=spec))
    use = TokenUse(prompt=100, cached=1, completion=50)
    count = KeyWork(requests=1, work_us=1, tokens={"tiny": use})

    async def read() -> RequestWork:
        return {"g": {name_api(model.url, model.model): {"": count}}}

    bills, now = RequestBills(api.app_state.store), api.app_state.now()
    await bills.divide(service, read, now, last=True)


def _make_status() -> ServiceStatus:
    now = datetime.now(UTC)
    replica = ServiceReplica(
        id="r", service="s", revision=1, state=ReplicaState.READY, ordered_at=now
    )
    counts = {"answered": 1, "lost": 1, "unserved": 1, "in_flight": 1, "backlog": 1, "late": 1}
    traffic = ServiceTraffic(at_s=1.0, p50_s=1.0, p95_s=1.0, p99_s=1.0, **counts)
    service = replace(make_service("default", now), replicas=(replica,))
    return ServiceStatus(service=service, url="", traffic=traffic)


def test_the_page_lists_each_metric_and_alerts_and_panels_use_only_these() -> None:
    sources = (
        "src/cavvy/api/routes/metrics.py",
        "src/cavvy/capabilities/serving/figures.py",
        "src/cavvy/capabilities/serving/gateway/metrics.py",
    )
    exported = {name for path in sources for name in find_names((ROOT / path).read_text(), '"')}
    page = (ROOT / "docs/reference/metrics.md").read_text()
    listed = {name.removesuffix("_total") for name in find_names(page, "`")}
    assert listed == exported
    alerts = ROOT / "deploy/prometheus/alerts.yml"
    dashboard = ROOT / "deploy/grafana/cavvy.json"
    for used in (find_names(path.read_text()) for path in (alerts, dashboard)):
        names = {re.sub("_(total|bucket|count|sum)$", "", name) for name in used}
        assert names
        assert names <= exported


def find_names(text: str, mark: str = r"\b") -> set[str]:
    return set(re.findall(rf"{mark}((?:cavvy|DCGM)_\w+){mark}", text))


def test_each_panel_has_a_place_and_queries_of_labels_that_the_page_lists() -> None:
    dashboard = json.loads((ROOT / "deploy/grafana/cavvy.json").read_text())
    panels = dashboard["panels"]
    assert len({each["id"] for each in panels}) == len(panels)
    taken = [(p["x"] + i, p["y"] + j) for p in map(_place, panels) for i, j in _cells(p)]
    assert len(taken) == len(set(taken)), "two panels overlap"
    assert all(x < 24 for x, _ in taken), "Grafana's grid has 24 columns"
    page = (ROOT / "docs/reference/metrics.md").read_text()
    labels = {*re.findall(r"`(\w+)`", page), "le", "instance", "job"}
    for panel in panels:
        targets = panel.get("targets", [])
        assert bool(targets) == (panel["type"] != "row"), panel["title"]
        for target in targets:
            grouped = re.findall(r"by \(([^)]*)\)", target["expr"])
            shown = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
            assert {*", ".join(grouped).split(", "), *shown} - {""} <= labels, target


def _place(panel: Any) -> dict[str, int]:
    return dict(panel["gridPos"])


def _cells(place: dict[str, int]) -> list[tuple[int, int]]:
    return [(i, j) for i in range(place["w"]) for j in range(place["h"])]
