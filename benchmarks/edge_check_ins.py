"""The server's CPU time for devices at the edge that check in, as real HTTPS clients.

    python benchmarks/edge_check_ins.py [--devices 10000] [--minutes 1]

Each device has a connection of its own, which it keeps, and checks in once a minute.
"""

import argparse
import json
import os
import resource
import secrets
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from measure import fresh_home, process_cpu_s, process_rss_mib, record, table

from cavvy.agent.http_client import connect as open_line
from cavvy.agent.wire import ServerAddress
from cavvy.capabilities.edge.wire import EnrolmentAsk, invite_devices
from cavvy.client import connect
from cavvy.client.state import default_home, read_server

_SETTINGS = """[server]
idle_stop_s = 0
tls_listen = "127.0.0.1:0"
[providers.local]
enabled = false
"""
_THREADS = 8
_REPORT = {
    "models": [
        {
            "name": "digits",
            "serving": 1,
            "sums": {"requests": 60, "errors": 1, "timed": 59, "logs": -270.0, "squares": 1240.0},
        }
    ],
    "free_mib": 9000,
    "agent": "1",
}


class Caller:
    """One device: its connection, and the head of its requests."""

    def __init__(self, address: ServerAddress, token: str) -> None:
        self._line = open_line(address)
        key = Ed25519PrivateKey.generate()
        body = {
            "key": key.public_key().public_bytes_raw().hex(),
            "hostname": secrets.token_hex(8),
        }
        found = self.ask("POST", "/edge/v1/enrol", body, token)
        nonce = self.ask("GET", "/edge/v1/nonce")["nonce"]
        signed = key.sign(nonce.encode()).hex()
        proof = {"project": found["project"], "device": found["device"], "nonce": nonce}
        self._token = self.ask("POST", "/edge/v1/token", {**proof, "signature": signed})["token"]

    def ask(self, method: str, path: str, body: object = None, token: str = "") -> dict:
        headers = {"Content-Type": "application/json"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        self._line.request(method, path, json.dumps(body).encode() if body else None, headers)
        reply = self._line.getresponse()
        data = reply.read()
        if reply.status != 200:
            raise SystemExit(f"{path}: status {reply.status}: {data[:200]!r}")
        return dict(json.loads(data))

    def check_in(self) -> float:
        """Check in, and return the seconds that it took."""
        started = time.monotonic()
        self.ask("POST", "/edge/v1/check-in", _REPORT, self._token)
        return time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=1.0)
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with ExitStack() as stack:
        os.environ.update(stack.enter_context(fresh_home()))
        Path(os.environ["CAVVY_CONFIG"]).write_text(_SETTINGS)
        client = stack.enter_context(connect())
        ask = EnrolmentAsk(site="s", count=options.devices)
        line = invite_devices(client, "default", ask)
        address = next(word for word in line.command.split() if word.startswith("https://"))
        address = address.removesuffix("/edge/v1/script")
        server = read_server(default_home())
        assert server is not None
        where = ServerAddress(address, find_pin(address))
        with ThreadPoolExecutor(_THREADS) as pool:
            callers = list(pool.map(lambda _: Caller(where, line.token), range(options.devices)))
            print(f"{len(callers):,} devices are connected", flush=True)
            before, began = process_cpu_s(server.pid), time.monotonic()
            took: list[float] = []
            every = 60 / options.devices
            for number in range(round(options.minutes * options.devices)):
                time.sleep(max(0.0, began + number * every - time.monotonic()))
                took.append(pool.submit(callers[number % options.devices].check_in).result())
            cpu, wall = process_cpu_s(server.pid) - before, time.monotonic() - began
        ordered = sorted(took)
        rows = [
            ["check-ins", len(took), "", ""],
            ["% of a core", 100 * cpu / wall, 25, record("check-ins", 100 * cpu / wall, 25, "%")],
            ["CPU ms of the server for each", 1000 * cpu / len(took), "", ""],
            ["ms, median", 1000 * statistics.median(took), "", ""],
            ["ms, 99 %", 1000 * ordered[int(len(ordered) * 0.99)], 100, ""],
            ["MiB of the server", process_rss_mib(server.pid), "", ""],
        ]
        table("devices that check in", ["what", "figure", "bar", ""], rows)


def find_pin(address: str) -> str:
    import ssl

    host, _, port = address.removeprefix("https://").rpartition(":")
    certificate = ssl.get_server_certificate((host, int(port)))
    return sha256(ssl.PEM_cert_to_DER_cert(certificate)).hexdigest()


if __name__ == "__main__":
    main()
