"""Routes to sign in with an ID token of another system, and to manage the issuers whose ID tokens
are accepted.
"""

from collections.abc import Iterator
from datetime import datetime, timedelta
from hashlib import sha256
from secrets import token_hex
from typing import Annotated

from fastapi import Path
from starlette.requests import Request

from cavvy.api.app_state import AppState, app_state_of
from cavvy.api.audit import note_change, note_refusal
from cavvy.api.errors import ApiProblem, RetryLater
from cavvy.api.id_tokens import IdTokenRefused, IssuerSilent, check_issuer
from cavvy.api.routes.accounts import ACCOUNT_NAME, PROJECT_NAME
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import OPEN, on_installation
from cavvy.api.tokens import hash_token, make_token
from cavvy.api.wire import view
from cavvy.client import account_wire as wire
from cavvy.control.restored import read_sign_ins_from
from cavvy.domain.accounts import AccountKind, AccountToken, Permission, Role
from cavvy.domain.authorization import Principal
from cavvy.domain.trusts import (
    AccountRule,
    ClaimsRefused,
    GroupRole,
    IssuerTrust,
    SignIn,
    find_owner_claims,
    find_trust,
    limits_users,
    make_sign_in,
    needs_limits,
)
from cavvy.domain.values import replace
from cavvy.store.base import NameConflict, RowNotFound, SignInConflict

router = RouteGroup("sign-in", prefix="/v1")
_LONGEST = 200  # maximum characters of a text, and maximum entries of a list
_LIFETIMES_S = (60, 30 * 86_400)
TrustPath = Annotated[str, Path(max_length=63)]


@router.get("/trusts", rule=on_installation(Permission.MANAGE))
async def list_trusts(app_state: AppState) -> list[wire.TrustView]:
    """List the issuers whose ID tokens are accepted."""
    return [_view(each) for each in await app_state.store.sign_ins.trusts()]


@router.post(
    "/trusts",
    rule=on_installation(Permission.MANAGE),
    errors=("account-not-found",),
    when={NameConflict: "name-taken"},
)
async def add_trust(request: Request, app_state: AppState, ask: wire.TrustAsk) -> None:
    """Accept an issuer's ID tokens."""
    store = app_state.store
    _check(ask)
    trust = _make(ask)
    _check_limits(trust)
    services = {each.name for each in await store.accounts() if each.kind is AccountKind.SERVICE}
    if ask.account and ask.account not in services:
        raise ApiProblem(
            "account-not-found",
            f"no service account {ask.account}",
            f"add the account with `cavvy server user add {ask.account} --service`",
        )
    old = [each for each in await store.sign_ins.trusts() if each.name == trust.name]
    note_change(request, before=_facts(old[0]) if old else None, after=_facts(trust))
    await store.sign_ins.put_trust(trust, replace=ask.replace)


@router.delete(
    "/trusts/{trust}",
    rule=on_installation(Permission.MANAGE),
    when={RowNotFound: "trust-not-found"},
)
async def remove_trust(request: Request, app_state: AppState, trust: TrustPath) -> None:
    """Stop accepting an issuer's ID tokens, and revoke all tokens and roles of its trust."""
    sign_ins = app_state.store.sign_ins
    known = {each.name: each for each in await sign_ins.trusts()}
    note_change(request, before=_facts(known[trust]) if trust in known else None)
    await sign_ins.delete_trust(trust)


def _check(ask: wire.TrustAsk) -> None:
    """Raises ApiProblem."""
    for problem, message in (*_judge_texts(ask), *_judge_choices(ask)):
        if problem:
            raise ApiProblem("invalid-request", message)


def _judge_texts(ask: wire.TrustAsk) -> Iterator[tuple[object, str]]:
    """Yield conditions that must be false, each with the error message that applies if the
    condition is true.
    """
    texts = [ask.issuer, ask.audience, ask.groups_claim, ask.account_claim, ask.client_id]
    texts += [*ask.claims, *ask.claims.values(), *(each.group for each in ask.groups)]
    projects = [each.project for each in ask.groups if each.project]
    projects += [] if ask.project is None else [ask.project]
    yield (
        any(len(each) > _LONGEST for each in texts),
        f"a text is longer than {_LONGEST} characters",
    )
    yield max(len(ask.groups), len(ask.claims)) > _LONGEST, f"more than {_LONGEST} entries"
    yield not ACCOUNT_NAME.fullmatch(ask.name), f"{ask.name!r} cannot be the name of a trust"
    yield check_issuer(ask.issuer), f"`issuer` {ask.issuer!r}: {check_issuer(ask.issuer)}"
    yield not ask.audience, "`audience` is empty; give the URL of this server"
    wrong = [each for each in projects if not PROJECT_NAME.fullmatch(each)]
    yield wrong, f"{', '.join(wrong)!r} cannot be the name of a project"


def _judge_choices(ask: wire.TrustAsk) -> Iterator[tuple[object, str]]:
    """Yield conditions, as `_judge_texts` does, for fields that exclude or require each other."""
    kinds = "give `account` for a CI system, or `account_claim` for people"
    low, high = _LIFETIMES_S
    yield bool(ask.account) == bool(ask.account_claim), kinds
    yield ask.account and ask.groups, "`groups` are for people only"
    yield ask.account and ask.client_id, "`client_id` is for people only"
    yield {ask.accounts} - set(AccountRule), f"`accounts` must be {' or '.join(AccountRule)}"
    yield set(ask.scopes) - set(Permission), f"scopes are {', '.join(Permission)}"
    yield {each.role for each in ask.groups} - set(Role), f"roles are {', '.join(Role)}"
    yield not low <= ask.lifetime_s <= high, f"`lifetime_s` must be from {low} to {high}"


def _check_limits(trust: IssuerTrust) -> None:
    """Raises ApiProblem."""
    if not needs_limits(trust) or limits_users(trust):
        return
    message = "`claims` must restrict the accepted users, because the issuer signs tokens for "
    if owners := find_owner_claims(trust.issuer):
        message += (
            f"many organisations; restrict one of {', '.join(sorted(owners))} to a fixed value or, "
            "for paths, to a pattern such as OWNER/*; any user of the issuer can choose the values "
            "of other claims"
        )
    else:
        message += "all its users; give a claim a fixed value, or a pattern such as OWNER/*"
    raise ApiProblem("invalid-request", message)


def _make(ask: wire.TrustAsk) -> IssuerTrust:
    return view(
        IssuerTrust,
        ask,
        accounts=AccountRule(ask.accounts),
        groups=tuple(view(GroupRole, each, role=Role(each.role)) for each in ask.groups),
        scopes=tuple(sorted(set(ask.scopes))),
        lifetime=timedelta(seconds=ask.lifetime_s),
    )


def _view(trust: IssuerTrust) -> wire.TrustView:
    return view(
        wire.TrustView,
        trust,
        groups=[view(wire.GroupRoleView, each) for each in trust.groups],
        scopes=list(trust.scopes),
        lifetime_s=int(trust.lifetime.total_seconds()),
    )


def _facts(trust: IssuerTrust) -> dict[str, object]:
    """Return the facts about a trust for the audit log."""
    return {
        "name": trust.name,
        "issuer": trust.issuer,
        "audience": trust.audience,
        "claims": [f"{name}={value}" for name, value in sorted(trust.claims.items())],
        "account": trust.account or f"{trust.accounts} by {trust.account_claim}",
        "groups": [f"{each.group}: {each.role} in {each.project or '*'}" for each in trust.groups],
        "scopes": list(trust.scopes),
        "within": trust.project,
        "lifetime_s": int(trust.lifetime.total_seconds()),
    }


@router.get("/sign-in", rule=OPEN)
async def list_ways(app_state: AppState) -> list[wire.SignInWay]:
    """List the providers with which people can sign in."""
    trusts = await app_state.store.sign_ins.trusts()
    return [
        wire.SignInWay(name=each.name, issuer=each.issuer, client_id=each.client_id)
        for each in trusts
        if each.client_id
    ]


@router.post("/sign-in", rule=OPEN, status=201, errors=("sign-in-refused", "issuer-silent"))
async def sign_in(request: Request, app_state: AppState, ask: wire.SignInAsk) -> wire.SignInMade:
    """Exchange an ID token of a trusted issuer for a token of an account. An ID token can be
    exchanged once.
    """
    found, until = await _verify(request, ask.id_token)
    now, secret = app_state.now(), make_token()
    expires_at = now + found.trust.lifetime
    token = AccountToken(
        id=token_hex(8),
        account=found.account,
        label=f"sign-in by {found.trust.name}",
        scopes=found.trust.scopes,
        project=found.trust.project,
        created_at=now,
        expires_at=expires_at,
    )
    roles = [f"{each.role} {each.project}".strip() for each in found.roles]
    facts = {"trust": found.trust.name, "expires_at": expires_at.isoformat(), "roles": roles}
    note_change(request, after=facts)
    # from here on, the audit log knows the account of the request
    address = request.client.host if request.client else ""
    request.scope["principal"] = Principal(account=found.account, token=token, address=address)
    try:
        await app_state.store.sign_ins.sign_in(
            found, token, hash_token(secret), _hash_signed_part(ask.id_token), until
        )
    except SignInConflict as error:
        del request.scope["principal"]
        raise _refuse(request, str(error)) from error
    return wire.SignInMade(token=secret, account=token.account, expires_at=expires_at)


async def _verify(request: Request, text: str) -> tuple[SignIn, datetime]:
    """Return the account and trust of an ID token, and the time until which the token can be used.
    Raises ApiProblem.
    """
    app_state = app_state_of(request)
    sign_ins = app_state.store.sign_ins
    try:
        verified = await app_state.id_tokens.verify(text, await sign_ins.trusts())
        found = make_sign_in(find_trust(verified.trusts, verified.claims), verified.claims)
        earliest = await read_sign_ins_from(app_state.store)
        if earliest is not None and verified.issued_at < earliest:
            raise IdTokenRefused(
                "it was issued before this server was restored from a backup, so it may have been "
                "used; get a new ID token"
            )
    except (IdTokenRefused, ClaimsRefused) as error:
        raise _refuse(request, f"the ID token is refused: {error}") from error
    except IssuerSilent as error:
        raise RetryLater("issuer-silent", str(error)) from error
    found = replace(found, issued_at=verified.issued_at)
    trust = found.trust
    if found.subject and (known := await sign_ins.identity(trust.issuer, found.subject)):
        found = replace(found, account=known)
    if not ACCOUNT_NAME.fullmatch(found.account):
        raise _refuse(request, f"the claim {trust.account_claim} cannot be an account's name")
    return found, verified.until


def _refuse(request: Request, message: str) -> ApiProblem:
    note_refusal(request.scope, "sign-in-refused")
    return ApiProblem("sign-in-refused", message)


def _hash_signed_part(text: str) -> str:
    """Return the hash that identifies a used ID token. The hash does not depend on the signature,
    because some algorithms permit several signatures of the same text.
    """
    return sha256(text.rpartition(".")[0].encode()).hexdigest()
