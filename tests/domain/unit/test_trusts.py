"""Which claims a trust accepts, pure."""

import pytest

from cavvy.api.id_tokens import check_issuer
from cavvy.domain.accounts import Role
from cavvy.domain.trusts import (
    SHARED_ISSUERS,
    AccountRule,
    ClaimsRefused,
    GroupRole,
    IssuerTrust,
    find_trust,
    limits_users,
    make_sign_in,
    needs_limits,
)

GITHUB = "https://token.actions.githubusercontent.com"


def make(
    claims: dict[str, str], name: str = "t", issuer: str = "https://i.example.com"
) -> IssuerTrust:
    return IssuerTrust(name=name, issuer=issuer, audience="cavvy", claims=claims, account="ci")


def accepts(want: str, value: object) -> bool:
    try:
        find_trust([make({"x": want})], {"x": value})
    except ClaimsRefused:
        return False
    return True


@pytest.mark.parametrize(
    ("want", "value", "found"),
    [
        ("a", "a", True),
        ("a", "ab", False),
        ("a*", "a", True),
        ("a*", "ba", False),
        ("*a", "ba", True),
        ("*a", "ab", False),
        ("a*a", "a", False),
        ("a*a", "aa", True),
        ("a*b*c", "a-b-c", True),
        ("a*b*c", "a-c", False),
        ("a*bb*b", "abb", False),
        ("a*bb*b", "abbb", True),
        ("*", "", True),
        ("**", "x", True),
        ("a.c", "abc", False),
        ("refs/heads/*", "refs/heads/a\nb", True),
        ("true", True, True),
        ("7", 7, True),
        ("7", 7.0, False),
        ("x", ["x"], False),
        ("*", None, False),
        ("*", {}, False),
    ],
)
def test_a_star_stands_for_any_characters(want: str, value: object, found: bool) -> None:
    assert accepts(want, value) is found


def test_the_message_names_claims_but_neither_trusts_nor_values() -> None:
    trusts = [make({"a": "secret", "b": "secret"}, "one"), make({"a": "secret"}, "two")]
    with pytest.raises(ClaimsRefused, match=r"^no trust accepts the token's a$"):
        find_trust(trusts, {"b": "secret"})
    assert find_trust(trusts, {"a": "secret"}).name == "two"


@pytest.mark.parametrize(
    ("issuer", "claims", "limited"),
    [
        ("https://git.example.com", {"ref": "refs/heads/main"}, True),
        ("https://git.example.com", {"ref": "**"}, False),
        ("https://git.example.com", {}, False),
        (GITHUB, {"ref": "refs/heads/main"}, False),
        (GITHUB, {"repository": "acme/train"}, True),
        (GITHUB, {"repository": "acme/*"}, True),
        (GITHUB, {"repository": "acme*"}, False),
        (GITHUB, {"repository": "*/train"}, False),
        (f"{GITHUB}/", {"sub": "repo:acme/*"}, True),
        ("https://gitlab.com", {"namespace_path": "acme"}, True),
        ("https://gitlab.com", {"user_login": "ada"}, False),
        ("https://git.example.com", {"sub": "/*"}, False),
        ("https://git.example.com", {"repository": "*/*", "ref": "*"}, False),
        (GITHUB, {"repository": "/*"}, False),
        (GITHUB, {"repository": "*/*"}, False),
        (GITHUB, {"sub": "/*"}, False),
        (GITHUB, {"sub": "repo:/*"}, False),
        (GITHUB, {"sub": "repo:*/train"}, False),
        (GITHUB, {"sub": "repo:ac*/train"}, False),
        (GITHUB, {"sub": "ref:refs/heads/main"}, False),  # a subject that its owner customised
        (GITHUB, {"sub": "repo:acme@7/train@8:ref:refs/heads/main"}, True),
        (GITHUB, {"sub": "repository_owner_id:7:*"}, True),
        (GITHUB, {"repository_owner_id": "7*"}, False),
        (GITHUB.replace("token", "Token"), {"ref": "refs/heads/main"}, False),
        ("https://gitlab.com", {"sub": "project_path:*"}, False),
        ("https://gitlab.com", {"sub": "project_path:acme/train:*"}, True),
        ("https://agent.buildkite.com", {"pipeline_slug": "train"}, False),
        ("https://agent.buildkite.com", {"organization_slug": "acme"}, True),
        ("https://agent.buildkite.com", {"sub": "organization:acme:pipeline:*"}, True),
        ("https://agent.buildkite.com", {"sub": "organization:acme*"}, False),
        ("https://app.terraform.io", {"terraform_workspace_name": "train"}, False),
        ("https://app.terraform.io", {"terraform_project_name": "train"}, False),
        ("https://app.terraform.io/", {"sub": "organization:*:project:train:*"}, False),
        ("https://app.terraform.io", {"sub": "organization:acme:*"}, True),
        ("https://app.terraform.io", {"terraform_organization_name": "acme"}, True),
        ("https://oidc.vercel.com", {"environment": "production"}, False),
        ("https://oidc.vercel.com", {"project": "train"}, False),
        ("https://oidc.vercel.com", {"owner_id": "team_7"}, True),
        ("https://oidc.vercel.com/acme", {"environment": "production"}, True),
        ("https://oidc.modal.com", {"app_name": "train"}, False),
        ("https://oidc.modal.com", {"sub": "modal:workspace_id:ac-7:*"}, True),
        ("https://oidc.codefresh.io", {"pipeline_name": "acme/train"}, False),
        ("https://identity.depot.dev", {"repository": "acme/*"}, True),
        ("https://api.pulumi.com/oidc", {"sub": "pulumi:deploy:org:acme:*"}, True),
        ("https://api.pulumi.com/oidc", {"sub": "pulumi:deploy:*"}, False),
        ("https://appleid.apple.com", {"email": "ada@example.com"}, False),
        ("https://appleid.apple.com", {"sub": "7"}, True),
        ("https://slack.com", {"https://slack.com/team_name": "acme"}, False),
        ("https://slack.com", {"https://slack.com/team_id": "T7"}, True),
    ],
)
def test_a_shared_issuer_must_be_limited_to_an_owner(
    issuer: str, claims: dict[str, str], limited: bool
) -> None:
    trust = make(claims, issuer=issuer)
    assert needs_limits(trust)
    assert limits_users(trust) is limited


def test_people_of_ones_own_issuer_need_no_limits() -> None:
    people = {"audience": "c", "account_claim": "email"}
    own = IssuerTrust(name="t", issuer="https://login.example.com", **people)
    assert not needs_limits(own)
    google = "https://accounts.google.com"
    assert needs_limits(IssuerTrust(name="t", issuer=google, **people))
    existing = AccountRule.EXISTING
    assert not needs_limits(IssuerTrust(name="t", issuer=google, accounts=existing, **people))
    # people choose other names themselves
    named = {**people, "account_claim": "nickname"}
    assert needs_limits(IssuerTrust(name="t", issuer=google, accounts=existing, **named))


def test_a_shared_issuer_must_say_that_an_address_is_verified() -> None:
    claims = {"sub": "1", "email": "ada@example.com"}
    people = {"audience": "c", "account_claim": "email"}
    shared = IssuerTrust(name="t", issuer="https://discord.com", **people)
    own = IssuerTrust(name="t", issuer="https://login.example.com", **people)
    with pytest.raises(ClaimsRefused, match="not verified"):
        make_sign_in(shared, claims)
    for trust, more in ((own, {}), (shared, {"email_verified": True})):
        assert make_sign_in(trust, {**claims, **more}).account == "ada@example.com"


def test_every_shared_issuer_refuses_what_anyone_can_choose() -> None:
    for issuer in SHARED_ISSUERS:
        assert check_issuer(issuer) == ""
        for value in ("*", "/*", "*/*", "refs/heads/main", "", ":*", "repo:*", "organization:*"):
            assert not limits_users(make({"ref": value}, issuer=issuer))
        for name in SHARED_ISSUERS[issuer]:
            for value in ("*", "/*", "*/*", "*:x", ""):
                assert not limits_users(make({name: value}, issuer=issuer)), (issuer, name, value)


@pytest.mark.parametrize("groups", [None, "team", {"team": 1}, [["team"]], [None, 5]])
def test_a_claim_without_a_list_of_names_gives_no_role(groups: object) -> None:
    role = GroupRole(group="team", project="vision", role=Role.MEMBER)
    trust = IssuerTrust(
        name="t", issuer="https://i", audience="c", account_claim="email", groups=(role,)
    )
    claims = {"sub": "1", "email": "A@example.com", "groups": groups}
    assert not make_sign_in(trust, claims).roles
    found = make_sign_in(trust, {**claims, "groups": ["team", 5]})
    assert (found.account, list(found.roles)) == ("a@example.com", [role])
