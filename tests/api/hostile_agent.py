"""An agent that says anything that is valid by type, to every route that agents have.

What it sends is made by Hypothesis; `attack` sends it for a fresh job and says what went wrong:
answers of 500 and above, and a rank whose good exit report does not arrive afterwards.
"""

import asyncio
import json
from collections import Counter
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from tests.api.api.test_api_agents import claim, report, start
from tests.api.api_state import SCRIPT, Api, until

AT_ONCE = 16
LONGEST_TEXT = 8192 + 200  # what the server keeps of a text from a node, and its own words
TASK = "{name: t, run: 'true', checkpoint: {path: state, every: auto}, retry: {node: 0, exit: 0}}"
# As the server's own, for thousands of jobs.
LASTING = SCRIPT.partition("[[launches]]")[0].replace("capacity = 2", "capacity = 1000")
LASTING += "[[launches]]\nlatency_s = 0.0\nboots = false\n" * 20_000
LASTING += "[[removals]]\nlatency_s = 0.0\ntakes_s = 0.0\n" * 20_000
NAMES = ("step_ms", "fraction", "done", "total", "left_s", "loss", "cpu_percent", "a\0b", "\ud800")

texts = st.one_of(
    st.sampled_from(["", "n1", "x", "\0", "\ud800", "\udcff'", "é" * 300, "x" * 100_000, "../x"]),
    st.text(st.characters(), max_size=20),
)
wholes = st.one_of(
    st.integers(-2, 40),
    st.sampled_from([-(1 << 63), 1 << 31, 1 << 53, (1 << 63) - 1, 1 << 63, 1 << 64, 10**400]),
)
reals = st.one_of(
    wholes,
    st.floats(),
    st.sampled_from([1e15, 1e308, -1e308, 5e-324, float("nan"), float("inf"), float("-inf")]),
)
times = st.sampled_from(
    [
        "2026-11-21T12:00:00Z",
        "2026-11-21T12:00:00",
        "0001-01-01T00:00:00Z",
        "0001-01-01T00:00:00+14:00",
        "9999-12-31T23:59:59.999999-14:00",
        "1969-12-31T23:59:59Z",
        "2026-11-21T12:00:00+23:59",
        "3170843-11-07T00:00:00Z",
        "yesterday",
    ]
)
figures = st.dictionaries(st.one_of(st.sampled_from(NAMES), texts), st.one_of(reals, texts))
kinds = st.one_of(
    st.sampled_from(["setup", "running", "progress", "checkpoint", "notice", "telemetry", "event"]),
    st.sampled_from(["exited", "poem", "", "\0"]),
)
fields: dict[str, st.SearchStrategy[Any]] = {
    "at": times,
    "setup_reused": st.booleans(),
    "values": figures,
    "bytes": wholes,
    "files": wholes,
    "newest_at": st.none() | times,
    "number": st.none() | wholes,
    "sent": wholes,
    "seconds": st.none() | reals,
    "cost_s": st.none() | reals,
    "source": texts,
    "name": texts | st.just("advice"),
    "text": texts,
    "outcome": st.none() | texts | st.sampled_from(["succeeded", "exit", "preempted", "node"]),
    "exit_code": st.none() | wholes,
    "reason": texts,
    "log_bytes": wholes,
}
# `seq` is counted from the last one that the server acknowledged.
said = st.fixed_dictionaries({"seq": st.integers(-2, 3) | wholes, "kind": kinds}, optional=fields)
batches = st.lists(said, max_size=4)
entries = st.fixed_dictionaries(
    {"path": texts | st.sampled_from(["a", "a/b", "/".join("a" * 3000), "b"])},
    optional={
        "sha256": st.sampled_from(["", "0" * 64, "x" * 64]),
        "size": wholes,
        "mode": wholes,
        "mtime_ns": wholes,
        "link": st.none() | texts,
    },
)
blob = st.sampled_from(["0" * 64, "f" * 64, "X"])
ranks = st.just(0) | wholes
DATA = st.sampled_from(["/data/inputs/0", "/data/outputs/0", "/data/outputs/99999"])


def _call(method: str, path: st.SearchStrategy[str], **parts: Any) -> st.SearchStrategy[Any]:
    query = st.fixed_dictionaries(parts.pop("query", {}))
    body = parts.pop("body", st.none())
    return st.tuples(st.just(method), path, query, body)


def _object(**names: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(names)


others = st.one_of(
    _call(
        "POST",
        st.just("/claim"),
        body=_object(
            rank=ranks,
            nonce=texts,
            address=texts,
            host=_object(hostname=texts, python=texts, platform=texts),
        ),
    ),
    _call(
        "POST",
        st.just("/log"),
        query={"rank": ranks, "offset": wholes, "lost": wholes},
        body=st.binary(max_size=20),
    ),
    _call("GET", st.just("/orders"), query={"rank": ranks, "after": wholes}),
    _call(
        "POST",
        st.just("/execs/none"),
        query={"rank": ranks, "offset": wholes, "exit_code": wholes},
        body=st.binary(max_size=20),
    ),
    _call("GET", st.just("/execs/none/input"), query={"rank": ranks, "offset": wholes}),
    _call("POST", st.just("/blobs/missing"), body=_object(blobs=st.lists(blob))),
    _call("POST", st.just("/blobs/pack"), body=_object(blobs=st.lists(blob))),
    _call(
        "PUT",
        blob.map("/blobs/{}".format),
        query={"offset": wholes, "size": wholes},
        body=st.binary(max_size=20),
    ),
    _call("GET", blob.map("/blobs/{}".format)),
    _call("GET", st.just("/checkpoints/latest")),
    _call(
        "POST",
        st.just("/checkpoints"),
        body=_object(
            rank=ranks,
            nonce=st.just("n1") | texts,
            made_at=times,
            files=st.lists(entries, max_size=3),
        ),
    ),
    _call("GET", DATA, query={"after": texts}),
    _call("GET", DATA.map("{}/bytes".format), query={"offset": wholes, "length": wholes}),
    _call("POST", DATA, body=_object(path=texts, size=wholes)),
    _call("POST", DATA.map("{}/parts".format), body=_object(path=texts, upload=texts, part=wholes)),
    _call(
        "POST",
        DATA.map("{}/complete".format),
        body=_object(path=texts, upload=texts, size=wholes, tags=st.lists(texts, max_size=2)),
    ),
    _call("POST", blob.map("/data/checkpoint/{}".format), body=_object(size=wholes)),
)
# `map` keeps Hypothesis from choosing among the branches of `others`, which would leave few batches.
attacks = st.lists(
    st.one_of(batches, batches, others.map(lambda each: each)), min_size=1, max_size=12
)


def make_attacks(count: int, seed_: int) -> list[list[Any]]:
    """So many attacks, the same for the same seed."""
    made: list[list[Any]] = []

    @seed(seed_)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(attacks)
    def make(requests: list[Any]) -> None:
        made.append(requests)

    make()
    return made


async def attack_all(api: Api, many: list[list[Any]], seen: Counter[int]) -> list[str]:
    """As `attack`, several at a time."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def one(requests: list[Any]) -> list[str]:
        async with turns:
            return await attack(api, requests, seen)

    return [wrong for found in await asyncio.gather(*map(one, many)) for wrong in found]


async def attack(api: Api, requests: list[Any], seen: Counter[int]) -> list[str]:
    """What went wrong; `seen` counts the answers by status."""
    try:
        gang = await start(api, TASK)
    except TimeoutError:
        jobs = (await api.http.get("/v1/jobs", params={"phase": "queued"})).json()["jobs"]
        return [f"a job does not start: {[each['reason'] for each in jobs]!s:.500}"]
    wrong: list[str] = []
    await claim(api, gang)
    last = 0
    for each in requests:
        if isinstance(each, list):
            messages = [{**said, "seq": said["seq"] + last} for said in each]
            answer = await _send(api, gang, "POST", "/messages", {}, _body(gang, messages))
            if answer.status_code == 200:
                last = answer.json()["ack"]
        else:
            method, path, query, body = each
            if isinstance(body, dict):
                body = json.dumps({"gang": gang, **body}).encode()
            answer = await _send(api, gang, method, path, query, body)
        seen[answer.status_code] += 1
        if answer.status_code >= 500:
            wrong.append(f"{answer.status_code} {answer.text[:200]} to {str(each)[:2000]}")
    ended = {"seq": last + 1, "kind": "exited", "outcome": "succeeded", "exit_code": 0}
    answer = await report(api, gang, ended)
    seen[answer.status_code] += 1
    heard = answer.status_code == 200 and answer.json()["ack"] == last + 1
    if not heard and answer.status_code != 409:  # 409: it has said already that it ended
        wrong.append(
            f"{answer.status_code} {answer.text[:200]} to the exit after {requests!s:.2000}"
        )
        return wrong
    return wrong + await _end(api, gang, requests)


async def _end(api: Api, gang: str, requests: list[Any]) -> list[str]:
    """The attempt ends, and users can read what there is."""
    attempt = await api.app_state.store.attempt_of_gang(gang)
    path = f"/v1/projects/default/jobs/{attempt.job_id}"

    async def ended() -> bool:
        return (await api.app_state.store.attempt_of_gang(gang)).phase == "ended"

    try:
        await until(ended)
    except TimeoutError:
        return [f"the attempt does not end after {requests!s:.2000}"]
    pages = [await api.http.get(path + view) for view in ("", "/events", "/cost", "/logs")]
    await api.http.post(path + "/stop")
    events = pages[1].json()["events"] if pages[1].is_success else []
    refused = [each for each in events if each["kind"] == "refused"]
    wrong = [f"{page.status_code} {page.text[:200]}" for page in pages if page.status_code >= 500]
    if len(refused) > 20 or any(len(each["text"]) > 500 for each in refused):
        wrong.append("refusals are not bounded")
    if longest := max((len(each["text"]) for each in events), default=0) > LONGEST_TEXT:
        wrong.append(f"the text of an event has {longest} characters")
    return wrong


def _body(gang: str, messages: list[dict[str, Any]]) -> bytes:
    who = {"gang": gang, "rank": 0, "nonce": "n1", "messages": messages}
    return json.dumps(who).encode()


async def _send(
    api: Api, gang: str, method: str, path: str, query: dict[str, Any], body: bytes | None
) -> Any:
    shown = {
        name: value[:2000].encode("utf-8", "replace").decode() if isinstance(value, str) else value
        for name, value in query.items()
    }
    return await api.http.request(
        method,
        f"/agent/v1{path}",
        params={"gang": gang, **shown},
        content=body,
        headers=api.agent(gang),
    )
