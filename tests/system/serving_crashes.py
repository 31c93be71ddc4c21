"""Two servers with one PostgreSQL serve two services, while their processes are killed (SIGKILL)
under load. No answer may be wrong, no process may be left, and the bills must equal a recount.
"""

import json
import os
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from random import Random

from tests.system.checked_load import PROGRAM, SECRET, CheckedLoad, Target
from tests.system.postgres import crash_postgres
from tests.system.replica_site import ReplicaSite
from tests.system.server_state import kill_server
from tests.waits import START_S, wait_until

from cavvy.capabilities.serving.call_wire import find_call, list_calls
from cavvy.client import ApiClient, connect
from cavvy.client.connection import ensure_server
from cavvy.client.errors import StartFailed
from cavvy.client.service_wire import (
    end_service,
    find_named_service,
    list_named_services,
    put_service,
)
from cavvy.client.transport import Patience

HOST = "direct.ai.example.com"  # HAProxy passes requests with a host name on by itself
KINDS = ("server", "gateway", "replica")
_SETTINGS = """
[server]
listen = "127.0.0.1:0"
[services]
domains = "ai.example.com"
plane = "{plane}"
"""
_TASK = """
name: {name}
run: exec python3 -c "$PROGRAM" {name} $PORT {file}
env:
  PROGRAM: |
{program}
resources: {{cpu: 0.1, memory: 32MiB}}
service:
  port: 8000
  replicas: {{min: 2, max: 3}}
  concurrency: 16
  timeouts: {{queue: 2m}}
  queue: {{attempts: 20, backoff: 1s}}
{more}
"""
_MORE = {
    "direct": f"  hosts: [{HOST}]",
    "routed": "  events: [{webhook: in, secret: HOOK, path: /in}]",
}
# A server reads HAProxy's counts each second; on a busy machine, this may take longer. After a kill,
# a server starts within some seconds, and then replaces HAProxy. Requests that the former process
# begins after its last reading are not counted, up to this number.
_READ_S, _STARTED_S, _REPLACED = 2.0, 15.0, 5


def write_settings(plane: str) -> str:
    return _SETTINGS.format(plane=plane)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    what: str
    server: str  # "" for replicas and PostgreSQL
    at: float  # when the search for the process began, in seconds since 1970
    until: float  # when it was killed: the search takes a while on a busy machine


class ServingPair:
    """Both servers with their services and callers."""

    def __init__(self, site: ReplicaSite, plane: str, pause_s: float) -> None:
        self.site, self.plane, self.kills = site, plane, list[Kill]()
        self._file = site.root / "received"
        self._starting: list[threading.Thread] = []
        port = "port" if plane == "embedded" else "haproxy.port"
        files = {name: home / "gateway" / port for name, home in site.homes.items()}
        self.targets = [
            Target(
                server=server, service=service, host=host, prefix=prefix, port_file=files[server]
            )
            for server in site.homes
            for service, host, prefix in (
                ("direct", HOST, ""),
                ("routed", "localhost", "/default/routed"),
            )
        ]
        self.load = CheckedLoad(self.targets, self._connect, pause_s)

    def _connect(self, server: str) -> ApiClient:
        """A client of a server, which starts this server if it does not run."""
        return connect(home=str(self.site.homes[server]), patience=Patience(START_S))

    def start(self) -> None:
        for home in self.site.homes.values():
            ensure_server(home=str(home))
        wait_until(self.site.shared)
        program = "".join(f"    {line}\n" for line in PROGRAM.splitlines())
        with self._connect("a") as client:
            client.put_secret("default", "HOOK", SECRET)
            for name, more in _MORE.items():
                text = _TASK.format(name=name, file=self._file, program=program, more=more)
                put_service(
                    client,
                    text,
                    project="default",
                    name=name,
                    path="service.yaml",
                    params={},
                    origin=None,
                    user="ada",
                    consent=True,
                )
        for name in self.site.homes:
            wait_until(lambda name=name: self._is_ready(name), seconds=START_S)  # type: ignore[misc]
        self.load.start()
        self.await_progress()

    def _is_ready(self, server: str) -> bool:
        with self._connect(server) as client:
            found = [find_named_service(client, "default", name) for name in _MORE]
        return all(each.url and each.ready >= 2 for each in found)

    def await_progress(self, more: int = 2) -> None:
        """Wait until each caller has got some more right answers."""
        before = self.load.progress()

        def find_late() -> list[str]:
            now = self.load.progress()
            return [name for name, count in before.items() if now[name] < count + more]

        wait_until(lambda: not find_late(), lambda: f"no answers: {find_late()}", START_S)

    # what is killed

    def kill(self, what: str, dice: Random) -> bool:
        """Kill a process of this kind. Returns whether there was one."""
        server = "" if what in ("replica", "postgres") else dice.choice(sorted(self.site.homes))
        at = time.time()
        if what == "server":
            done = kill_server(self.site.homes[server]) is not None
            self.restart(server, dice.uniform(0, 4))
        elif what == "postgres":
            crash_postgres(self.site.url)
            done = True
        else:
            done = kill_process(dice.choice(self._find(what, server) or [0]))
        if done:
            self.kills.append(Kill(what=what, server=server, at=at, until=time.time()))
        return done

    def _find(self, what: str, server: str) -> list[int]:
        if what == "replica":
            return [pid for pid, words in list_processes() if words[-1:] == [str(self._file)]]
        name = {"gateway": "gateway.json", "haproxy": "haproxy.cfg"}[what]
        file = str(self.site.homes[server] / "gateway" / name)
        return [pid for pid, words in list_processes() if file in words]

    def restart(self, server: str, pause_s: float) -> None:
        """Start a server after a pause, as a supervisor does."""

        def start() -> None:
            time.sleep(pause_s)
            with suppress(StartFailed):  # PostgreSQL recovers; a user will start the server
                ensure_server(home=str(self.site.homes[server]))

        self._starting.append(threading.Thread(target=start))
        self._starting[-1].start()

    def finish(self) -> list[str]:
        """Wait until all has recovered, end the services, and return the faults."""
        for each in self._starting:
            each.join()
        for home in self.site.homes.values():
            ensure_server(home=str(home))
        self.await_progress()
        self.load.finish()
        faults = [*self.load.found.wrong, *self._check_broken(), *self._check_queue()]
        self._end_services()
        return [*faults, *self._find_left(), *self._check_received(), *self._recount()]

    def _end_services(self) -> None:
        with self._connect("a") as client:
            for name in _MORE:
                end_service(client, "default", name)
            wait_until(
                lambda: not list_named_services(client), lambda: str(list_named_services(client))
            )
            wait_until(lambda: not client.nodes(), lambda: str(client.nodes()))
        live = "SELECT name, phase, reason FROM jobs WHERE ended_at IS NULL"
        wait_until(lambda: not self.site.ask(live), lambda: str(self.site.ask(live)))
        open_ones = "SELECT gang FROM attempts WHERE phase <> 'ended'"
        wait_until(lambda: not self.site.ask(open_ones), lambda: str(self.site.ask(open_ones)))

    # what is checked

    def _check_broken(self) -> Iterator[str]:
        """Requests without an answer must have met a kill of a process that they need. Behind
        HAProxy, they may also have come before a killed gateway was started again.
        """
        for each in self.load.found.broken:
            if each.error.startswith("replica-") and self.plane == "haproxy":
                if each.error == "replica-silent":
                    yield f"{each.id}: {each.error} at {each.began:.1f} to {each.ended:.1f}"
                continue
            own = [
                kill
                for kill in self.kills
                if kill.what == "replica"
                or (kill.what in ("gateway", "haproxy") and kill.server == each.server)
            ]
            if each.error == "refused":
                met = any(k.at <= each.ended and k.what != "replica" for k in own)
            else:
                met = any(each.began - 0.5 <= k.until and k.at <= each.ended + 0.5 for k in own)
            if not met:
                yield f"{each.id}: {each.error} at {each.began:.1f} to {each.ended:.1f}"

    def _check_queue(self) -> Iterator[str]:
        """Each accepted call and each delivery has one result, which is its own."""
        found = self.load.found
        with self._connect("a") as client:

            def is_empty() -> bool:
                counts = list_calls(client, "default", "routed", limit=1).counts
                return not counts.get("waiting", 0)

            wait_until(is_empty, seconds=START_S)
            after, calls = "", {}
            while page := list_calls(client, "default", "routed", after=after, limit=1000).calls:
                calls |= {each.id: each for each in page}
                after = page[-1].id
            for each in calls.values():
                if each.state != "done":
                    yield f"queued call {each.id} is {each.state}: {each.problem}"
            for name, wanted in found.queued.items():
                body = find_call(client, "default", "routed", name).body if name in calls else b""
                if body != wanted:
                    yield f"the result of the queued call {name} is {body!r}"
            hooks = [
                find_call(client, "default", "routed", each.id).body.split()[1].decode()
                for each in calls.values()
                if each.source == "webhook" and each.state == "done"
            ]
        yield from (f"{name} is {n} calls" for name, n in Counter(hooks).items() if n > 1)
        yield from (f"delivery {name} has no call" for name in found.delivered - set(hooks))

    def _check_received(self) -> Iterator[str]:
        """What the replicas have received fits what the callers were told."""
        found, times = self.load.found, Counter(each["id"] for each in self.read_received())
        yield from (f"{name} reached no replica" for name in found.right if not times[name])
        yield from (
            f"{name} reached {times[name]} replicas" for name in found.once if times[name] > 1
        )

    def read_received(self) -> list[dict[str, object]]:
        """The requests that the replicas have received."""
        with self._file.open() as lines:
            return [json.loads(line) for line in lines]

    def _find_left(self) -> list[str]:
        """The processes that should have ended with the services."""

        def find() -> list[str]:
            root, left = str(self.site.root), []
            for pid, words in list_processes():
                told = " ".join(words)
                with suppress(OSError):
                    marked = b"CAVVY_GANG=" in (environ := read_environ(pid))
                    mine = root in told or (marked and root.encode() in environ)
                    # a server keeps a fork server, which has the marks of no gang
                    server = "cavvy.server.embedded" in told or "--forks" in words
                    if mine and not server and pid != os.getpid():
                        left.append(f"left: {pid} {told[:200]}")
            return left

        with suppress(AssertionError):
            wait_until(lambda: not find(), seconds=START_S / 4)
        return find()

    def _recount(self) -> Iterator[str]:
        yield from recount_bills(self.site)
        yield from self._recount_requests()

    def count_ledger(self) -> dict[str, int]:
        """The number of requests in the ledger, by service."""
        rows = self.site.ask(
            "SELECT s.service, SUM(e.quantity) FROM ledger e JOIN ledger_subjects s "
            "ON s.id = e.subject WHERE e.unit = 'requests' GROUP BY 1"
        )
        return {str(service): int(str(count)) for service, count in rows}

    def _recount_requests(self) -> Iterator[str]:
        """The ledger has each request that replicas have received through a gateway, whatever was
        killed. Those that HAProxy passed on itself may be missing if HAProxy was killed or replaced
        before its server had read their number. A request that was sent to a killed replica may be
        counted although the replica had not read it.
        """
        counted = self.count_ledger()
        received = self.read_received()
        killed = sum(each.what == "replica" for each in self.kills)
        for service in _MORE:
            own = [each for each in received if each["service"] == service]
            # each caller may have had a request at a killed replica, which had not read it
            callers = sum(target.service == service for _, _, target in self.load.callers)
            least, most = len(own), len(own) + callers * killed
            if self.plane == "haproxy" and service == "direct":
                least -= sum(self._may_be_missing(each) for each in own)
                least -= _REPLACED * sum(each.what == "server" for each in self.kills)
            got = counted.get(service, 0)
            print(f"{service}: {got} requests in the ledger, {len(own)} received")
            if not least <= got <= most:
                yield f"{service}: {got} requests in the ledger, recount {least} to {most}"

    def _may_be_missing(self, received: Mapping[str, object]) -> bool:
        """Whether HAProxy was killed before its server had read the number of its requests. While
        the server does not run, nothing is read.
        """
        at = float(str(received["at"]))
        for kill in self.kills:
            if (kill.what, kill.server) != ("haproxy", received["via"]):
                continue
            since = kill.at
            for other in reversed(self.kills):
                server = (other.what, other.server) == ("server", kill.server)
                if server and 0 <= since - other.at < _STARTED_S:
                    since = other.at
            if since - _READ_S <= at <= kill.until + 1:
                return True
        return False


def recount_bills(site: ReplicaSite) -> Iterator[str]:
    """Compare each bill with the times in the provider's own records, and with the ledger."""
    charges: defaultdict[str, list[tuple[int, int, int, int]]] = defaultdict(list)
    sql = "SELECT a.gang, c.since, c.until, c.rate, c.amount FROM charges c "
    for gang, *row in site.ask(f"{sql} JOIN attempts a ON a.id = c.attempt_id ORDER BY c.since"):
        since, until, rate, amount = (int(str(each)) for each in row)
        charges[str(gang)].append((since, until, rate, amount))
    lives = read_lives(site)
    for gang in charges.keys() | lives.keys():
        own, life = charges[gang], lives.get(gang)
        if life is None or not own:
            yield f"{gang}: charges {own}, life {life}"
            continue
        joined = all(one[1] == other[0] for one, other in pairwise(own))
        if not joined or (own[0][0], own[-1][1]) != life:
            yield f"{gang}: charges {own}, but it lived {life}"
        for since, until, rate, amount in own:
            if abs(amount - (until - since) * rate / 3_600_000_000) > 1:
                yield f"{gang}: {amount} for {until - since} us at {rate}"
    yield from _recount_ledger(site)


def _recount_ledger(site: ReplicaSite) -> Iterator[str]:
    sums = (
        "SELECT j.name, j.spent, COALESCE((SELECT SUM(amount) FROM charges c WHERE "
        "c.job_id = j.id), 0), COALESCE(SUM(e.amount), 0), COALESCE(SUM(e.amount) FILTER "
        "(WHERE e.kind IN ('request', 'cold start', 'idle')), 0), COALESCE(SUM(e.amount) FILTER "
        "(WHERE e.source = 'division'), 0) FROM jobs j LEFT JOIN ledger_subjects s ON s.job_id = "
        "j.id LEFT JOIN ledger e ON e.subject = s.id GROUP BY j.id, j.name, j.spent"
    )

    def find_unequal() -> list[str]:
        rows = site.ask(sums)
        unequal = [row for row in rows if len({int(str(n)) for n in row[1:5]}) > 1 or row[5]]
        return [
            f"{name}: spent {spent}, charges {charged}, ledger {posted}, divided {parts}, sum {rest}"
            for name, spent, charged, posted, parts, rest in unequal
        ]

    with suppress(AssertionError):
        wait_until(lambda: not find_unequal(), seconds=START_S)
    yield from find_unequal()


def read_lives(site: ReplicaSite) -> dict[str, tuple[int, int]]:
    """When each gang began and ended, in microseconds, by the records of the provider `local`."""
    found = {}
    for path in site.files.glob("providers/local/ended/*.json"):
        [rank] = json.loads(path.read_text())["ranks"]
        times = [datetime.fromisoformat(rank[name]) for name in ("started_at", "ended_at")]
        found[path.stem] = tuple(round(each.timestamp() * 1_000_000) for each in times)
    return found  # type: ignore[return-value]  # two times


def list_processes() -> Iterator[tuple[int, list[str]]]:
    """The processes with their command lines, without those that have ended."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]
            if words:
                yield int(pid), [each.decode(errors="replace") for each in words]


def read_environ(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


def kill_process(pid: int) -> bool:
    if not pid:
        return False
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True
