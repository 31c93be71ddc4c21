"""What a principal may do follows from roles, the tree of projects and the token's limits alone."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cavvy.domain.accounts import (
    INSTALLATION,
    Account,
    AccountCredential,
    AccountToken,
    Permission,
    Role,
    RoleBinding,
)
from cavvy.domain.authorization import (
    LEAST_ROLE,
    PERMISSIONS,
    Principal,
    TokenState,
    Verdict,
    decide,
    judge_credential,
    list_visible,
    make_owner,
    make_principal,
    must_touch,
)
from cavvy.domain.values import replace

NOW = datetime(2026, 3, 1, tzinfo=UTC)
PARENTS = {"company": None, "team": "company", "sub": "team", "other": None}


def make(
    *bindings: tuple[str, Role], scopes: tuple[str, ...] = (), project: str | None = None
) -> Principal:
    token = AccountToken(id="t", account="ada", scopes=scopes, project=project, created_at=NOW)
    roles = [RoleBinding(account="ada", project=name, role=role) for name, role in bindings]
    account = Account(name="ada", created_at=NOW)
    return make_principal(
        AccountCredential(token=token, account=account, bindings=roles, parents=PARENTS),
        NOW,
        "10.0.0.1",
    )


def test_roles_apply_in_a_project_and_below_it_only() -> None:
    ada = make(("team", Role.MEMBER))
    assert decide(ada, Permission.RUN, "team") is Verdict.ALLOWED
    assert decide(ada, Permission.RUN, "sub") is Verdict.ALLOWED
    assert decide(ada, Permission.MANAGE, "team") is Verdict.ROLE_NEEDED
    for hidden in ("company", "other", "does-not-exist"):
        assert decide(ada, Permission.RUN, hidden) is Verdict.HIDDEN
    assert decide(ada, Permission.VIEW, INSTALLATION) is Verdict.ROLE_NEEDED
    assert list_visible(ada, Permission.VIEW) == {"team", "sub"}
    assert list_visible(ada, Permission.MANAGE) == set()


def test_roles_add_up_along_the_tree() -> None:
    ada = make(("company", Role.VIEWER), ("sub", Role.ADMIN))
    assert list_visible(ada, Permission.VIEW) == {"company", "team", "sub"}
    assert list_visible(ada, Permission.MANAGE) == {"sub"}
    assert decide(ada, Permission.RUN, "team") is Verdict.ROLE_NEEDED


def test_a_role_on_the_installation_covers_projects_that_do_not_exist_yet() -> None:
    ada = make((INSTALLATION, Role.OPERATOR))
    assert list_visible(ada, Permission.OPERATE) is None
    assert decide(ada, Permission.RUN, "new") is Verdict.ALLOWED
    assert decide(ada, Permission.MANAGE, INSTALLATION) is Verdict.ROLE_NEEDED


def test_limits_of_a_token_only_take_away() -> None:
    scoped = make((INSTALLATION, Role.ADMIN), scopes=("view",))
    assert decide(scoped, Permission.VIEW, "team") is Verdict.ALLOWED
    assert decide(scoped, Permission.RUN, "team") is Verdict.SCOPE_NEEDED
    assert list_visible(scoped, Permission.RUN) == set()
    inside = make((INSTALLATION, Role.ADMIN), project="team")
    assert list_visible(inside, Permission.RUN) == {"team", "sub"}
    assert decide(inside, Permission.VIEW, "company") is Verdict.HIDDEN
    assert decide(inside, Permission.MANAGE, INSTALLATION) is Verdict.SCOPE_NEEDED
    foreign = make(("team", Role.ADMIN), project="other")
    assert decide(foreign, Permission.VIEW, "other") is Verdict.HIDDEN
    assert list_visible(foreign, Permission.VIEW) == set()


def test_the_owner_may_do_everything() -> None:
    for permission in Permission:
        assert list_visible(make_owner(), permission) is None
        assert decide(make_owner(), permission, "any") is Verdict.ALLOWED


def test_the_named_role_grants_the_permission_and_no_smaller_one_does() -> None:
    for permission, role in LEAST_ROLE.items():
        granting = {each for each in Role if permission in PERMISSIONS[each]}
        assert role in granting
        assert min(granting, key=lambda each: len(PERMISSIONS[each])) == role


def test_a_cycle_in_the_tree_ends() -> None:
    token = AccountToken(id="t", account="ada", created_at=NOW)
    binding = RoleBinding(account="ada", project="a", role=Role.VIEWER)
    account = Account(name="ada", created_at=NOW)
    ada = make_principal(
        AccountCredential(
            token=token, account=account, bindings=[binding], parents={"a": "b", "b": "a"}
        ),
        NOW,
    )
    assert list_visible(ada, Permission.VIEW) == {"a", "b"}


@pytest.mark.parametrize(
    ("expires", "revoked", "state"),
    [
        (None, None, TokenState.VALID),
        (NOW + timedelta(seconds=1), None, TokenState.VALID),
        (NOW, None, TokenState.EXPIRED),
        (None, NOW, TokenState.REVOKED),
        (NOW + timedelta(days=1), NOW, TokenState.REVOKED),
    ],
)
def test_the_state_of_a_token(
    expires: datetime | None, revoked: datetime | None, state: TokenState
) -> None:
    token = AccountToken(
        id="t", account="ada", created_at=NOW, expires_at=expires, revoked_at=revoked
    )
    ada = Account(name="ada", created_at=NOW)
    credential = AccountCredential(token=token, account=ada, bindings=[], parents={})
    assert judge_credential(credential, NOW) is state
    disabled = replace(credential, account=replace(ada, disabled_at=NOW))
    assert judge_credential(disabled, NOW) is TokenState.DISABLED


def test_a_role_of_a_group_ends_at_its_time() -> None:
    token = AccountToken(id="t", account="ada", created_at=NOW)
    ends = NOW + timedelta(hours=1)
    binding = RoleBinding(
        account="ada", project="team", role=Role.MEMBER, trust="company", until=ends
    )
    credential = AccountCredential(
        token=token,
        account=Account(name="ada", created_at=NOW),
        bindings=[binding],
        parents=PARENTS,
    )
    before = make_principal(credential, ends - timedelta(seconds=1))
    assert decide(before, Permission.RUN, "sub") is Verdict.ALLOWED
    after = make_principal(credential, ends)
    assert decide(after, Permission.RUN, "sub") is Verdict.HIDDEN


def test_the_last_use_is_written_once_a_minute() -> None:
    token = AccountToken(id="t", account="ada", created_at=NOW)
    assert must_touch(token, NOW)
    used = AccountToken(id="t", account="ada", created_at=NOW, last_used_at=NOW)
    assert not must_touch(used, NOW + timedelta(seconds=59))
    assert must_touch(used, NOW + timedelta(seconds=60))


_names = st.sampled_from([INSTALLATION, *PARENTS])
_bindings = st.lists(st.tuples(_names, st.sampled_from(Role)), max_size=4)
_limits = st.sampled_from([None, *PARENTS])
_scopes = st.lists(st.sampled_from(Permission), max_size=3, unique=True).map(tuple)


@given(_bindings, _scopes, _limits)
def test_lists_show_exactly_the_projects_that_decisions_allow(
    bindings: list[tuple[str, Role]], scopes: tuple[str, ...], project: str | None
) -> None:
    limited, full = make(*bindings, scopes=scopes, project=project), make(*bindings)
    for permission in Permission:
        allowed = {name for name in PARENTS if decide(limited, permission, name) is Verdict.ALLOWED}
        visible = list_visible(limited, permission)
        assert allowed == (set(PARENTS) if visible is None else visible)
        for name in (INSTALLATION, *PARENTS):
            if decide(limited, permission, name) is Verdict.ALLOWED:
                assert decide(full, permission, name) is Verdict.ALLOWED
