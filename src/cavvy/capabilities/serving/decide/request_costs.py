"""Divides the bill of a replica among the requests of its service.

Whenever the bill has grown, the new amount is divided in proportion to time. The parts are the time
of the requests of each key, the time before the replica was ready (`cold start`), and the remaining
time (`idle`). Requests that are in flight at the same moment share the replica equally. Each
division posts entries that add up to zero: the divided amount is subtracted from the bill's own
kinds and added to the kinds of the parts. Therefore, the parts of a bill add up exactly to the
bill. Amounts that are added to a bill after the replica has ended count as idle time. So that every
request is counted, a request gets an entry without an amount if it is reported after the last
division of a bill, or if its share is smaller than a micro-dollar.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from operator import add

from cavvy.capabilities.serving.bills import (
    DividedBill,
    KeyWork,
    ReplicaBill,
    RequestCounts,
    merge_counts,
)
from cavvy.domain.ledger import (
    REQUEST_LINE,
    EntryKind,
    EntrySource,
    LedgerPosting,
    QuantityUnit,
    TokenUse,
    combine_tokens,
    split_months,
)
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import Struct, field, replace

_US = timedelta(microseconds=1)
_Part = tuple[EntryKind, str]  # with the client's key
_Move = tuple[EntryKind, str, int, int]  # with the amount and the number of requests
_IDLE: _Part = (EntryKind.IDLE, "")
_COLD: _Part = (EntryKind.COLD_START, "")
_NO_WORK = KeyWork(requests=0, work_us=0)


class Division(Struct, frozen=True, kw_only=True):
    """The result of dividing a replica's bill among the clients: the new ledger entries by client
    key ("" stands for the replica itself), and the state from which the next division continues.
    """

    divided: DividedBill
    postings: Mapping[str, tuple[LedgerPosting, ...]]
    tokens: Mapping[str, Mapping[str, TokenUse]] = field(default_factory=dict)  # by key and model


def keep_undivided(bill: ReplicaBill, counts: RequestCounts, ready_at: datetime | None) -> Division:
    """Begin to divide a bill that has not been divided before. Requests up to now were not counted,
    so the amount that the bill already has is not divided among requests. Only amounts that are
    added to the bill after this call are divided.
    """
    divided = DividedBill(
        attempt_id=bill.attempt_id,
        until=bill.until,
        moved=dict(bill.amounts),
        counted={epoch: dict(work) for epoch, work in counts.items()},
        ready_at=ready_at,
    )
    return Division(divided=divided, postings={})


def divide_bill(
    bill: ReplicaBill,
    counts: RequestCounts,
    ready_at: datetime | None,
    *,
    final: bool = False,
) -> Division | None:
    """Divide the bill's increase since the last division. Returns None if nothing remains to be
    divided. `final` is true if the replica has ended. After its end, the bill of a replica may
    never grow again. Therefore, if `final` is true, new counts of requests are recorded even if the
    bill has not grown; otherwise, it must have grown in time, because a replica may cost nothing.
    Counts of tokens are always recorded.
    """
    before = bill.divided or DividedBill(attempt_id=bill.attempt_id, until=bill.since)
    kinds = {*bill.amounts, *before.moved}
    more = {kind: bill.amounts.get(kind, 0) - before.moved.get(kind, 0) for kind in sorted(kinds)}
    fresh = _subtract(counts, before)
    tokens = {key: each.tokens for key, each in fresh.items() if each.tokens}
    grown = final or bill.until > before.until  # a replica that costs nothing grows only in time
    late = grown and any(each.requests for each in fresh.values())
    if not any(more.values()) and not late and not tokens:
        return None
    divided = replace(
        before,
        until=max(bill.until, before.until),
        moved={kind: bill.amounts.get(kind, 0) for kind in kinds},
        ready_at=ready_at or before.ready_at,
        # a report may be older than the one with which the last division was made
        counted=_merge(before.counted, counts),
    )
    moves = [(kind, "", -amount, 0) for kind, amount in more.items()]
    moves += _list_parts(sum(more.values()), before.until, divided, fresh)
    postings = _post_all(bill, before.until, divided.until, moves)
    return Division(divided=divided, postings=postings, tokens=tokens)


def bill_api(
    subject: str,
    prices: tuple[int, int] | None,
    counts: RequestCounts,
    before: DividedBill | None,
    period: tuple[datetime, datetime],
) -> Division | None:
    """Return the new entries for requests that an API has answered in place of a service's
    replicas, or None. `prices` are micro-dollars for a million tokens of prompts and of
    completions; without them, the entries have no amounts. Counts of earlier times, to which
    `before` belongs, are not billed again.
    """
    since, until = period
    known = before or DividedBill(attempt_id=subject, until=since)
    fresh = _subtract(counts, known)
    tokens = {key: each.tokens for key, each in fresh.items() if each.tokens}
    if not tokens and not any(each.requests for each in fresh.values()):
        return None
    moves = [
        (EntryKind.REQUEST, key, _price(prices, each.tokens), each.requests)
        for key, each in fresh.items()
    ]
    bill = ReplicaBill(
        attempt_id=subject,
        job_id="",
        since=since,
        until=until,
        amounts={},
        rate=HourlyRate(),
        divided=before,
    )
    moved = known.moved.get(EntryKind.REQUEST, 0) + sum(amount for _, _, amount, _ in moves)
    divided = replace(
        known,
        until=until,
        moved={EntryKind.REQUEST: moved},
        counted=_merge(known.counted, counts),
    )
    postings = _post_all(bill, min(known.until, until), until, moves, EntrySource.METER)
    return Division(divided=divided, postings=postings, tokens=tokens)


def _price(prices: tuple[int, int] | None, uses: Mapping[str, TokenUse]) -> int:
    """Return the micro-dollars that tokens cost."""
    prompt, completion = prices or (0, 0)
    return round(
        sum(each.prompt * prompt + each.completion * completion for each in uses.values()) / 10**6
    )


def _list_parts(
    total: int, since: datetime, divided: DividedBill, fresh: Mapping[str, KeyWork]
) -> Iterable[_Move]:
    weights = _weigh(since, divided, fresh) if total > 0 else {}
    parts = _split(total, weights, _IDLE if divided.ready_at else _COLD)
    for (kind, key), amount in parts.items():
        if kind is not EntryKind.REQUEST:
            yield kind, key, amount, 0
    for key, work in fresh.items():
        yield EntryKind.REQUEST, key, parts.get((EntryKind.REQUEST, key), 0), work.requests


def _post_all(
    bill: ReplicaBill,
    since: datetime,
    until: datetime,
    moves: Iterable[_Move],
    source: EntrySource = EntrySource.DIVISION,
) -> Mapping[str, tuple[LedgerPosting, ...]]:
    found: dict[str, tuple[LedgerPosting, ...]] = {}
    for kind, key, amount, requests in moves:
        if amount or requests:
            posting = _make_posting(bill, (since, until), kind, amount, requests)
            posting = replace(posting, source=source)
            found[key] = (*found.get(key, ()), *split_months(posting))
    return found


def _merge(before: RequestCounts, counts: RequestCounts) -> dict[str, dict[str, KeyWork]]:
    return {
        epoch: merge_counts(before.get(epoch, {}), counts.get(epoch, {}))
        for epoch in (*before, *(each for each in counts if each not in before))
    }


def _subtract(counts: RequestCounts, before: DividedBill) -> dict[str, KeyWork]:
    """Return the counts of requests since the bill was last divided."""
    found: dict[str, KeyWork] = {}
    for epoch, work in counts.items():
        for key, now in work.items():
            then = before.counted.get(epoch, {}).get(key, _NO_WORK)
            total = found.get(key, _NO_WORK)
            found[key] = KeyWork(
                requests=total.requests + max(0, now.requests - then.requests),
                work_us=total.work_us + max(0, now.work_us - then.work_us),
                tokens=combine_tokens(
                    add, total.tokens, _list_new(combine_tokens(_grow, now.tokens, then.tokens))
                ),
            )
    return found


def _grow(now: int, then: int) -> int:
    return max(0, now - then)


def _list_new(uses: Mapping[str, TokenUse]) -> Mapping[str, TokenUse]:
    return {model: use for model, use in uses.items() if use}


def _weigh(since: datetime, divided: DividedBill, fresh: Mapping[str, KeyWork]) -> dict[_Part, int]:
    """Return how many microseconds since `since` belong to each key's requests, to the cold start,
    and to idle time."""
    until, ready_at = divided.until, divided.ready_at
    warm_from = until if ready_at is None else min(max(ready_at, since), until)
    weights = {(EntryKind.REQUEST, key): each.work_us for key, each in fresh.items()}
    idle = max(0, (until - warm_from) // _US - sum(weights.values()))
    return {**weights, _IDLE: idle, _COLD: (warm_from - since) // _US}


def _split(total: int, weights: Mapping[_Part, int], rest: _Part) -> dict[_Part, int]:
    """Use the method of largest remainders to divide the amount in proportion to the weights. If
    all weights are 0, the whole amount is assigned to `rest`.
    """
    whole = sum(weights.values())
    if not whole:
        return {rest: total}
    parts = {key: total * weight // whole for key, weight in weights.items()}
    order = sorted(weights, key=lambda key: (-(total * weights[key] % whole), key))
    for key in order[: total - sum(parts.values())]:
        parts[key] += 1
    return {key: amount for key, amount in parts.items() if amount}


def _make_posting(
    bill: ReplicaBill,
    period: tuple[datetime, datetime],
    kind: EntryKind,
    amount: int,
    requests: int,
) -> LedgerPosting:
    return LedgerPosting(
        kind=kind,
        line=REQUEST_LINE,
        line_since=bill.since,
        since=period[0],
        until=period[1],
        quantity=requests,
        unit=QuantityUnit.REQUESTS if kind is EntryKind.REQUEST else QuantityUnit.NONE,
        rate=HourlyRate(),
        amount=Money(amount),
        source=EntrySource.DIVISION,
    )
