"""A client of one API server: reads, writes and watches objects, and runs commands in pods."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from cavvy.providers.base import NoCapacity, ProviderError, Refused, TryAgain
from cavvy.providers.kubernetes.kubeconfig import KubeContext, KubeLogin
from cavvy.providers.kubernetes.wire import (
    ConnectionBroken,
    ServerConnection,
    ServerEndpoint,
    UpgradeRefused,
    WebSocket,
    make_head,
    upgrade_headers,
)

Object = dict[str, Any]  # an API object as parsed from JSON; only this package reads its fields
Query = Mapping[str, str] | Sequence[tuple[str, str]]

_CALL_S = 30.0
_AT_ONCE = 16  # maximum number of concurrent connections, not counting streams
_EXEC = "v4.channel.k8s.io"
_LATER = frozenset({408, 410, 425, 429, 500, 502, 503, 504})


class ApiServerRefused(Exception):
    """Raised if the API server refused a request; `reason` is the server's code, such as
    AlreadyExists."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason

    @property
    def provider_error(self) -> ProviderError:
        """The error of the provider interface that corresponds to this API server error."""
        text = str(self)
        # Two pods that use one quota at the same time can cause a Conflict, which is temporary.
        if self.status in _LATER or self.reason == "Conflict":
            return TryAgain(text)
        if self.status == 403 and "exceeded quota" in text:
            return NoCapacity(text)
        return Refused(text)


class KubernetesApi:
    """Calls the API server of one context as one user. Methods raise ApiServerRefused, TryAgain and
    Refused.
    """

    def __init__(self, context: KubeContext, login: KubeLogin) -> None:
        self.context = context
        self._login = login
        self._idle: list[ServerConnection] = []
        self._slots = asyncio.Semaphore(_AT_ONCE)

    async def get(self, path: str, query: Query = ()) -> Object:
        return await self._ask("GET", path, query)

    async def items(self, path: str, query: Query = ()) -> list[Object]:
        """Return all objects of the list at `path`."""
        found: list[Object] = (await self.get(path, query)).get("items") or []
        return found

    async def find(self, path: str) -> Object | None:
        """Return the object, or None if it does not exist."""
        return await self._try("GET", path)

    async def make(self, path: str, body: Object, *, dry_run: bool = False) -> Object | None:
        """Create an object and return it, or return None if the name is taken."""
        trial = {"dryRun": "All", "fieldValidation": "Strict"}
        return await self._try("POST", path, body, trial if dry_run else ())

    async def patch(self, path: str, body: Object) -> Object | None:
        """Apply a merge patch to the object and return it, or return None if it does not exist."""
        return await self._try("PATCH", path, body)

    async def drop(self, path: str, body: Object | None = None) -> None:
        """Delete the object; do nothing if it does not exist."""
        await self._try("DELETE", path, body)

    async def watch(self, path: str, query: Mapping[str, str]) -> AsyncIterator[Object]:
        """Yield the changes of the objects of a list until the server ends the watch. Raises
        TryAgain if the connection breaks.
        """
        head = await self._head("GET", path, {**query, "watch": "true"})
        connection = await self._connect()
        try:
            async for status, line in connection.lines(head):
                if status != 200:
                    raise _read_problem(status, line)
                if line.strip():
                    yield msgspec.json.decode(line)
        except (ConnectionBroken, msgspec.DecodeError) as error:
            raise TryAgain(f"{self.context.cluster.server}: {error}") from error
        finally:
            await connection.close()

    @asynccontextmanager
    async def run(
        self, pod: str, container: str, command: Sequence[str]
    ) -> AsyncIterator[WebSocket]:
        """Run a command in a pod. Channel 0 of the stream is stdin, 1 is stdout and 2 is stderr;
        channel 3 carries the exit status.
        """
        query = [("command", word) for word in command]
        query += [("container", container), ("stdin", "true"), ("stdout", "true")]
        path = f"/api/v1/namespaces/{self.context.namespace}/pods/{pod}/exec"
        head = await self._head(
            "GET", path, [*query, ("stderr", "true")], headers=upgrade_headers(_EXEC)
        )
        connection = await self._connect()
        try:
            async with asyncio.timeout(_CALL_S):
                stream = await connection.upgrade(head)
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

    async def _try(
        self, method: str, path: str, body: Object | None = None, query: Query = ()
    ) -> Object | None:
        """Return the answer, or None if the object does not exist or, for POST, already exists."""
        try:
            return await self._ask(method, path, query, body)
        except ApiServerRefused as error:
            if error.reason == "AlreadyExists" if method == "POST" else error.status == 404:
                return None
            raise

    async def _ask(
        self, method: str, path: str, query: Query = (), body: Object | None = None
    ) -> Object:
        data = msgspec.json.encode(body) if body is not None else b""
        for attempt in (1, 2):
            proof = await self._login.proof()
            status, answer = await self._exchange(
                await self._head(method, path, query, len(data)), data
            )
            if status != 401 or attempt == 2 or not self._login.forget(proof):
                break
            # an open connection would continue to use the old client certificate
            await self.close()
        if status == 401:
            raise ApiServerRefused(
                401,
                "Unauthorized",
                f"the API server rejected the credentials of {self.context.user}, the user of the "
                f"context {self.context.name}; log in again",
            )
        if status >= 300:
            raise _read_problem(status, answer)
        try:
            found: Object = msgspec.json.decode(answer)
        except msgspec.DecodeError as error:
            raise TryAgain(
                f"{self.context.cluster.server} sent a response that is not JSON"
            ) from error
        return found

    async def _exchange(self, head: bytes, data: bytes) -> tuple[int, bytes]:
        """Send one request. If a reused connection was stale, the request is sent again, which is
        safe because all requests are idempotent.
        """
        async with self._slots:
            while True:
                kept = await self._take()
                connection = kept or await self._connect()
                reusable = False
                try:
                    async with asyncio.timeout(_CALL_S):
                        status, answer, reusable = await connection.exchange(head, data)
                    return status, answer
                except ConnectionBroken as error:
                    if not kept:
                        raise TryAgain(str(error)) from error
                except TimeoutError:
                    raise TryAgain(
                        f"{self.context.cluster.server} did not answer within {_CALL_S:.0f} s"
                    ) from None
                finally:
                    if reusable and status != 401:
                        self._idle.append(connection)
                    else:
                        await connection.close()

    async def _take(self) -> ServerConnection | None:
        """Return an idle connection that still works, or None."""
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
            await connection.close()
        return None

    async def _connect(self) -> ServerConnection:
        context, proof = self.context, await self._login.proof()
        endpoint = ServerEndpoint(
            url=context.cluster.server,
            tls=proof.tls,
            server_name=context.cluster.tls_server_name,
            proxy=context.cluster.proxy_url,
        )
        try:
            return await endpoint.connect()
        except ConnectionBroken as error:
            raise TryAgain(str(error)) from error

    async def _head(
        self,
        method: str,
        path: str,
        query: Query = (),
        length: int = 0,
        headers: Mapping[str, str] = {},
    ) -> bytes:
        server, proof = urlsplit(self.context.cluster.server), await self._login.proof()
        text = f"?{urlencode(query, quote_via=quote)}" if query else ""
        # With `Accept: application/json`, the API server would refuse an upgrade with the status
        # 406.
        fields = {**proof.headers, **(headers or {"Accept": "application/json"})}
        if length:
            kind = "merge-patch+json" if method == "PATCH" else "json"
            fields["Content-Type"] = f"application/{kind}"
        return make_head(
            method, server.path.rstrip("/") + path + text, server.netloc, fields, length
        )


class _ErrorStatus(msgspec.Struct):
    """The body of an error response."""

    message: str = ""
    reason: str = ""


def _read_problem(status: int, body: bytes) -> ApiServerRefused:
    try:
        found = msgspec.json.decode(body, type=_ErrorStatus)
    except msgspec.DecodeError:
        found = _ErrorStatus(message=body.decode(errors="replace").strip()[:300])
    return ApiServerRefused(
        status, found.reason, found.message or f"the API server answered {status}"
    )
