"""Determines what kind of failure ended an attempt, and how long the job avoids the attempt's offer
(the cooldown); finds work that makes no progress, and which of its ranks is behind. `job.py`
decides about retries."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from operator import attrgetter

from cavvy.control.decide.attempt_snapshot import HEARD_LATELY, AttemptSnapshot
from cavvy.domain.jobs import (
    Attempt,
    AttemptOutcome,
    FailureKind,
    Node,
    NodePhase,
    RankCollective,
    RankStack,
    SilentWork,
    StuckWork,
)
from cavvy.domain.units import format_duration
from cavvy.domain.values import Struct
from cavvy.planner.markets import LONGEST_REST

STILL = "still_s"  # telemetry: for how many seconds a node has seen no progress
STACKS = "stacks"  # the order to report where the work is
# How long an agent may take for stacks: four rounds of up to 64 processes, with pauses of 4 s.
STACKS_WAIT = timedelta(seconds=90)
# The silence after which work without the limit is asked once where it is.
LOOK_AFTER = timedelta(minutes=5)
# A rank that computes while others wait for it at one place is ended after so many limits.
PATIENCE = 5
_MOST_NAMED = 8  # ranks that a reason names
_MOST_KEPT = 64
_LARGEST_WORLD = 100_000


class TakeStacks(Struct, frozen=True, kw_only=True):
    """Ask these nodes where their work is."""

    ranks: tuple[int, ...]
    reason: str


class AwaitStacks(Struct, frozen=True, kw_only=True):
    """Do nothing until the nodes have reported, or until this time has passed."""

    after: timedelta


Finding = TakeStacks | AwaitStacks | StuckWork | SilentWork


def find_silence(nodes: Sequence[Node], now: datetime) -> timedelta | None:
    """Return for how long no node has seen progress, or None if a node does not work, or if its
    agent has not reported lately."""
    silences = []
    for node in nodes:
        still, heard = node.telemetry.get(STILL), node.heard_at
        if still is None or heard is None or now - heard >= HEARD_LATELY:
            return None
        silences.append(timedelta(seconds=still) + (now - heard))
    return min(silences, default=None)


def find_stuck(view: AttemptSnapshot, now: datetime) -> Finding | None:
    """Return what to do about work that makes no progress, or None if it makes progress or nothing
    is new. Without the limit, its ranks are asked once where they are, and nothing is ended."""
    limit, after = view.job.task.limits.stuck, _look_after(view)
    nodes = [node for node in view.nodes if node.phase is not NodePhase.EXITED]
    if after is None or view.attempt.stuck or any(x.phase is not NodePhase.RUNNING for x in nodes):
        return None
    silence = find_silence(nodes, now)
    if silence is None or silence < after:
        return None
    reason = f"no progress for {format_duration(after)}"
    reason += " (limits.stuck)" if limit else ""
    since = now - silence if limit is None else max(now - silence, now - limit - STACKS_WAIT)
    unasked = [node.rank for node in nodes if not _is_asked(node, since)]
    if unasked:
        return TakeStacks(ranks=tuple(unasked), reason=reason)
    asked_at = max(node.order.at for node in nodes if node.order and node.order.at)
    left = asked_at + STACKS_WAIT - now
    if left > timedelta(0) and not all(_has_answered(node) for node in nodes):
        return AwaitStacks(after=left)
    return _judge(view, nodes, reason, now)


def _look_after(view: AttemptSnapshot) -> timedelta | None:
    """Return after which silence the ranks are asked where they are, or None for never: services
    and sessions are silent while they are not used."""
    task = view.job.task
    if task.limits.stuck is None and (task.service is not None or task.session):
        return None
    return task.limits.stuck or LOOK_AFTER


def _judge(
    view: AttemptSnapshot, nodes: Sequence[Node], reason: str, now: datetime
) -> StuckWork | SilentWork | None:
    """Return that the work is ended, or that it is silent, or None if that is noted already."""
    limit, before = view.job.task.limits.stuck, view.attempt.silent
    found = find_behind(nodes, reason, now)
    answers = [node.stacks for node in nodes if node.stacks and _has_answered(node)]
    if limit is not None and is_hopeless(nodes):
        return found
    stacks = [each for answer in answers for each in answer.stacks]
    marks = sorted(
        (each.rank, each.mark, *(last.number for last in each.collectives))
        for each in stacks
        if each.call and not each.works
    )
    mark = f"{found.ranks} {marks}" if marks and found.ranks else ""
    asked = [node.order.at for node in nodes if node.order and node.order.at]
    looked = max((answer.at for answer in answers), default=max(asked, default=now))
    if before is not None and before.at >= looked:
        return None
    same = before is not None and before.mark == mark and bool(mark)
    since = before.since if before is not None and same else now
    if limit is not None and same and now - since >= (PATIENCE - 1) * limit:
        return found
    return SilentWork(at=looked, since=since, reason=found.reason, mark=mark)


def is_hopeless(nodes: Sequence[Node]) -> bool:
    """Return whether silent work is known to hang: no rank computes, and one waits in an operation
    for others or for a GPU, or nothing can wake any process of any node. Other work may only wait
    for what is to come: a file, a request, a download, a message."""
    answers = [node.stacks for node in nodes if node.stacks and _has_answered(node)]
    if any(answer.moved for answer in answers):
        return False
    stacks = [each for answer in answers for each in answer.stacks]
    if any(each.call or not all(last.done for last in each.collectives) for each in stacks):
        return True
    return len(answers) == len(nodes) > 0 and all(answer.deadlocked for answer in answers)


def next_silence(view: AttemptSnapshot, now: datetime) -> timedelta:
    """Return the shortest time after which the work may have made no progress for too long."""
    limit, after = view.job.task.limits.stuck, _look_after(view)
    nodes = [node for node in view.nodes if node.phase is not NodePhase.EXITED]
    silence = find_silence(nodes, now)
    if silence is None or after is None:
        return timedelta.max
    if silence < after:
        return after - silence + timedelta(seconds=1)
    if limit is None:
        return timedelta.max
    asked = [node.order.at for node in nodes if node.order and node.order.at]
    again = max(asked, default=now) + limit + STACKS_WAIT - now
    return max(again, timedelta(0)) + timedelta(seconds=1)


def _is_asked(node: Node, since: datetime) -> bool:
    order = node.order
    return order is not None and order.kind == STACKS and order.at is not None and order.at >= since


def _has_answered(node: Node) -> bool:
    order, stacks = node.order, node.stacks
    return bool(stacks and order and order.at and stacks.at >= order.at)


def find_behind(nodes: Sequence[Node], reason: str, now: datetime) -> StuckWork:
    """Return which processes did not reach the place where the others wait, by their stacks."""
    answers = [(node.rank, node.stacks) for node in nodes if node.stacks and _has_answered(node)]
    stacks = {each.rank: each for _, answer in answers for each in answer.stacks}
    homes = {each.rank: rank for rank, answer in answers for each in answer.stacks}
    if not stacks:
        why = next((answer.text for _, answer in answers if answer.text), "")
        alone = nodes[0].rank if len(nodes) == 1 else None
        text = f"{reason}; {why}" if why else reason
        only = () if alone is None else (alone,)
        return StuckWork(at=now, reason=text, ranks=only, node=alone)
    ranks, text = _compare(stacks)
    node = next((homes[rank] for rank in ranks if rank in homes), None)
    if node is None and len(nodes) == 1:
        node = nodes[0].rank
    return StuckWork(at=now, reason=f"{reason}: {text}", ranks=tuple(ranks[:_MOST_KEPT]), node=node)


def _compare(stacks: Mapping[int, RankStack]) -> tuple[Sequence[int], str]:
    """Return the ranks that are behind, and how they differ from the others."""
    world = max(each.world for each in stacks.values())
    if len(stacks) < world <= _LARGEST_WORLD:
        missing = [rank for rank in range(world) if rank not in stacks]
        others = _describe(next(iter(stacks.values())))
        return missing, f"{_name(missing)} has no process any more; another {others}"
    if found := _compare_collectives(stacks):
        return found
    waiting = {rank: each for rank, each in stacks.items() if each.call}
    if waiting and len(waiting) < len(stacks):
        away = [rank for rank in stacks if rank not in waiting]
        call, first = next(iter(waiting.values())).call, stacks[away[0]]
        works = " and computes" if first.works else ""
        return away, f"{_name(away)} has not reached {call}, but is at {first.place}{works}"
    if len(stacks) == 1:
        [(rank, one)] = stacks.items()
        return [rank], f"rank {rank} {_describe(one)}"
    for key in (attrgetter("call"), attrgetter("place")):
        groups: dict[str, list[int]] = {}
        for rank, each in sorted(stacks.items()):
            groups.setdefault(key(each), []).append(rank)
        if len(groups) > 1:
            # of groups of equal size, the one with the lowest rank counts as the others
            fewest = min(reversed(groups.values()), key=len)
            other = next(group for group in groups.values() if group is not fewest)
            mine, theirs = _describe(stacks[fewest[0]]), _describe(stacks[other[0]])
            return fewest, f"{_name(fewest)} {mine}, but {_name(other)} {theirs}"
    return [], f"all {len(stacks)} ranks: each {_describe(next(iter(stacks.values())))}"


def _compare_collectives(stacks: Mapping[int, RankStack]) -> tuple[Sequence[int], str] | None:
    """Return the ranks that have called fewer collectives than others of their group, or another
    one, by their flight recorders; None if no group has a collective that hangs and such ranks.
    """
    groups: dict[str, dict[int, RankCollective]] = {}
    for rank, each in sorted(stacks.items()):
        for last in each.collectives:
            groups.setdefault(last.group, {})[rank] = last
    for ranks in groups.values():
        hanging = [rank for rank, last in ranks.items() if not last.done]
        least = min(last.number for last in ranks.values())
        behind = [rank for rank, last in ranks.items() if last.number == least]
        if len(behind) == len(ranks):  # the same number, but perhaps not the same collective
            calls: dict[str, list[int]] = {}
            for rank, last in ranks.items():
                calls.setdefault(last.call, []).append(rank)
            behind = min(reversed(calls.values()), key=len)
        others = [rank for rank in (*hanging, *ranks) if rank not in behind]
        if hanging and others:
            mine, theirs = _count(ranks[behind[0]]), _count(ranks[others[0]])
            place = stacks[behind[0]].place
            return behind, f"{_name(behind)} {mine}, and is at {place}; rank {others[0]} {theirs}"
    return None


def _count(last: RankCollective) -> str:
    state = "which has ended" if last.done else "which has not ended"
    return f"has called {last.call} as number {last.number} of group {last.group}, {state}"


def _describe(each: RankStack) -> str:
    if each.call:
        return f"waits in {each.call} at {each.place}"
    return f"computes at {each.place}" if each.works else f"is at {each.place}"


def _name(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MOST_NAMED]))
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return f"rank {shown}{more}" if len(ranks) == 1 else f"each of ranks {shown}{more}"


# Cooldowns as (first, maximum). A cooldown doubles with each consecutive failure. Providers often
# return the same broken node at once, so broken GPUs and links have longer cooldowns than missing
# capacity.
_COOLDOWNS: dict[FailureKind, tuple[timedelta, timedelta]] = {
    FailureKind.CAPACITY: (timedelta(seconds=30), LONGEST_REST),
    FailureKind.QUOTA: (timedelta(days=1), timedelta(days=1)),
    FailureKind.REFUSED: (timedelta(days=1), timedelta(days=1)),
    FailureKind.PREEMPTED: (timedelta(0), timedelta(0)),
    FailureKind.GPU: (timedelta(minutes=10), timedelta(hours=6)),
    FailureKind.LINK: (timedelta(minutes=10), timedelta(hours=6)),
    FailureKind.NODE: (timedelta(seconds=30), timedelta(hours=1)),
    FailureKind.NETWORK: (timedelta(minutes=1), timedelta(hours=1)),
    FailureKind.BOOT: (timedelta(minutes=1), timedelta(hours=1)),
    FailureKind.STUCK: (timedelta(seconds=30), timedelta(hours=1)),
    FailureKind.PROGRAM: (timedelta(0), timedelta(0)),
}
_OF_THE_PLACE = frozenset(
    {
        FailureKind.CAPACITY,
        FailureKind.QUOTA,
        FailureKind.REFUSED,
        FailureKind.GPU,
        FailureKind.LINK,
    }
)


_BY_OUTCOME = {
    AttemptOutcome.CAPACITY: FailureKind.CAPACITY,
    AttemptOutcome.REFUSED: FailureKind.REFUSED,
    AttemptOutcome.PREEMPTED: FailureKind.PREEMPTED,
    AttemptOutcome.TIMEOUT: FailureKind.BOOT,
    AttemptOutcome.EXIT: FailureKind.PROGRAM,
    AttemptOutcome.SETUP: FailureKind.PROGRAM,
    AttemptOutcome.LIMIT: FailureKind.PROGRAM,
}


def failure_of(attempt: Attempt) -> FailureKind:
    """Return the failure kind that the attempt or its outcome states, or NODE if neither states a
    kind."""
    known = attempt.failure or (attempt.outcome and _BY_OUTCOME.get(attempt.outcome))
    return known or FailureKind.NODE


def cooldown_after(kind: FailureKind, attempt: Attempt, before: int) -> timedelta:
    """Return the cooldown of the attempt's offer, after `before` earlier failures of the same kind.

    Most failures cause no cooldown of a shared host, because the cause may be a single process.
    """
    if attempt.offer.shared and kind not in _OF_THE_PLACE:
        return timedelta(0)
    first, most = _COOLDOWNS[kind]
    return min(most, first * (1 << min(before, 16)))
