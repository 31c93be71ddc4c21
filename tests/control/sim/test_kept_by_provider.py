"""Nodes that a provider keeps after the work end only when the user wants nothing to be kept."""

import pytest
from tests.control.sim.test_control_services import ControlHarness, in_harness

from cavvy.domain.jobs import AttemptPhase, JobPhase
from cavvy.domain.values import replace
from cavvy.providers.abilities import KEEPS_NODES
from cavvy.providers.fake import MANIFEST
from cavvy.providers.fake.cloud import FakeCloud


@pytest.fixture(autouse=True)
def _keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cloud in memory keeps nodes: only `release` ends them."""
    remove = FakeCloud.remove

    async def leave(cloud: FakeCloud, name: str) -> None:
        pass

    monkeypatch.setattr(FakeCloud, "remove", leave)
    monkeypatch.setattr(FakeCloud, "release", remove, raising=False)


KEEPING = replace(MANIFEST, abilities=(*MANIFEST.abilities, KEEPS_NODES))


def test_a_stopped_job_leaves_its_nodes_until_everything_is_stopped() -> None:
    async def scenario(harness: ControlHarness) -> None:
        job = await harness.submit()
        await harness.wait()
        await harness.control_plane.jobs.stop("default", job.id)
        await harness.wait(600)
        (attempt,) = await harness.store.attempts(job.id)
        assert attempt.phase is AttemptPhase.ENDING, "its bill is still open"
        assert (await harness.store.job(job.id)).phase is JobPhase.STOPPED
        await harness.control_plane.down()
        await harness.wait(60)
        (attempt,) = await harness.store.attempts(job.id)
        assert attempt.phase is AttemptPhase.ENDED

    in_harness(scenario, manifest=KEEPING)


def test_down_ends_the_nodes_of_a_job_that_it_stops() -> None:
    async def scenario(harness: ControlHarness) -> None:
        job = await harness.submit()
        await harness.wait()
        await harness.control_plane.down()
        await harness.wait(60)
        (attempt,) = await harness.store.attempts(job.id)
        assert attempt.phase is AttemptPhase.ENDED

    in_harness(scenario, manifest=KEEPING)
