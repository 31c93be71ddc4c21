"""Pod fields of tasks and settings are tried at the API server, and refusals name the field."""

import asyncio
import json
from typing import Any

import pytest

from cavvy.providers.base import Refused
from cavvy.providers.kubernetes.api import ApiServerRefused
from cavvy.providers.kubernetes.options import read_options
from cavvy.providers.kubernetes.pod_fields import find_refused

Object = dict[str, Any]
PLAIN: Object = {
    "metadata": {"name": "p", "labels": {}},
    "spec": {"containers": [{"name": "work", "command": ["sh"]}], "volumes": []},
}


class TrialServer:
    """An API server that refuses pods with certain words, and drops fields that it does not know."""

    def __init__(self, refuses: str = "\0", drops: str = "\0", kind: int = 403) -> None:
        self.refuses, self.drops, self.kind, self.trials = refuses, drops, kind, 0

    async def make(self, path: str, body: Object, *, dry_run: bool = False) -> Object:
        assert dry_run
        self.trials += 1
        if self.refuses in json.dumps(body):
            raise ApiServerRefused(self.kind, "Forbidden", f"webhook denied: {self.refuses}")
        found: Object = json.loads(json.dumps(body))
        found["spec"].pop(self.drops, None)
        return found


FIELDS: Object = {
    "metadata": {"annotations": {"team": "a"}},
    "spec": {
        "hostIPC": True,
        "volumes": [{"name": "fast", "emptyDir": {}}],
        "containers": [
            {
                "securityContext": {"privileged": True},
                "resources": {"limits": {"rdma/ib": 1, "ephemeral-storage": "9Gi"}},
                "volumeMounts": [{"name": "fast", "mountPath": "/fast"}],
            }
        ],
    },
}


def refused(server: TrialServer) -> list[str]:
    found = asyncio.run(find_refused(server, "/pods", PLAIN, FIELDS))  # type: ignore[arg-type]  # the part in use
    return list(found)


def test_fields_that_are_accepted_take_one_dry_run() -> None:
    server = TrialServer()
    assert refused(server) == []
    assert server.trials == 1


@pytest.mark.parametrize(
    ("word", "field"),
    [
        ("hostIPC", "spec.hostIPC"),
        ("privileged", "spec.containers[0].securityContext.privileged"),
        ("rdma/ib", "spec.containers[0].resources.limits.rdma/ib"),
        ("team", "metadata.annotations.team"),
        ("emptyDir", "spec.volumes"),
    ],
)
def test_the_field_that_is_refused_is_named(word: str, field: str) -> None:
    assert refused(TrialServer(refuses=word)) == [f"{field}: webhook denied: {word}"]


def test_a_field_that_the_server_drops_is_named() -> None:
    told = "spec.hostIPC: the API server does not know this field"
    assert refused(TrialServer(drops="hostIPC")) == [told]


def test_values_that_a_server_leaves_out_are_accepted() -> None:
    fields = {"spec": {"hostIPC": False, "runtimeClassName": None}}
    dropping = TrialServer(drops="hostIPC")
    assert not asyncio.run(find_refused(dropping, "/pods", PLAIN, fields))  # type: ignore[arg-type]  # as above


def test_what_refuses_every_pod_is_not_blamed_on_one_field() -> None:
    (told,) = refused(TrialServer(refuses="work"))
    assert told.endswith("webhook denied: work")
    assert refused(TrialServer(refuses="hostIPC", kind=503)) == []  # it may be accepted later


def test_the_settings_name_fields_of_every_pod() -> None:
    assert read_options({"pod": "{spec: {hostIPC: true}}"}).pod == {"spec": {"hostIPC": True}}
    assert read_options({}).pod == {}
    for wrong in ("{", "[a: b]", "/nonexistent/pod.yaml"):
        with pytest.raises(Refused, match=r"\[providers.kubernetes\] pod:"):
            read_options({"pod": wrong})
