"""Finds published versions of models."""

from typing import TYPE_CHECKING

from cavvy.cli.view.failure import CommandFailure

if TYPE_CHECKING:
    from cavvy.client import ApiClient
    from cavvy.client.model_wire import ModelView

_MOST_VERSIONS = 8  # that a message names


def find_version(client: "ApiClient", project: str, name: str) -> "ModelView":
    """Return the version MODEL@NUMBER, or the one that has the label of MODEL@LABEL. Raises
    CommandFailure."""
    from cavvy.client import ApiError
    from cavvy.client.model_wire import list_models

    try:
        known = [each for each in list_models(client, project) if each.project == project]
    except ApiError as error:
        if error.code != "not-found":
            raise
        raise CommandFailure(
            "this server keeps no published models: its capability `edge` is not installed",
            "name a job, or ask an admin to install it",
        ) from error
    for each in known:
        if name == each.name or name in [f"{each.model}@{label}" for label in each.labels]:
            return each
    same = [each for each in known if each.model == name.partition("@")[0]] or known
    names = [each.name for each in same]
    names += [f"{each.model}@{label}" for each in same for label in each.labels]
    more = ", …" if len(names) > _MOST_VERSIONS else ""
    raise CommandFailure(
        f"project {project} has no model {name}",
        f"expected MODEL@NUMBER or MODEL@LABEL; known: {', '.join(names[-_MOST_VERSIONS:])}{more}"
        if known
        else "`cavvy model publish` publishes one",
    )
