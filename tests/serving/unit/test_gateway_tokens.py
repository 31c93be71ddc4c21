"""The gateway reads tokens in answers and streams, wherever their bytes are divided."""

import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cavvy.capabilities.serving.bills import KeyWork, merge_counts
from cavvy.capabilities.serving.gateway.client_keys import KeyLimit, make_limits
from cavvy.capabilities.serving.gateway.config import ClientKey
from cavvy.capabilities.serving.gateway.kept_counts import KeptCounts, read_work
from cavvy.capabilities.serving.gateway.token_meter import _WholeEvents
from cavvy.capabilities.serving.gateway.token_usage import GENERATE, LLAMA, USAGE, UsageReader
from cavvy.domain.ledger import TokenUse, combine_tokens

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


def test_tokens_outlive_the_process(tmp_path: Path) -> None:
    path = tmp_path / "counts"
    first = KeptCounts(path)
    first.find("s", "r", "k")[0] += 1
    count = first.find_tokens("s", "r", "k", "org/m" + "x" * 300)
    count.add(TokenUse(prompt=9, cached=8, completion=4))
    count.begin(5, 2)
    del count
    first.close()  # stands for a kill: the file is the same
    assert read_work(path)["s"][first.epoch]["r"]["k"].tokens.popitem()[1].prompt == 9
    second = KeptCounts(path)
    ((place, found),) = second.resume_tokens("s")["r"].items()
    assert place[1].startswith("org/mxxx")
    assert found.describe() == TokenUse(prompt=14, cached=8, completion=6, estimated=7)
    second.close()
    third = KeptCounts(path)
    assert third.resume_tokens("s")["r"].popitem()[1].describe().prompt == 14
    third.close()


def test_reports_are_merged_by_the_larger_counts() -> None:
    def work(prompt: int, completion: int) -> KeyWork:
        use = TokenUse(prompt=prompt, completion=completion)
        return KeyWork(requests=1, work_us=1, tokens={"m": use})

    merged = merge_counts({"k": work(5, 1)}, {"k": work(3, 2)})["k"]
    assert merged.tokens == {"m": TokenUse(prompt=5, completion=2)}
    assert combine_tokens(int.__add__, merged.tokens, {}) == merged.tokens


DAY_S = 86_400
KEY = ClientKey(id="k", sha256="0" * 64, micros_per_day=100, tokens_per_min=60)


def limit(kept: KeptCounts) -> KeyLimit:
    return make_limits("s", [KEY, ClientKey(id="free", sha256="1" * 64)], kept, 0.0)["k"]


def test_dollars_are_those_of_a_day_in_utc_and_outlive_the_process(tmp_path: Path) -> None:
    kept = KeptCounts(tmp_path / "counts")
    first = limit(kept)
    first.spend(60.4, 10 * DAY_S - 2)
    assert first.refuse_spent(10 * DAY_S - 1.5) is None
    first.spend(40, 10 * DAY_S - 1.5)
    refused = first.refuse_spent(10 * DAY_S - 1.5)
    assert refused is not None
    assert (refused.status, refused.retry_s) == (429, 2)
    assert not refused.fields
    del first
    kept.close()
    assert not read_work(tmp_path / "counts"), "what a key spent is not the work of a replica"
    kept = KeptCounts(tmp_path / "counts")
    assert not kept.resume("s")
    again = limit(kept)
    assert again.refuse_spent(10 * DAY_S - 1) is not None
    assert again.refuse_spent(10 * DAY_S) is None, "the next day has begun"
    again.spend(100, 10 * DAY_S)
    refused = again.refuse_spent(10 * DAY_S)
    assert refused is not None
    assert (refused.retry_s, refused.fields) == (DAY_S, b"x-should-retry: false\r\n")


def test_what_an_answer_used_more_is_a_debt_that_a_new_route_keeps() -> None:
    old = limit(KeptCounts())
    assert old.take(50, 0.0) is None
    old.correct(130)
    new = limit(KeptCounts())
    new.adopt(old)
    refused = new.take(1, 0.0)
    assert refused is not None
    assert refused.retry_s == 121, "one token a second"
    assert b"x-ratelimit-remaining-tokens: 0\r\n" in refused.fields
    assert new.take(1, 121.0) is None
    assert new.take(600, 300.0) is None, "nothing of the limit is used, so it may need more"
    assert new.take(1, 300.0) is not None


def test_what_a_key_uses_elsewhere_counts_from_then_on_with_a_debt_of_at_most_a_minute() -> None:
    here = limit(KeptCounts())
    here.count_elsewhere(50, 5, 3600.0, 0.0)  # the limit has been full for an hour
    assert here.take(11, 3600.0) is not None
    assert here.take(10, 3600.0) is None
    here.count_elsewhere(100_000, 5, 3600.0, 0.0)  # the database could not be read for a long time
    refused = here.take(1, 3600.0)
    assert refused is not None
    assert refused.retry_s == 61
    here.correct(1000)  # an own debt is kept
    here.count_elsewhere(5, 90, 3600.0, 0.0)
    refused = here.take(1, 3600.0)
    assert refused is not None
    assert refused.retry_s == 1061
    assert here.refuse_spent(0.0) is not None
