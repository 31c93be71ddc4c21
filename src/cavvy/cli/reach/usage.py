"""Reads the resource use and the cost of jobs in a period, for `cavvy cost advise` and `cavvy cost
reserve advise`.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from msgspec.json import decode

from cavvy.domain.events import ChargeKind
from cavvy.domain.ledger import STORAGE_LINE, EntryKind, LedgerLine, LedgerSubject
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.units import Money
from cavvy.domain.values import Struct, replace

if TYPE_CHECKING:
    from cavvy.client import ApiClient
    from cavvy.client.wire import AttemptView, JobDetail
    from cavvy.planner.advice import ObservedMachine, ObservedRun, ObservedVolume
    from cavvy.planner.reservations import UsedMachine

_HOUR_US = 3_600_000_000
_RECENT = timedelta(hours=1)  # longer than the time between two entries of a volume
_NOW = timedelta(minutes=3)  # longer than the time between two entries of a node
_KINDS = {str(kind) for kind in ChargeKind}


class ChargedAttempt(Struct, kw_only=True):
    """The charges of an attempt in a period, in micro-dollars and node-hours, by kind of charge."""

    subject: LedgerSubject
    micros: dict[ChargeKind, int]
    hours: dict[ChargeKind, float]


def read_charges(
    client: "ApiClient", project: str | None, since: datetime, until: datetime
) -> list[LedgerLine]:
    """Return the lines of the ledger in the period, without discounts."""
    from cavvy.client.ledger_wire import list_entries, to_line
    from cavvy.costs.statements import make_statement

    entries = list_entries(client, project=project, since=since, until=until)
    lines = make_statement(map(to_line, entries), since, until)
    return [line for line in lines if line.entry.kind is not EntryKind.DISCOUNT]


def read_runs(client: "ApiClient", lines: Iterable[LedgerLine]) -> "list[ObservedRun]":
    """Return the resource use and cost of each attempt, except attempts of removed jobs."""
    from cavvy.client import ApiError

    jobs: dict[tuple[str, str], list[ChargedAttempt]] = {}
    for charged in add_up(lines).values():
        key = charged.subject.project, charged.subject.job_id
        jobs.setdefault(key, []).append(charged)
    found = []
    for (project, job_id), attempts in jobs.items():
        try:
            job = client.job(project, job_id)
        except ApiError as error:
            if error.code not in ("job-not-found", "role-needed", "scope-needed"):
                raise
            continue
        views = {each.id: each for each in job.attempts}
        found += [
            make_run(job, views[each.subject.id], each)
            for each in attempts
            if each.subject.id in views
        ]
    return found


def add_up(lines: Iterable[LedgerLine]) -> Mapping[str, ChargedAttempt]:
    """Return the charges of each attempt. If a charge was corrected, the result contains the
    corrected amount under the charge's kind.
    """
    found: dict[str, ChargedAttempt] = {}
    for line in lines:
        entry = line.entry
        if entry.line not in _KINDS:
            continue
        kind = ChargeKind(entry.line)
        attempt = found.setdefault(
            entry.subject, ChargedAttempt(subject=line.subject, micros={}, hours={})
        )
        attempt.micros[kind] = attempt.micros.get(kind, 0) + entry.amount.micros
        if kind is not ChargeKind.TRAFFIC:
            hours = entry.quantity / _HOUR_US
            attempt.hours[kind] = attempt.hours.get(kind, 0.0) + hours
    return found


def make_run(job: "JobDetail", attempt: "AttemptView", charged: ChargedAttempt) -> "ObservedRun":
    """Return the attempt's cost, and its resource use according to the nodes' telemetry."""
    from cavvy.planner.advice import IDLE_PERCENT, ObservedRun

    task = decode(job.task, type=TaskSpec)
    micros, hours = charged.micros, charged.hours
    alone = not charged.subject.machine  # named machines have their own rules
    run = ObservedRun(
        project=job.project,
        job=job.name,
        attempt=attempt.number,
        nodes=max(1, len(attempt.nodes)),
        offer=decode(attempt.offer, type=Offer),
        charged=Money(micros.get(ChargeKind.NODE, 0)),
        hours=hours.get(ChargeKind.NODE, 0.0),
        unfinished=job.phase in ("queued", "starting", "running", "stopping"),
        session=task.session,
        spot=task.resources.spot,
        kept=Money(micros.get(ChargeKind.KEPT, 0) if alone else 0),
        kept_hours=hours.get(ChargeKind.KEPT, 0.0) if alone else 0.0,
        unattached=_unattached(charged),
    )
    idle = tuple(
        node.rank
        for node in attempt.nodes
        if node.telemetry.get("gpu_mean_percent", 100) < IDLE_PERCENT
    )
    told = [node.telemetry for node in attempt.nodes]
    return replace(_measured(run, told), idle_ranks=idle)


def _unattached(charged: ChargedAttempt) -> Money:
    """Return the cost of disks for the hours in which the disks were charged without a machine, or
    0 if this time is less than one hour.
    """
    machine = sum(hours for kind, hours in charged.hours.items() if kind.is_machine)
    disk = charged.hours.get(ChargeKind.DISK, 0.0)
    part = max(0.0, disk - machine) / disk if disk - machine >= 1 else 0.0
    return Money(round(charged.micros.get(ChargeKind.DISK, 0) * part))


def list_volumes(lines: Iterable[LedgerLine], until: datetime) -> "list[ObservedVolume]":
    """Return the cost of each volume for the time in which no job was charged for the volume."""
    from cavvy.planner.advice import ObservedVolume

    of_volume: dict[str, list[LedgerLine]] = {}
    for line in lines:
        if line.entry.line == STORAGE_LINE:
            of_volume.setdefault(line.entry.subject, []).append(line)
    found = []
    for own in of_volume.values():
        subject = own[0].subject
        since = min(line.entry.since for line in own)
        last = max(line.entry.until for line in own if line.entry.kind is EntryKind.STORAGE)
        found.append(
            ObservedVolume(
                project=subject.project,
                name=subject.volume,
                provider=subject.provider,
                region=subject.region,
                id=subject.id.rpartition(":")[2],
                unattached=Money(sum(line.entry.amount.micros for line in own)),
                unattached_hours=sum(line.entry.quantity for line in own) / _HOUR_US,
                known_hours=(until - since) / timedelta(hours=1),
                free=until - last <= _RECENT,
            )
        )
    return found


def list_machines(lines: Iterable[LedgerLine], until: datetime) -> "list[ObservedMachine]":
    """Return the cost of each named machine while a job ran on it, and while it was idle."""
    from cavvy.planner.advice import ObservedMachine

    of_machine: dict[tuple[str, str], list[LedgerLine]] = {}
    for line in lines:
        if line.subject.machine and line.entry.line in (ChargeKind.NODE, ChargeKind.KEPT):
            key = line.subject.project, line.subject.machine
            of_machine.setdefault(key, []).append(line)
    found = []
    for (project, name), own in of_machine.items():
        kept = [line.entry for line in own if line.entry.line == ChargeKind.KEPT]
        micros = sum(entry.amount.micros for entry in kept)
        ranks = len({entry.rank for entry in kept})
        found.append(
            ObservedMachine(
                project=project,
                name=name,
                charged=Money(sum(line.entry.amount.micros for line in own) - micros),
                kept=Money(micros),
                kept_hours=sum(entry.quantity for entry in kept) / _HOUR_US / max(1, ranks),
                times=len({entry.subject for entry in kept}),
                idle_now=any(until - entry.until <= _NOW for entry in kept),
            )
        )
    return found


def _measured(run: "ObservedRun", told: Sequence[Mapping[str, float]]) -> "ObservedRun":
    """Return a copy of the run with the values of its nodes' telemetry."""
    return replace(
        run,
        cpu_percent=_mean(told, "cpu_mean_percent"),
        gpu_percent=_mean(told, "gpu_mean_percent"),
        memory_peak_mib=_most(told, "memory_peak_mib"),
        gpu_memory_peak_mib=_most(told, "gpu_memory_peak_mib"),
        measured=timedelta(seconds=_most(told, "measured_s") or 0),
        checkpoints=int(_most(told, "checkpoints") or 0),
        pause=timedelta(seconds=_most(told, "checkpoint_pause_s") or 0),
    )


def _mean(told: Sequence[Mapping[str, float]], name: str) -> float | None:
    """Return the mean of a value over the nodes that measured the value."""
    values = [each[name] for each in told if name in each]
    return sum(values) / len(values) if values else None


def _most(told: Sequence[Mapping[str, float]], name: str) -> float | None:
    return max((each[name] for each in told if name in each), default=None)


def list_used_machines(lines: Iterable[LedgerLine]) -> "list[UsedMachine]":
    """Return the machines that were charged at on-demand prices."""
    from cavvy.planner.reservations import ReservableType, UsedMachine

    return [
        UsedMachine(
            kind=ReservableType(
                line.subject.provider, line.subject.region, line.subject.instance_type
            ),
            since=line.entry.since,
            until=line.entry.until,
            rate=line.entry.rate,
        )
        for line in lines
        if line.subject.purchase == Purchase.ON_DEMAND
        and line.entry.line in _KINDS
        and line.entry.kind is not EntryKind.CORRECTION
        and ChargeKind(line.entry.line) in (ChargeKind.NODE, ChargeKind.KEPT)
    ]


def list_offers_of(providers: Iterable[str]) -> list[Offer]:
    """Return the catalog's offers of these providers."""
    from cavvy.store.snapshot import CatalogSnapshot

    wanted = frozenset(providers)
    with CatalogSnapshot.open() as snapshot:
        return [offer for offer in snapshot.all_offers() if offer.provider in wanted]
