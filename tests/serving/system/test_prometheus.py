"""A real Prometheus and Alertmanager read a real server and its gateway."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.serving.system.test_serve import EXAMPLE, call
from tests.system.ports import free_port
from tests.system.prometheus import DEPLOY, Monitoring, find_promtool
from tests.system.trust import User, serving_user_at
from tests.waits import wait_until

pytestmark = pytest.mark.system


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    with serving_user_at(tmp_path / "user") as user:
        yield user


def list_queries() -> Iterator[str]:
    """The queries of the dashboard for all projects."""
    dashboard = json.loads((DEPLOY.parent / "grafana" / "cavvy.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"].replace("$project", ".*")
            yield query.replace("$__rate_interval", "1m")


def names_of(query: str) -> set[str]:
    return set(re.findall(r"\b(?:cavvy|DCGM|process)_\w+", query))


@pytest.mark.parametrize("command", ["check rules alerts.yml", "test rules alerts_test.yml"])
def test_each_alert_fires_and_clears_on_samples(command: str) -> None:
    promtool = [find_promtool(), *command.split()]
    done = subprocess.run(promtool, cwd=DEPLOY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_reads_a_server_and_its_gateway(user: User, tmp_path: Path) -> None:
    server, gateway = free_port(), free_port()
    shutil.copytree(EXAMPLE, user.work, dirs_exist_ok=True)
    user.settings(
        f'[server]\nlisten = "127.0.0.1:{server}"\n'
        f'[services]\nmetrics_listen = "127.0.0.1:{gateway}"\n'
    )
    user.cli("budget", "set", "team", "100")
    assert "done" in user.cli("run", user.task("{name: job, run: 'true'}"))
    user.cli("serve", str(EXAMPLE / "service.yaml"))
    url = user.json("serve", "--yes", "service.yaml")["url"]
    assert [call(url) for _ in range(5)] == [200] * 5
    tokens = {
        "cavvy": (user.home / "token").read_text().strip(),
        "cavvy-gateway": (user.home / "gateway" / "metrics.token").read_text(),
    }
    targets = {"cavvy": f"127.0.0.1:{server}", "cavvy-gateway": f"127.0.0.1:{gateway}"}
    monitoring = Monitoring(tmp_path / "prometheus", targets, tokens)

    def value(query: str) -> float | None:
        found = monitoring.query(query)
        return float(found[0]["value"][1]) if found else None

    wait_until(lambda: value("count(up == 1)") == 2)
    wait_until(lambda: value('cavvy_jobs{project="default", phase="done"}') == 1)
    assert value('cavvy_attempts_ended_total{outcome="succeeded"}') == 1
    assert value('sum(cavvy_job_wait_seconds_count{project="default"})') == 2
    answered = 'cavvy_gateway_requests_total{service="hello", result="answered"}'
    wait_until(lambda: value(answered) == 5)
    assert value('cavvy_gateway_request_seconds_count{service="hello"}') == 5
    assert value('cavvy_service_replicas{service="hello", state="ready"}') == 1
    unmoved = {
        "cavvy_queue_oldest_seconds",  # nothing waits
        *("DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_FB_USED"),  # this machine has no GPU
        "cavvy_gateway_routed_tokens_total",  # no language model
    }

    def list_empty() -> set[str]:
        empty = [query for query in list_queries() if not monitoring.query(query)]
        return {name for query in empty for name in names_of(query)}

    wait_until(lambda: list_empty() == unmoved, why=lambda: str(list_empty() ^ unmoved))
    [row] = user.json("top", "--once")
    assert row["job"].startswith("hello")
    assert row["memory_mib"] > 0
    assert monitoring.list_alerts() == set()
    user.kill_server()
    wait_until(lambda: "CavvyDown" in monitoring.list_alerts())
    user.cli("ps")
    wait_until(lambda: "CavvyDown" not in monitoring.list_alerts())
