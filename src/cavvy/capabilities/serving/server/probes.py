"""Probes regularly whether replicas answer."""

import asyncio
import re
from collections.abc import Callable, Mapping
from math import isfinite
from time import monotonic

from cavvy.capabilities.serving.control.front import ProbeRecord
from cavvy.capabilities.serving.gateway.config import KEPT_S
from cavvy.domain.services import ReadinessProbe
from cavvy.domain.values import Struct

_FIRST_S, _LONGEST_S = 0.05, 1.0  # seconds between the attempts to get a first answer
_NEVER = ProbeRecord()
_READ_MAX = 65_536
_CLOSES = re.compile(rb"(?im)^connection:.*\bclose\b")
_OUT_OF_REACH = "the replica's node is out of reach"


class ProbedPort(Struct, frozen=True):
    """A port of this machine, and the settings of the port's probes. `find` returns 0 while the
    port is unknown. Each probe also reads the `metric` that the program reports at /metrics.
    `ready` is true if the replica was ready before these probes began, for example before a restart
    of the server. If the port of such a replica is still unknown after `patience_s` seconds, the
    probe fails. The agent normally reconnects within `patience_s`. Without `patience_s`, a replica
    whose program no longer listens would count as ready forever.
    """

    find: Callable[[], int]
    probe: ReadinessProbe
    ready: bool = False
    patience_s: float = 120.0
    metric: str = ""


class ReplicaProbes:
    """The probes of all replicas, keyed by the replica's ID."""

    def __init__(self) -> None:
        self._tasks: dict[str, dict[str, asyncio.Task[None]]] = {}  # by service
        self._records: dict[str, ProbeRecord] = {}
        self._keeping: dict[str, asyncio.Task[bool]] = {}  # by replica: `keeps_unused`

    def watch(
        self, service: str, ports: Mapping[str, ProbedPort], changed: Callable[[], None]
    ) -> None:
        """Probe exactly these replicas of the service. Calls `changed` when a replica answers for
        the first time, or when the result of its probe changes.
        """
        tasks = self._tasks.setdefault(service, {})
        for gone in tasks.keys() - ports.keys():
            tasks.pop(gone).cancel()
            self._records.pop(gone, None)
            if (keeping := self._keeping.pop(gone, None)) is not None:
                keeping.cancel()
        for replica, port in ports.items():
            if replica not in tasks:
                tasks[replica] = asyncio.create_task(self._keep(replica, port, changed))
        if not tasks:
            del self._tasks[service]

    def record(self, replica: str) -> ProbeRecord:
        return self._records.get(replica, _NEVER)

    def _find_keeps(self, replica: str, port: int, how: ReadinessProbe, answers: bool) -> bool:
        """Return whether the replica is known to keep unused connections open. One that answers for
        the first time is tried; one that answers no longer will be tried again.
        """
        known = self._keeping.get(replica)
        if not answers:
            if known is not None:
                self._keeping.pop(replica).cancel()
            return False
        if known is None:
            self._keeping[replica] = asyncio.create_task(keeps_unused(port, how))
            return False
        return known.done() and known.result()

    def close(self) -> None:
        for service in list(self._tasks):
            self.watch(service, {}, lambda: None)

    async def _keep(self, replica: str, port: ProbedPort, changed: Callable[[], None]) -> None:
        pause_s, ready, begun = _FIRST_S, port.ready, monotonic()
        while True:
            number = port.find()
            if not number and (not ready or monotonic() - begun < port.patience_s):
                await asyncio.sleep(_FIRST_S)
                continue
            problem = await probe(number, port.probe) if number > 0 else _OUT_OF_REACH
            answers = not problem
            before = self.record(replica)
            failures = 0 if answers else before.failures + 1
            reading = None
            if answers and port.metric:
                reading = await read_metric(number, port.metric, port.probe.timeout.total_seconds())
            self._records[replica] = ProbeRecord(
                answers=answers,
                failures=failures,
                problem=problem,
                reading=reading,
                keeps=self._find_keeps(replica, number, port.probe, answers),
            )
            if answers != before.answers or failures:
                changed()
            ready = ready or answers
            await asyncio.sleep(port.probe.every.total_seconds() if ready else pause_s)
            pause_s = min(2 * pause_s, _LONGEST_S)


async def probe(port: int, how: ReadinessProbe) -> str:
    """Return why the probe failed, or "" if its request was answered in time, with a status that
    the probe accepts.
    """
    writer = None
    try:
        async with asyncio.timeout(how.timeout.total_seconds()):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(_make_request(port, how))
            version, _, rest = (await reader.readline()).partition(b" ")
    except TimeoutError:
        return f"no answer to {how.path} within {how.timeout.total_seconds():g} s"
    except ConnectionRefusedError:
        return "the program does not listen on the port in the variable PORT"
    except (OSError, ValueError) as error:  # a very long line raises ValueError
        return f"no answer to {how.path}: {error}"
    finally:
        if writer is not None:
            writer.close()
    if not version.startswith(b"HTTP/1."):
        return f"the answer to {how.path} is not HTTP/1.1"
    status = rest[:3].decode("latin-1")
    good = how.any_status or "200" <= status < "400"
    return "" if good else f"{how.path} was answered with status {status}"


async def keeps_unused(port: int, how: ReadinessProbe) -> bool:
    """Return whether the program at a port of this machine keeps a connection open for `KEPT_S`
    after it has answered the probe's request, as a keep-alive connection of HTTP/1.1.
    """
    writer, answered = None, False
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(_make_request(port, how, close=False))
        async with asyncio.timeout(how.timeout.total_seconds()):
            head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 ") or _CLOSES.search(head):
            return False
        answered = True
        async with asyncio.timeout(KEPT_S):
            while await reader.read(_READ_MAX):  # the body
                pass
    except TimeoutError:
        return answered
    except (OSError, ValueError, EOFError, asyncio.LimitOverrunError):
        return False
    finally:
        if writer is not None:
            writer.close()
    return False


def _make_request(port: int, how: ReadinessProbe, *, close: bool = True) -> bytes:
    usual = {"Host": f"127.0.0.1:{port}", "User-Agent": "cavvy-probe", "Accept": "*/*"}
    framing = {"Connection": "close"} if close else {}
    body = (how.body or "").encode()
    if how.body is not None:
        usual["Content-Type"] = "application/json"
        framing["Content-Length"] = str(len(body))
    given = {name.lower() for name, _ in how.headers}
    headers = [(name, value) for name, value in usual.items() if name.lower() not in given]
    lines = [f"{'GET' if how.body is None else 'POST'} {how.path} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in (*headers, *how.headers, *framing.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def read_metric(port: int, name: str, timeout_s: float) -> float | None:
    """Request a program's metrics in Prometheus's text format, and return the sum of the samples of
    one metric, or None if no sample arrives in time.
    """
    try:
        async with asyncio.timeout(timeout_s):
            status, body = await ask_program(port, "GET", "/metrics", most=_METRICS_MAX)
    except (OSError, ValueError):  # includes TimeoutError
        return None
    return sum_samples(body.decode(errors="replace"), name) if status == 200 else None


async def ask_program(
    port: int, method: str, path: str, body: bytes | None = None, *, most: int
) -> tuple[int, bytes]:
    """Send a request, perhaps with JSON, to a program at a port of this machine. Return the status
    and about `most` bytes of the body. The request uses HTTP/1.0, so that the answer is not
    chunked. Raises OSError, ValueError.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = f"{method} {path} HTTP/1.0\r\nHost: 127.0.0.1:{port}\r\n"
        if body is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        writer.write(f"{head}\r\n".encode() + (body or b""))
        answer = b""
        while len(answer) < most and (more := await reader.read(most)):
            answer += more
    finally:
        writer.close()
    status, _, text = answer.partition(b"\r\n\r\n")
    return int(status.partition(b" ")[2][:3]), text


def sum_samples(text: str, name: str) -> float | None:
    """Return the sum over all labels of a metric, or None if the metric has no samples or
    the sum is not a finite number."""
    found = [float(each[1]) for each in re.finditer(_SAMPLE % re.escape(name), text, re.MULTILINE)]
    total = sum(found)
    return total if found and isfinite(total) else None


_METRICS_MAX = 4 << 20
# Possessive quantifiers keep the search linear: a program chooses its text, and the search blocks
# the server.
_NUMBER = r"[-+]?(?:[0-9]++\.?[0-9]*+|\.[0-9]++)(?:[eE][-+]?[0-9]++)?"
_SAMPLE = rf"^%s(?:\{{[^\n]*\}})? +({_NUMBER})(?: +-?[0-9]+)?\r?$"
