"""The secrets that a task names."""

from collections.abc import Collection, Sequence

from cavvy.domain.tasks import TaskSpec


def list_missing(task: TaskSpec, known: Collection[str]) -> Sequence[str]:
    """Return the names of the task's secrets that are not in `known`."""
    return [name for name in list_secrets(task) if name not in known]


def list_secrets(task: TaskSpec) -> Sequence[str]:
    """Return the names of the secrets that the task needs, each once."""
    named = [*task.secrets, *([task.image_login] if task.image_login else [])]
    named += [] if task.service is None else [each.secret for each in task.service.webhooks]
    return list(dict.fromkeys(named))


def explain_missing(project: str, missing: Sequence[str]) -> tuple[str, str]:
    """Return the message about secrets that a project does not have, and the hint."""
    commands = "; ".join(f"cavvy secret set {name} -p {project}" for name in missing)
    return f"project {project} has no secret {', '.join(missing)}", f"set it with: {commands}"
