"""How a terminal gets an ID token, from a provider on this machine that plays its part."""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.issuer import DISCOVERY, Issuer, IssuerAnswer, run_issuer

from cavvy.client import ApiError
from cavvy.client.device_flow import find_ci_token, sign_in_by_device

BEGUN = {
    "device_code": "secret",
    "user_code": "AB-CD",
    "verification_uri": "https://login.example.com/device",
    "expires_in": 600,
}


@pytest.fixture(scope="module")
def running_issuer() -> Iterator[Issuer]:
    with run_issuer() as issuer:
        yield issuer


@pytest.fixture
def issuer(running_issuer: Issuer) -> Issuer:
    running_issuer.restore()
    device, token = (f"{running_issuer.url}/{name}" for name in ("device", "token"))
    running_issuer.given = {
        DISCOVERY: running_issuer.describe(
            device_authorization_endpoint=device, token_endpoint=token, scopes_supported=["email"]
        ),
        "/device": IssuerAnswer.of(BEGUN),
    }
    return running_issuer


class Person:
    """Sees what the terminal shows. `answers` are the provider's, one for each question."""

    def __init__(self, issuer: Issuer, *answers: dict[str, Any] | int) -> None:
        self._issuer = issuer
        self._answers = list(answers)
        self.seen: list[str] = []
        self.waits: list[float] = []

    def show(self, url: str, code: str) -> None:
        self.seen += [url, code]

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        self._issuer.given["/token"] = (
            IssuerAnswer(b"busy", answer)
            if isinstance(answer, int)
            else IssuerAnswer.of(answer, 400 if "error" in answer else 200)
        )

    def sign_in(self) -> str:
        return sign_in_by_device(self._issuer.url, "cavvy", self.show, self.wait)

    def fail(self) -> str:
        with pytest.raises(ApiError) as caught:
            self.sign_in()
        assert caught.value.code == "sign-in-refused"
        return caught.value.message


PENDING, SLOWER = {"error": "authorization_pending"}, {"error": "slow_down"}
DONE = {"id_token": "a.b.c", "access_token": "x"}


def test_the_terminal_asks_as_often_as_the_provider_permits(issuer: Issuer) -> None:
    person = Person(issuer, PENDING, SLOWER, 503, DONE)
    assert person.sign_in() == "a.b.c"
    assert person.seen == ["https://login.example.com/device", "AB-CD"]
    assert person.waits == [5, 5, 10, 20]
    assert issuer.forms["/device"] == {"client_id": "cavvy", "scope": "openid email"}
    assert issuer.forms["/token"]["device_code"] == "secret"


def test_a_sign_in_ends_where_the_provider_says_so(issuer: Issuer) -> None:
    assert "was refused" in Person(issuer, PENDING, {"error": "access_denied"}).fail()
    assert "too long" in Person(issuer, PENDING, {"error": "expired_token"}).fail()
    assert "invalid_client" in Person(issuer, {"error": "invalid_client"}).fail()
    assert "no error was reported" in Person(issuer, {"access_token": "x"}).fail()
    slow = Person(issuer, PENDING)
    assert "too long" in slow.fail()
    assert sum(slow.waits) == 600


@pytest.mark.parametrize(
    "changes",
    [
        {"user_code": None},
        {"user_code": "\x1b[2J"},
        {"verification_uri": "https://x\n"},
        {"device_code": 5},
        {"expires_in": "soon"},
        {"expires_in": 0},
        {"interval": 0},
        {"interval": -5},
        {"interval": 1e9},
    ],
)
def test_an_answer_that_a_terminal_cannot_use_is_refused(
    issuer: Issuer, changes: dict[str, Any]
) -> None:
    issuer.given["/device"] = IssuerAnswer.of({**BEGUN, **changes})
    person = Person(issuer, DONE)
    assert "did not start a sign-in" in person.fail()
    assert person.seen == []


def test_a_provider_without_the_flow_or_without_tls_is_refused(issuer: Issuer) -> None:
    issuer.given[DISCOVERY] = issuer.describe()
    assert "does not offer the device flow" in Person(issuer, DONE).fail()
    issuer.given[DISCOVERY] = issuer.describe(
        device_authorization_endpoint="http://login.example.com/d", token_endpoint="https://x"
    )
    assert "does not begin with https://" in Person(issuer, DONE).fail()
    issuer.given[DISCOVERY] = IssuerAnswer(b"[]")
    assert "JSON object" in Person(issuer, DONE).fail()


def test_a_job_finds_its_own_id_token(issuer: Issuer) -> None:
    assert find_ci_token({}, "https://cavvy.example.com") is None
    assert find_ci_token({"CAVVY_ID_TOKEN": " a.b.c\n"}, "x") == "a.b.c"
    github = {
        "ACTIONS_ID_TOKEN_REQUEST_URL": f"{issuer.url}/actions?v=1",
        "ACTIONS_ID_TOKEN_REQUEST_TOKEN": "of the job",
    }
    asked = "/actions?v=1&audience=https%3A%2F%2Fcavvy.example.com"
    issuer.given[asked] = IssuerAnswer.of({"value": "a.b.c"})
    assert find_ci_token(github, "https://cavvy.example.com") == "a.b.c"
    issuer.given[asked] = IssuerAnswer.of({})
    with pytest.raises(ApiError, match="did not issue an ID token"):
        find_ci_token(github, "https://cavvy.example.com")
