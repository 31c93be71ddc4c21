"""The Helm chart: it is made of the Kustomize base, and uses all of its values."""

import re
from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import Any

import pytest
import yaml
from scripts.deploy.helm import BASE, CHART, make_chart

from cavvy import settings

JOBS = "gpu-jobs"
_CALL = re.compile(r"\{\{ ([.\w]+)(?: \| ([\w ]+))? \}\}")


def render(values: Mapping[str, str], namespace: str = "cavvy") -> Iterator[dict[str, Any]]:
    """The objects of the chart, as Helm makes them from the few calls that the chart uses."""

    def put(call: "re.Match[str]") -> str:
        name, function = call.groups()
        text = namespace if name == ".Release.Namespace" else values[name.removeprefix(".Values.")]
        match (function or "").split():
            case []:
                return text
            case ["sha256sum"]:
                return sha256(text.encode()).hexdigest()
            case ["indent", width]:
                return "\n".join(" " * int(width) + line for line in text.split("\n"))
        raise AssertionError(function)

    for template in sorted((CHART / "templates").iterdir()):
        text = _CALL.sub(put, template.read_text())
        assert "{{" not in text
        yield from yaml.safe_load_all(text)


@pytest.fixture
def values() -> dict[str, str]:
    return dict(yaml.safe_load((CHART / "values.yaml").read_text()))


def test_the_chart_is_up_to_date() -> None:
    there = {str(path.relative_to(CHART)) for path in CHART.rglob("*.yaml")}
    made = make_chart()
    assert there == made.keys(), "run scripts/deploy/helm.py"
    for path, text in made.items():
        assert (CHART / path).read_text() == text, "run scripts/deploy/helm.py"


def test_each_value_is_used_and_known(values: dict[str, str]) -> None:
    text = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    assert set(re.findall(r"\.Values\.(\w+)", text)) == values.keys()


def test_objects_are_those_of_the_base_in_the_chosen_places(values: dict[str, str]) -> None:
    changed = {**values, "jobsNamespace": JOBS, "image": "registry.example.com/cavvy:2"}
    objects = {each["kind"]: each for each in render(changed, "gpu")}
    base = {
        each["kind"]: each
        for path in sorted(BASE.glob("[js]*/*.yaml"))
        for each in yaml.safe_load_all(path.read_text())
    }
    assert objects.keys() - {"ConfigMap"} == base.keys() - {"Kustomization"}
    for kind in ("Role", "ClusterRole"):
        assert objects[kind]["rules"] == base[kind]["rules"]
    for kind, found in objects.items():
        place = found["metadata"].get("namespace")
        wanted = JOBS if kind in ("Role", "RoleBinding") else "gpu"
        assert place == (None if kind.startswith("Cluster") else wanted)
    for kind in ("RoleBinding", "ClusterRoleBinding"):
        assert [each["namespace"] for each in objects[kind]["subjects"]] == ["gpu"]


def test_the_server_reads_the_charts_settings(values: dict[str, str], tmp_path: Any) -> None:
    objects = {each["kind"]: each for each in render({**values, "jobsNamespace": JOBS})}
    pod = objects["Deployment"]["spec"]["template"]["spec"]
    (server,) = pod["containers"]
    environ = {each["name"]: each["value"] for each in server["env"]}
    file = tmp_path / "settings.toml"
    file.write_text(objects["ConfigMap"]["data"]["settings.toml"])
    loaded = settings.load({**environ, "CAVVY_CONFIG": str(file)})
    assert loaded.providers["kubernetes"]["namespace"] == JOBS
    assert loaded.text("server.listen") == "0.0.0.0:7443"
    base = yaml.safe_load((BASE / "server/deployment.yaml").read_text())["spec"]["template"]["spec"]
    kept = {**server, "env": server["env"][:-1]}
    assert {**kept, "image": "cavvy:latest"} == base["containers"][0]
