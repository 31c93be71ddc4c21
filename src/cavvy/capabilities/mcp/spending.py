"""Submits tasks for coding agents, within a spending limit that the server enforces.

Each job and service gets a tag, and a budget for this tag with a hard stop: at the limit, the
server starts no further work and stops what runs, also if the agent asks for more. Each job also
has its own ceiling, at which the server stops it.
"""

import getpass
import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from cavvy.cli.reach.session import default_project, session
from cavvy.cli.view.failure import CommandFailure
from cavvy.domain.units import Money, UnitError, format_usd, parse_usd
from cavvy.domain.values import Struct

if TYPE_CHECKING:
    from cavvy.client import ApiClient
    from cavvy.client.policy_wire import BudgetView
    from cavvy.task_files import LoadedTask

_TAG = "mcp"  # its value is the name of the account


class PreparedTask(Struct, frozen=True, kw_only=True):
    """A task that was read once, so that what is confirmed is what is submitted. `price` is what
    the server says about its cost, or "" if it costs nothing.
    """

    loaded: "LoadedTask"
    file: str
    ceiling: Money | None  # None for a service, whose replicas only the budget limits
    price: str

    @property
    def question(self) -> str:
        """The question to the user. It changes with the task."""
        task = self.loaded.task
        digest = hashlib.sha256(self.loaded.text.encode()).hexdigest()[:12]
        what = "job" if self.ceiling is not None else "service"
        lines = [f"Start the {what} {task.name} of {self.file} ({digest})?", self.price]
        if self.ceiling is not None:
            several = bool(task.array or task.sweep) or task.schedule is not None
            each = "Each of its jobs" if several else "The job"
            lines.append(f"{each} is stopped at {format_usd(self.ceiling)}.")
        return "\n".join(lines)


class Spending:
    """The rights of the user to spend money through coding agents, at most `limit` in a month."""

    def __init__(self, limit: Money) -> None:
        self._limit = limit

    def prepare(self, file: str, max_usd: float | None) -> PreparedTask:
        """Read a task file, and ask the server what the task costs. Without `max_usd`, the file
        describes a service. Raises CommandFailure.
        """
        from cavvy.cli.task.load import read_task
        from cavvy.cli.task.problems import ask_server
        from cavvy.task_files import ReadOptions

        ceiling = None if max_usd is None else self._read_ceiling(max_usd)
        with session() as client:
            tags = json.dumps({"tags": {_TAG: _name_user(client)}})
            path = str(Path(file).expanduser())
            loaded = read_task(path, {}, ReadOptions(overrides=tags, serves=ceiling is None))
            if ceiling is None:  # its replicas come and go, so its user is always asked
                price = "It runs until it is stopped. All that coding agents start may cost "
                price += f"{format_usd(self._limit)} in a month."
            else:
                # the user's consent to a kept machine or a pool is not for agents
                project = _project_of(loaded)
                checked = ask_server(client, loaded, path, {}, project, own_consent=True)
                price = checked.consent_needed
            if price:
                self._set_budget(client, _project_of(loaded))
        return PreparedTask(loaded=loaded, file=path, ceiling=ceiling, price=price)

    def submit(self, task: PreparedTask, *, agreed: bool) -> dict[str, object]:
        """Submit a job; without `agreed`, only if it costs nothing, which the server enforces while
        it runs: what is free now may have a price later. Raises CommandFailure.
        """
        from cavvy.cli.task.profiles import text_with_rates
        from cavvy.cli.task.submission import make_origin, submit

        loaded = task.loaded
        with session() as client:
            project = _project_of(loaded)
            job = submit(
                client,
                text_with_rates(loaded.text, loaded.task, loaded.folder),
                path=task.file,
                params={},
                project=project,
                origin=make_origin(client, project, loaded, loaded.text),
                consent=agreed,
                own_consent=True,
                ceiling_micros=task.ceiling.micros if agreed and task.ceiling else 0,
            )
        return {"job": job.name, "id": job.id, "project": job.project, "phase": job.phase}

    def serve(self, task: PreparedTask) -> dict[str, object]:
        """Start a service to which the user has agreed. Raises CommandFailure."""
        from cavvy.cli.reach.services import await_url
        from cavvy.cli.task.submission import make_origin
        from cavvy.client.service_wire import find_named_service, put_service

        loaded = task.loaded
        with session() as client:
            project = _project_of(loaded)
            put_service(
                client,
                loaded.text,
                project=project,
                name=loaded.task.name,
                path=task.file,
                params={},
                origin=make_origin(client, project, loaded, loaded.text),
                user=getpass.getuser(),
                consent=True,
            )
            found = await_url(client, project, loaded.task.name, find_named_service)
        return {"service": found.name, "project": found.project, "url": found.url}

    def _read_ceiling(self, max_usd: float) -> Money:
        try:
            ceiling = parse_usd(max_usd)
        except UnitError as error:
            raise CommandFailure(f"max_usd: {error}", "an example: 5") from error
        if ceiling.micros < 0 or ceiling > self._limit:
            raise CommandFailure(
                f"max_usd is {format_usd(ceiling)}, but this server may spend "
                f"{format_usd(self._limit)} in a month",
                "the user starts `cavvy mcp --max-usd USD` with another limit",
            )
        return ceiling

    def _set_budget(self, client: "ApiClient", project: str) -> None:
        """Ensure that the server enforces the limit. Raises CommandFailure if it would not."""
        from cavvy.client import ApiError
        from cavvy.client.policy_wire import BudgetAsk, list_budgets, put_budget

        if self._limit.micros == 0:
            raise CommandFailure(
                "this costs money, and this server may spend none",
                "the user starts `cavvy mcp --max-usd USD` to permit spending",
            )
        user = _name_user(client)
        tag, name = f"{_TAG}={user}", f"mcp-{re.sub('[^a-z0-9]+', '-', user.lower()).strip('-')}"
        try:
            known = [each for each in list_budgets(client) if _enforces(each, tag, user, project)]
            if any(each.limit_micros <= self._limit.micros for each in known):
                return
            # of the user, so that no other user's jobs with this tag use it up
            ask = BudgetAsk(limit_micros=self._limit.micros, tag=tag, user=user, hard_percent=100)
            put_budget(client, name, ask)
        except ApiError as error:
            if error.code not in ("role-needed", "scope-needed"):
                raise
            amount = format_usd(self._limit).removeprefix("$")
            hint = f"`cavvy cost budget set {name} {amount} --user {user} --tag {tag} --hard 100%`"
            raise CommandFailure(
                "no budget limits what coding agents spend, and you may set none",
                f"ask an admin of the server for {hint}",
            ) from error


def _enforces(budget: "BudgetView", tag: str, user: str, project: str) -> bool:
    """Return whether a budget stops all work of the user with this tag in the project."""
    covers = budget.tag == tag and budget.project in ("", project) and budget.user in ("", user)
    stops = budget.hard_percent is not None and budget.hard_percent <= 100
    return covers and stops and not (budget.service or budget.carry_over)


def _project_of(loaded: "LoadedTask") -> str:
    """Return the project of the task. One in the file counts less than that of the MCP server, so
    that an agent cannot leave it.
    """
    import os

    return default_project() if "CAVVY_PROJECT" in os.environ else loaded.task.project


def _name_user(client: "ApiClient") -> str:
    from cavvy.client.account_wire import AccountClient

    return AccountClient(client).whoami().account or getpass.getuser()
