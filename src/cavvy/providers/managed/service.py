"""The interface that each managed service implements: six calls, and the service's traits. Also
finds the image of a job: the image in the task, in the task's options, or in the settings.

The calls raise `CloudFault`, or Refused if a person must change the setup.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Protocol

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Objection, Scalar, TaskSpec
from cavvy.domain.values import Struct, field
from cavvy.providers.base import Feature, GangSpec, Manifest, Refused
from cavvy.providers.vm.cloud import BillEnd, CloudFault


class JobState(StrEnum):
    """The state of a service's job."""

    WAITING = "waiting"  # accepted, but no instance is billed yet
    RUNNING = "running"  # billed
    # the job's instances are gone, and the service would start the job again; the layer stops the
    # job
    RECLAIMED = "reclaimed"
    # the job's work has ended, and the service keeps and bills the job's instances for the next
    # job; needs the trait `BillEnd.REPORTED`
    KEPT = "kept"
    ENDED = "ended"


class HostList(Struct, frozen=True, kw_only=True):
    """Describes how a container determines its rank. If `index` is set, it names the environment
    variable that contains the rank; without the variable, the rank is 0. If `index` is "", the rank
    is the host's position in a list of hosts. The list of hosts is JSON in the environment variable
    that `hosts` names or, if that variable is missing, in the file that `file` names. If `cluster`
    is set, it names an environment variable; the variable's JSON lists the hosts of each worker
    pool and states the host's own pool and index. If this variable is missing, the rank is 0.
    """

    index: str = ""
    cluster: str = ""
    hosts: str = ""  # the environment variable with the list
    current: str = ""  # the environment variable with the host's own name
    file: str = ""  # the JSON file; it has the keys `hosts` and `current_host`


class ServiceTraits(Struct, frozen=True, kw_only=True):
    """The limits and the behaviour of a service. The default of `list_lag` is an assumption, for
    services that document none.
    """

    hosts: HostList = HostList()
    agents: bool = True  # False: its containers run the task's program, and no agent
    name_limit: int = 63  # maximum characters of a job's name; at least 48 of [a-z0-9-]
    # True: a request with the name of an existing job creates no second job
    unique_names: bool = False
    variable_limit: int = 512  # maximum characters of an environment variable
    # seconds between SIGTERM and SIGKILL when the service ends a container
    stop_s: float = 120
    # the service ends all containers of a job once the container with rank 0 has ended
    first_ends_all: bool = False
    # each job has one container: a gang is one job for each rank, and the layer starts all or none
    single: bool = False
    list_lag: timedelta = timedelta(minutes=1)  # `list` may miss jobs that are younger
    ended_listed: timedelta = timedelta(0)  # how long `list` and `get` show ended jobs
    # `REPORTED` if the bill of a job in the state `RECLAIMED` is known only once the job has ended
    bill_ends: BillEnd = BillEnd.SHUTDOWN
    quota_codes: frozenset[str] = frozenset()  # codes of faults that mean "the quota is too small"

    def has_script(self, rank: int) -> bool:
        """Return whether this rank needs a script that starts its agent. If one job runs all ranks,
        only rank 0 needs a script, which starts the agents of all ranks.
        """
        return self.agents and (self.single or rank == 0)


class ContainerEntry(Struct, frozen=True, kw_only=True):
    """The command that starts the agent in a container, and the command's environment variables."""

    command: Sequence[str]
    environment: Mapping[str, str]


class JobRequest(Struct, frozen=True, kw_only=True):
    """One job of `nodes` containers, one on each instance. `rank` is the rank of the first
    container: 0 unless the service's jobs are single (`ServiceTraits.single`).
    """

    gang: GangSpec
    offer: Offer
    name: str
    nodes: int
    rank: int = 0
    entry: ContainerEntry
    tags: Mapping[str, str] = field(default_factory=dict)


class ServiceJob(Struct, frozen=True, kw_only=True):
    """One job, as the service reports it. `id` contains the region."""

    id: str
    name: str
    state: JobState
    started_at: datetime | None = None  # start of the bill
    ended_at: datetime | None = None  # end of the bill; None if it is not known yet
    preempted: bool = False
    no_capacity: bool = False  # the service accepted the job, but had no capacity for it
    reason: str = ""  # why the job ended; shown to users
    waits: str = ""  # what a job without running containers waits for; shown to users


class ManagedService(Protocol):
    """The interface to a managed service. Each call must have a time limit."""

    traits: ServiceTraits

    def identity(self) -> Sequence[tuple[str, str]]:
        """Return facts for `cavvy check`, which calls `offers` first."""

    async def offers(self) -> Sequence[Offer]:
        """Return the instance types with a known price."""

    async def submit(self, request: JobRequest) -> str:
        """Request one job, with all instances or none; return the job's id."""

    async def list(self) -> Sequence[ServiceJob]:
        """Return the account's jobs that are unfinished or that ended within
        `ServiceTraits.ended_listed`.
        """

    async def get(self, job: str) -> ServiceJob | None:
        """Return the job with this id, or None if the service does not know the id."""

    async def stop(self, job: str) -> None:
        """Tell the service to end a job. Raises CloudFault with the status 404 if the job has
        ended.
        """

    def is_full(self, fault: CloudFault) -> bool:
        """Return whether this fault of `submit` means that the offer is not available now."""

    def check(self, task: TaskSpec) -> Sequence[Objection]:
        """Return the objections to a task, or () if the service can run it."""


def find_image(provider: str, gang: GangSpec, settings: Mapping[str, Scalar]) -> str:
    """Return the image of a gang. Raises Refused if neither the task, its options nor the settings
    name an image."""
    image = gang.image or gang.options.get("image") or settings.get("image")
    if not image:
        raise Refused(
            f"[providers.{provider}] image: no image is set; set one here, or in the task's `image`"
        )
    return str(image)


def object_to_missing_image(
    manifest: Manifest, task: TaskSpec, settings: Mapping[str, Scalar]
) -> Sequence[Objection]:
    """Return the objection to a task without a named image, or () if an image is named or the
    service has its own image.
    """
    stated = [each for each in task.resources.options if each.provider == manifest.name]
    if task.image or settings.get("image") or Feature.IMAGE in manifest.unsupported:
        return ()
    if any(json.loads(each.values).get("image") for each in stated):
        return ()
    reason = f"{manifest.title} needs an image; set `image`, or [providers.{manifest.name}] image"
    return [Objection("image", reason)]
