"""Turns the body of a request to a language model into a `Prompt`: hashes of growing beginnings.

Engines keep the keys and values of prompts in blocks, and reuse the blocks of the longest
beginning that two prompts have in common. The gateway has no tokenizer, so it hashes the bytes
that the engine's template would render, in the template's order: model and salt, instructions and
tools, and then the messages. Two prompts of one conversation therefore begin with the same
hashes; the order of keys and the spaces in their JSON do not matter.

Of a long body only the beginning is read. A body that is not JSON, or has no prompt, has no hashes.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, repeat
from typing import Any
from zlib import crc32

import msgspec

from cavvy.domain.values import Struct

READ_BYTES = 256 << 10  # of a body; longer prompts differ before
BYTES_PER_TOKEN = 4  # roughly; OpenAI's rule of thumb for English
# Short blocks first, because many prompts have only a short beginning in common. A longer block has
# at most half of the length that precedes it: the gateway's work grows with the number of blocks.
_BLOCK_BYTES = (
    *repeat(128, 4),
    *repeat(256, 2),
    *repeat(512, 2),
    *repeat(1024, 6),
    *repeat(2048, 28),
    *repeat(4096, 48),
)
_EDGES = tuple(accumulate(_BLOCK_BYTES))
_SPANS = tuple(map(slice, (0, *_EDGES), _EDGES))
BLOCK_ENDS = tuple(edge // BYTES_PER_TOKEN for edge in _EDGES)
_OPENING_BYTES = 4096
# of a body whose end is missing, at most so many brackets are closed and so many tokens are read
_DEPTH_MAX = 64
_TOKENS_MAX = 20_000
# a string that is not closed matches up to the end of the body
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.?)*+(")?|[{}\[\]]', re.DOTALL)
_BEFORE = ("system", "instructions", "tools", "functions", "documents")
_TEXTS = ("prompt", "input", "inputs", "text", "input_ids")


class Prompt(Struct, frozen=True):
    """`blocks` are hashes of the prompt up to each of `ends`, which are numbers of tokens; `ends`
    may be longer. `tokens` is the length of the prompt. `opening` names the conversation: it is
    the same for all its turns, and in all gateways. `model` is the model that the body names."""

    blocks: Sequence[int]
    ends: Sequence[int]
    tokens: int
    opening: int = 0
    model: str = ""


class _PromptBody(Struct, frozen=True):
    model: Any = None
    cache_salt: Any = None
    messages: Any = None
    system: Any = None
    instructions: Any = None
    tools: Any = None
    functions: Any = None
    documents: Any = None
    prompt: Any = None
    input: Any = None
    inputs: Any = None
    text: Any = None
    input_ids: Any = None


_decode = msgspec.json.Decoder(_PromptBody).decode
_encode = msgspec.json.Encoder(order="sorted").encode
_FAULTS = (msgspec.MsgspecError, RecursionError, ValueError)


def read_prompt(body: bytes, length: int, model: str = "") -> Prompt | None:
    """Return the prompt of a body, of which perhaps only the beginning is given. `length` is the
    length of the whole body, and `model` is its model, if known. The result is None if the body
    contains no prompt.
    """
    whole = length <= len(body) <= READ_BYTES
    read = _read_whole(body) if whole else _read_beginning(body[:READ_BYTES])
    if read is None:
        return None
    try:
        parts = _render(read)
        seed = _write(model or read.model) + b"\0" + _write(read.cache_salt)
    except _FAULTS:
        return None
    text = b"\0".join(parts.texts)
    if not text:
        return None
    end = sum(map(len, parts.texts[: parts.opening])) + parts.opening - 1
    opening = b"%b\0%b" % (seed, text[max(0, end - _OPENING_BYTES) : end])
    return Prompt(
        hash_blocks(text, seed),
        BLOCK_ENDS,
        max(len(text), length if not whole else 0) // BYTES_PER_TOKEN + 1,
        crc32(opening[-_OPENING_BYTES:]),
        model or (read.model if isinstance(read.model, str) else ""),
    )


def hash_blocks(text: bytes, seed: bytes) -> list[int]:
    """Return the hash of the text up to each end of a block. Python's hash of bytes has a random
    key in each process, so that clients cannot make prompts with the same hashes."""
    last, count = hash(seed), bisect_right(_EDGES, len(text))
    return [last := hash((last, text[each])) for each in _SPANS[:count]]


def _read_whole(body: bytes) -> _PromptBody | None:
    try:
        return _decode(body)
    except _FAULTS:
        return None


class _PromptParts(Struct, frozen=True):
    texts: list[bytes]
    opening: int  # so many texts are the same in all turns of a conversation


def _render(body: _PromptBody) -> _PromptParts:
    texts = [_write(each) for name in _BEFORE if (each := getattr(body, name)) is not None]
    opening = 0
    messages = body.messages
    if not isinstance(messages, list) and isinstance(body.input, list):
        messages = body.input if any(isinstance(each, dict) for each in body.input) else None
    if isinstance(messages, list):
        for message in messages:
            if not isinstance(message, dict):
                texts.append(_write(message))
                continue
            role = message.pop("role", None)
            texts.append(_write(role))
            texts.append(_write(message.pop("content", None)))
            if message:  # calls of tools, names
                texts.append(_encode(message))
            if role == "user" and not opening:
                opening = len(texts)
    else:
        texts += [_write(each) for name in _TEXTS if (each := getattr(body, name)) is not None]
    return _PromptParts(texts, opening or len(texts))


def _write(value: Any) -> bytes:
    return value.encode(errors="replace") if isinstance(value, str) else _encode(value)


def _read_beginning(body: bytes) -> _PromptBody | None:
    """Read a body whose end is missing: close its open string and brackets."""
    return next((read for each in _list_endings(body) if (read := _read_whole(each))), None)


def _list_endings(body: bytes) -> Iterator[bytes]:
    """Yield the body with endings that may complete it, the most probable first."""
    brackets: list[bytes] = []
    quoted, shallow = False, b""
    for count, token in enumerate(_TOKEN.finditer(body)):
        mark = token[0][:1]
        if mark in b"{[":
            brackets.append(b"}" if mark == b"{" else b"]")
        elif mark in b"}]" and brackets:
            brackets.pop()
        quoted = mark == b'"' and not token[1]
        if len(brackets) > _DEPTH_MAX or count > _TOKENS_MAX:
            return
        if len(brackets) == 2 and mark == b"}":  # the end of a message
            shallow = body[: token.end()] + b"".join(reversed(brackets))
    closing = b"".join(reversed(brackets))
    if quoted:
        for cut in range(7):  # an escape or a character may be incomplete
            yield body[: len(body) - cut] + b'"' + closing
    else:
        yield body.rstrip(b", \t\r\n") + closing
        yield body[: max(body.rfind(b","), 0)] + closing  # without an incomplete number
    yield shallow
