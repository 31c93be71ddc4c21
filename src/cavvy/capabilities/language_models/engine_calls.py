"""Calls of the gateway's own to the engine of a replica: one request, one bounded answer.

At /metrics, engines tell how many requests they have, also those of other gateways, and how many
tokens of prompts their caches hold. Sources of the names:
https://docs.vllm.ai/en/latest/usage/metrics.html,
https://docs.sglang.io/references/production_metrics.html (with `--enable-metrics`), the README of
llama.cpp's server (with `--metrics`),
https://huggingface.co/docs/text-generation-inference/reference/metrics.
"""

import asyncio
import math
import re
from collections import defaultdict
from collections.abc import Callable

import msgspec

from cavvy.capabilities.serving.gateway.bodies import make_body
from cavvy.capabilities.serving.gateway.config import ReplicaAddress
from cavvy.capabilities.serving.gateway.heads import HeadError, parse_response
from cavvy.domain.values import Struct

_ANSWER_MAX = 4 << 20


class EngineAnswer(Struct, frozen=True):
    status: int
    body: bytes


class EngineCallError(Exception):
    """Raised if an engine gives no valid answer. The text says why."""


async def call_engine(
    address: ReplicaAddress, method: str, path: str, body: object = None, most: int = _ANSWER_MAX
) -> EngineAnswer:
    """Return the engine's answer, with about `most` bytes of its body. The caller limits the time.
    Raises EngineCallError, or OSError if the replica accepts no connections.
    """
    reader, writer = await asyncio.open_connection(address.host, address.port)
    data = b"" if body is None else msgspec.json.encode(body)
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: {address.host}:{address.port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        "Connection: close\r\n\r\n"
    )
    try:
        writer.write(head.encode() + data)
        answer = parse_response(await reader.readuntil(b"\r\n\r\n"), method.encode())
        rest, text = make_body(answer.length), b""
        while not rest.done and len(text) < most:
            if not (more := await reader.read(1 << 16)):
                break
            text += rest.feed(more)
        return EngineAnswer(answer.status, text)
    except (OSError, EOFError, asyncio.LimitOverrunError, HeadError) as error:
        raise EngineCallError(f"{path} gave no valid answer: {error}") from error
    finally:
        writer.close()


_PATH = "/metrics"
_SHARED_S = 2.0  # between two questions, if other gateways send requests to the same replicas
_ALONE_S = 30.0  # engines write each question to their logs
_UNKNOWN_S = 60.0  # until an engine that tells nothing is asked again
_TIMEOUT_S = 5.0
_TEXT_MAX = 1 << 20  # bytes that are looked at: all services share this process
# a cache of one token or of more memory than exists is a mistake, as are so many requests
_TOKENS_MIN, _TOKENS_MAX, _REQUESTS_MAX = 1_000, 1_000_000_000, 100_000
_REQUESTS = (  # running and waiting
    b"vllm:num_requests_running",
    b"vllm:num_requests_waiting",
    b"sglang:num_running_reqs",
    b"sglang:num_queue_reqs",
    b"llamacpp:requests_processing",
    b"llamacpp:requests_deferred",
    b"tgi_batch_current_size",
    b"tgi_queue_size",
)
_TOKENS = b"sglang:max_total_num_tokens"
_CACHE = b"vllm:cache_config_info"  # a sample whose labels have the size
_NAMES = b"|".join((*_REQUESTS, _TOKENS, _CACHE))
_SAMPLE = re.compile(rb"(?m)^(%b)(?:\{([^\n]{0,4096})\})? ([0-9.eE+-]{1,32})\b" % _NAMES)
# with `\b`, a hostile word of thousands of letters is not searched from each of them
_LABEL = re.compile(rb'\b(\w{1,64})="([^"\\]{0,64})"')


class EngineState(Struct, frozen=True, kw_only=True):
    """`requests` run or wait. `cache_tokens` is None if the engine does not tell."""

    requests: int
    cache_tokens: int | None = None


def read_metrics(text: bytes) -> EngineState | None:
    """Return what an engine tells, or None if it tells no number of requests. Parts of an engine
    with data parallelism are added up; ranks that share the same requests are not. Only the first
    MiB counts.
    """
    if len(text) > _TEXT_MAX:
        text = text[:_TEXT_MAX].rpartition(b"\n")[0]
    found: defaultdict[bytes, dict[bytes, float]] = defaultdict(dict)
    for name, names, number in _SAMPLE.findall(text):
        labels = dict(_LABEL.findall(names))
        value = _read_tokens(labels) if name == _CACHE else _read_number(number)
        part = labels.get(b"engine", b"") + b"/" + labels.get(b"dp_rank", b"")
        known = found[name]
        if value is not None and (part in known or len(known) < _REQUESTS_MAX):
            known[part] = max(value, known.get(part, 0.0))
    sums = {name: sum(parts.values()) for name, parts in found.items() if parts}
    requests = [sums[name] for name in _REQUESTS if name in sums]
    if not requests:
        return None
    tokens = sums.get(_TOKENS) or sums.get(_CACHE) or 0.0
    return EngineState(
        requests=int(min(sum(requests), _REQUESTS_MAX)),
        cache_tokens=int(tokens) if _TOKENS_MIN <= tokens <= _TOKENS_MAX else None,
    )


def _read_number(text: bytes) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None


def _read_tokens(labels: dict[bytes, bytes]) -> float | None:
    """Return the tokens of vLLM's cache. Some versions state only the blocks, as text."""
    size = _read_number(labels.get(b"kv_cache_size_tokens", b""))
    if size:
        return size
    numbers = [_read_number(labels.get(name, b"")) for name in (b"num_gpu_blocks", b"block_size")]
    return None if None in numbers else math.prod(each or 0.0 for each in numbers)


async def watch_engine(
    address: ReplicaAddress,
    is_shared: Callable[[], bool | None],
    tell: Callable[[EngineState], None],
) -> None:
    """Ask an engine again and again, until `is_shared` returns None: the replica gets no more
    requests. An engine that gives no answer is asked less often."""
    told = False
    while is_shared() is not None:
        state = None
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                answer = await call_engine(address, "GET", _PATH)
            state = read_metrics(answer.body) if answer.status == 200 else None
        except (EngineCallError, OSError, TimeoutError):
            pass  # probes find out whether the replica works
        if state is not None or told:
            tell(state or EngineState(requests=0))
        told = state is not None
        await asyncio.sleep(_UNKNOWN_S if state is None else _SHARED_S if is_shared() else _ALONE_S)
