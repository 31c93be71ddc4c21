"""Routing by the caches of language models' replicas: prompts, what caches hold, and the choice."""

import json
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from cavvy.capabilities.language_models.adapters import (
    LoadTimes,
    ReplicaAdapters,
    choose_waiting,
    count_waits,
)
from cavvy.capabilities.language_models.cache_routing import ENTRIES_MAX, CacheRouter, PrefixCaches
from cavvy.capabilities.language_models.engine_calls import _LABEL, EngineState, read_metrics
from cavvy.capabilities.language_models.prompts import BLOCK_ENDS, READ_BYTES, Prompt, read_prompt
from cavvy.capabilities.language_models.scorer import ModelReplica
from cavvy.capabilities.serving.gateway.balancing import FARTHER, FULL
from cavvy.capabilities.serving.gateway.config import AdapterTerms, ReplicaAddress, ServiceRoute
from cavvy.capabilities.serving.gateway.kept_counts import KeptCounts
from cavvy.capabilities.serving.gateway.upstream import ReplicaPool, UpstreamConnection
from cavvy.capabilities.serving.gateway.work import ReplicaWork
from cavvy.domain.services import RoutingKind, RoutingRule
from cavvy.task_files import ReadOptions, parse_task


def read(body: Any) -> Prompt:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    found = read_prompt(data, len(data))
    assert found is not None
    return found


def count_common(first: Prompt, second: Prompt) -> int:
    pairs = zip(first.blocks, second.blocks, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), len(first.blocks))


SYSTEM = {"role": "system", "content": "You answer briefly and name your sources. " * 10}
FIRST = {"role": "user", "content": "What is a token? " * 40}
ANSWER = {"role": "assistant", "content": "A piece of a word. " * 40}
TOOLS = [{"type": "function", "function": {"name": "find", "description": "x" * 300}}]


def test_each_turn_begins_with_the_turns_before() -> None:
    one = read({"model": "m", "messages": [SYSTEM, FIRST]})
    two = read({"model": "m", "messages": [SYSTEM, FIRST, ANSWER, FIRST]})
    assert count_common(one, two) == len(one.blocks) > 3
    assert one.opening == two.opening


def test_the_order_and_the_spaces_of_json_do_not_matter() -> None:
    one = read({"model": "m", "messages": [SYSTEM, FIRST], "tools": TOOLS, "seed": 1})
    text = {
        "stream": True,
        "tools": [{"function": dict(reversed(TOOLS[0]["function"].items())), "type": "function"}],  # type: ignore[attr-defined]
        "messages": [dict(reversed(each.items())) for each in (SYSTEM, FIRST)],
        "model": "m",
    }
    assert read(json.dumps(text, indent=2).encode()) == one


@pytest.mark.parametrize(
    "other",
    [
        {"model": "adapter", "messages": [SYSTEM, FIRST]},
        {"model": "m", "messages": [SYSTEM, FIRST], "cache_salt": "a"},
        {"model": "m", "messages": [SYSTEM, FIRST], "tools": TOOLS},
        {"model": "m", "messages": [{**SYSTEM, "role": "user"}, FIRST]},
    ],
)
def test_another_model_salt_tool_or_role_is_another_prompt(other: object) -> None:
    assert count_common(read({"model": "m", "messages": [SYSTEM, FIRST]}), read(other)) == 0


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a" * 600},
        {"prompt": list(range(600))},
        {"prompt": ["a" * 300, "b" * 300]},
        {"input": "a" * 600, "instructions": "briefly"},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a" * 600}]}]},
        {"system": [{"type": "text", "text": "a" * 600}], "messages": [FIRST]},
        {"inputs": "a" * 600},
        {"text": "a" * 600},
        {"input_ids": list(range(600))},
    ],
)
def test_all_kinds_of_prompts_are_read(body: dict[str, object]) -> None:
    assert len(read(body).blocks) > 3


def test_the_beginning_of_a_long_body_is_enough() -> None:
    messages = [SYSTEM, {"role": "user", "content": 'é "quoted" \\ ' * (READ_BYTES // 10)}]
    for ascii_only in (True, False):
        whole = json.dumps({"model": "m", "messages": messages}, ensure_ascii=ascii_only).encode()
        for cut in range(READ_BYTES - 40, READ_BYTES):
            found = read_prompt(whole[:cut], len(whole))
            assert found is not None
            assert found.tokens >= len(whole) // 4
            assert count_common(found, read(whole)) >= len(found.blocks) - 1 > 50


NO_PROMPTS = [b"", b"x", b"{", b"{}", b"[1]", b"null", b'{"messages": "', b'{"prompt": "\xff"}']
NO_PROMPTS += [b"[" * 100_000, b'{"messages": ' + b"[" * 100_000, b'{"a": ' * 50_000]
NO_PROMPTS += [b'"' * 1_000_000, b"{}" * 500_000, b"\\" * 1_000_000, b'{"a":"' + b"\\" * 500_000]


@pytest.mark.parametrize("body", NO_PROMPTS, ids=range(len(NO_PROMPTS)))
def test_a_body_without_a_prompt_has_no_hashes(body: bytes) -> None:
    for length in (len(body), 10 * len(body) + 1):
        found = read_prompt(body, length)
        assert found is None or not found.blocks or b"messages" in body
    prompt = json.dumps({"prompt": "a word " * 2000}).encode()
    assert (found := read_prompt(prompt, len(prompt))) is not None
    assert found.blocks, "a body with a prompt has some"


def test_any_bytes_and_any_json_can_be_read() -> None:
    random = Random(1)
    seed = json.dumps(
        {"model": "m", "messages": [SYSTEM, {"role": 1, "content": None, "x": [1.5]}, 3, FIRST]}
    ).encode()
    assert read_prompt(seed, len(seed)) is not None
    for _ in range(3000):
        body = bytearray(seed)
        for _ in range(random.randrange(1, 6)):
            at = random.randrange(len(body))
            body[at : at + random.randrange(3)] = random.randbytes(random.randrange(3))
        read_prompt(bytes(body), len(body) + random.choice((0, 0, 1000)))


def make_prompt(*blocks: int, size: int = 100) -> Prompt:
    ends = [size * (at + 1) for at in range(len(blocks))]
    return Prompt(blocks, ends, size * len(blocks) + 10)


def test_a_cache_forgets_ends_before_beginnings_and_old_prompts_before_new_ones() -> None:
    caches = PrefixCaches(500)
    caches.add(0)
    caches.add(1)
    caches.hold(0, make_prompt(1, 2, 3))
    caches.hold(1, make_prompt(1, 9))
    assert caches.find(make_prompt(1, 2, 3, 4)) == {0: 300, 1: 100}
    caches.hold(0, make_prompt(5, 6, 7))
    assert caches.find(make_prompt(1, 2, 3)) == {0: 200, 1: 100}
    caches.hold(0, make_prompt(1, 2))
    caches.hold(0, make_prompt(8))
    assert caches.find(make_prompt(5, 6, 7)) == {0: 200}
    caches.remove(0)
    assert caches.find(make_prompt(1, 2)) == {1: 100}
    assert caches.find(make_prompt(5)) == {}


def test_the_memory_of_short_prompts_is_bounded() -> None:
    caches = PrefixCaches(1 << 60)
    caches.add(0)
    for number in range(ENTRIES_MAX + 50):
        caches.hold(0, make_prompt(number))
    assert len(caches._holders) == ENTRIES_MAX
    assert caches.find(make_prompt(49)) == {}


def test_a_repeated_prompt_takes_no_further_memory() -> None:
    caches, random = PrefixCaches(600), Random(1)
    caches.add(0)
    kept, repeated = Prompt([1, 2], [32, 64], 64), Prompt([3], [32], 32)
    caches.hold(0, kept)
    for _ in range(1000):
        caches.hold(0, repeated)
    assert caches.find(kept) == {0: 64}, "it is held beside the other one"
    cache = caches._caches[0]
    assert len(cache.history) <= 20
    for _ in range(3000):  # conversations of up to eight turns, some of them repeated
        name, turns = random.randrange(100, 130), random.randrange(1, 9)
        blocks = [name * 10 + turn for turn in range(turns)]
        caches.hold(0, Prompt(blocks, [32 * n for n in range(1, 9)], 32 * turns))
        assert cache.tokens == 32 * len(cache.used) <= 600
        assert len(cache.history) <= 4 * 20


def test_a_long_prompt_has_few_blocks() -> None:
    assert len(BLOCK_ENDS) < 300
    assert BLOCK_ENDS[-1] * 4 >= READ_BYTES


def make_router(count: int = 3) -> CacheRouter:
    router = CacheRouter(100_000)
    router.set_replicas([f"r{number}" for number in range(count)])
    return router


def test_a_prompt_goes_to_the_replica_that_holds_it_until_too_much_waits_there() -> None:
    router, prompt = make_router(), make_prompt(*range(100))
    first = router.choose(prompt, [0, 0, 0], 0.0)
    router.begin(first, prompt, 0.0).end()
    assert router.choose(prompt, [0, 0, 0], 1.0) == first
    router.begin(first, make_prompt(*range(1000, 1200)), 1.0)
    assert router.choose(prompt, [0, 0, 0], 1.0) != first


def test_what_waits_is_computed_with_time_and_forgotten_at_the_first_token() -> None:
    router, prompt, other = make_router(2), make_prompt(*range(100)), make_prompt(*range(500, 700))
    at = router.choose(other, [0, 0], 0.0)
    visit = router.begin(at, other, 0.0)
    visit.answer(2.0)  # about 10,000 tokens a second
    visit.end()
    router.begin(at, prompt, 10.0)
    later = make_prompt(*range(500, 700), *range(900, 990))
    assert router.choose(later, [0, 0], 10.0) == at  # 10,000 tokens wait, 20,000 are held
    router.begin(at, make_prompt(*range(2000, 2300)), 10.0)
    assert router.choose(later, [0, 0], 10.0) != at
    assert router.choose(later, [0, 0], 14.0) == at


@pytest.mark.parametrize("answers", [True, False])
def test_a_request_that_has_begun_its_answer_or_failed_does_not_wait(answers: bool) -> None:
    router, prompt, other = make_router(2), make_prompt(*range(100)), make_prompt(*range(500, 900))
    router.begin(0, prompt, 0.0).end()
    visit = router.begin(0, other, 1.0)
    assert router.choose(prompt, [0, 0], 1.0) == 1, "four times as much waits there"
    if answers:
        visit.answer(1.0)
    else:
        visit.end()
    assert router.choose(prompt, [0, 0], 1.0) == 0


def test_a_new_replica_does_not_hold_what_the_one_before_it_held() -> None:
    router, prompt, other = make_router(2), make_prompt(*range(100)), make_prompt(*range(500, 510))
    router.begin(0, prompt, 0.0).end()
    router.begin(1, other, 0.0).end()
    router.set_replicas(["new", "r1"])
    assert router._caches.find(prompt) == {}
    assert list(router._caches.find(other)) == [1]


def test_only_the_nearest_replicas_with_room_are_chosen() -> None:
    router, prompt = make_router(), make_prompt(*range(100))
    router.begin(0, prompt, 0.0).end()
    assert router.choose(prompt, [FARTHER, 3, FARTHER], 1.0) == 1
    assert router.choose(prompt, [FULL, FULL, FARTHER], 1.0) == 2
    assert router.choose(prompt, [FULL, FULL, FULL], 1.0) == -1


def test_replicas_that_stay_keep_what_they_hold() -> None:
    router, prompt = make_router(), make_prompt(*range(100))
    visit = router.begin(1, prompt, 0.0)
    router.set_replicas(["new", "r1"])
    visit.answer(1.0)
    visit.end()
    assert router.choose(prompt, [0, 0], 2.0) == 1


def test_a_replica_gets_fewer_prompts_while_others_use_it() -> None:
    router = CacheRouter()
    router.set_replicas(["a", "b"])
    router.tell("a", 30, None)
    router.tell("gone", 30, None)
    prompt = read({"model": "m", "messages": [SYSTEM, FIRST]})
    for at in range(3):
        assert router.choose(prompt, [0, 0], at) == 1
    visit = router.begin(1, prompt, 3)
    router.tell("a", 0, None)
    router.tell("b", 1, None)  # the request of this gateway counts once
    visit.end()
    assert router.choose(prompt, [0, 0], 4) == 1  # it holds the prompt


def test_a_cache_is_as_large_as_its_engine_tells() -> None:
    router = CacheRouter()
    router.set_replicas(["a", "b"])
    prompts = [
        read({"model": "m", "messages": [{"role": "user", "content": f"{at} " * 4000}]})
        for at in range(9)
    ]
    for prompt in prompts:
        router.begin(0, prompt, 0).end()
    router.tell("a", 0, 3 * prompts[0].tokens)
    held = router._caches
    assert [bool(held.find(each)) for each in prompts][:5] == [False] * 5
    assert all(held.find(each)[0] > prompts[0].tokens // 2 for each in prompts[6:])
    router.begin(0, prompts[0], 1).end()
    assert held.find(prompts[6]).get(0, 0) < prompts[6].tokens // 2
    router.set_replicas(["b"])
    router.set_replicas(["b", "a"])  # another replica with this name: its engine has not told yet
    for prompt in prompts:
        router.begin(1, prompt, 2).end()
    assert all(held.find(each) for each in prompts)


VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="1000"} 1.0
"""
SGLANG = """\
sglang:num_running_reqs{model_name="m",tp_rank="0"} 4.0
sglang:num_running_reqs{model_name="m",tp_rank="1"} 4.0
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 1.0
sglang:max_total_num_tokens{model_name="m",tp_rank="0"} 471258.0
sglang:max_total_num_tokens{model_name="m",tp_rank="1"} 471258.0
"""


@pytest.mark.parametrize(
    ("text", "requests", "tokens"),
    [
        (VLLM, 6, 32_000),
        (SGLANG, 5, 471_258),
        (VLLM.replace('"1000"', '"None"'), 6, None),
        (VLLM.replace('block_size="16"', 'kv_cache_size_tokens="10576"'), 6, 21_152),
        ("llamacpp:requests_processing 2\nllamacpp:requests_deferred 1\n", 3, None),
        ("vllm:num_requests_running 1e300\nvllm:num_requests_waiting NaN\n", 100_000, None),
        ("vllm:num_requests_running -1\nvllm:num_requests_waiting 1\n", 1, None),
        (SGLANG.replace("471258.0", "1"), 5, None),
        (SGLANG.replace("471258.0", "1e99"), 5, None),
    ],
)
def test_engines_tell_their_requests_and_caches(
    text: str, requests: int, tokens: int | None
) -> None:
    assert read_metrics(text.encode()) == EngineState(requests=requests, cache_tokens=tokens)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\x00" * 10000,
        b"<html>",
        b"vllm:num_requests_running",
        b"vllm:num_requests_running{ 1\n",
        b"vllm:num_requests_running +-e\n",
        b"x_vllm:num_requests_running 4\n",
    ],
)
def test_an_engine_that_tells_nothing_is_not_guessed(text: bytes) -> None:
    assert read_metrics(text) is None


def test_a_hostile_engine_takes_little_time_of_the_gateway() -> None:
    told = VLLM.encode()
    filler = b"# " + b"x" * 100 + b"\n"
    late = told + filler * (1 << 14) + b"vllm:num_requests_running 7777\n"
    assert read_metrics(late) == read_metrics(told), "only the first MiB is read"
    cut = filler * (1 << 14) + told
    assert read_metrics(cut) is None
    # a long word is passed over at once, instead of being searched from each of its letters
    assert _LABEL.findall(b"a" * 4000 + b'="1",engine="2"') == [(b"engine", b"2")]


def test_gateways_agree_about_a_conversation_that_some_do_not_know() -> None:
    chosen = set()
    for number in range(60):
        first, second = CacheRouter(100_000, shared=True), CacheRouter(100_000, shared=True)
        for each in (first, second):
            each.set_replicas([f"r{name}" for name in range(5)])
        opening = number * 7919
        turn = Prompt(range(1000, 1010), BLOCK_ENDS, 1000, opening)
        at = first.choose(turn, [0] * 5, 0.0)
        first.begin(at, turn, 0.0)
        second.begin((at + 1) % 5, make_prompt(1, 2), 0.0)
        assert second.choose(turn, [0] * 5, 1.0) == at
        chosen.add(at)
    assert chosen == set(range(5))


TERMS = AdapterTerms(api="vllm", sources=dict.fromkeys("abcdef", "/x"), slots=2)
HERE = ReplicaAddress(id="r", host="127.0.0.1", port=1)


def make_adapters(*names: str) -> list[ReplicaAdapters]:
    """Replicas, each with the adapters of a word, the least recently used first."""
    made = [ReplicaAdapters(TERMS, HERE, LoadTimes()) for _ in names]
    for each, word in zip(made, names, strict=True):
        each.loaded = dict.fromkeys(word, "/x")
        each.used_at = {name: float(at) for at, name in enumerate(word)}
    return made


def choose_for(adapter: str, replicas: list[ReplicaAdapters], loads: list[int]) -> int:
    router = CacheRouter()
    router.set_replicas([f"r{at}" for at in range(len(replicas))])
    prompt = Prompt((), (), 1, 7, adapter)
    for at, load in enumerate(loads):
        for _ in range(load % FULL):
            router.begin(at, prompt, 0.0).answer(0.0)
    return router.choose(prompt, loads, 10.0, count_waits(replicas, adapter, 10.0))


def test_a_request_goes_to_the_replica_that_has_its_adapter() -> None:
    assert choose_for("c", make_adapters("ab", "cd", "ef"), [0, 0, 0]) == 1
    assert choose_for("c", make_adapters("ab", "cd", ""), [0, 10, 0]) == 1, "a load costs more"
    assert choose_for("c", make_adapters("ab", "cd", ""), [0, FULL, 0]) == 2, "a free slot"


def test_the_adapter_that_was_not_used_for_longest_makes_room() -> None:
    replicas = make_adapters("ab", "cd", "ef")
    replicas[1].used_at = {"c": -50.0, "d": 1.0}
    assert choose_for("x", replicas, [0, 0, 0]) == 1
    assert replicas[1].find_victim() == "c"
    replicas[1].begin("c", 9.0)
    assert replicas[1].find_victim() == "d", "c is used"
    replicas[1].begin("d", 9.5)
    replicas[1].end("d")
    assert replicas[1].find_victim() == "d", "c is still used, though d was used later"
    replicas[1].loaded = {"gone": "/x", **replicas[1].loaded}
    replicas[1].used_at["gone"] = 9.0
    assert replicas[1].find_victim() == "gone", "the service does not have it any longer"


def test_hot_adapters_get_copies_earlier_than_cold_ones() -> None:
    for users, found in ((1, 0), (20, 1)):
        replicas = make_adapters("ab", "cd")
        for _ in range(users):
            replicas[0].begin("a", 9.0)
        assert choose_for("a", replicas, [20, 0]) == found


def test_requests_for_an_adapter_that_is_being_loaded_go_there() -> None:
    replicas = make_adapters("", "")
    replicas[1]._loading["a"] = 9.5
    replicas[1].begin("a", 9.5)
    assert choose_for("a", replicas, [0, 3]) == 1


def test_a_slot_is_freed_for_a_request_when_all_adapters_are_in_use() -> None:
    (replica,) = make_adapters("ab")
    for name in "aab":
        replica.begin(name, 9.0)
    assert replica.takes("a")
    assert not replica.takes("c")
    replica.make_way()
    assert (replica.takes("a"), replica.takes("b")) == (True, False), "b leaves"
    replica.end("b")
    assert replica.takes("c")
    assert replica.takes("b")


def test_a_replica_that_closes_a_connection_is_asked_what_it_has() -> None:
    """SGLang answers a stream for an adapter that is not loaded with an error in the stream."""
    route = ServiceRoute(name="s")
    owner: Any = SimpleNamespace(route=route)
    pool = ReplicaPool(HERE, owner, ReplicaWork(KeptCounts()))
    (adapters,) = make_adapters("ab")
    pool.state = state = ModelReplica(pool)
    state.adapters = adapters
    assert adapters.is_ready("a")
    connection = UpstreamConnection(pool)
    pool._idle.append(connection)
    connection.connection_lost(None)
    assert adapters.holds("a")
    assert not adapters.is_ready("a")


def test_few_requests_pass_one_that_needs_a_load() -> None:
    (replica,) = make_adapters("ab")
    first, *others = (Asked(name) for name in "cdabababab")
    chosen = []
    while others:
        found = choose_waiting(iter([first, *others]), replica, ask)
        assert found is not None
        chosen.append(found.adapter)
        if found is first:
            break
        others.remove(found)
    assert chosen == ["a", "c"]
    assert choose_waiting(iter([]), replica, ask) is None


@dataclass
class Asked:
    adapter: str
    passed: int = 0


def ask(request: Asked) -> Asked:
    return request


TASK = "resources: {gpu: H100}\nservice:\n"
ENGINE = TASK + "  engine: vllm\n  model: meta-llama/Llama-3.1-8B-Instruct\n"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (ENGINE, RoutingRule()),
        (ENGINE + "  routing: load\n", None),
        (ENGINE + "  routing: {cache_tokens: 400000}\n", RoutingRule(cache_tokens=400_000)),
        (
            ENGINE + "  routing: {by: header, header: X-Tenant}\n",
            RoutingRule(by=RoutingKind.HEADER, header="X-Tenant"),
        ),
        ("run: serve\n" + TASK + "  port: 80\n", None),
        ("run: serve\n" + TASK + "  routing: cache\n", RoutingRule()),
    ],
)
def test_engines_of_language_models_are_routed_by_cache(
    text: str, found: RoutingRule | None
) -> None:
    service = parse_task(text, options=ReadOptions(serves=True)).service
    assert service is not None
    assert service.routing == found
