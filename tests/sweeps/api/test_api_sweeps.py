"""Jobs of sweeps get values when they start, and are judged by what they report."""

from typing import Any

import pytest
from tests.api.api_state import Api, until
from tests.scheduler.api.test_api_arrays import read, submit

from cavvy.capabilities.sweeps import keeper
from cavvy.capabilities.sweeps.early import RungVerdict
from cavvy.capabilities.sweeps.keeper import SweepsOfStore
from cavvy.capabilities.sweeps.rungs import StoredRungs
from cavvy.domain.jobs import JobPhase, StopCause
from cavvy.domain.messages import AgentMessage, ClaimGranted, HostFacts, MessageKind


async def test_the_first_rank_of_a_job_of_a_sweep_is_judged(api: Api) -> None:
    """What other ranks report says nothing about the job."""
    early = "best: 'loss:min', stop_early: {min_steps: 2, reduction: 2}"
    await submit(api, f"{{name: tune, nodes: 2, sweep: {{lr: [1]}}, {early}, run: 'x'}}")
    [job] = (await read(api, "arrays/tune"))["jobs"]
    gang = (await api.attempt(job["id"])).gang
    store, agents = api.app_state.store, api.app_state.control_plane.agents
    sweeps = api.app_state.control_plane.sweeps
    assert isinstance(sweeps, SweepsOfStore)
    sweeps.early._judge = lambda *report: RungVerdict(reached=1, stops=True)

    def say(seq: int, kind: MessageKind, **fields: Any) -> list[AgentMessage]:
        return [AgentMessage(seq=seq, at=api.app_state.now(), kind=kind, **fields)]

    for rank in (0, 1):
        await agents.claim(gang, rank, "n", "a", HostFacts(hostname="h"))
        await agents.messages(gang, rank, "n", say(1, MessageKind.RUNNING))

    async def runs() -> bool:
        return (await store.job(job["id"])).phase is JobPhase.RUNNING

    await until(runs)
    progress = say(2, MessageKind.PROGRESS, values={"loss": 0.5, "step": 2})
    for rank, rungs in ((1, {}), (0, {job["id"]: {0: 0.5}})):
        await agents.messages(gang, rank, "n", progress)
        array_id = (await store.job(job["id"])).array_id
        assert array_id is not None
        assert await StoredRungs(*store.database).list_of_array(array_id) == rungs
    assert (await store.job(job["id"])).stop_cause is StopCause.EARLY


async def test_a_job_of_a_search_gets_its_values_when_it_starts(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "find_spec", lambda name: None)
    text = "{name: tune, nodes: 2, sweep: {lr: [1, 2, 3]}, best: 'l:min', trials: 2, run: %s}"
    run = "'x ${{ params.lr }}'"
    refused = await api.post_job(text % run)
    assert (refused.status_code, "Optuna" in refused.text) == (422, True)
    monkeypatch.setattr(keeper, "find_spec", lambda name: name)  # an installed Optuna
    await submit(api, text % run)
    control = api.app_state.control_plane.agents
    sweeps = api.app_state.control_plane.sweeps
    assert isinstance(sweeps, SweepsOfStore)
    sweeps.search._choose = lambda task, index, tried: 2 - index
    jobs = (await read(api, "arrays/tune"))["jobs"]
    assert [each["params"] for each in jobs] == [{}, {}]
    gang = (await api.attempt(jobs[0]["id"])).gang
    for rank in (0, 1, 0):  # the first answer is lost
        answer = await control.claim(gang, rank, "n", "a", HostFacts(hostname="h"))
    assert isinstance(answer, ClaimGranted)
    assert answer.work.run == "x 3"
    assert answer.work.params == {"lr": "3"}
    jobs = (await read(api, "arrays/tune"))["jobs"]
    assert [each["params"] for each in jobs] == [{"lr": 3}, {}]
