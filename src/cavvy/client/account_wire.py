"""Request and response types of the routes for accounts, tokens, projects and roles."""

from datetime import datetime

from msgspec import field

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
