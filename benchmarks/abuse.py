"""Measures how long /v1/health takes while connections without a token attack the server, compared
with the time without an attack just before.

    python benchmarks/abuse.py [--seconds 3] [--rounds 3] [--only NAME]

The attacks (`attacks.py`) use the TLS listener for nodes and the listener for users, on loopback,
each in two processes. The limit is a median of five times the median without an attack.
"""

import argparse
import statistics
import time
from pathlib import Path
from urllib.parse import urlsplit

from attacks import ATTACKS, Target, attacked
from measure import fresh_home, process_cpu_s, record, table

from cavvy.client import ApiClient, connect
from cavvy.client.state import read_server

_BAR = 5.0
_SETTINGS = "[server]\ntls_listen = '127.0.0.1:0'\nlisten = '127.0.0.1:0'\n"
_SINGLE = ("handshakes", "no handshake")  # the listener for users has no TLS here


def latencies_ms(client: ApiClient, seconds: float) -> list[float]:
    found, until = [], time.monotonic() + seconds
    while time.monotonic() < until:
        start = time.perf_counter()
        client.send("GET", "/v1/health")
        found.append(1000 * (time.perf_counter() - start))
        time.sleep(0.01)
    return found


def measure(
    client: ApiClient, server: int, target: Target, name: str, seconds: float, rounds: int
) -> tuple[list[float], list[float], float]:
    """The latencies in ms without and with the attack, and the server's CPU in % of one core."""
    quiet, busy, cpu_s = list[float](), list[float](), 0.0
    for _ in range(rounds):
        quiet += latencies_ms(client, seconds / 2)
        with attacked(target, name):
            before = process_cpu_s(server)
            busy += latencies_ms(client, seconds)
            cpu_s += process_cpu_s(server) - before
        time.sleep(0.5)
    return quiet, sorted(busy), 100 * cpu_s / (seconds * rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="attacks whose name contains this")
    arguments = parser.parse_args()
    rows, most = [], 0.0
    with fresh_home() as env:
        Path(env["CAVVY_CONFIG"]).write_text(_SETTINGS)
        with connect() as client:
            server = client.server()
            outside = urlsplit(server.node_endpoint or "")
            found = read_server(env["CAVVY_HOME"])
            inside = urlsplit((found and found.listen) or "")
            for name in ATTACKS:
                for door, url in (("nodes", outside), ("users", inside)):
                    if arguments.only not in name or (door == "users" and name in _SINGLE):
                        continue
                    target = Target(host="127.0.0.1", port=url.port or 0, tls=door == "nodes")
                    quiet, busy, cpu = measure(
                        client, server.pid, target, name, arguments.seconds, arguments.rounds
                    )
                    median, times = statistics.median(busy), statistics.median(quiet)
                    most = max(most, median / times)
                    figures = [times, median, busy[int(0.99 * len(busy))], busy[-1]]
                    told = [f"{figure:.1f} ms" for figure in figures]
                    rows.append((name, door, *told, f"{cpu:.0f} %", f"{median / times:.1f}"))
    heads = ("attack", "listener", "quiet", "median", "99 of 100", "longest", "CPU", "times quiet")
    table("/v1/health under abuse", heads, rows)
    print(f"\nmost: {most:.1f} times quiet; {record('abuse, times quiet', most, _BAR, '')}")


if __name__ == "__main__":
    main()
