"""Calls of the gateway's own to the engine of a replica: one request, one bounded answer."""

import asyncio

import msgspec

from cavvy.domain.values import Struct
from cavvy.gateway.bodies import make_body
from cavvy.gateway.config import ReplicaAddress
from cavvy.gateway.heads import HeadError, parse_response

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
