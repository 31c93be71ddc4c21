"""Measures what batches in the gateway gain: throughput and P95 with and without them.

    python benchmarks/batching.py                      # the program of examples/serve-batch
    python benchmarks/batching.py --seconds 10 --clients 1 4 16 64
    python benchmarks/batching.py --matrix             # NumPy: matrices of a small network

Each client sends its next request when it has the answer to the former one. The gateway and the
program are processes of their own; there is one replica. A batch of n instances takes a * n + b:
with the example's program it sleeps, with --matrix it multiplies matrices on one core. Each
takes about a minute.
"""

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.contract.gateway_process import GatewayProcess

from cavvy.domain.values import Struct

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "serve-batch" / "predict.py"
MATRIX = """
import numpy
weights = [numpy.random.default_rng(n).random((1024, 1024), numpy.float32) for n in range(8)]
def work(instances):
    x = numpy.outer(numpy.asarray(instances, numpy.float32), numpy.ones(1024, numpy.float32))
    for each in weights:
        x = numpy.tanh(x @ each)
"""


class Result(Struct, frozen=True, kw_only=True):
    per_s: float
    p50_ms: float
    p95_ms: float
    batch: float
    wrong: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--matrix", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        program, port = start_program(Path(folder), options.matrix)
        try:
            print("clients  batches  requests/s  P50 ms  P95 ms  mean batch  wrong")
            for clients in options.clients:
                for terms in (None, {"max": 32, "wait_s": 0.0}, {"max": 32, "wait_s": 0.01}):
                    found = measure(port, terms, clients, options.seconds)
                    name = "none" if terms is None else f"{1000 * terms['wait_s']:g} ms"
                    print(
                        f"{clients:7}  {name:>7}  {found.per_s:10.0f}  {found.p50_ms:6.1f}  "
                        f"{found.p95_ms:6.1f}  {found.batch:10.1f}  {found.wrong:5}",
                        flush=True,
                    )
        finally:
            program.terminate()
            program.wait()


def start_program(folder: Path, matrix: bool) -> tuple["subprocess.Popen[bytes]", int]:
    """Start the program and return it with its port when it answers."""
    text = EXAMPLE.read_text()
    if matrix:
        text = text.replace("time.sleep(BASE_S + INSTANCE_S * len(instances))", "work(instances)")
        text = text.replace("import json\n", f"import json\n{MATRIX}\n", 1)
    path = folder / "predict.py"
    path.write_text(text)
    port = 20_000 + os.getpid() % 20_000
    one_core = {name: "1" for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")}
    program = subprocess.Popen(
        [sys.executable, str(path)], env={**os.environ, **one_core, "PORT": str(port)}
    )
    while True:
        try:
            ask(http.client.HTTPConnection("127.0.0.1", port, timeout=10), 1)
            return program, port
        except OSError:
            time.sleep(0.05)


def measure(port: int, terms: dict[str, float] | None, clients: int, seconds: float) -> Result:
    service = {"name": "predict", "concurrency": 1, "batch": terms}
    gateway = GatewayProcess(services=[service])
    try:
        row = {"id": "r1", "host": "127.0.0.1", "port": port}
        assert gateway.control(type="replicas", service="predict", replicas=[row]) == {}
        until = time.monotonic() + seconds
        rows: list[tuple[float, int, bool]] = []
        threads = [
            threading.Thread(target=send, args=(gateway.port, until, number, rows))
            for number in range(clients)
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    finally:
        gateway.remove()
    times = sorted(taken_s for taken_s, _, _ in rows)
    return Result(
        per_s=len(rows) / seconds,
        p50_ms=1000 * times[len(times) // 2],
        p95_ms=1000 * times[int(len(times) * 0.95)],
        batch=statistics.mean(size for _, size, _ in rows),
        wrong=sum(not right for _, _, right in rows),
    )


def send(port: int, until: float, number: int, rows: list[tuple[float, int, bool]]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    while (began := time.monotonic()) < until:
        said = ask(connection, number)
        right = said["predictions"] == [float(number * number)]
        rows.append((time.monotonic() - began, said["batch"], right))
    connection.close()


def ask(connection: http.client.HTTPConnection, number: int) -> dict[str, object]:
    body = json.dumps({"instances": [number]})
    connection.request("POST", "/", body, {"Content-Type": "application/json"})
    return json.loads(connection.getresponse().read())


if __name__ == "__main__":
    main()
