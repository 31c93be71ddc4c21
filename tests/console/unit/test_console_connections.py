"""The console's connections to its server: shared by threads, limited in time, and made again when
the embedded server has ended.
"""

import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.console_rig import Browser, CannedClient, listing, sign_in

from cavvy.client import ApiClient, Patience, Unreachable, account_wire
from cavvy.client.service_wire import list_named_services
from cavvy.client.transport import HttpAnswer
from cavvy.console.access import Access, EachUser, OneUser
from cavvy.console.memory import NOT_RUNNING, PAGE_S, ClientPool, find_embedded


def test_a_sign_in_ends_although_the_server_is_silent() -> None:
    limits = list[float]()

    class TimedClient(CannedClient):
        def send(self, *arguments: object, **named: object) -> HttpAnswer:
            assert self.until is not None
            limits.append(self.until - time.monotonic())
            return super().send(*arguments, **named)  # type: ignore[arg-type]

    who = account_wire.WhoAmIView(account="ada", roles=[])
    EachUser(lambda token: TimedClient({"/v1/whoami": who})).sign_in("ada")
    assert 0 < limits[0] <= PAGE_S


def test_the_pool_keeps_few_connections_and_closes_all_at_the_end() -> None:
    alive = set[int]()

    class Counted(CannedClient):
        def sibling(self) -> "Counted":
            made = Counted(self.answers)
            alive.add(id(made))
            return made

        def close(self) -> None:
            alive.discard(id(self))

    pool = ClientPool(Counted({}))
    lent = list[object]()
    with ExitStack() as stack:
        for _ in range(20):
            lent.append(stack.enter_context(pool.lend()))
        assert len({id(each) for each in lent}) == 20, "each thread has its own"
    assert 0 < len(alive) <= 8
    with pool.lend() as client:
        assert client in lent, "it was kept"
        pool.close()
        assert alive == {id(client)}
    assert alive == set(), "a connection that was lent is closed when it comes back"


def test_connections_come_back_from_many_threads_at_once() -> None:
    pool, barrier = ClientPool(CannedClient({})), threading.Barrier(30)

    def use() -> None:
        for _ in range(50):
            with pool.lend():
                pass
        with pool.lend():
            barrier.wait()

    threads = [threading.Thread(target=use, daemon=True) for _ in range(30)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert not any(each.is_alive() for each in threads)


STOPPED = Unreachable(NOT_RUNNING, "No server is running.", "Start it.")


class EmbeddedServer:
    """A server that gives the answers only after it was started."""

    def __init__(self, answers: dict[str, object]) -> None:
        self.answers: dict[str, object] = dict.fromkeys(answers, STOPPED)
        self.starts = 0
        self._later = answers

    def browser(self, access: Access) -> Browser:
        return Browser(access, self._start)

    def _start(self) -> None:
        self.starts += 1
        self.answers |= self._later


NAVIGATION = {"accept": "text/html,*/*;q=0.8"}


@pytest.mark.parametrize(
    ("headers", "starts"),
    [
        ({"sec-fetch-mode": "navigate"}, 1),
        ({"sec-fetch-mode": "same-origin"}, 0),
        ({"sec-fetch-mode": "cors"} | NAVIGATION, 0),
        (NAVIGATION, 1),  # a browser that sends no such headers
        ({}, 0),
    ],
)
def test_a_user_who_opens_a_page_starts_the_server_but_its_updates_do_not(
    headers: dict[str, str], starts: int
) -> None:
    server = EmbeddedServer(
        {f"/v1/{each}": [] for each in ("nodes", "machines", "hosts", "joined")}
    )
    access = OneUser(CannedClient(server.answers))
    browser = server.browser(access)
    browser.get(f"/sign-in?key={access.secret}", follow_redirects=False)
    answer = browser.get("/machines", headers=headers)
    assert server.starts == starts
    assert answer.status_code == (200 if starts else 502)
    assert starts or "No server is running." in answer.text


def test_forms_start_the_server_too() -> None:
    who = account_wire.WhoAmIView(account="ada", roles=[])
    path = "/v1/projects/default/jobs/train/stop"
    server = EmbeddedServer({"/v1/whoami": who, path: listing(phase="stopping")})
    client = CannedClient(server.answers)
    browser = server.browser(EachUser(lambda token: client))
    answer = browser.post(
        "/sign-in", data={"token": "ada"}, headers=NAVIGATION, follow_redirects=False
    )
    assert (answer.status_code, server.starts) == (303, 1)
    server.answers[path] = STOPPED
    answer = browser.post("/jobs/default/train/stop", headers=NAVIGATION, follow_redirects=False)
    assert (answer.status_code, server.starts) == (303, 2)
    assert client.asked[-2:] == [f"POST {path}"] * 2


def test_without_a_running_server_none_is_found(tmp_path: Path) -> None:
    with pytest.raises(Unreachable) as caught:
        find_embedded(str(tmp_path))()
    assert caught.value.code == NOT_RUNNING


def test_a_page_ends_although_the_server_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cavvy.console.memory.PAGE_S", 0.3)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        client = ApiClient(f"unix:{tmp_path}/s", "token", patience=Patience(3600))
        pool = ClientPool(client)
        for _ in range(2):  # a connection that was lent before has a new limit
            with pool.lend() as lent, pytest.raises(Unreachable, match="timed out"):
                list_named_services(lent)
        pool.close()


def test_a_silent_server_is_named_as_the_cause() -> None:
    lost = Unreachable("connection-lost", "the connection to https://x timed out")
    answer = sign_in(CannedClient({"/v1/nodes": lost})).get("/machines")
    assert answer.status_code == 502
    assert "The server does not answer: the connection to https://x timed out." in answer.text
