"""What a gateway counts of keys and tokens outlives it, and limits keys."""

from pathlib import Path

from cavvy.capabilities.serving.bills import KeyWork, merge_counts
from cavvy.capabilities.serving.gateway.client_keys import KeyLimit, make_limits
from cavvy.capabilities.serving.gateway.config import ClientKey
from cavvy.capabilities.serving.gateway.kept_counts import KeptCounts, read_work
from cavvy.domain.ledger import TokenUse, combine_tokens


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
