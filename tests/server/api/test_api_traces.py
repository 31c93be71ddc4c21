"""The traces of jobs, as a collector of OpenTelemetry gets them from a server."""

import os
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.api.api.test_api_agents import claim, report, start, write_log
from tests.api.api_state import Api, open_api, until

from cavvy.control.decide.job_traces import write_traceparent
from cavvy.server.otlp_export import JobTraces, SpanSender

pytest.importorskip("opentelemetry.sdk", reason="`make setup-dev` installs OpenTelemetry's SDK")
from tests.contract.otlp_stand_in import OtlpStandIn, attributes

JOB = "/v1/projects/default/jobs/t"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpStandIn]:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    made = OtlpStandIn()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.url)
    yield made
    made.close()
    assert made.broken == []


async def run(api: Api, exit_code: int = 0) -> str:
    """Run the job `t`, whose nodes are then removed, and return its id."""
    made = await api.submit("{name: t, run: 'true'}")
    gang = (await api.attempt(made["id"])).gang
    granted = (await claim(api, gang)).json()
    assert granted["work"]["env"].get("TRACEPARENT") == write_traceparent(made["id"], 1)
    await report(api, gang, {"seq": 1, "kind": "running"})
    outcome = "exit" if exit_code else "succeeded"
    ended = {"seq": 2, "kind": "exited", "outcome": outcome, "exit_code": exit_code}
    await report(api, gang, {**ended, "log_bytes": 0})

    async def is_over() -> bool:
        [attempt] = await api.app_state.store.attempts(made["id"])
        return str(attempt.phase) == "ended"

    await until(is_over)
    return str(made["id"])


async def collect(collector: OtlpStandIn, count: int) -> list[Any]:
    async def look() -> list[Any]:
        return collector.spans if len(collector.spans) >= count else []

    return list(await until(look))


async def test_a_job_that_ends_has_a_trace(tmp_path: Path, collector: OtlpStandIn) -> None:
    async with open_api("sqlite", tmp_path) as api:
        job_id = await run(api)
        spans = {each.name: each for each in await collect(collector, 8)}
    assert set(spans) == {"job", "queue", "attempt", "plan", "launch", "start", "run", "end"}
    parents = {each.span_id: name for name, each in spans.items()}
    assert {name: parents.get(each.parent_span_id) for name, each in spans.items()} == {
        **{"job": None, "queue": "job", "attempt": "job"},
        **dict.fromkeys(("plan", "launch", "start", "run", "end"), "attempt"),
    }
    stated = f"00-{spans['run'].trace_id.hex()}-{spans['run'].span_id.hex()}-01"
    assert stated == write_traceparent(job_id, 1)
    found = attributes(spans["job"])
    assert (found["cavvy.project"], found["cavvy.job.name"]) == ("default", "t")
    assert found["cavvy.job.phase"] == "done"
    assert {"placed", "done"} <= {each.name for each in spans["job"].events}
    assert attributes(spans["attempt"])["cavvy.provider"] == "fake"
    resource = attributes(collector.requests[0].resource_spans[0].resource)
    assert resource["service.name"] == "cavvy"


async def test_the_traces_of_a_killed_server_are_sent_by_the_next_one(
    tmp_path: Path, collector: OtlpStandIn
) -> None:
    """Whatever is sent twice has the same ids."""
    file = tmp_path / "traces"
    async with open_api("sqlite", tmp_path) as api:
        store = api.app_state.store
        file.write_text(datetime.now(UTC).isoformat())
        job_id = await run(api, exit_code=3)
        await collect(collector, 8)
        killed = JobTraces(store, file, SpanSender("i"))
        await killed._resume()
        assert list(killed._ended) == [job_id]
        following = JobTraces(store, file, SpanSender("i"))
        await following._resume()
        assert await following.send()
        last = JobTraces(store, file, SpanSender("i"))
        await last.send()
    ids = Counter(each.span_id for each in collector.spans)
    assert set(ids.values()) == {2}
    [job, _] = [each for each in collector.spans if each.name == "job"]
    assert job.status.code == 2
    assert attributes(job)["process.exit.code"] == 3


async def test_a_collector_that_refuses_gets_the_traces_later(
    tmp_path: Path, collector: OtlpStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_api("sqlite", tmp_path) as api:
        await run(api)
        await collect(collector, 8)
        # not for the server's own sender, which a slow machine would make wait for its next round
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
        traces = JobTraces(api.app_state.store, tmp_path / "none", SpanSender("i"))
        [job] = (await api.app_state.store.list_jobs(None)).jobs
        traces._ended[job.id] = 0
        collector.refusals = 1000
        assert not await traces.send()
        collector.refusals = 0
        assert await traces.send()
        assert len(collector.spans) == 16


async def test_logs_are_sent_only_if_the_variables_ask_for_them(
    tmp_path: Path, collector: OtlpStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    for folder, asked in (("without", ""), ("with", "otlp")):
        monkeypatch.setenv("OTEL_LOGS_EXPORTER", asked)
        (tmp_path / folder).mkdir()
        async with open_api("sqlite", tmp_path / folder) as api:
            gang = await start(api)
            await claim(api, gang)
            assert (await write_log(api, gang, b"hello\n", 0)).json() == {"offset": 6}
            assert (await api.http.get(JOB + "/logs")).content == b"hello\n"
        bodies = [each.body.string_value for each in collector.records]
        assert bodies.count("hello") == bool(asked)


async def test_without_a_collector_nothing_is_traced(
    tmp_path: Path, collector: OtlpStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    async with open_api("sqlite", tmp_path) as api:
        made = await api.submit("{name: t, run: 'true'}")
        gang = (await api.attempt(made["id"])).gang
        assert "TRACEPARENT" not in (await claim(api, gang)).json()["work"]["env"]
    assert collector.requests == []
