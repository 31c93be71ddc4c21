"""The console in a real browser, with a real embedded server and local jobs. The pages' timers run
faster than for users.
"""

import json
import re
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.system.chromium import Tab, chromium
from tests.system.server_state import PYTHON, home_with_jobs, kill_server
from tests.system.tied import start_tied
from tests.waits import wait_until

from cavvy import Client, Job, Task
from cavvy.client import connect

pytestmark = pytest.mark.system
# Timers are ten times as fast. `ticks` counts those that have ended, `asked` the requests.
FASTER = """{
  const wait = window.setTimeout, request = window.fetch;
  window.ticks = window.asked = 0;
  window.setTimeout = (act, ms) => wait(() => { window.ticks++; act(); }, ms / 10);
  window.fetch = (...given) => { window.asked++; return request(...given); };
}"""
PAGES = ("/", "/jobs", "/services", "/machines", "/devices", "/costs")
HEADING = "document.querySelector('h1').innerText"
LOG = "document.getElementById('log').textContent"
PERIODS = "document.querySelector('#timeline details')"
AGO = "document.querySelector('#head time').textContent"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with home_with_jobs(tmp_path_factory.mktemp("console") / "home") as made:
        yield made


@pytest.fixture(scope="module")
def client(home: Path) -> Iterator[Client]:
    with Client() as made:
        yield made


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with chromium(tmp_path_factory.mktemp("browser")) as tab:
        tab.call("Page.addScriptToEvaluateOnNewDocument", source=FASTER)
        yield tab


@contextmanager
def console(folder: Path, port: int = 0) -> Iterator[str]:
    """Run the command; yields the address with which a browser signs in."""
    said = folder / "console.log"
    with said.open("wb") as output:
        argv = [PYTHON, "-m", "cavvy", "console", "--no-browser", "--port", port]
        process = start_tied(argv, stdout=output, stderr=output)
    try:
        wait_until(lambda: re.search(r"http://\S+\n", said.read_text()), said.read_text)
        yield re.findall(r"http://\S+", said.read_text())[0]
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def site(browser: Tab, client: Client, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a console, and the browser has signed in to it."""
    with console(tmp_path_factory.mktemp("site")) as address:
        browser.open(address)
        browser.wait(f"{HEADING} === 'Overview'")
        yield f"http://{urlsplit(address).netloc}"


@pytest.fixture
def tab(browser: Tab, site: str) -> Iterator[Tab]:
    browser.errors.clear()
    yield browser
    browser.call("Emulation.clearDeviceMetricsOverride")


def submit(client: Client, name: str, script: str) -> Job:
    return client.submit(Task(script, name=name, resources={"providers": "local"}))


def address_of(job: Job) -> str:
    return f"/jobs/default/{job.id}"


def test_a_job_is_watched_until_it_ends(
    tab: Tab, site: str, client: Client, tmp_path: Path
) -> None:
    wait = "while [ ! -e {} ]; do sleep 0.05; done; "
    script = (
        r"printf '\033[32mgreen\033[0m\n10%%\r50%%\r\303'; "
        + wait.format(tmp_path / "more")
        + r"printf '\244\n100%%\n'; "
        + wait.format(tmp_path / "end")
        + "echo bye"
    )
    job = submit(client, "watched", script)
    tab.call("Emulation.setDeviceMetricsOverride", width=1000, height=400, deviceScaleFactor=1, mobile=False)  # fmt: skip
    tab.open(site + address_of(job))
    tab.wait(f"{HEADING}.includes('running') && {LOG}.includes('50%')")
    assert "\x1b" not in tab.evaluate(LOG)
    tab.wait(f"{PERIODS} !== null && document.querySelector('#nodes th[scope=row]') !== null")
    tab.evaluate(f"{PERIODS}.open = true")
    tab.evaluate("document.querySelector('#head button').focus({preventScroll: true})")
    tab.evaluate("scrollTo(0, 123)")
    tab.evaluate("getSelection().selectAllChildren(document.getElementById('time'))")
    before = tab.evaluate(AGO)
    tab.wait(f"{AGO} !== {json.dumps(before)}")
    assert tab.evaluate(f"{PERIODS}.open")
    assert tab.evaluate("document.activeElement.innerText") == "Stop"
    assert tab.evaluate("scrollY") == 123
    assert tab.evaluate("getSelection().toString()") == "Time"

    (tmp_path / "more").touch()
    tab.wait(f"{LOG}.includes('100%')")
    assert tab.evaluate(LOG).startswith("green\nä\n100%\n")
    (tmp_path / "end").touch()
    tab.wait(f"{HEADING}.includes('done') && {LOG}.endsWith('bye\\n') && view.over")
    assert tab.evaluate("document.title") == "watched (done) · Cavvy"
    assert tab.evaluate("document.querySelector('#head button').innerText") == "Queue again"
    assert tab.evaluate("document.activeElement.id") == "head", "the focused button is gone"
    assert tab.evaluate(f"{PERIODS}.open")
    assert tab.errors == []


def test_a_hidden_page_asks_for_nothing(tab: Tab, site: str) -> None:
    tab.open(f"{site}/jobs")
    tab.wait("asked > 1")
    tab.evaluate("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
    tab.evaluate("window.ticks = 0")
    tab.wait("ticks > 1")
    before = tab.evaluate("asked")
    tab.wait("ticks > 4")
    assert tab.evaluate("asked") == before
    tab.evaluate("delete document.hidden")
    tab.wait(f"asked > {before}")


def test_new_rows_leave_the_focus_where_it_is(tab: Tab, site: str, client: Client) -> None:
    submit(client, "first", "true")
    tab.open(f"{site}/jobs")
    tab.wait("document.querySelector('#jobs tbody a')?.innerText === 'first'")
    tab.evaluate("document.querySelector('#jobs tbody a').focus()")
    submit(client, "second", "true")
    tab.wait("document.querySelector('#jobs tbody a').innerText === 'second'")
    assert tab.evaluate("document.activeElement.innerText") == "first"


def test_a_filter_keeps_the_focus_on_the_page_that_follows(tab: Tab, site: str) -> None:
    tab.open(f"{site}/jobs")
    choose = "{const each = document.querySelector('[name=phase]'); each.value = 'done'; each.dispatchEvent(new Event('change', {bubbles: true}))}"  # fmt: skip
    tab.evaluate(choose)
    tab.wait("location.search.includes('phase=done') && document.readyState === 'complete'")
    assert tab.evaluate("document.activeElement.name") == "phase"
    tab.open(f"{site}/jobs")
    assert tab.evaluate("document.activeElement === document.body")


UPDATE = """(before, after) => {
  const [old, fresh] = [before, after].map((rows) => {
    const part = document.createElement("div");
    part.innerHTML = rows.map(([key, text]) => `<p data-key="${key}">${text}</p>`).join("");
    return part;
  });
  const expected = fresh.innerHTML;
  updateNodes(old, fresh);
  return old.innerHTML === expected;
}"""


@pytest.mark.parametrize(
    ("before", "after"),
    [("", "ab"), ("ab", ""), ("abc", "cab"), ("abc", "b"), ("aab", "aaab"), ("aab", "ba")],
)
def test_parts_become_what_the_server_sent(tab: Tab, site: str, before: str, after: str) -> None:
    tab.open(f"{site}/jobs")
    rows = json.dumps([[key, f"old {key}"] for key in before])
    fresh = json.dumps([[key, f"new {number}"] for number, key in enumerate(after)])
    assert tab.evaluate(f"({UPDATE})({rows}, {fresh})")


AXIS = """{
  const places = [0, 12.5, 25, 37.5, 50, 62.5, 75, 87.5, 100];
  const anchor = (at) => (at < 3 ? "start" : at > 97 ? "end" : "middle");
  const marks = places.map((at) => `<text class="mark" x="${at}%" y="20" text-anchor="${anchor(at)}">04:12 AM</text>`);
  content.innerHTML = `<figure class="chart"><div class="plot"><svg width="100%" height="30" role="img">${marks.join("")}</svg></div></figure>`;
  thinMarks();
}"""
SEEN = """[...document.querySelectorAll(".mark")].filter((each) => getComputedStyle(each).visibility === "visible").map((each) => {
  const { left, right } = each.getBoundingClientRect();
  return [left, right];
})"""
LAST_RIGHT = '[...document.querySelectorAll(".mark")].at(-1).getBoundingClientRect().right'


def test_no_label_of_an_axis_lies_over_another(tab: Tab, site: str) -> None:
    tab.open(f"{site}/jobs")
    for width, least in ((360, 3), (1280, 9)):
        tab.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)  # fmt: skip
        tab.evaluate(AXIS)
        seen = tab.evaluate(SEEN)
        assert len(seen) >= least, width
        assert all(before[1] < after[0] for before, after in pairwise(seen))
        assert seen[-1][1] == tab.evaluate(LAST_RIGHT), "the last one stays"


def test_every_page_fits_the_window(tab: Tab, site: str, client: Client) -> None:
    job = submit(client, "n" * 60, "echo " + "x" * 3000)
    for width in (390, 1280):
        tab.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)  # fmt: skip
        for page in (*PAGES, address_of(job)):
            tab.open(site + page)
            root = "document.documentElement"
            assert tab.evaluate(f"{root}.scrollWidth <= {root}.clientWidth"), (page, width)
    assert tab.errors == []


WRITE = """(pieces) => {
  const element = document.createElement("pre");
  element.textContent = pieces.shift();
  const log = new LogView(element);
  for (const each of pieces) log.write(each);
  return element.textContent;
}"""


def test_a_log_is_shown_as_a_terminal_shows_it(tab: Tab, site: str, client: Client) -> None:
    job = submit(client, "log", "echo begin")
    tab.open(site + address_of(job))
    tab.wait(f"{LOG}.includes('begin')")

    def written(*pieces: str) -> str:
        return str(tab.evaluate(f"({WRITE})({json.dumps(pieces)})"))

    assert written("a\r\nb\r", "\nc") == "a\nb\nc"
    assert written("1%\r2%", "\r3%\r", "4%") == "4%"
    assert written("\x1b[1;3", "1mred\x1b[", "0m.\x1b", "[K!") == "red.!"
    assert written("\x1b]0;the ti", "tle\x07text") == "text"
    assert written("\x1b]8;;http://x\x1b", "\\link") == "link"
    assert written("a\x1b" + "]" * 500, "b").endswith("b"), "a sequence that never ends is text"
    assert written("\x1b[<u\x1b[5zm\x1b[>4;1m", "\x1bcn") == "mn"
    nested = ["epoch 0\n\rbatch 0\x1b[A", "\n\rbatch 1", "\x1b[A\repoch 1", "\n\rbatch 2"]
    assert written("begin\n", *nested) == "begin\nepoch 1\nbatch 2"
    assert written("begin\n" + "".join(nested)) == "begin\nepoch 1\nbatch 2"
    assert written(*nested, "\x1b[A\n", "\r      \r", "end\n") == "epoch 1\nend\n"
    assert written("a\nb\n\x1b[2A\x1b[2Kc\n", "\x1b[2Kd\n", "e\n") == "c\nd\ne\n"
    assert written("a\nb\r", "\x1b[1A", "\x1b[1B", "c") == "a\nc"
    assert written("a\x1b[999A\x1b[99999Ab") == "ab"
    # neither one endless line nor many lines fill the memory
    endless = "(() => { const log = new LogView(document.createElement('pre')); for (let n = 0; n < 40; n++) log.write(%s); return log.element.textContent.length; })()"  # fmt: skip
    assert tab.evaluate(endless % "'x'.repeat(2e5)") == 1_000_000
    many = endless.replace("textContent", "childNodes") % "'\\x1b[1ma\\x1b[0mb\\n'.repeat(1e3)"
    assert tab.evaluate(many) == 50_000
    assert tab.evaluate(endless % "'x'.repeat(99).concat('\\n').repeat(2e3)") == 1_000_000


def test_a_log_has_the_colors_of_a_terminal(tab: Tab, site: str, client: Client) -> None:
    job = submit(client, "colors", "true")
    tab.open(site + address_of(job))
    tab.wait("view !== null")

    def written(*pieces: str) -> str:
        script = WRITE.replace("element.textContent;\n}", "element.innerHTML;\n}")
        return str(tab.evaluate(f"({script})({json.dumps(pieces)})"))

    last = "<span></span>"
    good, bad = (f'<span class="{each}">' for each in ("good", "bad"))
    assert written("\x1b[32ma", "b\x1b[0mc\n") == f"{good}ab</span>c\n{last}"
    assert written("\x1b[91ma\n", "b\n") == f"{bad}a\n</span>{bad}b\n</span>{last}"
    assert written("\x1b[1;31ma\x1b[22m\x1b[39mb\n") == (
        f'<span class="bad bold">a</span>b\n{last}'
    )
    assert written("\x1b[32m1%\r", "2%") == f"<span>{good}2%</span></span>"
    assert written("\x1b[38;5;31ma\x1b[48;2;1;31;0mb\n") == f"ab\n{last}"
    assert written("\x1b[32m<b>&\n") == f"{good}&lt;b&gt;&amp;\n</span>{last}"


def test_a_reader_of_older_lines_is_not_moved(tab: Tab, site: str, client: Client) -> None:
    job = submit(client, "long", "seq 1000")
    tab.open(site + address_of(job))
    tab.wait("view !== null && view.over && log.scrollTop > 1000")
    rest = "log.scrollHeight - log.scrollTop - log.clientHeight"
    tab.evaluate("log.scrollTop = 500")
    tab.wait("!follow.checked")
    tab.evaluate("view.write('new\\n'.repeat(100))")
    assert tab.evaluate("log.scrollTop") == 500
    tab.evaluate("follow.click()")
    assert tab.evaluate(rest) < 2
    tab.evaluate("view.write('new\\n'.repeat(100))")
    assert tab.evaluate(rest) < 2
    assert tab.evaluate("follow.checked")


PIECES = """async (pieces) => {
  const element = document.createElement("pre");
  element.dataset.attempt = 1;
  const log = new LogView(element);
  for (const [attempt, data] of pieces) {
    window.fetch = async () => Response.json({data, attempt, offset: 0, over: false});
    await log.update();
  }
  return element.textContent;
}"""


def test_the_next_attempt_has_a_heading_in_the_log(tab: Tab, site: str, client: Client) -> None:
    job = submit(client, "pieces", "true")
    tab.open(site + address_of(job))
    pieces = [(1, b"a\nb\xc3"), (1, b"\xa4\xe2"), (2, b"c\n"), (2, b""), (3, b"d")]
    coded = json.dumps([(number, b64encode(data).decode()) for number, data in pieces])
    assert tab.evaluate(f"({PIECES})({coded})") == "a\nbä\n— attempt 2 —\nc\n— attempt 3 —\nd"


def test_the_log_of_a_job_that_runs_again_continues(tab: Tab, site: str, client: Client) -> None:
    job = submit(client, "again", "echo work; false")
    tab.open(site + address_of(job))
    tab.wait(f"{HEADING}.includes('failed') && {LOG}.includes('work') && view.over")
    tab.evaluate("window.isSame = true")
    with connect() as api:
        api.retry("default", job.id)
    tab.wait(f"{HEADING}.includes('failed') && view.attempt === 2 && view.over")
    assert tab.evaluate(LOG) == "work\n— attempt 2 —\nwork\n"
    assert tab.evaluate("isSame"), "the page was not loaded again"


def test_a_server_that_stops_is_shown_again_when_it_runs(
    tab: Tab, site: str, client: Client, home: Path
) -> None:
    tab.open(f"{site}/jobs")
    kill_server(home)
    submit(client, "afterwards", "true")  # the server runs again
    tab.wait("document.querySelector('#jobs tbody a').innerText === 'afterwards' && silence.hidden")


def test_a_console_that_stops_is_reported_until_it_runs_again(
    tab: Tab, client: Client, tmp_path: Path
) -> None:
    with console(tmp_path) as address:
        tab.open(f"{address}&next=/jobs")
    tab.wait("!silence.hidden && silence.textContent.includes('not current')")
    with console(tmp_path, urlsplit(address).port or 0):
        tab.wait("location.pathname === '/sign-in'")


def test_signing_out_elsewhere_leads_to_the_sign_in_page(tab: Tab, site: str) -> None:
    tab.open(f"{site}/jobs")
    tab.evaluate("fetch('/sign-out', {method: 'POST'}).then(() => null)")
    tab.wait("location.pathname === '/sign-in' && location.search === '?next=/jobs'")
