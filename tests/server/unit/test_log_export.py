"""Which lines of the logs of jobs are sent to a collector."""

import logging
from pathlib import Path
from typing import Any

import pytest
from tests.records import FIXED, make_attempt_record
from tests.waits import wait_until

from cavvy.control.decide.job_traces import find_run_span
from cavvy.domain.jobs import AttemptPhase
from cavvy.server.otlp_export import LogSender, SentLogs, sending_server_log
from cavvy.store.base import AtomicWrite
from cavvy.store.logs import LogStore
from cavvy.telemetry import is_wanted

WHERE = ("p", "j", 1, 0)


class Lines(list[tuple[bytes, int]]):
    """The sender in place of OpenTelemetry's."""

    def send_line(self, key: tuple[str, str, int, int], line: bytes, at_ns: int) -> None:
        assert key[:2] == ("p", "j")
        self.append((line, at_ns))

    @property
    def texts(self) -> list[bytes]:
        return [line for line, _ in self]


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.fixture
def logs(tmp_path: Path, lines: Any) -> SentLogs:
    return SentLogs(LogStore(tmp_path), lines)


def end(logs: SentLogs) -> None:
    from datetime import UTC, datetime

    attempt = make_attempt_record(datetime.now(UTC), FIXED, phase=AttemptPhase.ENDED)
    logs.note(AtomicWrite(attempts=[attempt]))


def test_lines_are_sent_once_and_whole(logs: SentLogs, lines: Lines) -> None:
    assert logs.append(*WHERE, 0, b"one\ntw", now_s=5.0) == 6
    assert logs.append(*WHERE, 0, b"one\ntwo\n", now_s=6.0) == 8  # sent again, with more
    assert logs.append(*WHERE, 4, b"two\n") == 8
    assert logs.append(*WHERE, 8, b"\nend without a line end", now_s=7.0) == 31
    assert lines.texts == [b"one", b"two", b""]
    end(logs)
    end(logs)
    assert lines[3:] == [(b"end without a line end", 7_000_000_000)]
    assert logs.size(*WHERE) == 31, "other methods are those of the logs"


def test_bytes_that_are_not_stored_are_not_sent(logs: SentLogs, lines: Lines) -> None:
    assert logs.append(*WHERE, 50, b"early\n") == 0
    assert lines == []
    assert logs.append(*WHERE, 0, b"half") == 4
    assert logs.append(*WHERE, 50, b"early\n") == 4
    assert logs.append(*WHERE, 100, b"after\n", lost=96) == 106
    assert lines.texts == [b"after"], "half a line, whose rest was lost, is no line"


def test_a_line_without_end_is_cut(logs: SentLogs, lines: Lines) -> None:
    long = b"x" * 200_000
    logs.append(*WHERE, 0, long)
    logs.append(*WHERE, len(long), b"\n\xff\x00\n")
    assert b"".join(lines.texts[:-1]) == long
    assert max(map(len, lines.texts)) <= 65_536
    assert lines.texts[-1] == b"\xff\x00"


def test_many_logs_are_forgotten(logs: SentLogs, lines: Lines, monkeypatch: Any) -> None:
    monkeypatch.setattr("cavvy.server.otlp_export._KNOWN", 2)
    for rank in range(4):
        logs.append("p", "j", 1, rank, 0, b"of %d" % rank)
    assert lines.texts == [b"of 0", b"of 1"]
    assert len(logs._known) == 2


@pytest.mark.parametrize(
    ("signal", "variables", "wanted"),
    [
        ("traces", {}, False),
        ("traces", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"}, True),
        ("traces", {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c"}, True),
        ("traces", {"OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": "http://c"}, False),
        ("traces", {"OTEL_EXPORTER_OTLP_ENDPOINT": "x", "OTEL_TRACES_EXPORTER": "none"}, False),
        ("traces", {"OTEL_EXPORTER_OTLP_ENDPOINT": "x", "OTEL_SDK_DISABLED": "TRUE"}, False),
        ("logs", {"OTEL_EXPORTER_OTLP_ENDPOINT": "x"}, False),
        ("logs", {"OTEL_EXPORTER_OTLP_ENDPOINT": "x", "OTEL_LOGS_EXPORTER": "console, otlp"}, True),
        ("logs", {"OTEL_LOGS_EXPORTER": "otlp"}, False),
    ],
)
def test_the_variables_decide(signal: str, variables: dict[str, str], wanted: bool) -> None:
    assert is_wanted(signal, variables) is wanted


async def test_a_collector_gets_the_records(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="`make setup-dev` installs the SDK")
    from tests.contract.otlp_stand_in import OtlpStandIn, attributes

    collector = OtlpStandIn()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    sender = LogSender("installation")
    logs = SentLogs(LogStore(tmp_path), sender)
    async with sending_server_log(sender):
        logs.append(*WHERE, 0, b"loss 0.5 \xff\n", now_s=5.0)
        logging.getLogger("cavvy.of.a.test").warning("a job %s", "failed")
        logging.getLogger("urllib3.connectionpool").warning("own")
    wait_until(
        lambda: len(collector.records) >= 2, lambda: f"{collector.records}, {collector.broken}"
    )
    line, record = sorted(collector.records, key=lambda each: each.severity_number)
    assert (line.body.string_value, line.time_unix_nano) == (
        "loss 0.5 \N{REPLACEMENT CHARACTER}",
        5 * 10**9,
    )
    trace_id, span_id = find_run_span("j", 1)
    assert int.from_bytes(line.trace_id) == trace_id
    assert int.from_bytes(line.span_id) == span_id
    assert attributes(line) == {
        "cavvy.project": "p",
        "cavvy.job.id": "j",
        "cavvy.attempt.number": 1,
        "cavvy.rank": 0,
    }
    assert (record.body.string_value, record.severity_number) == ("a job failed", 13)
    assert attributes(record)["code.namespace"] == "cavvy.of.a.test"
    collector.close()
    assert collector.broken == []
