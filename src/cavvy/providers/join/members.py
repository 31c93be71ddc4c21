"""Who may join and who did, on disk: machines/NAME.json, invitations/HASH.json. Tokens are kept as
hashes only.

A machine's token is an HMAC of its name and of the nonce that it made when it joined, so that a
lost reply is answered with the same one again.
"""

import base64
import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path

from cavvy.providers.base import NotFound, Refused
from cavvy.providers.hosts.fleet.machines import SupervisorFacts
from cavvy.providers.hosts.records import read, write

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class InvitedMachine:
    """One line that was given out. `nonce`: it was used by the machine that made this one."""

    expires_at: datetime
    name: str | None = None
    group: str | None = None
    nonce: str = ""
    used_by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberMachine:
    """One machine that joined. `dismissed`: it is to end its work and go."""

    name: str
    token: str  # SHA-256 of it
    joined_at: datetime
    facts: SupervisorFacts | None = None  # None: it has not said yet
    group: str | None = None
    heard_at: datetime | None = None
    dismissed: bool = False
    there: bool = (
        False  # it called when it was last looked at: a server that starts waits for it a little
    )


class MachineRegister:
    """The records of one installation."""

    def __init__(self, home: Path, now: Callable[[], datetime]) -> None:
        self._home, self._now = home, now
        for folder in ("machines", "invitations"):
            (home / folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        found = [read(path, MemberMachine) for path in (home / "machines").glob("*.json")]
        self._members = {member.name: member for member in found if member is not None}
        self._by_token = {member.token: member.name for member in self._members.values()}

    @property
    def all(self) -> Mapping[str, MemberMachine]:
        return self._members

    def invite(
        self, *, name: str | None, group: str | None, valid: timedelta
    ) -> tuple[str, datetime]:
        """A token that is good for one machine, and when it is good for none. Raises Refused."""
        for what in (name, group):
            if what is not None and _NAME.fullmatch(what) is None:
                raise Refused(
                    f"{what!r} must be of a-z, 0-9 and -, at most 40 of them, and - neither first "
                    "nor last"
                )
        if name is not None and name in self._members:
            raise Refused(f"{name} has joined already; dismiss it first, or choose another name")
        token, expires = secrets.token_urlsafe(24), self._now() + valid
        write(self._invitation(token), InvitedMachine(expires_at=expires, name=name, group=group))
        self._drop_old()
        return token, expires

    def enter(self, token: str, nonce: str, hostname: str) -> tuple[MemberMachine, str]:
        """A machine joins: its record and its own token. The same nonce gets the same again.
        Raises Refused.
        """
        path = self._invitation(token)
        invited = read(path, InvitedMachine)
        if invited is None or not nonce:
            raise Refused("this line was never given out here, or is too old: make a new one")
        if invited.nonce and not hmac.compare_digest(invited.nonce, nonce):
            raise Refused(
                f"this line was used by {invited.used_by}; each is good for one machine: make a "
                "new one"
            )
        if not invited.nonce and self._now() >= invited.expires_at:
            raise Refused("this line is too old: make a new one")
        name = invited.used_by or invited.name or self._free_name(hostname)
        own = self._token(name, nonce)
        known = self._members.get(name)
        if known is not None and known.token != _hash(own):
            raise Refused(f"{name} has joined already; dismiss it first, or choose another name")
        now = self._now()
        member = known or MemberMachine(
            name=name, token=_hash(own), joined_at=now, group=invited.group, heard_at=now
        )
        write(path, replace(invited, nonce=nonce, used_by=name))
        self.put(member)
        return member, own

    def find(self, token: str) -> MemberMachine:
        """Whose token that is. Raises Refused."""
        name = self._by_token.get(_hash(token))
        if name is None:
            raise Refused("this machine was dismissed, or never joined")
        return self._members[name]

    def put(self, member: MemberMachine) -> None:
        """Write a record down. Raises OSError."""
        write(self._home / "machines" / f"{member.name}.json", member)
        self._members[member.name] = member
        self._by_token[member.token] = member.name

    def drop(self, name: str) -> None:
        """Forget a machine: its token opens nothing any more. Raises NotFound."""
        member = self._members.pop(name, None)
        if member is None:
            raise NotFound(f"no machine {name} has joined")
        self._by_token.pop(member.token, None)
        (self._home / "machines" / f"{name}.json").unlink(missing_ok=True)

    def _invitation(self, token: str) -> Path:
        return self._home / "invitations" / f"{_hash(token)}.json"

    def _token(self, name: str, nonce: str) -> str:
        digest = hmac.digest(self._key(), f"{name}\0{nonce}".encode(), hashlib.sha256)
        return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()

    def _key(self) -> bytes:
        path = self._home / "key"
        try:
            return path.read_bytes()
        except FileNotFoundError:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb") as file:
                file.write(key := secrets.token_bytes(32))
            return key

    def _free_name(self, hostname: str) -> str:
        base = (
            re.sub(r"[^a-z0-9]+", "-", hostname.lower().partition(".")[0])
            .strip("-")[:32]
            .strip("-")
            or "machine"
        )
        names = [base, *(f"{base}-{number}" for number in range(2, len(self._members) + 3))]
        return next(name for name in names if name not in self._members)

    def _drop_old(self) -> None:
        """Invitations that nobody can use any more, a while after they ended, so that people are
        told why.
        """
        for path in (self._home / "invitations").glob("*.json"):
            invited = read(path, InvitedMachine)
            if invited is not None and self._now() >= invited.expires_at + timedelta(days=7):
                path.unlink(missing_ok=True)


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()
