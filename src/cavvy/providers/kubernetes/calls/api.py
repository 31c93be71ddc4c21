"""One API server: objects are made, read, changed, removed and watched; commands are run in
pods.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from cavvy.providers.base import NoCapacity, ProviderError, Refused, TryAgain
from cavvy.providers.kubernetes.calls.kubeconfig import KubeContext, KubeLogin
from cavvy.providers.kubernetes.calls.wire import (
    ConnectionBroken,
    ServerConnection,
    ServerEndpoint,
    UpgradeRefused,
    WebSocket,
    make_head,
)

Object = dict[str, Any]  # one object of the API, as it came; only this package looks into it

_CALL_S = 30.0
_AT_ONCE = 16  # connections; streams not counted
_EXEC = "v4.channel.k8s.io"
_LATER = frozenset({408, 410, 425, 429, 500, 502, 503, 504})
MERGE = "application/merge-patch+json"


class ApiServerRefused(Exception):
    """The API server refused; `reason` is its own word for it, such as AlreadyExists."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason

    @property
    def sorted(self) -> ProviderError:
        """What this is to the caller of a provider."""
        text = str(self)
        if (
            self.status in _LATER or self.reason == "Conflict"
        ):  # such as of two pods that count on one quota at once
            return TryAgain(text)
        if self.status == 403 and "exceeded quota" in text:
            return NoCapacity(text)
        return Refused(text)


class KubernetesApi:
    """The API server of one context, as one user. Methods raise ApiServerRefused, TryAgain and
    Refused.
    """

    def __init__(self, context: KubeContext, login: KubeLogin) -> None:
        self.context = context
        self._login = login
        self._idle: list[ServerConnection] = []
        self._room = asyncio.Semaphore(_AT_ONCE)

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> Object:
        return await self._ask("GET", path, query)

    async def find(self, path: str) -> Object | None:
        """An object; None where there is none."""
        try:
            return await self._ask("GET", path)
        except ApiServerRefused as error:
            if error.status == 404:
                return None
            raise

    async def items(self, path: str, query: Mapping[str, str] | None = None) -> list[Object]:
        """All objects of a list."""
        found: list[Object] = (await self._ask("GET", path, query)).get("items") or []
        return found

    async def make(self, path: str, body: Object, *, dry_run: bool = False) -> Object | None:
        """The object as it was made; None where the name is taken."""
        try:
            return await self._ask("POST", path, {"dryRun": "All"} if dry_run else None, body)
        except ApiServerRefused as error:
            if error.status == 409 and error.reason == "AlreadyExists":
                return None
            raise

    async def patch(self, path: str, body: Object) -> Object | None:
        """Merge; None where there is no such object."""
        try:
            return await self._ask("PATCH", path, None, body, kind=MERGE)
        except ApiServerRefused as error:
            if error.status == 404:
                return None
            raise

    async def drop(self, path: str, body: Object | None = None) -> None:
        """Remove; gone already is well."""
        try:
            await self._ask("DELETE", path, None, body)
        except ApiServerRefused as error:
            if error.status != 404:
                raise

    async def watch(self, path: str, query: Mapping[str, str]) -> AsyncIterator[Object]:
        """Events from `resourceVersion` on, until the server ends the watch."""
        proof = await self._login.proof()
        connection = await self._connect()
        try:
            head = self._head("GET", path, {**query, "watch": "true"}, proof.headers, 0)
            async for status, line in connection.lines(head):
                if status != 200:
                    raise _read_problem(status, line)
                if line.strip():
                    yield msgspec.json.decode(line)
        except (ConnectionBroken, msgspec.DecodeError) as error:
            raise TryAgain(f"{self.context.server}: {error}") from error
        finally:
            await connection.close()

    @asynccontextmanager
    async def run(
        self, pod: str, container: str, command: Sequence[str]
    ) -> AsyncIterator[WebSocket]:
        """A command in a pod: channel 0 is its input, 1 and 2 what it prints, 3 how it ended."""
        query = [("command", word) for word in command]
        flags = [(name, "true") for name in ("stdin", "stdout", "stderr")]
        text = urlencode([*query, ("container", container), *flags], quote_via=quote)
        proof = await self._login.proof()
        connection = await self._connect()
        try:
            headers = {**proof.headers, "Sec-WebSocket-Protocol": _EXEC}
            path = f"/api/v1/namespaces/{self.context.namespace}/pods/{pod}/exec?{text}"
            async with asyncio.timeout(_CALL_S):
                stream = await connection.upgrade(
                    make_head("GET", self._path(path), self._host, headers, 0)
                )
        except UpgradeRefused as error:
            await connection.close()
            raise _read_problem(error.status, error.body) from None
        except (ConnectionBroken, TimeoutError) as error:
            await connection.close()
            raise TryAgain(str(error) or "no answer in time") from error
        try:
            yield stream
        finally:
            await stream.close()

    async def close(self) -> None:
        while self._idle:
            await self._idle.pop().close()

    async def _ask(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        *,
        kind: str = "application/json",
    ) -> Object:
        data = msgspec.json.encode(body) if body is not None else b""
        for attempt in (1, 2):
            proof = await self._login.proof()
            headers = {**proof.headers, **({"Content-Type": kind} if data else {})}
            status, answer = await self._exchange(
                self._head(method, path, query, headers, len(data)), data
            )
            if status == 401 and attempt == 1 and self._login.forget(proof):
                await self.close()  # a connection keeps the certificate that it was made with
                continue
            break
        if status == 401:
            who = f"{self.context.user}, the user of the context {self.context.name}"
            raise ApiServerRefused(
                401,
                "Unauthorized",
                f"Unauthorized: the API server does not let {who}, in; log in anew",
            )
        if status >= 300:
            raise _read_problem(status, answer)
        try:
            found: Object = msgspec.json.decode(answer)
        except msgspec.DecodeError as error:
            raise TryAgain(f"{self.context.server} answered something that is not JSON") from error
        return found

    async def _exchange(self, head: bytes, data: bytes) -> tuple[int, bytes]:
        """One request; over a connection that had gone stale it is sent once more: all of them
        may be repeated.
        """
        async with self._room:
            while True:
                connection, fresh = await self._take()
                try:
                    async with asyncio.timeout(_CALL_S):
                        status, answer, again = await connection.exchange(head, data)
                except ConnectionBroken as error:
                    await connection.close()
                    if fresh:
                        raise TryAgain(str(error)) from error
                    continue
                except TimeoutError:
                    await connection.close()
                    raise TryAgain(
                        f"{self.context.server} did not answer within {_CALL_S:.0f} s"
                    ) from None
                except asyncio.CancelledError:
                    await connection.close()
                    raise
                if again and status != 401:
                    self._idle.append(connection)
                else:
                    await connection.close()
                return status, answer

    async def _take(self) -> tuple[ServerConnection, bool]:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection, False
            await connection.close()
        return await self._connect(), True

    async def _connect(self) -> ServerConnection:
        proof = await self._login.proof()
        try:
            return await ServerEndpoint(
                url=self.context.server,
                tls=proof.tls,
                server_name=self.context.server_name,
                proxy=self.context.proxy,
            ).connect()
        except ConnectionBroken as error:
            raise TryAgain(str(error)) from error

    @property
    def _host(self) -> str:
        return urlsplit(self.context.server).netloc

    def _path(self, path: str) -> str:
        return urlsplit(self.context.server).path.rstrip("/") + path

    def _head(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        headers: Mapping[str, str],
        length: int,
    ) -> bytes:
        text = f"{path}?{urlencode(query, quote_via=quote)}" if query else path
        return make_head(
            method, self._path(text), self._host, {"Accept": "application/json", **headers}, length
        )


class _Said(msgspec.Struct):
    """What an API server answers to what it does not do."""

    message: str = ""
    reason: str = ""


def _read_problem(status: int, body: bytes) -> ApiServerRefused:
    try:
        said = msgspec.json.decode(body, type=_Said)
    except msgspec.DecodeError:
        said = _Said(message=body.decode(errors="replace").strip()[:300])
    return ApiServerRefused(
        status, said.reason, said.message or f"the API server answered {status}"
    )
