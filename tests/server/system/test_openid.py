"""Sign-ins with a real OpenID server: the device flow of a terminal, roles by groups, and what is
refused.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.console.system.test_console import start_console
from tests.system.chromium import Tab, chromium
from tests.system.openid import OpenIdServer, sign_in_with_browser, start_openid_server
from tests.system.ports import free_port
from tests.system.trust import User, user_at

from cavvy.client import ApiError
from cavvy.client.device_flow import sign_in_by_device

pytestmark = pytest.mark.system
GRANT = "urn:ietf:params:oauth:grant-type:device_code"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def provider(tmp_path: Path) -> OpenIdServer:
    provider = start_openid_server(tmp_path)
    ada = {"email": "ada@example.com", "email_verified": True, "groups": ["vision-team"]}
    ben = {"email": "ben@example.com", "email_verified": False, "groups": ["platform"]}
    provider.people = {"ada": ada, "ben": ben}
    provider.save()
    return provider


def get_id_token(provider: OpenIdServer, login: str, client: str = "cavvy") -> str:
    def show(url: str, code: str) -> None:
        assert code in url
        sign_in_with_browser(url, login)

    return sign_in_by_device(provider.url, client, show, wait=lambda seconds: None)


def login(user: User, url: str, id_token: str, code: int = 0) -> str:
    """Sign in with an ID token, as a job of a CI system does."""
    user.variables["CAVVY_ID_TOKEN"] = id_token
    try:
        return user.cli("login", url, code=code)
    finally:
        del user.variables["CAVVY_ID_TOKEN"]


def test_people_sign_in_with_an_openid_server(
    tmp_path: Path, stack: ExitStack, provider: OpenIdServer
) -> None:
    root, ada = (stack.enter_context(user_at(tmp_path / name)) for name in "ra")
    root.settings("[providers.local]\n")
    url = f"http://127.0.0.1:{free_port()}"
    root.cli("server", "start", "--listen", url.removeprefix("http://"))
    root.cli("project", "create", "vision")
    add = ("trust", "add", "company", "--issuer", provider.url, "--client-id", "cavvy")
    add = (*add, "--account-claim", "email", "--lifetime", "12h", "--group", "platform=admin")
    root.cli(*add, "--group", "vision-team=member:vision")

    # The device flow: a terminal shows a URL and a code, and waits for a browser elsewhere.
    command = ada.start("login", url)
    assert command.stderr is not None
    words = command.stderr.readline().split()
    assert "Sign-in Success" in sign_in_with_browser(words[1], "ada")
    out, err = command.communicate(timeout=60)
    assert command.returncode == 0, err
    assert words[-1] in words[1]  # the code
    assert f"signed in to {url} as ada@example.com until" in out
    assert ada.json("ps", "-p", "vision") == []
    (listed,) = ada.json("token", "list")
    assert (listed["label"], listed["account"]) == ("sign-in by company", "ada@example.com")
    assert listed["expires_at"]
    assert listed["last_used_at"]
    assert "company" in root.cli("role", "list", "-p", "vision")

    # An ID token is good once, for the client that it was made for, and as long as it says.
    token = get_id_token(provider, "ada")
    assert "signed in" in login(ada, url, token)
    assert "used before" in login(ada, url, token, code=1)
    root.cli(*add[:2], "old", *add[3:6], "expired", *add[7:])
    assert "has expired" in login(ada, url, get_id_token(provider, "ada", "expired"), code=1)
    assert "another audience" in login(ada, url, get_id_token(provider, "ada", "other"), code=1)
    assert "not verified" in login(ada, url, get_id_token(provider, "ben"), code=1)

    check_job(provider, root, url, stack.enter_context(user_at(tmp_path / "c")))
    check_groups(provider, root, ada, url)
    check_revoked(provider, root, ada, url)


FILL_IN = """(() => {
  if (document.readyState !== 'complete') return false;
  if (document.body.innerText.includes('Sign-in Success')) return true;
  const form = document.forms[0];
  if (!form || window.isSent) return false;
  window.isSent = true;
  if (form.elements.login) [form.elements.login.value, form.elements.password.value] = ['%s', 'any'];
  form.submit();
  return false;
})()"""


def test_a_browser_signs_in_to_a_shared_console(
    tmp_path: Path, stack: ExitStack, provider: OpenIdServer
) -> None:
    root = stack.enter_context(user_at(tmp_path / "r"))
    root.settings("[providers.local]\n")
    url, port = f"http://127.0.0.1:{free_port()}", free_port()
    root.cli("server", "start", "--listen", url.removeprefix("http://"))
    root.cli("project", "create", "vision")
    root.cli("project", "create", "speech")
    add = ("trust", "add", "company", "--issuer", provider.url, "--client-id", "cavvy")
    add = (*add, "--account-claim", "email", "--lifetime", "12h")
    root.cli(*add, "--group", "vision-team=viewer:vision")
    start_console(root, "--listen", f"127.0.0.1:{port}")
    site = f"http://localhost:{port}"
    (tmp_path / "browser").mkdir()
    tab = stack.enter_context(chromium(tmp_path / "browser"))

    def begin(page: str) -> str:
        """Choose the provider; the address where the code of this browser is confirmed."""
        tab.open(site + page)
        tab.evaluate("document.querySelector('[name=way]').click()")
        tab.wait("document.querySelector('main a[target]') !== null")
        assert tab.evaluate("document.querySelector('.code').innerText").strip()
        return str(tab.evaluate("document.querySelector('main a[target]').href"))

    def confirm(address: str, name: str) -> None:
        """Fill in and send the forms of the provider until it has no more."""
        tab.open(address)
        tab.wait(FILL_IN % name)

    wanted = begin("/costs?by=user")
    confirm(wanted, "ada")
    tab.open(f"{site}/sign-in/wait?next=/costs%3Fby%3Duser")
    tab.wait("location.pathname === '/costs' && location.search === '?by=user'")
    tab.open(f"{site}/team")
    shown = tab.evaluate("document.querySelector('main').innerText")
    assert "You are ada@example.com" in shown
    assert "vision" in shown
    assert "speech" not in shown
    check_roles_end(root, tab, site)
    confirm(begin("/"), "ben")
    tab.open(f"{site}/sign-in/wait")
    tab.wait("document.querySelector('[role=alert]')?.innerText.includes('not verified')")


def check_roles_end(root: User, tab: Tab, site: str) -> None:
    """A person whose account is disabled is signed out, and the pages say why."""
    root.cli("user", "disable", "ada@example.com")
    tab.open(f"{site}/jobs")
    assert tab.evaluate("location.pathname") == "/sign-in"
    assert "is disabled" in tab.evaluate("document.querySelector('[role=alert]').innerText")
    root.cli("user", "enable", "ada@example.com")
    tab.call("Network.clearBrowserCookies")


def check_job(provider: OpenIdServer, root: User, url: str, job: User) -> None:
    """An ID token with the claims of a trust acts for a service account, within its limits."""
    root.cli("user", "add", "ci", "--service")
    root.cli("role", "grant", "ci", "member", "-p", "vision")
    add = ("trust", "add", "jobs", "--issuer", provider.url, "--audience", "other")
    add = (*add, "--account", "ci", "--scope", "view", "-p", "vision")
    assert "must restrict" in root.cli(*add, code=2)
    root.cli(*add, "--claim", "email=*@build.example.com")
    assert "no trust accepts the token's email" in login(
        job, url, get_id_token(provider, "ada", "other"), 1
    )
    provider.people["robot"] = {"email": "train@build.example.com"}
    provider.save()
    told = login(job, url, get_id_token(provider, "robot", "other"))
    assert f"signed in to {url} as ci until" in told
    assert job.json("ps", "-p", "vision") == []
    task = job.task("{name: t, run: 'true'}")
    assert "does not permit `run`" in job.cli("run", task, "-p", "vision", "--yes", code=1)


def check_groups(provider: OpenIdServer, root: User, ada: User, url: str) -> None:
    """Each sign-in takes over the groups, also one with a token that the provider has refreshed."""
    asked = provider.post(
        "/device/auth", client_id="cavvy", scope="openid email groups offline_access"
    )
    sign_in_with_browser(asked["verification_uri_complete"], "ada")
    device = {"grant_type": GRANT, "device_code": asked["device_code"]}
    made = provider.post("/token", client_id="cavvy", **device)
    provider.people["ada"]["groups"] = []
    provider.save()
    refresh = {"client_id": "cavvy", "grant_type": "refresh_token"}
    made = provider.post("/token", **refresh, refresh_token=made["refresh_token"])
    assert "has no role yet" in login(ada, url, made["id_token"])
    assert "no project" in ada.cli("ps", "-p", "vision", code=1)
    provider.people["ada"]["groups"] = ["platform"]
    provider.save()
    made = provider.post("/token", **refresh, refresh_token=made["refresh_token"])
    login(ada, url, made["id_token"])
    assert "ada@example.com" in ada.cli("user", "list")  # which only an admin may
    del provider.people["ada"]
    provider.save()
    gone = provider.post("/token", **refresh, refresh_token=made["refresh_token"])
    assert gone["error"] == "invalid_grant"
    with pytest.raises(ApiError):
        get_id_token(provider, "ada")
    provider.people["ada"] = {"email": "ada@example.com", "groups": ["vision-team"]}
    provider.save()


def check_revoked(provider: OpenIdServer, root: User, ada: User, url: str) -> None:
    """An admin ends what a person may do, though the provider still knows the person."""
    root.cli("user", "disable", "ada@example.com")
    assert "is disabled" in ada.cli("ps", code=1)
    assert "is disabled" in login(ada, url, get_id_token(provider, "ada"), code=1)
    root.cli("user", "enable", "ada@example.com")
    login(ada, url, get_id_token(provider, "ada"))
    assert ada.json("ps", "-p", "vision") == []
    assert [each["name"] for each in root.json("trust", "list")] == ["company", "jobs", "old"]
    root.cli("trust", "remove", "company")
    assert "does not belong" in ada.cli("ps", code=1)
    told = [each["action"] for each in root.json("audit", "list")]
    assert {"POST /v1/sign-in", "POST /v1/trusts", "DELETE /v1/trusts/{trust}"} <= set(told)
