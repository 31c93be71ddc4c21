"""What a client says about a server that lacks what the client asks for."""

from collections.abc import Mapping

import pytest
from msgspec.json import encode

from cavvy import __version__
from cavvy.client import ApiClient, wire
from cavvy.client.client import explain_older
from cavvy.client.errors import ApiError, IncompatibleVersions
from cavvy.client.transport import HttpAnswer

NO_ROUTE = ApiError("not-found", "the route /v1/shares does not exist", "", 404)
OTHER = ApiError("invalid-request", "`share` must be a number from 0 to 1,000,000", "", 422)


@pytest.mark.parametrize(
    ("error", "version", "revision", "told"),
    [
        (NO_ROUTE, "0.0.1", 12, "cavvy 0.0.1) is older"),
        (NO_ROUTE, __version__, 12, "revision 12) is older"),
        (NO_ROUTE, __version__, 13, None),
        (NO_ROUTE, "99.0", 1, None),
        (OTHER, "0.0.1", 12, None),
    ],
)
def test_an_older_server_is_named(
    error: ApiError, version: str, revision: int, told: str | None
) -> None:
    body = f'{{"version": "{version}", "revision": {revision}}}'.encode()

    def send(method: str, target: str) -> HttpAnswer:
        return HttpAnswer(status=200, headers={}, body=body)

    found = explain_older(error, "/v1/x", send, 13)
    if told is None:
        assert found is error
    else:
        assert found.code == "server-too-old"
        assert told in found.message
        assert error.message in found.message
        assert "update the server" in found.hint


@pytest.mark.parametrize(("told", "asks"), [("62", False), ("null", False), ("63", True)])
def test_a_server_that_would_ignore_the_new_place_of_a_job_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, told: str, asks: bool
) -> None:
    """An older server reads no body, and would start the job, and its bill, in the old place."""
    sent = list[str]()

    def send(client: ApiClient, method: str, target: str, *_: object, **__: object) -> HttpAnswer:
        sent.append(f"{method} {target}")
        body = b'{"version": "0.1", "revision": %s}' % told.encode()
        return HttpAnswer(status=200, headers={}, body=body)

    monkeypatch.setattr(ApiClient, "send", send)
    client = ApiClient("unix:///nowhere", "token")
    given: list[Mapping[str, object] | None] = [{"providers": ["aws"]}, None, {}]
    for resources in given:
        with pytest.raises(ApiError) as caught:  # the answer is no job
            client.retry("default", "j", resources=resources)
        refused = isinstance(caught.value, IncompatibleVersions)
        assert refused == (bool(resources) and not asks)
        assert (sent.pop() == "GET /v1/server") == refused


def test_a_stop_without_a_reason_lets_a_server_of_any_version_write_its_own() -> None:
    assert encode(wire.StopAsk()) == b"{}"
    assert encode(wire.StopAsk(reason="enough")) == b'{"reason":"enough"}'
