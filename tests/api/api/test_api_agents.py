"""The agents' routes as their page says: claims, messages, logs, orders, commands, blobs, and
whose token.
"""

import asyncio
import hashlib
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.api.api_state import TOKEN, Api, until
from tests.system.storages import GoogleStandIn, start_google

from cavvy.api.execs import JobExecs
from cavvy.api.notifier import ChangeNotifier
from cavvy.api.routes import agents
from cavvy.control.agents import bucket_checkpoints, transfers
from cavvy.domain.markets import Observation, ObservationKind
from cavvy.domain.messages import NEWEST, OLDEST, PROTOCOL
from cavvy.planner.risk import FAILURES_PER_NODE_HOUR, PRIOR_NODE_HOURS
from cavvy.store.base import AtomicWrite
from cavvy.store.blobs import sweep_folders
from cavvy.store.objects.locations import open_place

CLAIM = {
    "rank": 0,
    "nonce": "n1",
    "address": "127.0.0.1",
    "host": {"hostname": "h", "python": "3", "platform": "p"},
}
JOB = "/v1/projects/default/jobs/t"
FOLDER = "{name: t, run: 'true', workdir: .}"


async def start(api: Api, text: str = "{name: t, run: 'true', env: {A: b}}", **ask: Any) -> str:
    """A job whose gang waits for its agents; the gang's name."""
    made = await api.submit(text, **ask)
    return (await api.attempt(made["id"])).gang


async def freeze(api: Api, *names: str) -> dict[str, str]:
    """The origin of a job whose frozen folder is made of these blobs, which are uploaded."""
    files = [{"path": f"f{i}", "sha256": name, "size": 1} for i, name in enumerate(names)]
    manifest = json.dumps({"files": files}).encode()
    snapshot = hashlib.sha256(manifest).hexdigest()
    put = await api.http.put(f"/v1/projects/default/blobs/{snapshot}", content=manifest)
    assert put.status_code == 204
    return {"snapshot": snapshot}


async def claim(api: Api, gang: str, **other: Any) -> Any:
    return await api.http.post(
        "/agent/v1/claim", json={**CLAIM, "gang": gang, **other}, headers=api.agent(gang)
    )


async def report(api: Api, gang: str, *messages: dict[str, Any], nonce: str = "n1") -> Any:
    now = datetime.now(UTC).isoformat()
    body = {
        "gang": gang,
        "rank": 0,
        "nonce": nonce,
        "messages": [{"at": now, **message} for message in messages],
    }
    return await api.http.post("/agent/v1/messages", json=body, headers=api.agent(gang))


async def write_log(api: Api, gang: str, data: bytes, offset: int, **query: int) -> Any:
    parameters = {"gang": gang, "rank": 0, "offset": offset, **query}
    return await api.http.post(
        "/agent/v1/log", params=parameters, content=data, headers=api.agent(gang)
    )


async def test_a_run_from_claim_to_exit(api: Api) -> None:
    gang = await start(api)
    granted = (await claim(api, gang)).json()
    assert granted["state"] == "go"
    assert granted["work"]["run"] == "true"
    assert granted["work"]["env"] == {
        "A": "b",
        "CAVVY_PRICE_USD_HR": "0",
        "CAVVY_LOSSES_PER_HOUR": "0.000157863",
    }
    assert granted["work"]["attempt"] == 1
    assert granted["lease_s"] > 0
    assert (await claim(api, gang)).json()["state"] == "go"
    assert (await report(api, gang, {"seq": 1, "kind": "running"})).json()["ack"] == 1
    assert (await write_log(api, gang, b"hello\n", 0)).json() == {"offset": 6}
    assert (await write_log(api, gang, b"hello\nyou\n", 0)).json() == {"offset": 10}
    assert (await write_log(api, gang, b"gap", 50)).json() == {"offset": 10}
    ended = {"seq": 2, "kind": "exited", "outcome": "succeeded", "exit_code": 0, "log_bytes": 10}
    assert (await report(api, gang, ended)).json()["ack"] == 2
    assert (await report(api, gang, ended)).json()["ack"] == 2
    assert await until(lambda: _phase(api, "done"))
    log = await api.http.get(JOB + "/logs")
    assert log.content == b"hello\nyou\n"
    assert log.headers["cavvy-log-offset"] == "10"


async def test_output_and_the_wait_for_orders_of_a_known_rank_read_no_attempt(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    gang = await start(api)
    await claim(api, gang)
    await report(api, gang, {"seq": 1, "kind": "running"})
    await until(lambda: _phase(api, "running"))
    await report(api, gang, {"seq": 2, "kind": "telemetry", "values": {"cpu_percent": 1}})
    reads: list[str] = []
    store = api.app_state.store
    real = store.attempt_of_gang

    async def read(name: str) -> Any:
        reads.append(name)
        return await real(name)

    monkeypatch.setattr(store, "attempt_of_gang", read)
    assert (await write_log(api, gang, b"one", 0)).json() == {"offset": 3}
    wait = {"gang": gang, "rank": 0, "after": 0, "wait_s": 0}
    orders = await api.http.get("/agent/v1/orders", params=wait, headers=api.agent(gang))
    assert orders.json()["order"] is None
    assert not reads
    await api.http.post(JOB + "/stop", json={})
    assert (await write_log(api, gang, b"two", 3)).status_code == 200
    wait["wait_s"] = 20
    orders = await api.http.get("/agent/v1/orders", params=wait, headers=api.agent(gang))
    assert orders.json()["order"]["kind"] == "stop"


async def test_figures_of_an_agent_that_keeps_them_are_taken_and_all_else_is_stored(
    api: Api,
) -> None:
    gang = await start(api)
    await claim(api, gang)

    async def tell(*messages: dict[str, Any], **other: Any) -> tuple[int, int | None]:
        body = {"gang": gang, "rank": 0, "nonce": "n1", "keeps": True, **other}
        now = datetime.now(UTC).isoformat()
        body["messages"] = [{"at": now, **each} for each in messages]
        answer = await api.http.post("/agent/v1/messages", json=body, headers=api.agent(gang))
        assert answer.status_code == 200, answer.text
        return answer.json()["ack"], answer.json()["taken"]

    def note(seq: int, kind: str = "telemetry", **fields: Any) -> dict[str, Any]:
        return {"seq": seq, "kind": kind, **fields}

    await tell(note(1, "running"))
    await until(lambda: _phase(api, "running"))
    await tell(note(2, values={"gpu_percent": 1}))
    assert (await tell(note(3, values={"gpu_percent": 2})))[1] == 3
    kinds = [note(4, "progress", values={"loss": 1, "note": "ä"}), note(5, values={"x": "1"})]
    odd = [note(6, values={"a": [1]}), note(7, name="n"), note(8, "event", name="n", text="t")]
    for each in (*kinds, *odd):
        ack, taken = await tell(each)
        assert taken in (None, each["seq"])
        assert taken is not None or ack == each["seq"]
    assert await tell(note(9, values={"gpu_percent": 3}), keeps=False) == (9, None)
    [node] = (await api.http.get(JOB)).json()["attempts"][0]["nodes"]
    assert node["telemetry"] == {"gpu_percent": 3}
    assert node["progress"] == {"loss": 1, "note": "ä"}
    wrong = {"gang": gang, "rank": 0, "nonce": "n2", "keeps": True, "messages": [note(10)]}
    for nonce, token, status in (("n2", gang, 409), ("n1", "other", 403)):
        answer = await api.http.post(
            "/agent/v1/messages", json={**wrong, "nonce": nonce}, headers=api.agent(token)
        )
        assert answer.status_code == status


@pytest.mark.parametrize("hours", [-2, 0, 2])
async def test_work_on_a_node_whose_clock_is_wrong_has_its_length(api: Api, hours: int) -> None:
    gang = await start(api)
    await claim(api, gang)

    async def tell(*messages: dict[str, Any]) -> None:
        at = (datetime.now(UTC) + timedelta(hours=hours)).isoformat()
        body = {"gang": gang, "rank": 0, "nonce": "n1", "at": at}
        listed = [{"at": at, **each} for each in messages]
        sent = {**body, "messages": listed}
        await api.http.post("/agent/v1/messages", json=sent, headers=api.agent(gang))

    began = datetime.now(UTC)
    await tell({"seq": 1, "kind": "running"})
    await asyncio.sleep(0.2)
    ends = {"seq": 2, "kind": "exited", "outcome": "succeeded", "exit_code": 0, "log_bytes": 0}
    await tell(ends)
    ended = datetime.now(UTC)
    [node] = (await api.http.get(JOB)).json()["attempts"][0]["nodes"]
    ran, exited = (datetime.fromisoformat(node[each]) for each in ("running_at", "exited_at"))
    assert began <= ran <= exited - timedelta(seconds=0.2) < exited <= ended


async def test_work_knows_its_price_and_how_often_its_market_takes_nodes(api: Api) -> None:
    gang = await start(api, "{name: t, run: 'true', nodes: 2, resources: {cpu: 32+}}", consent=True)
    offer = (await api.app_state.store.attempt_of_gang(gang)).offer
    now = datetime.now(UTC)
    lives = [
        Observation(market=offer.key, kind=ObservationKind.TAKEN, at=now, seconds=3600, nodes=1)
        for _ in range(48)
    ]
    await api.app_state.store.commit(AtomicWrite(observations=lives))
    await claim(api, gang)
    granted = (await claim(api, gang, rank=1, nonce="n2")).json()
    assert granted["work"]["env"]["CAVVY_PRICE_USD_HR"] == "5"
    # 48 losses in 48 node-hours, mixed with the prior's 24 node-hours, for two nodes
    expected = 2 * (48 + FAILURES_PER_NODE_HOUR * PRIOR_NODE_HOURS) / (48 + PRIOR_NODE_HOURS)
    assert float(granted["work"]["env"]["CAVVY_LOSSES_PER_HOUR"]) == pytest.approx(
        expected, rel=1e-5
    )


async def _phase(api: Api, phase: str) -> bool:
    found: str = (await api.http.get(JOB)).json()["phase"]
    return found == phase


async def test_a_rank_is_granted_once(api: Api) -> None:
    gang = await start(api)
    assert (await claim(api, gang)).status_code == 200
    second = await claim(api, gang, nonce="n2")
    assert (second.status_code, second.json()["code"]) == (409, "claimed")
    assert (await report(api, gang, {"seq": 1, "kind": "running"}, nonce="n2")).status_code == 409
    assert (await claim(api, gang, rank=7)).status_code == 409


async def test_a_gang_waits_until_it_is_whole(api: Api) -> None:
    gang = await start(api, "{name: t, run: 'true', nodes: 2}")
    answer = (await claim(api, gang)).json()
    assert answer["state"] == "wait"
    assert answer["after_s"] > 0
    assert (await claim(api, gang, rank=1, nonce="other")).json()["state"] == "go"
    assert (await claim(api, gang)).json()["work"]["addresses"] == ["127.0.0.1", "127.0.0.1"]


async def test_tokens_open_their_own_doors_only(api: Api) -> None:
    gang = await start(api)
    body = {**CLAIM, "gang": gang}
    protocol = {"Cavvy-Agent-Protocol": "1"}
    post = api.http.post
    users = await post("/agent/v1/claim", json=body, headers=protocol)
    assert (users.status_code, users.json()["code"]) == (403, "forbidden")
    others = await post("/agent/v1/claim", json=body, headers=api.agent("rm-00000000-other-1"))
    assert (others.status_code, others.json()["code"]) == (403, "forbidden")
    nobody = await post("/agent/v1/claim", json=body, headers={**protocol, "Authorization": ""})
    assert nobody.status_code in (401, 403)
    for path in ("/v1/jobs", "/v1/openapi.json", "/v1/server", "/"):
        agents = await api.http.get(path, headers=api.agent(gang))
        assert (agents.status_code, agents.json()["code"]) == (401, "unauthorised"), path
    assert TOKEN not in users.text


async def test_an_agent_of_another_time_is_told(api: Api) -> None:
    gang = await start(api)
    for version in ("0", str(NEWEST + 1), "9" * 5000, "", "x"):
        headers = {**api.agent(gang), "Cavvy-Agent-Protocol": version}
        answer = await api.http.post(
            "/agent/v1/claim", json={**CLAIM, "gang": gang}, headers=headers
        )
        assert (answer.status_code, answer.json()["code"]) == (426, "agent-protocol")
        assert answer.json()["message"].endswith(f"this server supports {OLDEST} to {NEWEST}")


async def test_an_agent_two_versions_newer_is_served_and_what_only_it_knows_counts_as_heard(
    api: Api,
) -> None:
    gang = await start(api)

    async def say(route: str, body: dict[str, Any]) -> Any:
        who = {"gang": gang, "rank": 0, "nonce": "n1", "later": {"more": 1}}
        headers = api.agent(gang, NEWEST)
        return (
            await api.http.post(f"/agent/v1/{route}?later=1", json={**who, **body}, headers=headers)
        ).json()

    assert (await say("claim", {"address": "a", "host": {"hostname": "h", "later": [1]}}))[
        "state"
    ] == "go"
    now = datetime.now(UTC).isoformat()
    messages = [
        {"seq": 1, "at": now, "kind": "running", "later": [1, 2]},
        {"seq": 2, "at": now, "kind": "later", "values": {"a": 1}},
        {
            "seq": 3,
            "at": now,
            "kind": "exited",
            "outcome": "later",
            "exit_code": 3,
            "reason": "no name yet",
        },
    ]
    assert (await say("messages", {"messages": messages}))["ack"] == 3
    node = (await api.app_state.store.nodes((await api.app_state.store.attempt_of_gang(gang)).id))[
        0
    ]
    assert (node.exit_outcome, node.exit_code, node.exit_reason) == ("node", 3, "no name yet")


async def test_an_older_agent_gets_no_second_work_on_a_kept_node(api: Api) -> None:
    gang = await start(api, "{name: t, run: 'true', keep: 5m, resources: {cpu: 32+}}", consent=True)
    await claim(api, gang)
    ended = {"seq": 1, "kind": "exited", "outcome": "succeeded", "exit_code": 0, "log_bytes": 0}
    assert (await report(api, gang, ended)).json()["ack"] == 1
    again = {**CLAIM, "gang": gang, "nonce": "n2"}
    old = await api.http.post("/agent/v1/claim", json=again, headers=api.agent(gang, PROTOCOL - 1))
    assert (old.status_code, old.json()["message"]) == (
        409,
        f"warm nodes need an agent with protocol {PROTOCOL}; this agent has protocol {PROTOCOL - 1}",
    )
    todays = await api.http.post("/agent/v1/claim", json=again, headers=api.agent(gang))
    assert todays.json()["state"] == "wait"


async def test_an_unknown_gang_is_gone(api: Api) -> None:
    gang = "rm-12345678-none-1"
    assert (await claim(api, gang)).status_code == 409
    assert (await write_log(api, gang, b"x", 0)).status_code == 410
    answer = await api.http.get(
        "/agent/v1/orders", params={"gang": gang, "rank": 0}, headers=api.agent(gang)
    )
    assert (answer.status_code, answer.json()["code"]) == (410, "gang-not-found")


async def test_orders_are_waited_for(api: Api) -> None:
    gang = await start(api)
    await claim(api, gang)
    await report(api, gang, {"seq": 1, "kind": "running"})
    query = {"gang": gang, "rank": 0, "after": 0, "wait_s": 30}
    waiting = asyncio.create_task(
        api.http.get("/agent/v1/orders", params=query, headers=api.agent(gang))
    )
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await api.http.post(JOB + "/stop", json={"reason": "enough"})
    answer = (await asyncio.wait_for(waiting, 20)).json()
    assert answer["order"]["kind"] == "stop"
    assert answer["lease_s"] > 0


async def test_a_stopping_server_lets_everybody_go(api: Api) -> None:
    gang = await start(api)
    await claim(api, gang)
    query = {"gang": gang, "rank": 0, "after": 0, "wait_s": 60}
    agents = asyncio.create_task(
        api.http.get("/agent/v1/orders", params=query, headers=api.agent(gang))
    )
    users = asyncio.create_task(api.http.get(JOB + "/logs", params={"wait_s": 60, "attempt": 1}))
    await asyncio.sleep(0.1)
    assert not agents.done()
    assert not users.done()
    api.app_state.close_polls()
    answers = await asyncio.wait_for(asyncio.gather(agents, users), 20)
    assert [answer.status_code for answer in answers] == [200, 200]


async def test_logs_go_on_over_attempts_and_wait(api: Api) -> None:
    gang = await start(api, "{name: t, run: 'true', retry: {exit: 1}}")
    await claim(api, gang)
    await report(api, gang, {"seq": 1, "kind": "running"})
    waiting = asyncio.create_task(api.http.get(JOB + "/logs", params={"attempt": 1, "wait_s": 30}))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await write_log(api, gang, b"first\n", 0)
    assert (await waiting).content == b"first\n"
    await report(
        api, gang, {"seq": 2, "kind": "exited", "outcome": "exit", "exit_code": 3, "log_bytes": 6}
    )
    headers = (
        await api.http.get(JOB + "/logs", params={"attempt": 1, "offset": 6, "wait_s": 30})
    ).headers
    assert (headers["cavvy-log-attempt"], headers["cavvy-log-offset"]) == ("2", "0")
    alone = await api.http.get(JOB + "/logs", params={"attempt": 1, "offset": 6, "only": True})
    assert alone.headers["cavvy-log-over"] == "true"
    tail = await api.http.get(JOB + "/logs", params={"attempt": 1, "tail_bytes": 3})
    assert tail.content == b"st\n"
    assert (await api.http.get(JOB + "/logs", params={"attempt": 9})).json()[
        "code"
    ] == "log-not-found"
    assert (await api.http.get(JOB + "/logs", params={"rank": 1})).json()["code"] == "log-not-found"
    for params, message in (
        ({"rank": 1}, "t has only rank 0"),
        ({"attempt": 7}, "t has had only 2 attempts"),
    ):
        answer = (await api.http.get(JOB + "/logs", params=params)).json()
        assert answer["message"] == message


async def test_readers_wait_for_the_log_of_an_attempt_that_has_not_begun(api: Api) -> None:
    answer = await api.post_job("{name: t, run: 'true', schedule: 2050-01-01T00:00Z}")
    assert answer.status_code == 201, answer.text
    wants = {"attempt": 1, "wait_s": 0.05}
    for _ in range(2):
        waits = await api.http.get(JOB + "/logs", params=wants)
        assert (waits.status_code, waits.headers["cavvy-log-over"]) == (200, "false")
        assert waits.headers["cavvy-log-attempt"] == "1"
    early = await api.http.get(JOB + "/logs", params={"attempt": 2, "wait_s": 0.05})
    assert early.json()["code"] == "log-not-found"
    waiting = asyncio.create_task(api.http.get(JOB + "/logs", params={"attempt": 1, "wait_s": 30}))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await api.http.post(JOB + "/stop")
    assert (await waiting).headers["cavvy-log-over"] == "true"
    over = await api.http.get(JOB + "/logs", params=wants)
    assert over.headers["cavvy-log-over"] == "true"
    alone = await api.http.get(JOB + "/logs", params={**wants, "only": True})
    assert alone.json()["code"] == "log-not-found"


async def test_a_long_batch_is_processed_in_parts(api: Api) -> None:
    gang = await start(api)
    await claim(api, gang)
    rows = [{"seq": number + 1, "kind": "telemetry", "values": {}} for number in range(1500)]
    assert (await report(api, gang, *rows)).json()["ack"] == 1000
    assert (await report(api, gang, *rows[1000:])).json()["ack"] == 1500


async def test_only_a_gang_with_its_token_has_its_messages_read(api: Api) -> None:
    gang = await start(api)
    body = {"gang": gang, "rank": "wrong", "nonce": "n1", "messages": [{}]}
    for named, code in ((gang, "invalid-request"), ("other", "forbidden")):
        answer = await api.http.post(
            "/agent/v1/messages", json={**body, "gang": named}, headers=api.agent(gang)
        )
        assert answer.json()["code"] == code


@pytest.mark.parametrize("path", ["messages", "checkpoints"])
async def test_a_body_is_decoded_only_after_the_check_of_its_token(api: Api, path: str) -> None:
    gang = await start(api)
    for rest in ('"rank": "wrong"}', '"values": [NaN, 1', '"files": [{"path": "\\ud800"'):
        for named, code in ((gang, "invalid-request"), ("other", "forbidden")):
            body = f'{{"gang": "{named}", {rest}'.encode()
            answer = await api.http.post(f"/agent/v1/{path}", content=body, headers=api.agent(gang))
            assert answer.json()["code"] == code, (rest, named)
    unnamed = await api.http.post(
        f"/agent/v1/{path}", content=b'{"rank": NaN}', headers=api.agent(gang)
    )
    assert unnamed.json()["code"] == "invalid-request"


async def test_a_command_beside_the_work(api: Api) -> None:
    gang = await start(api)
    early = await api.http.post(JOB + "/exec", json={"command": ["ls"]})
    assert (early.status_code, early.json()["code"]) == (409, "job-not-running")
    await claim(api, gang)
    await report(api, gang, {"seq": 1, "kind": "running"})
    await until(lambda: _phase(api, "running"))
    query = {"gang": gang, "rank": 0, "wait_s": 30}
    waiting = asyncio.create_task(
        api.http.get("/agent/v1/orders", params=query, headers=api.agent(gang))
    )
    await asyncio.sleep(0.05)
    started = await api.http.post(JOB + "/exec", json={"command": ["ls", "-l"]})
    assert started.status_code == 201
    exec_id = started.json()["id"]
    told = (await asyncio.wait_for(waiting, 20)).json()["execs"]
    flags = {"tty": False, "session": False, "attached": True}
    assert told == [{"id": exec_id, "command": ["ls", "-l"], **flags}]
    output = f"/agent/v1/execs/{exec_id}"
    query = {"gang": gang, "rank": 0, "stream": "stdout", "offset": 0}
    reading = asyncio.create_task(api.http.get(f"{JOB}/exec/{exec_id}", params={"wait_s": 30}))
    await asyncio.sleep(0.05)
    for _ in range(2):  # the agent repeats what was not answered; nothing is doubled
        await api.http.post(output, params=query, content=b"abc", headers=api.agent(gang))
    assert (await reading).content == b"abc"
    await api.http.post(
        output, params={**query, "offset": 3, "exit_code": 4}, headers=api.agent(gang)
    )
    end = await api.http.get(f"{JOB}/exec/{exec_id}", params={"offset": 3, "wait_s": 30})
    assert (end.content, end.headers["cavvy-exit-code"]) == (b"", "4")
    none = await api.http.get(f"{JOB}/exec/nosuch")
    assert (none.status_code, none.json()["code"]) == (404, "exec-not-found")


async def run_command(api: Api) -> tuple[str, str]:
    """A job that runs, and a command on its node."""
    gang = await start(api)
    await claim(api, gang)
    await report(api, gang, {"seq": 1, "kind": "running"})
    await until(lambda: _phase(api, "running"))
    exec_id = (await api.http.post(JOB + "/exec", json={"command": ["yes"]})).json()["id"]
    return gang, exec_id


async def test_an_agent_learns_that_the_user_of_a_command_has_gone(api: Api) -> None:
    gang, exec_id = await run_command(api)
    query = {"gang": gang, "rank": 0, "offset": 0}

    async def present(wait_s: float, name: str = exec_id) -> bool:
        target, params = f"/agent/v1/execs/{name}/input", {**query, "wait_s": wait_s}
        answer = await api.http.get(target, params=params, headers=api.agent(gang))
        return not answer.json()["end"]

    assert await present(0)
    waiting = asyncio.create_task(present(30))
    await asyncio.sleep(0.05)
    await api.http.post(f"{JOB}/exec/{exec_id}/input", params={"offset": 0, "end": True})
    assert not await asyncio.wait_for(waiting, 20)
    assert not await present(0, "lost-by-a-restart"), "nobody reads the output"
    target, size = f"/agent/v1/execs/{exec_id}", 1 << 20
    for number in range(8):  # an agent that does not know the end is not blocked
        params = {**query, "stream": "stdout", "offset": number * size}
        sent = await api.http.post(
            target, params=params, content=bytes(size), headers=api.agent(gang)
        )
        assert sent.is_success
    kept = api.app_state.execs.get(exec_id, (await api.http.get(JOB)).json()["id"])
    assert not kept.data


async def test_a_command_ends_when_its_agent_no_longer_asks_about_it(api: Api) -> None:
    gang, exec_id = await run_command(api)
    kept = api.app_state.execs.get(exec_id, (await api.http.get(JOB)).json()["id"])
    target, params = f"/agent/v1/execs/{exec_id}", {"gang": gang, "rank": 0}
    await api.http.post(target, params=params, content=b"y", headers=api.agent(gang))
    kept.heard_at -= 600
    waits = await api.http.get(f"{JOB}/exec/{exec_id}")
    assert waits.content == b"y", "an old agent asks for nothing"
    await api.http.get(f"{target}/input", params=params, headers=api.agent(gang))
    kept.heard_at -= 600
    kept.used_at -= 600  # the server was paused, so the agent could not ask
    assert (await api.http.get(f"{JOB}/exec/{exec_id}", params={"offset": 1})).is_success
    kept.heard_at -= 600
    lost = await api.http.get(f"{JOB}/exec/{exec_id}", params={"offset": 1})
    assert (lost.status_code, lost.json()["code"]) == (404, "exec-not-found")
    assert f"no longer answers about the command {exec_id}" in lost.json()["message"]
    asked = await api.http.get(f"{target}/input", params=params, headers=api.agent(gang))
    assert asked.json()["end"], "an agent that comes back ends the command"


async def test_a_slow_reader_loses_no_output(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "_ROOM_S", 0.01)
    gang = await start(api)
    await claim(api, gang)
    await report(api, gang, {"seq": 1, "kind": "running"})
    await until(lambda: _phase(api, "running"))
    exec_id = (await api.http.post(JOB + "/exec", json={"command": ["cat"]})).json()["id"]
    whole = b"".join(b"%08d" % number for number in range(12 * 1024 * 1024 // 8))
    sent, got = 0, b""
    while len(got) < len(whole):
        while sent < len(whole):
            answer = await api.http.post(
                f"/agent/v1/execs/{exec_id}",
                params={"gang": gang, "rank": 0, "offset": sent},
                content=whole[sent : sent + (1 << 20)],
                headers=api.agent(gang),
            )
            if answer.status_code == 503:
                break
            sent += 1 << 20
        read = await api.http.get(f"{JOB}/exec/{exec_id}", params={"offset": len(got)})
        got += read.content
    assert got == whole


async def test_a_command_ends_with_its_nodes(api: Api) -> None:
    gang = await start(api)
    await claim(api, gang)
    await report(api, gang, {"seq": 1, "kind": "running"})
    await until(lambda: _phase(api, "running"))
    exec_id = (await api.http.post(JOB + "/exec", json={"command": ["sleep", "9"]})).json()["id"]
    reading = asyncio.create_task(api.http.get(f"{JOB}/exec/{exec_id}", params={"wait_s": 60}))
    await report(
        api,
        gang,
        {"seq": 2, "kind": "exited", "outcome": "succeeded", "exit_code": 0, "log_bytes": 0},
    )
    assert (await asyncio.wait_for(reading, 30)).headers["cavvy-exit-code"] == "255"


async def test_secrets_reach_the_agent_and_nobody_else(api: Api) -> None:
    await api.http.put("/v1/projects/default/secrets/TOKEN", json={"value": "hush-hush"})
    gang = await start(api, "{name: t, run: 'true', secrets: [TOKEN]}")
    assert (await claim(api, gang)).json()["work"]["secrets"] == {"TOKEN": "hush-hush"}
    for path in (JOB, JOB + "/events", "/v1/projects/default/secrets", "/v1/nodes", JOB + "/cost"):
        assert "hush-hush" not in (await api.http.get(path)).text
    listed = (await api.http.get("/v1/projects/default/secrets")).json()["secrets"]
    assert [secret["name"] for secret in listed] == ["TOKEN"]
    assert (await api.http.delete("/v1/projects/default/secrets/TOKEN")).status_code == 204
    assert (await api.http.delete("/v1/projects/default/secrets/TOKEN")).json()[
        "code"
    ] == "secret-not-found"


async def test_a_job_says_why_it_waits_for_its_secrets(api: Api) -> None:
    await api.http.put("/v1/projects/default/secrets/TOKEN", json={"value": "hush-hush"})
    (secret,) = await api.app_state.store.secrets("default")
    lost = secret.sealed.replace(b"aes-", b"aes+", 1)  # the key of another server
    assert await api.app_state.store.reseal_secret(secret, lost)
    gang = await start(api, "{name: t, run: 'true', secrets: [TOKEN]}")
    for _ in range(2):  # the agent asks again and again
        waits = await claim(api, gang)
        assert (waits.status_code, waits.json()["code"]) == (503, "key-unusable")
    events = (await api.http.get(JOB + "/events")).json()["events"]
    (told,) = [each["text"] for each in events if each["kind"] == "secrets"]
    assert told.startswith("the work waits, because the secret TOKEN of project default cannot be")
    (broken,) = await api.app_state.store.secrets("default")
    assert await api.app_state.store.reseal_secret(broken, secret.sealed)
    assert (await claim(api, gang)).json()["work"]["secrets"] == {"TOKEN": "hush-hush"}


async def test_blobs_come_and_go_whole(api: Api) -> None:
    data = b"print('hi')\n" * 1000
    name = hashlib.sha256(data).hexdigest()
    blobs = "/v1/projects/default/blobs"
    assert (await api.http.post(blobs + "/missing", json={"blobs": [name]})).json() == {
        "missing": [name],
        "direct": False,
    }
    wrong = await api.http.put(f"{blobs}/{name}", content=b"something else")
    assert (wrong.status_code, wrong.json()["code"]) == (422, "blob-mismatch")
    assert (await api.http.put(f"{blobs}/{name}", content=data)).status_code == 204
    assert (await api.http.post(blobs + "/missing", json={"blobs": [name]})).json() == {
        "missing": [],
        "direct": False,
    }
    gang = await start(api, FOLDER, origin=await freeze(api, name))
    found = await api.http.get(
        f"/agent/v1/blobs/{name}", params={"gang": gang}, headers=api.agent(gang)
    )
    assert found.content == data
    none = await api.http.get(
        f"/agent/v1/blobs/{'0' * 64}", params={"gang": gang}, headers=api.agent(gang)
    )
    assert (none.status_code, none.json()["code"]) == (404, "blob-not-found")


def pack_of(*blobs: bytes) -> bytes:
    return b"".join(
        f"{hashlib.sha256(data).hexdigest()}{len(data)}\n".encode() + data for data in blobs
    )


async def ask_pack(api: Api, gang: str, *names: str) -> Any:
    path, headers = "/agent/v1/blobs/pack", api.agent(gang)
    return await api.http.post(
        path, json={"blobs": list(names)}, params={"gang": gang}, headers=headers
    )


async def test_packs_come_and_go_whole(api: Api) -> None:
    parts = [b"", b"a\n", b"b" * 256 * 1024, b"0" * 64 + b"3\nabc"]
    names = [hashlib.sha256(data).hexdigest() for data in parts]
    blobs = "/v1/projects/default/blobs"
    for _ in range(2):
        stored = await api.http.put(f"{blobs}/pack", content=pack_of(*parts))
        assert (stored.status_code, stored.json()) == (200, {"stored": 4})
    assert (await api.http.put(f"{blobs}/pack", content=b"")).json() == {"stored": 0}
    assert (await api.http.post(blobs + "/missing", json={"blobs": names})).json() == {
        "missing": [],
        "direct": False,
    }
    large = bytes(256 * 1024 + 1)
    too_large = hashlib.sha256(large).hexdigest()
    await api.http.put(f"{blobs}/{too_large}", content=large)
    gang = await start(api, FOLDER, origin=await freeze(api, *names, too_large))
    assert (await ask_pack(api, gang, *names)).content == pack_of(*parts)
    some = await ask_pack(api, gang, "0" * 64, too_large, names[1])
    assert (some.status_code, some.content) == (200, pack_of(parts[1]))
    assert (await ask_pack(api, gang)).content == b""
    refused = await ask_pack(api, gang, "../x")
    assert (refused.status_code, refused.json()["code"]) == (422, "invalid-request")
    other = {**api.agent(gang), "Authorization": "Bearer other"}
    stranger = await api.http.post(
        "/agent/v1/blobs/pack", json={"blobs": names}, params={"gang": gang}, headers=other
    )
    assert (stranger.status_code, stranger.json()["code"]) == (403, "forbidden")


async def test_a_full_pack_holds_as_many_as_fit(api: Api) -> None:
    parts = [bytes([number]) * 256 * 1024 for number in range(33)]
    for half in (parts[:20], parts[20:]):
        assert (
            await api.http.put("/v1/projects/default/blobs/pack", content=pack_of(*half))
        ).status_code == 200
    names = [hashlib.sha256(data).hexdigest() for data in parts]
    gang = await start(api, FOLDER, origin=await freeze(api, *names))
    found = await ask_pack(api, gang, *names)
    assert found.content == pack_of(*parts[:31])  # 32 and what names them are more than 8 MiB


@pytest.mark.parametrize(
    ("pack", "status", "code"),
    [
        (pack_of(b"good", b"wrong")[:-1] + b"!", 422, "blob-mismatch"),
        (pack_of(b"good", b"torn")[:-1], 422, "invalid-request"),
        (pack_of(b"good", b"torn")[:100], 422, "invalid-request"),
        (pack_of(b"good") + b"more", 422, "invalid-request"),
        (pack_of(b"good", b"upper").replace(b"5\nupper", b"-5\nupper"), 422, "invalid-request"),
        (pack_of(b"good", bytes(256 * 1024 + 1)), 422, "invalid-request"),
        (
            pack_of(b"good", *(bytes([number]) * 256 * 1024 for number in range(32))),
            413,
            "too-large",
        ),
        (pack_of(b"good", *(b"%d" % number for number in range(2048))), 413, "too-large"),
    ],
)
async def test_of_a_bad_pack_nothing_is_stored(
    api: Api, pack: bytes, status: int, code: str
) -> None:
    blobs, good = "/v1/projects/default/blobs", hashlib.sha256(b"good").hexdigest()
    refused = await api.http.put(f"{blobs}/pack", content=pack)
    assert (refused.status_code, refused.json()["code"]) == (status, code)
    assert (await api.http.post(blobs + "/missing", json={"blobs": [good]})).json() == {
        "missing": [good],
        "direct": False,
    }


async def test_a_snapshot_must_be_complete(api: Api) -> None:
    file = b"x = 1\n"
    digest = hashlib.sha256(file).hexdigest()
    manifest = json.dumps(
        {"files": [{"path": "a.py", "sha256": digest, "mode": 420, "size": 6}]}
    ).encode()
    snapshot = hashlib.sha256(manifest).hexdigest()
    text = "{name: t, run: 'true', workdir: .}"
    blobs = "/v1/projects/default/blobs"
    origin = {"snapshot": snapshot}
    assert (await api.post_job(text, origin=origin)).json()["code"] == "snapshot-missing"
    await api.http.put(f"{blobs}/{snapshot}", content=manifest)
    assert (await api.post_job(text, origin=origin)).json()["code"] == "snapshot-missing"
    await api.http.put(f"{blobs}/{digest}", content=file)
    made = await api.submit(text, origin=origin)
    assert (await api.app_state.store.job(made["id"])).origin.snapshot == snapshot
    text = "{name: u, run: 'true', workdir: ., setup: {run: make, uses: [gone.txt]}}"
    refused = (await api.post_job(text, origin=origin)).json()
    assert refused["code"] == "invalid-task"
    assert "`setup.uses` names gone.txt" in refused["message"]


async def test_a_snapshot_that_was_swept_before_it_was_a_jobs_is_missing(api: Api) -> None:
    manifest = b'{"files": []}'
    snapshot = hashlib.sha256(manifest).hexdigest()
    await api.http.put(f"/v1/projects/default/blobs/{snapshot}", content=manifest)
    text, origin = (
        "{name: t, run: 'true', workdir: ., resources: {cpu: 32}}",
        {"snapshot": snapshot},
    )
    assert (await api.post_job(text, origin=origin)).json()["code"] == "consent-needed"
    assert api.app_state.blobs.of("default").sweep(
        set(), older_than=datetime(9999, 1, 1, tzinfo=UTC)
    ) == len(manifest)
    assert (await api.post_job(text, origin=origin)).json()["code"] == "snapshot-missing"


KEEPS = "{name: t, run: 'true', keep: 10m}"
EXITED = {"seq": 2, "kind": "exited", "outcome": "succeeded", "exit_code": 0, "log_bytes": 2}


async def keep(api: Api) -> str:
    """A job that is done, and whose gang is kept; the gang's name."""
    gang = await start(api, KEEPS)
    granted = (await claim(api, gang)).json()
    assert granted["work"]["keep_s"] > 600
    await write_log(api, gang, b"1\n", 0)
    await report(api, gang, {"seq": 1, "kind": "running"}, EXITED)
    assert await until(lambda: _phase(api, "done"))
    return gang


async def test_the_agent_of_a_kept_gang_is_given_the_next_job(api: Api) -> None:
    gang = await keep(api)
    (row,) = (await api.http.get("/v1/nodes")).json()
    assert row["phase"] == "kept"
    assert row["kept_until"] is not None
    assert (await claim(api, gang, nonce="n2")).json()["state"] == "wait"
    await api.submit("{name: next, run: 'false'}")

    async def given() -> Any:
        answer = (await claim(api, gang, nonce="n2")).json()
        return answer if answer["state"] == "go" else None

    granted = await until(given)
    assert (granted["work"]["job"], granted["work"]["run"], granted["work"]["keep_s"]) == (
        "next",
        "false",
        0,
    )
    assert (
        await report(api, gang, {"seq": 3, "kind": "running"}, nonce="n1")
    ).status_code == 409, "it was the first's"
    assert (await claim(api, gang, nonce="n3")).status_code == 409
    assert (await write_log(api, gang, b"2\n", 0)).json() == {"offset": 2}
    assert (await api.http.get(JOB + "/logs")).content == b"1\n"
    assert (await api.http.get("/v1/projects/default/jobs/next/logs")).content == b"2\n"
    (row,) = (await api.http.get("/v1/nodes")).json()
    assert (row["job"], row["gang"], row["kept_until"]) == ("next", gang, None)


async def test_a_kept_gang_is_given_back_by_stop_and_down(api: Api) -> None:
    gang = await keep(api)
    await api.http.post("/v1/down", json={"project": "another"})
    assert (await claim(api, gang, nonce="n2")).json()["state"] == "wait"
    await api.http.post("/v1/down", json={"project": "default"})
    assert await until(lambda: _refused(api, gang))
    assert await until(lambda: _no_nodes(api))


async def _refused(api: Api, gang: str) -> bool:
    return bool((await claim(api, gang, nonce="n2")).status_code == 409)


async def _no_nodes(api: Api) -> bool:
    return not (await api.http.get("/v1/nodes")).json()


async def test_parts_of_an_upload_that_comes_to_nothing_are_dropped(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = start_google()
    for module in (transfers, bucket_checkpoints):
        monkeypatch.setattr(
            module, "open_place", lambda url, given, now: open_place(url, keys, now)
        )
    outputs, checkpoint = (
        "[{source: out, target: 'gs://data/out'}]",
        "{path: state, storage: 'gs://data/kept'}",
    )
    gang = await start(
        api, f"{{name: t, run: 'true', outputs: {outputs}, checkpoint: {checkpoint}}}"
    )

    async def post(route: str, **ask: object) -> Any:
        url = f"/agent/v1/data/{route}"
        answer = await api.http.post(url, params={"gang": gang}, json=ask, headers=api.agent(gang))
        assert answer.status_code == 200, answer.text
        return answer.json()

    for route, ask in (("outputs/0", {"path": "a"}), (f"checkpoint/{'0' * 64}", {})):
        upload = (await post(route, size=64 << 20, **ask))["upload"]
        await post(f"{route}/abort", upload="", **ask)
        assert upload in GoogleStandIn.uploads
        for _ in range(2):  # the answer to the first was lost
            await post(f"{route}/abort", upload=upload, **ask)
        assert upload not in GoogleStandIn.uploads


@pytest.mark.parametrize(
    "manifest",
    [
        b'{"files": [], "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"files": [{"path": "\xff"}]}',
        b'{"files": [{"sha256": "0"}]}',
        b'{"files": [{"path": "a", "sha256": "../../token"}]}',
        b"",
    ],
)
async def test_a_manifest_that_is_none_is_refused(api: Api, manifest: bytes) -> None:
    snapshot = hashlib.sha256(manifest).hexdigest()
    await api.http.put(f"/v1/projects/default/blobs/{snapshot}", content=manifest)
    refused = await api.post_job(FOLDER, origin={"snapshot": snapshot})
    assert (refused.status_code, refused.json()["code"]) == (422, "invalid-request")
    old = datetime(9999, 1, 1, tzinfo=UTC)
    assert sweep_folders(api.app_state.blobs.of("default"), {snapshot}, older_than=old) == 0


async def test_a_command_ends_when_nobody_has_read_its_output_for_an_hour() -> None:
    execs = JobExecs(ChangeNotifier())
    for unread_s, session, gone in ((3590, False, False), (3610, False, True), (95, True, True)):
        made = execs.start(f"{unread_s}", "job", "gang", 0, ["top"], session=session)
        made.used_at -= unread_s
        assert execs.input_of(made.id, "gang", 0, 0) == (b"", gone)
        execs.put(made.id, "gang", 0, 0, b"x" * (5 << 20), None)
        assert execs.full(made.id) is (session or not gone)
