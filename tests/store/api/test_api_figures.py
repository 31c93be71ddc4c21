"""What nodes measured and programs reported, from the agents' messages to the route."""

from datetime import UTC, datetime, timedelta
from typing import Any

from tests.api.api.test_api_agents import claim, report, start
from tests.api.api_state import Api, until

JOB = "/v1/projects/default/jobs/t/figures"


async def have_reported(api: Api, *minutes: dict[str, Any]) -> None:
    gang = await start(api)
    await claim(api, gang)
    messages = [
        {"seq": n, "kind": "minute", "seconds": 60, "figures": each}
        for n, each in enumerate(minutes, 1)
    ]
    answer = await report(api, gang, *messages)
    assert answer.json()["ack"] == len(minutes)


async def test_figures_are_shown_by_rank_and_name(api: Api) -> None:
    now = datetime.now(UTC)
    spread = {"loss": [1, 2, 4.00004], "gpu_percent": [0, 97, 100]}
    await have_reported(api, spread)
    since = (now - timedelta(hours=1)).isoformat()
    found = (await api.http.get(JOB, params={"since": since})).json()
    assert found["step_s"] == 60
    assert [(each["attempt"], each["rank"], each["name"]) for each in found["series"]] == [
        (1, 0, "gpu_percent"),
        (1, 0, "loss"),
    ]
    loss = found["series"][1]
    [at] = [n for n, each in enumerate(loss["mean"]) if each is not None]
    assert (loss["low"][at], loss["mean"][at], loss["high"][at]) == (1, 2, 4)
    began = datetime.fromisoformat(found["start"]) + timedelta(seconds=60 * at)
    assert timedelta(seconds=0) <= datetime.now(UTC) - began <= timedelta(minutes=5)
    asked = {"figure": "loss", "rank": 0, "attempt": 1, "points": 10, "since": since}
    found = (await api.http.get(JOB, params=asked)).json()
    assert [each["name"] for each in found["series"]] == ["loss"]
    assert len(found["series"][0]["mean"]) <= 10
    for other in ({"figure": "other"}, {"rank": 5}, {"attempt": 2}):
        assert (await api.http.get(JOB, params={**other, "since": since})).json()["series"] == []


async def test_a_job_without_figures_has_no_series(api: Api) -> None:
    await api.submit()
    assert (await api.http.get(JOB)).json()["series"] == []


async def test_bad_figures_of_an_agent_are_refused(api: Api) -> None:
    await have_reported(api, {"loss": [1, 2]}, {"loss": ["a", 1, 2]}, {"x" * 999: [1, 1, 1]}, {})
    assert (await api.http.get(JOB)).json()["series"] == []


async def test_too_much_at_once_is_refused_with_a_hint(api: Api) -> None:
    await have_reported(api, {"loss": [1, 1, 1]})
    now = datetime.now(UTC)
    many = {"since": (now - timedelta(days=31)).isoformat(), "figure": [f"n{n}" for n in range(64)]}
    for asked in (
        many,
        {"since": (now - timedelta(days=90)).isoformat()},
        {"since": (now + timedelta(days=1)).isoformat()},
        *(
            {end: f"{year}-12-31T23:59:59Z"}
            for end in ("since", "until")
            for year in ("0001", 9999)
        ),
    ):
        answer = await api.http.get(JOB, params=asked)
        assert answer.status_code == 422, answer.text
        assert answer.json()["code"] == "invalid-request"
    for wrong in ({"points": 0}, {"points": 10**9}, {"rank": list(range(99))}, {"since": "2026"}):
        assert (await api.http.get(JOB, params=wrong)).json()["code"] == "invalid-request"


async def test_energy_is_shown_for_the_job_and_summed_by_any_dimension(api: Api) -> None:
    gang = await start(api)
    await claim(api, gang)
    minute = {"kind": "minute", "seconds": 60}
    await report(
        api,
        gang,
        {"seq": 1, **minute, "figures": {"work_energy_j": [7.2e6] * 3, "loss": [1, 2, 3]}},
        {"seq": 2, "kind": "exited", "outcome": "succeeded", "exit_code": 0, "log_bytes": 0},
    )
    job = JOB.removesuffix("/figures")
    energy = (await api.http.get(job)).json()["energy"]
    assert energy["joules"] == 3_000_000, "bounded, because an agent may lie"
    assert (await api.http.get(f"{job}/cost")).json()["energy"] == energy
    assert (energy["unplaced_j"], energy["grids"]) == (3_000_000, {}), "somewhere"

    async def look() -> Any:
        by = {"by": "project,kind"}
        sums = (await api.http.get("/v1/ledger/sums", params=by)).json()
        return [each["energy"] for each in sums if each["groups"]["kind"] == "node"]

    assert await until(look) == [energy]
