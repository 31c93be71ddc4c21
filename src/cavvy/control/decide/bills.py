"""Computes the costs of gangs: until now, until the end of a gang, and until a takeover by another
job.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from functools import partial

from cavvy.control.decide.job import cap_of
from cavvy.control.decide.looks import GangLook
from cavvy.control.decide.rows import JobRows
from cavvy.costs.extras import bill_extras, bill_traffic, bound_lost_traffic, rate_extras
from cavvy.costs.metering import bill, total
from cavvy.domain.events import Charge, ChargeKind
from cavvy.domain.gangs import GangSeen, GangState, NodeSeen
from cavvy.domain.jobs import Attempt, AttemptPhase, JobRecord, Node, UnsureBill
from cavvy.domain.offers import Offer
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import Struct, replace

_LONGEST_H = 100_000  # maximum time in hours for which costs are computed
# micro-dollars; a provider may report start times of the same node that differ by microseconds
_TOLERANCE = 100
# charges of which the stored ones are not needed to compute the final ones
_RECOMPUTED = (ChargeKind.MINIMUM, ChargeKind.TRAFFIC)
_OF_NODES = (ChargeKind.NODE, ChargeKind.KEPT)  # the charges of a node's machine
ACCRUE = timedelta(seconds=45)  # time between two writes of the charges of running nodes
# With many nodes, what each costs is written less often, since views add what it costs since then:
# of 1,000 nodes every 4 minutes, so that all together cause about four writes a second. Other
# servers on the database know no better than the last write.
_ACCRUE_EACH = timedelta(milliseconds=240)
_ACCRUE_MOST = timedelta(minutes=4)


def spending(
    rows: JobRows, stored: Sequence[Charge], looks: Mapping[str, GangLook], now: datetime
) -> tuple[Money, HourlyRate]:
    """Return the money that the job has spent until now, including minimum charges, and the hourly
    rate of all its running nodes.

    Running nodes are charged until `now`, although the last poll may be one polling interval old.
    """
    spent, rate = Money(0), 0
    for attempt in rows.attempts.values():
        look = looks.get(attempt.gang)
        if attempt.phase is AttemptPhase.ENDED or look is None or look.told is None:
            charged = total(charge for charge in stored if charge.attempt_id == attempt.id)
            if attempt.phase is AttemptPhase.RUNNING and attempt.launched_at is not None:
                price = attempt.offer.rate.times(attempt.nodes)  # no poll has found the gang yet
                charged = max(charged, price.over(now - attempt.launched_at))
                rate += price.micros_per_hour
            unseen = attempt.unsure_bill  # also count spending that is possible but not certain
            spent += charged if unseen is None else charged + unseen.more
            continue
        told = look.told
        spent += total(bill_gang(attempt, told, now, final=True, earlier=stored))
        spent += total(bill_traffic(attempt, rows.nodes_of(attempt)))
        rate += _rate_running(attempt.offer, told, now).micros_per_hour
    return spent, HourlyRate(rate)


def _rate_running(offer: Offer, told: GangSeen, now: datetime) -> HourlyRate:
    """Return the hourly rate of the gang's running nodes, including their disks and addresses."""
    machines = (*told.nodes, *told.rolled_back)
    alive = [node for node in machines if node.started_at and not node.ended_at]
    if alive and offer.payers > 1:
        alive = [node for node in machines if node.started_at]
    price = max(told.rates, key=lambda entry: entry[0])[1] if told.rates else offer.rate
    extras = [rate_extras(offer, node.extras, now).micros_per_hour for node in alive]
    return HourlyRate(price.times(len(alive)).micros_per_hour + sum(extras))


def budget_left(job: JobRecord, spent: Money) -> Money | None:
    """Return the rest of the job's budget, or None if the job has no budget."""
    cap = cap_of(job)
    return None if cap is None else Money(max(0, cap.micros - spent.micros))


def paid_time(left: Money, rate: HourlyRate) -> timedelta:
    """Return how long the money lasts if the job spends it at this rate. The rate must be above 0.
    The result is at most eleven years.
    """
    return timedelta(hours=min(_LONGEST_H, left.micros / rate.micros_per_hour))


def find_accrual_pause(nodes: int) -> timedelta:
    """Return the time between two writes of what a running node costs that no budget limits, if so
    many nodes report to this server.
    """
    return max(ACCRUE, min(nodes * _ACCRUE_EACH, _ACCRUE_MOST))


def is_accrual_due(
    attempt: Attempt, look: GangLook, *, divided: bool = False, pause: timedelta = ACCRUE
) -> bool:
    """Return whether `accrue` may return charges now. Each poll is charged at most once. Nodes
    without a price are charged only at their end, unless their bill is `divided` among requests,
    which are counted with it. `pause` is for work that no budget limits.
    """
    if divided or look.pays is not None or attempt.phase is not AttemptPhase.RUNNING:
        pause = ACCRUE
    if look.told is None or look.told_at is None or look.charged_at == look.told_at:
        return False
    if not any(node.started_at for node in (*look.told.nodes, *look.told.rolled_back)):
        return False
    paid = attempt.offer.rate.micros_per_hour or any(
        rate.micros_per_hour for _, rate in look.told.rates
    )
    due = look.accrued_at is None or look.told_at - look.accrued_at >= pause
    return due and bool(paid or divided or attempt.phase is AttemptPhase.KEPT)


def accrue(
    attempt: Attempt,
    look: GangLook,
    stored: Iterable[Charge],
    nodes: Sequence[Node] = (),
    *,
    divided: bool = False,
    pause: timedelta = ACCRUE,
) -> tuple[tuple[Charge, ...], GangLook]:
    """Return the charges of the gang's nodes until the last observation, if charges are due. The
    new charges replace the `stored` charges of the same nodes. If the provider has lost its record
    of the gang, the stored charges supply the missing facts: disks, addresses, earlier starts, and
    machines that were rolled back. The rows `nodes` contain the nodes' network traffic.
    """
    due = is_accrual_due(attempt, look, divided=divided, pause=pause)
    if look.told is None or look.told_at is None or not due:
        return (), look
    earlier = [charge for charge in stored if charge.attempt_id == attempt.id]
    told = _from_first_charge(_until_seen(look.told, look), earlier, attempt.repairs)
    charges = bill_gang(attempt, told, look.told_at, final=False, earlier=earlier)
    ranks = {charge.rank for charge in charges}
    charges += [each for each in _list_forgotten(look.told, earlier) if each.rank in ranks]
    charges += [each for each in bill_traffic(attempt, nodes) if each.rank in ranks]
    look = replace(look, charged_at=look.told_at)
    # If ranks are missing, the provider has not reported the start of all nodes yet.
    if len({charge.rank for charge in charges if charge.kind in _OF_NODES}) == attempt.nodes:
        look = replace(look, accrued_at=look.told_at)
    return tuple(charges), look


def _list_forgotten(told: GangSeen | None, earlier: Sequence[Charge]) -> list[Charge]:
    """Return the `earlier` charges for rolled-back machines that the provider no longer reports."""
    reported = {node.rank for node in told.rolled_back} if told else set()
    return [
        each
        for each in earlier
        if each.kind is ChargeKind.ROLLED_BACK and each.rank not in reported
    ]


def _from_first_charge(
    told: GangSeen, earlier: Sequence[Charge], repairs: Sequence[int] = ()
) -> GangSeen:
    """Return the gang with corrected start times: no node starts later than its first charge in
    `earlier`. A node that ended at its start time was not billed. The first charge of a rank in
    `repairs` may be that of the node that was replaced.
    """
    first: dict[int, datetime] = {}
    for charge in earlier:
        if charge.kind in _OF_NODES and charge.rank not in repairs:
            first[charge.rank] = min(charge.since, first.get(charge.rank, charge.since))
    return replace(
        told,
        nodes=[
            replace(node, started_at=min(node.started_at, first.get(node.rank, node.started_at)))
            if node.started_at and node.started_at != node.ended_at
            else node
            for node in told.nodes
        ],
    )


def _until_seen(told: GangSeen, look: GangLook) -> GangSeen:
    """Return the gang with the shortest times for which its nodes can have been billed. If the end
    of a node is not recorded, the time at which the node was last seen becomes its end.
    """
    over = told.state is GangState.ENDED
    nodes = [
        replace(node, ended_at=look.alive_at.get(node.rank, node.started_at))
        if node.unseen or (node.ended_at is None and (over or node.seen_at is not None))
        else node
        for node in told.nodes
    ]
    others = _shorten_all(told.rolled_back, look)
    return replace(told, nodes=[_start_late(node) for node in nodes], rolled_back=others)


def _start_late(node: NodeSeen) -> NodeSeen:
    """Return the node with its latest possible start."""
    return replace(node, started_at=node.started_by or node.started_at, started_by=None)


def _shorten_all(nodes: Sequence[NodeSeen], look: GangLook) -> list[NodeSeen]:
    """Return the machines that were billed for certain, with their shortest possible lifetimes. A
    machine that has not ended counts as ended at its `seen_at` or, if `seen_at` is unknown, at the
    last poll that found the gang.
    """
    found = []
    for node in nodes:
        if node.started_at is None or not _outlives_start(node):
            continue
        node = _start_late(node)
        if node.unseen:
            node = replace(node, ended_at=node.started_at)
        elif node.ended_at is None:
            seen_at = node.seen_at or look.told_at
            ends = [each for each in (node.started_at, seen_at) if each is not None]
            node = replace(node, ended_at=max(ends))
        found.append(node)
    return found


def _outlives_start(node: NodeSeen) -> bool:
    """Return False if the node ended before or at `started_by`, the latest time at which its bill
    can have begun. Otherwise, return True.
    """
    return node.ended_at is None or node.started_by is None or node.started_by < node.ended_at


class ClosedBill(Struct, frozen=True, kw_only=True):
    """The final charges of an ended gang, and how much higher the true charges may be."""

    charges: tuple[Charge, ...]
    ended_at: datetime
    unsure_bill: UnsureBill | None


def close_bill(
    attempt: Attempt,
    look: GangLook,
    nodes: Sequence[Node],
    stored: Sequence[Charge],
    now: datetime,
) -> ClosedBill:
    """Compute the final charges. Each node is charged until its reported end or, if no end was
    reported, until it was last seen.

    `stored` are the job's charges so far; `nodes` are the rows with the times of the agents' last
    messages. If a node turns out not to be billed, its stored charges are set to zero.
    """
    billed = [charge for charge in stored if charge.attempt_id == attempt.id]
    billed = [charge for charge in billed if charge.kind not in _RECOMPUTED]
    least, most = (
        _from_first_charge(each, billed, attempt.repairs)
        for each in _bound_gang(attempt, look, nodes, billed, now)
    )
    forgotten = _list_forgotten(look.told, billed)
    charges = bill_gang(attempt, least, now, final=True, earlier=billed) + forgotten
    ranks = {charge.rank for charge in charges}
    charges += [_until(each, each.since) for each in billed if each.rank not in ranks]
    longest = bill_gang(attempt, most, now, final=True, earlier=billed)
    more = total(longest).micros + total(forgotten).micros - total(charges).micros
    ends = [attempt.finished_at or attempt.since, *(node.ended_at or now for node in least.nodes)]
    latest = _latest_end(attempt, look, most, now) if more > 0 else None
    lost = bound_lost_traffic(attempt, nodes, now)
    charges += _list_early(attempt, least, stored)
    return ClosedBill(
        charges=(*charges, *bill_traffic(attempt, nodes)),
        ended_at=max(ends),
        unsure_bill=_make_unsure(max(0, more), latest, lost),
    )


def _list_early(attempt: Attempt, told: GangSeen, stored: Sequence[Charge]) -> list[Charge]:
    """Return the charges for the time before the first charge of a node that an attempt of the job
    has handed on. Some clouds report the true start of a node only when it has ended, and the
    bills of the earlier attempts are closed then.
    """
    if not attempt.repairs or attempt.adopted_at is None:
        return []
    first = dict.fromkeys(range(attempt.nodes), attempt.adopted_at)
    others = [each for each in stored if each.attempt_id != attempt.id and each.kind in _OF_NODES]
    # The periods of a node follow each other without a gap, also those of two attempts.
    for charge in sorted(others, key=lambda each: (each.until, each.since), reverse=True):
        if first.get(charge.rank) == charge.until:
            first[charge.rank] = charge.since
    charges: list[Charge] = []
    for node in told.nodes:
        began, billed = node.started_at, first.get(node.rank, attempt.adopted_at)
        if node.rank in attempt.repairs or began is None or billed == attempt.adopted_at:
            continue
        if began < billed:
            charges += bill(
                attempt=attempt,
                rank=node.rank,
                started=began,
                until=billed,
                rates=told.rates,
                final=False,
            )
    return charges


def close_part(
    attempt: Attempt,
    look: GangLook,
    nodes: Sequence[Node],
    stored: Sequence[Charge],
    now: datetime,
) -> ClosedBill:
    """Compute the final charges of an attempt whose gang goes on with another attempt of the job.
    Nodes that run are charged until now. The minimum charge of such a node is left to the attempt
    that has the node at its end.
    """
    told = look.told or GangSeen(name=attempt.gang, state=GangState.RUNNING)
    left = {node.rank for node in told.nodes if node.ended_at is None}
    cut = [replace(x, ended_at=now, seen_at=None) if x.rank in left else x for x in told.nodes]
    look = replace(look, told=replace(told, nodes=cut))
    bill = close_bill(attempt, look, nodes, stored, now)
    charges = [
        each
        for each in bill.charges
        if each.kind is not ChargeKind.MINIMUM or each.rank not in left
    ]
    return replace(bill, charges=tuple(charges), ended_at=now)


def _make_unsure(more: int, latest: datetime | None, traffic: Money) -> UnsureBill | None:
    """Return the uncertain part of the bill. It is the sum of two amounts: `more`, in
    micro-dollars, for the time of the machines, and `traffic`. Return None if the sum is 0.
    """
    whole = traffic + Money(more)
    return UnsureBill(latest=latest, more=whole, traffic=traffic) if whole.micros else None


def _latest_end(attempt: Attempt, look: GangLook, most: GangSeen, now: datetime) -> datetime | None:
    """Return the time by which all machines had certainly ended, or None if the provider reported
    the end of each machine.
    """
    told = look.told
    if told is not None and all(_is_end_known(told, rank) for rank in range(attempt.nodes)):
        open_ends = [each for each in told.rolled_back if each.unseen or each.ended_at is None]
        if not open_ends:
            return None
    machines = (*most.nodes, *most.rolled_back)
    return max([node.ended_at or now for node in machines], default=now)


def _is_end_known(told: GangSeen, rank: int) -> bool:
    """Return whether the provider reported that the rank's node has ended or never started."""
    nodes = [node for node in told.nodes if node.rank == rank]
    if told.state is GangState.ENDED:
        nodes = [node for node in nodes if node.started_at is not None]
    elif not nodes:
        return False
    return all(node.ended_at is not None and not node.unseen for node in nodes)


def _bound_gang(
    attempt: Attempt,
    look: GangLook,
    nodes: Sequence[Node],
    billed: Sequence[Charge],
    now: datetime,
) -> tuple[GangSeen, GangSeen]:
    """Return two versions of the gang: one with the shortest possible lifetimes of its nodes, and
    one with the longest possible lifetimes.
    """
    told = look.told or GangSeen(name=attempt.gang, state=GangState.ENDED)
    rates = told.rates or [
        (charge.since, charge.rate) for charge in billed if charge.kind in _OF_NODES
    ]
    lives = [
        _bound_life(attempt, rank, look, _sightings(rank, look, nodes, billed), now)
        for rank in range(attempt.nodes)
    ]
    others = _shorten_all(told.rolled_back, look)
    least = replace(told, rates=rates, nodes=[life.least for life in lives if life.least])
    most = replace(least, nodes=[life.most for life in lives if life.most])
    return replace(least, rolled_back=others), most


class _Life(Struct, frozen=True, kw_only=True):
    """The shortest and the longest possible lifetime of a node; `least` is None if the node may
    never have run.
    """

    least: NodeSeen | None
    most: NodeSeen | None


def _sightings(
    rank: int, look: GangLook, nodes: Sequence[Node], charges: Sequence[Charge]
) -> list[datetime]:
    """Return the times at which the node certainly existed, according to its provider, its agent
    and its charges.
    """
    agents = [at for node in nodes if node.rank == rank for at in (node.claimed_at, node.heard_at)]
    mine = [charge for charge in charges if charge.rank == rank and charge.kind in _OF_NODES]
    billed = [at for charge in mine for at in (charge.since, charge.until)]
    return sorted(at for at in [look.alive_at.get(rank), *agents, *billed] if at is not None)


def _bound_life(
    attempt: Attempt, rank: int, look: GangLook, sightings: Sequence[datetime], now: datetime
) -> _Life:
    reported = [] if look.told is None else look.told.nodes
    node = next((each for each in reported if each.rank == rank), None)
    if node is None or node.started_at is None:
        return _bound_unreported(attempt, rank, look, sightings, now)
    latest = max(node.started_at, node.ended_at or now)
    most = replace(node, ended_at=latest)
    if not _outlives_start(most):  # no poll showed the machine as running, but its agent may have
        heard = [at for at in sightings if node.started_at <= at <= latest]
        if not heard:
            return _Life(least=None, most=most)
        return _Life(least=replace(most, started_at=heard[0], started_by=None), most=most)
    began = node.started_by or node.started_at
    alive = min(latest, max([began, *sightings]))
    if node.ended_at is not None and not node.unseen:
        alive = latest
    return _Life(least=replace(_start_late(node), ended_at=alive), most=most)


def _bound_unreported(
    attempt: Attempt, rank: int, look: GangLook, sightings: Sequence[datetime], now: datetime
) -> _Life:
    """Return the possible lifetimes of a node whose start its provider did not report. If a machine
    of the rank was rolled back, the times in `sightings` may come from that machine's agent. A
    second machine of the rank is assumed only if the provider reports a second machine.
    """
    began, told = attempt.adopted_at or attempt.created_at, look.told
    others = told is not None and any(each.rank == rank for each in told.rolled_back)
    if others and told is not None and not any(each.rank == rank for each in told.nodes):
        return _Life(least=None, most=None)
    if sightings and not others:
        node = NodeSeen(rank=rank, engine_id="", started_at=sightings[0], ended_at=sightings[-1])
        return _Life(least=node, most=replace(node, started_at=began, ended_at=now))
    requested = attempt.launched_at is not None or look.doubt or look.unsure
    never_started = look.told is not None and look.told.state is GangState.ENDED
    if look.denied or not requested or never_started:
        return _Life(least=None, most=None)
    began = look.told_at or began  # the node had not started at the time of the last poll
    node = NodeSeen(rank=rank, engine_id="", started_at=began, ended_at=now)
    return _Life(least=None, most=node)


def bill_gang(
    attempt: Attempt,
    told: GangSeen,
    until: datetime,
    *,
    final: bool,
    earlier: Sequence[Charge] = (),
) -> list[Charge]:
    """Return the charges of this attempt for the gang's nodes. Each node is charged until its end
    or, if it is still running, until `until`.

    If the attempt took the gang over from another job, its charges begin at the takeover. The time
    for which the gang was kept warm is a separate charge. Nodes that pay one machine together are
    charged until the last one ends. The minimum charge applies to the node's
    whole lifetime, not to each attempt. If the provider no longer reports the disks and addresses
    of a node, the rates of its `earlier` charges are used.
    """
    charges: list[Charge] = []
    last = max((node.ended_at or until for node in told.nodes), default=until)
    together = attempt.offer.payers > 1
    # Lost nodes may end after they were replaced. Nodes that pay one machine together pay for it
    # also between the loss of one of them and the start of the next one.
    replaced = told.replaced if attempt.repairs and not together else ()
    for node in (*told.nodes, *replaced):
        if node.started_at is None or (not together and _is_over(node, attempt)):
            continue
        end = last if together else node.ended_at or until
        began = max(node.started_at, attempt.adopted_at or node.started_at)
        if together and node.rank in attempt.repairs and attempt.adopted_at is not None:
            began = attempt.adopted_at
        kept = end if attempt.kept_since is None else min(end, max(began, attempt.kept_since))
        bill_node = partial(bill, attempt=attempt, rank=node.rank, rates=told.rates)
        charges += bill_node(started=began, until=kept, final=False)
        waited = bill_node(started=kept, until=end, final=False)
        charges += [replace(charge, kind=ChargeKind.KEPT) for charge in waited]
        charges += bill_extras(attempt, node, since=began, until=end, earlier=earlier, final=final)
        if final:
            whole = bill_node(started=node.started_at, until=end, final=True)
            charges += [charge for charge in whole if charge.kind is ChargeKind.MINIMUM]
    if attempt.adopted_at is None:  # otherwise, the attempt that launched the gang pays
        charges += _bill_rolled_back(attempt, told, until, final=final)
    return charges


def _is_over(node: NodeSeen, attempt: Attempt) -> bool:
    """Return whether the node was lost before the attempt took its gang over to replace it."""
    ended, began = node.ended_at, attempt.adopted_at
    return bool(attempt.repairs) and ended is not None and began is not None and ended <= began


def _bill_rolled_back(
    attempt: Attempt, told: GangSeen, until: datetime, *, final: bool
) -> list[Charge]:
    """Return the charges for machines that were started for the gang but never became its nodes.
    All of these charges, including charges for disks and addresses, have the kind ROLLED_BACK,
    which distinguishes them from charges of the rank's node with the same start. Charges with the
    same rank and start are added up.
    """
    found: dict[tuple[int, datetime], Charge] = {}
    for node in told.rolled_back:
        if node.started_at is None:
            continue
        began, end = node.started_at, node.ended_at or until
        machine = bill(
            attempt=attempt,
            rank=node.rank,
            started=began,
            until=end,
            rates=told.rates,
            final=final,
        )
        extras = bill_extras(attempt, node, since=began, until=end, final=final)
        for charge in (*machine, *extras):
            each = replace(charge, kind=ChargeKind.ROLLED_BACK)
            key = each.rank, each.since
            found[key] = _add(each, found[key]) if key in found else each
    return list(found.values())


def _add(one: Charge, other: Charge) -> Charge:
    """Return the sum of both charges as one charge. The rate of the result is the sum of both
    rates, even if one of the charges ends earlier.
    """
    rate = HourlyRate(one.rate.micros_per_hour + other.rate.micros_per_hour)
    amount = Money(one.amount.micros + other.amount.micros)
    return replace(one, until=max(one.until, other.until), rate=rate, amount=amount)


def closing_charges(
    kept: Attempt, charges: Iterable[Charge], now: datetime, nodes: Sequence[Node] = ()
) -> list[Charge] | None:
    """Return the charges, until now, of a warm gang that another job takes over. `nodes` are the
    newest rows of the nodes, which contain traffic that the stored charges do not contain yet. The
    result is None if a rank has no charge yet.
    """
    mine = [charge for charge in charges if charge.attempt_id == kept.id]
    if nodes:
        mine = [charge for charge in mine if charge.kind is not ChargeKind.TRAFFIC]
    # the last charge of each rank, for its machine (None) and for each kind of extra
    last: dict[tuple[int, ChargeKind | None], Charge] = {}
    for charge in mine:
        if charge.kind not in (*_RECOMPUTED, ChargeKind.ROLLED_BACK):
            key = (charge.rank, charge.kind if charge.kind.is_extra else None)
            before = last.get(key)
            if before is None or charge.since >= before.since:
                last[key] = charge
    if sum(1 for _, extra in last if extra is None) < kept.nodes:
        return None
    since = kept.kept_since or now
    closed = [charge for charge in mine if charge not in last.values()]
    for charge in last.values():
        if charge.kind is ChargeKind.NODE:
            closed.append(_until(charge, since))
            charge = replace(charge, kind=ChargeKind.KEPT, since=since)
        closed.append(_until(charge, max(now, charge.since)))
    return closed + bill_traffic(kept, nodes)


def _until(charge: Charge, end: datetime) -> Charge:
    return replace(charge, until=end, amount=charge.rate.over(end - charge.since))


class BillVerdict(StrEnum):
    """The result of comparing a bill with the provider's own record."""

    AGREES = "agrees"
    DIFFERS = "differs"
    FORGOTTEN = "forgotten"  # the provider no longer lists the gang


class AuditedBill(Struct, frozen=True, kw_only=True):
    """The charges of an ended attempt, and the cost according to its provider's record of the
    gang."""

    attempt: Attempt
    billed: Money
    reported: Money | None

    @property
    def verdict(self) -> BillVerdict:
        """Whether the billed and the reported amount agree. A bill can be known only as a range;
        then a reported amount agrees if it is within the range.
        """
        if self.reported is None:
            return BillVerdict.FORGOTTEN
        unseen = self.attempt.unsure_bill
        unsure = unseen.more.micros - unseen.traffic.micros if unseen else 0
        most = self.billed.micros + unsure
        within = self.billed.micros - _TOLERANCE <= self.reported.micros <= most + _TOLERANCE
        return BillVerdict.AGREES if within else BillVerdict.DIFFERS


def audit_bill(attempt: Attempt, seen: GangSeen | None, charges: Iterable[Charge]) -> AuditedBill:
    """Compare the charges of an ended attempt with the cost according to its provider's record
    `seen`. `seen` is None if the provider has no record. The amounts exclude traffic, because no
    provider's record contains traffic.
    """
    mine = [charge for charge in charges if charge.attempt_id == attempt.id]
    mine = [charge for charge in mine if charge.kind is not ChargeKind.TRAFFIC]
    billed = total(mine)
    if seen is None:
        return AuditedBill(attempt=attempt, billed=billed, reported=None)
    until = attempt.ended_at or attempt.since
    handed_on = attempt.handed_on  # whether another attempt pays for the gang's later time
    nodes = [
        replace(node, ended_at=min(until, node.ended_at or until))
        if handed_on or node.ended_at is None
        else node
        for node in (*seen.nodes, *seen.replaced)
        if not handed_on or node.started_at is None or node.started_at < until
    ]
    others = [replace(each, ended_at=each.ended_at or until) for each in seen.rolled_back]
    told = replace(seen, nodes=nodes, rolled_back=others)
    priced = bill_gang(attempt, told, until, final=True, earlier=mine)
    if handed_on:  # the attempt that has a node at its end pays the rest of its minimum charge
        going = {node.rank for node in nodes if node.ended_at == until}
        minimum = ChargeKind.MINIMUM
        priced = [x for x in priced if x.kind is not minimum or x.rank not in going]
    priced += _list_forgotten(seen, mine)
    return AuditedBill(attempt=attempt, billed=billed, reported=total(priced))
