"""Separates replicas whose programs listen on the same port. On the server's machine, all replicas
share the machine's ports. If two programs used the same port, only the first could listen, and
would also get the requests for the second.
"""

from collections.abc import Collection, Iterable

from cavvy.domain.offers import list_sellers
from cavvy.domain.services import HERE, ReplicaState, ServiceReplica
from cavvy.domain.stored_services import StoredService
from cavvy.domain.tasks import ResourceSpec, TaskSpec
from cavvy.domain.values import replace


def find_holder(
    service: StoredService, services: Iterable[StoredService], *, replaces: bool = True
) -> str:
    """Find a service that prevents a replica of `service` from using its port on the server's
    machine, because one of its own replicas uses the port, or may use it. Returns the name of this
    service, or "". If a new revision of `service` replaces the others immediately, `replaces` is
    True, and the replicas of the other revisions are ignored. For a canary, `replaces` is False.
    """
    port = service.spec.port
    for other in (service, *(each for each in services if each.id != service.id)):
        for replica in other.open:
            replaced = replaces and other is service and replica.revision != service.revision
            if replica.port == port and not replaced and _may_be_here(replica):
                return other.name
    return ""


def _may_be_here(replica: ServiceReplica) -> bool:
    """Return whether the replica runs, or may later run, on the server's machine."""
    if replica.state is ReplicaState.ENDED or (replica.providers and HERE not in replica.providers):
        return False
    return not replica.gang and (not replica.place or replica.place.startswith(f"{HERE}/"))


def list_elsewhere(task: TaskSpec, providers: Collection[str]) -> tuple[str, ...]:
    """Return the providers where the task may run, except the server's own machine."""
    choices = task.resources.choices
    named = {each for need in choices for each in list_sellers(need.providers) or providers}
    return tuple(sorted(named & {*providers} - {HERE}))


def keep_at(task: TaskSpec, providers: Collection[str]) -> TaskSpec:
    """Return the task, with its permitted providers restricted to `providers`."""

    def restrict(need: ResourceSpec) -> ResourceSpec:
        allowed = tuple(
            each for each in need.providers or providers if list_sellers((each,)) & {*providers}
        )
        return replace(need, providers=allowed)

    restricted = (restrict(replace(each, any_of=())) for each in task.resources.choices)
    kept = tuple(each for each in restricted if each.providers)
    if not kept:
        return task
    choices = kept if len(kept) > 1 else ()
    return replace(task, resources=replace(kept[0], any_of=choices, ordered=task.resources.ordered))
