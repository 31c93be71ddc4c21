"""Measures both data planes of serving beside nginx and a plain HAProxy, in one run.

    python benchmarks/gateway.py [--seconds S]    # 3 minutes with slices of 1 s, up to 5 if busy

Needs nginx, wrk and haproxy (Debian's packages). Load and upstream run on one core, the proxy on
another. CPU time is the scheduler's count for the proxy's process; figures of several slices are
interleaved, and the best slice counts, because other work on the machine only slows them.
"""

import argparse
import contextlib
import os
import re
import selectors
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measure import record, table
from tests.contract.gateway_process import GatewayProcess, wait_for
from tests.contract.http_talk import Background, ask, write_request
from tests.contract.replica_stand_in import ReplicaStandIn
from tests.system.ports import free_port
from tests.system.tied import start_tied

from cavvy.capabilities.serving.gateway.config import GatewayLimits, ReplicaAddress, ServiceRoute
from cavvy.capabilities.serving.gateway.haproxy.configuration import (
    HaproxyListener,
    make_ring,
    write_configuration,
)
from cavvy.capabilities.serving.gateway.haproxy.runtime import (
    HaproxyRuntime,
    find_haproxy,
    is_ready,
    list_arguments,
    make_environment,
)

SLICES = 5
ROUNDS, ENOUGH = 4, 200_000  # of ten seconds with changes of the replicas, and their requests
HOST = "svc.example"
FIELDS = ("Host: svc.example", "User-Agent: bench", "Accept: */*", "Content-Type: application/json")
SERVICE = {"name": "svc", "hosts": [HOST], "concurrency": 512}
# language models, which get prompts of 16 KiB
MODELS = {
    by: {"name": by, "hosts": [f"{by}.example"], "concurrency": 512, "models": ["m"], **more}
    for by, more in (("cache", {"routing": {"by": "cache"}}), ("load", {}))
}
# Half of each prompt is one of eight beginnings; the rest is its own.
PROMPTS = """
local letters, begins, n = "abcdefghijklmnopqrstuvwxyz     ", {{}}, 0
local function fill(size)
  local words = {{}}
  for i = 1, size do local at = math.random(#letters); words[i] = letters:sub(at, at) end
  return table.concat(words)
end
for i = 1, 8 do begins[i] = fill(8192) end
local rests = {{}}
for i = 1, 64 do rests[i] = fill(8160) end
wrk.method, wrk.headers["Host"] = "POST", "{host}"
request = function()
  n = n + 1
  local text = begins[n % 8 + 1] .. n .. rests[n % 64 + 1]
  local said = '{{"model":"m","messages":[{{"role":"user","content":"' .. text .. '"}}]}}'
  return wrk.format(nil, "/v1/chat/completions", nil, said)
end
"""
BODY = '{"predictions":[0.1,0.2,0.3,0.4],"model":"m","version":"1","id":"abcdef"}'
STREAM_S = 20.0
CHUNK = re.compile(rb"\r\n(?:data: \d+\n\n)+\r\n")
LAST = re.compile(rb"(?i)(?:^|\n)0\r\n(?:X-Trailer: 1\r\n)?\r\n$")

UPSTREAM = """
worker_processes 1; daemon off; master_process off; pid {folder}/{name}.pid;
error_log {folder}/{name}.log crit;
events {{ worker_connections 4096; }}
http {{ access_log off; keepalive_requests 100000000; {upstream}
  server {{ listen 127.0.0.1:{port}; location / {{ {location} }} }} }}
"""


class Bench:
    """All servers of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        cores = sorted(os.sched_getaffinity(0))
        self.load_core, self.proxy_core = str(cores[0]), str(cores[-1])
        self.upstreams = [self._start_upstream(name) for name in ("up1", "up2")]
        self.gateway = GatewayProcess(services=[SERVICE, *MODELS.values()])
        pin(self.gateway.process.pid, self.proxy_core)
        self.set_embedded(self.upstreams[:1])
        nginx_port, nginx = self.start_nginx("proxy", self.upstreams[0])
        self.plain_port, plain = self._start_plain()
        self.plane_port, plane, self.runtime = self._start_plane()
        self.set_plane(self.upstreams[:1])
        self.proxies = {
            "nginx": (nginx_port, nginx),
            "embedded": (self.gateway.port, self.gateway.process.pid),
            "plain HAProxy": (self.plain_port, plain),
            "HAProxy plane": (self.plane_port, plane),
        }

    def set_embedded(self, ports: list[int]) -> None:
        rows = [
            {"id": f"r{port}", "host": "127.0.0.1", "port": port, "keeps": True} for port in ports
        ]
        self.gateway.control(type="replicas", service="svc", replicas=rows)

    def set_models(self, ports: list[int]) -> None:
        rows = [
            {"id": f"r{port}", "host": "127.0.0.1", "port": port, "keeps": True} for port in ports
        ]
        for name in MODELS:
            self.gateway.control(type="replicas", service=name, replicas=rows)

    def set_plane(self, ports: list[int]) -> None:
        self.set_embedded(ports)
        rows = [
            ReplicaAddress(id=f"r{port}", host="127.0.0.1", port=port, keeps=True) for port in ports
        ]
        self.runtime.set_replicas("svc", rows, 512)

    def _start_upstream(self, name: str) -> int:
        location = f"default_type application/json; return 200 '{BODY}';"
        return self._run_nginx(name, "", location, self.load_core)[0]

    def start_nginx(self, name: str, upstream_port: int) -> tuple[int, int]:
        upstream = (
            f"upstream up {{ server 127.0.0.1:{upstream_port}; keepalive 256; "
            "keepalive_requests 100000000; }"
        )
        location = (
            'proxy_pass http://up; proxy_http_version 1.1; proxy_set_header Connection "";'
            "proxy_buffering off;"
        )
        return self._run_nginx(name, upstream, location, self.proxy_core)

    def _run_nginx(self, name: str, upstream: str, location: str, core: str) -> tuple[int, int]:
        port = free_port()
        path = self.folder / f"{name}.conf"
        path.write_text(
            UPSTREAM.format(
                folder=self.folder, name=name, port=port, upstream=upstream, location=location
            )
        )
        process = start_tied(["taskset", "-c", core, "nginx", "-c", path])
        wait_for(lambda: can_connect(port))
        return port, process.pid

    def _start_plain(self) -> tuple[int, int]:
        port = free_port()
        path = self.folder / "plain.cfg"
        path.write_text(
            "defaults\n mode http\n timeout connect 5s\n timeout client 60s\n timeout server 60s\n"
            f"frontend f\n bind 127.0.0.1:{port}\n default_backend b\n"
            f"backend b\n server r 127.0.0.1:{self.upstreams[0]} maxconn 512\n"
        )
        process = self._run_haproxy(path)
        wait_for(lambda: can_connect(port))
        return port, process

    def _start_plane(self) -> tuple[int, int, HaproxyRuntime]:
        port = free_port()
        listener = HaproxyListener(
            host="127.0.0.1",
            port=port,
            socket=self.folder / "haproxy",
            gateway_host="127.0.0.1",
            gateway_port=self.gateway.port,
        )
        service = ServiceRoute(name="svc", hosts=(HOST,), concurrency=512)
        path = self.folder / "plane.cfg"
        path.write_text(write_configuration(listener, (service,), GatewayLimits()))
        make_ring(self.folder / "requests.ring")
        process = self._run_haproxy(path, make_environment(self.folder / "requests.ring"))
        runtime = HaproxyRuntime(listener.socket)
        wait_for(lambda: is_ready(runtime))
        return port, process, runtime

    def _run_haproxy(self, path: Path, environment: dict[str, str] | None = None) -> int:
        words = ["taskset", "-c", self.proxy_core, *list_arguments(find_haproxy(), path)]
        return start_tied(words, stderr=subprocess.DEVNULL, env=environment).pid

    def load(self, port: int, seconds: float, *more: str) -> tuple[int, float, int]:
        """Requests, requests a second and errors of wrk with 16 connections."""
        fields = [word for field in FIELDS for word in ("-H", field)]
        said = subprocess.run(
            [
                *("taskset", "-c", self.load_core, "wrk", "-t1", "-c16", f"-d{seconds:g}s"),
                *(*fields, *more, f"http://127.0.0.1:{port}/x"),
            ],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        count = int(re.search(r"(\d+) requests in", said)[1])
        rate = float(re.search(r"Requests/sec:\s+([\d.]+)", said)[1])
        errors = sum(
            int(number)
            for line in re.findall(r"(?:Socket errors|Non-2xx).*", said)
            for number in re.findall(r"\d+", line.replace("Non-2xx or 3xx", ""))
        )
        return count, rate, errors


def pin(pid: int, core: str) -> None:
    subprocess.run(["taskset", "-apc", core, str(pid)], check=True, stdout=subprocess.DEVNULL)


def can_connect(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def cpu_ns(pid: int) -> int:
    """CPU time of all threads of a process."""
    return sum(
        int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")
    )


def measure_requests(bench: Bench, seconds: float) -> dict[str, tuple[float, float]]:
    """CPU microseconds a request, and requests a second, of the best slice of each proxy."""
    script = bench.folder / "differ.lua"
    script.write_text("n=0\nrequest=function() n=n+1; return wrk.format('GET', '/x?' .. n) end\n")
    cases = {name: (*proxy, ()) for name, proxy in bench.proxies.items()}
    cases["embedded, no two heads alike"] = (*bench.proxies["embedded"], ("-s", str(script)))
    post = bench.folder / "post.lua"  # HAProxy keeps no copy of requests that it may not repeat
    post.write_text("wrk.method = 'POST'\n")
    for name in ("plain HAProxy", "HAProxy plane"):
        cases[f"{name}, POST"] = (*bench.proxies[name], ("-s", str(post)))
    best = dict.fromkeys(cases, (float("inf"), 0.0))
    for _ in range(SLICES):
        for name, (port, pid, more) in cases.items():
            before = cpu_ns(pid)
            count, rate, errors = bench.load(port, seconds, *more)
            assert not errors, f"{name}: {errors} errors"
            used = (cpu_ns(pid) - before) / count / 1000
            best[name] = (min(best[name][0], used), max(best[name][1], rate))
    return best


def measure_prompts(bench: Bench, seconds: float) -> dict[str, float]:
    """CPU microseconds of the gateway for a request with a prompt of 16 KiB, by what chooses the
    replica: the median of the slices.
    """
    bench.set_models(bench.upstreams)
    used: dict[str, list[float]] = {name: [] for name in MODELS}
    for _ in range(SLICES):
        for name in MODELS:
            script = bench.folder / f"{name}.lua"
            script.write_text(PROMPTS.format(host=f"{name}.example"))
            port, pid = bench.proxies["embedded"]
            before = cpu_ns(pid)
            count, _, errors = bench.load(port, seconds, "-s", str(script))
            assert not errors, f"{name}: {errors} errors"
            used[name].append((cpu_ns(pid) - before) / count / 1000)
    return {name: statistics.median(each) for name, each in used.items()}


def measure_events(bench: Bench) -> dict[str, float]:
    """CPU microseconds of each proxy for each chunk of 32 streams of 400 events, in the best slice.

    Clients and replica run on the load's core and read in one thread, as the load of requests does:
    threads on the proxy's core would count as its work, because each wakes up on its own.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {int(bench.load_core)})
    replica = ReplicaStandIn().start()
    bench.set_plane([replica.port])
    port, pid = bench.start_nginx("events", replica.port)
    proxies = {"nginx": (port, pid)}
    proxies |= {name: bench.proxies[name] for name in ("embedded", "HAProxy plane")}
    best = dict.fromkeys(proxies, float("inf"))
    for _ in range(SLICES):
        for name, (port, pid) in proxies.items():
            used = cpu_ns(pid)
            chunks = read_events(port, streams=32, count=400)
            best[name] = min(best[name], (cpu_ns(pid) - used) / chunks / 1000)
    bench.set_plane(bench.upstreams[:1])
    replica.stop()
    os.sched_setaffinity(0, before)
    return best


def read_events(port: int, *, streams: int, count: int) -> int:
    """How many chunks came: events that a proxy read at once may be one chunk."""
    chunks = 0
    request = write_request("GET", f"/chunks?n={count}&pause_ms=10&plain=1")
    with selectors.EpollSelector() as selector:
        for _ in range(streams):
            line = socket.create_connection(("127.0.0.1", port))
            line.sendall(request)
            selector.register(line, selectors.EVENT_READ, b"")
        while selector.get_map():
            ready = selector.select(STREAM_S)
            assert ready, f"nothing came for {STREAM_S} s"
            for key, _ in ready:
                data = key.fileobj.recv(65536)
                assert data, "the stream ended before its last chunk"
                chunks += len(CHUNK.findall(data))
                tail = (key.data + data)[-32:]
                if LAST.search(tail):
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
                else:
                    selector.modify(key.fileobj, selectors.EVENT_READ, tail)
    return chunks


def measure_changes(bench: Bench) -> list[tuple[str, int, int]]:
    """Requests and errors of load with 20 changes of the replicas in each ten seconds, until there
    were `ENOUGH` requests, which a busy machine may not reach.
    """
    one, two = bench.upstreams
    steps = ([one], [one, two], [two], [one, two], [])
    rows = []
    for name, change in (("embedded", bench.set_embedded), ("HAProxy plane", bench.set_plane)):
        port = bench.proxies[name][0]
        count = errors = 0
        for _ in range(ROUNDS):
            call = Background(bench.load, port, 10)
            for number in range(20):
                threading.Event().wait(0.45)
                change(steps[number % len(steps)])
                if number % len(steps) == 4:
                    threading.Event().wait(0.05)
                    change([one])
            done, _, failed = call.result()
            count, errors = count + done, errors + failed
            if count >= ENOUGH:
                break
        rows.append((name, count, errors))
    bench.set_plane([one])
    return rows


def measure_cold(bench: Bench) -> tuple[int, float]:
    """Of 50 requests to a service without replicas: how many were answered with 200, and the
    milliseconds from the replica's readiness to the last answer.
    """
    bench.set_embedded([])
    ended: list[float] = []

    def call() -> int:
        status = ask(bench.gateway.port, "GET", "/x").status
        ended.append(time.monotonic())
        return status

    calls = [Background(call) for _ in range(50)]
    wait_for(lambda: bench.gateway.facts("svc")["backlog"] == 50)
    threading.Event().wait(2.0)
    ready = time.monotonic()
    bench.set_embedded(bench.upstreams[:1])
    answered = sum(each.result() == 200 for each in calls)
    return answered, (max(ended) - ready) * 1000


@contextlib.contextmanager
def make_bench() -> Iterator[Bench]:
    if missing := [name for name in ("nginx", "wrk", "taskset") if not shutil.which(name)]:
        sys.exit(f"missing: {', '.join(missing)}; apt-get install nginx-light wrk haproxy")
    with tempfile.TemporaryDirectory(prefix="cavvy-bench-") as folder:
        bench = Bench(Path(folder))
        try:
            yield bench
        finally:
            bench.gateway.remove()


def say_next(what: str, about_s: float) -> None:
    print(f"measuring {what}: about {about_s:.0f} s", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each slice")
    seconds = parser.parse_args().seconds
    with make_bench() as bench:
        say_next("a cold service", 3)
        answered, last_ms = measure_cold(bench)
        say_next("requests", 7 * SLICES * seconds)
        found = measure_requests(bench, seconds)
        say_next("prompts", len(MODELS) * SLICES * seconds)
        prompts = measure_prompts(bench, seconds)
        say_next("streams of events", 3 * SLICES * 4.5)
        events = measure_events(bench)
        say_next("changes of replicas", 2 * 15)
        changes = measure_changes(bench)
    rate = {name: rate for name, (_, rate) in found.items()}
    table(
        "16 connections",
        ("proxy", "CPU us/request", "requests/s"),
        [(name, used, per_s) for name, (used, per_s) in found.items()],
    )
    table("prompts of 16 KiB, embedded", ("chosen by", "CPU us/request"), list(prompts.items()))
    table("32 streams of events", ("proxy", "CPU us/chunk"), list(events.items()))
    table("20 changes in 10 s", ("plane", "requests", "errors"), changes)
    against_nginx = rate["embedded"] / rate["nginx"]
    against_plain = rate["HAProxy plane"] / rate["plain HAProxy"]
    lines = [
        ("embedded: CPU us/request", found["embedded"][0], 25, "us", False),
        ("embedded: throughput against nginx", against_nginx, 0.6, "", True),
        (
            "embedded: CPU of a 16 KiB prompt by cache",
            prompts["cache"] / prompts["load"],
            2,
            "",
            False,
        ),
        ("embedded: CPU us/chunk of events", events["embedded"], 20, "us", False),
        ("HAProxy plane against plain HAProxy", against_plain, 0.9, "", True),
        ("cold service: answered of 50", answered, 50, "", True),
        ("cold service: last answer after readiness", last_ms, 50, "ms", False),
    ]
    lines += [
        (f"{name}: errors in {count} requests", errors, 0, "", False)
        for name, count, errors in changes
    ]
    rows = [
        (what, figure, bar, unit, record(what, figure, bar, unit, least=least))
        for what, figure, bar, unit, least in lines
    ]
    table("bars", ("what", "figure", "bar", "unit", ""), rows)


if __name__ == "__main__":
    main()
