"""Request and response types of the routes for accounts, tokens, projects and roles."""

from datetime import datetime

from msgspec import field

from cavvy.client.client import ApiClient
from cavvy.client.paths import project_path, query, segment
from cavvy.client.wire import Answer, Ask


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
