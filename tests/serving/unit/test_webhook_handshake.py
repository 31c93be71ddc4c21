"""What a sender of events gets that asks for permission."""

import pytest

from cavvy.capabilities.serving.decide.webhook_calls import (
    ALLOWED_ORIGIN,
    ALLOWED_RATE,
    MOST_PER_MINUTE,
    grant,
)


@pytest.mark.parametrize(
    ("asked", "rate"), [(None, MOST_PER_MINUTE), ("120", 120), ("9999999", MOST_PER_MINUTE)]
)
def test_the_rate_is_bounded(asked: str | None, rate: int) -> None:
    headers = {"webhook-request-origin": "events.example.com"}
    if asked is not None:
        headers["webhook-request-rate"] = asked
    found = grant(headers)
    assert found == {ALLOWED_ORIGIN: "events.example.com", ALLOWED_RATE: str(rate)}


@pytest.mark.parametrize("origin", ["", "*", "a b", "a,b", "https://a.example", "a" * 254, "a..b"])
def test_a_request_without_a_sender_gets_no_permission(origin: str) -> None:
    assert grant({"webhook-request-origin": origin}) == {}


@pytest.mark.parametrize("rate", ["0", "-1", "many", "1.5", "", "\u0661", "9" * 30])
def test_a_rate_that_is_no_number_gets_no_permission(rate: str) -> None:
    assert grant({"webhook-request-origin": "a.example", "webhook-request-rate": rate}) == {}
