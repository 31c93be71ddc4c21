"""Finds gangs among EC2's instances by their tags. Instances that EC2 does not list yet, or no
longer lists, are added from the ledger.
"""

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta

from cavvy.domain.events import ChargeKind
from cavvy.domain.gangs import NodeExtra
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.providers.aws.account import AwsAccount, Json
from cavvy.providers.aws.launch_ledger import AwsGangRecord, AwsInstance
from cavvy.providers.aws.network import GANG, filters, read_tag
from cavvy.providers.aws.prices import fetch_spot
from cavvy.providers.base import GangSeen, GangState, NodeSeen, ProviderError, TryAgain
from cavvy.providers.ledger import LaunchLedger

_ENDED = frozenset({"shutting-down", "terminated", "stopping", "stopped"})
# the time in a StateTransitionReason
_WHEN = re.compile(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?:GMT|UTC)\)")
_NO_CAPACITY = "Server.InsufficientInstanceCapacity"
# Codes that EC2 gives as the reason when an instance ends during its launch. EC2 charges nothing
# before the state `running`.
# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_StateReason.html
_NEVER_RAN = frozenset(
    {
        _NO_CAPACITY,
        "Server.InternalError",
        "Client.InternalError",
        "Client.InvalidSnapshot.NotFound",
        "Client.VolumeLimitExceeded",
    }
)
_RATES_AGE = timedelta(minutes=10)
# seconds to wait for one of several regions, so that it does not delay the others
_PATIENCE_S = 15.0


class AwsStatus:
    """Queries instances, and records their state in the ledger."""

    def __init__(
        self,
        account: AwsAccount,
        ledger: LaunchLedger[AwsGangRecord],
        mark: str,
        visibility_delay: timedelta,
        now: Callable[[], datetime],
    ) -> None:
        self._account, self._ledger, self._mark, self._visibility_delay, self._now = (
            account,
            ledger,
            mark,
            visibility_delay,
            now,
        )
        # instance id -> the time of the first poll in which EC2 did not list the instance
        self._missed: dict[str, datetime] = {}
        self._rated: dict[str, datetime] = {}

    async def look(
        self, regions: Sequence[str], name: str | None
    ) -> tuple[list[GangSeen], Mapping[str, ProviderError]]:
        """Return the gangs that EC2 lists or the ledger records in the regions that answer; also
        return the errors of the regions that do not answer. Raises TryAgain or Refused if no region
        answers.
        """
        patience = _PATIENCE_S if len(regions) > 1 else None
        answers = await asyncio.gather(*(self._hear(each, name, patience) for each in regions))
        shown: dict[str, list[Json]] = {}
        silent: dict[str, ProviderError] = {}
        for region, answer in zip(regions, answers, strict=True):
            if isinstance(answer, ProviderError):
                silent[region] = answer
                continue
            for told in answer:
                gang = read_tag(told, GANG)
                shown.setdefault(gang, []).append({**told, "_region": region})
        if silent and len(silent) == len(regions):
            raise silent[regions[0]]
        recorded = [each for each in self._ledger.records.values() if each.region in regions]
        names = {*shown, *(each.name for each in recorded if each.region not in silent)}
        found = [
            await self._see(each, shown.get(each, []))
            for each in sorted(names)
            if name in (None, each)
        ]
        return [seen for seen in found if seen is not None], silent

    async def _hear(
        self, region: str, name: str | None, patience_s: float | None
    ) -> list[Json] | ProviderError:
        """Return the result of `describe`, or the error that `describe` raised."""
        try:
            async with asyncio.timeout(patience_s):
                return await self.describe(region, name)
        except TimeoutError:
            return TryAgain(f"DescribeInstances in {region}: no answer within {patience_s:.0f} s")
        except ProviderError as error:
            return error

    async def describe(self, region: str, name: str | None) -> list[Json]:
        """Return the instances with this installation's tags, including terminated instances."""
        told = await self._account.items(
            region, "describe_instances", filters(self._mark, name), field="Reservations"
        )
        return [instance for reservation in told for instance in reservation.get("Instances", [])]

    async def _see(self, name: str, shown: Sequence[Json]) -> GangSeen | None:
        record = self._ledger.get(name)
        if record is None:
            if not shown:
                return None
            record = _recall(name, shown, self._now())
        instances = self._merge(record, shown)
        if not instances:
            # EC2 has neither confirmed the recorded launch nor listed an instance of it
            return None
        states = {str(each["InstanceId"]): str(each["State"]["Name"]) for each in shown}
        over = all(each.ended_at is not None for each in instances)
        ended_at = (
            max((each.ended_at for each in instances if each.ended_at), default=None)
            if over
            else None
        )
        record = replace(record, launched=True, instances=instances, ended_at=ended_at)
        record = await self._rate(record)
        now = self._ledger.get(name)
        if now is not None:  # keep changes that were recorded in the meantime
            record = replace(record, removed=now.removed, tidy=now.tidy, disks=now.disks)
        await self._ledger.put(record)
        return make_seen(record, states)

    def _merge(self, record: AwsGangRecord, shown: Sequence[Json]) -> tuple[AwsInstance, ...]:
        """Merge the listed instances with the instances that EC2 listed earlier. An instance that
        has been missing from EC2's list for longer than the visibility delay counts as ended.
        """
        now = self._now()
        known = {each.id: each for each in record.instances}
        for told in shown:
            was = known.get(str(told["InstanceId"]))
            known[str(told["InstanceId"])] = read_instance(told, was, now)
            self._missed.pop(str(told["InstanceId"]), None)
        present = {str(told["InstanceId"]) for told in shown}
        for each in list(known.values()):
            if each.id in present or each.ended_at is not None:
                continue
            since = self._missed.setdefault(each.id, now)
            if (
                now - since >= self._visibility_delay
                and now - each.started_at >= self._visibility_delay
            ):
                # not before the start: EC2's clock gave `started_at`, and the server's clock
                # `since`
                ended = max(since, each.started_at)
                reason = each.reason or "EC2 no longer lists the instance"
                known[each.id] = replace(each, ended_at=ended, unseen=True, reason=reason)
        return tuple(sorted(known.values(), key=lambda each: (each.rank, each.id)))

    async def _rate(self, record: AwsGangRecord) -> AwsGangRecord:
        """Update the spot prices in a gang's record: periodically while the gang runs, and once
        after the gang has ended.
        """
        if not record.spot or not record.zone:
            return record
        if record.tidy:
            return record
        last, now = self._rated.get(record.name), self._now()
        if last is not None and (
            last >= record.ended_at if record.ended_at else now - last < _RATES_AGE
        ):
            return record
        start = min(each.started_at for each in record.instances)
        try:
            told = await fetch_spot(self._account, record.region, [record.type], start, record.zone)
        except ProviderError:  # the known prices are used; the next poll reads the prices again
            return record
        self._rated[record.name] = now
        until = record.ended_at or now
        rates = [(max(at, start), rate.micros_per_hour) for _, _, at, rate in told if at <= until]
        return replace(record, rates=tuple(_last_of_each(rates))) if rates else record


def make_seen(record: AwsGangRecord, states: Mapping[str, str]) -> GangSeen:
    """Convert a gang's record to the status that the control plane reads. `states` maps the ids of
    the listed instances to their states in EC2.
    """
    over = all(each.ended_at is not None for each in record.instances)
    waiting = any(
        states.get(each.id, "pending") == "pending"
        for each in record.instances
        if each.ended_at is None
    )
    state = GangState.ENDED if over else GangState.STARTING if waiting else GangState.RUNNING
    return GangSeen(
        name=record.name,
        state=state,
        engine_id=min(each.id for each in record.instances),
        reason="; ".join(dict.fromkeys(each.reason for each in record.instances if each.reason)),
        preempted=any(each.preempted for each in record.instances),
        no_capacity=any(each.failure == _NO_CAPACITY for each in record.instances),
        nodes=tuple(
            NodeSeen(
                rank=each.rank,
                engine_id=each.id,
                started_at=each.billed_from,
                ended_at=each.ended_at,
                unseen=each.unseen,
                address=each.address,
                extras=_list_extras(record, each),
            )
            for each in record.instances
        ),
        rates=tuple((at, HourlyRate(micros)) for at, micros in record.rates),
    )


def _list_extras(record: AwsGangRecord, instance: AwsInstance) -> tuple[NodeExtra, ...]:
    """Return the node's disks and address, which are billed in addition to the node. The result
    includes the named volumes of gangs with one node, although some volumes outlive the node.
    """
    disks = [(record.disk_type, record.disk_gib)]
    disks += [(disk.type, disk.size_gib) for disk in record.disks if disk.id]
    found = [NodeExtra(kind=ChargeKind.DISK, name=kind, units=size) for kind, size in disks]
    public = record.public or instance.public
    return (*found, *([NodeExtra(kind=ChargeKind.ADDRESS)] if public else []))


def read_instance(told: Json, was: AwsInstance | None, now: datetime) -> AwsInstance:
    """Parse one instance of DescribeInstances. `was` is the instance as EC2 reported it earlier.
    If `was` has times that EC2 no longer reports, the result has the times of `was`.
    """
    reason = told.get("StateReason") or {}
    code, state = str(reason.get("Code", "")), str(told["State"]["Name"])
    started = was.started_at if was else told["LaunchTime"]
    ended, unseen = (was.ended_at, was.unseen) if was else (None, False)
    if state in _ENDED and (ended is None or unseen):
        reported = _read_end(str(told.get("StateTransitionReason", "")), now)
        ended, unseen = max(started, reported or ended or now), reported is None
    taken = code.startswith("Server.SpotInstance") or code.startswith("Server.CapacityBlock")
    return AwsInstance(
        id=str(told["InstanceId"]),
        rank=int(told.get("AmiLaunchIndex", 0)),
        started_at=started,
        ended_at=ended,
        unseen=unseen,
        address=_read_address(told, was),
        reason=str(reason.get("Message", "")) if state in _ENDED else (was.reason if was else ""),
        preempted=(was.preempted if was else False) or (state in _ENDED and taken),
        public=_has_public_address(told, was),
        ran=state != "pending" or (was is not None and was.ran),
        failure=_read_failure(state, code, was),
    )


def _read_address(told: Json, was: AwsInstance | None) -> str | None:
    """Return the address that EC2 reports, or the last address that EC2 reported."""
    address = told.get("PublicIpAddress") or told.get("PrivateIpAddress")
    return address or (was.address if was else None)


def _has_public_address(told: Json, was: AwsInstance | None) -> bool:
    """Return whether the instance has or had a public address. EC2 does not list the addresses of
    ended instances.
    """
    return "PublicIpAddress" in told or (was is not None and was.public)


def _read_failure(state: str, code: str, was: AwsInstance | None) -> str:
    """Return EC2's reason code for an instance that never ran, or "" if the instance ran or may
    still run.
    """
    if state in _ENDED and code in _NEVER_RAN:
        return code
    return was.failure if was is not None else ""


def _read_end(text: str, now: datetime) -> datetime | None:
    """Parse the time in a reason such as `User initiated (2030-01-01 10:30:00 GMT)`; return None if
    the text contains no time.
    """
    found = _WHEN.search(text)
    if found is None:
        return None
    return min(now, datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC))


def _recall(name: str, shown: Sequence[Json], now: datetime) -> AwsGangRecord:
    """Create a record for a gang that EC2 lists but that is missing from the ledger because the
    ledger or a reply was lost.
    """
    first = shown[0]
    return AwsGangRecord(
        name=name,
        region=str(first["_region"]),
        zone=(first.get("Placement") or {}).get("AvailabilityZone"),
        type=str(first["InstanceType"]),
        spot=first.get("InstanceLifecycle") == "spot",
        nodes=len(shown),
        intended_at=now,
        image=str(first.get("ImageId", "")),
        root=str(first.get("RootDeviceName", "")),
        disk_gib=0,
        makes_group=True,
        makes_placement=True,
        launched=True,
    )


def _last_of_each(rates: Iterable[tuple[datetime, int]]) -> list[tuple[datetime, int]]:
    """Drop each price that equals the previous price. If several prices have the same time, return
    only the last of the prices.
    """
    found: dict[datetime, int] = dict(rates)
    kept: list[tuple[datetime, int]] = []
    for at, micros in sorted(found.items()):
        if not kept or kept[-1][1] != micros:
            kept.append((at, micros))
    return kept
