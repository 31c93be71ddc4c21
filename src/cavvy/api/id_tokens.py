"""Verifies ID tokens of OpenID Connect.

A token is accepted only if it uses an algorithm in ALGORITHMS and a key that the token's issuer
publishes. The token's header cannot name or contain any other key. Keys are requested only from
issuers that an admin trusts.
"""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime
from time import monotonic
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from cavvy.client.addresses import is_loopback
from cavvy.domain.trusts import IssuerTrust
from cavvy.domain.values import Struct
from cavvy.http_client import HttpClient, NoReply, TargetDenied
from cavvy.store.objects.threads import start_apart

if TYPE_CHECKING:
    from jwt import PyJWK

# Asymmetric algorithms of RFC 7518 and RFC 8037: the key that verifies a token cannot make one.
ALGORITHMS = (
    *("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    *("ES256", "ES384", "ES512", "EdDSA"),
)
_LEAST_RSA_BITS = 2048
_CURVES = {"ES256": "secp256r1", "ES384": "secp384r1", "ES512": "secp521r1"}  # RFC 7518, 3.4
LONGEST = 16_384  # maximum characters of an ID token
_LONGEST_S = 86_400  # maximum validity of an ID token; used tokens are remembered for this time
_LEEWAY_S = 60  # maximum difference of the clocks of issuer and server, in seconds
_FETCH_S = 5.0  # maximum seconds for each read from an issuer
_MOST_FETCH_S = 10.0  # maximum seconds for all answers of an issuer
_MOST_BYTES = 1 << 20
_MOST_KEYS = 100  # of one issuer
_KEYS_AGE_S = 3600.0  # seconds after which keys are fetched again
_MOST_AGE_S = 86_400.0  # seconds for which keys are used while their issuer does not answer
_AGAIN_S = 30.0  # seconds between two attempts to fetch an issuer's keys
_DISCOVERY = "/.well-known/openid-configuration"  # OpenID Connect Discovery 1.0, section 4

JsonWebKey = Mapping[str, Any]  # RFC 7517


class IdTokenRefused(Exception):
    """Raised if the ID token is not valid. The message gives the reason, and contains no part of
    the token.
    """


class IssuerSilent(Exception):
    """Raised if the issuer's keys cannot be read now."""


class VerifiedToken(Struct, frozen=True, kw_only=True):
    """The claims of a valid ID token, the trusts of its issuer and audience, the time at which the
    token was issued, and the time until which the token can be used.
    """

    claims: Mapping[str, object]
    trusts: Sequence[IssuerTrust]
    issued_at: datetime
    until: datetime


class IssuerKeys:
    """The keys that one issuer publishes."""

    def __init__(self, issuer: str) -> None:
        self._issuer = issuer
        self._keys: Mapping[str, JsonWebKey] = {}
        self._read_at = self._tried_at = float("-inf")
        self._problem = ""
        self._reading = asyncio.Lock()
        self._fetched: Future[Mapping[str, JsonWebKey] | IssuerSilent] | None = None

    async def find(self, key_id: str) -> JsonWebKey:
        """Return the key with this ID. If the ID is unknown, the keys are fetched again, but at
        limited intervals, so that invalid tokens cannot cause many requests to the issuer. Raises
        IdTokenRefused, IssuerSilent.
        """
        async with self._reading:
            age, waited = monotonic() - self._read_at, monotonic() - self._tried_at
            if (key_id not in self._keys or age >= _KEYS_AGE_S) and waited >= _AGAIN_S:
                await self._read()
                age = monotonic() - self._read_at
        if key_id in self._keys and age < _MOST_AGE_S:
            return self._keys[key_id]
        if self._problem:
            raise IssuerSilent(self._problem)
        raise IdTokenRefused("the issuer does not publish the key that signed the token")

    async def _read(self) -> None:
        """Read the keys in a thread, so that an issuer that answers slowly blocks nothing else. A
        second thread is started only after the first one has ended. Keys that arrived after an
        earlier request had given up are used.
        """
        self._tried_at = monotonic()
        late = self._fetched
        if late is None or (late.done() and isinstance(late.result(), IssuerSilent)):
            self._fetched = start_apart(lambda: _try_fetch(self._issuer), "issuer-keys")
        assert self._fetched is not None
        fetched = self._fetched
        await asyncio.wait({asyncio.wrap_future(fetched)}, timeout=_MOST_FETCH_S)
        if not fetched.done():
            self._problem = f"{self._issuer} did not send its keys within {_MOST_FETCH_S:.0f} s"
            return
        self._fetched = None
        found = fetched.result()
        if isinstance(found, IssuerSilent):
            self._problem = str(found)
        else:
            self._keys, self._read_at, self._problem = found, self._tried_at, ""


class IdTokenVerifier:
    """Verifies ID tokens from the issuers that admins trust."""

    def __init__(self) -> None:
        self._issuers: dict[str, IssuerKeys] = {}

    async def verify(self, text: str, trusts: Sequence[IssuerTrust]) -> VerifiedToken:
        """Raises IdTokenRefused, IssuerSilent."""
        import jwt

        if len(text) > LONGEST:
            raise IdTokenRefused(f"the token is longer than {LONGEST:,} characters")
        try:
            header = jwt.get_unverified_header(text)
            issuer = jwt.decode(text, options={"verify_signature": False}).get("iss")
        except (jwt.PyJWTError, ValueError, RecursionError) as error:
            raise IdTokenRefused("the token is not a JSON Web Token") from error
        theirs = [each for each in trusts if each.issuer == issuer]
        if not theirs or not isinstance(issuer, str):
            raise IdTokenRefused("no trust names the token's issuer")
        algorithm, key_id = _check_header(header)
        row = await self._issuers.setdefault(issuer, IssuerKeys(issuer)).find(key_id)
        try:
            # A key without `alg` is used for the token's algorithm if the kind of key permits this.
            key = jwt.PyJWK(dict(row), algorithm=row.get("alg", algorithm))
        except (jwt.PyJWTError, ValueError, TypeError) as error:
            raise IdTokenRefused("the issuer's key does not fit the token's algorithm") from error
        if problem := find_weakness(key):
            raise IdTokenRefused(f"the issuer's key is too weak: {problem}")
        return _decode(text, key, theirs)


def find_weakness(key: "PyJWK") -> str:
    """Return why a key must not be used to verify signatures, or "" if it may be used. RSA keys
    need at least 2,048 bits (RFC 7518, sections 3.3 and 3.5); the algorithm of an elliptic curve
    key determines its curve (section 3.4).
    """
    from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa

    public = key.key
    if isinstance(public, rsa.RSAPublicKey):
        if public.key_size < _LEAST_RSA_BITS:
            return (
                f"an RSA key of {public.key_size:,} bits; at least {_LEAST_RSA_BITS:,} are needed"
            )
        return ""
    if isinstance(public, ec.EllipticCurvePublicKey):
        wanted = _CURVES.get(key.algorithm_name)
        if public.curve.name != wanted:
            return f"a key on the curve {public.curve.name} for {key.algorithm_name}"
        return ""
    if isinstance(public, ed25519.Ed25519PublicKey | ed448.Ed448PublicKey):
        return ""
    return "a kind of key that this version does not know"


def _check_header(header: Mapping[str, object]) -> tuple[str, str]:
    """Return the algorithm and the ID of the key. Raises IdTokenRefused."""
    algorithm, key_id = header.get("alg"), header.get("kid", "")
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise IdTokenRefused("the token's algorithm is not permitted")
    if not isinstance(key_id, str):
        raise IdTokenRefused("the token's header has no key ID")
    if "crit" in header:  # RFC 7515, section 4.1.11: extensions that must be understood
        raise IdTokenRefused("the token's header demands extensions that are not supported")
    # RFC 8725, section 3.11: an access token or a logout token is not an ID token.
    kind = header.get("typ", "JWT")
    if not isinstance(kind, str) or kind.upper() != "JWT":
        raise IdTokenRefused("the token is of another kind, not an ID token")
    return algorithm, key_id


def _decode(text: str, key: "PyJWK", trusts: Sequence[IssuerTrust]) -> VerifiedToken:
    """Raises IdTokenRefused."""
    import jwt

    try:
        claims: dict[str, Any] = jwt.decode(
            text,
            key,
            algorithms=[key.algorithm_name],
            issuer=trusts[0].issuer,
            audience=[each.audience for each in trusts],
            leeway=_LEEWAY_S,
            options={"require": ["iss", "aud", "exp", "iat"]},
        )
        until = int(claims["exp"])
        if until - int(claims["iat"]) > _LONGEST_S:
            raise IdTokenRefused("the token is valid for more than a day")
        if "events" in claims:  # OpenID Connect Back-Channel Logout 1.0, section 2.4
            raise IdTokenRefused("the token is a logout token, not an ID token")
        issued_at = datetime.fromtimestamp(float(claims["iat"]), UTC)
        ends = datetime.fromtimestamp(until + _LEEWAY_S, UTC)
    except jwt.InvalidAudienceError as error:
        raise IdTokenRefused("the token is for another audience") from error
    except jwt.ExpiredSignatureError as error:
        raise IdTokenRefused("the token has expired") from error
    except (jwt.ImmatureSignatureError, jwt.InvalidIssuedAtError) as error:
        raise IdTokenRefused("the token is not valid yet; compare the clocks") from error
    except jwt.MissingRequiredClaimError as error:
        raise IdTokenRefused(f"the token has no claim {error.claim}") from error
    except (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise IdTokenRefused("the token's signature or form is wrong") from error
    audiences = claims["aud"] if isinstance(claims["aud"], list) else [claims["aud"]]
    return VerifiedToken(
        claims=claims,
        trusts=[each for each in trusts if each.audience in audiences],
        issued_at=issued_at,
        until=ends,
    )


def _try_fetch(issuer: str) -> Mapping[str, JsonWebKey] | IssuerSilent:
    """Return the error, because asyncio logs errors of futures that are not awaited."""
    try:
        return fetch_keys(issuer)
    except IssuerSilent as error:
        return error


def fetch_keys(issuer: str) -> Mapping[str, JsonWebKey]:
    """Return the issuer's signature keys, keyed by key ID. Keys that cannot verify signatures are
    left out. Raises IssuerSilent.
    """
    import jwt

    described = _fetch(issuer.rstrip("/") + _DISCOVERY, issuer)
    keys_url = described.get("jwks_uri")
    # OpenID Connect Discovery 1.0, section 4.3: the document must name the issuer itself.
    if described.get("issuer") != issuer or not isinstance(keys_url, str):
        raise IssuerSilent(f"{issuer}{_DISCOVERY} is not a description of this issuer")
    rows = _fetch(keys_url, issuer).get("keys")
    if not isinstance(rows, list) or len(rows) > _MOST_KEYS:
        raise IssuerSilent(f"{keys_url} is not a list of at most {_MOST_KEYS} keys")
    keys: dict[str, JsonWebKey] = {}
    for row in rows:
        if not isinstance(row, dict) or row.get("use", "sig") != "sig" or row.get("kty") == "oct":
            continue
        try:
            key = jwt.PyJWK(row)
        except (jwt.PyJWTError, ValueError, TypeError, KeyError):
            continue  # a kind of key that this version does not support
        if key.algorithm_name in ALGORITHMS:
            keys[str(row.get("kid", ""))] = row
    return keys


def check_issuer(url: str) -> str:
    """Return why the URL cannot be an issuer's URL, or "" if the URL is valid. For tests, issuers
    on this machine need no TLS.
    """
    try:
        parts = urlsplit(url)
        local = is_loopback(parts.hostname or "")
        _ = parts.port
    except ValueError:
        return "the value is not a URL"
    if parts.scheme != "https" and not (parts.scheme == "http" and local):
        return "the URL must begin with https://"
    if not parts.hostname or parts.query or parts.fragment or parts.username:
        return "the URL must have a host name, and no user name, query or fragment"
    return ""


def _fetch(url: str, issuer: str) -> dict[str, Any]:
    """Return the JSON object at a URL that the issuer names. Redirects are not followed. An admin
    has named the host of the issuer; the issuer itself can name only public addresses. Raises
    IssuerSilent.
    """
    problem = check_issuer(url.partition("?")[0])
    if not problem and issuer.startswith("https:") and not url.startswith("https:"):
        # An issuer must not direct requests to programs on this machine.
        problem = "the URL must begin with https://"
    if problem:
        raise IssuerSilent(f"cannot read {url}: {problem}")
    host = urlsplit(issuer).hostname or ""
    client = HttpClient(targets=host, idle_s=_FETCH_S, most_bytes=_MOST_BYTES)
    try:
        reply = client.send("GET", url, limit_s=_MOST_FETCH_S)
        found = reply.parse_json() if reply.status == 200 else None
    except (NoReply, TargetDenied) as error:
        raise IssuerSilent(f"cannot read {url}: {error}") from error
    if reply.status != 200:
        raise IssuerSilent(f"cannot read {url}: it was answered with status {reply.status}")
    if not isinstance(found, dict):
        raise IssuerSilent(f"{url} is not a JSON object")
    return found
