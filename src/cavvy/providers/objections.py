"""Finds the reasons why a provider can never run a task, for the planner and the queue."""

from cavvy.domain.tasks import Objection, TaskSpec
from cavvy.providers.abilities import CHECKS_TASKS, ability
from cavvy.providers.base import Provider
from cavvy.spec.support import read_options, refusals


def refuses_all(provider: Provider) -> str:
    """The reason why the provider cannot run even a minimal task; "" if it can run one."""
    reasons = list_objections(TaskSpec(name="check", run="true"), provider)
    return reasons[0].reason if reasons else ""


def list_objections(task: TaskSpec, provider: Provider) -> list[Objection]:
    """The objections, without duplicates: features that the manifest lists as unsupported, then
    unknown options, then the provider's own objections.
    """
    unsupported = {
        str(feature): reason for feature, reason in provider.manifest.unsupported.items()
    }
    checks = ability(provider, CHECKS_TASKS)
    own = checks.check(task) if checks else ()
    name, known = provider.manifest.name, provider.manifest.options
    unknown = [
        Objection(f"resources.options.{name}.{option}", f"{name} has no such option")
        for option in read_options(task.resources, name)
        if option not in known
    ]
    return list(dict.fromkeys([*refusals(task, unsupported), *unknown, *own]))
