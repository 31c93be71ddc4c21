"""Decides what a principal may do. A decision depends only on the roles of the principal, the
limits of its token, and the tree of projects. Because no decision depends on whether an object
exists, a refusal does not reveal this fact.

A principal is created once for each request, when the request arrives at the server. A new sign-in
method only needs to create a principal.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum

from cavvy.domain.accounts import (
    INSTALLATION,
    AccountCredential,
    AccountToken,
    Permission,
    Role,
    RoleBinding,
)
from cavvy.domain.values import Struct, field

_EVERYTHING = frozenset(Permission)
PERMISSIONS: Mapping[Role, frozenset[Permission]] = {
    Role.VIEWER: frozenset({Permission.VIEW, Permission.SPENDING}),
    Role.BILLING: frozenset({Permission.SPENDING}),
    Role.AUDITOR: frozenset({Permission.AUDIT}),
    Role.MEMBER: frozenset({Permission.VIEW, Permission.SPENDING, Permission.RUN}),
    Role.OPERATOR: _EVERYTHING - {Permission.MANAGE, Permission.AUDIT},
    Role.ADMIN: _EVERYTHING,
}
# the role with the fewest permissions that grants each permission, for messages
LEAST_ROLE: Mapping[Permission, Role] = {
    Permission.VIEW: Role.VIEWER,
    Permission.SPENDING: Role.BILLING,
    Permission.RUN: Role.MEMBER,
    Permission.OPERATE: Role.OPERATOR,
    Permission.AUDIT: Role.AUDITOR,
    Permission.MANAGE: Role.ADMIN,
}
_TOUCH_EVERY = timedelta(minutes=1)  # minimum time between two writes of a token's last use


class Verdict(StrEnum):
    """The result of a decision. If the result is HIDDEN, the answer to the request must be the same
    as for a project that does not exist.
    """

    ALLOWED = "allowed"
    HIDDEN = "hidden"
    ROLE_NEEDED = "role-needed"
    SCOPE_NEEDED = "scope-needed"


class TokenState(StrEnum):
    """Whether a token can be used."""

    VALID = "valid"
    EXPIRED = "expired"
    REVOKED = "revoked"
    DISABLED = "disabled"  # the token's account is disabled


class Principal(Struct, frozen=True, kw_only=True):
    """The sender of a request: the account, the token, and the address that the request comes from.

    `account` is None for the owner of the state folder, whose token is a file in that folder and
    who has all rights. `roles` are the roles in each project, including inherited roles; the key
    INSTALLATION has the roles that apply everywhere. `scopes` and `within` are the limits of the
    token: its permissions and its projects. `scopes` is None if the token has all permissions of
    its account, and `within` is None if the token is valid in all projects.
    """

    account: str | None
    token: AccountToken | None = None
    address: str = ""
    groups: tuple[str, ...] = ()
    roles: Mapping[str, frozenset[Role]] = field(default_factory=dict)
    scopes: frozenset[Permission] | None = None
    within: frozenset[str] | None = None

    @property
    def is_limited(self) -> bool:
        """Whether the token has fewer rights than its account."""
        return self.scopes is not None or self.within is not None


def make_owner(address: str = "") -> Principal:
    """Return the principal of requests with the token of the state folder."""
    everywhere = {INSTALLATION: frozenset({Role.ADMIN})}
    return Principal(account=None, address=address, roles=everywhere)


def make_principal(credential: AccountCredential, now: datetime, address: str = "") -> Principal:
    """Return the principal of requests with this token. The token must be valid."""
    token, parents = credential.token, credential.parents
    direct: dict[str, set[Role]] = {}
    for binding in list_current(credential.bindings, now):
        direct.setdefault(binding.project, set()).add(binding.role)
    known = [*parents, *direct]
    roles = {
        name: frozenset(role for each in list_line(name, parents) for role in direct.get(each, ()))
        for name in known
    }
    scopes = frozenset(Permission(each) for each in token.scopes) if token.scopes else None
    within = None
    if token.project is not None:
        within = list_below(token.project, parents)
    return Principal(
        account=credential.account.name,
        token=token,
        address=address,
        roles={name: found for name, found in roles.items() if found},
        scopes=scopes,
        within=within,
    )


def list_current(bindings: Sequence[RoleBinding], now: datetime) -> Sequence[RoleBinding]:
    """Return the role bindings that have not ended."""
    return [each for each in bindings if each.until is None or each.until > now]


def list_line(project: str, parents: Mapping[str, str | None]) -> Sequence[str]:
    """Return the project, the projects above it, and the installation. If the projects form a
    cycle, the list stops before the first project that it already contains.
    """
    line: dict[str, None] = {}
    above: str | None = project
    while above and above not in line:
        line[above] = None
        above = parents.get(above)
    return [*line, INSTALLATION]


def list_below(project: str, parents: Mapping[str, str | None]) -> frozenset[str]:
    """Return the project and all projects below it."""
    return frozenset({project, *(name for name in parents if project in list_line(name, parents))})


def judge_credential(credential: AccountCredential, now: datetime) -> TokenState:
    """Return whether the token can be used now."""
    token = credential.token
    if credential.account.disabled_at is not None:
        return TokenState.DISABLED
    if token.revoked_at is not None:
        return TokenState.REVOKED
    if token.expires_at is not None and token.expires_at <= now:
        return TokenState.EXPIRED
    return TokenState.VALID


def must_touch(token: AccountToken, now: datetime) -> bool:
    """Return whether to store the time of the token's current use."""
    return token.last_used_at is None or now - token.last_used_at >= _TOUCH_EVERY


def list_roles(principal: Principal, project: str) -> frozenset[Role]:
    """Return the principal's roles in a project, which need not exist."""
    everywhere = principal.roles.get(INSTALLATION, frozenset())
    return principal.roles.get(project, frozenset()) | everywhere


def decide(principal: Principal, permission: Permission, project: str) -> Verdict:
    """Return whether the principal has the permission in the project or, for INSTALLATION, in the
    whole installation. The installation itself is never HIDDEN.
    """
    roles = list_roles(principal, project)
    outside = principal.within is not None and project not in principal.within
    if project != INSTALLATION and (outside or not roles):
        return Verdict.HIDDEN
    if not any(permission in PERMISSIONS[role] for role in roles):
        return Verdict.ROLE_NEEDED
    if outside or (principal.scopes is not None and permission not in principal.scopes):
        return Verdict.SCOPE_NEEDED
    return Verdict.ALLOWED


def list_visible(principal: Principal, permission: Permission) -> frozenset[str] | None:
    """Return the projects in which the principal has the permission. None means that the principal
    has the permission in all projects, including projects that do not exist yet.
    """
    if decide(principal, permission, INSTALLATION) is Verdict.ALLOWED:
        return None
    known = {*principal.roles, *(principal.within or ())} - {INSTALLATION}
    return frozenset(
        name for name in known if decide(principal, permission, name) is Verdict.ALLOWED
    )
