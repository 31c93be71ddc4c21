"""Makes a managed service a cloud of the layer `vm`: each instance of a job counts as a machine.

A job of N instances is one request for N machines. The name of the job is the name of the machine
with rank 0. A machine's id is the id of its job, "#" and the rank.
"""

import re
from collections.abc import Sequence

from cavvy.domain.offers import Offer
from cavvy.providers.managed.container import make_entry
from cavvy.providers.managed.service import JobRequest, JobState, ManagedService, ServiceJob
from cavvy.providers.vm.cloud import (
    NAME_PREFIX,
    BillStart,
    CloudFault,
    CloudMachine,
    CloudTraits,
    MachineRequest,
    MachineState,
)

# the name of the machine with rank 0, as `vm.records` makes it
_NAME = re.compile(rf"{NAME_PREFIX}[0-9a-f]+-.+-[0-9a-f]+-0-(?P<count>[1-9][0-9]{{0,4}})")
_STATES = {
    JobState.WAITING: MachineState.STARTING,
    JobState.RUNNING: MachineState.RUNNING,
    # counts as a stopped machine, which the layer `vm` deletes: only the control plane restarts
    # jobs
    JobState.RECLAIMED: MachineState.STOPPED,
    JobState.ENDED: MachineState.ENDED,
}


class ManagedCloud:
    """Implements `Cloud`. Jobs with other names than Cavvy's are not listed."""

    def __init__(self, service: ManagedService) -> None:
        self._service, known = service, service.traits
        self.traits = CloudTraits(
            name_limit=known.name_limit,
            tokens=known.unique_names,
            atomic_count=True,
            list_lag=known.list_lag,
            ended_listed=known.ended_listed,
            bill_starts=BillStart.RUNNING,
            bill_ends=known.bill_ends,
            quota_codes=known.quota_codes,
            user_data_limit=1 << 20,
        )

    async def offers(self) -> Sequence[Offer]:
        return await self._service.offers()

    async def create(self, request: MachineRequest) -> Sequence[str]:
        job = await self._service.submit(
            JobRequest(
                gang=request.gang,
                offer=request.offer,
                name=request.names[0],
                nodes=len(request.names),
                entry=make_entry(request.user_data[0], self._service.traits.variable_limit),
                tags=request.tags,
            )
        )
        return [f"{job}#{rank}" for rank in range(len(request.names))]

    async def list(self) -> Sequence[CloudMachine]:
        jobs = await self._service.list()
        return [
            _machine(job, rank)
            for job in jobs
            if (name := _NAME.fullmatch(job.name)) is not None
            for rank in range(int(name["count"]))
        ]

    async def get(self, machine: str) -> CloudMachine | None:
        job, _, rank = machine.rpartition("#")
        found = await self._service.get(job)
        return None if found is None else _machine(found, int(rank))

    async def delete(self, machine: str) -> None:
        await self._service.stop(machine.rpartition("#")[0])

    def is_full(self, fault: CloudFault) -> bool:
        return self._service.is_full(fault)


def _machine(job: ServiceJob, rank: int) -> CloudMachine:
    stem, _, count = job.name.rsplit("-", 2)
    return CloudMachine(
        id=f"{job.id}#{rank}",
        name=f"{stem}-{rank}-{count}",
        state=_STATES[job.state],
        created_at=job.started_at,
        running_at=job.started_at,
        ended_at=job.ended_at,
        preempted=job.preempted,
        no_capacity=job.no_capacity,
        reason=job.reason,
    )
