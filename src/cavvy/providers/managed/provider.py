"""The provider that all managed services share. It adapts a managed service to the code in `vm`:
each instance of a job counts as a machine.

A job of N instances is one request for N machines. The job is given the name of its machine with
rank 0. A machine's id is the id of its job, "#" and the container's index in the job. If jobs are
single (`ServiceTraits.single`), each machine is a separate job, which has the machine's name.

The provider refuses options with which a service would start, delay or repeat runs without an order
from Cavvy.
"""

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Objection, TaskSpec
from cavvy.domain.values import asdict
from cavvy.providers.base import GangSpec, Manifest, NodeEndpoint, ProviderContext, Refused
from cavvy.providers.hosts import boot
from cavvy.providers.hosts.userdata import PATIENCE, make_config, make_preamble
from cavvy.providers.managed.service import (
    ContainerEntry,
    JobRequest,
    JobState,
    ManagedService,
    ServiceJob,
    ServiceTraits,
    object_to_missing_image,
)
from cavvy.providers.notices import NoticeSource, make_notice_fields
from cavvy.providers.vm import cloud as vm
from cavvy.providers.vm.provider import Release, VmProvider

# In many images, /tmp is the only folder that every user may write to. SageMaker stores /tmp on the
# instance's data volume. A test sets CAVVY_FOLDER to keep containers on one machine apart.
_FOLDER = "${CAVVY_FOLDER:-/tmp/cavvy}"
_PROGRAMS = (Path(boot.__file__), Path(__file__).parent / "container.py")
# the part of the time between SIGTERM and SIGKILL that is reserved for the agent's last report
_SAVING_S = 10.0
_MOST_PARTS = 60  # less than SageMaker's limit of 100 environment variables


def make_container_script(
    gang: GangSpec,
    endpoint: NodeEndpoint,
    traits: ServiceTraits,
    title: str,
    notices: Sequence[NoticeSource] = (),
    placed: Sequence[str] = (),
) -> str:
    """Return the short script that a container's shell runs. The short script fetches and runs the
    longer script, which is the same for all ranks. `title` is the service's name in messages to
    users. `placed` are the targets of the inputs that the service places on the nodes. The first
    call blocks, because it packs the agent.
    """
    config = {
        **make_config(gang, endpoint),
        "boxed": True,  # the container already runs the task's image
        "notices": make_notice_fields(notices),
        "placed": list(placed),
        "taken": {"seconds": max(1.0, traits.stop_s - _SAVING_S), "source": title},
    }
    told = {
        "tokens": [endpoint.claim_token(gang.name, rank) for rank in range(gang.nodes)],
        "patience_s": PATIENCE.total_seconds(),
        "hosts": asdict(traits.hosts),
        "first_stays": traits.first_ends_all and gang.nodes > 1,
        "config": config,
    }
    files = {"boot.json": json.dumps(told, sort_keys=True)}
    files |= {each.name: each.read_text("utf-8").strip() for each in _PROGRAMS}
    lines = [
        f"cat > \"$CAVVY_FOLDER/{name}\" <<'END_OF_FILE'\n{text}\nEND_OF_FILE"
        for name, text in files.items()
    ]
    program = '"$CAVVY_FOLDER/container.py" "$CAVVY_PYTHON"'
    lines += [
        f"cavvy_start && cavvy_fetch {endpoint.agent()} agent.pyz && "
        f"exec $CAVVY_PYTHON -I -S {program}"
    ]
    whole = endpoint.publish("\n".join([*lines, ""]).encode())
    return (
        f"#!/bin/sh\n{make_preamble(endpoint, _FOLDER)}\n"
        f'mkdir -p "$CAVVY_FOLDER" && cavvy_fetch {whole} entry.sh && . "$CAVVY_FOLDER/entry.sh"\n'
    )


def make_entry(script: str, limit: int) -> ContainerEntry:
    """Return a shell command that runs the script, and environment variables that contain the
    script in parts of at most `limit` characters. Raises Refused if the script needs too many
    variables.
    """
    parts = [script[at : at + limit] for at in range(0, len(script), limit)]
    if len(parts) > _MOST_PARTS:
        raise Refused(
            f"the container's script needs {len(parts)} environment variables of {limit} "
            f"characters; the limit is {_MOST_PARTS} variables"
        )
    names = [f"CAVVY_{number}" for number in range(len(parts))]
    joined = "".join(f"${name}" for name in names)
    # SageMaker allows at most 256 characters for each argument
    words = ["/bin/sh", "-c", f'eval "{joined}"']
    return ContainerEntry(command=words, environment=dict(zip(names, parts, strict=True)))


_NOTHING = "#!/bin/sh\n"
_MANY = (
    "Cavvy starts many runs as separate jobs, each with its own log, checkpoints and bill; submit "
    "each run with `cavvy run -d --param NAME=VALUE`, or copy the template `hpo-sweep`, which "
    "also stops runs early"
)
_START = "write `schedule: {at: TIME}` or `schedule: {cron: LINE}` in the task, for every provider"
_REASONS = {
    **dict.fromkeys(("array", "array_size", "array_properties", "arrayProperties"), _MANY),
    **dict.fromkeys(("sweep", "study", "tuner", "tuning", "hyperparameter_tuning"), _MANY),
    **dict.fromkeys(("schedule", "schedule_expression"), _START),
    "retry": "only the control plane restarts jobs; write `retry` in the task",
}
# the name of a machine, as `vm.records` makes it
_NAME = re.compile(
    rf"{vm.NAME_PREFIX}[0-9a-f]+-.+-[0-9a-f]+-(?P<rank>[0-9]{{1,5}})-(?P<count>[1-9][0-9]{{0,4}})"
)
_STATES = {
    JobState.WAITING: vm.MachineState.STARTING,
    JobState.RUNNING: vm.MachineState.RUNNING,
    # counts as a stopped machine, which the layer `vm` deletes: only the control plane restarts
    # jobs
    JobState.RECLAIMED: vm.MachineState.STOPPED,
    # also counts as stopped; `stop` refuses to delete the machines of such a job, so they stay
    JobState.KEPT: vm.MachineState.STOPPED,
    JobState.ENDED: vm.MachineState.ENDED,
}


def make_provider(
    manifest: Manifest,
    context: ProviderContext,
    make_service: Callable[[ProviderContext], ManagedService],
) -> VmProvider:
    """Return a `VmProvider` whose machines are the instances of the service's jobs. Besides the six
    calls, a service may have these methods: `close` closes the service's connections.
    `list_placed` returns the targets of the inputs that the service itself places on a gang's
    nodes. `list_notices` returns the addresses that a gang's agents poll for notices; without it,
    the agents poll the manifest's addresses. Agents also treat the service's SIGTERM as a notice.
    `release` ends the instances that the service keeps after a job.
    """
    service = make_service(context)
    list_placed: Callable[[GangSpec], Sequence[str]] | None = getattr(service, "list_placed", None)
    list_notices: Callable[[GangSpec], Sequence[NoticeSource]] | None = getattr(
        service, "list_notices", None
    )
    release: Release | None = getattr(service, "release", None)

    async def release_machine(machine: str) -> None:
        job, _, place = machine.rpartition("#")
        if release is not None and place == "0":
            await release(job)

    async def make_script(gang: GangSpec, rank: int) -> str:
        if context.node_endpoint is None or not service.traits.has_script(rank):
            return _NOTHING
        return await asyncio.to_thread(
            make_container_script,
            gang,
            context.node_endpoint,
            service.traits,
            manifest.title,
            manifest.notices if list_notices is None else list_notices(gang),
            () if list_placed is None else list_placed(gang),
        )

    def object_to(task: TaskSpec) -> Sequence[Objection]:
        return [
            *service.check(task),
            *object_to_options(manifest.name, task),
            *object_to_missing_image(manifest, task, context.settings),
        ]

    cloud = ManagedCloud(service)
    provider = VmProvider(
        manifest,
        context,
        cloud,
        identity=service.identity,
        make_script=make_script,
        object_to=object_to,
        close=getattr(service, "close", lambda: None),
    )
    if release is not None:
        provider.let_release(release_machine)
    return provider


def object_to_options(provider: str, task: TaskSpec) -> Sequence[Objection]:
    """Return the objections to the task's options for this provider."""
    names = {
        name
        for each in task.resources.options
        if each.provider == provider
        for name in json.loads(each.values)
    }
    return [
        Objection(f"resources.options.{provider}.{name}", _REASONS[name])
        for name in sorted(names & _REASONS.keys())
    ]


class ManagedCloud:
    """Implements `Cloud`. Jobs whose names do not have Cavvy's form are not listed."""

    def __init__(self, service: ManagedService) -> None:
        self._service, known = service, service.traits
        self.traits = vm.CloudTraits(
            name_limit=known.name_limit,
            tokens=known.unique_names,
            atomic_count=not known.single,
            list_lag=known.list_lag,
            ended_listed=known.ended_listed,
            bill_starts=vm.BillStart.RUNNING,
            bill_ends=known.bill_ends,
            quota_codes=known.quota_codes,
            user_data_limit=1 << 20,
            reach=vm.Reach.USER_DATA if known.agents else vm.Reach.NONE,
        )

    async def offers(self) -> Sequence[Offer]:
        return await self._service.offers()

    async def create(self, request: vm.MachineRequest) -> Sequence[str]:
        name = _NAME.fullmatch(request.names[0])
        job = await self._service.submit(
            JobRequest(
                gang=request.gang,
                offer=request.offer,
                name=request.names[0],
                nodes=len(request.names),
                rank=int(name["rank"]) if name else 0,
                entry=make_entry(request.user_data[0], self._service.traits.variable_limit),
                tags=request.tags,
            )
        )
        return [f"{job}#{rank}" for rank in range(len(request.names))]

    async def list(self) -> Sequence[vm.CloudMachine]:
        return [each for job in await self._service.list() for each in self._machines(job)]

    async def get(self, machine: str) -> vm.CloudMachine | None:
        job, _, place = machine.rpartition("#")
        found = await self._service.get(job)
        return None if found is None else self._machine(found, int(place))

    async def delete(self, machine: str) -> None:
        await self._service.stop(machine.rpartition("#")[0])

    def is_full(self, fault: vm.CloudFault) -> bool:
        return self._service.is_full(fault)

    def _machines(self, job: ServiceJob) -> Sequence[vm.CloudMachine]:
        """Return the machines of a job, or () if the job's name does not have Cavvy's form."""
        name = _NAME.fullmatch(job.name)
        if name is None or (not self._service.traits.single and name["rank"] != "0"):
            return ()
        count = 1 if self._service.traits.single else int(name["count"])
        return [self._machine(job, place) for place in range(count)]

    def _machine(self, job: ServiceJob, place: int) -> vm.CloudMachine:
        stem, rank, count = job.name.rsplit("-", 2)
        rank = rank if self._service.traits.single else str(place)
        return vm.CloudMachine(
            id=f"{job.id}#{place}",
            name=f"{stem}-{rank}-{count}",
            state=_STATES[job.state],
            created_at=job.started_at,
            running_at=job.started_at,
            ended_at=job.ended_at,
            preempted=job.preempted,
            no_capacity=job.no_capacity,
            reason=job.reason,
            waits=job.waits,
        )
