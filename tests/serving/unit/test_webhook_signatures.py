"""Signatures of webhooks: the examples that the senders publish, and requests that are refused."""

import hmac
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import pytest

from cavvy.capabilities.serving.decide.webhook_calls import TOLERANCE, sign_standard, verify
from cavvy.domain.services import WebhookSignature

STANDARD, GITHUB = WebhookSignature.STANDARD, WebhookSignature.GITHUB
SLACK, STRIPE = WebhookSignature.SLACK, WebhookSignature.STRIPE
# libraries/javascript/src/webhook.test.ts of standard-webhooks/standard-webhooks, read 2026-11-24
KEY = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
SIGNED_AT = datetime.fromtimestamp(1614265330, UTC)
BODY = b'{"test": 2432232314}'
HEADERS = {
    "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
    "webhook-timestamp": "1614265330",
    "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
}
# https://docs.github.com/en/webhooks/using-webhooks/validating-webhook-deliveries
HUB = "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"
# https://docs.slack.dev/authentication/verifying-requests-from-slack
SLACK_AT = datetime.fromtimestamp(1531420618, UTC)
SLACK_BODY = (
    b"token=xyzz0WbapA4vBCDEFasx0q6G&team_id=T1DC2JH3J&team_domain=testteamnow"
    b"&channel_id=G8PSS9T3V&channel_name=foobar&user_id=U2CERLKJA&user_name=roadrunner"
    b"&command=%2Fwebhook-collect&text=&response_url=https%3A%2F%2Fhooks.slack.com%2Fcommands"
    b"%2FT1DC2JH3J%2F397700885554%2F96rGlfmibIGlgcZRskXaIFfN"
    b"&trigger_id=398738663015.47445629121.803a0bc887a14d10d2c447fce8b6703c"
)
SLACK_HEADERS = {
    "x-slack-request-timestamp": "1531420618",
    "x-slack-signature": "v0=a2114d57b48eac39b9ad189dd8316235a7b4a8d21a10bd27519666489c69b503",
}


def test_the_published_examples_are_accepted() -> None:
    found = verify(STANDARD, KEY, HEADERS, BODY, SIGNED_AT)
    assert found is not None
    assert found.id == HEADERS["webhook-id"]
    assert sign_standard(KEY, HEADERS["webhook-id"], SIGNED_AT, BODY) == HEADERS
    everybody = "It's a Secret to Everybody"
    assert verify(GITHUB, everybody, {"x-hub-signature-256": HUB}, b"Hello, World!", SIGNED_AT)
    secret = "8f742231b10e8888abcd99yyyzzz85a5"
    assert verify(SLACK, secret, SLACK_HEADERS, SLACK_BODY, SLACK_AT)
    later = SLACK_AT + TOLERANCE + timedelta(seconds=1)
    assert verify(SLACK, secret, SLACK_HEADERS, SLACK_BODY, later) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"webhook-id": "other"},
        {"webhook-id": ""},
        {"webhook-timestamp": "1614265331"},
        {"webhook-timestamp": "hello"},
        {"webhook-timestamp": "-1"},
        {"webhook-timestamp": "\u0661"},
        {"webhook-signature": ""},
        {"webhook-signature": "v1,"},
        {"webhook-signature": "v1,g0hM9SsE"},
        {"webhook-signature": "v1a" + HEADERS["webhook-signature"][2:]},
        {"webhook-signature": "v1,\xe9"},
    ],
)
def test_a_changed_request_is_refused(changed: Mapping[str, str]) -> None:
    assert verify(STANDARD, KEY, {**HEADERS, **changed}, BODY, SIGNED_AT) is None
    assert verify(STANDARD, KEY, HEADERS, BODY + b" ", SIGNED_AT) is None


def test_old_and_early_requests_are_refused() -> None:
    for sign in (-1, 1):
        near, far = TOLERANCE * sign, (TOLERANCE + timedelta(seconds=1)) * sign
        assert verify(STANDARD, KEY, HEADERS, BODY, SIGNED_AT + near)
        assert verify(STANDARD, KEY, HEADERS, BODY, SIGNED_AT + far) is None


def test_one_of_several_signatures_is_enough_while_a_secret_changes() -> None:
    both = f"v1,AAAA v2,AAAA {HEADERS['webhook-signature']}"
    assert verify(STANDARD, KEY, {**HEADERS, "webhook-signature": both}, BODY, SIGNED_AT)


@pytest.mark.parametrize("secret", ["", "short", "whsec_", "whsec_AAAA"])
@pytest.mark.parametrize("kind", list(WebhookSignature))
def test_nothing_is_signed_with_an_empty_or_short_secret(
    kind: WebhookSignature, secret: str
) -> None:
    made = hmac.digest(secret.encode(), BODY, "sha256").hex()
    headers = {
        **sign_standard(secret, "a", SIGNED_AT, BODY),
        "x-hub-signature-256": f"sha256={made}",
        "stripe-signature": f"t=1614265330,v1={made}",
        "x-slack-signature": f"v0={made}",
        "x-slack-request-timestamp": "1614265330",
    }
    if kind is GITHUB and len(secret) >= 8:
        return  # ten characters are a secret for GitHub
    assert verify(kind, secret, headers, BODY, SIGNED_AT) is None
    assert verify(kind, KEY, {}, BODY, SIGNED_AT) is None


def test_a_delivery_is_identified_by_what_is_signed() -> None:
    def stripe(body: bytes, stamp: str = "1614265330") -> str | None:
        made = hmac.digest(KEY.encode(), stamp.encode() + b"." + body, "sha256").hex()
        headers = {"stripe-signature": f"t={stamp},v1={made},v0=x"}
        found = verify(STRIPE, KEY, headers, body, SIGNED_AT)
        return found and found.id

    assert stripe(b'{"id": "evt_1", "pending_webhooks": 2}') == "evt_1"
    assert stripe(b"[1]") != stripe(b"[2]")
    assert stripe(b"[1]") == stripe(b"[1]", "1614265331"), "it was sent again"
    assert stripe(b"[1]", "1") is None
    everybody, headers = "It's a Secret to Everybody", {"x-hub-signature-256": HUB}
    ids = {
        verify(
            GITHUB, everybody, {**headers, "x-github-delivery": each}, b"Hello, World!", SIGNED_AT
        )
        for each in ("one", "forged")
    }
    assert len(ids) == 1, "GitHub does not sign the ID in its header"
