"""What programs report step by step, from the agents' messages to the route."""

import json
from base64 import b64encode
from datetime import UTC, datetime
from typing import Any

import pytest
from tests.api.api.test_api_agents import claim, report, start
from tests.api.api_state import Api

from cavvy.sdk.examples import encode_png

PNG = encode_png(1, 1, 1, b"\x80")
EXAMPLES = "/v1/projects/default/jobs/t/examples"
JOB = "/v1/projects/default/jobs/t/curves"


def points(
    seq: int, *rows: list[float | None], names: tuple[str, ...] = ("loss",)
) -> dict[str, Any]:
    return {"seq": seq, "kind": "points", "series": [{"names": [*names], "rows": [*rows]}]}


async def test_each_value_is_shown_with_its_step_and_time(api: Api) -> None:
    gang = await start(api)
    await claim(api, gang)
    before = datetime.now(UTC).timestamp() * 1000
    await report(api, gang, points(1, [1, 0, 0.5], [2, 0, 0.4]), points(2, [3, 0, 0.25]))
    [curve] = (await api.http.get(JOB)).json()["curves"]
    assert (curve["name"], curve["attempt"], curve["rank"]) == ("loss", 1, 0)
    assert (curve["steps"], curve["values"]) == ([1, 2, 3], [0.5, 0.4, 0.25])
    assert (curve["low"], curve["high"], curve["last"], curve["count"]) == (0.25, 0.5, 0.25, 3)
    assert all(abs(each - before) < 300_000 for each in curve["times_ms"])
    for asked in ({"rank": 3}, {"attempt": 2}, {"curve": "acc"}):
        assert (await api.http.get(JOB, params=asked)).json()["curves"] == []
    assert len((await api.http.get(JOB, params={"points": 2})).json()["curves"][0]["values"]) <= 4


async def test_bad_values_of_an_agent_are_left_out(api: Api) -> None:
    gang = await start(api)
    await claim(api, gang)
    wrong: list[dict[str, Any]] = [
        points(1, [1, 0, 0.5, 7]),
        points(2, [1, 0]),
        {"seq": 3, "kind": "points", "series": "x"},
        {"seq": 4, "kind": "points", "series": [{"names": [], "rows": [[1, 0]]}]},
        {"seq": 5, "kind": "points", "series": [{"names": ["a"], "rows": [["b", 0, 1]]}]},
        points(6, [1e308, 1e308, 1e308], names=("\x1b[31mred" + "x" * 999,)),
        points(7, [1, -5, 1], [1, None, 1], [1, 1e300, 1]),
        points(8, [1, 0, 1e200], [1.7e308, 0, 1], [2, 0, -1.7e308]),
        points(9, [1, 0, 0.5]),
    ]
    answer = await report(api, gang, *wrong)
    assert answer.json()["ack"] == len(wrong)
    found = (await api.http.get(JOB)).json()["curves"]
    [loss] = [each for each in found if each["name"] == "loss"]
    assert loss["values"] == [0.5]
    assert all("\x1b" not in each["name"] and len(each["name"]) <= 100 for each in found)


async def test_processes_and_gaps_are_told_apart(api: Api) -> None:
    gang = await start(api)
    await claim(api, gang)
    message = points(1, [1, 20, 0.5], [2, 10, 0.25])
    second = {"names": ["loss"], "rows": [[1, 0, 0.75]], "process": 1}
    odd = {"names": ["loss", "bad"], "rows": [[3, 5, 1, 2], [None, 0, 3, None]], "odd": True}
    message["series"] += [second, odd]
    await report(api, gang, message)
    bad, first, other = (await api.http.get(JOB)).json()["curves"]
    assert (first["process"], first["values"], other["process"]) == (0, [0.5, 0.25], 1)
    assert [(each["step"], each["value"]) for each in first["gaps"]] == [(3, "nan"), (2, "-inf")]
    assert (bad["name"], bad["values"], bad["low"]) == ("bad", [], None)
    assert [each["value"] for each in bad["gaps"]] == ["inf"]
    asked = {"curve": "loss"}
    found = (await api.http.get(JOB, params=asked)).json()["curves"]
    assert [each["name"] for each in found] == ["loss", "loss"]


async def test_a_part_of_the_axis_is_read(api: Api) -> None:
    gang = await start(api)
    await claim(api, gang)
    rows = [[float(step), 10_000.0 - step, float(step)] for step in range(100)]
    await report(api, gang, points(1, *rows), points(2, [1, 0, 0.5], names=("eval/acc",)))
    names = (await api.http.get(f"{JOB.removesuffix('s')}-names")).json()
    assert names == {"names": ["eval/acc", "loss"]}
    asked = {"curve": "loss", "from": 10, "to": 12.5}
    [curve] = (await api.http.get(JOB, params=asked)).json()["curves"]
    assert (curve["steps"], curve["count"], curve["high"]) == ([10, 11, 12], 100, 12)
    times = (await api.http.get(JOB, params={"curve": "loss"})).json()["curves"][0]["times_ms"]
    asked = {"curve": "loss", "by": "time", "from": times[98]}
    [curve] = (await api.http.get(JOB, params=asked)).json()["curves"]
    assert curve["steps"] == [98, 99]
    for wrong in ({"from": "x"}, {"by": "cost"}):
        answer = await api.http.get(JOB, params=wrong)
        assert answer.json()["code"] == "invalid-request"


async def test_a_job_without_values_has_no_curves(api: Api) -> None:
    await api.submit()
    assert (await api.http.get(JOB)).json()["curves"] == []
    for wrong in ({"points": 1}, {"points": 10**9}, {"attempt": 0}):
        assert (await api.http.get(JOB, params=wrong)).json()["code"] == "invalid-request"


@pytest.mark.parametrize(
    "path", [JOB, "/v1/projects/default/jobs/t/curve-names", "/v1/projects/default/curves?job=t"]
)
async def test_an_agent_lets_no_figures_wait_while_somebody_looks_at_its_curves(
    api: Api, path: str
) -> None:
    gang = await start(api)
    await claim(api, gang)
    api.app_state.control_plane.agents.gathered.agents = 1000
    query = {"gang": gang, "rank": 0}

    async def poll() -> Any:
        orders = await api.http.get("/agent/v1/orders", params=query, headers=api.agent(gang))
        return orders.json()["pause_s"]

    told = await report(api, gang, {"seq": 1, "kind": "running"})
    assert told.json()["pause_s"] == pytest.approx(30, abs=1)
    assert await poll() is None
    assert (await api.http.get(path)).status_code == 200
    assert await poll() == 0
    assert (await report(api, gang, points(2, [1, 0, 0.5]))).json()["pause_s"] is None


async def test_curves_of_several_jobs_are_read_at_once(api: Api) -> None:
    gang = await start(api)
    await claim(api, gang)
    await report(api, gang, points(1, [1, 0, 0.5]), points(2, [1, 0, 0.9], names=("acc",)))
    asked = {"job": ["t", "gone", "t"], "curve": "loss"}
    found = (await api.http.get("/v1/projects/default/curves", params=asked)).json()["curves"]
    assert [(each["job"], each["name"], each["values"]) for each in found] == [("t", "loss", [0.5])]
    for wrong in ({}, {"job": [f"j{number}" for number in range(101)]}):
        answer = await api.http.get("/v1/projects/default/curves", params=wrong)
        assert answer.json()["code"] == "invalid-request"


async def test_numbers_that_json_does_not_have_are_left_out(api: Api) -> None:
    """An agent's message is stored all the same: otherwise, it would be sent again for ever."""
    gang = await start(api)
    await claim(api, gang)
    rows = "[1, 0, Infinity], [NaN, 0, 0.5], [1, NaN, 1], [2, 0, -1e999], [3, 0, 0.25]"
    message = f'{{"seq": 1, "kind": "points", "series": [{{"names": ["loss"], "rows": [{rows}]}}]}}'
    body = f'{{"gang": "{gang}", "rank": 0, "nonce": "n1", "messages": [{message}]}}'
    answer = await api.http.post("/agent/v1/messages", content=body, headers=api.agent(gang))
    assert answer.json()["ack"] == 1
    await report(api, gang, points(2, [4, 0, 0.125]))
    [curve] = (await api.http.get(JOB)).json()["curves"]
    assert curve["values"][-1] == 0.125


def example(seq: int, *examples: dict[str, Any]) -> dict[str, Any]:
    return {"seq": seq, "kind": "points", "examples": [*examples]}


def shown(name: str, kind: str, data: bytes, **more: Any) -> dict[str, Any]:
    return {"name": name, "kind": kind, "data": b64encode(data).decode(), **more}


async def test_pictures_and_texts_come_back_with_a_type_that_no_browser_runs(api: Api) -> None:
    gang = await start(api)
    await claim(api, gang)
    table = {"columns": ["a", "b"], "rows": [[1, "<b>"], ["x"], [None, 2, 3]]}
    await report(
        api,
        gang,
        example(
            1,
            shown("p", "image", PNG, step=3, age_ms=5),
            shown("<script>", "text", b"<script>alert(1)</script>"),
            shown("t", "table", json.dumps(table).encode()),
            shown("h", "histogram", b'{"edges": [0, 1, 2], "counts": [3, 4]}'),
            # none of these is what it says
            shown("svg", "image", b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>"),
            shown("page", "image", b"<!doctype html><script>"),
            shown("html", "html", b"<script>"),
            shown("sound", "audio", PNG),
            shown("nan", "histogram", b'{"edges": [0, NaN], "counts": [1]}'),
            shown("deep", "table", b"[" * 100_000),
        ),
    )
    found = (await api.http.get(EXAMPLES)).json()["examples"]
    assert [(each["name"], each["kind"], each["step"]) for each in found] == [
        ("p", "image", 3),
        ("<script>", "text", None),
        ("t", "table", None),
        ("h", "histogram", None),
    ]
    types = ("image/png", "text/plain; charset=utf-8", "application/json", "application/json")
    answers = [await api.http.get(f"{EXAMPLES}/{each['id']}") for each in found]
    assert tuple(each.headers["content-type"] for each in answers) == types
    assert all(each.headers["x-content-type-options"] == "nosniff" for each in answers)
    assert answers[0].content == PNG
    assert answers[2].json() == {"columns": ["a", "b"], "rows": [["1", "<b>"], ["x"], ["", "2"]]}
    for wrong in ("1-0-999", "9-0-64", "x", "1-0"):
        assert (await api.http.get(f"{EXAMPLES}/{wrong}")).status_code == 422


async def test_broken_examples_are_refused(api: Api) -> None:
    gang = await start(api)
    await claim(api, gang)
    wrong = [
        example(1, {"name": "a", "kind": "text", "data": "?"}),
        example(2, shown("", "text", b"x")),
        example(3, shown("a", "text", b"x", step=1e300)),
        example(4, shown("a", "text", b"x", age_ms=-1)),
        example(5, shown("a" * 101, "text", b"x")),
        {"seq": 6, "kind": "points", "examples": "x"},
    ]
    assert (await report(api, gang, *wrong)).json()["ack"] == len(wrong)
    assert (await api.http.get(EXAMPLES)).json()["examples"] == []
