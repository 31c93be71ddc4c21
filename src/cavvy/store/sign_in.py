"""Trusted issuers, and sign-ins with their ID tokens: `Store.sign_ins`."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TypeVar

from cavvy.domain.accounts import Account, AccountKind, AccountToken, RoleBinding
from cavvy.domain.trusts import AccountRule, IssuerTrust, SignIn
from cavvy.store.accounts import (
    GROUP_ROLES,
    add_account,
    add_token,
    family_of,
    find_account,
)
from cavvy.store.base import NameConflict, RowNotFound, SignInConflict
from cavvy.store.documents import decode_trust, encode, to_micros
from cavvy.store.drivers import DatabaseSession, RunTransaction
from cavvy.store.rows import insert_into

_T = TypeVar("_T")
_NEWEST = insert_into(
    "newest_id_tokens",
    ("issuer", "subject", "issued_at"),
    "ON CONFLICT (issuer, subject) DO UPDATE SET issued_at = excluded.issued_at "
    "WHERE newest_id_tokens.issued_at <= excluded.issued_at",
)
_OR_NOTHING = "ON CONFLICT DO NOTHING"
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
