"""The objects in deploy/kubernetes: they grant what the provider needs and no more, and the server
reads their settings.
"""

from typing import Any

import yaml
from tests.conftest import ROOT

from cavvy import settings
from cavvy.providers.kubernetes.whoami import make_policy

OBJECTS = ROOT / "deploy" / "kubernetes"


def read(path: str) -> dict[str, Any]:
    """The objects of a file by their kinds."""
    return {each["kind"]: each for each in yaml.safe_load_all((OBJECTS / path).read_text())}


def test_the_rights_are_those_that_the_provider_needs() -> None:
    needed = {each["kind"]: each for each in yaml.safe_load_all(make_policy("cavvy"))}
    granted = read("server/rights.yaml") | read("jobs/rights.yaml")
    assert granted.keys() == needed.keys()
    for kind in ("Role", "ClusterRole"):
        assert granted[kind]["rules"] == needed[kind]["rules"]
    for kind in ("RoleBinding", "ClusterRoleBinding"):
        assert granted[kind]["roleRef"] == needed[kind]["roleRef"]
    assert granted["RoleBinding"]["subjects"] == needed["RoleBinding"]["subjects"]


def test_jobs_have_a_namespace_of_their_own() -> None:
    """In the server's namespace, a task could name the server's volume."""
    loaded = settings.load({"CAVVY_CONFIG": str(OBJECTS / "server/settings.toml")})
    jobs = yaml.safe_load((OBJECTS / "overlay/jobs/kustomization.yaml").read_text())
    server = yaml.safe_load((OBJECTS / "overlay/server/kustomization.yaml").read_text())
    assert loaded.providers["kubernetes"]["namespace"] == jobs["namespace"]
    assert jobs["namespace"] != server["namespace"]
    assert loaded.providers["local"]["enabled"] is False
    (subject,) = read("jobs/rights.yaml")["RoleBinding"]["subjects"]
    assert subject["namespace"] == server["namespace"]


def test_settings_and_probes_name_what_the_pod_has() -> None:
    pod = read("server/deployment.yaml")["Deployment"]["spec"]["template"]["spec"]
    (server,) = pod["containers"]
    variables = {each["name"]: each["value"] for each in server["env"]}
    loaded = settings.load({"CAVVY_CONFIG": str(OBJECTS / "server/settings.toml")})
    places = {each["name"]: each["mountPath"] for each in server["volumeMounts"]}
    assert {each["name"] for each in pod["volumes"]} == set(places)
    assert variables["CAVVY_CONFIG"] == f"{places['settings']}/settings.toml"
    assert variables["CAVVY_HOME"].startswith(f"{places['state']}/")
    assert loaded.text("server.tls_cert") == f"{places['tls']}/tls.crt"
    assert loaded.text("server.tls_key") == f"{places['tls']}/tls.key"
    (port,) = server["ports"]
    assert loaded.text("server.listen").endswith(f":{port['containerPort']}")
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        get = server[probe]["httpGet"]
        assert get == {"path": "/v1/health", "port": port["name"], "scheme": "HTTPS"}
