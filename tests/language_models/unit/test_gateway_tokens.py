"""The gateway reads tokens in answers and streams, wherever their bytes are divided."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cavvy.capabilities.language_models.token_meter import _WholeEvents
from cavvy.capabilities.language_models.token_usage import GENERATE, LLAMA, USAGE, UsageReader
from cavvy.domain.ledger import TokenUse

OPENAI = {
    **{"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13},
    "prompt_tokens_details": {"cached_tokens": 8},
}
CHAT = {"choices": [{"message": {"content": 'say "usage": {"prompt_tokens": 1}'}}], "usage": OPENAI}
ANTHROPIC_START = {
    **{"input_tokens": 3, "output_tokens": 1},
    **{"cache_read_input_tokens": 5, "cache_creation_input_tokens": 2},
}
TOOL = {"type": "tool_use", "input": {"usage": {"a": {"b": {}}}}}
LLAMA_ANSWER = {"content": "x", "tokens_predicted": 4, "tokens_evaluated": 9, "timings": {"a": 1}}
TGI_EVENT = {"details": {"generated_tokens": 4, "seed": None, "input_length": 9}}


def event(*values: object) -> bytes:
    return b"".join(b"data: %b\n\n" % json.dumps(each).encode() for each in values)


BODIES = {
    "chat": (json.dumps(CHAT).encode(), USAGE, (9, 8, 4)),
    "indented": (json.dumps(CHAT, indent=2).encode(), USAGE, (9, 8, 4)),
    "stream": (
        event(*[{"choices": [1], "usage": None}] * 3, {"choices": [], "usage": OPENAI}),
        USAGE,
        (9, 8, 4),
    ),
    "continuous": (
        event({"usage": {"prompt_tokens": 9, "completion_tokens": 1}}, {"usage": OPENAI}),
        USAGE,
        (9, 8, 4),
    ),
    "responses": (
        event(
            {"response": {"usage": None}},
            {
                "response": {
                    "tools": [{"usage": {"type": "object"}}],
                    "usage": {
                        "input_tokens": 9,
                        "input_tokens_details": {"cached_tokens": 8},
                        "output_tokens": 4,
                    },
                    "metadata": {"usage": "{"},
                }
            },
        ),
        USAGE,
        (9, 8, 4),
    ),
    "messages": (
        event({"message": {"usage": ANTHROPIC_START}}, TOOL, {"usage": {"output_tokens": 4}}),
        USAGE,
        (10, 5, 4),
    ),
    "embeddings of llama.cpp": (
        json.dumps({"usage": {"prompt_tokens": 9, "total_tokens": 9}, "data": [1] * 9}).encode(),
        USAGE,
        (9, 0, 0),
    ),
    "rerank": (json.dumps({"usage": {"total_tokens": 9}}).encode(), USAGE, (9, 0, 0)),
    "llama.cpp": (event({"content": "y"}, LLAMA_ANSWER), LLAMA, (9, 0, 4)),
    "TGI": (event({"token": 1, "details": None}, TGI_EVENT), GENERATE, (9, 0, 4)),
}
WRONG = (
    b'"usage": {"prompt_tokens": -1}',
    b'"usage": {"prompt_tokens": "9"}',
    b'"usage": {"prompt_tokens": true, "completion_tokens": 1.5}',
    b'"usage": {"prompt_tokens": 99999999999999}',
    b'"usage": {"\xff": 1}',
    b'"usage": {"a": {"b": {"prompt_tokens": 1}}}',
    b'"usage": {' + b"[" * 100_000 + b"}",
    b'"usage"' * 1000,
    b'"usage":' + b" " * 100_000,
)


def read(pieces: list[bytes], name: bytes) -> UsageReader:
    reader = UsageReader(name)
    for piece in pieces:
        reader.feed(piece)
        assert len(reader._rest) <= 16_384
    return reader


@pytest.mark.parametrize("kind", BODIES)
def test_tokens_are_read_over_each_boundary(kind: str) -> None:
    body, name, expected = BODIES[kind]
    for cut in range(len(body) + 1):
        use = read([body[:cut], body[cut:]], name).use
        assert use is not None
        assert (use.prompt, use.cached, use.completion) == expected
    use = read([body[at : at + 1] for at in range(len(body))], name).use
    assert use is not None
    assert (use.prompt, use.cached, use.completion) == expected


@pytest.mark.parametrize("body", WRONG)
def test_what_states_no_tokens_is_passed_over(body: bytes) -> None:
    assert read([body], USAGE).use is None
    after = read([body, b", ", b'"usage": {"prompt_tokens": 2}'], USAGE).use
    assert after is None or after.prompt == 2
    for at in range(0, len(body), 50_000):
        assert read([body[at : at + 50_000]], USAGE).use is None


def test_tokens_in_the_head_are_read() -> None:
    reader = UsageReader()
    assert reader.read_head(b"HTTP/1.1 200 OK\r\nx-prompt-tokens: 9\r\nX-Generated-Tokens: 4\r\n")
    assert reader.use == TokenUse(prompt=9, completion=4)
    assert not UsageReader().read_head(b"HTTP/1.1 200 OK\r\nx-prompt-tokens: many\r\n")


@example(
    [b'{"choices": [1]}', b'{"choices": [], "usage": {"prompt_tokens": 1}}'], [30], b"\r\n\r\n"
)
@given(
    st.lists(
        st.sampled_from(
            [
                b'{"choices":[{"delta":{}}]}',
                b'{"choices": [], "usage": {"prompt_tokens": 1}}',
                b'{"choices":[],"prompt_filter_results":[]}',
                b'{"text": "\\"choices\\": []"}',
                b"[DONE]",
            ]
        )
    ),
    st.lists(st.integers(0, 200)),
    st.sampled_from([b"\n\n", b"\r\n\r\n"]),
)
def test_only_the_event_with_the_usage_is_removed(
    events: list[bytes], cuts: list[int], end: bytes
) -> None:
    whole = b"".join(b"data: " + each + end for each in events)
    kept = b"".join(b"data: " + each + end for each in events if b'"usage"' not in each)
    removes, found, at = _WholeEvents(drops=True), b"", 0
    for cut in [*sorted(cuts), len(whole)]:
        found += removes.feed(whole[at:cut])
        at = max(at, cut)
    assert found + removes.flush() == kept


def test_an_event_that_does_not_end_is_not_held_for_ever() -> None:
    removes = _WholeEvents(drops=True)
    passed = b"".join(removes.feed(b"data: " + b"x" * 10_000) for _ in range(30))
    assert len(passed) > 200_000


def test_a_large_event_after_one_without_choices_is_passed_on() -> None:
    first, large = event({"choices": [], "a": 1}), event({"choices": [1], "b": "x" * 100_000})
    removes = _WholeEvents(drops=True)
    passed = removes.feed(first + large[:-9]) + removes.feed(large[-9:]) + removes.flush()
    assert passed == first + large
