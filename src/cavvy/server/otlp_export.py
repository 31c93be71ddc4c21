"""Sends the logs of jobs and of the server, and the traces of ended jobs, to an OpenTelemetry
collector, by OTLP over HTTP.

OpenTelemetry's own variables (OTEL_...) configure it, and OTEL_LOGS_EXPORTER=otlp asks for logs;
docs/reference/telemetry.md lists those that matter. The extra `otel` has the packages. The
processor of OpenTelemetry's SDK, whose logs are not declared stable, keeps a bounded number of
records and drops what a slow collector does not take.
"""

import asyncio
import logging
from asyncio import to_thread
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Lock
from typing import Any, cast

from cavvy import __version__
from cavvy.client.state import write_private
from cavvy.control.decide.job_traces import JobSpan, find_run_span, is_traceable, trace_job
from cavvy.domain.jobs import JOB_ENDS, AttemptPhase
from cavvy.packages import extra_command
from cavvy.store.base import AtomicWrite, RowNotFound, StoreError
from cavvy.store.bucket_logs import BucketLogs
from cavvy.store.logs import LogStore
from cavvy.store.sql import Store
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


_PAUSE_S = 2.0  # jobs that end in this time are sent together
_LONGEST_PAUSE_S = 300.0  # between tries while the collector does not answer
_STOP_S = 3.0  # for the last traces of a server that stops
_BATCH = 50  # jobs of one request
_MOST = 100_000  # jobs that wait; the others are lost
_TRIES = 10  # to send a job alone, after which its trace is dropped
_ENDS = frozenset({AttemptPhase.ENDED, AttemptPhase.KEPT})


class JobTraces:
    """Collects the jobs that end, and sends their traces. `file` keeps the time since when jobs may
    have ended whose traces are not sent, so that the next server sends those of a killed server.
    """

    def __init__(self, store: Store, file: Path, exporter: "SpanSender") -> None:
        self._store, self._file, self._exporter = store, file, exporter
        self._ended: dict[str, int] = {}  # by job, how often it could not be sent alone
        self._size = _BATCH  # of the next request; half of it after each failure
        self.fails = False  # whether the last request failed
        self._news = asyncio.Event()

    def note(self, changes: AtomicWrite) -> None:
        """Collect the jobs that these changes, which were written, may have ended."""
        found = [each.id for each in changes.jobs if each.phase in JOB_ENDS]
        found += [each.job_id for each in changes.attempts if each.phase in _ENDS]
        if found and len(self._ended) < _MOST:
            for job_id in found:
                self._ended.setdefault(job_id, 0)
            self._news.set()

    async def run(self) -> None:
        """Send traces until this task is cancelled."""
        await self._resume()
        pause_s = _PAUSE_S
        while True:
            await self._news.wait()
            await asyncio.sleep(pause_s)
            pause_s = _PAUSE_S if await self.send() else min(2 * pause_s, _LONGEST_PAUSE_S)

    async def send(self) -> bool:
        """Send what is collected. Return whether the collector has taken all of it."""
        began = datetime.now(UTC)
        self._news.clear()
        while self._ended:
            batch = list(self._ended)[: self._size]
            self.fails = not await self._send_batch(batch)
            if self.fails:
                self._put_off(batch)
                self._news.set()
                return False
            self._size = min(2 * self._size, _BATCH)
            for job_id in batch:
                del self._ended[job_id]
        self._write(began)
        return True

    async def _send_batch(self, batch: Sequence[str]) -> bool:
        try:
            spans = [span for job_id in batch for span in await self._trace(job_id)]
            return not spans or await asyncio.to_thread(self._exporter.send, spans)
        except StoreError:
            return False

    def _put_off(self, batch: Sequence[str]) -> None:
        """Make the next request smaller, since the collector may refuse one trace of it. A job that
        could not be sent alone waits for the others.
        """
        if len(batch) > 1:
            self._size = len(batch) // 2
            return
        [job_id] = batch
        tries = self._ended.pop(job_id) + 1
        if tries < _TRIES:
            self._ended[job_id] = tries
        else:
            _log.warning("the collector took no trace of a job", extra={"job": job_id})

    async def _trace(self, job_id: str) -> Sequence[JobSpan]:
        try:
            job = await self._store.job(job_id)
        except RowNotFound:
            return ()
        attempts = await self._store.attempts(job_id)
        if not is_traceable(job, attempts):
            return ()  # another change follows
        return trace_job(job, attempts, await self._store.events(job_id))

    async def _resume(self) -> None:
        try:
            since = datetime.fromisoformat(self._file.read_text())
        except (OSError, ValueError):
            self._write(datetime.now(UTC))  # earlier jobs are not sent
            return
        found = await self._store.ended_since(since - timedelta(seconds=_PAUSE_S), _MOST)
        self._ended.update(dict.fromkeys(found, 0))
        if found:
            self._news.set()

    def close(self) -> None:
        """End the tries of a request that is under way."""
        self._exporter.close()

    def _write(self, since: datetime) -> None:
        with suppress(OSError):  # on a full disk, traces may be sent twice
            write_private(str(self._file), since.isoformat().encode())


class SpanSender:
    """Sends spans with OpenTelemetry's SDK. Raises ImportError without it."""

    def __init__(self, installation: str) -> None:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk import trace as sdk
        from opentelemetry.sdk.trace.export import SpanExportResult
        from opentelemetry.sdk.trace.sampling import Decision
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._trace, self._sdk = trace, sdk
        self._taken, self._sampled = SpanExportResult.SUCCESS, Decision.RECORD_AND_SAMPLE
        self._resource = make_resource("cavvy", **{"service.instance.id": installation})
        # the provider reads the sampler from the variables
        self._sampler = sdk.TracerProvider(shutdown_on_exit=False).sampler
        self._scope = InstrumentationScope("cavvy", __version__)
        self._exporter = OTLPSpanExporter()

    def send(self, spans: Sequence[JobSpan]) -> bool:
        """Return whether the collector has taken the spans that the sampler chooses."""
        chosen = {}  # by trace
        for each in spans:
            if each.trace_id not in chosen:
                result = self._sampler.should_sample(None, each.trace_id, each.name)
                chosen[each.trace_id] = result.decision is self._sampled
        sampled = [self._convert(each) for each in spans if chosen[each.trace_id]]
        return not sampled or self._exporter.export(sampled) is self._taken

    def close(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]  # it has no types

    def _convert(self, span: JobSpan) -> Any:
        trace = self._trace
        code = trace.StatusCode
        flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)

        def make_context(span_id: int) -> Any:
            return trace.SpanContext(span.trace_id, span_id, is_remote=False, trace_flags=flags)

        return self._sdk.ReadableSpan(
            name=span.name,
            context=make_context(span.span_id),
            parent=None if span.parent_id is None else make_context(span.parent_id),
            resource=self._resource,
            attributes=dict(span.attributes),
            events=[
                self._sdk.Event(each.kind, {"cavvy.text": each.text}, _to_nanoseconds(each.at))
                for each in span.events
            ],
            kind=trace.SpanKind.INTERNAL,
            status=trace.Status(code.ERROR, span.failed) if span.failed else trace.Status(code.OK),
            start_time=_to_nanoseconds(span.begin),
            end_time=_to_nanoseconds(span.end),
            instrumentation_scope=self._scope,
        )


@asynccontextmanager
async def sending(traces: JobTraces | None) -> AsyncIterator[None]:
    """Send the traces of the jobs that end in this block."""
    if traces is None:
        yield
        return
    running = asyncio.create_task(traces.run())
    try:
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        if not traces.fails:  # otherwise the next server sends what is left
            with suppress(TimeoutError):
                async with asyncio.timeout(_STOP_S):
                    await traces.send()
        traces.close()


def open_traces(store: Store, folder: Path, installation: str) -> JobTraces | None:
    """Return what sends traces, or None if the variables name no collector for them."""
    if not is_wanted("traces"):
        return None
    try:
        sender = SpanSender(installation)
    except ImportError as error:
        hint = f"install it where the server runs: {extra_command('otel')}"
        _log.warning("no traces are sent, because %s is missing; %s", error.name, hint)
        return None
    return JobTraces(store, folder / "traces", sender)


def _to_nanoseconds(at: datetime) -> int:
    return round(at.timestamp() * 1e6) * 1000
