"""Measures batches of OpenAI's API beside a bare loop of clients, and counts their results while
replicas are preempted and the gateway is killed.

    python benchmarks/openai_batches.py [--requests N] [--answer-s S] [--pairs P]

Needs the package `openai`. Four replicas with 32 slots each answer after S seconds. The batch and
the loop run in turn, P times; the medians count. The defaults (100,000 requests, 3 times) take
about 20 minutes, and `--requests 5000 --pairs 1` half a minute.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import openai
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measure import process_cpu_s, record, table
from tests.contract.gateway_process import GatewayProcess

REPLICAS, SLOTS = 4, 32
SERVICE = {"name": "llm", "prefix": "/default/llm", "models": ["m"], "concurrency": SLOTS}
URL = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hello " * 50}]}
MESSAGE = {"role": "assistant", "content": "x" * 400}
ANSWER = json.dumps(
    {
        "choices": [{"index": 0, "message": MESSAGE, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 50, "completion_tokens": 100, "total_tokens": 150},
    }
).encode()
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


class Answers(asyncio.Protocol):
    """A connection of a replica. A request is complete with the last bytes of `BODY`."""

    def __init__(self, answer_s: float) -> None:
        self.answer_s = answer_s
        self.data = b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.data += data
        if self.data.endswith(b"}]}"):
            self.data = b""
            asyncio.get_running_loop().call_later(self.answer_s, self.answer)

    def answer(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(HEAD % len(ANSWER) + ANSWER)


async def serve_replica(answer_s: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Answers(answer_s), "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


class Replica:
    def __init__(self, name: str, answer_s: float) -> None:
        self.name = name
        command = [sys.executable, __file__, "--replica", "--answer-s", str(answer_s)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def run_batch(
    gateway: GatewayProcess, replicas: list[Replica], count: int, events: int
) -> tuple[float, float]:
    """Run a batch. The odd of its `events` preempt a replica, the even ones kill the gateway."""
    url = f"http://127.0.0.1:{gateway.port}/v1"
    client = openai.OpenAI(base_url=url, api_key="x", timeout=600)
    line = {"method": "POST", "url": URL, "body": BODY}
    lines = "".join(json.dumps({"custom_id": f"r{n}", **line}) + "\n" for n in range(count))
    file = client.files.create(file=("in.jsonl", lines.encode()), purpose="batch")
    begun, cpu_s, before = time.monotonic(), 0.0, process_cpu_s(gateway.process.pid)
    batch = client.batches.create(input_file_id=file.id, endpoint=URL, completion_window="24h")
    done = 0
    while (found := client.batches.retrieve(batch.id)).status != "completed":
        assert found.status in ("validating", "in_progress", "finalizing"), found
        assert found.request_counts is not None
        if done < events and found.request_counts.completed > count * (done + 1) / (events + 1):
            done += 1
            if done % 2:
                replicas[0].kill()
                replicas[:] = [*replicas[1:], Replica(f"new{done}", ARGS.answer_s)]
            else:
                cpu_s, before = cpu_s + process_cpu_s(gateway.process.pid) - before, 0.0
                gateway.process.kill()
                gateway.process.wait()
                gateway.config["port"] = gateway.port
                gateway.start()
            gateway.set_replicas("llm", replicas)
        time.sleep(0.05)
    taken_s, cpu_s = time.monotonic() - begun, cpu_s + process_cpu_s(gateway.process.pid) - before
    rows = client.files.content(str(found.output_file_id)).text.splitlines()
    ids = {json.loads(row)["custom_id"] for row in rows}
    assert len(rows) == len(ids) == count, "a request has no result, or two"
    return taken_s, 1000 * cpu_s / count


def run_loop(gateway: GatewayProcess, count: int) -> tuple[float, float]:
    """Send the same requests by as many clients as there are slots."""
    body, left = json.dumps(BODY).encode(), count
    head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    data = head % URL.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body

    async def send() -> None:
        nonlocal left
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        while left > 0:
            left -= 1
            writer.write(data)
            await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(len(ANSWER))
        writer.close()

    async def send_all() -> None:
        await asyncio.gather(*(send() for _ in range(REPLICAS * SLOTS)))

    begun, before = time.monotonic(), process_cpu_s(gateway.process.pid)
    uvloop.run(send_all())
    cpu_s = process_cpu_s(gateway.process.pid) - before
    return time.monotonic() - begun, 1000 * cpu_s / count


def main() -> None:
    replicas = [Replica(f"r{number}", ARGS.answer_s) for number in range(REPLICAS)]
    gateway = GatewayProcess(services=[SERVICE])
    try:
        gateway.set_replicas("llm", replicas)
        loops, batches = [], []
        for _ in range(ARGS.pairs):
            loops.append(run_loop(gateway, ARGS.requests))
            batches.append(run_batch(gateway, replicas, ARGS.requests, 0))
        loop_s, batch_s = (statistics.median(s for s, _ in each) for each in (loops, batches))
        shown = [("a loop of clients", loops), ("a batch", batches)]
        hit = [run_batch(gateway, replicas, ARGS.requests, 5)]
        shown.append(("a batch with 3 preemptions and 2 kills, each result once", hit))
        rows = [
            (name, *(statistics.median(column) for column in zip(*each, strict=True)))
            for name, each in shown
        ]
        table(f"{ARGS.requests:,} requests", ("what", "s", "CPU ms/request"), rows)
        more = 100 * (batch_s / loop_s - 1)
        verdict = record("batch over a bare loop", more, 5, "%")
        table("bars", ("what", "figure", "bar", ""), [("batch over a loop, %", more, 5, verdict)])
    finally:
        for each in replicas:
            each.kill()
        gateway.remove()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--answer-s", type=float, default=0.1)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--replica", action="store_true", help=argparse.SUPPRESS)
    ARGS = parser.parse_args()
    if ARGS.replica:
        uvloop.run(serve_replica(ARGS.answer_s))
    else:
        main()
