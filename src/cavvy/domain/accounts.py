"""Accounts of people and services, their tokens, the tree of projects, and the roles that accounts
have in projects."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum

from cavvy.domain.values import Struct

# The name of the installation in role bindings. A role there applies in every project.
INSTALLATION = ""


class AccountKind(StrEnum):
    """Whether an account belongs to a person or to a program, for example a CI system."""

    USER = "user"
    SERVICE = "service"


class Role(StrEnum):
    """The rights of an account in a project and in the projects below it. See
    `authorization.py`.
    """

    VIEWER = "viewer"
    MEMBER = "member"
    OPERATOR = "operator"
    ADMIN = "admin"
    BILLING = "billing"
    AUDITOR = "auditor"


class Permission(StrEnum):
    """A right that a request needs. Roles grant permissions, and the scopes of a token limit these
    permissions.
    """

    VIEW = "view"  # see jobs, logs, nodes and machines
    RUN = "run"  # submit jobs, change them, and reach their nodes
    SPENDING = "spending"  # see costs and bills
    OPERATE = "operate"  # set secrets, and remove all work of a project
    AUDIT = "audit"  # read the audit log
    MANAGE = "manage"  # create projects and grant roles; on the installation, also accounts


class Account(Struct, frozen=True, kw_only=True):
    """A person or a program that can be granted roles. An account cannot sign in while it is
    disabled.
    """

    name: str
    kind: AccountKind = AccountKind.USER
    created_at: datetime
    disabled_at: datetime | None = None


class AccountToken(Struct, frozen=True, kw_only=True):
    """A token of an account, without its secret. If `scopes` is empty, the token has all
    permissions of the account. With a `project`, the token is valid only for that project and the
    projects below it. `parent` is the token, of the same account, that was used to create this
    token. If `parent` becomes invalid, this token also becomes invalid.
    """

    id: str
    account: str
    label: str = ""
    scopes: tuple[str, ...] = ()
    project: str | None = None
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    last_used_at: datetime | None = None  # written at most once a minute
    parent: str | None = None


class Project(Struct, frozen=True, kw_only=True):
    """A project. Roles in the project `parent` also apply in this project. `parent` is None for a
    project directly below the installation. In an archived project, no new work can start. The
    projects below an archived project are archived, too.
    """

    name: str
    parent: str | None = None
    archived_at: datetime | None = None


class RoleBinding(Struct, frozen=True, kw_only=True):
    """An account's role in a project, or in all projects if `project` is INSTALLATION. If the
    account has the role because of a group at its identity provider, `trust` is the name of the
    trust in this provider, and the role ends at `until`.
    """

    account: str
    project: str
    role: Role
    trust: str = ""
    until: datetime | None = None


class AccountCredential(Struct, frozen=True, kw_only=True):
    """The facts that authorization needs for the requests with one token, read in one
    transaction."""

    token: AccountToken
    account: Account
    bindings: Sequence[RoleBinding]  # of this account
    parents: Mapping[str, str | None]  # each project -> its parent
