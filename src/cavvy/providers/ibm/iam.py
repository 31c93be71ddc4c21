"""Exchanges the API key for access tokens of IBM Cloud's Identity and Access Management
(https://cloud.ibm.com/apidocs/iam-identity-token-api).
"""

import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from urllib.parse import urlencode

from cavvy.domain.tasks import Scalar
from cavvy.http_client import HttpClient, HttpReply, NoReply
from cavvy.providers.ibm import KEYS
from cavvy.providers.vm.cloud import CloudFault

_GRANT = "urn:ibm:params:oauth:grant-type:apikey"
_SPARE = timedelta(minutes=5)  # a token is replaced this long before it expires
_NEVER = datetime.min.replace(tzinfo=UTC)


class IamTokens:
    """Requests tokens, and caches each token until shortly before the token expires."""

    def __init__(self, settings: Mapping[str, Scalar], now: Callable[[], datetime]) -> None:
        self._settings, self._now = settings, now
        self._url = f"{str(settings['iam_endpoint']).rstrip('/')}/identity/token"
        self._lock = threading.Lock()  # the clients of several regions share one token
        self._key, self._token, self._renew_at = "", "", _NEVER

    def read(self) -> str:
        """Return a valid token. The call blocks during the request. Raises CloudFault, Refused."""
        with self._lock:
            key = KEYS.read(self._settings)
            if key != self._key or self._now() >= self._renew_at:
                told = self._request(key)
                self._token = str(told["access_token"])
                lasts = timedelta(seconds=int(str(told["expires_in"])))
                self._key, self._renew_at = key, self._now() + lasts - _SPARE
            return self._token

    def _request(self, key: str) -> Mapping[str, object]:
        form = urlencode({"grant_type": _GRANT, "apikey": key}).encode()
        kind = "application/x-www-form-urlencoded"
        headers = {"Content-Type": kind, "Accept": "application/json"}
        try:
            reply = HttpClient().send("POST", self._url, form, headers)
            if reply.status >= 300:
                raise _read_fault(reply)
            told: Mapping[str, object] = reply.parse_json()
            return told
        except NoReply as error:
            raise CloudFault(0, "no token", str(error)) from error


def _read_fault(reply: HttpReply) -> CloudFault:
    try:
        told = reply.parse_json()
        code, message = str(told["errorCode"]), str(told["errorMessage"])
    except (NoReply, LookupError, TypeError):
        code, message = f"HTTP {reply.status}", ""
    # IAM answers with the status 400 if it does not know the key
    return CloudFault(401 if reply.status == 400 else reply.status, code, message)
