"""The account without sockets: what boto3 would send is handed to the stand-in in the same
thread.
"""

import io
import types
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from botocore.awsrequest import AWSResponse
from botocore.exceptions import ConnectionClosedError
from botocore.loaders import Loader, create_loader
from tests.ec2.server import Front

from cavvy.domain.tasks import Scalar
from cavvy.providers.aws.account import AwsAccount


@cache
def read_descriptions() -> Loader:
    """What botocore knows of each API: megabytes of JSON, which every session would read again."""
    return create_loader()


async def at_once(call: Callable[[], Any]) -> Any:
    """Calls in the loop: no virtual time passes."""
    return call()


class Direct(AwsAccount):
    """The account over a stand-in in the same thread: what boto3 would send is handed over, what
    fails fails there.
    """

    read_attempts = 1  # its pauses would be real ones, in the loop

    def __init__(self, settings: Mapping[str, Scalar], front: Front) -> None:
        super().__init__(settings, at_once)
        self.front = front

    def _get_session_locked(self) -> Any:
        if self._session is None:
            session = super()._get_session_locked()
            session._session.register_component("data_loader", read_descriptions())
        return self._session

    def _client(self, service: str, region: str, attempts: int) -> Any:
        fresh = (service, region, attempts) not in self._clients
        client = super()._client(service, region, attempts)
        if fresh:
            client.meta.events.register("before-send", self._hand_over)
        return client

    def _hand_over(self, request: Any, **_: object) -> Any:
        told: list[Any] = []
        body = request.body.encode() if isinstance(request.body, str) else request.body or b""
        names = {
            f"HTTP_{key.upper().replace('-', '_')}": _text(value)
            for key, value in request.headers.items()
        }
        environ = {
            **names,
            "REQUEST_METHOD": request.method,
            "PATH_INFO": "/",
            "QUERY_STRING": "",
            "SERVER_NAME": "aws",
            "SERVER_PORT": "80",
            "SERVER_PROTOCOL": "HTTP/1.1",
            "wsgi.url_scheme": "http",
            "wsgi.version": (1, 0),
            "wsgi.input": io.BytesIO(body),
            "CONTENT_LENGTH": str(len(body)),
            "wsgi.errors": io.StringIO(),
            "CONTENT_TYPE": names.get("HTTP_CONTENT_TYPE", ""),
            "wsgi.multithread": False,
            "wsgi.multiprocess": False,
            "wsgi.run_once": False,
        }
        try:
            content = b"".join(
                self.front(environ, lambda status, headers: told.append((status, headers)))
            )
        except ConnectionError as error:
            raise ConnectionClosedError(endpoint_url=request.url, error=error) from error
        raw = types.SimpleNamespace(stream=lambda **_: iter([content]), read=lambda *_: content)
        return AWSResponse(request.url, int(told[0][0][:3]), dict(told[0][1]), raw)


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
