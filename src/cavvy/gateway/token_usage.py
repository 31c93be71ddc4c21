"""Reads the tokens that an engine states in an answer, while the answer passes.

Engines state them in an object `usage`: at the end of an answer in JSON, before its data, or in an
event of a stream. Inside of JSON's texts, quotation marks are escaped, so `"usage":` is always a
key. llama.cpp's own routes state them in keys of their answer, and TGI's in fields of the head. An
answer is searched and never parsed as a whole, and at most `_LONGEST` bytes of it are held.
"""

import re
from typing import Any

import msgspec

from cavvy.domain.request_bills import TokenUse

USAGE = b'"usage"'
LLAMA = b'"tokens_evaluated"'  # of llama.cpp's own routes
TGI = b'"generated_tokens"'  # of TGI's own routes
_LONGEST = 4096  # of a `usage` with its name
_FLAT = rb"\{[^{}]*+(?:\{[^{}]*+\}[^{}]*+)*+"  # an object with objects of plain values
_USAGE = re.compile(rb'"usage"\s*+:\s*+(' + _FLAT + rb"\})")
_BEGINS = re.compile(rb'"usage"\s*+(?:\Z|:\s*+(?:\Z|' + _FLAT + rb"(?:\{[^{}]*+)?\Z))")
_KEYS = re.compile(
    rb'"(tokens_evaluated|input_length|tokens_predicted|generated_tokens)"\s*+:\s*+(\d{1,12})(?=\D)'
)
_KEYS_REST = 256  # bytes in which such keys follow each other
_FIELDS = re.compile(rb"(?i)\r\nx-(prompt|generated|compute)-tokens:[ \t]*(\d{1,12})(?=[ \t]*\r)")
_COUNT_MAX = 1 << 40  # what no answer holds
_decode = msgspec.json.Decoder(dict[str, Any]).decode


class UsageReader:
    """The tokens of one answer, as far as it has passed. Values that the engine states again
    replace former ones: Anthropic's events state the prompt first and the rest at the end.
    """

    __slots__ = ("_name", "_rest", "cached", "completion", "prompt")

    def __init__(self, name: bytes = USAGE) -> None:
        self._name = name  # the key for which answers are searched
        self._rest = b""
        self.prompt: int | None = None
        self.cached = 0
        self.completion: int | None = None

    @property
    def use(self) -> TokenUse | None:
        """The tokens that the engine has stated, or None if it has stated none."""
        if self.prompt is None and self.completion is None:
            return None
        prompt = self.prompt or 0
        return TokenUse(
            prompt=prompt, cached=min(self.cached, prompt), completion=self.completion or 0
        )

    def feed(self, data: bytes) -> bool:
        """Search the next bytes of a body; return whether they state tokens."""
        if self._rest:
            data = self._rest + data
        name = self._name
        if name is not USAGE:
            return self._read_keys(data)
        at = data.find(name)
        if at < 0:
            self._rest = data[1 - len(name) :]
            return False
        return self._read(data, at)

    def read_head(self, fields: bytes) -> bool:
        """Read the tokens in the head of an answer of TGI or of text-embeddings-inference."""
        found = {name.lower(): int(digits) for name, digits in _FIELDS.findall(fields)}
        if found:
            self.prompt = found.get(b"prompt", found.get(b"compute"))
            self.completion = found.get(b"generated")
        return bool(found)

    def _read(self, data: bytes, at: int) -> bool:
        found = False
        while at >= 0:
            match = _USAGE.match(data, at)
            if match is not None:
                found = self._take(match[1]) or found
                end = match.end()
            elif len(data) - at < _LONGEST and _BEGINS.match(data, at):
                self._rest = data[at:]
                return found
            else:
                end = at + len(USAGE)
            at = data.find(USAGE, end)
        self._rest = data[max(end, len(data) - len(USAGE) + 1) :]
        return found

    def _read_keys(self, data: bytes) -> bool:
        self._rest = data[-_KEYS_REST:]
        if self._name not in data:
            return False
        counts = dict(_KEYS.findall(data))
        for key, digits in counts.items():
            if key in (b"tokens_evaluated", b"input_length"):
                self.prompt = int(digits)
            else:
                self.completion = int(digits)
        return bool(counts)

    def _take(self, text: bytes) -> bool:
        try:
            usage = _decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False
        prompt = _read(usage, "prompt_tokens", "input_tokens")
        completion = _read(usage, "completion_tokens", "output_tokens")
        read = _read(usage, "cache_read_input_tokens")
        if prompt is not None and "prompt_tokens" not in usage:
            # Anthropic's `input_tokens` are those that its cache did not hold
            prompt += (read or 0) + (_read(usage, "cache_creation_input_tokens") or 0)
        total = _read(usage, "total_tokens")
        if prompt is None and completion is None and total is not None:
            prompt = total  # of rerankers
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
        cached = _read(details, "cached_tokens") if isinstance(details, dict) else None
        cached = next(
            (each for each in (cached, read, _read(usage, "prompt_cache_hit_tokens")) if each), None
        )
        self.prompt = self.prompt if prompt is None else prompt
        self.completion = self.completion if completion is None else completion
        self.cached = self.cached if cached is None else cached
        return prompt is not None or completion is not None


def _read(table: dict[str, Any], *names: str) -> int | None:
    for name in names:
        value = table.get(name)
        if type(value) is int and 0 <= value < _COUNT_MAX:
            return value
    return None
