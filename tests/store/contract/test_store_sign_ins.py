"""Trusts and sign-ins, in every store."""

import asyncio
from datetime import timedelta

import pytest
from tests.contract.store_suite import NOW, after

from cavvy.domain.accounts import Account, AccountKind, AccountToken, Project, Role, RoleBinding
from cavvy.domain.trusts import GroupRole, IssuerTrust, SignIn
from cavvy.domain.values import replace
from cavvy.store.base import NameConflict, RowNotFound, SignInConflict
from cavvy.store.sql import Store

MEMBER = GroupRole(group="team", project="vision", role=Role.MEMBER)
TRUST = IssuerTrust(
    name="company",
    issuer="https://login.example.com",
    audience="cavvy",
    account_claim="email",
    groups=(MEMBER,),
    scopes=("view",),
    lifetime=timedelta(hours=2),
)
ADA = SignIn(account="ada", trust=TRUST, subject="u-1", roles=(MEMBER,))


async def sign_in(store: Store, found: SignIn, name: str, at_s: float = 0) -> None:
    """Sign in with an ID token of this name; the token's ID and hash are the same."""
    now = after(at_s)
    token = AccountToken(
        id=name, account=found.account, created_at=now, expires_at=now + TRUST.lifetime
    )
    await store.sign_ins.sign_in(found, token, f"hash-{name}", name, now + timedelta(minutes=5))


async def test_a_trust_is_stored_whole_and_replaced_only_on_request(store: Store) -> None:
    await store.sign_ins.put_trust(TRUST)
    assert list(await store.sign_ins.trusts()) == [TRUST]
    changed = replace(TRUST, audience="other")
    with pytest.raises(NameConflict):
        await store.sign_ins.put_trust(changed)
    await store.sign_ins.put_trust(changed, replace=True)
    assert list(await store.sign_ins.trusts()) == [changed]
    await store.sign_ins.delete_trust("company")
    assert list(await store.sign_ins.trusts()) == []
    with pytest.raises(RowNotFound):
        await store.sign_ins.delete_trust("company")


async def test_a_sign_in_makes_account_token_and_roles_once(store: Store) -> None:
    await store.sign_ins.put_trust(TRUST)
    await sign_in(store, ADA, "1")
    found = await store.credential("hash-1")
    assert found is not None
    assert found.account == Account(name="ada", created_at=NOW)
    assert list(found.bindings) == [
        RoleBinding(
            account="ada", project="vision", role=Role.MEMBER, trust="company", until=after(7200)
        )
    ]
    with pytest.raises(SignInConflict):  # the same ID token
        await sign_in(store, ADA, "1")
    with pytest.raises(SignInConflict):  # another person of the same name
        await sign_in(store, replace(ADA, subject="u-2"), "2")
    assert await store.sign_ins.identity(TRUST.issuer, "u-1") == "ada"
    assert await store.sign_ins.identity(TRUST.issuer, "u-2") is None
    # It is remembered also when the account is gone, and what is refused leaves nothing.
    await store.remove_account("ada")
    with pytest.raises(SignInConflict):
        await sign_in(store, ADA, "1")
    assert await store.accounts() == []
    await sign_in(store, ADA, "3")


async def test_old_sign_ins_are_forgotten_with_their_tokens(store: Store) -> None:
    await store.sign_ins.put_trust(TRUST)
    await sign_in(store, ADA, "1")
    await store.add_token(AccountToken(id="own", account="ada", created_at=NOW), "hash-own")
    await sign_in(store, replace(ADA, roles=()), "2", at_s=6 * 86_400)
    assert [each.id for each in await store.tokens()] == ["1", "2", "own"]
    await sign_in(store, ADA, "3", at_s=8 * 86_400)
    assert [each.id for each in await store.tokens()] == ["2", "3", "own"]


async def test_a_service_signs_in_only_while_it_exists(store: Store) -> None:
    trust = replace(TRUST, name="ci", account="ci", groups=())
    await store.sign_ins.put_trust(trust)
    found = SignIn(account="ci", trust=trust)
    changed = replace(trust, scopes=())
    await store.add_account(Account(name="ci", created_at=NOW))  # a person
    with pytest.raises(SignInConflict):
        await sign_in(store, found, "1")
    await store.remove_account("ci")
    with pytest.raises(SignInConflict):
        await sign_in(store, found, "1")
    await store.add_account(Account(name="ci", kind=AccountKind.SERVICE, created_at=NOW))
    await sign_in(store, found, "1")
    await store.disable_account("ci", NOW)
    with pytest.raises(SignInConflict):
        await sign_in(store, found, "2")
    await store.disable_account("ci", None)
    await sign_in(store, found, "2")
    with pytest.raises(RowNotFound):
        await store.disable_account("nobody", NOW)
    await store.sign_ins.put_trust(changed, replace=True)
    with pytest.raises(SignInConflict):  # by a trust that has changed since the claims were judged
        await sign_in(store, found, "3")
    await sign_in(store, replace(found, trust=changed), "3")


async def test_of_sign_ins_at_the_same_time_each_id_token_counts_once(store: Store) -> None:
    await store.sign_ins.put_trust(TRUST)
    outcomes = await asyncio.gather(
        *(sign_in(store, ADA, f"{number % 4}") for number in range(12)), return_exceptions=True
    )
    assert outcomes.count(None) == 4
    assert all(isinstance(each, SignInConflict) for each in outcomes if each is not None)
    assert [each.name for each in await store.accounts()] == ["ada"]
    assert [each.id for each in await store.tokens()] == ["0", "1", "2", "3"]
    assert len(await store.roles()) == 1


async def test_an_older_id_token_brings_no_groups_back(store: Store) -> None:
    other = replace(TRUST, name="other", audience="other")  # of the same issuer
    for trust in (TRUST, other):
        await store.sign_ins.put_trust(trust)
    old = replace(ADA, issued_at=NOW)
    left = replace(old, issued_at=after(5), roles=())
    await sign_in(store, left, "new", at_s=10)
    for refused in (old, replace(old, trust=other)):
        with pytest.raises(SignInConflict, match="a newer ID token"):
            await sign_in(store, refused, "old", at_s=11)
    assert await store.roles() == []
    await store.remove_account("ada")  # an old token does not make the account again
    with pytest.raises(SignInConflict, match="a newer ID token"):
        await sign_in(store, old, "old", at_s=12)
    await sign_in(store, replace(left, roles=(MEMBER,)), "same-second", at_s=13)
    await sign_in(store, replace(old, subject="u-2", account="bob"), "of-bob", at_s=13)
    assert len(await store.roles()) == 2


async def test_of_id_tokens_at_the_same_time_the_newest_decides(store: Store) -> None:
    await store.sign_ins.put_trust(TRUST)
    every = [
        replace(ADA, issued_at=after(number), roles=() if number == 5 else (MEMBER,))
        for number in range(6)
    ]
    outcomes = await asyncio.gather(
        *(sign_in(store, each, f"{number}") for number, each in enumerate(every)),
        return_exceptions=True,
    )
    assert outcomes[5] is None
    assert all(each is None or isinstance(each, SignInConflict) for each in outcomes)
    assert await store.roles() == []


async def test_a_project_with_roles_of_groups_is_in_use(store: Store) -> None:
    await store.sign_ins.put_trust(TRUST)
    await sign_in(store, ADA, "1")
    with pytest.raises(NameConflict):
        await store.add_project(Project(name="vision"), adopt=False)
    assert [each.trust for each in await store.roles("vision")] == ["company"]
    await store.sign_ins.put_trust(replace(TRUST, groups=()), replace=True)
    assert await store.roles() == []
    await store.sign_ins.delete_trust("company")
    assert await store.tokens() == []


async def test_tokens_made_in_a_sign_in_end_with_it(store: Store) -> None:
    await store.sign_ins.put_trust(TRUST)
    await sign_in(store, ADA, "1")
    for name, parent in (("child", "1"), ("grandchild", "child"), ("own", None)):
        token = AccountToken(id=name, account="ada", created_at=NOW, parent=parent)
        await store.add_token(token, f"hash-{name}")
    await store.revoke_token("child", "ada", NOW)
    ended = {each.id for each in await store.tokens("ada") if each.revoked_at is not None}
    assert ended == {"child", "grandchild"}
    await store.sign_ins.delete_trust("company")
    assert [each.id for each in await store.tokens("ada")] == ["own"]
