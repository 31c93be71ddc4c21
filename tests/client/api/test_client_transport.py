"""The client against a server of a few lines that misbehaves: partial answers, lost connections,
odd errors.
"""

import socket
import threading
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path

import pytest
from tests.waits import PATIENCE_S

from cavvy import __version__
from cavvy.client import (
    ApiClient,
    ApiError,
    ConnectionLost,
    IncompatibleVersions,
    Patience,
    StartFailed,
    Unreachable,
)
from cavvy.client.account_wire import AccountClient, list_keys, list_trusts, list_ways, rotate_key
from cavvy.client.ledger_wire import list_entries, sum_ledger
from cavvy.client.paths import make_id, read_time
from cavvy.client.policy_wire import list_budgets
from cavvy.client.service_wire import list_named_services
from cavvy.client.transport import ClientConnection

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n" + b'{"status":"ok"}'


class Script:
    """Answers each request with the next bytes of a script; b"" closes the connection instead."""

    def __init__(self, path: Path) -> None:
        self.answers: list[list[bytes]] = []
        self.requests: list[bytes] = []
        self.hold = threading.Event()  # answers wait for it
        self.closed = threading.Event()  # a connection was closed
        self.hold.set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                while self._answer(connection):
                    pass
            self.closed.set()

    def _answer(self, connection: socket.socket) -> bool:
        data = b""
        while b"\r\n\r\n" not in data:
            part = connection.recv(65536)
            if not part:
                return False
            data += part
        head, _, body = data.partition(b"\r\n\r\n")
        wanted = int(
            next(
                line for line in head.split(b"\r\n") if line.startswith(b"Content-Length")
            ).split()[1]
        )
        while len(body) < wanted:
            body += connection.recv(65536)
        self.requests.append(head + b"\r\n\r\n" + body)
        self.hold.wait()
        parts = self.answers.pop(0)
        for part in parts:
            connection.sendall(part)
        return bool(parts) and parts[-1] != b""

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Script]:
    made = Script(tmp_path / "s.sock")
    yield made
    made.close()


@pytest.fixture
def client(script: Script, tmp_path: Path) -> Iterator[ApiClient]:
    with ApiClient(f"unix:{tmp_path}/s.sock", "secret-token", timeout_s=5) as made:
        yield made


def test_an_answer_may_come_in_any_pieces(script: Script, client: ApiClient) -> None:
    script.answers = [[OK[n : n + 1] for n in range(len(OK))], [OK]]
    assert client.health().status == "ok"
    assert client.health().status == "ok"
    assert b"Authorization: Bearer secret-token" in script.requests[0]


def test_chunked_answers_are_read(script: Script, tmp_path: Path) -> None:
    script.answers = 2 * [
        [
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
            b"2;x=y\r\nde\r\n0\r\n\r\n",
        ]
    ]
    connection = ClientConnection(f"unix:{tmp_path}/s.sock")
    assert connection.request("GET", "/", {}).body == b"abcde"
    taken: list[tuple[int, bytes]] = []  # of a download through a proxy that cuts it into chunks
    answer = connection.request("GET", "/", {}, take=lambda *piece: taken.append(piece))
    assert (answer.body, taken) == (b"", [(200, b"abcde")])
    connection.close()


def test_a_lost_connection_is_tried_again(script: Script, client: ApiClient) -> None:
    script.answers = [[b"HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n{", b""], [b""], [OK]]
    assert client.health().status == "ok"
    assert len(script.requests) == 3


def test_a_silent_server_is_reported_once_and_waited_for(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cavvy.client.client.QUIET_S", 0.02)
    reported, answer = list[str](), threading.Event()

    def report(text: str) -> None:
        reported.append(text)
        answer.set()

    script.hold = answer
    script.answers = [[OK], [OK]]
    patience = Patience(60, report)
    check_reports(tmp_path, patience, reported, "no answer from the server yet")


def check_reports(folder: Path, patience: Patience, reported: list[str], first: str) -> None:
    """Both requests are answered, and the reports are this one and the end of the wait."""
    with ApiClient(f"unix:{folder}/s.sock", "token", patience=patience) as client:
        assert client.health().status == "ok"
        assert client.health().status == "ok"
    assert [text.split(";")[0] for text in reported] == [first, "the server answers now"]


def test_an_unusable_database_is_reported_once_and_waited_for(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cavvy.client.client.QUIET_S", 1.0)
    monkeypatch.setattr("cavvy.client.client._LONGEST_PAUSE_S", 0.3)
    told = b'{"code": "database-unusable", "message": "it restarts"}'
    refusal = b"HTTP/1.1 503 No\r\nContent-Length: %d\r\n\r\n%b" % (len(told), told)
    script.answers = [*[[refusal]] * 8, [OK], [OK]]
    reported = list[str]()
    patience = Patience(60, reported.append)
    check_reports(tmp_path, patience, reported, "the server cannot use its database yet")


def test_a_request_outlives_a_server_that_dies_again_and_again(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cavvy.client.client._LONGEST_PAUSE_S", 0.01)
    script.answers = [*[[b""]] * 6, [OK]]
    revived = list[int]()

    def revive() -> tuple[str, str]:
        revived.append(1)
        if len(revived) == 2:
            raise StartFailed("server-start-failed", "it was killed")
        return f"unix:{tmp_path}/s.sock", "token"

    with ApiClient(f"unix:{tmp_path}/s.sock", "", revive=revive, patience=Patience(60)) as client:
        assert client.health().status == "ok"
    assert len(revived) == 7


def test_a_server_that_cannot_start_ends_a_request(tmp_path: Path) -> None:
    def revive() -> tuple[str, str]:
        raise StartFailed("settings-invalid", "line 3")

    with (
        ApiClient(f"unix:{tmp_path}/none.sock", "", revive=revive, patience=Patience(60)) as client,
        pytest.raises(StartFailed, match="line 3"),
    ):
        client.health()


def test_what_must_not_happen_twice_is_not_tried_again(script: Script, client: ApiClient) -> None:
    script.answers = [[b""], [OK]]
    with pytest.raises(ConnectionLost):
        client.retry("default", "x")
    assert len(script.requests) == 1


def test_a_connection_closed_while_idle_is_no_loss(script: Script, client: ApiClient) -> None:
    row = b'{"code":"job-done","message":"m","hint":"h"}'
    script.answers = [
        [OK, b""],
        [b"HTTP/1.1 409 Conflict\r\nContent-Length: %d\r\n\r\n%b" % (len(row), row)],
    ]
    client.health()
    assert script.closed.wait(PATIENCE_S)
    with pytest.raises(ApiError) as caught:
        client.retry(
            "default", "x"
        )  # never sent twice, so it must not be sent into a closed connection
    assert caught.value.code == "job-done"


def test_a_submission_is_sent_again_under_the_same_key(script: Script, client: ApiClient) -> None:
    body = b'{"id":"x","project":"p","name":"n","phase":"queued"}'
    script.answers = [
        [b""],
        [b"HTTP/1.1 201 Created\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)],
    ]
    assert client.submit("run: true").created
    keys = [
        line
        for request in script.requests
        for line in request.split(b"\r\n")
        if line.startswith(b"Idempotency-Key")
    ]
    assert len(keys) == 2
    assert keys[0] == keys[1]


def test_errors_carry_what_the_server_said(script: Script, client: ApiClient) -> None:
    body = b'{"code":"job-not-found","message":"no job x","hint":"look","added_later":1}'
    script.answers = [
        [b"HTTP/1.1 404 Not Found\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)]
    ]
    with pytest.raises(ApiError) as caught:
        client.job("default", "x")
    error = caught.value
    assert (error.code, error.message, error.hint, error.status) == (
        "job-not-found",
        "no job x",
        "look",
        404,
    )


def answer_with(status: str, body: bytes = b"", *fields: str) -> list[bytes]:
    lines = [f"HTTP/1.1 {status}", *fields, f"Content-Length: {len(body)}", "", ""]
    return ["\r\n".join(lines).encode() + body]


PAGE = b"<html>\r\n<head><title>413 Too\x1b[31m\r\nLarge</title></head>\r\n<body>nginx</body>\r\n</html>"
HTML = "Content-Type: text/html; charset=utf-8"


@pytest.mark.parametrize(
    ("answer", "code", "message", "hint"),
    [
        (
            answer_with("413 Whatever", PAGE, HTML),
            "http-413",
            f"413 {HTTPStatus(413).phrase}, '413 Too [31m Large'",
            "client_max_body_size",
        ),
        (
            answer_with("302 Found", PAGE, HTML, "Location: https://login.example/?next=/"),
            "http-302",
            "302 Found, a redirect to https://login.example/?next=/",
            "cavvy context list",
        ),
        (
            answer_with("200 OK", b"<title>Sign in</title>", HTML),
            "http-200",
            "200 OK, 'Sign in'",
            "proxy",
        ),
        (answer_with("418 Tea"), "http-418", f"418 {HTTPStatus(418).phrase}", "proxy"),
        (answer_with("502 Bad Gateway", b"<ow!>"), "http-502", "502 Bad Gateway, '<ow!>'", "proxy"),
    ],
)
def test_an_answer_of_another_program_is_explained_in_one_line(
    script: Script, client: ApiClient, answer: list[bytes], code: str, message: str, hint: str
) -> None:
    """Such as of a proxy that demands a sign-in, or refuses a large upload."""
    script.answers = [answer] * 9
    with pytest.raises(ApiError) as caught:
        client.server()
    assert caught.value.code == code
    assert caught.value.message == f"another program answered instead of the server: {message}"
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    "ask",
    [
        ApiClient.server,
        list_budgets,
        list_named_services,
        lambda client: sum_ledger(client, ["job"]),
        lambda client: list(list_entries(client)),
        lambda client: AccountClient(client).whoami(),
        lambda client: AccountClient(client).create_project("p", None),
        list_ways,
        list_trusts,
        list_keys,
        rotate_key,
    ],
)
def test_an_answer_that_the_api_never_gives_is_an_error(
    script: Script, client: ApiClient, ask: Callable[[ApiClient], object]
) -> None:
    script.answers = [answer_with("200 OK", b'{"ok":true}', "Content-Type: application/json")]
    with pytest.raises(ApiError, match="not one of a server of Cavvy") as caught:
        ask(client)
    assert caught.value.code == "answer-unknown"


@pytest.mark.parametrize("status", ["502 Bad Gateway", "503 Service Unavailable", "504 Late"])
def test_a_restart_behind_a_proxy_is_waited_for(
    script: Script, client: ApiClient, status: str
) -> None:
    """A proxy answers with such an error while the server restarts."""
    script.answers = [answer_with(status, b"<h1>nginx</h1>", HTML)] * 2 + [[OK]]
    client.health()
    assert len(script.requests) == 3


def test_a_request_that_must_not_be_repeated_is_not_repeated_after_an_error_of_a_proxy(
    script: Script, client: ApiClient
) -> None:
    """The server may have processed it."""
    script.answers = [answer_with("504 Late", b"<h1>nginx</h1>", HTML), [OK]]
    with pytest.raises(ApiError, match="504 Gateway Timeout"):
        client.retry("default", "x")
    assert len(script.requests) == 1


def test_nobody_there(tmp_path: Path) -> None:
    with (
        ApiClient(f"unix:{tmp_path}/none.sock", "") as client,
        pytest.raises(Unreachable, match="no server answers"),
    ):
        client.health()


@pytest.mark.parametrize("scheme", ["HTTPS", "Https"])
def test_a_scheme_in_capitals_never_sends_the_token_in_clear_text(scheme: str) -> None:
    received = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            connection, _ = listener.accept()
            with connection:
                received.append(connection.recv(65536))

        thread = threading.Thread(target=accept)
        thread.start()
        connection = ClientConnection(f"{scheme}://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises((Unreachable, ConnectionLost)):
            connection.request("GET", "/v1/server", {"Authorization": "Bearer secret-token"})
        thread.join()
    assert received[0][:1] == b"\x16"  # the type of a TLS handshake record (RFC 8446, 5.1)
    assert b"secret-token" not in received[0]


@pytest.mark.parametrize("address", ["ftp://127.0.0.1:1", "127.0.0.1:1", "https:127.0.0.1:1"])
def test_an_address_of_another_form_is_not_contacted(address: str) -> None:
    with pytest.raises(Unreachable, match="must begin with"):
        ClientConnection(address).request("GET", "/v1/server", {})


def test_names_are_quoted(script: Script, client: ApiClient) -> None:
    script.answers = [[b"HTTP/1.1 204 No Content\r\n\r\n"]]
    client.delete_secret("a b ü", "x?y")
    assert script.requests[0].startswith(
        b"DELETE /v1/projects/a%20b%20%C3%BC/secrets/x%3Fy HTTP/1.1\r\n"
    )


def test_ids_sort_by_time_and_tell_it() -> None:
    ids = [
        make_id(now, noise)
        for now, noise in ((1.0, b"\xff" * 4), (1.001, b"\0" * 4), (1.7e9, b"\x80" * 4))
    ]
    assert ids == sorted(ids)
    assert [read_time(job_id) for job_id in ids] == [1.0, 1.001, 1.7e9]
    assert read_time("not-an-id") is None
    assert read_time(ids[0].replace("0", "u")) is None


def _answer(status: str, body: bytes) -> list[bytes]:
    return [b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n" % (status.encode(), len(body)), body]


@pytest.mark.parametrize("code", ["not-found", "invalid-task"])
def test_a_refusal_of_an_older_server_names_both_versions(
    code: str, script: Script, client: ApiClient
) -> None:
    refusal = _answer("404 Not Found", b'{"code":"%s","message":"m","hint":"h"}' % code.encode())
    script.answers = [refusal, _answer("200 OK", b'{"version":"0.0.9"}')]
    with pytest.raises(ApiError) as caught:
        client.health()
    told = f"{caught.value.message} {caught.value.hint}"
    assert "0.0.9" in told
    assert __version__ in told
    assert isinstance(caught.value, IncompatibleVersions) == (code == "not-found")


def test_a_refusal_of_a_server_of_this_version_stays_as_it_is(
    script: Script, client: ApiClient
) -> None:
    refusal = _answer("404 Not Found", b'{"code":"not-found","message":"m","hint":"h"}')
    for version in (_answer("200 OK", b'{"version":"%s"}' % __version__.encode()), refusal):
        script.answers = [refusal, version]
        with pytest.raises(ApiError) as caught:
            client.health()
        assert (caught.value.code, caught.value.message, caught.value.hint) == (
            "not-found",
            "m",
            "h",
        )
