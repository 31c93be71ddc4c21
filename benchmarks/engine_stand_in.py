"""A stand-in of a language model's engine: real HTTP and server-sent events, a cache of the blocks
of prompts that forgets the least recently used, and times linear in tokens.

    python benchmarks/engine_stand_in.py PORT [--blocks N] [--prefill TOKENS_PER_S]

A token is four bytes of the prompt's JSON. Prompts are computed one after the other; answers are
generated side by side, one token each `--token-ms`. GET /metrics gives what vLLM would give of it;
`usage` states the cached tokens, in streams only if the request asks for it. It answers
/v1/chat/completions, /v1/completions, /v1/models, /health and the routes that routers of SGLang and
vLLM probe.
"""

import argparse
import asyncio
import json
import os
from collections import OrderedDict
from typing import Any

TOKEN = 4  # bytes
BLOCK = 16  # tokens


class Engine:
    def __init__(self, blocks: int, prefill_per_s: float, token_s: float) -> None:
        self.blocks_max = blocks
        self.prefill_per_s = prefill_per_s
        self.token_s = token_s
        self.cached: OrderedDict[int, None] = OrderedDict()
        self.prompt_tokens = self.cached_tokens = self.requests = self.running = self.waiting = 0
        self._turn = asyncio.Lock()

    async def compute(self, text: bytes) -> tuple[int, int]:
        """Compute a prompt; return its tokens and how many of them were cached."""
        size, hashes, last = BLOCK * TOKEN, [], 0
        for at in range(0, len(text) - size + 1, size):
            last = hash((last, text[at : at + size]))
            hashes.append(last)
        tokens = len(text) // TOKEN + 1
        self.waiting += 1
        async with self._turn:
            self.waiting -= 1
            found = next(
                (at for at, each in enumerate(hashes) if each not in self.cached), len(hashes)
            )
            found = min(found * BLOCK, tokens - 1)
            for each in reversed(hashes):
                self.cached[each] = None
                self.cached.move_to_end(each)
            while len(self.cached) > self.blocks_max:
                self.cached.popitem(last=False)
            await asyncio.sleep((tokens - found) / self.prefill_per_s)
        self.requests += 1
        self.prompt_tokens += tokens
        self.cached_tokens += found
        return tokens, found

    def describe(self) -> str:
        rows = {
            "vllm:num_requests_running": self.running,
            "vllm:num_requests_waiting": self.waiting,
            "vllm:prompt_tokens_total": self.prompt_tokens,
            "vllm:prefix_cache_queries_total": self.prompt_tokens,
            "vllm:prefix_cache_hits_total": self.cached_tokens,
        }
        return "".join(f"{name} {value}\n" for name, value in rows.items())


class Server:
    def __init__(self, engine: Engine, model: str) -> None:
        self.engine = engine
        self.model = model

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                lines = head.split("\r\n")
                fields = dict(
                    (name.lower(), value.strip())
                    for name, _, value in (line.partition(":") for line in lines[1:])
                )
                body = await reader.readexactly(int(fields.get("content-length", 0)))
                method, path, _ = lines[0].split(" ", 2)
                await self._answer(writer, method, path.partition("?")[0], body)
                if fields.get("connection", "").lower() == "close":
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(
        self, writer: asyncio.StreamWriter, method: str, path: str, body: bytes
    ) -> None:
        if path in ("/v1/chat/completions", "/v1/completions") and method == "POST":
            await self._complete(writer, body)
        elif path == "/metrics":
            _write(writer, 200, self.engine.describe().encode(), "text/plain")
        elif path == "/v1/models":
            row = {"id": self.model, "object": "model", "created": 0, "owned_by": "stand-in"}
            _write(writer, 200, json.dumps({"object": "list", "data": [row]}).encode())
        else:
            facts = {"status": "ok", "model_path": self.model, "served_model_name": self.model}
            _write(writer, 200, json.dumps(facts).encode())
        await writer.drain()

    async def _complete(self, writer: asyncio.StreamWriter, body: bytes) -> None:
        try:
            asked: dict[str, Any] = json.loads(body)
            prompt = asked["messages"] if "messages" in asked else asked["prompt"]
        except (ValueError, KeyError, TypeError, RecursionError):
            error = {"error": {"message": "the body has no prompt", "type": "invalid_request"}}
            _write(writer, 400, json.dumps(error).encode())
            return
        self.engine.running += 1
        try:
            text = json.dumps(prompt).rstrip("]").encode()
            if asked.get("stream"):
                _begin_stream(writer)
            tokens, cached = await self.engine.compute(text)
            # SGLang's router replaces the older name by the newer one
            count = int(asked.get("max_completion_tokens") or asked.get("max_tokens") or 16)
            usage = {
                "prompt_tokens": tokens,
                "completion_tokens": count,
                "total_tokens": tokens + count,
                "prompt_tokens_details": {"cached_tokens": cached},
            }
            if asked.get("stream"):
                for _ in range(count):
                    _write_event(writer, {"choices": [{"index": 0, "delta": {"content": "w "}}]})
                    await writer.drain()
                    await asyncio.sleep(self.engine.token_s)
                if (asked.get("stream_options") or {}).get("include_usage"):
                    _write_event(writer, {"choices": [], "usage": usage})
                writer.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
            else:
                await asyncio.sleep(count * self.engine.token_s)
                message = {"role": "assistant", "content": "w " * count}
                choice = {"index": 0, "message": message, "finish_reason": "length"}
                whole = {"id": "1", "object": "chat.completion", "model": self.model}
                _write(
                    writer,
                    200,
                    json.dumps({**whole, "choices": [choice], "usage": usage}).encode(),
                )
        finally:
            self.engine.running -= 1


def _begin_stream(writer: asyncio.StreamWriter) -> None:
    writer.write(
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    )


def _write_event(writer: asyncio.StreamWriter, value: object) -> None:
    writer.write(_chunk(b"data: " + json.dumps(value).encode() + b"\n\n"))


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _write(
    writer: asyncio.StreamWriter, status: int, body: bytes, kind: str = "application/json"
) -> None:
    head = f"HTTP/1.1 {status} OK\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("ports", type=int, nargs="+")
    parser.add_argument("--model", default="stand-in")
    parser.add_argument("--blocks", type=int, default=20_000, help="of 16 tokens")
    parser.add_argument("--prefill", type=float, default=20_000, help="tokens a second")
    parser.add_argument("--token-ms", type=float, default=10)
    options = parser.parse_args()
    servers, host = [], os.environ.get("SERVE_HOST", "127.0.0.1")
    for port in options.ports:
        engine = Engine(options.blocks, options.prefill, options.token_ms / 1000)
        server = Server(engine, options.model)
        servers.append(await asyncio.start_server(server.serve, host, port, limit=1 << 26))
    await asyncio.gather(*(each.serve_forever() for each in servers))


if __name__ == "__main__":
    asyncio.run(main())
