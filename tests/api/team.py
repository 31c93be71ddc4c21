"""A company for tests: a tree of projects with work in each, and accounts with roles there."""

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from importlib import import_module
from pathlib import Path

import httpx
from tests.api.api_state import Api
from tests.contract.store_suite import make_charge

from cavvy.api.tokens import hash_token, make_token
from cavvy.domain.accounts import (
    INSTALLATION,
    Account,
    AccountToken,
    Project,
    Role,
    RoleBinding,
)
from cavvy.domain.budgets import SpendingBudget
from cavvy.domain.machines import NamedMachine
from cavvy.domain.node_pools import NodePool
from cavvy.domain.tasks import ResourceSpec, TaskSpec
from cavvy.domain.units import Money
from cavvy.domain.values import replace
from cavvy.store.base import AtomicWrite, SealedSecret
from cavvy.store.sql import Store

PARENTS = {"company": None, "team": "company", "sub": "team", "other": None}
OWN = ("team", "sub")  # the projects in which a role in `team` applies


@dataclass(kw_only=True)
class Team:
    """The company. `marks` are the texts that occur only in each project: names, IDs and gangs."""

    api: Api
    http: httpx.AsyncClient  # sends no token by itself
    marks: dict[str, set[str]] = field(default_factory=dict)
    gangs: dict[str, str] = field(default_factory=dict)
    jobs: dict[str, str] = field(default_factory=dict)  # project -> name of its job

    async def token(
        self, *bindings: tuple[str, Role], account: str | None = None, **fields: object
    ) -> str:
        """A new account with these roles, and a token of it."""
        store, now = self.api.app_state.store, self.api.app_state.now()
        secret = make_token()
        name = account or f"u-{hash_token(secret)[:12]}"
        if account is None:
            await store.add_account(Account(name=name, created_at=now))
        for project, role in bindings:
            await store.grant_role(RoleBinding(account=name, project=project, role=role))
        token = AccountToken(id=hash_token(secret)[:16], account=name, created_at=now)
        token = replace(token, **fields)  # type: ignore[arg-type]  # fields of the dataclass
        await store.add_token(token, hash_token(secret))
        return secret

    async def expired(self, *bindings: tuple[str, Role]) -> str:
        now = self.api.app_state.now()
        return await self.token(*bindings, expires_at=now - timedelta(seconds=1))

    async def revoked(self, *bindings: tuple[str, Role]) -> str:
        return await self.token(*bindings, revoked_at=self.api.app_state.now())

    async def outsider(self) -> str:
        return await self.token(("other", Role.ADMIN), (INSTALLATION, Role.BILLING))


def list_own_rows() -> Iterator[Callable[[Store, str, datetime], Awaitable[str]]]:
    """Yield the functions with which capabilities add rows to a project. Each returns a mark."""
    for path in sorted(Path(__file__).parents[1].glob("*/team_rows.py")):
        yield import_module(f"tests.{path.parent.name}.team_rows").add_rows


async def make_team(api: Api) -> Team:
    """Create the projects, with a running job, a charge, a machine and a secret in
    each."""
    transport = httpx.ASGITransport(app=api.app)  # type: ignore[arg-type]  # it is one
    http = httpx.AsyncClient(transport=transport, base_url="http://cavvy")
    team, store = Team(api=api, http=http), api.app_state.store
    for number, (name, parent) in enumerate(PARENTS.items()):
        await store.add_project(Project(name=name, parent=parent), adopt=False)
        text = f"{{name: job-of-{name}-mark, run: 'true'}}"
        job = await api.submit(text, project=name, consent=True)
        attempt = await api.attempt(job["id"])
        charge = replace(make_charge(attempt, 7_314_159 + number), project=name)
        task = TaskSpec(name="t", run="true", machine=f"machine-of-{name}-mark")
        machine = NamedMachine(project=name, name=f"machine-of-{name}-mark", task=task)
        await store.commit(AtomicWrite(charges=[charge], machines=[machine]))
        await store.put_secret(
            SealedSecret(
                project=name,
                name=f"SECRET_OF_{name.upper()}_MARK",
                sealed=api.app_state.sealer.seal(name, f"SECRET_OF_{name.upper()}_MARK", "v"),
                updated_at=api.app_state.now(),
            )
        )
        need = ResourceSpec(cpus_min=1)
        pool = NodePool(project=name, name=f"pool-of-{name}-mark", resources=need, max_nodes=1)
        await store.node_pools.put(pool)
        budget = f"budget-of-{name}-mark"
        limit, now = Money(10**12), api.app_state.now()
        await store.budgets.put(SpendingBudget(name=budget, project=name, limit=limit, since=now))
        own_marks = [await add(store, name, now) for add in list_own_rows()]
        team.jobs[name], team.gangs[name] = job["name"], attempt.gang
        team.marks[name] = {
            job["id"],
            attempt.gang,
            f"job-of-{name}-mark",
            f"machine-of-{name}-mark",
            f"pool-of-{name}-mark",
            f"SECRET_OF_{name.upper()}_MARK",
            budget,
            *own_marks,
            str(7_314_159 + number),
        }
    return team
