"""Keeps replicas whose programs listen on the same port apart: on the server's machine, all share
its ports, so that a second program cannot listen, and the first one would answer its requests.
"""

from collections.abc import Collection, Iterable

from cavvy.domain.services import HERE, ReplicaState, ServiceReplica
from cavvy.domain.stored_services import StoredService
from cavvy.domain.tasks import ResourceSpec, TaskSpec
from cavvy.domain.values import replace


def find_holder(
    service: StoredService, services: Iterable[StoredService], *, replaces: bool = True
) -> str:
    """The service with a replica that has, or may get, the service's port on the server's machine;
    "" if there is none. If the revision `replaces` the others of the service at once, as a canary
    does not, their replicas do not count.
    """
    port = service.spec.port
    for other in (service, *(each for each in services if each.id != service.id)):
        for replica in other.open:
            replaced = replaces and other is service and replica.revision != service.revision
            if replica.port == port and not replaced and _may_be_here(replica):
                return other.name
    return ""


def _may_be_here(replica: ServiceReplica) -> bool:
    """Its place is unknown until it runs."""
    if replica.state is ReplicaState.ENDED or (replica.providers and HERE not in replica.providers):
        return False
    return not replica.gang and (not replica.place or replica.place.startswith(f"{HERE}/"))


def list_elsewhere(task: TaskSpec, providers: Collection[str]) -> tuple[str, ...]:
    """Those of the providers, apart from the server's machine, where the task may run."""
    named = {each for need in task.resources.choices for each in need.providers or providers}
    return tuple(sorted(named & {*providers} - {HERE}))


def keep_at(task: TaskSpec, providers: Collection[str]) -> TaskSpec:
    """The task, restricted to the providers that it permits and that are among these."""

    def restrict(need: ResourceSpec) -> ResourceSpec:
        allowed = tuple(each for each in need.providers or providers if each in providers)
        return replace(need, providers=allowed)

    restricted = (restrict(replace(each, any_of=())) for each in task.resources.choices)
    kept = tuple(each for each in restricted if each.providers)
    if not kept:
        return task
    choices = kept if len(kept) > 1 else ()
    return replace(task, resources=replace(kept[0], any_of=choices, ordered=task.resources.ordered))
