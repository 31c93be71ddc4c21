"""Sends the logs of jobs and of the server to an OpenTelemetry collector, by OTLP over HTTP.

OTEL_LOGS_EXPORTER=otlp asks for it; docs/reference/telemetry.md lists the other variables. The
processor of OpenTelemetry's SDK, whose logs are not declared stable, keeps a bounded number of
records and drops what a slow collector does not take.
"""

import logging
from asyncio import to_thread
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from threading import Lock
from typing import Any, cast

from cavvy import __version__
from cavvy.control.decide.job_traces import find_run_span
from cavvy.domain.jobs import AttemptPhase
from cavvy.packages import extra_command
from cavvy.store.base import AtomicWrite
from cavvy.store.bucket_logs import BucketLogs
from cavvy.store.logs import LogStore
from cavvy.telemetry import is_wanted, make_resource

_LINE_MAX = 65_536  # bytes; longer lines become several records
_KNOWN = 10_000  # logs whose end is remembered
_OVER = frozenset({AttemptPhase.ENDED, AttemptPhase.KEPT})
# what the export itself logs would be sent, too, and be logged again
_OWN = ("opentelemetry", "urllib3", "requests")
_log = logging.getLogger(__name__)
_Key = tuple[str, str, int, int]  # project, job, attempt, rank


class LogSender:
    """Raises ImportError without OpenTelemetry's SDK."""

    def __init__(self, installation: str) -> None:
        from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
        from opentelemetry.sdk._logs import LoggerProvider
        from opentelemetry.sdk._logs.export import BatchLogRecordProcessor

        resource = make_resource("cavvy", **{"service.instance.id": installation})
        self._provider = LoggerProvider(resource, shutdown_on_exit=False)
        self._provider.add_log_record_processor(BatchLogRecordProcessor(OTLPLogExporter()))
        self._of_jobs = self._provider.get_logger("cavvy.jobs", __version__)
        self._of_server = self._provider.get_logger("cavvy.server", __version__)

    def send_line(self, key: _Key, line: bytes, at_ns: int) -> None:
        """Send a line of a job's log, as a record of the attempt's `run` span."""
        from opentelemetry import trace

        project, job_id, attempt, rank = key
        trace_id, span_id = find_run_span(job_id, attempt)
        flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
        context = trace.SpanContext(trace_id, span_id, is_remote=False, trace_flags=flags)
        self._of_jobs.emit(
            timestamp=at_ns,
            context=trace.set_span_in_context(trace.NonRecordingSpan(context)),
            body=line.decode("utf-8", "replace"),
            attributes={
                "cavvy.project": project,
                "cavvy.job.id": job_id,
                "cavvy.attempt.number": attempt,
                "cavvy.rank": rank,
            },
        )

    def send_record(self, record: logging.LogRecord) -> None:
        """Send a record of the server's own log."""
        from opentelemetry._logs import SeverityNumber

        # Python's levels are 10 apart, OpenTelemetry's are 4 apart: 10 is DEBUG, which is 5
        severity = SeverityNumber(min(max(record.levelno // 10 * 4 + 1, 1), 21))
        self._of_server.emit(
            timestamp=int(record.created * 1e9),
            severity_number=severity,
            severity_text=record.levelname,
            body=record.getMessage(),
            attributes={"code.namespace": record.name},
            exception=record.exc_info[1] if record.exc_info else None,
        )

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


class ServerLogHandler(logging.Handler):
    def __init__(self, sender: LogSender) -> None:
        super().__init__(logging.INFO)
        self._sender = sender
        self.addFilter(lambda record: record.name.partition(".")[0] not in _OWN)

    def emit(self, record: logging.LogRecord) -> None:
        self._sender.send_record(record)


class SentLogs:
    """Logs of jobs that sends each line that is appended. Methods that this class does not define
    are passed to the wrapped logs. Several threads may call it.
    """

    def __init__(self, inner: LogStore | BucketLogs, sender: LogSender) -> None:
        self._inner, self._sender = inner, sender
        # the end of what was sent of each log, and the last line as far as it has arrived, with
        # its time; the log that has not grown for the longest time is the first
        self._known: dict[_Key, tuple[int, bytes, int]] = {}
        self._lock = Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def as_logs(self) -> LogStore:
        return cast(LogStore, self)  # delegates all other methods by name

    def append(
        self,
        project: str,
        job_id: str,
        attempt: int,
        rank: int,
        offset: int,
        data: bytes,
        lost: int = 0,
        now_s: float | None = None,
    ) -> int:
        """See `LogStore.append`."""
        key = (project, job_id, attempt, rank)
        wanted = self._inner.append(*key, offset, data, lost, now_s)
        at_ns = int((now_s or 0) * 1e9)
        with self._lock:
            end, begun, _ = self._known.pop(key, (min(offset, wanted), b"", 0))
            start = max(end, offset)
            fresh = data[start - offset : wanted - offset] if wanted > start else b""
            if fresh and start > end:  # the bytes between them were lost
                begun = b""
            *lines, begun = (begun + fresh).split(b"\n")
            while len(begun) > _LINE_MAX:
                lines, begun = [*lines, begun[:_LINE_MAX]], begun[_LINE_MAX:]
            self._known[key] = max(wanted, end), begun, at_ns
            dropped = next(iter(self._known)) if len(self._known) > _KNOWN else None
        for line in lines:
            for first in range(0, len(line) or 1, _LINE_MAX):
                self._sender.send_line(key, line[first : first + _LINE_MAX], at_ns)
        if dropped is not None:
            self._end(dropped)
        return wanted

    def note(self, changes: AtomicWrite) -> None:
        """Send the last lines of attempts that have ended, even if they have no line end."""
        over = {(each.job_id, each.number) for each in changes.attempts if each.phase in _OVER}
        if over:
            for key in [each for each in self._known.copy() if each[1:3] in over]:
                self._end(key)

    def _end(self, key: _Key) -> None:
        with self._lock:
            _, begun, at_ns = self._known.pop(key, (0, b"", 0))
        if begun:
            self._sender.send_line(key, begun, at_ns)


def open_log_sender(installation: str) -> LogSender | None:
    """Return what sends logs, or None if the variables do not ask for it."""
    if not is_wanted("logs"):
        return None
    try:
        return LogSender(installation)
    except ImportError as error:
        hint = f"install it where the server runs: {extra_command('otel')}"
        _log.warning("no logs are sent, because %s is missing; %s", error.name, hint)
        return None


@asynccontextmanager
async def sending_server_log(sender: LogSender | None) -> AsyncIterator[None]:
    """Send what the server logs in this block. At its end, `sender` is closed."""
    if sender is None:
        yield
        return
    handler = ServerLogHandler(sender)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        await to_thread(sender.close)
