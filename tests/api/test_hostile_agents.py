"""Nothing that an agent says blocks what it says later, and no request of its gets a 5xx."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.api.api_state import KINDS, Api, open_api, until
from tests.api.hostile_agent import LASTING, attack_all, make_attacks
from tests.api.test_api_agents import claim, report, start

EXIT = {"kind": "exited", "outcome": "succeeded", "exit_code": 0}
JOB = "/v1/projects/default/jobs/t"


async def _phase(api: Api, phase: str) -> bool:
    found: str = (await api.http.get(JOB)).json()["phase"]
    return found == phase


async def _refusals(api: Api) -> list[str]:
    events = (await api.http.get(JOB + "/events")).json()["events"]
    return [each["text"] for each in events if each["kind"] == "refused"]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("message", "fault"),
    [
        ({"kind": "checkpoint", "bytes": 5, "files": 1, "cost_s": 1e15}, "cost_s"),
        ({"kind": "checkpoint", "newest_at": "2026-03-01T12:00:00"}, "newest_at"),
        ({"kind": "running", "at": "2026-03-01T12:00:00"}, "at"),
        ({"kind": "notice", "seconds": 1e15}, "seconds"),
        ({"kind": "progress", "values": {"a": [1]}}, "values"),
        ({"kind": "telemetry", "values": {"a": 10**400}}, "values"),
        ({"kind": "event", "name": ["check"], "text": "x"}, "name"),
        ({"kind": 7}, "kind"),
    ],
)
async def test_a_message_that_cannot_be_applied_is_told_and_the_next_one_counts(
    api: Api, message: dict[str, Any], fault: str
) -> None:
    gang = await start(api)
    await claim(api, gang)
    first = await report(api, gang, {"seq": 1, **message}, {"seq": 2, **EXIT})
    assert (first.status_code, first.json()["ack"]) == (200, 2)
    assert await until(lambda: _phase(api, "done"))
    [told] = await _refusals(api)
    assert f"{fault}: " in told


@pytest.mark.anyio
async def test_an_exit_counts_without_what_is_wrong_with_it(api: Api) -> None:
    gang = await start(api)
    await claim(api, gang)
    ended = {"seq": 1, **EXIT, "log_bytes": -1, "at": "9999-12-31T23:59:59", "reason": "x" * 99_999}
    assert (await report(api, gang, ended)).json()["ack"] == 1
    assert await until(lambda: _phase(api, "done"))


@pytest.mark.anyio
async def test_figures_that_are_no_json_for_others_are_refused_alone(api: Api) -> None:
    gang = await start(api)
    await claim(api, gang)
    said = [
        {"seq": 1, "kind": "progress", "values": {"a": float("nan")}},
        {"seq": 2, "kind": "progress", "values": {"half\ud800": "\udfff", "done": 3}},
        {"seq": 3, "kind": "running"},
    ]
    body = b'{"gang": "%s", "rank": 0, "nonce": "n1", "messages": %s}' % (
        gang.encode(),
        json.dumps(said).encode(),
    )
    answer = await api.http.post("/agent/v1/messages", content=body, headers=api.agent(gang))
    assert (answer.status_code, answer.json()["ack"]) == (200, 3)
    [node] = (await api.http.get(JOB)).json()["attempts"][0]["nodes"]
    assert node["progress"] == {"half?": "?", "done": 3}


@pytest.mark.anyio
async def test_refusals_are_told_twenty_times_at_most(api: Api) -> None:
    gang = await start(api)
    await claim(api, gang)
    many = [{"seq": seq, "kind": "notice", "seconds": -1} for seq in range(1, 101)]
    assert (await report(api, gang, *many)).json()["ack"] == 100
    told = await _refusals(api)
    assert len(told) == 20
    assert told[-1].endswith("further ones are refused without an event")


@pytest.mark.anyio
@pytest.mark.parametrize("kind", KINDS)
async def test_an_agent_that_says_anything_meets_no_fault_of_ours(
    kind: str, tmp_path: Path, anyio_backend: str
) -> None:
    seen: Counter[int] = Counter()
    async with open_api(kind, tmp_path, script=LASTING) as api:
        assert await attack_all(api, make_attacks(40, seed_=1), seen) == []
    assert sum(seen.values()) > 200
