"""Who may see the console's pages, and which requests of other sites are refused."""

import pytest
from tests.console_rig import Browser, CannedClient, listing, sign_in

from cavvy.client import ApiError, account_wire, wire
from cavvy.console import access as access_module
from cavvy.console.access import EachUser, OneUser

PAGES = ("/", "/jobs", "/jobs/default/train", "/services", "/services/p/s", "/machines", "/costs")
SERVICES = {"/v1/services": []}


def test_without_a_cookie_every_page_asks_to_sign_in() -> None:
    client = CannedClient({})
    browser = Browser(OneUser(client))
    for page in PAGES:
        answer = browser.get(page, follow_redirects=False)
        assert answer.status_code == 303
        assert answer.headers["location"].startswith("/sign-in?next=")
    assert browser.get("/jobs/default/train/log").status_code == 401
    for action in ("stop", "retry"):
        answer = browser.post(f"/jobs/default/train/{action}", follow_redirects=False)
        assert answer.headers["location"] == "/sign-in?next=/"
    assert client.asked == []


@pytest.mark.parametrize("key", ["", "x", "é", "a" * 10_000])
def test_a_wrong_key_signs_nobody_in(key: str) -> None:
    browser = Browser(OneUser(CannedClient(SERVICES)))
    answer = browser.get("/sign-in", params={"key": key})
    assert "cavvy console" in answer.text
    assert not browser.cookies
    assert browser.get("/services", follow_redirects=False).status_code == 303


@pytest.mark.parametrize("cookie", ["x", "é", ""])
def test_a_wrong_cookie_signs_nobody_in(cookie: str) -> None:
    browser = Browser(OneUser(CannedClient(SERVICES)))
    header = {b"cookie": f"cavvy-console-default={cookie}".encode()}
    assert browser.get("/services", headers=header, follow_redirects=False).status_code == 303


def test_the_cookie_is_hidden_from_scripts_and_other_sites() -> None:
    access = OneUser(CannedClient(SERVICES))
    browser = Browser(access)
    answer = browser.get(f"/sign-in?key={access.secret}", follow_redirects=False)
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert access.secret not in cookie
    assert browser.get("/services").status_code == 200


def test_signing_out_ends_the_session_in_every_browser() -> None:
    access = OneUser(CannedClient(SERVICES))
    one, other = Browser(access), Browser(access)
    for browser in (one, other):
        browser.get(f"/sign-in?key={access.secret}", follow_redirects=False)
    one.post("/sign-out", follow_redirects=False)
    for browser in (one, other):
        assert browser.get("/services", follow_redirects=False).status_code == 303


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "http://testserver:8080"},
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
    access = OneUser(CannedClient(SERVICES))
    answer = Browser(access).get(
        "/sign-in", params={"key": access.secret, "next": asked}, follow_redirects=False
    )
    assert answer.headers["location"] == shown


def test_pages_permit_no_scripts_or_frames_of_others() -> None:
    browser = sign_in(CannedClient(SERVICES))
    for path in ("/services", "/nope", "/sign-in", "/static/console.js"):
        headers = browser.get(path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
    assert browser.get("/services").headers["cache-control"] == "no-store"


@pytest.mark.parametrize("path", ["/static/../access.py", "/static/%2e%2e/access.py", "/static/"])
def test_only_the_files_of_pages_are_served(path: str) -> None:
    assert Browser(OneUser(CannedClient({}))).get(path).status_code == 404


class Users:
    """A server that knows two tokens."""

    def __init__(self) -> None:
        self.clients: list[tuple[str, CannedClient]] = []

    def connect(self, token: str) -> CannedClient:
        who = account_wire.WhoAmIView(account=token, roles=[])
        refusal = ApiError("token-unknown", "the token is unknown", "create one", 401)
        known = token in ("ada", "bob")
        answers = {
            "/v1/whoami": who if known else refusal,
            "/v1/jobs": wire.JobPage(jobs=[listing(f"of-{token}")], cursor=None),
            "/v1/projects": [],
        }
        client = CannedClient(answers)
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
    assert "the token is unknown" in answer.text
    assert "eve" not in answer.text
    assert not browser.cookies
    assert browser.post("/sign-in", data={"token": "x" * 20_000}).status_code == 413


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
