"""The tokens of gangs, and those that are kept after they were checked."""

import tracemalloc

import pytest
from starlette.requests import Request

from cavvy.api.errors import ApiProblem
from cavvy.api.tokens import GangTokens, make_token


def show(token: str) -> Request:
    return Request({"type": "http", "gang_token": token})


def test_a_token_is_accepted_for_its_gang_only_also_when_it_was_checked_before() -> None:
    tokens = GangTokens(b"k" * 32)
    for _ in range(2):
        tokens.check(show(tokens.of("a")), "a")
        with pytest.raises(ApiProblem, match="another gang"):
            tokens.check(show(tokens.of("a")), "b")
        with pytest.raises(ApiProblem, match="another gang"):
            tokens.check(show("wrong"), "a")


def test_names_of_gangs_from_strangers_are_not_kept() -> None:
    tokens = GangTokens(b"k" * 32)
    tracemalloc.start()
    try:
        for number in range(32):
            with pytest.raises(ApiProblem):
                tokens.check(show("wrong"), f"{number}" * 300_000)
        assert tracemalloc.get_traced_memory()[0] < 5_000_000
    finally:
        tracemalloc.stop()


def test_new_tokens_and_keys_are_one_word_of_256_bits() -> None:
    """A double click, and a pattern such as \\w+, selects the whole."""
    for prefix in ("cavvy_", "cavvysvc_"):
        made = {make_token(prefix) for _ in range(50)}
        assert all(each.startswith(prefix) for each in made)
        assert len(made) == 50
        for each in made:
            secret = each[-43:]
            assert secret.isalnum()
            assert secret.isascii()
            assert 62 ** len(secret) > 2**256
