"""Connects to machines by SSH, for clouds without user data and for servers that machines cannot
reach.

The server connects to all machines of a gang at the same time, sends the supervisor and the agent,
and starts the agent. The agent sends its requests to a socket on the machine, and SSH forwards this
socket to the server. The server keeps the connection open, and reconnects if the connection breaks
or the server restarts.

A machine is deleted if its agent has ended, or if no agent can be started within `PATIENCE` after
the machine was created. The node of a deleted machine counts as ended, and the reason is recorded.
"""

import asyncio
import hashlib
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from cavvy.domain.values import Struct, replace
from cavvy.providers.base import (
    GangSeen,
    GangSpec,
    GangState,
    ProviderContext,
    ProviderError,
    Refused,
)
from cavvy.providers.hosts.bundles import Bundle, make_bundle
from cavvy.providers.hosts.connection import CannotConnect, make_sockets
from cavvy.providers.hosts.fleet.host_link import HostSetup
from cavvy.providers.hosts.fleet.status import HostLook, RankState
from cavvy.providers.hosts.remote_calls import EmptyAnswer
from cavvy.providers.hosts.ssh_link import Dial, LinkDependencies, SshLink
from cavvy.providers.hosts.userdata import PATIENCE
from cavvy.providers.ledger import LaunchLedger
from cavvy.providers.notices import NoticeSource, make_notice_fields
from cavvy.providers.vm.cloud import SshTarget
from cavvy.providers.vm.reach_keys import KeyPair, MachineDoor, load_keys
from cavvy.providers.vm.records import VmGangRecord, VmNode

_log = logging.getLogger(__name__)
_FOLDER = "~/.cavvy-agent"  # Cavvy's folder on a machine
_PLAIN = re.compile(r"[A-Za-z0-9._-]{1,40}")
# After the server was restarted or suspended, it tries to reach a machine for at least this long,
# even if the machine is older than `PATIENCE`.
_FIRST_TRIES = timedelta(minutes=2)
_BOOTS = timedelta(minutes=1)  # failures are shown to users after this time
_SUSPENDED = timedelta(minutes=1)
_SOON_S, _CALM_S = 1.0, 15.0  # seconds between two visits: before the agent runs, and while it runs
_LIST_S = 5.0  # seconds between requests for the list of machines while an address is unknown
_IDLE_LIST_S = 60.0  # seconds between such requests after an error, while no machine is known
_T = TypeVar("_T")


class ReachedMachine(Struct, frozen=True, kw_only=True):
    """One machine, with the data that `SshLink` needs to connect."""

    name: str
    folder: str = _FOLDER
    address: str | None
    port: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachRecord:
    """The data with which the server starts a gang's agents, and the known facts about the gang's
    machines. The keys of `pins` and `started` are machine ids.
    """

    name: str
    token: str = field(default="", repr=False)  # "" once all agents have been started
    lease_s: float = 0
    grace_s: float = 0
    pins: Mapping[str, str] = field(default_factory=dict)  # lines of `known_hosts`
    started: frozenset[str] = frozenset()


class MachineLink(Protocol):
    """The part of `SshLink` that `VmReach` uses."""

    @property
    def problem(self) -> str: ...
    async def connect(self) -> HostSetup: ...
    async def ask(self, do: str, kind: type[_T], **fields: object) -> _T: ...
    async def close(self) -> None: ...


MakeLink = Callable[[ReachedMachine, LinkDependencies, Dial], MachineLink]
# called with a gang, a machine and the reason why the machine failed
Fail = Callable[[str, str, str], Awaitable[None]]


class VmReach:
    """Connects to the machines of one installation. `gangs` contains the records of gangs. The
    function `look` updates the records of gangs, and the function `fail` ends a node.
    """

    def __init__(
        self,
        context: ProviderContext,
        gangs: LaunchLedger[VmGangRecord],
        *,
        look: Callable[[], Awaitable[object]],
        fail: Fail,
        notices: Sequence[NoticeSource],
        make_link: MakeLink = SshLink,
    ) -> None:
        self._context, self._now, self._gangs = context, context.now, gangs
        self._look, self._fail, self._make_link = look, fail, make_link
        self._notices = make_notice_fields(notices)
        self._records = LaunchLedger(context.state, ReachRecord, "reach")
        # machine id -> the task that visits the machine
        self._visits: dict[str, asyncio.Task[None]] = {}
        self._reached: set[str] = set()  # ids of machines whose agents ran at the last visit
        self._problems: dict[str, str] = {}  # machine id -> why the last visit failed
        self._wake = asyncio.Event()
        self._listed = False  # True once the cloud's list of machines was read
        self._keys: KeyPair | None = None
        self._agent = cache(self._pack_agent)
        # in /tmp, because the path of a socket may have at most 104 bytes
        self._sockets = make_sockets()

    async def prepare(self, gang: GangSpec, *, again: bool = False) -> str:
        """Store the data that the gang's agents need, before the caller requests machines. `again`
        means that machines are requested for a gang that has started. Return the public key that
        the machines must accept. Raises TryAgain.
        """
        await self._records.refresh(gang.name)
        known = self._gangs.get(gang.name)
        if again or known is None or not known.started:
            before = self._records.get(gang.name) or ReachRecord(name=gang.name)
            record = replace(
                before,
                token=gang.agent_endpoint.token,
                lease_s=gang.lease.total_seconds(),
                grace_s=gang.grace.total_seconds(),
            )
            await self._records.put(record)
        return (await self._read_keys()).public

    def wake(self) -> None:
        """Wake `relay`, because a gang was launched or removed."""
        self._wake.set()

    def explain(self, seen: GangSeen) -> GangSeen:
        """Add the reason why a machine of the gang cannot be reached by SSH, unless the gang has
        another reason.
        """
        if seen.reason or seen.state is GangState.ENDED:
            return seen
        found = (self._problems.get(each.engine_id) for each in seen.nodes if not each.ended_at)
        problem = next((each for each in found if each), "")
        return replace(seen, reason=f"no agent by SSH yet: {problem}") if problem else seen

    async def relay(self) -> None:
        """Connect to the machines of all gangs, and keep the connections open until the method is
        cancelled.
        """
        await self._records.refresh()
        listed_at = -_IDLE_LIST_S
        clock = asyncio.get_running_loop().time
        try:
            while True:
                wanted = self._list_wanted()
                unknown = not self._listed or not wanted.keys() <= self._reached
                if unknown and clock() - listed_at >= (_LIST_S if wanted else _IDLE_LIST_S):
                    listed_at = clock()
                    with suppress(ProviderError):  # the control plane's polls report the error
                        await self._look()
                        self._listed = True
                    wanted = self._list_wanted()
                await self._leave([each for each in self._visits if each not in wanted])
                await self._drop_old()
                for machine, (gang, _) in wanted.items():
                    if machine not in self._visits:
                        visit = self._tend(gang, machine)
                        self._visits[machine] = asyncio.create_task(visit, name=f"reach {machine}")
                self._wake.clear()
                await _wait(self._wake, _SOON_S)
                self._collect()
        finally:
            await self._leave(list(self._visits))

    async def close(self) -> None:
        """Close all connections. Agents keep running."""
        await self._leave(list(self._visits))
        self._sockets.cleanup()

    # Selecting machines

    def _list_wanted(self) -> dict[str, tuple[str, VmNode]]:
        """Return the machines to which the server must connect, by machine id, each with its gang
        and its node.
        """
        return {
            node.id: (record.name, node)
            for record in self._gangs.records.values()
            if record.launched and not record.removed and record.ended_at is None
            for node in record.nodes
            if node.id and node.ended_at is None
        }

    async def _drop_old(self) -> None:
        """Delete the records of ended gangs and of failed launches."""
        for name in list(self._records.records):
            gang = self._gangs.get(name)
            if gang is None:
                old = self._listed and not self._gangs.lock(name).locked()
            else:
                old = gang.removed or gang.ended_at is not None
            if old:
                with suppress(ProviderError):
                    await self._records.drop(name)

    def _collect(self) -> None:
        """Remove the tasks that have ended from `_visits`. A failed task is logged and later
        restarted, so that an error of one machine does not end the tasks of other machines.
        """
        for machine, task in list(self._visits.items()):
            if task.done():
                del self._visits[machine]
                self._reached.discard(machine)
                self._problems.pop(machine, None)
                if not task.cancelled() and (error := task.exception()):
                    _warn(machine, error)

    async def _leave(self, machines: Sequence[str]) -> None:
        tasks = [self._visits.pop(each) for each in machines]
        self._reached -= set(machines)
        self._problems = {
            machine: each for machine, each in self._problems.items() if machine not in machines
        }
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # Reaching one machine

    async def _tend(self, gang: str, machine: str) -> None:
        """Start the agent of a machine, then keep the machine connected until the agent ends."""
        began, wake = self._now(), asyncio.Event()
        gaps = _ClockGaps(self._now)
        entry: ReachedMachine | None = None
        link: MachineLink | None = None
        try:
            while (node := self._node(gang, machine)) is not None:
                if node.ssh is not None and entry != _entry(node, node.ssh):
                    if link is not None:
                        await link.close()
                    entry = _entry(node, node.ssh)
                    link = self._open(entry, self._make_door(gang, node, node.ssh), wake)
                wake.clear()
                # the server's machine was suspended, and its network may not be up yet
                if gaps.were_long():
                    began = self._now()
                ended = await self._step(gang, node, link, began)
                if ended:
                    with suppress(ProviderError):  # repeated until the node has ended
                        await self._fail(gang, machine, ended)
                calm = machine in self._reached
                await _wait(wake, _LIST_S if ended else _CALM_S if calm else _SOON_S)
        finally:
            if link is not None:
                await link.close()

    async def _step(
        self, gang: str, node: VmNode, link: MachineLink | None, began: datetime
    ) -> str:
        """Visit the machine. Return the reason to delete the machine, or ""."""
        try:
            if link is None:
                raise CannotConnect("the cloud has not reported an address for SSH")
            over = await self._visit(gang, node, link)
        except Exception as error:  # noqa: BLE001 - one machine's answers must not end the relay
            if not isinstance(error, (ProviderError, OSError, msgspec.MsgspecError)):
                _warn(node.id, error)
            self._reached.discard(node.id)
            problem = str(error) or type(error).__name__
            # most machines accept no connections while they boot
            if self._now() - began >= _BOOTS and not self._has_started(gang, node.id):
                self._problems[node.id] = problem
            return self._give_up(gang, node, began, problem)
        self._problems.pop(node.id, None)
        self._reached.add(node.id)
        return "the agent on the machine has ended" if over else ""

    async def _visit(self, gang: str, node: VmNode, link: MachineLink) -> bool:
        """Connect, and start the agent if it was never started. Return True if the agent has ended.
        Raises ProviderError.
        """
        setup = await link.connect()
        look = await link.ask("look", HostLook)
        there = next((each for each in look.gangs if each.name == gang), None)
        record = self._records.get(gang) or ReachRecord(name=gang)
        if there is None:
            if node.id not in record.started and not record.token:
                # Another server may have launched the gang in the meantime, and started the agent.
                await self._records.refresh(gang)
                record = self._records.get(gang) or record
                if node.id in record.started:
                    return False
            if node.id in record.started or not record.token:
                return True  # the agent is gone, or its token has been deleted
            config = self._make_config(record, node, setup)
            ranks = [{"rank": node.rank, "devices": [], "config": config}]
            await link.ask(
                "launch", EmptyAnswer, gang=gang, intent=None, command=setup.agent, ranks=ranks
            )
        if node.id not in record.started:
            await self._note_start(gang, node.id)
        return there is not None and all(each.state is RankState.OVER for each in there.ranks)

    def _give_up(self, gang: str, node: VmNode, began: datetime, problem: str) -> str:
        """Return the reason to delete a machine that cannot be reached. The result is "" if the
        time limit for reaching the machine has not passed, or if the machine's agent was already
        started.
        """
        if self._has_started(gang, node.id):
            return ""
        since = max(node.asked_at or node.started_at or began, began - PATIENCE + _FIRST_TRIES)
        if self._now() - since < PATIENCE:
            return ""
        minutes = f"{PATIENCE.total_seconds() / 60:g} minutes"
        return f"no agent could be started by SSH within {minutes}: {problem}"

    def _has_started(self, gang: str, machine: str) -> bool:
        record = self._records.get(gang)
        return record is not None and machine in record.started

    def _make_door(self, gang: str, node: VmNode, target: SshTarget) -> MachineDoor:
        def read_pin() -> str:
            record = self._records.get(gang)
            return record.pins.get(node.id, "") if record else ""

        async def keep_pin(pin: str) -> None:
            record = self._records.get(gang) or ReachRecord(name=gang)
            await self._records.put(replace(record, pins={**record.pins, node.id: pin}))

        return MachineDoor(
            alias=_entry(node, target).name,
            target=target,
            sockets=Path(self._sockets.name),
            read_pin=read_pin,
            keep_pin=keep_pin,
            read_keys=self._read_keys,
        )

    def _open(self, entry: ReachedMachine, door: MachineDoor, wake: asyncio.Event) -> MachineLink:
        """Return the link to a machine. The link sets `wake` when the machine's state changes."""
        cache = self._context.home / "bundles"
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        dependencies = LinkDependencies(
            mark=hashlib.sha256(self._context.installation.encode()).hexdigest()[:8],
            agent=self._agent,
            server_address=self._context.server_address,
            cache=cache,
            now=self._now,
            changed=lambda host, changed: wake.set(),
        )
        return self._make_link(entry, dependencies, door.dial)

    def _make_config(self, record: ReachRecord, node: VmNode, setup: HostSetup) -> dict[str, Any]:
        """Return an agent configuration that lets the agent use the whole machine."""
        if not setup.agent:
            raise Refused("no agent can be started: the server has no archive of the agent")
        address = node.address or (node.ssh and node.ssh.address) or "127.0.0.1"
        return {
            "protocol": 1,
            "gang": record.name,
            "rank": node.rank,
            "address": f"unix:{setup.root}/sock",
            "token": record.token,
            "home": f"{setup.root}/gangs/{record.name}/{node.rank}",
            "cache": setup.cache,
            "lease_s": record.lease_s,
            "grace_s": record.grace_s,
            "node_address": address,
            "notices": self._notices,
        }

    async def _note_start(self, gang: str, machine: str) -> None:
        """Record that an agent was started. The token is deleted once all agents of the gang have
        been started."""
        record = self._records.get(gang) or ReachRecord(name=gang)
        started = record.started | {machine}
        known = self._gangs.get(gang)
        made = known is not None and all(each.id for each in known.nodes)
        done = known is not None and made and known.ids <= started
        token = "" if done else record.token
        await self._records.put(replace(record, started=started, token=token))

    def _node(self, gang: str, machine: str) -> VmNode | None:
        record = self._gangs.get(gang)
        return next((each for each in record.nodes if each.id == machine), None) if record else None

    # Shared by all machines

    async def _read_keys(self) -> KeyPair:
        if self._keys is None:
            self._keys = await load_keys(self._context.state)
        return self._keys

    def _pack_agent(self) -> Bundle | None:
        make = self._context.agent_archive
        return None if make is None else make_bundle(make(), ".pyz")


class _ClockGaps:
    """Detects that the server's machine was suspended: the wall clock advanced, but the event
    loop's clock did not.
    """

    def __init__(self, now: Callable[[], datetime]) -> None:
        self._now, self._clock = now, asyncio.get_running_loop().time
        self._last = (now(), self._clock())

    def were_long(self) -> bool:
        """Return whether the server's machine was suspended for over a minute since the last
        call."""
        (day, ticks), self._last = self._last, (self._now(), self._clock())
        passed = timedelta(seconds=self._last[1] - ticks)
        return self._last[0] - day - passed > _SUSPENDED


def _entry(node: VmNode, target: SshTarget) -> ReachedMachine:
    """Return the machine in the form that `SshLink` needs. An unusual id is hashed, because the id
    becomes part of paths.
    """
    plain = _PLAIN.fullmatch(node.id) is not None
    name = node.id if plain else hashlib.sha256(node.id.encode()).hexdigest()[:20]
    return ReachedMachine(name=name, address=target.address, port=target.port)


def _warn(machine: str, error: BaseException) -> None:
    _log.warning("a machine could not be visited", exc_info=error, extra={"machine": machine})


async def _wait(wake: asyncio.Event, seconds: float) -> None:
    """Wait for the event, but at most for `seconds`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await wake.wait()
