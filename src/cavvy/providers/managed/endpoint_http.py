"""Sends requests to managed endpoints. Each request is sent only once, because a repeated request
could do its work twice. Calls run in separate threads, so that slow requests do not delay the
control plane.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

from cavvy.http_client import HttpClient, NoReply
from cavvy.providers.abilities import ReplicaAnswer, ReplicaRequest
from cavvy.providers.base import TryAgain

AT_ONCE = 64  # requests to all endpoints of an account
# the answer to a request that the cloud does not accept now
TOO_MANY = ReplicaAnswer(status=429, headers={"retry-after": "1"}, body=b"")
_HEADERS = ("content-type", "accept")  # of a request, which the container gets


class EndpointThreads:
    """The threads in which the requests to one account's endpoints wait for their answers."""

    def __init__(self, name: str) -> None:
        self._threads = ThreadPoolExecutor(AT_ONCE, name)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, call: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


class EndpointHttp(EndpointThreads):
    """Sends requests to endpoints that require a bearer token. A request times out after `read_s`
    seconds.
    """

    def __init__(self, name: str, read_s: float) -> None:
        super().__init__(name)
        self._http = HttpClient(idle_s=read_s, limit_s=read_s)

    async def post(
        self,
        url: str,
        read_token: Callable[[], str],
        request: ReplicaRequest,
        more: Mapping[str, str] = MappingProxyType({}),
    ) -> ReplicaAnswer:
        """Return the answer, with the names of its headers in lower case. `more` contains
        additional headers for the cloud. `read_token` may block. Raises TryAgain, and the errors of
        `read_token`.
        """
        answer: ReplicaAnswer = await self.run(
            lambda: self._post(url, request, {**more, "authorization": f"Bearer {read_token()}"})
        )
        return answer

    def _post(self, url: str, request: ReplicaRequest, more: Mapping[str, str]) -> ReplicaAnswer:
        headers = {each: request.headers[each] for each in _HEADERS if each in request.headers}
        headers = {"content-type": "application/json", **headers, **more}
        try:
            reply = self._http.send("POST", url, request.body, headers)
        except NoReply as error:
            raise TryAgain(f"no answer from {url}: {error}") from error
        return ReplicaAnswer(status=reply.status, headers=reply.headers, body=reply.body)


def read_error(answer: ReplicaAnswer) -> str | None:
    """Return the error message if the cloud sent the answer, or None if the container sent the
    answer. An error that the cloud itself sends has the format of the cloud's API.
    """
    try:
        told = json.loads(answer.body)["error"]
        return str(told["message"]) if "code" in told else None
    except (ValueError, LookupError, TypeError):
        return None


def keep_content_type(answer: ReplicaAnswer) -> Mapping[str, str]:
    """Return the answer's headers that are passed on to the caller."""
    return {each: answer.headers[each] for each in ("content-type",) if each in answer.headers}
