"""Measures how long /v1/health takes while connections without a token attack the server, compared
with the time without an attack.

    python benchmarks/abuse.py [--seconds 6]

The attacks use the TLS listener for nodes, on loopback. They are: headers of 64 MiB, sent again and
again by two connections; 200 incomplete headers; 200 idle connections; and 200 connections without
a TLS handshake. The limit is a median of five times the median without an attack.
"""

import argparse
import contextlib
import os
import socket
import ssl
import statistics
import time
from collections.abc import Callable, Iterator
from multiprocessing import Process
from pathlib import Path
from urllib.parse import urlsplit

from measure import fresh_home, table

from cavvy.client import ApiClient, connect

HEAD = b"GET /v1/health HTTP/1.1\r\nHost: x\r\n"
Address = tuple[str, int]


def dial(address: Address) -> socket.socket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context.wrap_socket(socket.create_connection(address, timeout=30))


def send_heads(address: Address) -> None:
    os.nice(19)  # an attacker would use the CPU of another machine
    while True:
        with contextlib.suppress(OSError), dial(address) as connection:
            connection.sendall(HEAD + b"A: ")
            for _ in range(1024):
                connection.sendall(b"a" * 65536)


def open_many(address: Address, first: bytes | None) -> list[socket.socket]:
    """Open 200 connections, each of which sends `first`. If it is None, they make no TLS
    handshake."""
    made = []
    for _ in range(200):
        with contextlib.suppress(OSError):
            made.append(socket.create_connection(address) if first is None else dial(address))
            made[-1].sendall(first or b"")
    return made


@contextlib.contextmanager
def attack(address: Address, name: str) -> Iterator[None]:
    attackers, opened = list[Process](), list[socket.socket]()
    if name == "heads of 64 MiB":
        attackers = [Process(target=send_heads, args=(address,), daemon=True) for _ in range(2)]
    elif name != "quiet":
        first = {"half heads": HEAD, "idle": b"", "no handshake": None}[name]
        opened = open_many(address, first)
    for each in attackers:
        each.start()
    try:
        yield
    finally:
        for each in attackers:
            each.terminate()
            each.join()
        for connection in opened:
            connection.close()


def latencies_ms(client: ApiClient, seconds: float) -> list[float]:
    found, until = [], time.monotonic() + seconds
    while time.monotonic() < until:
        start = time.perf_counter()
        client.send("GET", "/v1/health")
        found.append(1000 * (time.perf_counter() - start))
        time.sleep(0.01)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=6.0)
    seconds = parser.parse_args().seconds
    show: Callable[[float], str] = "{:.1f} ms".format
    rows, quiet = [], 0.0
    with fresh_home() as env:
        Path(env["CAVVY_CONFIG"]).write_text("[server]\ntls_listen = '127.0.0.1:0'\n")
        with connect() as client:
            outside = urlsplit(client.server().node_endpoint or "")
            address = (outside.hostname or "", outside.port or 0)
            for name in ("quiet", "heads of 64 MiB", "half heads", "idle", "no handshake"):
                with attack(address, name):
                    found = sorted(latencies_ms(client, seconds))
                median = statistics.median(found)
                quiet = quiet or median
                row = [name, show(median), show(found[int(0.99 * len(found))]), show(found[-1])]
                rows.append((*row, f"{median / quiet:.1f}"))
    table(
        "/v1/health under abuse; bar: 5 times quiet",
        ("attack", "median", "99 of 100", "longest", "times quiet"),
        rows,
    )


if __name__ == "__main__":
    main()
