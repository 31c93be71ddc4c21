"""The body's model is found, in a bounded amount of memory."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cavvy.capabilities.language_models.model_route import ModelRoutes, read_model
from cavvy.capabilities.serving.gateway.config import GatewayLimits
from cavvy.capabilities.serving.gateway.heads import NO_LENGTH


@example("", "n", b"", False)
@given(st.text(max_size=20), st.text(max_size=9), st.binary(max_size=20), st.booleans())
def test_the_model_is_found_in_the_beginning_as_in_the_whole(
    model: str, key: str, rest: bytes, nested: bool
) -> None:
    other: object = [{"model": key}, {"x": '"model": "y"'}] if nested else {"model": key}
    body = json.dumps({"messages": other, f"m{key}": None, "model": model, "n": 1}).encode()
    assert read_model(body, True) == model
    assert read_model(body + rest, False) == model
    cut = body.rindex(b'"n"')  # the key may be "n", too
    assert read_model(body[:cut], False) == model
    assert read_model(json.dumps({"a": other}).encode(), False) is None


@pytest.mark.parametrize("start", [b'{"', b'{"model":"'])
@pytest.mark.parametrize("end", [b"", b"\\"])
def test_a_string_that_is_not_closed_is_read_once(start: bytes, end: bytes) -> None:
    """A search that began again at each of these quotation marks would take longer than any test
    may.
    """
    assert read_model(start + b'\\"' * 200_000 + end, False) is None


def test_bodies_without_a_model_hold_a_bounded_amount_of_memory() -> None:
    limits = GatewayLimits(hold_bytes=10, model_bytes=100)
    routes = ModelRoutes(lambda *_: None, limits, lambda *_: None)
    may_hold = routes.may_hold
    assert may_hold(50, NO_LENGTH), "a chunked body"
    assert may_hold(50, 100)
    assert not may_hold(50, 101), "the whole body would be too long"
    assert not may_hold(101, NO_LENGTH)
    routes.held_bytes = 1 << 30  # of many bodies
    assert not may_hold(50, 100)
    assert may_hold(9, 100), "each body may still name its model at its beginning"
