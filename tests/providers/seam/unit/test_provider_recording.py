"""What a recording of `cavvy check --live` contains, and when it ends."""

import asyncio
import json
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.records import make_gang_spec

from cavvy.domain.offers import Offer
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.providers.base import AgentEndpoint, GangSpec
from cavvy.providers.recording import FOLDER, TAG, CallRecorder, redact_body, redact_reply

OURS = "cv-0123456789-gang-ab12-0-1"
PATH = "/subscriptions/11-22/resourceGroups/crew/providers/Microsoft.Compute/virtualMachines"


def make_gang(name: str = "gang", **changes: Any) -> GangSpec:
    gang = make_gang_spec(
        Offer(provider="any", region="here", instance_type="small", rate=HourlyRate(0)),
        name=name,
        agent_endpoint=AgentEndpoint(address="https://server:1", token="claim"),
        lease=timedelta(minutes=1),
        longest=timedelta(minutes=5),
        labels={TAG: "1"},
    )
    return replace(gang, **changes)


@pytest.mark.parametrize(
    ("call", "field", "other"),
    [
        ("GET /instances?per_page=500", "label", {"id": "9", "label": "web", "main_ip": "1.2.3.4"}),
        ("GET /instances", "hostname", {"id": "9", "hostname": "web", "ip": "1.2.3.4"}),
        ("GET /unknown", "name", {"id": 9, "name": "web", "address": "1.2.3.4"}),
        (f"GET {PATH}?statusOnly=true", "id", {"id": f"{PATH}/web", "properties": {"ip": 1}}),
    ],
)
def test_machines_that_cavvy_did_not_make_are_left_out(
    call: str, field: str, other: Mapping[str, object]
) -> None:
    mine = {"status": "active", field: f"{PATH}/{OURS}" if field == "id" else OURS}
    told: Any = redact_reply(call, {"list": [mine, other]})
    assert len(told["list"]) == 1
    assert told["list"][0]["status"] == "active"
    assert OURS in told["list"][0][field]
    assert "crew" not in str(told)


def test_a_text_in_an_unknown_field_is_masked_also_in_a_machine_that_cavvy_made() -> None:
    machine = {
        "label": OURS,
        "main_ip": "1.2.3.4",
        "kvm": "https://cloud/console?data=opens",
        "entrance": "https://cloud/other?data=opens",
        "keys": [{"key": "ssh-keys", "value": "alice:ssh-rsa opens"}],
        "tags": [{"key": "cavvy-gang", "value": "gang"}],
        "owner_no": {"customer_id": 4711},
    }
    told: Any = redact_reply("POST /instances", {"instance": machine})["instance"]  # type: ignore[index]
    assert (told["label"], told["main_ip"]) == (OURS, "1.2.3.4")
    assert told["tags"] == [{"key": "cavvy-gang", "value": "gang"}]
    for secret in ("opens", "alice", "4711"):
        assert secret not in json.dumps(told)


def test_products_are_kept_and_names_that_users_chose_are_not() -> None:
    plans = {"plans": [{"id": "vc2", "gpu_type": "A40", "name": "small"}]}
    assert redact_reply("GET /v2/plans?type=all", plans) == plans
    keys = {"data": [{"id": "7f", "name": "alice", "public_key": "ssh-rsa alice"}]}
    assert redact_reply("GET /ssh-keys", keys) == {
        "data": [{"id": "redacted", "name": "redacted", "public_key": "redacted"}]
    }
    body = {"ssh_key_names": ["alice"], "name": OURS, "metadata": {"value": "#!/bin/sh"}}
    assert redact_body(body) == {
        "ssh_key_names": ["redacted"],
        "name": OURS,
        "metadata": {"value": "redacted"},
    }


def test_a_cloud_adds_fields_that_are_kept() -> None:
    machine = {"name": OURS, "rack_row": "r7", "entrance": "opens"}
    assert redact_reply("GET /servers", machine, {"rackrow"}) == machine | {"entrance": "redacted"}
    assert redact_reply("GET /servers", machine) != redact_reply(
        "GET /servers", machine, {"rackrow"}
    )


def test_messages_contain_no_accounts_and_no_persons() -> None:
    message = "arn:aws:iam::1:user/alice in projects/acme-1 of alice@acme.org was refused"
    told = str(redact_reply("GET /x", message))
    assert told.endswith("was refused")
    assert "alice" not in told
    assert "acme" not in told


class Recorded:
    """A recorder and its clock."""

    def __init__(self, home: Path) -> None:
        self.home, self.now = home, 0.0
        self.recorder = CallRecorder(home, "any", "i", lambda: self.now)

    def read(self, reply: object) -> None:
        self.recorder.add("GET /x", None, {"status": 200, "reply": reply}, writes=False)

    def calls(self, gang: str) -> list[Mapping[str, Any]]:
        asyncio.run(self.recorder.end(gang))
        path = self.home / FOLDER / f"{gang}.json"
        return list(json.loads(path.read_text())["calls"]) if path.exists() else []


def test_only_short_gangs_with_the_label_are_recorded(tmp_path: Path) -> None:
    recorder = Recorded(tmp_path).recorder
    assert not recorder.begin(make_gang(longest=None))
    assert not recorder.begin(make_gang(longest=timedelta(days=30)))
    assert not recorder.begin(make_gang(labels={}))
    assert recorder.begin(make_gang())


def test_few_gangs_are_recorded_at_a_time(tmp_path: Path) -> None:
    recorder = Recorded(tmp_path).recorder
    begun = [recorder.begin(make_gang(f"gang-{number}")) for number in range(10)]
    assert begun == [True] * 4 + [False] * 6


def test_a_recording_has_a_limited_size_and_age(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cavvy.providers.recording._MOST_CHARACTERS", 1000)
    held = Recorded(tmp_path)
    held.recorder.begin(make_gang("large"))
    for number in range(100):
        held.read({"count": number})
    assert 1 < len(held.calls("large")) < 20
    held.recorder.begin(make_gang("old"))
    held.read({"count": 1})
    held.now += timedelta(hours=1).total_seconds()
    assert held.recorder.recorded() == []
    assert held.calls("old") == []
