"""Exchanges the API key for access tokens of IBM Cloud's Identity and Access Management
(https://cloud.ibm.com/apidocs/iam-identity-token-api).
"""

import http.client
import json
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta

from cavvy.domain.tasks import Scalar
from cavvy.providers.ibm import KEYS
from cavvy.providers.vm.cloud import CloudFault

_GRANT = "urn:ibm:params:oauth:grant-type:apikey"
_TIMEOUT_S = 30.0
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
        form = urllib.parse.urlencode({"grant_type": _GRANT, "apikey": key}).encode()
        headers = {
            "Content-Type": "application/x-www-form-urlencoded",
            "Accept": "application/json",
            "User-Agent": "cavvy",
        }
        request = urllib.request.Request(self._url, data=form, headers=headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
                told: Mapping[str, object] = json.loads(reply.read())
                return told
        except urllib.error.HTTPError as error:
            raise _read_fault(error) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            # the text of the error is left out, because it may quote the request
            raise CloudFault(0, "no token", type(error).__name__) from error


def _read_fault(error: urllib.error.HTTPError) -> CloudFault:
    try:
        with error:
            told = json.loads(error.read())
            code, message = str(told["errorCode"]), str(told["errorMessage"])
    except (OSError, ValueError, LookupError, TypeError):
        code, message = f"HTTP {error.code}", ""
    # IAM answers with the status 400 if it does not know the key
    return CloudFault(401 if error.code == 400 else error.code, code, message)
