"""The client's methods for accounts, tokens, projects and roles."""

from cavvy.client import account_wire as wire
from cavvy.client.client import ApiClient
from cavvy.client.paths import project_path, query, segment


class AccountClient:
    """Manages the accounts, tokens, projects and roles of a server. The object uses the connection
    of an `ApiClient`.
    """

    def __init__(self, client: ApiClient) -> None:
        self._client = client

    def whoami(self) -> wire.WhoAmIView:
        """Return the caller's identity on the server."""
        return self._client.ask("/v1/whoami", wire.WhoAmIView)

    def accounts(self) -> list[wire.AccountView]:
        return self._client.ask("/v1/accounts", list[wire.AccountView])

    def add_account(self, name: str, kind: str) -> wire.AccountView:
        """Add an account. Raises ApiError `name-taken`."""
        ask = wire.AccountAsk(name=name, kind=kind)
        return self._client.ask("/v1/accounts", wire.AccountView, ask, retry=False)

    def remove_account(self, name: str) -> None:
        """Remove an account with its tokens and roles. Raises ApiError `account-not-found`."""
        self._change("DELETE", f"/v1/accounts/{segment('account', name)}")

    def disable_account(self, name: str, *, disabled: bool) -> None:
        """Disable an account, or enable it again. Raises ApiError `account-not-found`."""
        method = "PUT" if disabled else "DELETE"
        self._change(method, f"/v1/accounts/{segment('account', name)}/disabled")

    def tokens(self, account: str | None = None) -> list[wire.TokenView]:
        return self._client.ask(f"/v1/tokens{query(account=account)}", list[wire.TokenView])

    def create_token(self, ask: wire.TokenAsk) -> wire.TokenMade:
        """Create a token. Raises ApiError `account-not-found`, `role-needed`, `scope-needed`."""
        return self._client.ask("/v1/tokens", wire.TokenMade, ask, retry=False)

    def revoke_token(self, token_id: str) -> None:
        """Revoke a token. Raises ApiError `token-not-found`."""
        self._change("DELETE", f"/v1/tokens/{segment('token', token_id)}")

    def projects(self) -> list[wire.ProjectView]:
        return self._client.ask("/v1/projects", list[wire.ProjectView])

    def create_project(self, name: str, parent: str | None) -> wire.ProjectView:
        """Create a project. Raises ApiError `name-taken`, `project-not-found`."""
        ask = wire.ProjectAsk(name=name, parent=parent)
        return self._client.ask("/v1/projects", wire.ProjectView, ask, retry=False)

    def move_project(self, name: str, ask: wire.ProjectMove) -> wire.ProjectView:
        """Move a project. Raises ApiError `policy-lifted`, `project-budgets`, `project-loop`,
        `project-not-found`, `project-archived`.
        """
        return self._client.ask(f"{project_path(name)}/move", wire.ProjectView, ask, retry=False)

    def archive_project(self, name: str, *, stop: bool = False) -> wire.ProjectView:
        """Archive a project. Raises ApiError `project-busy`, `project-not-found`."""
        ask = wire.ProjectArchiveAsk(stop=stop)
        return self._client.ask(f"{project_path(name)}/archive", wire.ProjectView, ask, retry=False)

    def unarchive_project(self, name: str) -> None:
        """Unarchive a project. Raises ApiError `project-archived` if the project's parent is
        archived."""
        self._change("DELETE", f"{project_path(name)}/archive")

    def roles(self, project: str | None) -> list[wire.RoleView]:
        """Return the roles in a project or, if `project` is None, the roles that apply in all
        projects.
        """
        return self._client.ask(_roles_path(project), list[wire.RoleView])

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
