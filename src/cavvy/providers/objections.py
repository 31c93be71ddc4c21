"""Why a place cannot run a task, whatever it has free: one rule for all places, asked by plan
and by the queue.
"""

from cavvy.domain.tasks import Objection, Task
from cavvy.providers.base import ChecksTasks, Provider
from cavvy.spec.support import refusals


def list_objections(task: Task, provider: Provider) -> list[Objection]:
    """What the manifest says that the provider lacks, then what the provider itself finds."""
    unsupported = {
        str(feature): reason for feature, reason in provider.manifest.unsupported.items()
    }
    own = provider.check(task) if isinstance(provider, ChecksTasks) else ()
    return list(dict.fromkeys([*refusals(task, unsupported), *own]))
