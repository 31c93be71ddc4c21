"""Debian's Prometheus and Alertmanager, with the configuration that `deploy/prometheus` has."""

import json
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import yaml
from tests.system.ports import free_port
from tests.system.storages import answers, fresh, install, start
from tests.waits import wait_until

DEPLOY = Path(__file__).parents[2] / "deploy" / "prometheus"
# Debian's Alertmanager reads its templates from /usr/share, where only root may write
_WITH_TEMPLATES = """mount -t tmpfs none /usr/share
cp -r "$0" /usr/share/prometheus
exec "$@"
"""
_PAUSE = "500ms"  # between two looks at the servers


def find_promtool() -> str:
    return str(Path(_install()).parent / "promtool")


def _install() -> str:
    return install(
        "prometheus",
        "usr/bin/prometheus",
        "apt-get download -q prometheus prometheus-alertmanager",
        "dpkg-deb -x prometheus_*.deb .",
        "dpkg-deb -x prometheus-alertmanager_*.deb .",
    )


class Monitoring:
    """Both programs. The alerts wait for a tenth of a second instead of minutes."""

    def __init__(self, folder: Path, targets: dict[str, str], tokens: dict[str, str]) -> None:
        program = _install()
        fresh(folder)
        self.port, alerting = free_port(), free_port()
        self.alerts_url = f"http://127.0.0.1:{alerting}/api/v2/alerts"
        (folder / "alertmanager.yml").write_text(
            json.dumps({"route": {"receiver": "none"}, "receivers": [{"name": "none"}]})
        )
        manager = Path(program).parent / "prometheus-alertmanager"
        start(
            [
                *("unshare", "--map-root-user", "--mount", "sh", "-ec", _WITH_TEMPLATES),
                manager.parents[1] / "share" / "prometheus",
                manager,
                f"--config.file={folder}/alertmanager.yml",
                f"--storage.path={folder}/alerts",
                f"--web.listen-address=127.0.0.1:{alerting}",
                "--cluster.listen-address=",
            ],
            lambda: answers(alerting),
            folder / "alertmanager.log",
        )
        config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": _PAUSE, "evaluation_interval": _PAUSE}
        config["alerting"]["alertmanagers"][0]["static_configs"] = [
            {"targets": [f"127.0.0.1:{alerting}"]}
        ]
        for job in config["scrape_configs"]:
            job["static_configs"] = [{"targets": [targets[job["job_name"]]]}]
            file = job["authorization"]["credentials_file"]
            (folder / file).write_text(tokens[job["job_name"]])
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        rules = yaml.safe_load((DEPLOY / "alerts.yml").read_text())
        for rule in rules["groups"][0]["rules"]:
            if "for" in rule:
                rule["for"] = "100ms"
        (folder / "alerts.yml").write_text(yaml.safe_dump(rules))
        start(
            [
                program,
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{self.port}",
            ],
            lambda: answers(self.port),
            folder / "prometheus.log",
        )
        # it listens before its storage is open, and refuses queries meanwhile
        wait_until(lambda: _is_ready(f"http://127.0.0.1:{self.port}/-/ready"))

    def query(self, text: str) -> list[dict[str, Any]]:
        """The samples of an instant query: `metric` and `value`."""
        query = urllib.parse.urlencode({"query": text})
        found = _get(f"http://127.0.0.1:{self.port}/api/v1/query?{query}")
        return list(found["data"]["result"])

    def list_alerts(self) -> set[str]:
        """The alerts that fire, as Alertmanager has them."""
        return {each["labels"]["alertname"] for each in _get(self.alerts_url)}


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return bool(answer.status == 200)
    except urllib.error.URLError:
        return False


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return json.load(answer)
