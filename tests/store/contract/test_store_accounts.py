"""Accounts, tokens, projects and roles, in every store."""

import asyncio

import pytest
from tests.contract.store_suite import NOW, after, begin, make_charge, submit

from cavvy.domain.accounts import Account, AccountKind, AccountToken, Project, Role, RoleBinding
from cavvy.domain.credentials import SealedCredential
from cavvy.domain.jobs import JobPhase
from cavvy.domain.machines import NamedMachine
from cavvy.domain.policies import BoundPolicy, ProjectPolicy
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.store.base import (
    AtomicWrite,
    LedgerFilter,
    NameConflict,
    ProjectArchived,
    ProjectBusy,
    RowNotFound,
    SealedSecret,
)
from cavvy.store.sql import Store

ADA = Account(name="ada", created_at=NOW)
BOT = Account(name="bot", kind=AccountKind.SERVICE, created_at=NOW)
TOKEN = AccountToken(
    id="1", account="ada", label="laptop", scopes=("run", "view"), project="team", created_at=NOW
)


async def test_a_token_is_found_by_its_hash_with_all_that_decisions_need(store: Store) -> None:
    await store.add_account(ADA)
    await store.add_account(BOT)
    await store.add_token(TOKEN, "hash-1")
    await store.add_project(Project(name="company"), adopt=False)
    await store.add_project(Project(name="team", parent="company"), adopt=False)
    for account, role in (("ada", Role.MEMBER), ("bot", Role.VIEWER)):
        await store.grant_role(RoleBinding(account=account, project="team", role=role))
    found = await store.credential("hash-1")
    assert found is not None
    assert (found.token, found.account) == (TOKEN, ADA)
    assert list(found.bindings) == [RoleBinding(account="ada", project="team", role=Role.MEMBER)]
    assert found.parents == {"company": None, "team": "company"}
    assert await store.credential("hash-2") is None
    await store.use_token("1", after(5))
    await store.revoke_token("1", None, after(9))
    await store.revoke_token("1", "ada", after(99))  # the first revocation counts
    [read] = await store.tokens("ada")
    assert (read.last_used_at, read.revoked_at) == (after(5), after(9))


async def test_tokens_of_others_are_not_revoked(store: Store) -> None:
    await store.add_account(ADA)
    await store.add_token(TOKEN, "hash-1")
    for token, account in (("1", "bot"), ("2", None)):
        with pytest.raises(RowNotFound):
            await store.revoke_token(token, account, NOW)
    assert [each.revoked_at for each in await store.tokens()] == [None]


async def test_a_removed_account_leaves_no_token_and_no_role(store: Store) -> None:
    await store.add_account(ADA)
    with pytest.raises(NameConflict):
        await store.add_account(ADA)
    await store.add_token(TOKEN, "hash-1")
    await store.grant_role(RoleBinding(account="ada", project="", role=Role.ADMIN))
    await store.remove_account("ada")
    assert await store.credential("hash-1") is None
    await store.add_account(ADA)
    assert await store.tokens() == [] == await store.roles()
    with pytest.raises(RowNotFound):
        await store.remove_account("bot")
    with pytest.raises(RowNotFound):
        await store.add_token(AccountToken(id="2", account="bot", created_at=NOW), "hash-2")


async def test_roles_are_granted_once_and_revoked_once(store: Store) -> None:
    await store.add_account(ADA)
    binding = RoleBinding(account="ada", project="team", role=Role.MEMBER)
    await store.grant_role(binding)
    await store.grant_role(binding)
    assert list(await store.roles("team")) == [binding]
    assert list(await store.roles("")) == []
    await store.revoke_role(binding)
    with pytest.raises(RowNotFound):
        await store.revoke_role(binding)
    with pytest.raises(RowNotFound):
        await store.grant_role(RoleBinding(account="bot", project="team", role=Role.MEMBER))


async def test_a_project_in_use_is_adopted_only_on_request(store: Store) -> None:
    await store.add_account(ADA)
    await submit(store, "1", project="jobs")
    sealed = SealedSecret(project="secrets", name="S", sealed=b"x", updated_at=NOW)
    await store.put_secret(sealed)
    task = TaskSpec(name="t", run="true", machine="dev")
    await store.commit(
        AtomicWrite(machines=[NamedMachine(project="machines", name="dev", task=task)])
    )
    await store.grant_role(RoleBinding(account="ada", project="roles", role=Role.MEMBER))
    await store.add_project(Project(name="top"), adopt=False)
    for name in ("jobs", "secrets", "machines", "roles"):
        with pytest.raises(NameConflict):
            await store.add_project(Project(name=name, parent="top"), adopt=False)
    await store.add_project(Project(name="jobs", parent="top"), adopt=True)
    with pytest.raises(NameConflict):
        await store.add_project(Project(name="jobs"), adopt=True)
    with pytest.raises(RowNotFound):
        await store.add_project(Project(name="new", parent="nowhere"), adopt=True)
    assert [each.name for each in await store.projects()] == ["jobs", "top"]


async def test_a_project_is_moved_with_those_below_it_but_never_below_itself(store: Store) -> None:
    for name, parent in (("a", None), ("b", "a"), ("c", "b"), ("d", None)):
        await store.add_project(Project(name=name, parent=parent), adopt=False)
    await store.move_project(Project(name="b", parent="a"), "d")
    assert {each.name: each.parent for each in await store.projects()} == {
        "a": None,
        "b": "d",
        "c": "b",
        "d": None,
    }
    for parent in ("b", "c"):
        with pytest.raises(NameConflict):
            await store.move_project(Project(name="b", parent="d"), parent)
    for former, parent in (
        (Project(name="b", parent="a"), None),  # it is no longer there
        (Project(name="b", parent="d"), "nowhere"),
        (Project(name="nowhere"), None),
    ):
        with pytest.raises(RowNotFound):
            await store.move_project(former, parent)
    await store.move_project(Project(name="b", parent="d"), None)
    assert {each.name: each.parent for each in await store.projects()}["b"] is None


async def test_nothing_is_stored_in_an_archived_project(store: Store) -> None:
    for name, parent in (("a", None), ("b", "a"), ("c", "b"), ("d", None)):
        await store.add_project(Project(name=name, parent=parent), adopt=False)
    await store.archive.put(["c"], after(1))
    job = await submit(store, "1", project="b")
    with pytest.raises(ProjectBusy, match="job train"):
        await store.archive.put(["a", "b", "c"], after(2))
    assert [each.archived_at for each in await store.projects()] == [None, None, after(1), None]
    await store.archive.put(["a", "b", "c"], after(3), busy=True)
    ended = replace(job, phase=JobPhase.STOPPED, ended_at=after(4))
    await store.commit(AtomicWrite(jobs=[ended]))  # what runs may end
    for project in ("a", "b", "c"):
        with pytest.raises(ProjectArchived):
            await submit(store, f"in-{project}", project=project)
        with pytest.raises(ProjectArchived):
            await store.archive.check(project)
    with pytest.raises(ProjectArchived):
        await store.add_project(Project(name="new", parent="a"), adopt=True)
    with pytest.raises(ProjectArchived):
        await store.move_project(Project(name="d"), "b")
    with pytest.raises(NameConflict):
        await store.add_project(Project(name="c"), adopt=True)
    assert (await store.find_job("b", "train")).phase is JobPhase.STOPPED
    with pytest.raises(ProjectArchived):
        await store.archive.lift("b")
    await store.archive.lift("a")  # not `c`, which was archived before
    found = {each.name: each.archived_at for each in await store.projects()}
    assert found == {"a": None, "b": None, "c": after(1), "d": None}
    for project in ("a", "nowhere"):
        await store.archive.lift(project)  # it is not archived
    await submit(store, "again", project="b")


async def test_submissions_at_the_same_time_are_stored_or_refused(store: Store) -> None:
    await store.add_project(Project(name="a"), adopt=False)

    async def put(number: int) -> str:
        try:
            return (await submit(store, str(number), project="a" if number % 2 else "b")).id
        except ProjectArchived:
            return ""

    sent = [asyncio.create_task(put(number)) for number in range(20)]
    await store.archive.put(["a"], NOW, busy=True)
    stored = {each for each in await asyncio.gather(*sent) if each}
    listed = {job.id for job in (await store.list_jobs(None, limit=100)).jobs}
    assert listed == stored
    assert {str(number) for number in range(0, 20, 2)} <= stored, "those of the other project"


async def test_lists_are_limited_to_a_set_of_projects(store: Store) -> None:
    for number, project in enumerate(("a", "b", "c")):
        job = await submit(store, str(number), project=project)
        attempt = await begin(store, job)
        await store.commit(AtomicWrite(charges=[make_charge(attempt, 1000)]))
        task = TaskSpec(name="t", run="true", machine="dev")
        await store.commit(
            AtomicWrite(machines=[NamedMachine(project=project, name="dev", task=task)])
        )
    wanted = frozenset({"a", "c"})
    phases = [JobPhase.QUEUED, JobPhase.STARTING]
    assert [job.project for job in (await store.list_jobs(wanted)).jobs] == ["c", "a"]
    assert [job.project for job in (await store.list_jobs(wanted, phases)).jobs] == ["c", "a"]
    assert [job.project for job in (await store.list_jobs(wanted, cursor="2")).jobs] == ["a"]
    assert sum((await store.count_jobs(wanted)).values()) == 2
    sums = await store.sum_ledger(LedgerFilter(projects=wanted), ("project",))
    assert {row.groups["project"] for row in sums} == wanted
    assert [each.project for each in await store.open_attempts(wanted)] == ["a", "c"]
    assert [each.project for each in await store.machines(wanted)] == ["a", "c"]
    nothing = frozenset[str]()
    assert (await store.list_jobs(nothing, phases)).jobs == []
    assert await store.count_jobs(nothing) == {}
    assert not await store.sum_ledger(LedgerFilter(projects=nothing), ())
    assert not await store.open_attempts(nothing)
    assert not await store.machines(nothing)


async def test_policies_are_replaced_and_deleted(store: Store) -> None:
    assert list((await store.policies()).find("team")) == []
    await store.add_project(Project(name="company"), adopt=False)
    await store.add_project(Project(name="team", parent="company"), adopt=False)
    full = ProjectPolicy(
        providers=("aws",),
        regions=("eu",),
        accelerators=("H100",),
        max_rate=HourlyRate(5),
        images=("ghcr.io/é/*",),
        image_digests=True,
        signed_by=("a key",),
    )
    await store.put_policy("company", ProjectPolicy(regions=("us",)))
    await store.put_policy("company", full)
    await store.put_policy("", ProjectPolicy(image_digests=True))
    book = await store.policies()
    assert list(book.find("team")) == [
        BoundPolicy("", ProjectPolicy(image_digests=True)),
        BoundPolicy("company", full),
    ]
    for project in ("team", "company", "other", ""):
        assert list(await store.policies_of(project)) == list(book.find(project))
    await store.put_policy("company", None)
    await store.put_policy("company", None)
    assert [each.project for each in (await store.policies()).find("team")] == [""]


async def test_credentials_are_replaced_resealed_and_deleted(store: Store) -> None:
    assert not await store.provider_credentials.book()
    await store.add_project(Project(name="team", parent=None), adopt=False)
    old = SealedCredential(project="team", provider="aws", sealed=b"1", updated_at=NOW)
    await store.provider_credentials.put(old)
    await store.provider_credentials.put(replace(old, sealed=b"2"))
    await store.provider_credentials.put(replace(old, project="other"))
    assert not await store.provider_credentials.reseal(old, b"3")
    assert await store.provider_credentials.reseal(replace(old, sealed=b"2"), b"3")
    rows = [(each.project, each.sealed) for each in await store.provider_credentials.list()]
    assert rows == [("other", b"1"), ("team", b"3")]
    book = await store.provider_credentials.book()
    assert book.find_account("team", "aws") == "aws@team"
    await store.provider_credentials.delete("team", "aws")
    with pytest.raises(RowNotFound, match="no credential for aws"):
        await store.provider_credentials.delete("team", "aws")


async def test_a_secret_is_encrypted_again_only_if_it_is_still_the_same(store: Store) -> None:
    first = SealedSecret(project="p", name="A", sealed=b"1", updated_at=NOW)
    await store.put_secret(first)
    await store.put_secret(SealedSecret(project="q", name="A", sealed=b"1", updated_at=NOW))
    assert await store.reseal_secret(first, b"2")
    assert not await store.reseal_secret(first, b"3")
    found = [(each.project, each.sealed, each.updated_at) for each in await store.all_secrets()]
    assert found == [("p", b"2", NOW), ("q", b"1", NOW)]
