"""Charts of curves in a real browser, with a real embedded server and a local job."""

import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.console.system.test_console_browser import console
from tests.system.chromium import chromium
from tests.system.server_state import home_with_jobs

from cavvy import Client, Task

pytestmark = pytest.mark.system
SCRIPT = f"""{sys.executable} -c '
for step in range(400): print(f"step {{step}} loss={{2 / (step + 1):.4f}} acc={{step / 400:.4f}}")
'"""
# of what the program reports; a chart of its machine may come, too
DRAWN = """document.querySelectorAll('.curve-chart:not([data-name^="machine/"]) .u-over').length"""
PRESS = """((key) => document.querySelector('.curve-chart [role=img]').dispatchEvent(
  new KeyboardEvent("keydown", { key, bubbles: true })))"""
SAVE = """{
  window.saved = [];
  URL.createObjectURL = (data) => {
    saved.push(data.type === "image/png" ? data.size : data.text());
    return "#";
  };
  for (const each of document.querySelectorAll(".curve-chart .curve-save")[0].children) each.click();
}"""
ASKED = (
    "performance.getEntriesByType('resource').filter((each) => each.name.includes('from=')).length"
)


def test_curves_appear_on_a_page_that_was_opened_before_them(tmp_path: Path) -> None:
    (tmp_path / "browser").mkdir()
    begin = tmp_path / "begin"
    script = f"echo ready; while [ ! -e {begin} ]; do sleep 0.05; done; {SCRIPT}"
    with (
        home_with_jobs(tmp_path / "home"),
        Client() as client,
        console(tmp_path) as address,
        chromium(tmp_path / "browser") as tab,
    ):
        job = client.submit(Task(script, name="late", resources={"providers": "local"}))
        tab.open(address)
        tab.open(f"http://{urlsplit(address).netloc}/jobs/default/{job.id}")
        tab.wait("document.getElementById('log')?.textContent.includes('ready')")
        assert tab.evaluate("document.getElementById('curves-title')") is None
        begin.touch()
        tab.wait("document.getElementById('curves-title') !== null")
        tab.evaluate("document.getElementById('curves-title').scrollIntoView()")
        tab.wait(f"{DRAWN} === 2")
        assert tab.errors == []


def test_charts_are_drawn_and_zoom(tmp_path: Path) -> None:
    (tmp_path / "browser").mkdir()
    with (
        home_with_jobs(tmp_path / "home"),
        Client() as client,
        console(tmp_path) as address,
        chromium(tmp_path / "browser") as tab,
    ):
        job = client.submit(Task(SCRIPT, name="fit", resources={"providers": "local"}))
        job.wait()
        site = f"http://{urlsplit(address).netloc}"
        tab.open(address)
        for page in (f"/jobs/default/{job.id}", "/runs?project=default"):
            tab.open(site + page)
            tab.evaluate("document.getElementById('curves-title').scrollIntoView()")
            tab.wait(f"{DRAWN} === 2")
        tab.evaluate(SAVE)
        tab.wait("saved.length === 3")
        csv, svg, size = tab.evaluate("Promise.all(saved)")
        assert csv.splitlines()[:2] == ["line,step,value,lowest,highest", "fit,0,2,,"]
        assert svg.startswith("<svg ")
        assert ">fit</text>" in svg
        assert size > 1000
        middle = "(box) => [box.x + box.width - 5, box.y + box.height - 12]"
        x, y = tab.evaluate(
            f"({middle})(document.querySelector('.u-over').getBoundingClientRect())"
        )
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            button = {"button": "left", "clickCount": 1} if kind != "mouseMoved" else {}
            tab.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)
        tab.wait("document.querySelector('.curve-chart p a')?.textContent === 'fit'")
        tab.open(f"{site}/jobs/default/{job.id}?smooth=0.5&scale=log&by=time")
        tab.evaluate("document.getElementById('curves-title').scrollIntoView()")
        tab.wait(f"{DRAWN} === 2")
        tab.open(f"{site}/jobs/default/{job.id}?from=100&to=200")
        tab.evaluate("document.getElementById('curves-title').scrollIntoView()")
        tab.wait(f"{DRAWN} === 2 && {ASKED} > 0")
        assert not tab.evaluate("document.getElementById('curve-reset').hidden")
        tab.evaluate(f"{PRESS}('ArrowRight')")
        tab.wait("location.search === '?from=125&to=225'")
        tab.evaluate(f"{PRESS}('+')")
        tab.wait("location.search === '?from=150&to=200'")
        tab.evaluate(f"{PRESS}('0')")
        tab.wait("location.search === ''")
        for _ in range(2):
            tab.evaluate(f"{PRESS}('ArrowLeft')")
        assert tab.errors == []
