"""Who may see the console's pages, and which requests of other sites are refused."""

import asyncio
import logging
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.console_rig import ORIGIN, Browser, CannedClient, listing, sign_in

from cavvy.client import ApiError, account_wire, wire
from cavvy.console import access as access_module
from cavvy.console.access import EachUser, OneUser, is_other_user
from cavvy.frame.discover import find_capabilities

PAGES = (
    "/",
    "/jobs",
    "/jobs/default/train",
    "/machines",
    "/capacity",
    "/costs",
    "/team",
    *(
        re.sub(r"{\w+}", "x", page.path)
        for capability in find_capabilities().capabilities
        for page in capability.pages
    ),
)
MACHINES: dict[str, list[object]] = {
    f"/v1/{each}": [] for each in ("nodes", "machines", "hosts", "joined")
}
OFFERS = {
    "/v1/projects": [],
    "/v1/projects/default/offers": wire.OfferPage(offers=[], total=0),
}


def test_without_a_cookie_every_page_asks_to_sign_in() -> None:
    client = CannedClient({})
    browser = Browser(OneUser(client))
    for page in PAGES:
        answer = browser.get(page, follow_redirects=False)
        assert answer.status_code == 303
        assert answer.headers["location"].startswith("/sign-in?next=")
    assert browser.get("/jobs/default/train/log").status_code == 401
    box = "/machines/default/box"
    actions = [f"/jobs/default/train/{each}" for each in ("stop", "retry")]
    for action in (*actions, *(f"{box}/{each}" for each in ("start", "stop", "keep"))):
        answer = browser.post(action, follow_redirects=False)
        assert answer.headers["location"] == "/sign-in?next=/"
    assert client.asked == []


@pytest.mark.parametrize("key", ["", "x", "é", "a" * 10_000])
def test_a_wrong_key_signs_nobody_in(key: str) -> None:
    browser = Browser(OneUser(CannedClient(MACHINES)))
    answer = browser.get("/sign-in", params={"key": key})
    assert "cavvy console" in answer.text
    assert not browser.cookies
    assert browser.get("/machines", follow_redirects=False).status_code == 303


@pytest.mark.parametrize("form", ["{}", "http://localhost:7/sign-in?key={}", " {} "])
def test_the_printed_address_or_its_key_can_be_pasted(form: str) -> None:
    access = OneUser(CannedClient(MACHINES))
    browser = Browser(access)
    page = browser.get("/machines").text
    assert '<input name="token" type="password"' in page
    data = {"token": form.format(access.secret)}
    answer = browser.post("/sign-in?next=/machines", data=data, follow_redirects=False)
    assert answer.headers["location"] == "/machines"
    assert browser.get("/machines").status_code == 200


@pytest.mark.parametrize("text", ["http://[", "?key=x", "http://localhost/sign-in"])
def test_a_wrong_address_that_is_pasted_signs_nobody_in(text: str) -> None:
    browser = Browser(OneUser(CannedClient(MACHINES)))
    assert browser.post("/sign-in", data={"token": text}).status_code == 403
    assert not browser.cookies


@pytest.mark.parametrize("cookie", ["x", "é", ""])
def test_a_wrong_cookie_signs_nobody_in(cookie: str) -> None:
    browser = Browser(OneUser(CannedClient(MACHINES)))
    header = {b"cookie": f"cavvy-console-default={cookie}".encode()}
    assert browser.get("/machines", headers=header, follow_redirects=False).status_code == 303


def test_the_cookie_is_hidden_from_scripts_and_other_sites() -> None:
    access = OneUser(CannedClient(MACHINES))
    browser = Browser(access)
    answer = browser.get(f"/sign-in?key={access.secret}", follow_redirects=False)
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=lax" in cookie, "a link in a chat must lead to the page"
    assert "max-age" not in cookie, "the server decides how long it is valid"
    assert access.secret not in cookie
    assert browser.get("/machines").status_code == 200


def test_signing_out_ends_the_session_in_every_browser() -> None:
    access = OneUser(CannedClient(MACHINES))
    one, other = Browser(access), Browser(access)
    for browser in (one, other):
        browser.get(f"/sign-in?key={access.secret}", follow_redirects=False)
    one.post("/sign-out", follow_redirects=False)
    for browser in (one, other):
        assert browser.get("/machines", follow_redirects=False).status_code == 303


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": f"{ORIGIN}:8080"},
        {"origin": "null"},
        {"origin": ""},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},  # another port of this host
        {"sec-fetch-site": "none"},
    ],
)
def test_changes_that_another_site_requests_are_refused(headers: dict[str, str]) -> None:
    client = CannedClient({})
    browser = sign_in(client)
    for path in ("/jobs/default/train/stop", "/jobs/default/train/retry", "/sign-out"):
        assert browser.post(path, headers=headers).status_code == 403
    assert client.asked == []


def test_changes_are_not_made_by_links() -> None:
    client = CannedClient({})
    browser = sign_in(client)
    for path in ("/jobs/default/train/stop", "/jobs/default/train/retry", "/sign-out"):
        assert browser.get(path).status_code == 405
    assert client.asked == []


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        ("/jobs?phase=failed", "/jobs?phase=failed"),
        ("//evil.example", "/"),
        ("/\\evil.example", "/"),
        ("https://evil.example/", "/"),
        ("javascript:alert(1)", "/"),
        ("/\t/evil.example", "/"),
        ("jobs", "/"),
        ("", "/"),
    ],
)
def test_signing_in_leads_to_no_other_site(asked: str, shown: str) -> None:
    access = OneUser(CannedClient(MACHINES))
    answer = Browser(access).get(
        "/sign-in", params={"key": access.secret, "next": asked}, follow_redirects=False
    )
    assert answer.headers["location"] == shown


def test_behind_tls_nothing_leads_to_plain_http() -> None:
    browser = sign_in(CannedClient(MACHINES))
    for path in ("/machines/", "/static", "/jobs/"):
        answer = browser.get(path, follow_redirects=False)
        assert (answer.status_code, answer.headers.get("location")) == (404, None)


def test_pages_permit_no_scripts_or_frames_of_others() -> None:
    browser = sign_in(CannedClient(MACHINES))
    for path in ("/machines", "/nope", "/sign-in", "/static/console.js"):
        headers = browser.get(path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
    assert browser.get("/machines").headers["cache-control"] == "no-store"


def test_the_offers_show_pictures_that_run_no_scripts() -> None:
    browser = sign_in(CannedClient(OFFERS))
    shown = re.findall(r'src="(/static/choose-\w+\.svg)\?', browser.get("/offers").text)
    assert len(shown) == 7
    for path in shown:
        answer = browser.get(path)
        assert answer.text.startswith("<svg")
        policy = answer.headers["content-security-policy"]
        assert "style-src 'unsafe-inline'" in policy
        assert "script-src" not in policy
        assert "sandbox" in policy


@pytest.mark.parametrize("path", ["/static/../access.py", "/static/%2e%2e/access.py", "/static/"])
def test_only_the_files_of_pages_are_served(path: str) -> None:
    assert Browser(OneUser(CannedClient({}))).get(path).status_code == 404


class Users:
    """A server that knows two tokens, until one is revoked."""

    def __init__(self) -> None:
        self.clients: list[tuple[str, CannedClient]] = []
        self.known = {"ada", "bob"}

    def connect(self, token: str) -> CannedClient:
        who = account_wire.WhoAmIView(account=token, roles=[])
        refusal = ApiError("unauthorised", "the token is unknown", "create one", 401)
        jobs = wire.JobMatches(jobs=[listing(f"of-{token}")], total=1)

        def check(answer: object) -> object:
            return lambda target: answer if token in self.known else refusal

        answers = {
            "/v1/whoami": check(who),
            "/v1/job-search": check(jobs),
            "/v1/sign-in": [],
            "/v1/projects/default/jobs/train/logs": check(ApiError("x", "gone", "", 404)),
            "/v1/projects": [],
        }
        client = CannedClient(answers)
        if token:  # without one, the sign-in page only asks for the identity providers
            self.clients.append((token, client))
        return client


def test_each_user_sees_what_their_own_token_permits() -> None:
    access = EachUser(Users().connect)
    browsers = {name: Browser(access) for name in ("ada", "bob")}
    for name, browser in browsers.items():
        answer = browser.post("/sign-in?next=/jobs", data={"token": f" {name}\n"})
        assert answer.status_code == 200
        assert f"of-{name}" in answer.text
    assert "of-bob" not in browsers["ada"].get("/jobs").text
    browsers["ada"].post("/sign-out")
    assert browsers["ada"].get("/jobs", follow_redirects=False).status_code == 303
    assert browsers["bob"].get("/jobs").status_code == 200


def test_an_unknown_token_is_refused_with_the_server_s_reason() -> None:
    browser = Browser(EachUser(Users().connect))
    answer = browser.post("/sign-in", data={"token": "eve"})
    assert answer.status_code == 403
    assert "The token is unknown. Create one." in answer.text
    assert "eve" not in answer.text
    assert not browser.cookies
    assert browser.post("/sign-in", data={"token": "x" * 20_000}).status_code == 413


def test_a_token_that_never_arrives_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cavvy.console.app._FORM_S", 0.05)

    async def stall() -> AsyncIterator[bytes]:
        yield b"token="
        await asyncio.sleep(3600)

    answer = Browser(EachUser(Users().connect)).post("/sign-in", content=stall())
    assert answer.status_code == 408
    assert "did not arrive in time" in answer.text


def test_another_site_signs_no_browser_in() -> None:
    users = Users()
    browser = Browser(EachUser(users.connect))
    answer = browser.post(
        "/sign-in", data={"token": "ada"}, headers={"origin": "http://evil.example"}
    )
    assert answer.status_code == 403
    assert users.clients == []
    assert browser.get("/sign-in?key=ada").status_code == 200
    assert not browser.cookies


def test_a_session_ends_when_it_was_not_used_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    moment = 1000.0
    monkeypatch.setattr(access_module.time, "monotonic", lambda: moment)
    access = EachUser(Users().connect)
    cookie = access.sign_in("ada")
    moment += access_module.SESSION_S - 1
    assert access.find(cookie) is not None
    moment += access_module.SESSION_S - 1
    assert access.find(cookie) is not None, "it was used"
    moment += access_module.SESSION_S + 1
    assert access.find(cookie) is None


def test_the_oldest_session_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_module, "_MOST_SESSIONS", 2)
    access = EachUser(Users().connect)
    first, second = access.sign_in("ada"), access.sign_in("ada")
    assert access.find(first) is not None
    third = access.sign_in("bob")
    assert access.find(second) is None
    assert access.find(first) is not None
    assert access.find(third) is not None


def test_a_session_ends_when_the_server_no_longer_accepts_the_token() -> None:
    users = Users()
    access = EachUser(users.connect)
    browsers = {name: Browser(access) for name in ("ada", "bob")}
    for name, browser in browsers.items():
        browser.post("/sign-in?next=/jobs", data={"token": name})
    users.known.remove("ada")
    answer = browsers["ada"].get("/jobs", follow_redirects=False)
    assert answer.headers["location"] == "/sign-in?next=/jobs"
    asked = len(users.clients)
    page = browsers["ada"].get("/jobs").text
    assert "no longer accepts your token: the token is unknown." in page
    assert "no longer accepts" not in browsers["ada"].get("/jobs").text, "it is said once"
    assert len(users.clients) == asked, "a session that has ended asks the server nothing"
    assert "of-bob" in browsers["bob"].get("/jobs").text


def test_the_log_s_updates_end_a_session_too() -> None:
    users = Users()
    browser = Browser(EachUser(users.connect))
    browser.post("/sign-in", data={"token": "ada"}, follow_redirects=False)
    assert browser.get("/jobs/default/train/log").status_code == 404
    users.known.clear()
    assert browser.get("/jobs/default/train/log").status_code == 401
    assert "no longer accepts your token" in browser.get("/jobs").text


@pytest.mark.parametrize(
    "token", ["a\r\nX-Role: admin", "a b", "tökén", "\0", "a" * 2000, "", "a\nb"]
)
def test_text_that_is_no_token_is_not_sent_to_the_server(token: str) -> None:
    users = Users()
    answer = Browser(EachUser(users.connect)).post("/sign-in", data={"token": token})
    assert answer.status_code == 403
    assert "This is not a token" in answer.text
    assert users.clients == []


def test_an_expired_session_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    moment = 1000.0
    monkeypatch.setattr(access_module.time, "monotonic", lambda: moment)
    browser = Browser(EachUser(Users().connect))
    browser.post("/sign-in", data={"token": "ada"}, follow_redirects=False)
    moment += access_module.SESSION_S + 1
    assert "no page was open for 12 hours" in browser.get("/jobs").text


def test_one_user_cannot_end_the_sessions_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_module, "_MOST_EACH", 2)
    access = EachUser(Users().connect)
    bob = access.sign_in("bob")
    cookies = [access.sign_in("ada") for _ in range(5)]
    assert access.find(bob) is not None
    assert [access.find(each) is not None for each in cookies] == [False] * 3 + [True] * 2
    assert "too often" in access.take_reason(cookies[0])


def test_signing_in_again_ends_the_session_before_it() -> None:
    access = EachUser(Users().connect)
    browser = Browser(access)
    browser.post("/sign-in", data={"token": "ada"}, follow_redirects=False)
    (old,) = browser.cookies.jar
    assert old.value is not None
    assert access.find(old.value) is not None
    browser.post("/sign-in", data={"token": "bob"}, follow_redirects=False)
    assert access.find(old.value) is None


def test_a_session_that_waits_keeps_no_connection_open() -> None:
    users = Users()
    closed = list[str]()

    def connect(token: str) -> CannedClient:
        client = users.connect(token)
        client.close = lambda: closed.append(token)  # type: ignore[method-assign]
        return client

    EachUser(connect).sign_in("ada")
    assert closed == ["ada"]


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_pages_of_other_sites_load_nothing_but_follow_links(site: str) -> None:
    client = CannedClient(MACHINES)
    browser = sign_in(client)
    for mode in ("no-cors", "cors", "same-origin", ""):
        headers = {"sec-fetch-site": site, "sec-fetch-mode": mode}
        for path in ("/machines", "/jobs/default/train/log", "/static/console.js"):
            assert browser.get(path, headers=headers).status_code == 403
    assert client.asked == []
    link = {"sec-fetch-site": site, "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    assert browser.get("/machines", headers=link).status_code == 200
    frame = link | {"sec-fetch-dest": "iframe"}
    assert browser.get("/machines", headers=frame).status_code == 403


@pytest.mark.parametrize("host", ["[", "a b", "evil/..", "a:999999", "", "ä", "a:b", "x@y"])
def test_a_request_without_a_valid_host_is_refused(host: str) -> None:
    browser = sign_in(CannedClient(MACHINES))
    answer = browser.get("/machines", headers={b"host": host.encode()})
    assert answer.status_code == 400


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8520", 200),
        ("localhost:9999", 200),  # a forwarded port
        ("[::1]:8520", 200),
        ("evil.example:8520", 421),  # a name that points to this machine
        ("127.0.0.1.evil.example", 421),
        ("localhost.evil.example", 421),
        ("192.168.1.2:8520", 421),
    ],
)
def test_the_console_of_one_user_has_only_local_names(host: str, status: int) -> None:
    browser = Browser(OneUser(CannedClient({})))
    answer = browser.get("/sign-in", headers={"host": host})
    assert answer.status_code == status
    assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_the_console_of_several_users_has_any_name() -> None:
    browser = Browser(EachUser(Users().connect))
    answer = browser.get("/sign-in", headers={"host": "console.example.com"})
    assert answer.status_code == 200


def test_a_page_that_fails_has_the_safe_headers_and_shows_no_details(
    caplog: pytest.LogCaptureFixture,
) -> None:
    browser = sign_in(CannedClient({"/v1/nodes": ValueError("secret")}))
    with caplog.at_level(logging.ERROR):
        answer = browser.get("/machines")
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["cache-control"] == "no-store"


def test_the_log_of_the_console_contains_no_control_characters_of_a_path(
    caplog: pytest.LogCaptureFixture,
) -> None:
    browser = sign_in(CannedClient({}))
    with caplog.at_level(logging.ERROR):
        browser.get("/jobs/a%1b%5b2J/b%0acavvy:%20all%20is%20well")
    (record,) = (each for each in caplog.records if each.name.startswith("cavvy.console"))
    assert "\x1b" not in record.getMessage()
    assert "\n" not in record.getMessage()


@pytest.mark.parametrize("next_page", ["//[", "http://[", "/\n/evil.example", "/\r\nx: y"])
def test_an_invalid_next_page_is_harmless(next_page: str) -> None:
    access = OneUser(CannedClient(MACHINES))
    answer = Browser(access).get(
        "/sign-in", params={"key": access.secret, "next": next_page}, follow_redirects=False
    )
    assert answer.status_code == 303
    location = answer.headers["location"]
    assert location.startswith("/")
    assert not location.startswith(("//", "/\\"))
    assert "\n" not in location
    assert "x" not in answer.headers


def test_an_invalid_origin_is_another_site() -> None:
    browser = sign_in(CannedClient({}))
    answer = browser.post("/jobs/default/train/stop", headers={"origin": "http://["})
    assert answer.status_code == 403


def test_behind_tls_the_cookie_belongs_to_this_host_only() -> None:
    browser = Browser(EachUser(Users().connect))
    headers = {"x-forwarded-proto": "https"}
    answer = browser.post(
        "/sign-in", data={"token": "ada"}, headers=headers, follow_redirects=False
    )
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith("__Host-cavvy-console-")
    assert "; Secure" in cookie
    assert "Path=/;" in cookie
    assert "domain" not in cookie.lower()


def test_one_user_whose_token_has_expired_learns_what_to_do() -> None:
    refusal = ApiError("unauthorised", "the token has expired", "", 401)
    answer = sign_in(CannedClient({"/v1/nodes": refusal})).get("/machines")
    assert answer.status_code == 401
    assert "cavvy login" in answer.text


@pytest.mark.parametrize(
    ("host", "end"),
    [
        ("127.0.0.1", "0100007F:1F40"),
        ("127.0.0.1", "0000000000000000FFFF00000100007F:1F40"),
        ("::1", "00000000000000000000000001000000:1F40"),
    ],
)
def test_connections_of_other_users_are_recognised(tmp_path: Path, host: str, end: str) -> None:
    table = tmp_path / "tcp"
    user, other = os.geteuid(), os.geteuid() + 1

    def ask(user: int, state: str = "01") -> bool:
        line = f" 0: {end} 0100007F:2148 {state} 00000000:00000000 00:00000000 00000000 {user} 0 9"
        table.write_text(f"  sl  local_address rem_address   st\n{line}\n")
        return is_other_user(host, 8000, (str(table),))

    assert ask(other)
    assert not ask(user)
    assert not ask(0), "root may do everything anyway"
    assert not ask(other, "06"), "a closed connection has no user"
    assert not is_other_user(host, 8001, (str(table),))
    assert not is_other_user(host, 8000, (str(tmp_path / "none"),))
    assert not is_other_user("name", 8000, (str(table),))


def test_another_user_of_the_machine_cannot_use_the_printed_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    access = OneUser(CannedClient(MACHINES))
    monkeypatch.setattr("cavvy.console.app.is_other_user", lambda host, port: True)
    browser = Browser(access)
    answer = browser.get(f"/sign-in?key={access.secret}")
    assert answer.status_code == 403
    assert "Another user of this machine" in answer.text
    assert not browser.cookies
