"""Why a provider can never run a task: one rule, used by plan and the queue."""

from cavvy.domain.tasks import Objection, Task
from cavvy.providers.abilities import CHECKS_TASKS, ability
from cavvy.providers.base import Provider
from cavvy.spec.support import read_options, refusals


def list_objections(task: Task, provider: Provider) -> list[Objection]:
    """Each objection once: features that the manifest lacks, then the provider's own findings."""
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
