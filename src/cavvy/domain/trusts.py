"""Trusts: which tokens of other systems this server accepts, and which accounts and roles the
bearers of the tokens get.

A token of another system is an ID token of OpenID Connect: issued by a CI system for one of its
jobs, or by an identity provider for a person. The server exchanges the ID token for a token of an
account.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from cavvy.domain.accounts import Role
from cavvy.domain.values import Struct, field

# Issuers that sign tokens for all their users, and the claims that tell these users apart.
# https://docs.github.com/en/actions/reference/security/oidc
# https://docs.gitlab.com/ci/secrets/id_token_authentication/
# https://developers.google.com/identity/openid-connect/openid-connect
SHARED_ISSUERS: Mapping[str, frozenset[str]] = {
    "https://token.actions.githubusercontent.com": frozenset(
        {"sub", "repository", "repository_id", "repository_owner", "repository_owner_id"}
    ),
    "https://gitlab.com": frozenset(
        {"sub", "project_path", "project_id", "namespace_path", "namespace_id", "email"}
    ),
    "https://accounts.google.com": frozenset({"sub", "email", "hd"}),
}


class AccountRule(StrEnum):
    """States which people get an account at their first sign-in."""

    CREATE = "create"  # each person that the trust accepts gets a new account
    EXISTING = "existing"  # people need an account that an admin added


class GroupRole(Struct, frozen=True, kw_only=True):
    """The role that members of a group have in a project, which may be the INSTALLATION."""

    group: str
    project: str
    role: Role


class IssuerTrust(Struct, frozen=True, kw_only=True):
    """Trust in an issuer's ID tokens.

    An ID token must have the `audience` and all `claims`. In the value of a claim, `*` matches any
    characters. A program that presents the token becomes the service account `account`. A person
    who presents the token is signed in to the account whose name is in the claim `account_claim`;
    `accounts` states which people get an account at their first sign-in. `groups` are the roles
    that people have while the claim `groups_claim` contains the group. `scopes` and `project` limit
    the tokens that this server issues; `lifetime` is the validity of the tokens and of the roles.
    `client_id` is the public client that terminals use to sign in; without it, terminals cannot
    sign in.
    """

    name: str
    issuer: str
    audience: str
    claims: Mapping[str, str] = field(default_factory=dict)
    account: str = ""
    account_claim: str = ""
    accounts: AccountRule = AccountRule.CREATE
    groups_claim: str = "groups"
    groups: tuple[GroupRole, ...] = ()
    scopes: tuple[str, ...] = ()
    project: str | None = None
    lifetime: timedelta = timedelta(hours=1)
    client_id: str = ""


class SignIn(Struct, frozen=True, kw_only=True):
    """A verified sign-in. `subject` identifies a person at the issuer; it is "" for the account of
    a CI system. `roles` are the roles from the person's groups. `issued_at` is the time at which
    the ID token was issued.
    """

    account: str
    trust: IssuerTrust
    subject: str = ""
    issued_at: datetime = datetime.min.replace(tzinfo=UTC)
    roles: Sequence[GroupRole] = ()


class ClaimsRefused(Exception):
    """Raised if an ID token is valid, but no trust accepts its claims. The message names the claim,
    never its value.
    """


def find_trust(trusts: Sequence[IssuerTrust], claims: Mapping[str, object]) -> IssuerTrust:
    """Return the first trust that accepts the claims. The caller has verified the claims and passes
    only trusts with the issuer and the audience of the claims. Raises ClaimsRefused.
    """
    least: list[str] | None = None
    for trust in trusts:
        wrong = [name for name, want in trust.claims.items() if not _meets(claims.get(name), want)]
        if not wrong:
            return trust
        if least is None or len(wrong) < len(least):
            least = wrong
    # Issuers such as GitHub sign tokens for strangers: strangers must not learn the names of
    # trusts.
    raise ClaimsRefused(
        f"no trust accepts the token's {' and '.join(sorted(least or ['audience']))}"
    )


def make_sign_in(trust: IssuerTrust, claims: Mapping[str, object]) -> SignIn:
    """Return the account of the sign-in, and the roles of the person. Raises ClaimsRefused if a
    claim is missing or has the wrong form.
    """
    if trust.account:
        return SignIn(account=trust.account, trust=trust)
    # OpenID Connect Core 1.0, section 3.1.3.7: the party that the token was issued to
    party = claims.get("azp", trust.audience)
    if party not in (trust.audience, trust.client_id):
        raise ClaimsRefused("the token was issued to another client")
    subject, name = claims.get("sub"), claims.get(trust.account_claim)
    if not isinstance(subject, str) or not subject:
        raise ClaimsRefused("the token has no claim sub")
    if not isinstance(name, str) or not name:
        raise ClaimsRefused(f"the token has no claim {trust.account_claim}")
    # Some providers leave email_verified out; admins can require it as a claim of the trust.
    if trust.account_claim == "email" and claims.get("email_verified", True) not in (True, "true"):
        raise ClaimsRefused("the token's issuer has not verified the email address")
    groups = claims.get(trust.groups_claim)
    member_of = groups if isinstance(groups, list) else []
    return SignIn(
        # Outside ASCII, different letters can have one lower case; such names are refused later.
        account=name.lower() if name.isascii() else name,
        trust=trust,
        subject=subject,
        roles=[each for each in trust.groups if each.group in member_of],
    )


def limits_users(trust: IssuerTrust) -> bool:
    """Return whether the claims limit a trust to certain users of its issuer. An issuer in
    SHARED_ISSUERS serves users of many organisations, and some claims tell them apart. For such an
    issuer, at least one of these claims must have a fixed value, or a value that is fixed up to a
    slash. For an issuer that is not in SHARED_ISSUERS, a trust is limited if any claim has a fixed
    part.
    """
    identifying = SHARED_ISSUERS.get(trust.issuer.rstrip("/"))
    if identifying is None:
        return any(want.strip("*") for want in trust.claims.values())
    return any(
        name in identifying and ("*" not in want or "/" in want.partition("*")[0])
        for name, want in trust.claims.items()
    )


def needs_limits(trust: IssuerTrust) -> bool:
    """Return whether a trust must be limited to certain users of its issuer. The limit is required
    for CI systems, and for trusts that create accounts for the users of a SHARED_ISSUER.
    """
    shared = trust.issuer.rstrip("/") in SHARED_ISSUERS
    return bool(trust.account) or (shared and trust.accounts is AccountRule.CREATE)


def _meets(value: object, want: str) -> bool:
    """Return whether a claim has the wanted value. Lists and objects never match. The check must
    take linear time, because strangers can choose the value, for example as the name of a branch.
    """
    if isinstance(value, bool):
        value = "true" if value else "false"
    elif isinstance(value, int):
        value = str(value)
    if not isinstance(value, str):
        return False
    first, *rest = want.split("*")
    if not rest:
        return value == want
    *middle, last = rest
    if not value.startswith(first) or len(value) < len(first) + len(last):
        return False
    at, end = len(first), len(value) - len(last)
    for part in middle:
        at = value.find(part, at, end)
        if at < 0:
            return False
        at += len(part)
    return value.endswith(last)
