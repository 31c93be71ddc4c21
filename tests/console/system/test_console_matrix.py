"""Every page of the console in a real browser: wide and on a phone, light and dark, by keyboard, to
people who are signed out, and to a member of another project.
"""

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote, urlsplit

import msgspec
import pytest
from starlette.routing import Route
from tests.console.system.test_console import start_console
from tests.console.system.test_console_stories import Reader, axe, fill
from tests.own_parts import read_own
from tests.system.chromium import Tab, chromium
from tests.system.ports import free_port
from tests.system.trust import User, serving_user_at, user_at

from cavvy.client import ApiClient
from cavvy.console.access import OneUser
from cavvy.console.app import Console
from cavvy.domain.machines import NamedMachine
from cavvy.domain.tasks import TaskSpec
from cavvy.store.base import AtomicWrite
from cavvy.store.open import open_store

pytestmark = pytest.mark.system
__all__ = ["axe"]  # a fixture
OWN = [*read_own("console_rows")]  # what capabilities have on the console
# the pages whose address names a project as a field
OF_PROJECT = {"/compare", "/submit", *(page for own in OWN for page in own.OF_PROJECT)}
# the pages of these that are lists
LISTS = [page for own in OWN for page in {*own.PAGES} - OF_PROJECT if "{" not in page]
VIEWS = [(width, scheme) for width in (390, 1280) for scheme in ("dark", "light")]
JOBS = 200  # besides those of the fixture; the stories have 10,000
# Routes that are no pages: parts of pages, and signing in, which has its own tests.
NO_PAGES = {
    "/jobs/{project}/{name}/log",
    "/jobs/{project}/{name}/log.txt",
    "/submit/keys",
    "/sign-in",
    "/sign-in/wait",
    *(path for own in OWN for path in own.DATA),
}
SIGN_IN = {"/sign-in", "/sign-in/with", "/sign-out"}
ARRAY = """\
name: zebra-fits
after: zebra-rows:any
params: {lr: 0.1}
sweep: {lr: [0.1, 0.2, 0.3]}
run: 'true'
"""


async def fill_machine(home: Path) -> None:
    """Write a stopped machine, and what capabilities have."""
    store = open_store(f"sqlite:///{home / 'cavvy.db'}")
    await store.open()
    for own in OWN:
        await own.fill(store)
    machine = NamedMachine(
        project="vision",
        name="zebra-box",
        task=TaskSpec(name="zebra-box", project="vision", run="true"),
    )
    await store.commit(AtomicWrite(machines=[machine]))
    await store.close()


class Site(msgspec.Struct):
    """A shared console of ada, who may do everything, and ben, who may see another project."""

    url: str
    tokens: Mapping[str, str]
    ada: User
    night: str  # the ID of a job in the project vision
    array: str

    def pages(self) -> Mapping[str, str]:
        """An address for each page that has things of the project vision."""
        job = f"/jobs/vision/{self.night}"
        return {
            **{page: page for page in ("/", "/services", "/machines", "/costs")},
            **{page: page for page in ("/capacity", "/queue", "/audit")},
            "/jobs": "/jobs?sort=name&way=down",
            "/jobs/{project}/{name}": job,
            "/jobs/{project}/{name}/whole-log": f"{job}/whole-log?times=1",
            "/groups": "/groups",
            "/groups/{project}/{name}": f"/groups/vision/{self.array}",
            "/services/{project}/{name}": "/services/vision/chat",
            "/services/{project}/{name}/try": "/services/vision/chat/try",
            "/offers": "/offers?gpu=H100",
            "/team": "/team?project=vision",
            "/compare": f"/compare?a=vision/{self.night}&b=vision/zebra-fits.0",
            "/submit": "/submit?from=vision/zebra-rows",
            **{page: path for own in OWN for page, path in own.PAGES.items()},
        }

    def changes(self) -> Mapping[str, tuple[str, Mapping[str, str]]]:
        """For each action, its address in the project vision, and the fields of its form."""
        job, group = f"/jobs/vision/{self.night}", f"/groups/vision/{self.array}"
        chat, box = "/services/vision/chat", "/machines/vision/zebra-box"
        return {
            "/submit": (
                "/submit",
                {"do": "run", "project": "vision", "text": "name: x\nrun: 'true'\n"},
            ),
            "/jobs": ("/jobs", {"do": "remove", "job": f"vision/{self.night}"}),
            "/groups": ("/groups", {"do": "stop", "group": f"vision/{self.array}"}),
            "/services": ("/services", {"do": "end", "service": "vision/chat"}),
            "/machines": ("/machines", {"do": "stop", "machine": "vision/zebra-box"}),
            "/budgets": ("/budgets", {"name": "zebra-new", "limit": "5", "project": "vision"}),
            "/budgets/{name}/remove": ("/budgets/zebra-budget/remove", {}),
            "/team/{project}/secrets": (
                "/team/vision/secrets",
                {"name": "ZEBRA_KEY", "value": "x"},
            ),
            "/team/{project}/secrets/{name}/remove": ("/team/vision/secrets/ZEBRA_KEY/remove", {}),
            "/team/{project}/policy": ("/team/vision/policy", {"max_gpus": "0"}),
            "/machines/{project}/{name}/start": (f"{box}/start", {"do": "agree"}),
            "/machines/{project}/{name}/stop": (f"{box}/stop", {}),
            "/machines/{project}/{name}/keep": (f"{box}/keep", {"keep": "1h"}),
            "/jobs/{project}/{name}/stop": (f"{job}/stop", {}),
            "/jobs/{project}/{name}/retry": (f"{job}/retry", {}),
            "/groups/{project}/{name}/stop": (f"{group}/stop", {}),
            "/groups/{project}/{name}/retry": (f"{group}/retry", {}),
            "/groups/{project}/{name}/remove": (f"{group}/remove", {}),
            "/services/{project}/{name}/end": (f"{chat}/end", {}),
            "/services/{project}/{name}/try": (f"{chat}/try", {"method": "GET", "path": "/"}),
            "/services/{project}/{name}/retry": (f"{chat}/retry", {}),
            "/services/{project}/{name}/calls/{call}/retry": (f"{chat}/calls/zebra-call/retry", {}),
            **{action: change for own in OWN for action, change in own.CHANGES.items()},
        }


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with ExitStack() as stack:
        folder = tmp_path_factory.mktemp("matrix")
        root = stack.enter_context(serving_user_at(folder / "root"))
        ada = stack.enter_context(user_at(folder / "ada"))
        root.settings("[providers.local]\n")
        night = asyncio.run(fill(root.home, JOBS))
        asyncio.run(fill_machine(root.home))
        url = f"http://127.0.0.1:{free_port()}"
        root.cli("server", "start", "--listen", url.removeprefix("http://"))
        token = root.output("server", "init", "--admin", "ada").split()[-1]
        ada.cli("login", url, "--token", token)
        for project in ("vision", "speech"):
            ada.cli("project", "create", project)
        ada.cli("user", "add", "ben")
        ada.cli("role", "grant", "ben", "viewer", "-p", "speech")
        tokens = {"ada": token, "ben": ada.output("token", "create", "--user", "ben").strip()}
        ada.cli("secret", "set", "ZEBRA_KEY", "-p", "vision", stdin="zebra-value")
        ada.cli("budget", "set", "zebra-budget", "5000", "--project", "vision")
        ada.submit("name: zebra-rows\nrun: 'true'\n", "-p", "vision")
        array = ada.json("run", "-d", "-p", "vision", ada.task(ARRAY))["id"]
        ada.submit("name: zebra-nightly\nschedule: 0 3 1 1 *\nrun: 'true'\n", "-p", "vision")
        console = f"127.0.0.1:{free_port()}"
        start_console(ada, "--listen", console)
        yield Site(f"http://{console}", tokens, ada, night, array)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with chromium(tmp_path_factory.mktemp("browser")) as tab:
        tab.call("Emulation.setFocusEmulationEnabled", enabled=True)
        yield tab


def enter(tab: Tab, site: Site, name: str) -> None:
    """Sign in as this person, with the keyboard of the form, or sign out as nobody."""
    tab.call("Network.clearBrowserCookies")
    tab.open(f"{site.url}/sign-in?next=/queue")
    if name:
        tab.call("Input.insertText", text=site.tokens[name])
        press(tab, "Enter")
        tab.wait("location.pathname === '/queue' && document.readyState === 'complete'")


def press(tab: Tab, key: str) -> None:
    """Press and release a key, as the browser gets it from a keyboard."""
    code = {"Tab": 9, "Enter": 13}[key]
    text = {"text": "\r"} if key == "Enter" else {}
    common = {"key": key, "code": key, "windowsVirtualKeyCode": code}
    tab.call("Input.dispatchKeyEvent", type="keyDown", **common, **text)
    tab.call("Input.dispatchKeyEvent", type="keyUp", **common)


def routes(method: str) -> set[str]:
    made = Console(OneUser(ApiClient("unix:/nowhere", "token")), "here", lambda: datetime.now(UTC))
    return {
        each.path
        for each in made._make_app().routes
        if isinstance(each, Route) and method in (each.methods or ())
    }


def test_no_page_and_no_action_is_left_out(site: Site) -> None:
    assert routes("GET") - NO_PAGES == set(site.pages())
    assert routes("POST") - SIGN_IN == set(site.changes())


PAGES = sorted(routes("GET") - NO_PAGES)


@pytest.fixture
def tab(browser: Tab, site: Site) -> Tab:
    browser.open(f"{site.url}/queue")
    if browser.evaluate("location.pathname") != "/queue":
        enter(browser, site, "ada")
    browser.errors.clear()
    return browser


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_sound_in_each_window_and_color(
    tab: Tab,
    site: Site,
    axe: str,
    page: str,
) -> None:
    tab.open(site.url + site.pages()[page])
    assert tab.evaluate("document.querySelector('main h1') !== null"), page
    assert "Error" not in tab.evaluate("document.title")
    Reader(tab, site.url, axe).look(VIEWS)


# What a keyboard should reach, and what it has: `seen` and `clicked` are filled by the events.
STOPS = """(() => {
  window.stops = [...document.querySelectorAll('a[href], button, input, select, textarea, summary, [tabindex]')]
    .filter(e => e.tabIndex >= 0 && !e.disabled && e.type !== 'hidden' && e.checkVisibility({visibilityProperty: true}));
  window.seen = []; window.clicked = []; window.unseen = [];
  const outlined = (e) => e !== null && getComputedStyle(e).outlineStyle !== 'none';
  addEventListener('focusin', (event) => {
    const e = event.target, at = stops.indexOf(e);
    if (seen.at(-1) !== at) seen.push(at);
    if (!outlined(e) && !outlined(e.parentElement)) unseen.push(e.outerHTML.slice(0, 120));
  });
  addEventListener('click', (event) => {
    event.preventDefault(); event.stopImmediatePropagation();
    clicked.push(stops.indexOf(event.target));
  }, true);
  return stops.length;
})()"""
PRESSED = "['A', 'a', 'BUTTON', 'SUMMARY']"
ACTIVE = f"{PRESSED}.includes(document.activeElement?.tagName)"
MISSED = f"""stops.map((e, at) => [e, at]).filter(([e, at]) => e.isConnected &&
  (!seen.includes(at) || {PRESSED}.includes(e.tagName) && !clicked.includes(at))).map(([e]) => e.outerHTML.slice(0, 160))"""


@pytest.mark.parametrize("page", PAGES)
def test_a_keyboard_reaches_and_uses_everything_on_a_page(tab: Tab, site: Site, page: str) -> None:
    tab.open(site.url + site.pages()[page])
    fields = tab.evaluate("document.querySelectorAll('input[type=date]').length")
    for _ in range(tab.evaluate(STOPS) + 3 * fields + 2):
        press(tab, "Tab")
        if tab.evaluate(ACTIVE):
            press(tab, "Enter")
    assert tab.evaluate(MISSED) == []
    assert tab.evaluate("unseen") == [], "the reader does not see where the focus is"
    order = [each for each in dict.fromkeys(tab.evaluate("seen")) if each >= 0]
    first = order.index(0)
    assert order[first:] + order[:first] == [*range(len(order))], "in the order of the page"
    assert tab.errors == []


def test_enter_follows_links_opens_parts_and_sends_forms(tab: Tab, site: Site) -> None:
    tab.open(f"{site.url}/jobs")
    press(tab, "Tab")
    assert tab.evaluate("document.activeElement.innerText") == "Skip to the content"
    assert tab.evaluate("document.activeElement.getBoundingClientRect().left >= 0"), "it is seen"
    press(tab, "Enter")
    tab.wait("document.activeElement.id === 'content'")
    tab.evaluate("document.querySelector('#more-filters summary').focus()")
    press(tab, "Enter")
    assert tab.evaluate("document.getElementById('more-filters').open")
    tab.evaluate("document.querySelector('[name=text]').focus()")
    tab.call("Input.insertText", text="zebra-rows")
    press(tab, "Enter")
    tab.wait("location.search.includes('text=zebra-rows') && document.readyState === 'complete'")
    tab.evaluate("document.querySelector('#jobs tbody a').focus()")
    press(tab, "Enter")
    tab.wait("location.pathname.startsWith('/jobs/vision/') && document.readyState === 'complete'")


FETCH = "(path, form) => fetch(path, form ? {method: 'POST', body: new URLSearchParams(form)} : {}).then(async (answer) => [answer.status, answer.url, await answer.text()])"


def ask(tab: Tab, path: str, form: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """What the browser gets with its cookies: the status, the path, and the text."""
    status, url, text = tab.evaluate(f"({FETCH})({json.dumps(path)}, {json.dumps(form)})")
    return int(status), urlsplit(url).path, str(text)


def secrets_of(site: Site) -> re.Pattern[str]:
    """Names of things in the project vision, which no other project's member may see."""
    names = "|".join([site.night, site.array, "rm-night"])
    return re.compile(rf"zebra|ZEBRA|{names}|CUDA out of memory|[$]123[.]45")


def test_who_is_signed_out_sees_nothing(browser: Tab, site: Site, axe: str) -> None:
    enter(browser, site, "")
    browser.errors.clear()
    Reader(browser, site.url, axe).look(VIEWS)
    for path in site.pages().values():
        browser.open(site.url + path)
        assert browser.evaluate("location.pathname") == "/sign-in", path
        assert browser.evaluate("location.search") == f"?next={quote(path)}"
        shown = browser.evaluate("document.body.innerHTML").replace(quote(path), "")
        assert not secrets_of(site).search(re.sub('next=[^"]*', "", shown)), path
    job = f"/jobs/vision/{site.night}"
    assert ask(browser, f"{job}/log?attempt=1&offset=0")[0] == 401
    assert ask(browser, f"{job}/log.txt")[1] == "/sign-in"
    for path, form in site.changes().values():
        assert ask(browser, path, form)[1] == "/sign-in", path


def test_a_member_of_another_project_sees_and_changes_nothing(browser: Tab, site: Site) -> None:
    enter(browser, site, "ada")
    before = {page: ask(browser, path)[2] for page, path in site.pages().items()}
    assert all(secrets_of(site).search(before[page]) for page in ("/", "/jobs", "/costs", *LISTS))
    enter(browser, site, "ben")
    for page, path in site.pages().items():
        status, _, text = ask(browser, path)
        own = "{project}" in page or page in OF_PROJECT
        assert status in ((403, 404) if own else (200,)), (path, status)
        echoed = text.replace(site.night, "") if "vision/" in path else text
        assert not secrets_of(site).search(echoed.replace("zebra-press", "") if own else text), path
    job = f"/jobs/vision/{site.night}"
    for path in (f"{job}/log?attempt=1&offset=0", f"{job}/log.txt"):
        assert ask(browser, path)[0] in (403, 404), path
    for path, form in site.changes().values():
        status, _, text = ask(browser, path, form)
        told = "notice bad" in text  # above a list, or above the editor
        assert status in (403, 404) or (status == 200 and told), (path, status, text)
    enter(browser, site, "ada")
    kept = {"/jobs", "/machines", "/services", "/team", *LISTS}
    for page in kept:
        assert things(ask(browser, site.pages()[page])[2]) == things(before[page]), page


def things(page: str) -> list[str]:
    """The rows of a page's lists, and the values of its forms."""
    return re.findall(
        r'(?:data-key|tr id)="[^"]+"|class="badge is-\w+"|value="[^"]*"|ZEBRA\w+', page
    )
