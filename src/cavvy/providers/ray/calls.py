"""A client of the dashboard of one Ray cluster: submits, lists, stops and deletes jobs; lists nodes
and placement groups.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from cavvy.http_client import HttpClient, NoReply
from cavvy.providers.base import ProviderError, Refused, TryAgain

Object = dict[str, Any]

_CALL_S = 30.0
_MOST_BYTES = 1 << 28  # of a reply, which can be the whole output of a job's driver
_AT_ONCE = 8
_MANY = 10000  # maximum number of entries that the state API lists
_DENIED = frozenset({401, 403, 407})


class DashboardRefused(Exception):
    """Raised if the dashboard returned an error status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status

    def sorted(self, where: str) -> ProviderError:
        """Return the error of the provider interface that corresponds to this error."""
        text = str(self).strip()
        last = text.splitlines()[-1][:300] if text else ""
        if self.status in _DENIED:
            return Refused(
                f"{where}: HTTP {self.status}: {last or 'not allowed'}; see `token_file` in "
                "[providers.ray]"
            )
        if self.status == 404:
            return Refused(f"{where}: HTTP 404: this is not a Ray dashboard with a job API")
        if 400 <= self.status < 500:
            return Refused(f"{where}: HTTP {self.status}: {last}")
        return TryAgain(f"{where}: HTTP {self.status}: {last}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardAddress:
    """The address of a dashboard, and the credentials for it."""

    name: str
    url: str
    read_headers: Callable[[], Mapping[str, str]] = field(
        default=dict, repr=False
    )  # raises Refused
    ca_file: str | None = None


class RayDashboard:
    """The dashboard of one cluster. Methods raise DashboardRefused, TryAgain and Refused."""

    def __init__(self, address: DashboardAddress) -> None:
        self.address = address
        self._threads = ThreadPoolExecutor(
            _AT_ONCE, f"ray-{address.name}"
        )  # separate threads, so that a slow dashboard does not delay other clusters
        self._shown: Mapping[str, str] | None = None  # the headers that the last request sent
        self._http = HttpClient(idle_s=_CALL_S, most_bytes=_MOST_BYTES, ca_file=address.ca_file)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def version(self) -> Object:
        return _object(await self._ask("GET", "/api/version"))

    async def nodes(self) -> Sequence[Object]:
        return await self._state("nodes", detail="1")

    async def groups(self) -> Sequence[Object]:
        return await self._state("placement_groups", detail="1")

    async def usage(self) -> Mapping[str, Object]:
        """Return the used and the total amount of each resource, by node. The amounts can be some
        seconds old.
        """
        told = _object(await self._ask("GET", "/api/cluster_status"))
        status = ((told.get("data") or {}).get("clusterStatus") or {}).get(
            "loadMetricsReport"
        ) or {}
        return status.get("usageByNode") or {}

    async def jobs(self) -> Sequence[Object]:
        told = await self._ask("GET", "/api/jobs/")
        return told if isinstance(told, list) else []

    async def job(self, name: str) -> Object | None:
        told = await self._find("GET", f"/api/jobs/{quote(name)}")
        return None if told is None else _object(told)

    async def log(self, name: str) -> str | None:
        """Return the output of a job's driver, or None if the output is not available."""
        try:
            return str(
                _object(await self._ask("GET", f"/api/jobs/{quote(name)}/logs")).get("logs") or ""
            )
        except DashboardRefused:
            return None

    async def submit(self, job: Object) -> bool:
        """Submit a job. Return False if a job with this name already exists."""
        try:
            await self._ask("POST", "/api/jobs/", job)
        except DashboardRefused as error:
            if "already exists" in str(error):
                return False
            raise
        return True

    async def stop(self, name: str) -> None:
        """Ask Ray to stop a job. Does nothing if the job no longer exists."""
        await self._find("POST", f"/api/jobs/{quote(name)}/stop")

    async def forget(self, name: str) -> None:
        """Delete a job that has ended. Does nothing if the job no longer exists."""
        await self._find("DELETE", f"/api/jobs/{quote(name)}")

    async def _find(self, method: str, path: str) -> object:
        """Return the reply, or None if what the path names does not exist."""
        try:
            return await self._ask(method, path)
        except DashboardRefused as error:
            if error.status == 404:
                return None
            raise

    async def _state(self, what: str, **query: str) -> Sequence[Object]:
        """Return a list from the state API:
        https://docs.ray.io/en/latest/ray-observability/reference/api.html
        """
        text = "&".join(f"{name}={value}" for name, value in {**query, "limit": str(_MANY)}.items())
        told = _object(await self._ask("GET", f"/api/v0/{what}?{text}"))
        if not told.get("result"):
            raise TryAgain(f"{self.address.name}: {what}: {told.get('msg') or 'no answer'}")
        found: Sequence[Object] = ((told.get("data") or {}).get("result") or {}).get("result") or []
        return found

    async def _ask(self, method: str, path: str, body: Object | None = None) -> object:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._call_as_known, method, path, body)

    def _call_as_known(self, method: str, path: str, body: Object | None) -> object:
        """Make a call. If the call is denied, read the credential files again, and retry once if
        the files have changed.
        """
        shown = self._shown
        if shown is None:
            shown = self._shown = self.address.read_headers()
        try:
            return self._call(method, path, body, shown)
        except DashboardRefused as error:
            if error.status not in _DENIED or (fresh := self.address.read_headers()) == shown:
                raise
        self._shown = fresh
        return self._call(method, path, body, fresh)

    def _call(
        self, method: str, path: str, body: Object | None, shown: Mapping[str, str]
    ) -> object:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Accept": "application/json", "Content-Type": "application/json", **shown}
        try:
            reply = self._http.send(method, self.address.url + path, data, headers)
            if reply.status < 300:
                return reply.parse_json()
        except NoReply as error:
            raise TryAgain(
                f"{self.address.name}: {self.address.url} cannot be reached: {error}"
            ) from error
        raise DashboardRefused(reply.status, reply.body[:65536].decode(errors="replace"))


def _object(told: object) -> Object:
    return told if isinstance(told, dict) else {}
