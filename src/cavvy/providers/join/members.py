"""The register of joined machines and of invitations to join. Only hashes of the tokens are stored.

A machine's token is an HMAC of the machine's name and nonce, keyed with the invitation's token. The
server computes the token from the join request, so the server stores no token, and a repeated
request receives the same token again.

An invitation consists of commands that users paste into a machine's shell (`make_invitation`).
"""

import base64
import hashlib
import hmac
import json
import re
import secrets
import shlex
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta

from cavvy.domain.allocations import object_to_label
from cavvy.domain.values import Struct, field, replace
from cavvy.providers.abilities import JoinInvitation, JoinTerms
from cavvy.providers.base import NodeEndpoint, NotFound, Refused
from cavvy.providers.hosts.fleet.machines import SupervisorFacts
from cavvy.providers.ledger import LaunchLedger
from cavvy.providers.state import ProviderState

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")

_WRONG_SERVER = "the server's certificate does not match this command; nothing was run"


class InvitedMachine(Struct, frozen=True, kw_only=True):
    """One invitation. After the invitation has been used, the record contains the hash of the
    machine's nonce.
    """

    name: str  # SHA-256 of the invitation's token
    expires_at: datetime
    # the machine's name; if None, its name is derived from its host name
    machine: str | None = None
    group: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    session: timedelta | None = None  # how long the machine lives after it has joined
    nonce: str = ""
    used_by: str = ""


class MemberMachine(Struct, frozen=True, kw_only=True):
    """One joined machine. If `dismissed` is True, the machine must end its work and disconnect."""

    name: str
    token: str  # SHA-256 of the machine's token
    joined_at: datetime
    facts: SupervisorFacts | None = None  # None before its first session
    group: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    ends_at: datetime | None = None  # when the machine ends by itself; None if it does not
    heard_at: datetime | None = None
    dismissed: bool = False
    there: bool = False  # True: the machine was connected at the last check


class MachineRegister:
    """The machines and invitations of one installation, shared by its servers."""

    def __init__(self, state: ProviderState, now: Callable[[], datetime]) -> None:
        self._now = now
        self._members = LaunchLedger(state, MemberMachine, "machines")
        self._invitations = LaunchLedger(state, InvitedMachine, "invitations")

    @property
    def all(self) -> Mapping[str, MemberMachine]:
        return self._members.records

    async def refresh(self) -> None:
        """Read the machines that joined through any server of this installation. Raises
        TryAgain.
        """
        await self._members.refresh()

    async def invite(self, terms: JoinTerms) -> tuple[str, datetime]:
        """Create an invitation. Return the invitation's token, which is valid for one machine, and
        the time when the invitation expires. Raises Refused, TryAgain.
        """
        for what in (terms.name, terms.group):
            if what is not None and _NAME.fullmatch(what) is None:
                raise Refused(
                    f"{what!r} must have 1 to 40 characters of a-z, 0-9 and -, and no - at either "
                    "end"
                )
        for label, value in terms.labels.items():
            if wrong := object_to_label(label, value):
                raise Refused(wrong)
        await self.refresh()
        if terms.name in self.all:
            raise Refused(
                f"{terms.name} has already joined; dismiss it first, or choose another name"
            )
        token, expires = secrets.token_urlsafe(24), self._now() + terms.valid
        await self._invitations.put(
            InvitedMachine(
                name=_hash(token),
                expires_at=expires,
                machine=terms.name,
                group=terms.group,
                labels=terms.labels,
                session=terms.session,
            )
        )
        await self._drop_old()
        return token, expires

    async def enter(self, token: str, nonce: str, hostname: str) -> tuple[MemberMachine, str]:
        """Join a machine. Return the machine's record and token; a repeated call with the same
        nonce returns the same token. Raises Refused, TryAgain.
        """
        await self.refresh()
        await self._invitations.refresh(_hash(token))
        invited = self._invitations.get(_hash(token))
        if invited is None or not nonce:
            raise Refused("this join command is unknown or expired: create a new one")
        if invited.nonce and not hmac.compare_digest(invited.nonce, _hash(nonce)):
            raise Refused(
                f"{invited.used_by} has used this join command, and each command works for only "
                "one machine: create a new join command"
            )
        if not invited.nonce and self._now() >= invited.expires_at:
            raise Refused("this join command has expired: create a new one")
        name = invited.used_by or invited.machine or self._free_name(hostname)
        own = _make_token(token, name, nonce)
        known = self.all.get(name)
        if known is not None and known.token != _hash(own):
            raise Refused(f"{name} has already joined; dismiss it first, or choose another name")
        now = self._now()
        member = known or MemberMachine(
            name=name,
            token=_hash(own),
            joined_at=now,
            group=invited.group,
            labels=invited.labels,
            ends_at=None if invited.session is None else now + invited.session,
            heard_at=now,
        )
        await self._invitations.put(replace(invited, nonce=_hash(nonce), used_by=name))
        await self.put(member)
        return member, own

    async def find(self, token: str) -> MemberMachine:
        """Return the machine with this token. Raises Refused if no machine has the token, and
        TryAgain if the register cannot be read.
        """
        member = self._of(token)
        if member is None:
            await self.refresh()  # the machine may have joined through another server
            member = self._of(token)
        if member is None:
            raise Refused("this machine was dismissed, or never joined")
        return member

    def _of(self, token: str) -> MemberMachine | None:
        hashed = _hash(token)
        return next((each for each in self.all.values() if each.token == hashed), None)

    async def put(self, member: MemberMachine) -> None:
        """Store the record of a machine. Raises TryAgain."""
        await self._members.put(member)

    async def drop(self, name: str) -> None:
        """Delete the record of a machine, including the hash of its token. Raises NotFound,
        TryAgain."""
        if name not in self.all:
            raise NotFound(f"no joined machine is called {name}")
        await self._members.drop(name)

    def _free_name(self, hostname: str) -> str:
        base = (
            re.sub(r"[^a-z0-9]+", "-", hostname.lower().partition(".")[0])
            .strip("-")[:32]
            .strip("-")
            or "machine"
        )
        names = [base, *(f"{base}-{number}" for number in range(2, len(self.all) + 3))]
        return next(name for name in names if name not in self.all)

    async def _drop_old(self) -> None:
        """Delete invitations a week after they expired. For a week after an invitation expires, a
        machine that uses the invitation gets the error that the invitation has expired.
        """
        await self._invitations.refresh()
        for invited in list(self._invitations.records.values()):
            if self._now() >= invited.expires_at + timedelta(days=7):
                await self._invitations.drop(invited.name)


def _make_token(invitation: str, name: str, nonce: str) -> str:
    digest = hmac.digest(invitation.encode(), f"{name}\0{nonce}".encode(), hashlib.sha256)
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def make_invitation(
    node_endpoint: NodeEndpoint, provider: str, token: str, expires: datetime
) -> JoinInvitation:
    """Return a shell command and a Python command, either of which joins a machine. The command
    fetches the join script over TLS, and runs the script only if the server has the pinned
    certificate.
    """
    host, _, port = node_endpoint.address.removeprefix("https://").rpartition(":")
    path = f"/nodes/v1/{provider}/script"
    # makes a Python literal without single quotes, because the command is in single quotes
    text = json.dumps
    program = (
        "import hashlib,http.client as h,ssl,subprocess as s,sys;"
        f"c=h.HTTPSConnection({text(host.strip('[]'))},{int(port)},"
        "context=ssl._create_unverified_context());"
        "c.connect();"
        f"hashlib.sha256(c.sock.getpeercert(True)).hexdigest()=={text(node_endpoint.pin)} or "
        f"sys.exit({text(_WRONG_SERVER)});"
        f"c.request({text('GET')},{text(path)});"
        f"s.run([{text('sh')},{text('-s')},{text('--')},{text(token)}],"
        "input=c.getresponse().read())"
    )
    url = f"{node_endpoint.address}{path}"
    return JoinInvitation(
        shell=f"curl -fsSk --pinnedpubkey '{node_endpoint.key_pin}' {url} | sh -s -- {token}",
        python=f"python3 -c {shlex.quote(program)}",
        expires_at=expires,
    )
