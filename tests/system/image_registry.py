"""Debian's registry of container images, and a recording of what the real cosign put into one."""

import base64
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.system.ports import free_port
from tests.system.storages import answers, fresh, install, once, start

RECORDING = Path(__file__).parent / "frozen" / "cosign-2.5.0.json"
LOGIN = "puller:word"
# of LOGIN, as `htpasswd -B` writes it
_HTPASSWD = "puller:$2b$04$abcdefghijklmnopqrstuuB/GrfUOm5dtrEiT8lcouu5XB5ftbWLi\n"


def read_recording() -> dict[str, Any]:
    """`digest` of an image, the `key` that signed it, `manifests` by tag or digest, `blobs`."""
    found: dict[str, Any] = json.loads(RECORDING.read_text())
    return found


@once
def start_registry(folder: Path) -> str:
    """HOST:PORT of a registry that asks for LOGIN."""
    program = install(
        "docker-registry",
        "usr/bin/docker-registry",
        "apt-get download -q docker-registry",
        "dpkg-deb -x docker-registry_*.deb .",
    )
    fresh(folder)
    port = free_port()
    (folder / "htpasswd").write_text(_HTPASSWD)
    config = {
        "version": "0.1",
        "storage": {"filesystem": {"rootdirectory": f"{folder}/data"}},
        "http": {"addr": f"127.0.0.1:{port}"},
        "auth": {"htpasswd": {"realm": "test", "path": f"{folder}/htpasswd"}},
    }
    (folder / "config.yml").write_text(json.dumps(config))
    start([program, "serve", folder / "config.yml"], lambda: answers(port), folder / "log")
    return f"127.0.0.1:{port}"


def push(registry: str, repository: str, recording: dict[str, Any]) -> None:
    """Put everything of a recording into a repository."""
    root = f"http://{registry}/v2/{repository}"
    for digest, text in recording["blobs"].items():
        place = _send("POST", f"{root}/blobs/uploads/")
        _send("PUT", f"{place}&digest={digest}", base64.b64decode(text))
    # a list of manifests is accepted only after its manifests
    for name, text in sorted(recording["manifests"].items(), key=lambda each: "index" in each[1]):
        _send("PUT", f"{root}/manifests/{name}", text.encode(), json.loads(text)["mediaType"])


def _send(method: str, url: str, body: bytes = b"", kind: str = "application/octet-stream") -> str:
    """Where the answer says that something is."""
    basic = base64.b64encode(LOGIN.encode()).decode()
    headers = {"Authorization": f"Basic {basic}", "Content-Type": kind}
    request = urllib.request.Request(url, data=body, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return str(answer.headers.get("Location", ""))
    except urllib.error.HTTPError as error:
        with error:
            raise AssertionError(f"{method} {url}: {error.read().decode()}") from error
