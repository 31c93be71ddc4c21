"""Gets ID tokens: for a person by the device flow of OAuth 2.0 (RFC 8628), and for a CI system's
job from the job's environment.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any
from urllib.parse import urlencode, urlsplit

from msgspec import Struct

from cavvy.client.addresses import is_loopback
from cavvy.client.errors import ApiError
from cavvy.http_client import HttpClient, NoReply, TargetDenied

ID_TOKEN = (
    "CAVVY_ID_TOKEN"  # the variable with a CI job's ID token, as GitLab's `id_tokens` sets it
)
# https://docs.github.com/en/actions/reference/security/oidc
_GITHUB_URL, _GITHUB_TOKEN = "ACTIONS_ID_TOKEN_REQUEST_URL", "ACTIONS_ID_TOKEN_REQUEST_TOKEN"
_GRANT = "urn:ietf:params:oauth:grant-type:device_code"  # RFC 8628, section 3.4
# request `openid`, and the other scopes only if the provider lists them, because some providers
# refuse unknown scopes
_SCOPES = ("openid", "email", "profile", "groups")
_TIMEOUT_S = 15.0
_MOST_BYTES = 1 << 20
_INTERVAL_S = (
    5.0  # seconds between two requests, if the provider does not state them: RFC 8628, section 3.2
)
_LONGEST_S = 3600.0  # maximum seconds for a person to sign in, even if the provider permits more


class DeviceCode(Struct, frozen=True, kw_only=True):
    """The provider's data about one sign-in: the code and address for the person, and the values
    with which the client requests the result.
    """

    url: str
    user_code: str
    device_code: str
    expires_s: float
    interval_s: float


def find_ci_token(environment: Mapping[str, str], audience: str) -> str | None:
    """Return the ID token of the CI job that runs this process, or None without a CI job or ID
    token. Raises ApiError.
    """
    if given := environment.get(ID_TOKEN, "").strip():
        return given
    url, token = environment.get(_GITHUB_URL), environment.get(_GITHUB_TOKEN)
    if not url or not token:
        return None
    asked = f"{url}{'&' if '?' in url else '?'}{urlencode({'audience': audience})}"
    value = _ask(asked, headers={"Authorization": f"Bearer {token}"}).get("value")
    if not isinstance(value, str):
        raise _failed(
            "GitHub did not issue an ID token", "the job needs the permission `id-token: write`"
        )
    return value


def sign_in_by_device(
    issuer: str,
    client_id: str,
    show: Callable[[str, str], None],
    wait: Callable[[float], None] = time.sleep,
) -> str:
    """Ask a person to sign in at the provider, in any browser, and return the ID token. `show` is
    called with the URL to open and the code to enter on that page. Raises ApiError.
    """
    described = _ask(f"{issuer.rstrip('/')}/.well-known/openid-configuration")
    device_url, token_url = (
        described.get(name) for name in ("device_authorization_endpoint", "token_endpoint")
    )
    if not isinstance(device_url, str) or not isinstance(token_url, str):
        hint = "sign in with a token, by --token or --token-file"
        raise _failed(f"{issuer} does not offer the device flow", hint)
    scope = _choose_scope(described.get("scopes_supported"))
    begun = _read_code(_ask(device_url, {"client_id": client_id, "scope": scope}), issuer)
    show(begun.url, begun.user_code)
    form = {"client_id": client_id, "grant_type": _GRANT, "device_code": begun.device_code}
    return _await_token(partial(_ask, token_url, form), begun, issuer, wait)


def _await_token(
    ask: Callable[[], dict[str, Any]],
    begun: DeviceCode,
    issuer: str,
    wait: Callable[[float], None],
) -> str:
    """Repeat the request until the person has signed in. Raises ApiError."""
    left_s, pause_s = begun.expires_s, begun.interval_s
    while left_s > 0:
        wait(pause_s)
        left_s -= pause_s
        try:
            answer = ask()
        except ApiError:
            if left_s <= pause_s:
                raise
            pause_s *= 2  # RFC 8628, section 3.5: the provider may be busy
            continue
        if isinstance(found := answer.get("id_token"), str):
            return found
        match answer.get("error"):
            case "authorization_pending":
                pass
            case "slow_down":
                pause_s += 5  # RFC 8628, section 3.5
            case "access_denied":
                raise _failed("the sign-in was refused at the provider")
            case "expired_token":
                break
            case other:
                raise _failed(
                    f"{issuer} did not issue an ID token: {other or 'no error was reported'}"
                )
    raise _failed("the sign-in at the provider took too long", "run `cavvy login` again")


def _read_code(begun: dict[str, Any], issuer: str) -> DeviceCode:
    """Raises ApiError."""
    url = begun.get("verification_uri_complete") or begun.get("verification_uri")
    shown = (url, begun.get("user_code"), begun.get("device_code"))
    try:
        expires_s, interval_s = (
            float(begun.get("expires_in", 0)),
            float(begun.get("interval", _INTERVAL_S)),
        )
    except (TypeError, ValueError):
        expires_s = interval_s = 0.0
    # These texts are printed on a terminal, so they must not contain control characters.
    printable = all(isinstance(each, str) and each.isprintable() for each in shown)
    if not printable or not expires_s > 0 or not 0 < interval_s <= _LONGEST_S:
        error = begun.get("error", "the provider's answer does not have the format of RFC 8628")
        raise _failed(f"{issuer} did not start a sign-in: {error!s:.200}")
    return DeviceCode(
        url=str(url),
        user_code=str(begun["user_code"]),
        device_code=str(begun["device_code"]),
        expires_s=min(expires_s, _LONGEST_S),
        interval_s=interval_s,
    )


def _choose_scope(supported: object) -> str:
    known = supported if isinstance(supported, list) else ["email", "profile"]
    return " ".join(each for each in _SCOPES if each == "openid" or each in known)


def _ask(
    url: str,
    form: Mapping[str, str] | None = None,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the JSON object in the answer to a request, which sends the form if there is one. An
    answer with status 400 also contains an object, because RFC 6749 uses this status for errors.
    Raises ApiError.
    """
    parts = urlsplit(url)
    if parts.scheme != "https" and not (
        parts.scheme == "http" and is_loopback(parts.hostname or "")
    ):
        raise _failed(f"{url} does not begin with https://")
    host = f"{parts.scheme}://{parts.netloc}"
    client = HttpClient(redirects=True, idle_s=_TIMEOUT_S, most_bytes=_MOST_BYTES)
    headers = {"Accept": "application/json", **headers}
    try:
        if form is None:
            reply = client.send("GET", url, None, headers)
        else:
            kind = {"Content-Type": "application/x-www-form-urlencoded"}
            reply = client.send("POST", url, urlencode(form).encode(), headers | kind)
        if reply.status not in (200, 400, 401, 428):
            raise NoReply(f"HTTP {reply.status} {reply.reason}")
        found = reply.parse_json()
    except (NoReply, TargetDenied) as error:
        raise _failed(f"{host} does not answer like an OpenID provider: {error}") from error
    if not isinstance(found, dict):
        raise _failed(f"{host} did not answer with a JSON object")
    return found


def _failed(message: str, hint: str = "ask an admin of the server") -> ApiError:
    return ApiError("sign-in-refused", message, hint, 403)
