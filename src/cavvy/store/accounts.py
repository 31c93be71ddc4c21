"""Functions that read and write the rows of accounts, tokens, projects and roles, which the SQL
store calls in an open session; archived projects (`Store.archive`); trusted issuers, and sign-ins
with their ID tokens (`Store.sign_ins`)."""

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from typing import TypeVar

from cavvy.domain.accounts import (
    INSTALLATION,
    Account,
    AccountCredential,
    AccountKind,
    AccountToken,
    Project,
    RoleBinding,
)
from cavvy.domain.authorization import list_below
from cavvy.domain.jobs import JOB_ENDS, AttemptPhase
from cavvy.domain.policies import BoundPolicy, PolicyBook, ProjectPolicy
from cavvy.domain.trusts import AccountRule, IssuerTrust, SignIn
from cavvy.store.base import NameConflict, ProjectArchived, ProjectBusy, RowNotFound, SignInConflict
from cavvy.store.documents import decode_trust, encode, to_micros
from cavvy.store.drivers import DatabaseSession, RunTransaction
from cavvy.store.own_tables import list_named_tables, list_tables_of_projects
from cavvy.store.rows import POLICIES, RowCodec, insert_into

ACCOUNTS = RowCodec(Account, "accounts")
TOKENS = RowCodec(AccountToken, "tokens")
PROJECTS = RowCodec(Project, "projects")
BINDINGS = RowCodec(RoleBinding, "role_bindings", only=("account", "project", "role"))
GROUP_ROLES = RowCodec(RoleBinding, "group_roles")
_INSERT_TOKEN = insert_into("tokens", (*TOKENS.columns, "hash"))
_PUT_POLICY = insert_into(
    "project_policies",
    ("project", "document"),
    "ON CONFLICT (project) DO UPDATE SET document = excluded.document",
)
_OR_NOTHING = "ON CONFLICT DO NOTHING"
# the project and those above it; UNION ends at a project that was found before
_ABOVE = (
    f"WITH RECURSIVE line AS ({PROJECTS.select} WHERE name = ? UNION SELECT {{}} FROM projects p "
    "JOIN line l ON p.name = l.parent)"
).format(", ".join(f"p.{each}" for each in PROJECTS.columns))
_LINE = ", ".join(PROJECTS.columns)
# the same projects, and then the policies of the installation, of them, and of the project
_POLICIES_ABOVE = (
    f"{_ABOVE} SELECT {_LINE}, NULL AS document FROM line UNION ALL "
    f"SELECT project, {'NULL, ' * (len(PROJECTS.columns) - 1)}document FROM project_policies "
    "WHERE project IN (?, ?) OR project IN (SELECT name FROM line) "
    "OR project IN (SELECT parent FROM line)"
)
_DECODED = 4096  # rows
_make_project = lru_cache(_DECODED)(PROJECTS.make)
_make_policy = lru_cache(_DECODED)(POLICIES.make)
# tables whose rows show that a project without a row of its own is in use
_USES = (
    "jobs",
    "machines",
    "node_pools",
    "recipes",
    "secrets",
    "provider_credentials",
    "charges",
    "role_bindings",
    "group_roles",
)

# Each project is found in an index behind the one before, as there may be a million jobs.
_PROJECTS_OF_JOBS = (
    "WITH RECURSIVE p1(name) AS (SELECT (SELECT project FROM jobs ORDER BY project LIMIT 1) "
    "UNION ALL SELECT (SELECT project FROM jobs WHERE project > p1.name ORDER BY project LIMIT 1) "
    "FROM p1 WHERE name IS NOT NULL) SELECT name FROM p1 WHERE name IS NOT NULL"
)


def read_credential(session: DatabaseSession, digest: str) -> AccountCredential | None:
    """Return the token with this hash, its account, the account's roles, and the tree of
    projects."""
    row = session.run(f"{TOKENS.select} WHERE hash = ?", (digest,)).fetchone()
    if row is None:
        return None
    token = TOKENS.make(row)
    account = find_account(session, token.account)
    if account is None:  # the account was removed between the two statements
        return None
    return AccountCredential(
        token=token,
        account=account,
        bindings=_read_roles(session, "account = ?", (token.account,)),
        parents={project.name: project.parent for project in list_projects(session)},
    )


def list_projects(session: DatabaseSession) -> Sequence[Project]:
    return [*map(_make_project, session.run(f"{PROJECTS.select} ORDER BY name").fetchall())]


def read_policies(session: DatabaseSession) -> PolicyBook:
    """Return the policies of all projects. Every pass over the queue reads them, so rows that were
    decoded before are not decoded again."""
    rows = session.run(f"{POLICIES.select} ORDER BY project").fetchall()
    return PolicyBook(map(_make_policy, rows), list_projects(session))


def read_policies_of(session: DatabaseSession, project: str) -> Sequence[BoundPolicy]:
    """Return what `PolicyBook.find` finds in the book of all policies."""
    rows = session.run(_POLICIES_ABOVE, (project, INSTALLATION, project)).fetchall()
    above = [_make_project(row[:-1]) for row in rows if row[-1] is None]
    found = [_make_policy((row[0], row[-1])) for row in rows if row[-1] is not None]
    return PolicyBook(found, above).find(project)


def list_used_projects(session: DatabaseSession) -> Sequence[Project]:
    """Return all created projects, and the projects that exist only because jobs name them."""
    created = list_projects(session)
    known = {project.name for project in created}
    used = {row[0] for row in session.run(_PROJECTS_OF_JOBS).fetchall()}
    return [*created, *(Project(name=name) for name in sorted(used - known))]


def find_account(session: DatabaseSession, name: str) -> Account | None:
    row = session.run(f"{ACCOUNTS.select} WHERE name = ?", (name,)).fetchone()
    return None if row is None else ACCOUNTS.make(row)


def list_roles(session: DatabaseSession, project: str | None) -> Sequence[RoleBinding]:
    """Return the roles in one project or, if `project` is None, in all projects. Roles that
    accounts have through groups are included.
    """
    where, values = in_projects("project", project)
    found = _read_roles(session, where, values)
    return sorted(found, key=lambda each: (each.project, each.account, each.role, each.trust))


def _read_roles(
    session: DatabaseSession, where: str, values: tuple[str, ...]
) -> Sequence[RoleBinding]:
    return [
        codec.make(row)
        for codec in (BINDINGS, GROUP_ROLES)
        for row in session.run(f"{codec.select} WHERE {where}", values).fetchall()
    ]


def add_account(session: DatabaseSession, account: Account) -> None:
    """Raises NameConflict."""
    done = session.run(f"{ACCOUNTS.insert} {_OR_NOTHING}", ACCOUNTS.values(account))
    if done.rowcount == 0:
        raise NameConflict(f"the account {account.name} exists already")


def remove_account(session: DatabaseSession, name: str) -> None:
    """Delete the account with its tokens and roles. Raises RowNotFound."""
    if session.run("DELETE FROM accounts WHERE name = ?", (name,)).rowcount == 0:
        raise RowNotFound(f"no account {name}")


def add_token(session: DatabaseSession, token: AccountToken, digest: str) -> None:
    """Add a token. Raises RowNotFound if the account does not exist."""
    session.run(_INSERT_TOKEN, (*TOKENS.values(token), digest))


def revoke_token(
    session: DatabaseSession, token_id: str, account: str | None, at: datetime
) -> None:
    """Revoke a token, and the tokens that were created with it. If an account is given, the token
    must belong to this account. Raises RowNotFound.
    """
    first, values = "SELECT id FROM tokens WHERE id = ?", [token_id]
    if account is not None:
        first, values = f"{first} AND account = ?", [*values, account]
    sql = f"UPDATE tokens SET revoked_at = COALESCE(revoked_at, ?) WHERE id IN {family_of(first)}"
    if session.run(sql, (to_micros(at), *values)).rowcount == 0:
        raise RowNotFound(f"no token {token_id}")


def family_of(first: str) -> str:
    """Return a query, in parentheses, for the IDs of the tokens that the query `first` selects, and
    of their descendants. A descendant is a token that was created with another token.
    """
    return (
        f"(WITH RECURSIVE family (id) AS ({first} UNION SELECT t.id FROM tokens t "
        "JOIN family f ON t.parent = f.id) SELECT id FROM family)"
    )


def add_project(session: DatabaseSession, project: Project, *, adopt: bool) -> None:
    """Store a new project. Raises NameConflict if the project exists, or if its name is in use and
    `adopt` is not set. Raises RowNotFound if the project's parent does not exist, and
    ProjectArchived if the parent is archived.
    """
    _check_parent(session, project.parent)
    taken = any(
        session.run(f"SELECT 1 FROM {table} WHERE project = ? LIMIT 1", (project.name,)).fetchone()
        for table in (() if adopt else (*_USES, *list_tables_of_projects()))
    )
    insert = f"{PROJECTS.insert} {_OR_NOTHING}"
    if taken or session.run(insert, PROJECTS.values(project)).rowcount == 0:
        raise NameConflict(f"the project name {project.name} is in use already")


def _check_parent(session: DatabaseSession, parent: str | None) -> None:
    """Raise ProjectArchived if no project may be placed below `parent`."""
    sql = "SELECT 1 FROM projects WHERE name = ? AND archived_at IS NOT NULL"
    if parent is not None and session.run(sql, (parent,)).fetchone():
        raise ProjectArchived(f"project {parent} is archived, so nothing new starts below it")


def put_policy(session: DatabaseSession, project: str, policy: ProjectPolicy | None) -> None:
    if policy is None:
        session.run("DELETE FROM project_policies WHERE project = ?", (project,))
    else:
        session.run(_PUT_POLICY, (project, encode(policy)))


def move_project(session: DatabaseSession, former: Project, parent: str | None) -> None:
    """Move a project. Raises RowNotFound if the project has moved meanwhile or if the new parent
    does not exist. Raises NameConflict if the new parent is the project itself or a project below
    it. Raises ProjectArchived if the new parent is archived.
    """
    _check_parent(session, parent)
    if not session.driver.is_sqlite:  # two moves at the same time could make a loop
        session.run("LOCK TABLE projects IN SHARE ROW EXCLUSIVE MODE")
    parents = {each.name: each.parent for each in list_projects(session)}
    if former.name not in parents:
        raise RowNotFound(f"{former.name} was not created as a project")
    if parents[former.name] != former.parent:
        raise RowNotFound(f"the project {former.name} was moved meanwhile")
    if parent is not None and parent not in parents:
        raise RowNotFound(f"the parent {parent} was not created as a project")
    above = parent
    while above is not None:
        if above == former.name:
            raise NameConflict(
                f"project {former.name} cannot move below {parent}, because "
                f"{parent} is this project itself or a project below it"
            )
        above = parents.get(above)
    session.run("UPDATE projects SET parent = ? WHERE name = ?", (parent, former.name))


def grant_role(session: DatabaseSession, binding: RoleBinding) -> None:
    """Store a role; an existing role is not changed. Raises RowNotFound if the account does not
    exist.
    """
    session.run(f"{BINDINGS.insert} {_OR_NOTHING}", BINDINGS.values(binding))


def revoke_role(session: DatabaseSession, binding: RoleBinding) -> None:
    """Raises RowNotFound."""
    sql = "DELETE FROM role_bindings WHERE account = ? AND project = ? AND role = ?"
    if session.run(sql, (binding.account, binding.project, str(binding.role))).rowcount == 0:
        raise RowNotFound(f"{binding.account} was not granted the role {binding.role}")


def in_projects(column: str, wanted: str | Collection[str] | None) -> tuple[str, tuple[str, ...]]:
    """Return an SQL condition on `column`, and the parameters of the condition. The condition
    limits rows to the project named `wanted`, or to the projects in the collection `wanted`. If
    `wanted` is None, the condition is always true.
    """
    if wanted is None:
        return "TRUE", ()
    if isinstance(wanted, str):
        return f"{column} = ?", (wanted,)
    if not wanted:
        return "FALSE", ()
    return f"{column} IN ({', '.join('?' * len(wanted))})", tuple(sorted(wanted))


_ENDS = ", ".join(f"'{each}'" for each in sorted(JOB_ENDS))
# queries for work that has not ended, by the words for the work
_BUSY = {
    "job": f"SELECT name FROM jobs WHERE {{own}} AND phase NOT IN ({_ENDS}) AND removed IS NULL",
    "gang": f"SELECT gang FROM attempts WHERE {{own}} AND phase <> '{AttemptPhase.ENDED}'",
}
_MOST = 3  # maximum number of names in an error message


class SqlArchive:
    """The archive state of projects, which is stored in their rows. No job and no service can be
    stored in an archived project. A submission that arrives during the archiving is either stored
    before the project is archived, or raises ProjectArchived.
    """

    def __init__(self, read: RunTransaction, write: RunTransaction) -> None:
        self._read, self._write = read, write

    async def put(self, projects: Collection[str], at: datetime, *, busy: bool = False) -> None:
        """Archive created projects; projects that are already archived are not changed. Raises
        ProjectBusy if `busy` is not set and the projects have services, unfinished jobs or
        unfinished gangs.
        """
        await self._write(lambda session: _put(session, projects, at, busy=busy))

    async def check(self, project: str) -> None:
        # a read, because a write would be recorded in the audit log as a change
        """Raises ProjectArchived."""
        await self._read(lambda session: check_open(session, [project], lock=False))

    async def lift(self, project: str) -> None:
        """Restore an archived project, with the projects below it that were archived at the same
        time. Does nothing if the project is not archived. Raises ProjectArchived if the project's
        parent is archived.
        """
        await self._write(lambda session: _lift(session, project))


def check_open(session: DatabaseSession, projects: Collection[str], *, lock: bool = True) -> None:
    """Raise ProjectArchived if one of the projects is archived. If `lock` is set, other writers
    cannot archive or unarchive these projects until the transaction ends.
    """
    where, values = in_projects("name", projects)
    # this lock and the UPDATE that archives a project exclude each other
    ending = " FOR SHARE" if lock and not session.driver.is_sqlite else ""
    sql = f"SELECT name, archived_at FROM projects WHERE {where} ORDER BY name{ending}"
    for name, archived_at in session.run(sql, values).fetchall():
        if archived_at is not None:
            raise ProjectArchived(f"project {name} is archived, so nothing new starts in it")


def _put(session: DatabaseSession, projects: Collection[str], at: datetime, *, busy: bool) -> None:
    for name in sorted(projects):  # in the order in which `check_open` locks them
        sql = "UPDATE projects SET archived_at = ? WHERE name = ? AND archived_at IS NULL"
        session.run(sql, (to_micros(at), name))
    where, values = in_projects("project", projects)
    if busy:
        return
    own = {word: f"SELECT name FROM {table} WHERE {{own}}" for word, table in list_named_tables()}
    for what, sql in (own | _BUSY).items():
        found = session.run(f"{sql.format(own=where)} LIMIT {_MOST + 1}", values).fetchall()
        if found:
            named = ", ".join(name for (name,) in found[:_MOST])
            more = " and more" if len(found) > _MOST else ""
            raise ProjectBusy(f"{what} {named}{more} has not ended")


def _lift(session: DatabaseSession, project: str) -> None:
    known = {each.name: each for each in list_projects(session)}
    found = known.get(project)
    if found is None or found.archived_at is None:
        return
    if found.parent is not None and known[found.parent].archived_at is not None:
        raise ProjectArchived(f"project {found.parent}, above {project}, is archived")
    below = list_below(project, {each.name: each.parent for each in known.values()})
    where, values = in_projects("name", below)
    sql = f"UPDATE projects SET archived_at = NULL WHERE archived_at = ? AND {where}"
    session.run(sql, (to_micros(found.archived_at), *values))


_T = TypeVar("_T")
_NEWEST = insert_into(
    "newest_id_tokens",
    ("issuer", "subject", "issued_at"),
    "ON CONFLICT (issuer, subject) DO UPDATE SET issued_at = excluded.issued_at "
    "WHERE newest_id_tokens.issued_at <= excluded.issued_at",
)
# How long a token is kept after it cannot be used any more, so that lists and messages show it.
_KEPT = timedelta(days=7)


class SqlSignIns:
    """Trusted issuers, and sign-ins with their ID tokens."""

    def __init__(self, read: RunTransaction, write: RunTransaction) -> None:
        self._read = read
        self._write = write

    async def trusts(self) -> Sequence[IssuerTrust]:
        """Return the trusted issuers, whose ID tokens are accepted, sorted by name."""
        return await self._read(_list_trusts)

    async def put_trust(self, trust: IssuerTrust, *, replace: bool = False) -> None:
        """Store a trust. Raises NameConflict if a trust has this name, unless `replace` is set."""
        await self._write(lambda session: _put_trust(session, trust, replace))

    async def delete_trust(self, name: str) -> None:
        """Delete a trust, and the tokens and roles that the trust granted. Raises RowNotFound."""
        await self._write(lambda session: _delete_trust(session, name))

    async def identity(self, issuer: str, subject: str) -> str | None:
        """Return the account of a person, or None if the person has never signed in."""
        return await self._read(lambda session: _find_identity(session, issuer, subject))

    async def sign_in(
        self, found: SignIn, token: AccountToken, digest: str, id_token: str, until: datetime
    ) -> None:
        """Store the token of a sign-in under its hash `digest`. A person's account is created or
        linked at the first sign-in. The roles of the person's groups replace the roles from earlier
        sign-ins with this trust. `id_token` is the hash of the ID token, which is kept at least
        until the time `until`. Raises SignInConflict, also if the person has signed in with an ID
        token that was issued later.
        """
        await self._write(
            lambda session: _sign_in(session, found, token, digest, (id_token, until))
        )


def _list_trusts(session: DatabaseSession) -> Sequence[IssuerTrust]:
    rows = session.run("SELECT document FROM trusts ORDER BY name").fetchall()
    return [decode_trust(row[0]) for row in rows]


def _put_trust(session: DatabaseSession, trust: IssuerTrust, replace: bool) -> None:
    """Store a trust. Roles from the replaced trust are removed unless the new trust grants the same
    roles.
    """
    insert = insert_into("trusts", ("name", "document"))
    then = "(name) DO UPDATE SET document = excluded.document" if replace else "DO NOTHING"
    done = session.run(f"{insert} ON CONFLICT {then}", (trust.name, encode(trust)))
    if done.rowcount == 0:
        raise NameConflict(f"the trust {trust.name} exists already")
    given = {(each.project, str(each.role)) for each in trust.groups}
    rows = session.run(
        "SELECT DISTINCT project, role FROM group_roles WHERE trust = ?", (trust.name,)
    ).fetchall()
    for project, role in rows:
        if (project, role) not in given:
            sql = "DELETE FROM group_roles WHERE trust = ? AND project = ? AND role = ?"
            session.run(sql, (trust.name, project, role))


def _delete_trust(session: DatabaseSession, name: str) -> None:
    """Delete a trust. The tokens of the trust and the roles that the trust granted are also
    deleted. Raises RowNotFound.
    """
    # The trust is deleted first, so that no sign-in with it is in progress when its tokens are
    # deleted.
    if session.run("DELETE FROM trusts WHERE name = ?", (name,)).rowcount == 0:
        raise RowNotFound(f"no trust {name}")
    _delete_tokens(session, "SELECT token FROM sign_ins WHERE trust = ?", name)


def _sign_in(
    session: DatabaseSession,
    found: SignIn,
    token: AccountToken,
    digest: str,
    id_token: tuple[str, datetime],
) -> None:
    """Sign a person in; see `SqlSignIns.sign_in`. `id_token` is the ID token's digest and expiry
    time."""
    now, trust = token.created_at, found.trust
    # This statement locks the row, so that the trust cannot be changed or removed meanwhile.
    lock = "UPDATE trusts SET document = document WHERE name = ? AND document = ?"
    if session.run(lock, (trust.name, encode(trust))).rowcount == 0:
        raise SignInConflict("the trust has just been changed; sign in again")
    _forget(session, now)
    used, expires_at = id_token
    until = max(expires_at, token.expires_at or now)
    insert = insert_into("sign_ins", ("digest", "trust", "token", "until"), _OR_NOTHING)
    if session.run(insert, (used, trust.name, token.id, to_micros(until))).rowcount == 0:
        raise SignInConflict("the ID token was used before; get a new ID token")
    if found.subject:
        _note_newest(session, found)
    account = _open_account(session, found, now) if found.subject else found.account
    if account != token.account:
        raise SignInConflict("another sign-in of this person was faster; sign in again")
    known = find_account(session, account)
    if known is None or (not found.subject and known.kind is not AccountKind.SERVICE):
        raise SignInConflict(f"the service account {account} does not exist")
    if known.disabled_at is not None:
        raise SignInConflict(f"the account {account} is disabled")
    add_token(session, token, digest)
    _replace_roles(session, found, now)  # the token's account is `found.account`


def _note_newest(session: DatabaseSession, found: SignIn) -> None:
    """Note the time at which a person's ID token was issued. Raises SignInConflict if a newer token
    was used: an older token could contain groups that the person has left since. Tokens of the same
    second cannot be ordered, so both are accepted.
    """
    values = (found.trust.issuer, found.subject, to_micros(found.issued_at))
    if session.run(_NEWEST, values).rowcount == 0:
        raise SignInConflict(
            "a newer ID token of this person was used before; sign in again to get a new ID token"
        )


def _replace_roles(session: DatabaseSession, found: SignIn, now: datetime) -> None:
    """Replace the roles from earlier sign-ins with the roles that the person's groups grant now."""
    account, trust = found.account, found.trust
    session.run("DELETE FROM group_roles WHERE account = ? AND trust = ?", (account, trust.name))
    until = now + trust.lifetime
    for project, role in sorted({(each.project, each.role) for each in found.roles}):
        binding = RoleBinding(
            account=account, project=project, role=role, trust=trust.name, until=until
        )
        session.run(GROUP_ROLES.insert, GROUP_ROLES.values(binding))


def _forget(session: DatabaseSession, now: datetime) -> None:
    """Delete sign-ins that expired some time ago, with their tokens and roles."""
    old = to_micros(now - _KEPT)
    _delete_tokens(session, "SELECT token FROM sign_ins WHERE until < ?", old)
    session.run("DELETE FROM sign_ins WHERE until < ?", (old,))
    session.run("DELETE FROM group_roles WHERE until < ?", (old,))
    # an ID token is valid for at most a day
    session.run("DELETE FROM newest_id_tokens WHERE issued_at < ?", (old,))


def _delete_tokens(session: DatabaseSession, first: str, value: object) -> None:
    """Delete the tokens whose IDs a query selects, and their descendants. A descendant is a token
    that was created with another token.
    """
    session.run(f"DELETE FROM tokens WHERE id IN {family_of(first)}", (value,))


def _find_identity(session: DatabaseSession, issuer: str, subject: str) -> str | None:
    sql = "SELECT account FROM identities WHERE issuer = ? AND subject = ?"
    row = session.run(sql, (issuer, subject)).fetchone()
    return None if row is None else str(row[0])


def _open_account(session: DatabaseSession, found: SignIn, now: datetime) -> str:
    """Return the name of a person's account. At the first sign-in, create the account or, if the
    trust's rule says so, use the existing account with this name. Raises SignInConflict.
    """
    issuer, name = found.trust.issuer, found.account
    if known := _find_identity(session, issuer, found.subject):
        return known
    if found.trust.accounts is AccountRule.CREATE:
        try:
            add_account(session, Account(name=name, kind=AccountKind.USER, created_at=now))
        except NameConflict as error:
            if known := _find_identity(session, issuer, found.subject):
                return known  # a sign-in of the same person at the same time has created it
            raise SignInConflict(
                f"the account {name} exists already, but does not belong to this person; an admin "
                "can remove it"
            ) from error
    else:
        _check_existing(session, name)
    insert = insert_into("identities", ("issuer", "subject", "account"))
    session.run(insert, (issuer, found.subject, name))
    return name


def _check_existing(session: DatabaseSession, name: str) -> None:
    """Raise SignInConflict if no account of this name exists, or if the account cannot be linked to
    a person who signs in for the first time.
    """
    known = find_account(session, name)
    if known is None:
        raise SignInConflict(f"the account {name} does not exist; an admin can add it")
    taken = session.run("SELECT 1 FROM identities WHERE account = ?", (name,)).fetchone()
    if known.kind is not AccountKind.USER or taken:
        raise SignInConflict(f"the account {name} belongs to another person or to a service")
