"""Request and response types of the routes for accounts, tokens, projects and roles, for signing
in, for projects' provider credentials, for encryption keys and for the audit log; and
client functions that call these routes.
"""

from collections.abc import Iterator
from datetime import datetime

from msgspec import field
from msgspec.json import encode

from cavvy.client.answers import read_answer
from cavvy.client.client import ApiClient
from cavvy.client.paths import project_path, query, segment
from cavvy.client.wire import Answer, Ask

_PAGE = 1000


class RoleView(Answer, frozen=True, kw_only=True):
    """A role of an account in a project. An empty `project` means the installation. If the role
    comes from a group of the account, `trust` is the name of the trust, and the role ends at
    `until`.
    """

    account: str
    project: str
    role: str
    trust: str = ""
    until: datetime | None = None


class WhoAmIView(Answer, frozen=True, kw_only=True):
    """The caller's identity on the server. `account` is null for the owner of the state folder.
    `roles` contains inherited roles; `scopes` and `within` are the limits of the token.
    """

    account: str | None
    token_id: str | None = None
    expires_at: datetime | None = None
    scopes: list[str] | None = None
    within: list[str] | None = None
    roles: list[RoleView]


class AccountAsk(Ask, frozen=True, kw_only=True):
    """A new account. `kind` is user or service."""

    name: str
    kind: str = "user"


class AccountView(Answer, frozen=True, kw_only=True):
    """An account of a person or a service."""

    name: str
    kind: str
    created_at: datetime
    disabled_at: datetime | None = None


class TokenAsk(Ask, frozen=True, kw_only=True):
    """A new token. If `account` is null, the token belongs to the caller's own account. Without
    `scopes`, the token has all permissions of its account. With `project`, the token is valid only
    for that project and its subprojects. Without `expires_s`, the token does not expire.
    """

    account: str | None = None
    label: str = ""
    scopes: list[str] = field(default_factory=list)
    project: str | None = None
    expires_s: int | None = None


class TokenView(Answer, frozen=True, kw_only=True):
    """A token without its secret."""

    id: str
    account: str
    label: str
    scopes: list[str]
    project: str | None
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None


class TokenMade(Answer, frozen=True, kw_only=True):
    """A new token. Only this answer contains the token's secret."""

    token: str
    view: TokenView


class ProjectAsk(Ask, frozen=True, kw_only=True):
    """A new project below `parent` or, if `parent` is null, at the top level."""

    name: str
    parent: str | None = None


class ProjectMove(Ask, frozen=True, kw_only=True):
    """Moves a project below `parent` or, if `parent` is null, to the top level. `lift_policies`
    permits the move even if policies of former parents no longer apply to the project.
    `accept_budgets` permits the move even if additional budgets count the project's spending after
    the move.
    """

    parent: str | None
    lift_policies: bool = False
    accept_budgets: bool = False


class ProjectArchiveAsk(Ask, frozen=True, kw_only=True):
    """Archives a project and its subprojects. If `stop` is set, the work in these projects is
    stopped.
    """

    stop: bool = False


class ProjectView(Answer, frozen=True, kw_only=True):
    """A project, and the caller's roles in it. `parent` is null if the project has no parent or the
    caller has no role in the parent.
    """

    name: str
    parent: str | None
    roles: list[str]
    archived_at: datetime | None = None


class AccountClient:
    """Manages the accounts, tokens, projects and roles of a server. The object uses the connection
    of an `ApiClient`.
    """

    def __init__(self, client: ApiClient) -> None:
        self._client = client

    def whoami(self) -> WhoAmIView:
        """Return the caller's identity on the server."""
        return self._client.ask("/v1/whoami", WhoAmIView)

    def accounts(self) -> list[AccountView]:
        return self._client.ask("/v1/accounts", list[AccountView])

    def add_account(self, name: str, kind: str) -> AccountView:
        """Add an account. Raises ApiError `name-taken`."""
        ask = AccountAsk(name=name, kind=kind)
        return self._client.ask("/v1/accounts", AccountView, ask, retry=False)

    def remove_account(self, name: str) -> None:
        """Remove an account with its tokens and roles. Raises ApiError `account-not-found`."""
        self._change("DELETE", f"/v1/accounts/{segment('account', name)}")

    def disable_account(self, name: str, *, disabled: bool) -> None:
        """Disable an account, or enable it again. Raises ApiError `account-not-found`."""
        method = "PUT" if disabled else "DELETE"
        self._change(method, f"/v1/accounts/{segment('account', name)}/disabled")

    def tokens(self, account: str | None = None) -> list[TokenView]:
        return self._client.ask(f"/v1/tokens{query(account=account)}", list[TokenView])

    def create_token(self, ask: TokenAsk) -> TokenMade:
        """Create a token. Raises ApiError `account-not-found`, `role-needed`, `scope-needed`."""
        return self._client.ask("/v1/tokens", TokenMade, ask, retry=False)

    def revoke_token(self, token_id: str) -> None:
        """Revoke a token. Raises ApiError `token-not-found`."""
        self._change("DELETE", f"/v1/tokens/{segment('token', token_id)}")

    def projects(self) -> list[ProjectView]:
        return self._client.ask("/v1/projects", list[ProjectView])

    def create_project(self, name: str, parent: str | None) -> ProjectView:
        """Create a project. Raises ApiError `name-taken`, `project-not-found`."""
        ask = ProjectAsk(name=name, parent=parent)
        return self._client.ask("/v1/projects", ProjectView, ask, retry=False)

    def move_project(self, name: str, ask: ProjectMove) -> ProjectView:
        """Move a project. Raises ApiError `policy-lifted`, `project-budgets`, `project-loop`,
        `project-not-found`, `project-archived`.
        """
        return self._client.ask(f"{project_path(name)}/move", ProjectView, ask, retry=False)

    def archive_project(self, name: str, *, stop: bool = False) -> ProjectView:
        """Archive a project. Raises ApiError `project-busy`, `project-not-found`."""
        ask = ProjectArchiveAsk(stop=stop)
        return self._client.ask(f"{project_path(name)}/archive", ProjectView, ask, retry=False)

    def unarchive_project(self, name: str) -> None:
        """Unarchive a project. Raises ApiError `project-archived` if the project's parent is
        archived."""
        self._change("DELETE", f"{project_path(name)}/archive")

    def roles(self, project: str | None) -> list[RoleView]:
        """Return the roles in a project or, if `project` is None, the roles that apply in all
        projects.
        """
        return self._client.ask(_roles_path(project), list[RoleView])

    def grant_role(self, account: str, role: str, project: str | None) -> None:
        """Grant a role. Raises ApiError `account-not-found`."""
        self._change("PUT", _role_path(account, role, project))

    def revoke_role(self, account: str, role: str, project: str | None) -> None:
        """Revoke a role. Raises ApiError `role-not-found`."""
        self._change("DELETE", _role_path(account, role, project))

    def _change(self, method: str, target: str) -> None:
        self._client.call(method, target, retry=False)


def _roles_path(project: str | None) -> str:
    return "/v1/roles" if project is None else f"{project_path(project)}/roles"


def _role_path(account: str, role: str, project: str | None) -> str:
    return f"{_roles_path(project)}/{segment('account', account)}/{segment('role', role)}"


class AuditLogRow(Answer, frozen=True, kw_only=True):
    """A record of the audit log. `text` is the whole record in JSON, and `hash` is the SHA-256 of
    `text`. All fields except `text` and `hash` are copies of fields in `text`.
    """

    number: int
    at: datetime
    account: str
    project: str
    outcome: str
    hash: str
    text: str


class AuditLogPage(Answer, frozen=True, kw_only=True):
    """One page of records of the audit log, ordered by number."""

    records: list[AuditLogRow]


def read_newest(client: ApiClient, limit: int, **filters: object) -> list[AuditLogRow]:
    """Return the newest records, ordered by number. `filters` become parameters of the request."""
    return _read(client, limit=limit, newest="true", **filters)


def read_all(client: ApiClient, **filters: object) -> Iterator[AuditLogRow]:
    """Yield all records, ordered by number. Filters are parameters of the route."""
    after = 0
    while page := _read(client, limit=_PAGE, after=after, **filters):
        yield from page
        after = page[-1].number


def _read(client: ApiClient, **parameters: object) -> list[AuditLogRow]:
    given = {name: value for name, value in parameters.items() if value is not None}
    return client.ask(f"/v1/audit-log{query(**given)}", AuditLogPage).records


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


class CredentialAsk(Ask, frozen=True, kw_only=True):
    """The provider's settings, and the contents of its key files, keyed by the name of the setting
    for each file.
    """

    settings: dict[str, str | int | float | bool] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)


class CredentialRow(Answer, frozen=True, kw_only=True):
    """A credential without its content, which the API never returns. `problem` is the reason why
    the credential cannot be used, or "".
    """

    provider: str
    updated_at: datetime
    problem: str


def list_credentials(client: ApiClient, project: str) -> list[CredentialRow]:
    return client.ask(f"{project_path(project)}/credentials", list[CredentialRow])


def put_credential(client: ApiClient, project: str, provider: str, ask: CredentialAsk) -> None:
    """Send a credential, which the server tests and then stores. Raises ApiError
    `credential-in-use`, `provider-refused`, `provider-unreachable`.
    """
    client.send("PUT", _credential_path(project, provider), encode(ask), wait_s=120)


def remove_credential(client: ApiClient, project: str, provider: str) -> None:
    """Remove a credential. Raises ApiError `credential-not-found`, `credential-in-use`."""
    client.send("DELETE", _credential_path(project, provider), wait_s=120)


def _credential_path(project: str, provider: str) -> str:
    return f"{project_path(project)}/credentials/{provider}"


class SecretKeyRow(Answer, frozen=True, kw_only=True):
    """A key that encrypts the data keys of secrets and files. `secrets` and `files` count the
    secrets and the files' data keys that the key protects. `place` is None if the server does not
    have the key. `id` is empty if the row counts secrets from an older version of Cavvy, which have
    no data key.
    """

    id: str
    place: str | None
    current: bool
    secrets: int
    files: int = 0


class UnreadableSecret(Answer, frozen=True, kw_only=True):
    """A secret that could not be decrypted."""

    project: str
    name: str
    reason: str


class RotationView(Answer, frozen=True, kw_only=True):
    """The result of a key rotation. `files` is the number of data keys that encrypt files."""

    id: str
    place: str
    encrypted: int
    files: int = 0
    unreadable: list[UnreadableSecret]


def list_keys(client: ApiClient) -> list[SecretKeyRow]:
    return client.ask("/v1/secret-keys", list[SecretKeyRow])


def rotate_key(client: ApiClient) -> RotationView:
    """Encrypt all secrets again. Raises ApiError `database-unusable`, `disk-full`."""
    return read_answer(client.send("POST", "/v1/secret-keys/rotate", wait_s=600), RotationView)
