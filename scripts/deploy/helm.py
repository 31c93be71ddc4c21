"""Makes the Helm chart in deploy/helm from the Kustomize base in deploy/kubernetes. Run it after a
change of the base; a test fails if the chart is out of date.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "deploy" / "kubernetes"
CHART = ROOT / "deploy" / "helm" / "cavvy"
_HEAD = "# Written by scripts/deploy/helm.py from deploy/kubernetes; do not edit.\n"
_RELEASE = "{{ .Release.Namespace }}"
_JOBS = "{{ .Values.jobsNamespace }}"
_VALUES = """\
# The image that `make dist` builds, where you pushed it.
image: cavvy:latest
# Jobs run in this namespace, which must exist and differ from the server's.
jobsNamespace: cavvy-jobs
# The secret with the certificate for users, of the type kubernetes.io/tls.
tlsSecret: cavvy-tls
# The service's type: ClusterIP, or LoadBalancer to reach it from outside.
serviceType: ClusterIP
# The volume with the database, keys, logs and uploads.
storage: 20Gi
# The settings file: docs/reference/settings.md and docs/reference/providers.md.
settings: |
"""
_SETTINGS = """\
apiVersion: v1
kind: ConfigMap
metadata:
  name: cavvy-settings
  namespace: '{{ .Release.Namespace }}'
  labels: {app.kubernetes.io/name: cavvy}
data:
  settings.toml: |
{{ .Values.settings | indent 4 }}
"""


def make_chart() -> Mapping[str, str]:
    """The files of the chart, by their paths."""
    settings = (BASE / "server/settings.toml").read_text()
    values = _VALUES + "".join(f"  {line}".rstrip() + "\n" for line in settings.splitlines())
    files = {
        "Chart.yaml": yaml.safe_dump(_describe(), sort_keys=False),
        "values.yaml": values,
        "templates/settings.yaml": _SETTINGS,
    }
    for folder, namespace in (("server", _RELEASE), ("jobs", _JOBS)):
        listed = yaml.safe_load((BASE / folder / "kustomization.yaml").read_text())["resources"]
        for name in listed:
            objects = [
                _place(each, namespace)
                for each in yaml.safe_load_all((BASE / folder / name).read_text())
            ]
            text = yaml.safe_dump_all(objects, sort_keys=False, width=1000)
            files[f"templates/{folder}-{name}"] = text
    return {path: _HEAD + text for path, text in files.items()}


def _describe() -> dict[str, object]:
    sys.path.insert(0, str(ROOT / "src"))
    from cavvy import __version__

    return {
        "apiVersion": "v2",
        "name": "cavvy",
        "description": "A control plane for GPUs",
        "type": "application",
        "version": __version__,
        "appVersion": __version__,
    }


def _place(found: dict[str, Any], namespace: str) -> dict[str, Any]:
    """An object with the chart's values in place of those that an overlay would change."""
    if not found["kind"].startswith("Cluster"):
        found["metadata"]["namespace"] = namespace
    for subject in found.get("subjects", ()):
        subject["namespace"] = _RELEASE
    spec = found.get("spec", {})
    match found["kind"]:
        case "Service":
            spec["type"] = "{{ .Values.serviceType }}"
        case "PersistentVolumeClaim":
            spec["resources"]["requests"]["storage"] = "{{ .Values.storage }}"
        case "Deployment":
            _place_pod(spec["template"])
    return found


def _place_pod(template: dict[str, Any]) -> None:
    # A change of the settings replaces the pod, as the hash in a name does with Kustomize.
    template["metadata"]["annotations"] = {
        "checksum/settings": "{{ .Values.settings | sha256sum }}"
    }
    (server,) = template["spec"]["containers"]
    server["image"] = "{{ .Values.image }}"
    server["env"].append({"name": "CAVVY_PROVIDERS_KUBERNETES_NAMESPACE", "value": _JOBS})
    for volume in template["spec"]["volumes"]:
        if volume["name"] == "tls":
            volume["secret"]["secretName"] = "{{ .Values.tlsSecret }}"


def main() -> None:
    for path, text in make_chart().items():
        file = CHART / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        print(f"wrote {file.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
