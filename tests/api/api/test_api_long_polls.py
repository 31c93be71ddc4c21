"""A long poll is answered at its limit, however often its job changes meanwhile."""

import asyncio
from typing import Any

from tests.api.api.test_api_agents import JOB, claim, report, start, write_log
from tests.api.api_state import Api, until

WAIT_S = 0.3


async def begin(api: Api) -> str:
    gang = await start(api)
    await claim(api, gang)
    await report(api, gang, {"seq": 1, "kind": "running"})
    await until(lambda: runs(api))
    return gang


async def runs(api: Api) -> bool:
    page = (await api.http.get(JOB + "/events")).json()
    return bool(page["events"][-1]["kind"] == "running")


async def poll_beside_a_busy_log(api: Api, gang: str, target: str, **params: Any) -> Any:
    """Send a long poll, and write lines to the job's log until the poll is answered."""
    asked = asyncio.create_task(api.http.get(target, params={"wait_s": WAIT_S, **params}))
    for number in range(300):
        if asked.done():
            break
        await write_log(api, gang, b"x", number)
        await asyncio.sleep(WAIT_S / 20)
    assert asked.done(), "the poll went on for as long as the job wrote to its log"
    return await asked


async def test_events_are_answered_beside_a_busy_log(api: Api) -> None:
    gang = await begin(api)
    last = (await api.http.get(JOB + "/events")).json()["last"]
    page = (await poll_beside_a_busy_log(api, gang, JOB + "/events", after=last)).json()
    assert (page["events"], page["last"], page["over"]) == ([], last, False)


async def test_a_silent_command_is_answered_beside_a_busy_log(api: Api) -> None:
    gang = await begin(api)
    made = await api.http.post(JOB + "/exec", json={"command": ["sleep", "9"]})
    answer = await poll_beside_a_busy_log(api, gang, f"{JOB}/exec/{made.json()['id']}")
    assert (answer.status_code, answer.content) == (200, b"")


async def test_a_silent_rank_is_answered_beside_a_busy_one(api: Api) -> None:
    gang = await start(api, "{name: t, run: 'true', nodes: 2}")
    await claim(api, gang)
    answer = await poll_beside_a_busy_log(api, gang, JOB + "/logs", rank=1, attempt=1)
    assert (answer.status_code, answer.content) == (200, b"")
