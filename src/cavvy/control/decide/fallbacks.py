"""What a service's fallbacks must not be: services that do not exist, that may answer outside of
the service's places, that do not know the requests' model, or from which requests would return to
the service.
"""

from collections.abc import Mapping, Sequence

from cavvy.control.decide.bound_requests import is_bound_to_places, stays_within
from cavvy.domain.policies import BoundPolicy
from cavvy.domain.services import FallbackRule, ServiceSpec
from cavvy.domain.tasks import TaskSpec


def object_to_fallbacks(
    task: TaskSpec, others: Mapping[str, TaskSpec], policies: Sequence[BoundPolicy] = ()
) -> str:
    """Return what is wrong with the fallbacks of a service, or "". `others` are the tasks of the
    project's other services by name, and `policies` those of the project.
    """
    spec = task.service
    assert spec is not None
    by_policy = any(each.policy.regions for each in policies)
    bound = is_bound_to_places(task)
    for each in spec.fallbacks:
        name = each.service
        if each.api is not None:
            if bound or by_policy:
                what = "`resources.regions`" if bound else "a policy of the project"
                return (
                    f"the API at {each.api.host} may answer in any place, but {what} names places; "
                    "delete one of the two"
                )
        elif name == task.name:
            return "a service cannot be its own fallback; name another service"
        elif name not in others:
            return f"the project has no service {name}; start it first, or correct the name"
        elif not stays_within(others[name], task):
            return (
                f"replicas of {name} may run outside of the places of {task.name}; give {name} "
                "the same `regions` or `residency`"
            )
        elif path := _find_way(name, task.name, others):
            return f"requests would go round: {' -> '.join((task.name, *path))}; delete a fallback"
        elif problem := _object_to_model(spec, each, others[name].service):
            return problem
    return ""


def _object_to_model(spec: ServiceSpec, rule: FallbackRule, other: ServiceSpec | None) -> str:
    """Return why another service does not know the model that requests would name, or ""."""
    known = () if other is None else other.model_names
    asked = (rule.model,) if rule.model else spec.model_names
    if not known or not asked or set(asked) & set(known):
        return ""
    return (
        f"requests to {rule.service} would name the model {asked[0]}, but it has "
        f"{', '.join(known)}; write `{{service: {rule.service}, model: {known[0]}}}`"
    )


def _find_way(start: str, end: str, others: Mapping[str, TaskSpec]) -> tuple[str, ...]:
    """Return the names on the way from one service to another over fallbacks, or ()."""
    ways: list[tuple[str, ...]] = [(start,)]
    seen = {start}
    while ways:
        way = ways.pop()
        known = others.get(way[-1])
        spec = None if known is None else known.service
        for each in () if spec is None else spec.fallbacks:
            if each.service == end:
                return (*way, end)
            if each.service and each.service not in seen:
                seen.add(each.service)
                ways.append((*way, each.service))
    return ()
