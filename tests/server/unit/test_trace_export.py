"""When the traces of jobs are sent, and what happens if the collector refuses some."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.records import make_job_record

from cavvy.control.decide.job_traces import JobSpan
from cavvy.domain.jobs import JobPhase
from cavvy.server.otlp_export import JobTraces, sending
from cavvy.store.base import AtomicWrite, RowNotFound

NOW = datetime(2027, 1, 1, tzinfo=UTC)


class Store:
    """Jobs that ended without nodes; `gone` were removed."""

    gone: frozenset[str] = frozenset()

    async def job(self, job_id: str) -> Any:
        if job_id in self.gone:
            raise RowNotFound(job_id)
        return make_job_record(NOW, id=job_id, name=job_id, phase=JobPhase.FAILED, ended_at=NOW)

    async def attempts(self, job_id: str) -> Sequence[Any]:
        return ()

    async def events(self, job_id: str) -> Sequence[Any]:
        return ()


class Collector:
    """Takes no request with a job of `refused`."""

    def __init__(self, *refused: str) -> None:
        self.refused = set(refused)
        self.taken: list[str] = []
        self.requests = 0
        self.closed = False

    def close(self) -> None:
        self.closed = True

    def send(self, spans: Sequence[JobSpan]) -> bool:
        self.requests += 1
        names = [str(each.attributes["cavvy.job.id"]) for each in spans if each.name == "job"]
        if self.refused & set(names):
            return False
        self.taken += names
        return True


def make_traces(folder: Path, collector: Collector, *jobs: str, store: Any = None) -> JobTraces:
    traces = JobTraces(store or Store(), folder / "traces", collector)  # type: ignore[arg-type]
    ended = [make_job_record(NOW, id=job_id, phase=JobPhase.DONE) for job_id in jobs]
    traces.note(AtomicWrite(jobs=ended))
    return traces


async def test_one_job_that_is_refused_holds_no_other_up(tmp_path: Path) -> None:
    jobs = [f"j{number}" for number in range(120)]
    collector = Collector("j7")
    traces = make_traces(tmp_path, collector, *jobs)
    rounds = 0
    while not await traces.send():
        rounds += 1
        assert rounds < 40
    assert sorted(collector.taken) == sorted(set(jobs) - {"j7"})
    assert len(collector.taken) == len(set(collector.taken)), "none was sent twice"
    assert await traces.send()
    assert (tmp_path / "traces").exists()


async def test_a_collector_that_is_back_gets_all_of_them(tmp_path: Path) -> None:
    jobs = [f"j{number}" for number in range(60)]
    collector = Collector(*jobs)
    traces = make_traces(tmp_path, collector, *jobs)
    for _ in range(12):
        assert not await traces.send()
    assert not (tmp_path / "traces").exists(), "the next server must send them, too"
    collector.refused.clear()
    assert await traces.send()
    assert sorted(collector.taken) == sorted(jobs)


async def test_a_job_that_was_removed_has_no_trace(tmp_path: Path) -> None:
    store, collector = Store(), Collector()
    store.gone = frozenset({"a"})
    assert await make_traces(tmp_path, collector, "a", "b", store=store).send()
    assert collector.taken == ["b"]


@pytest.mark.parametrize("text", ["", "yesterday", "\0"])
async def test_a_broken_file_begins_anew(tmp_path: Path, text: str) -> None:
    (tmp_path / "traces").write_text(text)
    traces = make_traces(tmp_path, Collector())
    await traces._resume()
    assert datetime.fromisoformat((tmp_path / "traces").read_text()) > NOW.replace(year=2020)


@pytest.mark.parametrize("refused", [(), ("a",)])
async def test_a_server_that_stops_sends_what_is_left_if_the_collector_takes_it(
    tmp_path: Path, refused: Sequence[str]
) -> None:
    collector = Collector(*refused)
    traces = make_traces(tmp_path, collector, "a")
    if refused:
        assert not await traces.send()
    before = collector.requests
    async with sending(traces):
        pass
    assert collector.requests - before == (0 if refused else 1)
    assert collector.closed
