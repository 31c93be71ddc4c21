"""The provider for joined machines. The machines call the server, a supervisor on each machine
starts agents, and the control plane allocates the devices.
"""

import asyncio
import hashlib
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path

import msgspec

from cavvy.agent.bundle import make_archive
from cavvy.domain.allocations import Host
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import Objection, TaskSpec
from cavvy.domain.units import parse_rate
from cavvy.domain.values import replace
from cavvy.providers.abilities import JoinedMachine, JoinInvitation, JoinTerms
from cavvy.providers.base import (
    GangSeen,
    GangSpec,
    Manifest,
    NodeEndpoint,
    NotFound,
    ProviderContext,
    ProviderError,
    Refused,
    TryAgain,
)
from cavvy.providers.hosts.bundles import pack_supervisor
from cavvy.providers.hosts.connection import CannotConnect
from cavvy.providers.hosts.fleet.gangs import HostFleet
from cavvy.providers.hosts.fleet.host_link import HostSetup
from cavvy.providers.hosts.fleet.machines import HostEntry, KnownHost, list_offers
from cavvy.providers.hosts.fleet.placing import AgentRoute
from cavvy.providers.hosts.userdata import make_preamble
from cavvy.providers.join.host_link import JoinLink
from cavvy.providers.join.members import MachineRegister, MemberMachine, make_invitation
from cavvy.providers.join.sessions import (
    ASK,
    CALL,
    BundlesAnswer,
    EnterAnswer,
    EnterCall,
    HelloCall,
    ListenAnswer,
    ListenCall,
    MachineAnswer,
    MachineAsk,
    MachineCall,
    MachineSession,
    MachineSessions,
    SayAnswer,
    SayCall,
    SessionOfCall,
    describe_error,
)

_REMOTE = str(Path(__file__).with_name("remote"))
_TICK_S = 1.0
_OF_SESSIONS = frozenset({"listen", "say", "leave", "gone"})  # the calls that belong to a session
# how long a server waits after its start until known machines have called again
_FIRST_WAIT_S = 6.0
_NOTE_EVERY = timedelta(minutes=1)
# Work on a machine that ends by itself gets its notice this long before, and no work starts in the
# last minutes.
_LAST_NOTICE = timedelta(minutes=2)
_LAST_START = timedelta(minutes=10)
_NO_ADDRESS = (
    "machines cannot reach this server: set `tls_listen` in [server], for example to "
    "0.0.0.0:7443, then run `cavvy server restart`"
)


def _limit(offer: Offer, ends_at: datetime | None, now: datetime) -> Offer:
    """Return the offer of a machine that ends at this time, which is like spot capacity."""
    if ends_at is None:
        return offer
    capacity = offer.capacity if now < ends_at - _LAST_START else 0
    return replace(offer, purchase=Purchase.SPOT, ends_at=ends_at, capacity=capacity)


class JoinProvider:
    """Implements `Provider`, and the abilities listed in the manifest."""

    def __init__(self, manifest: Manifest, context: ProviderContext) -> None:
        self.manifest = manifest
        self._context = context
        self._now = context.now
        self._mark = hashlib.sha256(context.installation.encode()).hexdigest()[:8]
        self._rate = parse_rate(str(context.settings.get("price_usd_hr", 0)))
        self._members = MachineRegister(context.state, context.now)
        self._sessions = MachineSessions(manifest.name, context.state, context.servers)
        # machine -> its session at another server, as last seen
        self._elsewhere: dict[str, MachineSession | None] = {}
        self._ticked = float("-inf")
        self._arrived = asyncio.Event()
        self._settled = False
        self._noted: dict[str, datetime] = {}
        self._lines: dict[str, JoinLink] = {}
        self._fleet = HostFleet(manifest.name, context, self._lines, self._way)
        self._known = self._fleet.known
        self._supervisor = cache(lambda: pack_supervisor().content)

    async def offers(self) -> Sequence[Offer]:
        await self._settle_in()
        offers = list_offers(await self._ready())
        ends = {name: member.ends_at for name, member in self._members.all.items()}
        return [_limit(offer, ends.get(offer.zone or ""), self._now()) for offer in offers]

    async def hosts(self) -> Sequence[Host]:
        await self._ready()
        return await self._fleet.list_hosts()

    async def launch(self, gang: GangSpec) -> None:
        await self._settle_in()
        await self._ready()
        await self._fleet.launch(gang)

    async def replace(self, gang: GangSpec, ranks: Sequence[int]) -> None:
        await self._settle_in()
        await self._ready()
        await self._fleet.replace(gang, ranks)

    async def gangs(self, name: str | None = None) -> Sequence[GangSeen]:
        await self._settle_in()
        await self._tick()
        return await self._fleet.look(name)

    async def remove(self, name: str) -> None:
        await self._settle_in()
        await self._fleet.remove(name)

    async def changed(self) -> str:
        """See `SignalsChanges.changed`. Every server calls this method continuously, so the silence
        of machines is also measured here.
        """
        clock = asyncio.get_running_loop().time
        while True:
            if clock() - self._ticked >= _TICK_S:
                self._ticked = clock()
                with suppress(TryAgain):
                    await self._tick()
            with suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    return await self._fleet.changes.get()

    def check(self, task: TaskSpec) -> Sequence[Objection]:
        if self._context.node_endpoint is None:
            return [Objection("providers", _NO_ADDRESS)]
        known = [known for known in self._known.values() if known.facts.engine]
        if task.image is not None and self._known and not known:
            return [Objection("image", "needs podman or docker, but no joined machine has either")]
        return []

    async def whoami(self) -> Sequence[tuple[str, str]]:
        node_endpoint = self._context.node_endpoint
        said = [("address", node_endpoint.address)] if node_endpoint is not None else []
        # `cavvy check` calls `whoami` in its own process, but only the server knows its machines.
        return [
            *said,
            (
                "machines",
                "`cavvy nodes joined` lists the joined machines; "
                "`cavvy nodes join` prints a command that adds "
                "a machine",
            ),
        ]

    async def close(self) -> None:
        for line in self._lines.values():
            line.wake()

    # Joining and leaving

    async def invite(self, terms: JoinTerms) -> JoinInvitation:
        node_endpoint = self._node_endpoint()
        token, expires = await self._members.invite(terms)
        return make_invitation(node_endpoint, self.manifest.name, token, expires)

    async def machines(self) -> Sequence[JoinedMachine]:
        await self._ready()
        await self._fleet.isolation.refresh()
        return [
            JoinedMachine(
                name=name,
                state=self._say_state(self._lines[name], member),
                has=self._say_has(name),
                joined_at=member.joined_at,
                heard_at=max(
                    filter(None, (self._lines[name].heard_at, member.heard_at)), default=None
                ),
            )
            for name, member in sorted(self._members.all.items())
        ]

    async def dismiss(self, name: str) -> None:
        await self._follow()
        member = self._members.all.get(name)
        if member is None:
            raise NotFound(f"no joined machine is called {name}")
        line = self._lines[name]
        # A machine that is not connected ends its work when the server refuses its token.
        if not line.up:
            await self._forget(name)
            return
        await self._members.put(replace(member, dismissed=True))
        line.dismissed = True
        line.leave("it was dismissed")

    async def script(self) -> bytes:
        node_endpoint = self._node_endpoint()
        preamble = await asyncio.to_thread(
            make_preamble, node_endpoint, "${CAVVY_FOLDER:-$HOME/.cavvy-agent}"
        )
        setup = node_endpoint.publish(make_archive(_REMOTE))
        start = Path(__file__).with_name("start.sh").read_text()
        return f"{preamble}far={setup}\nplace={self.manifest.name}\n{start}".encode()

    async def answer(self, call: str, token: str, body: bytes) -> bytes:
        try:
            if call == "enter":
                return msgspec.json.encode(
                    await self._enter(token, msgspec.json.decode(body, type=EnterCall))
                )
            member = await self._members.find(token)
            elsewhere = await self._find_elsewhere(call, member.name, body)
            if elsewhere is not None:
                return await self._sessions.pass_on(elsewhere, call, body)
            return msgspec.json.encode(await self._answer(call, member, body))
        except msgspec.MsgspecError as error:
            raise Refused(f"{call}: {error}") from error

    async def answer_server(self, call: str, body: bytes) -> bytes:
        try:
            if call == ASK:
                asked = msgspec.json.decode(body, type=MachineAsk)
                return msgspec.json.encode(await self._ask_here(asked))
            if call == CALL:
                passed = msgspec.json.decode(body, type=MachineCall)
                return msgspec.json.encode(await self._answer_passed(passed))
        except msgspec.MsgspecError as error:
            raise Refused(f"{call}: {error}") from error
        raise NotFound(f"servers cannot make the call {call}")

    async def _ask_here(self, asked: MachineAsk) -> MachineAnswer:
        """Send another server's request to a machine that is connected to this server."""
        line = self._lines.get(asked.name)
        try:
            if line is None or line.session != asked.session or not line.here:
                raise CannotConnect(f"{asked.name} is no longer connected to this server")
            return MachineAnswer(answer=await line.ask(asked.do, object, **asked.fields))
        except ProviderError as error:
            return describe_error(error)

    async def _answer_passed(self, passed: MachineCall) -> msgspec.Struct:
        if passed.name not in self._members.all:
            await self._members.refresh()
        member = self._members.all.get(passed.name)
        if member is None or passed.call not in _OF_SESSIONS:
            raise NotFound(f"no joined machine is called {passed.name}")
        return await self._answer(passed.call, member, bytes(passed.body))

    async def _find_elsewhere(self, call: str, name: str, body: bytes) -> MachineSession | None:
        """Return the session to which a machine's call belongs, if another live server has this
        session. A load balancer may send each connection of a machine to a different server.
        """
        if call not in _OF_SESSIONS:
            return None
        session = msgspec.json.decode(body, type=SessionOfCall).session
        if session == self._line(name).session:
            return None
        found = self._sessions.find(name)
        if found is None or found.session != session:
            await self._sessions.refresh(name)
            found = self._sessions.find(name)
        return found if found is not None and found.session == session else None

    async def _enter(self, token: str, asked: EnterCall) -> EnterAnswer:
        member, own = await self._members.enter(token, asked.nonce, asked.hostname)
        self._line(member.name)
        return EnterAnswer(name=member.name, token=own, folder=f"{self._mark}/{member.name}")

    async def _answer(self, call: str, member: MemberMachine, body: bytes) -> msgspec.Struct:
        line = self._line(member.name)
        match call:
            case "bundles":
                return await self._publish_bundles()
            case "hello":
                await self._greet(member, line, msgspec.json.decode(body, type=HelloCall))
                return SayAnswer(next=1)
            case "listen":
                listen = msgspec.json.decode(body, type=ListenCall)
                lines = await line.listen(listen.session, listen.after, listen.wait_s)
                dismissed = self._members.all.get(member.name, member).dismissed
                return ListenAnswer(
                    lines=lines or (),
                    again=lines is None,
                    leave=dismissed,
                    servers=self._list_servers(),
                )
            case "say":
                say = msgspec.json.decode(body, type=SayCall)
                wanted = line.take(say.session, say.first, say.lines)
                return SayAnswer(next=wanted or 0, again=wanted is None)
            case "leave":
                line.leave("it leaves")
                return SayAnswer()
            case "gone":
                await self._let_go(member, line)
                return SayAnswer()
        raise NotFound(f"joined machines cannot make the call {call}")

    def _list_servers(self) -> Sequence[str]:
        """Return the addresses of all servers. The result is empty if machines connect through a
        load balancer, because such machines may be unable to reach the servers directly.
        """
        servers = self._context.servers
        addresses = sorted(servers.addresses) if servers is not None else []
        return addresses if self._node_endpoint().address in addresses else ()

    async def _let_go(self, member: MemberMachine, line: JoinLink) -> None:
        if self._members.all.get(member.name, member).dismissed:
            await self._forget(member.name)
        else:
            line.hang_up("the machine has left; run the same command on it to join again")
            await self._sessions.drop(member.name)
            await self._note(member.name, line)

    async def _publish_bundles(self) -> BundlesAnswer:
        node_endpoint = self._node_endpoint()
        return BundlesAnswer(
            supervisor=node_endpoint.publish(self._supervisor()),
            agent=await asyncio.to_thread(node_endpoint.agent),
        )

    async def _greet(self, member: MemberMachine, line: JoinLink, hello: HelloCall) -> None:
        bundles = await self._publish_bundles()
        member = replace(
            self._members.all.get(member.name, member),
            facts=hello.facts,
            heard_at=self._now(),
            there=True,
        )
        await self._members.put(member)
        self._known.pop(member.name, None)
        await self._ready()
        setup = HostSetup(
            root=hello.root,
            cache=hello.cache,
            agent=(*hello.start, f"{hello.folder}/{bundles.agent}.pyz"),
            supervisor=(*hello.start, f"{hello.folder}/{bundles.supervisor}.supervisor.pyz"),
        )
        await self._sessions.begin(member.name, hello.session, setup)
        line.begin(hello.session, setup)
        self._arrived.set()

    async def _forget(self, name: str) -> None:
        """Delete the machine from this installation. The server refuses the machine's next call,
        and the machine then ends its work.
        """
        await self._members.drop(name)
        await self._sessions.drop(name)
        self._hang_up(name)

    def _hang_up(self, name: str) -> None:
        self._known.pop(name, None)
        self._elsewhere.pop(name, None)
        if line := self._lines.pop(name, None):  # a tick may have done this already
            line.hang_up("it was dismissed")
            self._fleet.announce(name)

    # Known machines

    async def _follow(self) -> None:
        """Apply changes by other servers: machines that joined, were dismissed, or are connected
        to another server than before.
        """
        await self._members.refresh()
        await self._sessions.refresh()
        for name, member in self._members.all.items():
            line = self._line(name)
            if member.dismissed and not line.dismissed:
                line.dismissed = True
                line.leave("it was dismissed")
            line.follow()
            self._notice(name)
        for name in self._lines.keys() - self._members.all.keys():
            self._hang_up(name)

    def _notice(self, name: str) -> None:
        """Announce that a machine has connected to another server or has lost the connection to
        another server.
        """
        found = self._sessions.find(name)
        found = found if found is not None and found.up else None
        before, self._elsewhere[name] = self._elsewhere.get(name), found
        if (found and found.session) == (before and before.session):
            return
        if found is not None:
            self._known.pop(name, None)  # a machine with a new session may report other facts
            self._arrived.set()
        self._fleet.announce(name)

    def _line(self, name: str) -> JoinLink:
        if name not in self._lines:
            self._lines[name] = self._make_line(name)
        return self._lines[name]

    async def _ready(self) -> Sequence[KnownHost]:
        await self._follow()
        for name, member in self._members.all.items():
            if name not in self._known and member.facts is not None:
                entry = HostEntry(
                    name=name,
                    group=member.group or name,
                    in_group=member.group is not None,
                    rate=self._rate,
                    labels=member.labels,
                )
                await self._fleet.keep(entry, member.facts)
        return self._fleet.list_known()

    async def _settle_in(self) -> None:
        """After the server starts, wait briefly for known machines to reconnect."""
        await self._follow()
        if self._settled:
            return
        expected = {name for name, member in self._members.all.items() if member.there}
        with suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_WAIT_S):
                while any(name in self._lines and not self._lines[name].up for name in expected):
                    self._arrived.clear()
                    await self._arrived.wait()
        self._settled = True

    def _way(self, gang: GangSpec, setup: HostSetup, rank: int) -> AgentRoute:
        node_endpoint = self._node_endpoint()
        token = node_endpoint.claim_token(gang.token_name, rank)
        return AgentRoute(
            address=node_endpoint.address,
            token=token,
            pin=node_endpoint.pin,
            taken_by="the machine's owner",
        )

    def _node_endpoint(self) -> NodeEndpoint:
        if self._context.node_endpoint is None:
            raise Refused(_NO_ADDRESS)
        return self._context.node_endpoint

    def _say_state(self, line: JoinLink, member: MemberMachine) -> str:
        if member.dismissed or line.leaving:
            return "leaving" if line.up else "left"
        return "up" if line.up else "silent"

    def _say_has(self, name: str) -> str:
        known = self._known.get(name)
        if known is None:
            return "the machine has not reported its resources yet"
        isolation = self._fleet.isolation
        shares = f", jobs of different projects: {isolation.say(name)}" if isolation.asks else ""
        return f"{known.describe()}{shares}"

    # Changes

    def _make_line(self, name: str) -> JoinLink:
        def changed(gang: str | None) -> None:
            if gang is None:
                self._fleet.announce(name)
            else:
                self._fleet.changes.put(gang)

        return JoinLink(name, changed, self._now, self._sessions)

    async def _tick(self) -> None:
        """Update the time for which each machine has been silent, and announce the machines that
        have been silent for too long.
        """
        await self._ready()
        for name, line in list(self._lines.items()):
            if line.tick():
                if line.session:
                    await self._note(name, line)
                self._fleet.announce(name)
            elif (
                line.here
                and self._now() - (self._noted.get(name) or line.heard_at or self._now())
                >= _NOTE_EVERY
            ):
                await self._note(name, line)
            await line.note()
        for name, member in list(self._members.all.items()):
            ending = member.ends_at is not None and self._now() >= member.ends_at - _LAST_NOTICE
            if ending and not member.dismissed:
                await self.dismiss(name)
        self._fleet.announce_lost()

    async def _note(self, name: str, line: JoinLink) -> None:
        """Record when a machine last called and whether it is connected. When a server starts, the
        server waits for the machines that the records show as connected.
        """
        self._noted[name] = self._now()
        member = self._members.all.get(name)
        if member is not None and line.heard_at is not None:
            with suppress(TryAgain):
                await self._members.put(replace(member, heard_at=line.heard_at, there=line.up))
