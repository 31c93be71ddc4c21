"""A language-model engine for tests of the gateway: OpenAI's and Anthropic's routes over HTTP and
server-sent events. A token is a word. The engine counts what it computes, as real ones do in their
metrics, and is strict: a stream ends with its usage only if the request asked for it.
"""

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from tests.contract.replica_stand_in import Act, ReplicaStandIn, Seen

_CACHED = 2  # tokens of each prompt that the engine had in its cache


@dataclass
class EngineStandIn(ReplicaStandIn):
    tokens: Counter[str] = field(default_factory=Counter)  # prompt, cached, completion
    pause_s: float = 0.0  # between two tokens
    split: int = 0  # bytes of each chunk of a stream; 0: an event is a chunk
    speaks: str = "vllm"  # the variant of the answers
    deaths: int = 0  # so many requests lose their connection before a byte of their answer
    stream_ends: float = 0.0  # after so many parts, a stream loses its connection; 2.5: in a part
    mute: bool = False  # it answers only when `release` is set
    made: list[str] = field(default_factory=list)  # the IDs of its responses

    def _find(self, path: str) -> "Act":
        if self.deaths:
            self.deaths -= 1
            return self._do_die
        return self._do_response if path.startswith("/v1/responses/") else super()._find(path)

    def _count(self, asked: dict[str, Any]) -> tuple[int, int]:
        prompt = len(json.dumps(asked.get("messages") or asked.get("input") or "").split())
        made = int(asked.get("max_tokens") or asked.get("max_output_tokens") or 5)
        self.tokens.update(prompt=prompt, cached=min(prompt, _CACHED), completion=made)
        return prompt, made

    def _usage(self, prompt: int, made: int) -> dict[str, Any]:
        details = {"cached_tokens": min(prompt, _CACHED)}
        if self.speaks == "openai-null":
            details |= {"audio_tokens": None}  # type: ignore[dict-item]
        total = prompt + made
        return {
            **{"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": total},
            "prompt_tokens_details": details,
        }

    async def _do_completions(self, request: Seen, _: dict[str, str], reader, writer) -> bool:
        if self.mute:
            return await self._do_hold(request, {}, reader, writer)
        asked = json.loads(request.body)
        prompt, made = self._count(asked)
        is_chat = "/chat/" in request.path
        kind, part = ("chat.completion", "message") if is_chat else ("text_completion", "text")
        words = [f"word{number} " for number in range(made)]
        base = {"id": "c-1", "created": 1, "model": asked["model"]}
        if not asked.get("stream"):
            text = "".join(words)
            said: object = {"role": "assistant", "content": text} if is_chat else text
            choice = {"index": 0, "finish_reason": "stop", part: said}
            answer = {**base, "object": kind, "choices": [choice]}
            return self._answer(writer, {**answer, "usage": self._usage(prompt, made)})
        if self.speaks == "strict" and "stream_options" in asked:
            self.tokens.subtract(prompt=prompt, cached=min(prompt, _CACHED), completion=made)
            error = {"message": "stream_options: extra inputs are not permitted"}
            return self._answer(writer, {"error": error}, b"400 Bad Request")
        wants = (asked.get("stream_options") or {}).get("include_usage")
        nothing = {"usage": None} if wants and self.speaks == "openai-null" else {}
        events = []
        for word in words:
            said = {"delta": {"content": word}} if is_chat else {"text": word}
            choices = [{"index": 0, "finish_reason": None, **said}]
            chunk = {**base, "object": f"{kind}.chunk", "choices": choices, **nothing}
            events.append(f"data: {json.dumps(chunk)}\n\n")
        if wants:
            last = {**base, "object": f"{kind}.chunk", "choices": []}
            last |= {"usage": self._usage(prompt, made)}
            events.append(f"data: {json.dumps(last)}\n\n")
        return await self._stream(reader, writer, [*events, "data: [DONE]\n\n"])

    async def _do_responses(self, request: Seen, _: dict[str, str], reader, writer) -> bool:
        asked = json.loads(request.body)
        last = asked.get("previous_response_id")
        if last is not None and last not in self.made:
            return self._miss(writer, last)
        prompt, made = self._count(asked)
        text = {"type": "output_text", "text": "word " * made, "annotations": []}
        item = {"type": "message", "id": "m-1", "role": "assistant", "status": "completed"}
        usage = {
            **{"input_tokens": prompt, "output_tokens": made, "total_tokens": prompt + made},
            "input_tokens_details": {"cached_tokens": min(prompt, _CACHED)},
            "output_tokens_details": {"reasoning_tokens": 0},
        }
        made_id = f"resp_{self.name}-{uuid4().hex}"
        self.made.append(made_id)
        whole = {
            **{"id": made_id, "object": "response", "created_at": 1, "model": asked["model"]},
            **{"status": "completed", "output": [{**item, "content": [text]}]},
            **{"parallel_tool_calls": True, "tool_choice": "auto", "tools": []},
            **{"usage": usage, "metadata": {"usage": "none"}},
        }
        if not asked.get("stream"):
            return self._answer(writer, whole)
        begun = {**whole, "output": [], "status": "in_progress", "usage": None}
        events = [("response.created", {"response": begun})]
        delta = {"item_id": "m-1", "output_index": 0, "content_index": 0, "delta": "word "}
        events += [("response.output_text.delta", {**delta, "logprobs": []})] * made
        events += [("response.completed", {"response": whole})]
        lines = [
            f"event: {name}\ndata: "
            f"{json.dumps({'type': name, 'sequence_number': number, **data})}\n\n"
            for number, (name, data) in enumerate(events)
        ]
        return await self._stream(reader, writer, lines)

    async def _do_response(self, request: Seen, _: dict[str, str], reader, writer) -> bool:
        """Read, cancel or delete a response, which only this engine has."""
        asked = request.path.split("/")[3].partition("?")[0]
        if asked not in self.made:
            return self._miss(writer, asked)
        return self._answer(writer, {"id": asked, "object": "response", "output": []})

    def _miss(self, writer, response_id: str) -> bool:
        error = {"message": f"Response with id '{response_id}' not found.", "code": 404}
        return self._answer(writer, {"error": error}, b"404 Not Found")

    async def _do_embeddings(self, request: Seen, _: dict[str, str], reader, writer) -> bool:
        asked = json.loads(request.body)
        prompt = len(str(asked["input"]).split())
        self.tokens.update(prompt=prompt)
        usage = {"prompt_tokens": prompt, "total_tokens": prompt}
        rows = [{"object": "embedding", "index": 0, "embedding": [0.5] * 1000}]
        order = {"usage": usage, "data": rows} if self.speaks == "llama" else {"data": rows}
        return self._answer(
            writer, {"object": "list", "model": asked["model"], **order, "usage": usage}
        )

    async def _do_rerank(self, request: Seen, _: dict[str, str], reader, writer) -> bool:
        self.tokens.update(prompt=7)
        rows = [{"index": 0, "relevance_score": 0.5}]
        return self._answer(writer, {"id": "k", "usage": {"total_tokens": 7}, "results": rows})

    async def _do_messages(self, request: Seen, _: dict[str, str], reader, writer) -> bool:
        asked = json.loads(request.body)
        prompt, made = self._count(asked)
        cached = min(prompt, _CACHED)  # Anthropic's `input_tokens` are without these
        usage = {"input_tokens": prompt - cached, "cache_read_input_tokens": cached}
        base = {
            **{"id": "a-1", "type": "message", "role": "assistant", "model": asked["model"]},
            **{"stop_reason": None, "stop_sequence": None},
        }
        if not asked.get("stream"):
            tool = {"type": "tool_use", "id": "t", "name": "n", "input": {"usage": {"b": 1}}}
            content = [{"type": "text", "text": "word " * made}, tool]
            whole = {**base, "content": content, "stop_reason": "end_turn"}
            return self._answer(writer, {**whole, "usage": {**usage, "output_tokens": made}})
        start = {**base, "content": [], "usage": {**usage, "output_tokens": 1}}
        delta = {"type": "text_delta", "text": "word "}
        block = {"type": "text", "text": ""}
        events: list[dict[str, Any]] = [
            {"type": "message_start", "message": start},
            {"type": "content_block_start", "index": 0, "content_block": block},
            *[{"type": "content_block_delta", "index": 0, "delta": delta}] * made,
            {"type": "content_block_stop", "index": 0},
            {
                "type": "message_delta",
                "delta": {"stop_reason": "end_turn", "stop_sequence": None},
                "usage": {"output_tokens": made},
            },
            {"type": "message_stop"},
        ]
        lines = [f"event: {each['type']}\ndata: {json.dumps(each)}\n\n" for each in events]
        return await self._stream(reader, writer, lines)

    async def _do_speech(self, request: Seen, _: dict[str, str], reader, writer) -> bool:
        return self._write(writer, b"audio/mpeg", b"\xff\xf3" + b'"usage":{' * 50_000)

    async def _do_transcriptions(self, request: Seen, _: dict[str, str], reader, writer) -> bool:
        self.tokens.update(prompt=3, completion=2)
        usage = {"type": "tokens", "input_tokens": 3, "output_tokens": 2, "total_tokens": 5}
        return self._answer(writer, {"text": f"{len(request.body)} bytes", "usage": usage})

    async def _do_fails(self, request: Seen, _: dict[str, str], reader, writer) -> bool:
        error = {"message": "too long", "type": "invalid_request_error", "param": "n", "code": "x"}
        return self._answer(writer, {"error": error}, b"400 Bad Request")

    async def _stream(self, reader, writer, events: list[str]) -> bool:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
        if self.speaks == "sized":
            body = "".join(events).encode()
            writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            return True
        head += b"Content-Encoding: br\r\n" if self.speaks == "coded" else b""
        writer.write(head + b"Transfer-Encoding: chunked\r\n\r\n")
        for number, piece in enumerate(self._cut([each.encode() for each in events])):
            if self.stream_ends and number >= int(self.stream_ends):
                part = piece[: int(len(piece) * (self.stream_ends % 1))]
                writer.write(b"%x\r\n%b\r\n" % (len(part), part) if part else b"")
                await writer.drain()
                return False
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
            if self.pause_s:
                await asyncio.sleep(self.pause_s)
        writer.write(b"0\r\n\r\n")
        return True

    def _cut(self, events: list[bytes]) -> list[bytes]:
        if not self.split:
            return events
        whole = b"".join(events)
        return [whole[at : at + self.split] for at in range(0, len(whole), self.split)]

    def _answer(self, writer, answer: object, status: bytes = b"200 OK") -> bool:
        return self._write(writer, b"application/json", json.dumps(answer).encode(), status)

    def _write(self, writer, media: bytes, body: bytes, status: bytes = b"200 OK") -> bool:
        head = b"HTTP/1.1 %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % (status, media, len(body)) + body)
        return True
