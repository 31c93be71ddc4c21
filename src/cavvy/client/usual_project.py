"""Chooses the project of commands and clients that name none.

CAVVY_PROJECT comes first, then the project that `cavvy project use` chose on the server in use,
then `default`. An account without a role in `default` uses its only project.
"""

import os

from cavvy.client.account_wire import AccountClient
from cavvy.client.client import ApiClient
from cavvy.client.contexts import read_contexts, used_context
from cavvy.client.errors import ApiError

USUAL_PROJECT = "default"  # the project of commands and tasks that name none


def find_chosen(home: str) -> str:
    """Return the project that the environment or `cavvy project use` names, or ""."""
    if named := os.environ.get("CAVVY_PROJECT"):
        return named
    contexts = read_contexts(home)
    return contexts.projects.get(used_context(contexts), "")


def find_own(client: ApiClient) -> str:
    """Return the project that the caller uses without a choice: `default`, or else the caller's
    only project, without the projects below it. Raises ApiError `project-not-chosen`.
    """
    accounts = AccountClient(client)
    me = accounts.whoami()
    names = {each.project for each in me.roles} - {""}
    everywhere = me.account is None or any(not each.project for each in me.roles)
    if everywhere:
        names = set(me.within or ())
    if USUAL_PROJECT in names or not names:
        return USUAL_PROJECT
    if len(names) > 1:
        listed = [each for each in accounts.projects() if each.name in names]
        active = [each for each in listed if each.archived_at is None]
        names = {each.name for each in active if each.parent not in names} or names
    if len(names) > 1:
        raise ApiError(
            "project-not-chosen",
            f"you have roles in several projects: {', '.join(sorted(names))}",
            "choose one with `cavvy project use NAME`, or name it with --project",
        )
    return names.pop()
