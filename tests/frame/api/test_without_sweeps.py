"""A server without the capability that chooses values by results and stops jobs early."""

import pytest
from tests.api.api_state import Api
from tests.records import make_job_record

from cavvy.control.clock import WallClock
from cavvy.control.own_reconcilers import OwnReconcilers
from cavvy.control.sweep_keeper import NO_SWEEPS
from cavvy.domain.events import Event
from cavvy.domain.tasks import SweepSearch, SweptParam, TaskSpec
from cavvy.store.open import MemoryStore


async def test_what_searches_is_refused(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api.app_state.control_plane, "own", OwnReconcilers(WallClock()))
    text = "{name: t, run: x, sweep: {lr: [1, 2]}, best: 'l:min', %s}"
    for field, more in (("best", "trials: 2"), ("stop_early", "stop_early: asha")):
        answer = await api.post_job(text % more)
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid-task"), answer.text
        assert answer.json()["message"] == f"`{field}`: {NO_SWEEPS}"
    assert (await api.post_job("{name: t, run: x, sweep: {lr: [1, 2]}}")).is_success


async def test_jobs_of_a_stored_search_go_on(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gets another combination, once."""
    control, store, now = api.app_state.control_plane, MemoryStore(), api.app_state.now()
    monkeypatch.setattr(control, "own", OwnReconcilers(WallClock()))
    monkeypatch.setattr(control.agents, "_store", store)
    sweep = (SweptParam("lr", (1, 2, 3), ("1", "2", "3")),)
    task = TaskSpec(name="t", run="x", sweep=sweep, search=SweepSearch(metric="l"), trials=3)
    job = make_job_record(now, id="t0", name="t", array_id="ts", task=task)
    event = Event(project=job.project, job_id="t0", at=now, kind="queued", text="")
    await store.arrays.submit(job, event, {f"t{at}": at for at in range(3)}, None)
    for at in (0, 2, 1, 2):
        chosen = await control.agents._choose_values(await store.job(f"t{at}"), now)
        assert (chosen.point, chosen.task.params) == (at, {"lr": at + 1})
