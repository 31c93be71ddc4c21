"""The machines of the fake cloud. Gangs are in a list, not a dict, so that tests notice if one name
was launched twice.
"""

import asyncio
from collections.abc import Sequence
from datetime import datetime, timedelta

from cavvy.domain.units import HourlyRate
from cavvy.domain.values import Struct, field
from cavvy.providers.base import GangSeen, GangSpec, GangState, NodeSeen
from cavvy.providers.fake.script import FaultScript


class FakeMachine(Struct):
    """One node, and the times at which its billing starts and ends."""

    engine_id: str
    rank: int
    started_at: datetime
    ended_at: datetime | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self, now: datetime) -> None:
        if self.ended_at is None:
            self.ended_at = now
            self.ended.set()


class FakeGang(Struct):
    """The gang that one launch created."""

    spec: GangSpec
    fault_script: FaultScript
    engine_id: str
    bought_at: datetime
    starts_at: datetime
    machines: list[FakeMachine] = field(default_factory=list)
    reason: str = ""
    preempted: bool = False
    removing: bool = False
    # the time of the removal, if the gang was still in the provider's queue
    cancelled_at: datetime | None = None

    @property
    def ended_at(self) -> datetime | None:
        """The time when the last node ended, or None while a node is running or has not started."""
        if self.cancelled_at is not None:
            return self.cancelled_at
        ends = [machine.ended_at for machine in self.machines]
        known = [end for end in ends if end is not None]
        return max(known) if ends and len(known) == len(ends) else None

    @property
    def alive(self) -> bool:
        return self.ended_at is None

    def nodes_in_use(self) -> int:
        if not self.alive:
            return 0
        return (
            self.spec.nodes
            if not self.machines
            else sum(machine.ended_at is None for machine in self.machines)
        )

    def seen(self, now: datetime, rates: Sequence[tuple[datetime, HourlyRate]]) -> GangSeen:
        late = timedelta(seconds=self.fault_script.told_late_s)
        return GangSeen(
            name=self.spec.name,
            state=self._state(now),
            engine_id=self.engine_id,
            reason=self.reason,
            preempted=self.preempted,
            eta=self.starts_at if now < self.starts_at else None,
            nodes=tuple(
                NodeSeen(
                    rank=machine.rank,
                    engine_id=machine.engine_id,
                    started_at=machine.started_at if now - machine.started_at >= late else None,
                    ended_at=machine.ended_at,
                    address=f"10.0.0.{machine.rank + 1}",
                )
                for machine in self.machines
            ),
            rates=rates,
        )

    def _state(self, now: datetime) -> GangState:
        if not self.alive:
            return GangState.ENDED
        if not self.machines:
            return GangState.QUEUED
        booted = self.fault_script.boots and now >= self.starts_at + timedelta(
            seconds=self.fault_script.boot_s
        )
        return GangState.RUNNING if booted else GangState.STARTING
