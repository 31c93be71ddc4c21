"""Measures what the tunnel to a replica on another machine costs, against a replica on this one.

    python benchmarks/replica_relay.py    # as root: the other machine is an SSH host in namespaces

One service runs on an SSH host, whose replica the gateway reaches through a relay and the agent's
tunnel. The other runs on the server's machine, where it is reached directly. The program and the
gateway are the same. Each round measures both: requests one after another, 16 at once, and a body
of 8 MB. CPU time is that of all processes in the namespaces: gateway, server, agents and ssh.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

from tests.system.hosts import lab_at
from tests.system.trust import User, environment, user_at
from tests.waits import wait_until

from cavvy.capabilities.serving.wire import find_service

PROGRAM = """
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 65536  # one segment for head and body
    def do_GET(self):
        size = 8_000_000 if self.path.endswith("/large") else 75
        self.send_response(200)
        self.send_header("Content-Length", str(size))
        self.end_headers()
        self.wfile.write(b"x" * size)
    def log_message(self, *words):
        pass

class Server(ThreadingHTTPServer):
    request_queue_size = 128

Server(("127.0.0.1", int(os.environ["PORT"])), Answer).serve_forever()
"""
FILE = """
name: {name}
run: exec python3 answer.py
resources: {{cpu: 0.2, memory: 64MiB, providers: [{provider}]}}
workdir: .
service: {{port: 8000, replicas: {{min: 1, max: 1}}, concurrency: 64, probe: /}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--requests", type=int, default=400, help="of each kind and round")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="cavvy-relay-"))
    try:
        with lab_at(root / "lab") as lab:
            lab.add()
            with lab.entered(), user_at(root / "user") as user:
                user.settings(
                    f'[providers.local]\n[providers.ssh]\nhosts = "h1"\n'
                    f'ssh_config = "{lab.ssh_config}"\n'
                )
                spaces = {os.stat(f"/var/run/netns/{lab.hosts[0].space}").st_ino}
                spaces.add(os.stat("/proc/thread-self/ns/net").st_ino)
                found = measure(user, spaces, options.requests, options.rounds)
                print(json.dumps(found, indent=1))
                user.cli("down", "--all", "--yes", code=None)
                user.cli("server", "stop", code=None)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def measure(
    user: User, spaces: set[int], requests: int, rounds: int
) -> dict[str, dict[str, float]]:
    (user.work / "answer.py").write_text(PROGRAM)
    urls = {}
    for name, provider in (("here", "local"), ("there", "ssh")):
        file = user.task(FILE.format(name=name, provider=provider), f"{name}.yaml")
        urls[name] = user.json("serve", "--yes", file)["url"]
    for name in urls:
        wait_until(lambda name=name: is_ready(user, name))  # type: ignore[misc]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in urls}
    for _ in range(rounds):
        for name, url in urls.items():
            found[name].append(measure_once(url, spaces, requests))
    return {
        name: {key: statistics.median(each[key] for each in rows) for key in rows[0]}
        for name, rows in found.items()
    }


def is_ready(user: User, name: str) -> bool:
    with environment(user.environ):
        return find_service(user.api, "default", name).ready == 1


def measure_once(url: str, spaces: set[int], requests: int) -> dict[str, float]:
    call(url, 10)
    alone = sorted(call(url, requests))
    cpu_s, began = read_cpu_s(spaces), time.monotonic()
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda _: call(url, requests // 16), range(16)))
    took_s, cpu_s = time.monotonic() - began, read_cpu_s(spaces) - cpu_s
    [large_s] = call(f"{url}/large", 1)
    count = requests // 16 * 16
    return {
        "p50_ms": round(1000 * alone[len(alone) // 2], 2),
        "p99_ms": round(1000 * alone[int(0.99 * len(alone))], 2),
        "per_s_at_16": round(count / took_s),
        "cpu_us_a_request": round(1e6 * cpu_s / count),
        "mb_per_s": round(8 / large_s, 1),
    }


def call(url: str, count: int) -> list[float]:
    """The seconds of each of the requests, on one connection."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = HTTPConnection(parts.hostname, parts.port or 80, timeout=60)
    spent = []
    for _ in range(count):
        began = time.perf_counter()
        connection.request("GET", parts.path)
        answer = connection.getresponse()
        assert answer.status == 200
        answer.read()
        spent.append(time.perf_counter() - began)
    connection.close()
    return spent


def read_cpu_s(spaces: set[int]) -> float:
    """The CPU time of all processes in these network namespaces, without this one and the programs
    of the services.
    """
    tick, ticks = os.sysconf("SC_CLK_TCK"), 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has just ended
            inside = os.stat(f"/proc/{name}/ns/net").st_ino in spaces
            if inside and int(name) != os.getpid():
                words = Path(f"/proc/{name}/cmdline").read_bytes()
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                ticks += 0 if b"answer.py" in words else int(fields[11]) + int(fields[12])
    return ticks / tick


if __name__ == "__main__":
    main()
