"""Nothing that an agent says blocks what it says later, and no request of its gets a 5xx."""

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.api.api.test_api_agents import FOLDER, ask_pack, claim, freeze, report, start, write_log
from tests.api.api_state import KINDS, Api, open_api, until
from tests.api.hostile_agent import LASTING, attack_all, make_attacks

EXIT = {"kind": "exited", "outcome": "succeeded", "exit_code": 0}
JOB = "/v1/projects/default/jobs/t"


async def _phase(api: Api, phase: str) -> bool:
    found: str = (await api.http.get(JOB)).json()["phase"]
    return found == phase


async def _refusals(api: Api) -> list[str]:
    events = (await api.http.get(JOB + "/events")).json()["events"]
    return [each["text"] for each in events if each["kind"] == "refused"]


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


async def test_an_exit_counts_without_what_is_wrong_with_it(api: Api) -> None:
    gang = await start(api)
    await claim(api, gang)
    ended = {"seq": 1, **EXIT, "log_bytes": -1, "at": "9999-12-31T23:59:59", "reason": "x" * 99_999}
    assert (await report(api, gang, ended)).json()["ack"] == 1
    assert await until(lambda: _phase(api, "done"))


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


async def test_refusals_are_told_twenty_times_at_most(api: Api) -> None:
    gang = await start(api)
    await claim(api, gang)
    many = [{"seq": seq, "kind": "notice", "seconds": -1} for seq in range(1, 101)]
    assert (await report(api, gang, *many)).json()["ack"] == 100
    told = await _refusals(api)
    assert len(told) == 20
    assert told[-1].endswith("further refused messages get no event")


@pytest.mark.parametrize("kind", KINDS)
async def test_an_agent_that_says_anything_meets_no_fault_of_ours(
    kind: str, tmp_path: Path
) -> None:
    seen: Counter[int] = Counter()
    async with open_api(kind, tmp_path, script=LASTING) as api:
        assert await attack_all(api, make_attacks(40, seed_=1), seen) == []
    assert sum(seen.values()) > 200


async def test_a_token_opens_the_files_of_its_own_job_only(api: Api) -> None:
    names = []
    for data in (b"ours", b"theirs"):
        names.append(hashlib.sha256(data).hexdigest())
        await api.http.put(f"/v1/projects/default/blobs/{names[-1]}", content=data)
    ours, theirs = names
    gang = await start(api, FOLDER, origin=await freeze(api, ours))
    other = await freeze(api, theirs)
    for name, status in ((ours, 200), (theirs, 404), (other["snapshot"], 404)):
        got = await api.http.get(
            f"/agent/v1/blobs/{name}", params={"gang": gang}, headers=api.agent(gang)
        )
        assert got.status_code == status, name
    pack = (await ask_pack(api, gang, other["snapshot"], theirs, ours)).content
    assert (b"ours" in pack, b"theirs" in pack, b"files" in pack) == (True, False, False)


async def test_a_token_ends_with_its_attempt(api: Api) -> None:
    """Asks every route that the server has for agents, so a new one is asked too."""
    gang = await start(api)
    await claim(api, gang)
    assert (await write_log(api, gang, b"mine\n", 0)).status_code == 200
    await report(api, gang, {"seq": 1, **EXIT, "log_bytes": 5})
    assert await until(lambda: _ended(api, gang))
    query = {"gang": gang, "rank": 0, "offset": 0, "size": 1, "length": 1, "path": "a"}
    asked = {"gang": gang, "rank": 0, "nonce": "n1", "address": "a", "messages": [], "blobs": []}
    asked |= {"made_at": "2026-01-01T00:00:00Z", "files": [], "upload": "u", "tags": [], "size": 1}
    routes = [
        (method, path)
        for path, methods in (await api.http.get("/v1/openapi.json")).json()["paths"].items()
        if path.startswith("/agent/v1/")
        for method in methods
    ]
    assert len(routes) > 15
    for method, path in routes:
        path = path.replace("{exec_id}", "e").replace("{blob}", "0" * 64).replace("{index}", "0")
        answer = await api.http.request(
            method, path, params=query, json=asked, headers=api.agent(gang)
        )
        assert (answer.status_code, answer.json()["code"]) == (409, "claimed"), (method, path)
    assert (await api.http.get(JOB + "/logs")).content == b"mine\n"


async def test_the_document_names_the_token_of_each_route(api: Api) -> None:
    document = (await api.http.get("/v1/openapi.json")).json()
    found: set[str] = set()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            [name] = [name for each in operation["security"] for name in each] or [""]
            found.add(name)
            answer = await api.http.request(method, path, headers={"Authorization": "Bearer x"})
            if path.startswith("/agent/v1/"):
                assert name == "gang"
            elif path.startswith(("/nodes/v1/", "/edge/v1/")) and name:
                assert name == "machine"
            else:
                assert (answer.status_code == 401) is (name == "user"), path
    assert found == {*document["components"]["securitySchemes"], ""}


async def _ended(api: Api, gang: str) -> bool:
    return (await api.app_state.store.attempt_of_gang(gang)).phase == "ended"
