"""Calls IBM Cloud's VPC API (https://cloud.ibm.com/apidocs/vpc) in several regions, with access
tokens of IBM's Identity and Access Management
(https://cloud.ibm.com/apidocs/iam-identity-token-api).
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from cavvy.domain.tasks import Scalar
from cavvy.http_client import HttpClient, HttpReply, NoReply
from cavvy.providers.ibm import KEYS
from cavvy.providers.vm.cloud import CloudFault
from cavvy.providers.vm.rest import Json, RestClient

# the version in the Python package ibm-vpc 0.36.0
_VERSION = {"version": "2026-10-06", "generation": "2"}
_PAGE = "100"  # the longest page
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


class IbmApi:
    """Calls the API of each region. Calls raise CloudFault and Refused."""

    def __init__(self, settings: Mapping[str, Scalar], tokens: IamTokens) -> None:
        self._endpoint, self._tokens = str(settings["endpoint"]), tokens
        self._clients: dict[str, RestClient] = {}

    def close(self) -> None:
        for each in self._clients.values():
            each.close()

    async def get(self, region: str, path: str) -> Json:
        return await self._client(region).get(_add_version(path))

    async def send(
        self, region: str, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> Json:
        """Send a request that creates, changes or deletes a resource."""
        return await self._client(region).send(method, _add_version(path), body)

    async def list(self, region: str, path: str, field: str, **query: str) -> Sequence[Json]:
        """Return all items of a list. An underscore in the name of a parameter stands for a
        period."""
        names = {name.replace("_", "."): value for name, value in query.items()}
        first = _add_version(path, limit=_PAGE, **names)

        def read_next(page: Json) -> str | None:
            if not page.get("next"):
                return None
            # the address of the next page lacks the version
            start = parse_qs(urlsplit(page["next"]["href"]).query)["start"][0]
            return f"{first}&{urlencode({'start': start})}"

        pages = await self._client(region).pages(first, read_next)
        return [each for page in pages for each in page[field]]

    def _client(self, region: str) -> RestClient:
        if region not in self._clients:
            address = self._endpoint.replace("{region}", region)
            self._clients[region] = RestClient(address, self._tokens.read, _read_error)
        return self._clients[region]


def _add_version(path: str, **query: str) -> str:
    return f"{path}?{urlencode({**_VERSION, **query})}"


def _read_error(told: Json) -> tuple[str, str]:
    """Return the code and the message of an error
    (https://cloud.ibm.com/apidocs/vpc#error-handling)."""
    first = told["errors"][0]
    return first["code"], first["message"]


def _read_fault(reply: HttpReply) -> CloudFault:
    try:
        told = reply.parse_json()
        code, message = str(told["errorCode"]), str(told["errorMessage"])
    except (NoReply, LookupError, TypeError):
        code, message = f"HTTP {reply.status}", ""
    # IAM answers with the status 400 if it does not know the key
    return CloudFault(401 if reply.status == 400 else reply.status, code, message)
