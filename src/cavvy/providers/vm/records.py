"""The records of gangs on virtual machines, and the machines' names. If a record is lost, the
gang's machines are found by their names.

A machine's name is `cv-MARK-GANG-LAUNCH-RANK-COUNT`. MARK identifies the installation. Each launch
of a gang has its own LAUNCH, so that machines of an abandoned launch are not mistaken for machines
of the next launch. COUNT is the gang's number of nodes, which shows whether machines of the gang
are missing. RANK of a machine that replaces a lost one is COUNT higher than that of the lost one:
in a gang of 8 nodes, the machines of rank 3 have the numbers 3, 11, 19, ... If a gang's name is too
long for the cloud, GANG is a hash of the name.
"""

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from cavvy.domain.gangs import NodeExtra
from cavvy.domain.values import Struct, replace
from cavvy.providers.vm.cloud import NAME_PREFIX, CloudMachine, MachineState, SshTarget

KEPT = timedelta(days=2)  # how long a record is kept after the gang's end
INSTALLATION, GANG = "cavvy-installation", "cavvy-gang"  # tags of a machine
# number of hexadecimal digits of MARK, of the hash, and of LAUNCH
_MARK, _HASH, _LAUNCH = 10, 20, 4
_NAME = re.compile(rf"{NAME_PREFIX}[0-9a-f]{{{_MARK}}}-.+-[0-9a-f]{{{_LAUNCH}}}-\d+-\d+")
_REST = 28  # characters of a name without the hash: the prefix, the other parts and the dashes
_TURNS = 50  # machines of a rank with different names; by then, the first ones are long gone


class VmNode(Struct, frozen=True, kw_only=True):
    """One node. If `asked_at` is set, the node's machine was requested; if `id` is set, the machine
    was created.
    """

    rank: int
    number: int = 0  # how many nodes of this rank were replaced before
    # the round that asked for this node (`GangSpec.round`) if it replaces a lost one, otherwise 0;
    # None if the record was lost
    round: int | None = 0
    refused: int = 0  # how often the cloud has refused a machine for this node
    asked_at: datetime | None = None
    id: str = ""
    # the last time at which the cloud reported that the machine was not billed yet
    booting_at: datetime | None = None
    made_at: datetime | None = None  # when the cloud answered the request
    started_at: datetime | None = None
    # the latest possible start of the bill; None if the cloud reported the start
    started_by: datetime | None = None
    ended_at: datetime | None = None
    # True: the cloud did not report the end, and the machine was gone at `ended_at`
    unseen: bool = False
    up: bool = False
    address: str | None = None
    ssh: SshTarget | None = None
    # True even before the node has ended, because a stopped machine may still be billed
    preempted: bool = False
    no_capacity: bool = False
    reason: str = ""
    waits: str = ""  # what the machine waits for, as the cloud last reported it
    failed: bool = False  # True: the layer deleted the machine because of `reason`
    deleted: bool = False  # True: the layer has asked the cloud to delete the machine


class VmGangRecord(Struct, frozen=True, kw_only=True):
    """The record of one gang. A gang counts as launched, and is reported, once all nodes of the
    gang exist.
    """

    name: str
    launch: str  # LAUNCH in the module's docstring
    intended_at: datetime
    nodes: tuple[VmNode, ...]
    region: str = ""  # the region of the offer; "" if the record was lost
    # what each node is billed for in addition; () if the record was lost
    extras: tuple[NodeExtra, ...] = ()
    launched: bool = False
    # True: the gang was removed; machines that appear later are deleted
    removed: bool = False
    # when the launch failed; its machines are deleted, and the name may be launched again
    given_up_at: datetime | None = None
    leftovers: tuple[str, ...] = ()  # ids of machines that must be deleted
    # machines of failed launches, and duplicates: they are billed, and are no nodes
    rolled_back: tuple[VmNode, ...] = ()
    replaced: tuple[VmNode, ...] = ()  # nodes that were lost and replaced
    # when the layer saw that all machines had ended; their bills may have ended long before
    ended_at: datetime | None = None

    @property
    def ids(self) -> frozenset[str]:
        """The ids of the gang's machines that have not ended."""
        return frozenset(node.id for node in self.nodes if node.id and node.ended_at is None)

    @property
    def started(self) -> bool:
        """True if `launch` has nothing left to do: the launch is complete, or the gang was removed
        or has ended.
        """
        return self.launched or self.removed or self.ended_at is not None

    @property
    def cleared(self) -> bool:
        """Whether all machines that were rolled back or replaced have ended."""
        return all(node.ended_at is not None for node in (*self.rolled_back, *self.replaced))

    @property
    def past_ids(self) -> frozenset[str]:
        """The ids of machines that must not become nodes of the gang (again)."""
        past = (*self.rolled_back, *self.replaced)
        return frozenset((*self.leftovers, *(node.id for node in past)))


def is_over(record: VmGangRecord) -> bool:
    """Return True if all machines of the gang have ended, or if the gang was removed before a
    machine was created.
    """
    return record.ended_at is not None or (
        record.removed and not any(node.id for node in record.nodes)
    )


class MachineName(NamedTuple):
    """The parts of a machine's name, without the installation's mark."""

    gang: str  # the gang's name, or its hash
    launch: str
    rank: int
    nodes: int
    number: int = 0  # how many machines of this rank were replaced before


class MachineNames:
    """Builds and parses the names of one installation's machines."""

    def __init__(self, installation: str, limit: int) -> None:
        self.mark = make_mark(installation)
        self._limit = limit
        self._hash = min(_HASH, limit - _REST)  # number of digits of the hash of a gang's name

    def make(self, record: VmGangRecord, node: VmNode) -> str:
        count, turn = len(record.nodes), node.number % _TURNS
        parts = MachineName(record.name, record.launch, node.rank, count, turn)
        # the last rank has the longest name, and all names of a gang are made alike
        longest = parts._replace(rank=count - 1, number=_TURNS - 1)
        if len(self._join(longest)) <= self._limit:
            return self._join(parts)
        return self._join(parts._replace(gang=_digest(record.name, self._hash)))

    def read(self, machine: CloudMachine) -> MachineName | None:
        """Return the parts of a machine's name, or None if the machine does not belong to this
        installation."""
        head, fields = f"{NAME_PREFIX}{self.mark}-", machine.name.rsplit("-", 3)
        if not machine.name.startswith(head) or len(fields) != 4:
            return None
        gang, launch, rank, count = fields
        gang = gang.removeprefix(head)
        if not (gang and rank.isdecimal() and count.isdecimal() and len(launch) == _LAUNCH):
            return None
        number, first = divmod(int(rank), max(1, int(count)))
        if machine.tags.get(INSTALLATION) == self.mark:
            gang = machine.tags.get(GANG) or gang
        return MachineName(gang, launch, first, int(count), number)

    def same(self, written: str, gang: str) -> bool:
        """Return whether `written`, the part GANG of a machine's name, belongs to the gang whose
        name or hash is `gang`.
        """
        return written in (gang, _digest(gang, self._hash))

    def _join(self, parts: MachineName) -> str:
        rank = parts.rank + parts.number * parts.nodes
        fields = [parts.gang, parts.launch, str(rank), str(parts.nodes)]
        return NAME_PREFIX + "-".join([self.mark, *fields])


def is_machine_name(name: str) -> bool:
    """Return whether the name has the form of a machine's name, for any installation. The prefix
    `cv-` is not enough, because users may have objects with names such as "cv-images".
    """
    return _NAME.fullmatch(name) is not None


def make_mark(installation: str) -> str:
    """Return the part MARK of a machine's name (see the module's docstring). MARK is also the value
    of the tag INSTALLATION.
    """
    return _digest(installation, _MARK)


def make_record(name: str, nodes: int, now: datetime) -> VmGangRecord:
    """Return the record of a new launch."""
    return VmGangRecord(
        name=name,
        launch=_digest(f"{name} {now.isoformat()}", _LAUNCH),
        intended_at=now,
        nodes=tuple(VmNode(rank=rank) for rank in range(nodes)),
    )


def recall(
    name: str, found: Sequence[tuple[MachineName, CloudMachine]], now: datetime
) -> VmGangRecord | None:
    """Restore a gang's lost record from its machines. Return None if all machines have ended. If
    the machines belong to several launches, the most complete launch is used. Of the machines of
    one rank, the newest is used.
    """
    launches: dict[str, dict[int, tuple[int, CloudMachine]]] = {}
    counts: Mapping[str, int] = {part.launch: part.nodes for part, _ in found}
    for part, machine in sorted(found, key=lambda each: (-each[0].number, each[1].id)):
        if machine.state is not MachineState.ENDED and part.rank < counts[part.launch]:
            known = launches.setdefault(part.launch, {})
            known.setdefault(part.rank, (part.number, machine))
    if not launches:
        return None
    launch = max(launches, key=lambda each: (len(launches[each]) / counts[each], each))
    machines = launches[launch]
    nodes = [VmNode(rank=rank, round=None) for rank in range(counts[launch])]
    for rank, (number, machine) in machines.items():
        found_id = "" if machine.state is MachineState.REQUESTED else machine.id
        nodes[rank] = replace(nodes[rank], number=number, id=found_id, asked_at=now)
    return VmGangRecord(
        name=name,
        launch=launch,
        intended_at=now,
        nodes=tuple(nodes),
        launched=all(node.id for node in nodes),
    )


def take_out(record: VmGangRecord, ranks: Collection[int], number: int) -> VmGangRecord:
    """Return the record, in which the nodes of these ranks are listed as replaced, and new nodes
    without machines have taken their places. `number` is that of the round; nodes that this round
    has already replaced stay. Nodes of a record that was lost stay if their machines run, because
    this round may have asked for them.
    """
    nodes, replaced, doomed = [], list(record.replaced), set(record.leftovers)
    for node in record.nodes:
        kept = node.round is None and node.ended_at is None
        if node.rank not in ranks or node.round == number:
            nodes.append(node)
        elif kept or not node.id:
            nodes.append(replace(node, round=number))
        else:
            if node.ended_at is None:
                doomed.add(node.id)
                node = replace(node, deleted=True)
            replaced.append(node)
            nodes.append(VmNode(rank=node.rank, number=node.number + 1, round=number))
    return replace(
        record, nodes=tuple(nodes), replaced=tuple(replaced), leftovers=tuple(sorted(doomed))
    )


def is_awaited(record: VmGangRecord, part: MachineName, machine: str) -> bool:
    """Return whether a machine that is no node of the gang may be the one with which a lost node is
    replaced."""
    over = record.removed or record.ended_at is not None or record.given_up_at is not None
    if over or machine in record.past_ids or part.launch != record.launch:
        return False
    missing = [node for node in record.nodes if record.launched and not node.id]
    return (part.rank, part.number) in [(node.rank, node.number % _TURNS) for node in missing]


class MachineBill(Struct, frozen=True, kw_only=True):
    """The facts that determine the bill of a machine."""

    free: bool = False  # True: the machine is booting, and its cloud does not bill the boot
    boots_free: bool = False  # True: the cloud does not bill the boot of any machine
    over: bool = False  # True: the machine is no longer billed
    deleted_at: datetime | None = None  # when the cloud accepted the machine's deletion


def sight(node: VmNode, machine: CloudMachine, now: datetime, bill: MachineBill) -> VmNode:
    """Update the node's record from the state of the node's machine. Once recorded, the node's
    start and end never change.
    """
    if node.ended_at is not None:
        return node
    if bill.free and node.started_at is None:
        address = machine.address or node.address
        return replace(node, booting_at=now, address=address, waits=machine.waits)
    end = machine.ended_at or bill.deleted_at
    at = min(now, end) if bill.over and end is not None else now
    taken = _is_taken(node, machine)
    node = begin(node, machine, at, boots_free=bill.boots_free, over=bill.over)
    node = replace(
        node,
        up=node.up or machine.state is MachineState.RUNNING,
        address=machine.address or node.address,
        ssh=machine.ssh or node.ssh,
        no_capacity=node.no_capacity or machine.no_capacity,
        preempted=node.preempted or machine.preempted or taken,
        reason=_choose_reason(node, machine),
        waits=machine.waits,
    )
    if not bill.over:
        return node
    return end_node(node, end, now)


def end_node(node: VmNode, end: datetime | None, now: datetime) -> VmNode:
    """Mark the node as ended at the time `end`. If `end` is None, the node ended at an unknown time
    before `now`."""
    ended = max(node.started_at, end or now) if node.started_at else end or now
    return replace(node, ended_at=ended.astimezone(UTC), unseen=end is None)


def _is_taken(node: VmNode, machine: CloudMachine) -> bool:
    """Return whether the machine was reclaimed, for a cloud that does not distinguish reclaims from
    deletions.
    """
    existed = bool(node.started_at or node.booting_at or machine.created_at)
    return machine.preempted_or_deleted and existed and not (node.deleted or node.failed)


def _choose_reason(node: VmNode, machine: CloudMachine) -> str:
    """Return why the machine stopped or ended. If Cavvy deleted the machine, the recorded cause of
    the deletion is not replaced.
    """
    known = node.failed or (node.deleted and machine.preempted_or_deleted)
    return node.reason if known else machine.reason or node.reason


def begin(
    node: VmNode, machine: CloudMachine | None, now: datetime, *, boots_free: bool, over: bool
) -> VmNode:
    """Return a copy of the node in which the start of the node's bill is set. `now` is the time of
    the poll that found `machine`. `machine` is None if the cloud no longer knows the machine.

    If the cloud does not report the start, the start is recorded as a range. The bill began after
    the last poll that showed the machine as not billed yet or, without such a poll, after the
    request. At the latest, the bill began with the reply to the request if the cloud bills the time
    of booting, and with this poll otherwise. If a machine ended while booting (`over` is True), no
    start is recorded, unless the cloud bills the boot.
    """
    if node.started_at is not None:
        return node
    created, running = (machine.created_at, machine.running_at) if machine else (None, None)
    exact = running if boots_free else created
    if exact is not None:
        return replace(node, started_at=min(exact, now).astimezone(UTC))
    known = [each for each in (node.booting_at, created) if each is not None]
    first = min(max(known) if known else node.asked_at or now, now)
    last = now if boots_free or node.made_at is None else min(now, node.made_at)
    if over and boots_free and first >= last:
        return node
    return replace(node, started_at=first, started_by=last if last > first else None)


def make_nodes(asked: Sequence[VmNode], ids: Sequence[str], now: datetime) -> list[VmNode]:
    """Return the requested nodes, with the machine ids from the cloud's reply."""
    return [replace(node, id=each, made_at=now) for node, each in zip(asked, ids, strict=True)]


def with_nodes(record: VmGangRecord, changed: Sequence[VmNode]) -> VmGangRecord:
    """Return the record with the nodes in `changed`; each of these nodes replaces the record's node
    of the same rank.
    """
    by_rank = {node.rank: node for node in changed}
    return replace(record, nodes=tuple(by_rank.get(node.rank, node) for node in record.nodes))


def _digest(text: str, length: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:length]
