"""Reads the tokens that an engine states in an answer, while the answer passes.

Engines state them in an object `usage`: at the end of an answer in JSON, before its data, or in an
event of a stream; Gemini calls it `usageMetadata`. Inside of JSON's texts, quotation marks are
escaped, so `"usage":` is always a key. The own routes of llama.cpp, TGI, SGLang and Ollama state
them in keys of their answer, and TGI also in fields of the head. An answer is searched and never
parsed as a whole, and at most `_LONGEST` bytes of it are held.
"""

import json
import re
from typing import Any

from cavvy.domain.ledger import TokenUse

USAGE = b'"usage'
LLAMA = b'"tokens_evaluated"'  # of llama.cpp's own routes
GENERATE = b'_tokens"'  # the end of TGI's `generated_tokens` and SGLang's `completion_tokens`
OLLAMA = b'"eval_count"'  # of Ollama's own routes
_LONGEST = 16_384  # of a `usage` with its name
_NAME = re.compile(rb'"usage(?:_?[mM]etadata)?"\s*+(?:\Z|:\s*+(?:\Z|\{))')
_NAME_MAX = len(b'"usage_metadata"')
_KEYS = re.compile(
    rb'"(tokens_evaluated|input_length|prompt_eval_count|prompt_tokens|cached_tokens|'
    rb'tokens_predicted|generated_tokens|eval_count|completion_tokens)"\s*+:\s*+(\d{1,12})(?=\D)'
)
_KEYS_REST = 512  # bytes in which such keys follow each other
_FIELDS = re.compile(rb"(?i)\r\nx-(prompt|generated|compute)-tokens:[ \t]*(\d{1,12})(?=[ \t]*\r)")
_COUNT_MAX = 1 << 40  # what no answer holds
_decode = json.JSONDecoder().raw_decode  # of an object that other text may follow

# The names of OpenAI, of Anthropic (and Cohere), of Bedrock's Converse, and of Gemini.
_PROMPT = ("prompt_tokens", "input_tokens", "inputTokens", "promptTokenCount", "prompt_token_count")
_COMPLETION = (
    *("completion_tokens", "output_tokens", "outputTokens"),
    *("candidatesTokenCount", "candidates_token_count"),
    *("responseTokenCount", "response_token_count"),  # of Gemini's sessions
)
_TOTAL = ("total_tokens", "totalTokens", "totalTokenCount", "total_token_count")
_THOUGHTS = ("thoughtsTokenCount", "thoughts_token_count")  # Gemini's, beside the candidates
_TOOLS = ("toolUsePromptTokenCount", "tool_use_prompt_token_count")  # and beside the prompt
# What Anthropic and Bedrock count beside `input_tokens`: what the cache held, and what it got.
_READ = ("cache_read_input_tokens", "cacheReadInputTokens")
_WRITTEN = ("cache_creation_input_tokens", "cacheWriteInputTokens")
_CACHED = (
    *("cached_tokens", "prompt_cache_hit_tokens", *_READ),
    *("cachedContentTokenCount", "cached_content_token_count"),
)
_DETAILS = ("prompt_tokens_details", "input_tokens_details", "input_token_details")
_PARTS = ("tokens", "billed_units")  # of Cohere's `usage`


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
        return self._search(data, at)

    def read_head(self, fields: bytes) -> bool:
        """Read the tokens in the head of an answer of TGI or of text-embeddings-inference."""
        found = {name.lower(): int(digits) for name, digits in _FIELDS.findall(fields)}
        if found:
            self.prompt = found.get(b"prompt", found.get(b"compute"))
            self.completion = found.get(b"generated")
        return bool(found)

    def _search(self, data: bytes, at: int) -> bool:
        found = False
        end = 0
        while at >= 0:
            match = _NAME.match(data, at)
            if match is None and len(data) - at < _NAME_MAX:
                self._rest = data[at:]  # of a name that may go on
                return found
            end = at + len(USAGE)
            if match is not None:
                usage, length = _decode_object(data[match.end() - 1 : at + _LONGEST])
                if usage is not None:
                    found = self._take(usage) or found
                    end = match.end() - 1 + length
                elif len(data) - at < _LONGEST:
                    self._rest = data[at:]
                    return found
            at = data.find(USAGE, end)
        self._rest = data[max(end, len(data) - len(USAGE) + 1) :]
        return found

    def _read_keys(self, data: bytes) -> bool:
        self._rest = data[-_KEYS_REST:]
        if self._name not in data:
            return False
        counts = {name.decode(): int(digits) for name, digits in _KEYS.findall(data)}
        prompt = _read(
            counts, "tokens_evaluated", "input_length", "prompt_eval_count", "prompt_tokens"
        )
        completion = _read(
            counts, "tokens_predicted", "generated_tokens", "eval_count", "completion_tokens"
        )
        self.prompt = self.prompt if prompt is None else prompt
        self.completion = self.completion if completion is None else completion
        self.cached = counts.get("cached_tokens", self.cached)
        return prompt is not None or completion is not None

    def _take(self, usage: dict[str, Any]) -> bool:
        if _read(usage, *_PROMPT, *_COMPLETION, *_TOTAL) is None:
            parts = [usage.get(name) for name in _PARTS]
            usage = next((each for each in parts if isinstance(each, dict)), {}) | {
                name: usage[name] for name in _CACHED if name in usage
            }
        prompt, completion = _read_both(usage)
        cached = _read(usage, *_CACHED)
        for name in _DETAILS:
            details = usage.get(name)
            if isinstance(details, dict):
                cached = _read(details, "cached_tokens") or cached
        self.prompt = self.prompt if prompt is None else prompt
        self.completion = self.completion if completion is None else completion
        self.cached = self.cached if cached is None else cached
        return prompt is not None or completion is not None


def _read_both(usage: dict[str, Any]) -> tuple[int | None, int | None]:
    """Return the tokens of the prompt and those that were written, if they are stated."""
    prompt, completion = _read(usage, *_PROMPT), _read(usage, *_COMPLETION)
    beside = "prompt_tokens" not in usage  # the cache's tokens are
    if prompt is not None and beside:
        prompt += sum(_read(usage, *names) or 0 for names in (_READ, _WRITTEN, _TOOLS))
    total = _read(usage, *_TOTAL)
    thoughts = _read(usage, *_THOUGHTS)
    details = usage.get("completion_tokens_details")
    if isinstance(details, dict) and completion is not None:
        hidden = _read(details, "reasoning_tokens") or 0
        if hidden and total == (prompt or 0) + completion + hidden:
            thoughts = hidden  # xAI states them beside the completion
    if thoughts:
        completion = (completion or 0) + thoughts
    if prompt is None and completion is None:
        prompt = total  # of rerankers
    elif completion is None and total is not None and prompt is not None and total > prompt:
        completion = total - prompt
    return prompt, completion


def _decode_object(data: bytes) -> tuple[dict[str, Any] | None, int]:
    """Return the object with which the bytes begin, and its length; None if it is not complete."""
    if not data.startswith(b"{") or b"}" not in data:
        return None, 0
    try:
        value, length = _decode(data.decode("latin-1"))  # a character is a byte
    except (ValueError, RecursionError):
        return None, 0
    return value, length


def _read(table: dict[str, Any], *names: str) -> int | None:
    """Return the first number of tokens among these keys. Some engines write it as 50.0."""
    for name in names:
        value = table.get(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is int and 0 <= value < _COUNT_MAX:
            return value
    return None
