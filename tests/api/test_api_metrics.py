"""What Prometheus reads from the server."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.api.api_state import Api, until
from tests.api.team import OWN, make_service, make_team
from tests.api.test_api_agents import claim, report

from cavvy.domain.accounts import Role
from cavvy.domain.services import ReplicaState, ServiceReplica
from cavvy.domain.values import replace

ROOT = Path(__file__).parents[2]


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
    assert found["DCGM_FI_DEV_GPU_UTIL"][0].value == 88
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
        await api.app_state.store.services.put(service)
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


def test_the_page_lists_each_metric_and_alerts_and_panels_use_only_these() -> None:
    sources = ("src/cavvy/api/routes/metrics.py", "src/cavvy/gateway/metrics.py")
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
