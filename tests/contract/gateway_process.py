"""The gateway as a process of its own, and its control socket."""

import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tests.contract.replica_stand_in import ReplicaStandIn
from tests.system.tied import start_tied
from tests.waits import PATIENCE_S, START_S

from cavvy.capabilities.serving.gateway.own_values import describe_owner

OWNER_TOKEN = "-9Zx" + "kT3wQ" * 7 + "w_8k"  # of the owner: 43 characters


class GatewayProcess:
    lacks: dict[str, str] = {}  # noqa: RUF012  # what the plane cannot do, and why

    def __init__(self, **config: Any) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="cavvy-gw-"))
        self.config = {
            "control": str(self.folder / "control"),
            "state": str(self.folder / "state"),
            "counts": str(self.folder / "counts"),
            "names": ["any.example"],
            "owner": msgspec.to_builtins(describe_owner(OWNER_TOKEN)),
            **config,
        }
        self.start()

    def start(self) -> None:
        path = self.folder / "gateway.json"
        path.write_text(json.dumps(self.config))
        self.process = start_tied(
            [sys.executable, "-m", "cavvy.capabilities.serving.gateway", str(path)],
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        with self.process.stdout as line:
            self.port: int = json.loads(line.readline())["port"]

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(START_S)

    def remove(self) -> None:
        if self.process.poll() is None:
            self.stop()
        shutil.rmtree(self.folder)

    def control(self, **line: Any) -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(START_S)
            connection.connect(self.config["control"])
            connection.sendall(json.dumps(line).encode() + b"\n")
            with connection.makefile("rb") as file:
                return json.loads(file.readline())

    def set_services(self, *services: dict[str, Any]) -> None:
        assert self.control(type="services", services=services) == {}

    def set_replicas(self, service: str, replicas: Sequence[ReplicaStandIn], **more: Any) -> None:
        rows = describe_replicas(replicas, **more)
        assert self.control(type="replicas", service=service, replicas=rows) == {}

    def facts(self, service: str) -> dict[str, Any]:
        found = self.control(type="statistics")["services"]
        return next(each for each in found if each["name"] == service)


def describe_replicas(
    replicas: Sequence[ReplicaStandIn],
    canaries: Collection[str] = (),
    tiers: Mapping[str, int] | None = None,
    places: Mapping[str, Sequence[str]] | None = None,
    **more: Any,
) -> list[dict[str, Any]]:
    """The addresses of replicas, as the control socket takes them."""
    return [
        {
            "id": each.name,
            "host": "127.0.0.1",
            "port": each.port,
            "canary": each.name in canaries,
            "tier": (tiers or {}).get(each.name, 0),
            "places": (places or {}).get(each.name, ()),
            **more,
        }
        for each in replicas
    ]


def wait_for(condition: Any) -> Any:
    """Poll until the condition holds; its value."""
    until = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        if time.monotonic() > until:
            line = traceback.extract_stack(limit=2)[0].line
            raise AssertionError(f"it did not happen within {PATIENCE_S:.0f} s: {line}")
        time.sleep(0.005)
    return value
