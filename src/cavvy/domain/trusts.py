"""Trusts: which tokens of other systems this server accepts, and which accounts and roles the
bearers of the tokens get.

A token of another system is an ID token of OpenID Connect: issued by a CI system for one of its
jobs, or by an identity provider for a person. The server exchanges the ID token for a token of an
account.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from cavvy.domain.accounts import Role
from cavvy.domain.values import Struct, field

# What the value of a claim must begin with, before its first `*`, so that it names an owner.
_WHOLE = re.compile(r"[^*]+\Z")  # the whole value
_PATH = re.compile(r"[^*]+\Z|[^*/]+/")  # the value, or OWNER/
_PEOPLE: Mapping[str, re.Pattern[str]] = {"sub": _WHOLE}


def _whole(*names: str) -> Mapping[str, re.Pattern[str]]:
    return dict.fromkeys(names, _WHOLE)


def _paths(*names: str) -> Mapping[str, re.Pattern[str]]:
    return dict.fromkeys(names, _PATH)


def _sub(owner: str) -> Mapping[str, re.Pattern[str]]:
    """Return what the subject must begin with. In `owner`, OWNER stands for the owner's name."""
    return {"sub": re.compile(owner.replace("OWNER", "[^*/:]+"))}


# Issuers that sign tokens for all their users, and the claims that only the owner of a project, or
# a person, has at the issuer. Not listed are claims that every user can choose, such as the name of
# a branch or pipeline. Not listed are also issuers whose URL names the customer, such as
# https://oidc.circleci.com/org/ID, https://oidc.vercel.com/TEAM or
# https://ACCOUNT.app.spacelift.io.
# https://docs.github.com/en/actions/reference/security/oidc
# https://docs.gitlab.com/ci/secrets/id_token_authentication/
# https://developers.google.com/identity/openid-connect/openid-connect
# https://buildkite.com/docs/agent/v3/cli-oidc
# https://developer.hashicorp.com/terraform/enterprise/dynamic-provider-credentials/workload-identity-tokens
# https://vercel.com/docs/oidc/reference
# https://github.com/sigstore/fulcio (Codefresh), https://modal.com/docs/guide/oidc-integration
# https://depot.dev/docs/ci/oidc, https://www.pulumi.com/docs/esc/guides/configuring-oidc/
# https://namespace.so/docs/federation
# https://docs.envzero.com/guides/integrations/oidc-integrations
# https://github.com/pypi/warehouse (ActiveState)
# https://docs.slack.dev/authentication/sign-in-with-slack
SHARED_ISSUERS: Mapping[str, Mapping[str, re.Pattern[str]]] = {
    "https://token.actions.githubusercontent.com": {
        **_sub("repo:OWNER/|repository_owner:OWNER(:|\\Z)|repository(_owner)?_id:OWNER(:|\\Z)"),
        **_paths("repository"),
        **_whole("repository_id", "repository_owner", "repository_owner_id"),
    },
    "https://gitlab.com": {
        **_sub("project_path:OWNER/|[0-9]+\\Z"),
        **_paths("project_path", "namespace_path"),
        **_whole("project_id", "namespace_id", "email"),
    },
    "https://accounts.google.com": _whole("sub", "email", "hd"),
    "https://agent.buildkite.com": {
        **_sub("organization:OWNER:"),
        **_whole("organization_slug", "organization_id", "pipeline_id"),
    },
    "https://app.terraform.io": {
        **_sub("organization:OWNER:"),
        "terraform_full_workspace": re.compile("organization:[^*:]+:"),
        **_whole("terraform_organization_id", "terraform_organization_name"),
        **_whole("terraform_project_id", "terraform_workspace_id"),
    },
    "https://oidc.vercel.com": {**_sub("owner:OWNER:"), **_whole("owner_id", "project_id")},
    "https://oidc.codefresh.io": {**_sub("account:OWNER:"), **_whole("account_id", "pipeline_id")},
    "https://oidc.modal.com": {**_sub("modal:workspace_id:OWNER:"), **_whole("workspace_id")},
    "https://identity.depot.dev": {
        **_paths("repository"),
        **_whole("org_id", "repository_id", "repository_owner", "repository_owner_id"),
    },
    "https://api.pulumi.com/oidc": _sub("pulumi:(deploy|environments):org:OWNER:"),
    "https://api.pulumi.com/oidc/v2": _whole("https://pulumi.com/org", "https://pulumi.com/org_id"),
    "https://federation.namespaceapis.com": _whole("tenant_id"),
    "https://platform.activestate.com/api/v1/oauth/oidc": {
        **_sub("org:OWNER:"),
        **_paths("project_path"),
        **_whole("project_id"),
    },
    "https://scalr.io": _sub("account:OWNER:"),
    "https://slack.com": _whole("sub", "https://slack.com/team_id"),
    "https://login.salesforce.com": _sub("https://login[.]salesforce[.]com/id/OWNER/"),
    **{  # the accounts of persons at Microsoft; `common` and `organizations` are all its customers
        f"https://login.microsoftonline.com/{each}/v2.0": _whole("oid", "sub", "tid")
        for each in ("common", "organizations", "consumers")
    },
    "https://login.microsoftonline.com/9188040d-6c67-4c5b-b112-36a304b66dad/v2.0": _whole(
        "oid", "sub"
    ),
    # issuers of which only the standard claim `sub` tells users apart
    **dict.fromkeys(
        (
            "https://access.line.me",
            "https://api.cursor.com",
            "https://api.login.yahoo.com",
            "https://api2.cursor.sh/cloud-agent/identity",
            "https://app.devin.ai",
            "https://app.warp.dev",
            "https://appleid.apple.com",
            "https://auth.atlassian.com",
            "https://codeberg.org",
            "https://cognito-identity.amazonaws.com",
            "https://discord.com",
            "https://github.com/login/oauth",
            "https://huggingface.co",
            "https://id.twitch.tv/oauth2",
            "https://issuer.enforce.dev",
            "https://kauth.kakao.com",
            "https://login.app.env0.com",
            "https://login.live.com",
            "https://oauth2.sigstore.dev/auth",
            "https://www.facebook.com",
            "https://www.linkedin.com",
            "https://www.linkedin.com/oauth",
            "https://www.paypal.com",
        ),
        _PEOPLE,
    ),
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
    # Some providers of single organisations leave email_verified out; admins can require it as a
    # claim of the trust.
    verified = claims.get("email_verified", find_owner_claims(trust.issuer) is None)
    if trust.account_claim == "email" and verified not in (True, "true"):
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


def find_owner_claims(issuer: str) -> Mapping[str, re.Pattern[str]] | None:
    """Return the claims that identify the users of a shared issuer, or None if the issuer is not
    known to be shared. Upper case letters in the host name make no difference.
    """
    scheme, mark, rest = issuer.rstrip("/").partition("://")
    host, slash, path = rest.partition("/")
    return SHARED_ISSUERS.get(f"{scheme.lower()}{mark}{host.lower()}{slash}{path}")


def limits_users(trust: IssuerTrust) -> bool:
    """Return whether the claims limit a trust to certain users of its issuer. An issuer in
    SHARED_ISSUERS serves users of many organisations, and some claims tell them apart. For such an
    issuer, at least one of these claims must have a fixed value, or a pattern whose beginning names
    the owner. For an issuer that is not in SHARED_ISSUERS, a trust is limited if any claim has a
    letter or digit.
    """
    owners = find_owner_claims(trust.issuer)
    if owners is None:
        return any(any(map(str.isalnum, want)) for want in trust.claims.values())
    return any(name in owners and owners[name].match(want) for name, want in trust.claims.items())


def needs_limits(trust: IssuerTrust) -> bool:
    """Return whether a trust must be limited to certain users of its issuer. The limit is required
    for CI systems, for trusts that create accounts for the users of a SHARED_ISSUER, and for trusts
    that find accounts by a name that users of a SHARED_ISSUER choose.
    """
    shared = find_owner_claims(trust.issuer) is not None
    chosen = trust.accounts is AccountRule.CREATE or trust.account_claim not in ("email", "sub")
    return bool(trust.account) or (shared and chosen)


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
