"""Routes to sign in with an ID token of another system."""

from datetime import datetime
from hashlib import sha256
from secrets import token_hex

from starlette.requests import Request

from cavvy.api.app_state import AppState, app_state_of
from cavvy.api.audit import note_change, note_refusal
from cavvy.api.errors import ApiProblem, RetryLater
from cavvy.api.id_tokens import IdTokenRefused, IssuerSilent
from cavvy.api.routes.accounts import ACCOUNT_NAME
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import OPEN
from cavvy.api.tokens import hash_token, make_token
from cavvy.client import sign_in_wire as wire
from cavvy.control.restored import read_sign_ins_from
from cavvy.domain.accounts import AccountToken
from cavvy.domain.authorization import Principal
from cavvy.domain.trusts import ClaimsRefused, SignIn, find_trust, make_sign_in
from cavvy.domain.values import replace
from cavvy.store.base import SignInConflict

router = RouteGroup("sign-in", prefix="/v1")


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
