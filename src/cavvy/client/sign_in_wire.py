"""Request and response types of the sign-in routes, and client functions that call these routes."""

from datetime import datetime

from msgspec import field
from msgspec.json import encode

from cavvy.client.answers import read_answer
from cavvy.client.client import ApiClient
from cavvy.client.paths import segment
from cavvy.client.wire import Answer, Ask


class SignInWay(Answer, frozen=True, kw_only=True):
    """An identity provider with which people sign in from terminals, by the device flow of RFC
    8628.
    """

    name: str
    issuer: str
    client_id: str


class SignInAsk(Ask, frozen=True, kw_only=True):
    """An ID token of an issuer that the server trusts."""

    id_token: str


class SignInMade(Answer, frozen=True, kw_only=True):
    """A token of an account."""

    token: str
    account: str
    expires_at: datetime


class GroupRoleAsk(Ask, frozen=True, kw_only=True):
    """The role that members of a group have in a project; the project "" is the installation."""

    group: str
    project: str
    role: str


class TrustAsk(Ask, frozen=True, kw_only=True):
    """Makes the server trust an issuer's ID tokens. Either `account` or `account_claim` is given.
    `accounts` is "create" or "existing". If `replace` is set, an existing trust with the same name
    is replaced.
    """

    name: str
    issuer: str
    audience: str
    claims: dict[str, str] = field(default_factory=dict)
    account: str = ""
    account_claim: str = ""
    accounts: str = "create"
    groups_claim: str = "groups"
    groups: list[GroupRoleAsk] = field(default_factory=list)
    scopes: list[str] = field(default_factory=list)
    project: str | None = None
    lifetime_s: int = 3600
    client_id: str = ""
    replace: bool = False


class GroupRoleView(Answer, frozen=True, kw_only=True):
    group: str
    project: str
    role: str


class TrustView(Answer, frozen=True, kw_only=True):
    """A trust, by which the server accepts an issuer's ID tokens."""

    name: str
    issuer: str
    audience: str
    claims: dict[str, str]
    account: str
    account_claim: str
    accounts: str
    groups_claim: str
    groups: list[GroupRoleView]
    scopes: list[str]
    project: str | None
    lifetime_s: int
    client_id: str


def list_ways(client: ApiClient) -> list[SignInWay]:
    return read_answer(client.send("GET", "/v1/sign-in"), list[SignInWay])


def sign_in(client: ApiClient, id_token: str) -> SignInMade:
    """Exchange an ID token for a token of the server. Each ID token can be exchanged only once.
    Raises ApiError `sign-in-refused`."""
    answer = client.send("POST", "/v1/sign-in", encode(SignInAsk(id_token=id_token)))
    return read_answer(answer, SignInMade)


def list_trusts(client: ApiClient) -> list[TrustView]:
    return client.ask("/v1/trusts", list[TrustView])


def add_trust(client: ApiClient, ask: TrustAsk) -> None:
    """Add a trust. Raises ApiError `name-taken`, `account-not-found`, `invalid-request`."""
    client.call("POST", "/v1/trusts", encode(ask), retry=False)


def remove_trust(client: ApiClient, name: str) -> None:
    """Remove a trust. Raises ApiError `trust-not-found`."""
    client.call("DELETE", f"/v1/trusts/{segment('trust', name)}", retry=False)
