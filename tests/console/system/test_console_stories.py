"""What people do in the console, in a real browser at 10,000 jobs. Every page that a story opens has
no violation that axe finds, no error, fits a phone, and has at most 250 kB compressed.
"""

import asyncio
import gzip
import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from math import exp
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.console.system.test_console_browser import FASTER, console
from tests.system.chromium import Tab, chromium
from tests.system.server_state import home_with_jobs

from cavvy import Client, Task
from cavvy.client.paths import make_id
from cavvy.domain import jobs as domain
from cavvy.domain.events import Charge
from cavvy.domain.figures import FigureBlock, FigureColumns
from cavvy.domain.offers import Offer
from cavvy.domain.services import ServiceSpec
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import replace
from cavvy.store.base import AtomicWrite
from cavvy.store.open import open_store
from cavvy.store.sql import Store

pytestmark = pytest.mark.system
JOBS = 10_000
MOST_BYTES = 250_000
H100 = Offer(
    provider="aws",
    region="us-east-1",
    instance_type="p5.48xlarge",
    accelerator="H100",
    accelerator_count=8,
    rate=HourlyRate(40_000_000),
)
VIEWS = ((1280, "dark"), (390, "light"))
TEXT = "document.body.innerText"


async def add_service(store: Store, begun: datetime, minutes: range) -> list[FigureBlock]:
    """Store a service, and return its figures."""
    from cavvy.capabilities.serving.service_rows import services_of
    from cavvy.capabilities.serving.stored_services import StoredService

    blocks = []
    service = StoredService(
        project="vision",
        name="chat",
        id="service-of-night",
        task=TaskSpec(name="chat", run="true", service=ServiceSpec(port=8000)),
        created_at=begun,
    )
    await services_of(store).put(service)
    for minute in minutes:
        values = {
            **{"requests_per_s": 5 + minute % 7, "failed_per_s": 0.1, "latency_p50_s": 0.2},
            **{"latency_p95_s": 0.9, "in_flight": 3, "waiting": minute % 2},
            **{"replicas_ready": 1, "replicas_wanted": 2},
        }
        columns = {
            name: FigureColumns(low=[each], mean=[each], high=[each])
            for name, each in values.items()
        }
        columns |= {"cold_start_s": columns["waiting"]} if minute == minutes[9] else {}
        blocks.append(FigureBlock(attempt_id=service.id, rank=0, minutes=[minute], columns=columns))
    return blocks


async def fill(home: Path, count: int = JOBS) -> str:
    """Write ended jobs while no server runs. Returns the ID of the job of last night."""
    store = open_store(f"sqlite:///{home / 'cavvy.db'}")
    await store.open()
    now = datetime.now(UTC)
    task = TaskSpec(name="t", run="true")

    def make(number: int, name: str, **fields: object) -> domain.JobRecord:
        at = now - timedelta(days=20) + timedelta(seconds=number)
        usual = {
            "project": "default",
            "submitted_at": at,
            "since": at,
            "ended_at": at,
            "task": task,
        }
        made_id = make_id(at.timestamp(), number.to_bytes(4))
        ended = {"phase": domain.JobPhase.DONE, "reason": "the work succeeded", "exit_code": 0}
        return domain.JobRecord(id=made_id, name=name, **usual | ended | fields)  # type: ignore[arg-type]

    for block in range(0, count, 1000):
        jobs = [
            make(
                number,
                f"bench-{number}",
                user=("ada", "bob")[number % 2],
                task=replace(task, tags={"n": str(number)}),
            )
            for number in range(block, min(block + 1000, count))
        ]
        await store.commit(AtomicWrite(jobs=jobs))
    begun, ended = now - timedelta(hours=10), now - timedelta(minutes=5)
    night = make(
        20 * 86400 - 40_000,
        "night",
        project="vision",
        user="ada",
        phase=domain.JobPhase.FAILED,
        reason="rank 5 failed with exit code 3",
        exit_code=3,
        submitted_at=begun,
        since=ended,
        ended_at=ended,
        attempt=1,
    )
    attempt = domain.Attempt(
        id=domain.attempt_id(night.id, 1),
        job_id=night.id,
        project="vision",
        number=1,
        gang="rm-night",
        offer=H100,
        nodes=8,
        phase=domain.AttemptPhase.ENDED,
        reason="rank 5 failed with exit code 3",
        outcome=domain.AttemptOutcome.EXIT,
        exit_code=3,
        created_at=begun,
        since=ended,
        ended_at=ended,
    )
    nodes = [
        domain.Node(
            attempt_id=attempt.id,
            project="vision",
            rank=rank,
            phase=domain.NodePhase.EXITED,
            exit_code=3 if rank == 5 else 0,
            exit_reason="CUDA out of memory" if rank == 5 else "",
        )
        for rank in range(8)
    ]
    first = int(begun.timestamp()) // 60
    minutes = range(first, int(ended.timestamp()) // 60)
    blocks = []
    for rank in range(8):
        loss = [2 * exp(-(each - first) / 200) + 0.1 for each in minutes]
        use = [95.0 - rank for _ in minutes]
        for at, minute in enumerate(minutes):
            columns = {
                name: FigureColumns(
                    low=values[at : at + 1], mean=values[at : at + 1], high=values[at : at + 1]
                )
                for name, values in (("loss", loss), ("gpu_percent", use))
            }
            blocks.append(
                FigureBlock(attempt_id=attempt.id, rank=rank, minutes=[minute], columns=columns)
            )
    if find_spec("cavvy.capabilities.serving") is not None:
        blocks += await add_service(store, begun, minutes)
    charge = Charge(
        project="vision",
        job_id=night.id,
        attempt_id=attempt.id,
        rank=0,
        since=begun,
        until=ended,
        rate=H100.rate,
        amount=Money(123_450_000),
    )
    await store.commit(AtomicWrite(jobs=[night], attempts=[attempt], nodes=nodes, charges=[charge]))
    for part in range(0, len(blocks), 500):
        await store.commit(AtomicWrite(figures=blocks[part : part + 500]))
    await store.close()
    return night.id


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The ID of the job of last night, in a state folder with 10,000 other jobs."""
    folder = tmp_path_factory.mktemp("stories") / "home"
    with home_with_jobs(folder) as home:
        home.mkdir(parents=True, exist_ok=True)
        yield asyncio.run(fill(home))


@pytest.fixture(scope="module")
def client(night: str) -> Iterator[Client]:
    with Client() as made:
        yield made


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with chromium(tmp_path_factory.mktemp("browser")) as tab:
        tab.call("Page.addScriptToEvaluateOnNewDocument", source=FASTER)
        yield tab


@pytest.fixture(scope="module")
def site(browser: Tab, client: Client, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with console(tmp_path_factory.mktemp("site")) as address:
        browser.open(address)
        browser.wait("document.querySelector('h1').innerText === 'Overview'")
        yield f"http://{urlsplit(address).netloc}"


@pytest.fixture(scope="module")
def axe() -> str:
    found = find_spec("axe_core_python")
    if found is None or found.origin is None:
        pytest.skip("axe is missing: make setup-dev installs it (pip install axe-core-python)")
    return (Path(found.origin).parent / "axe.min.js").read_text("utf-8")


class Reader:
    """A person at the browser. Each page is checked when it is left or at the end of the story."""

    def __init__(self, tab: Tab, site: str, axe: str) -> None:
        self.tab, self._site, self._axe = tab, site, axe

    def open(self, path: str) -> None:
        self.tab.open(self._site + path)
        self.look()

    def look(self, views: Sequence[tuple[int, str]] = VIEWS) -> None:
        """Check the page as it is now, in windows of these widths and color schemes."""
        page = self.tab.evaluate("location.pathname")
        text = self.tab.evaluate("fetch(location.href).then(each => each.text())")
        assert len(gzip.compress(text.encode())) <= MOST_BYTES, page
        for width, scheme in views:
            self.tab.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)  # fmt: skip
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            self.tab.call("Emulation.setEmulatedMedia", features=features)
            root = "document.documentElement"
            assert self.tab.evaluate(f"{root}.scrollWidth <= {root}.clientWidth"), (page, width)
            self.tab.evaluate(f"{self._axe};1")
            found = self.tab.evaluate(
                "axe.run().then(r => r.violations.map(v => `${v.id}: ${v.nodes[0].html}`))"
            )
            assert found == [], (page, width, found)
        self.tab.call("Emulation.clearDeviceMetricsOverride")
        assert self.tab.errors == [], page

    def press(self, text: str) -> None:
        """Use the link or the button with this text, once the page has it; questions are answered
        with yes.
        """
        find = f"[...document.querySelectorAll('a, button')].find(e => e.innerText.trim() === {json.dumps(text)})"  # fmt: skip
        self.tab.wait(f"document.readyState === 'complete' && {find} !== undefined")
        self.tab.evaluate(f"window.confirm = () => true; {find}.click()")

    def press_and_load(self, text: str) -> None:
        """As `press`, and wait for the page that follows."""
        self.tab.evaluate("window.stale = true")
        self.press(text)
        self.tab.wait("!window.stale && document.readyState === 'complete'")

    def write(self, text: str) -> None:
        """Type a task into the editor."""
        script = "field.focus(); field.value = %s; field.setSelectionRange(field.value.length, field.value.length); field.dispatchEvent(new Event('input'))"  # fmt: skip
        self.tab.evaluate(script % json.dumps(text))

    def key(self, key: str, **more: object) -> None:
        options = json.dumps({"key": key, "bubbles": True, "cancelable": True, **more})
        self.tab.evaluate(f"field.dispatchEvent(new KeyboardEvent('keydown', {options}))")


@pytest.fixture
def reader(browser: Tab, site: str, axe: str) -> Reader:
    browser.errors.clear()
    return Reader(browser, site, axe)


def test_a_task_is_written_corrected_planned_and_run(reader: Reader) -> None:
    reader.open("/submit")
    tab = reader.tab
    tab.wait("keys !== null")
    reader.write("name: story\nrunn: echo hello\n")
    tab.wait("document.querySelector('#gutter .wrong')?.innerText.trim() === '2'")
    reader.write("name: story\nrun: echo hello\nres")
    tab.wait("!menu.hidden && menu.innerText.includes('resources')")
    reader.key("ArrowDown")
    reader.key("Enter")
    assert tab.evaluate("field.value.endsWith('resources: ')")
    reader.write("name: story\nrun: echo hello\nresources:\n  providers: [local]\n")
    tab.wait("document.querySelector('#problems p') === null && document.querySelector('#meaning') !== null")  # fmt: skip
    reader.press("Show the plan")
    tab.wait("document.querySelector('#placements tbody tr') !== null")
    reader.look()
    reader.press("Run")
    tab.wait("location.pathname.startsWith('/jobs/default/')")
    tab.wait(f"{TEXT}.includes('done') && document.getElementById('log').textContent.includes('hello')")  # fmt: skip
    reader.press("Run again with changes")
    tab.wait("document.querySelector('[name=from]') !== null")
    tab.wait("document.getElementById('text')?.value.includes('echo hello')")
    reader.look()


def test_two_tasks_that_wait_for_each_other_are_corrected_planned_and_run(reader: Reader) -> None:
    reader.open("/submit")
    tab, local = reader.tab, "resources: {providers: [local]}"
    tab.wait("keys !== null")
    text = f"name: story-a\nrun: echo a\n{local}\n---\nname: story-b\nrun: echo b\nafter: story-c\n{local}\n"  # fmt: skip
    reader.write(text.replace("run: echo b", "runn: echo b"))
    tab.wait("document.querySelector('#gutter .wrong')?.innerText.trim() === '6'")
    reader.write(text)
    tab.wait("document.querySelector('#problems p') === null && document.querySelector('#meaning-story-b') !== null")  # fmt: skip
    reader.press("Run")
    tab.wait("document.querySelector('#problems')?.innerText.includes('has no job story-c') && document.readyState === 'complete'")  # fmt: skip
    reader.write(text.replace("story-c", "story-a"))
    reader.press("Show the plan")
    tab.wait("document.querySelector('#placements-story-b tbody tr') !== null")
    assert tab.evaluate("document.querySelector('#placements-story-a tbody tr') !== null")
    reader.look()
    reader.press("Run")
    tab.wait("location.pathname === '/jobs'")
    reader.press("story-b")
    tab.wait(f"location.pathname.startsWith('/jobs/default/') && {TEXT}.includes('the work succeeded')")  # fmt: skip


def test_why_a_job_waits_is_found(reader: Reader, client: Client) -> None:
    held = client.submit(Task("true", name="held", schedule="0 3 * * 1", resources={"providers": "local"}))  # fmt: skip
    reader.open("/jobs?phase=queued")
    reader.press("held")
    reader.tab.wait(f"{TEXT}.includes('The job is held until')")
    reader.look()
    reader.open("/queue")
    assert "held" in reader.tab.evaluate("document.getElementById('schedules').innerText")
    held.stop()


def test_the_failed_rank_of_eight_is_found(reader: Reader, night: str) -> None:
    reader.open("/jobs?phase=failed&project=vision")
    reader.press("night")
    reader.tab.wait("document.querySelector('#nodes') !== null")
    row = reader.tab.evaluate("[...document.querySelectorAll('#nodes tbody tr')].find(e => e.querySelector('.is-failed')).innerText")  # fmt: skip
    assert row.startswith("5")
    assert "CUDA out of memory" in row


def test_loss_and_gpu_use_of_the_night_are_seen(reader: Reader, night: str) -> None:
    reader.open(f"/jobs/vision/{night}")
    titles = "[...document.querySelectorAll('#figures figcaption:first-child')].map(e => e.innerText)"  # fmt: skip
    assert reader.tab.evaluate(titles) == ["Loss", "GPU"]
    curves = "[...document.querySelectorAll('#figures .curve')].map(e => e.getTotalLength())"
    lengths = reader.tab.evaluate(curves)
    assert len(lengths) == 16
    assert min(lengths) > 900, "each goes over the whole night"
    reader.press("5")
    reader.tab.wait("location.search.includes('rank=5') && document.readyState === 'complete'")
    assert reader.tab.evaluate("document.querySelectorAll('#figures .curve').length") == 4
    table = "document.querySelector('#figures details').open = true, document.querySelector('#figures details').innerText"  # fmt: skip
    assert "rank 5" in reader.tab.evaluate(table)
    reader.look()


def test_the_traffic_of_a_service_over_the_night_is_seen(reader: Reader) -> None:
    pytest.importorskip("cavvy.capabilities.serving")
    reader.open("/services/vision/chat")
    titles = "[...document.querySelectorAll('#figures figcaption:first-child')].map(e => e.innerText)"  # fmt: skip
    assert reader.tab.evaluate(titles) == [
        "Requests per second",
        "Latency in seconds",
        "Requests at a time",
        "Replicas",
        "Seconds until a new replica was ready",
    ]
    curves = "[...document.querySelectorAll('#figures .curve:not(.band)')].map(e => e.getTotalLength())"  # fmt: skip
    assert [each > 600 for each in reader.tab.evaluate(curves)] == [True] * 8 + [False]
    reader.press("hour")
    reader.tab.wait("location.search === '?period=hour' && document.readyState === 'complete'")
    reader.look()


def test_spending_is_seen_by_project_and_bounded(reader: Reader) -> None:
    reader.open("/costs?by=project")
    assert "$123.45" in reader.tab.evaluate("[...document.querySelectorAll('tr')].find(e => e.innerText.startsWith('vision')).innerText")  # fmt: skip
    script = "document.getElementById('edit-budget').open = true; const f = document.querySelector('form.edit'); f.elements.name.value = 'vision'; f.elements.limit.value = '200'; f.elements.project.value = 'vision'; f.requestSubmit()"  # fmt: skip
    reader.tab.evaluate(script)
    reader.tab.wait("document.querySelector('meter[aria-label*=vision]') !== null")
    reader.look()


def test_ten_jobs_are_stopped_and_removed_at_once(reader: Reader, client: Client) -> None:
    need = {"providers": "local", "cpu": 1}
    jobs = [
        client.submit(Task("sleep 600", name=f"ten-{number}", resources=need))
        for number in range(10)
    ]
    reader.open("/jobs?text=ten-")
    reader.tab.wait("document.getElementsByName('job').length === 10")
    reader.tab.evaluate("document.querySelector('[data-all]').click()")
    reader.press_and_load("Stop")
    reader.tab.wait("[...document.querySelectorAll('#jobs tbody .badge')].every(e => e.innerText === 'stopped')")  # fmt: skip
    reader.tab.evaluate("document.querySelector('[data-all]').click()")
    reader.press("Remove")
    reader.tab.wait(f"{TEXT}.includes('No job matches')")
    reader.look()
    assert len(jobs) == 10


def test_a_job_of_ten_thousand_is_found_by_user_tag_gpu_and_day(reader: Reader) -> None:
    reader.open("/jobs")
    assert "of 10,0" in reader.tab.evaluate("document.getElementById('pages').innerText")
    reader.press("Next page")
    reader.tab.wait("location.search.includes('page=2') && document.readyState === 'complete'")
    for query, name, total in (
        ("user=ada&tag=n%3D4242", "bench-4242", 1),
        ("gpu=H100", "night", 1),
        ("provider=aws&sort=cost&way=down", "night", 1),
        ("text=bench-77&sort=name&way=up", "bench-77", 111),
    ):
        reader.tab.open(f"{reader.tab.evaluate('location.origin')}/jobs?{query}")
        assert reader.tab.evaluate("document.querySelector('#jobs tbody a').innerText") == name
        assert f"of {total}" in reader.tab.evaluate("document.getElementById('pages').innerText")
    reader.look()


def test_two_runs_are_compared(reader: Reader) -> None:
    reader.open("/jobs?text=bench-424")
    reader.tab.evaluate(
        "[...document.getElementsByName('job')].slice(0, 2).forEach(e => e.click())"
    )
    reader.press("Compare")
    reader.tab.wait(f"location.pathname === '/compare' && {TEXT}.includes('task.tags.n')")
    reader.tab.wait("document.readyState === 'complete'")
    reader.look()


def test_a_line_of_a_whole_log_is_found_and_the_log_downloaded(
    reader: Reader, client: Client
) -> None:
    script = "seq -f 'line %.0f' 4000"
    job = client.submit(Task(script, name="long-log", resources={"providers": "local"}))
    job.wait()
    reader.open(f"/jobs/default/{job.id}/whole-log?text=line%203999&times=1")
    shown = reader.tab.evaluate("document.querySelector('pre.log').innerText.trim().split('\\n')")
    assert len(shown) == 1
    assert shown[0].endswith("line 3999")
    assert len(shown[0]) > 20, "with the time"
    reader.press("line 3999")
    reader.tab.wait("location.search.includes('offset=') && document.readyState === 'complete'")
    assert "line 4000" in reader.tab.evaluate(TEXT)
    file = reader.tab.evaluate("fetch(document.querySelector('a[download]').href).then(e => e.text())")  # fmt: skip
    assert file.count("\n") == 4000


def test_a_team_is_steered_from_the_pages(reader: Reader) -> None:
    reader.open("/team")
    store = "document.getElementById('new-secret').open = true; const f = document.querySelector('#new-secret form'); f.elements.name.value = 'HF_TOKEN'; f.elements.value.value = 's3cret-value'; f.requestSubmit()"  # fmt: skip
    reader.tab.evaluate(store)
    reader.tab.wait(f"{TEXT}.includes('HF_TOKEN')")
    assert "s3cret-value" not in reader.tab.evaluate("document.documentElement.outerHTML")
    policy = "{const f = [...document.forms].find(e => e.action.endsWith('/policy')); f.elements.max_gpus.value = '8'; f.requestSubmit()}"  # fmt: skip
    reader.tab.evaluate(policy)
    reader.tab.wait("document.querySelector('[name=max_gpus]')?.value === '8'")
    reader.look()
    reader.open("/audit")
    assert "policy" in reader.tab.evaluate(TEXT)
