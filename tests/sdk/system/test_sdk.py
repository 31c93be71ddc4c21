"""The Python interface with a real embedded server, whose offers cost money."""

import asyncio
import os
import signal
import ssl
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pytest
from tests.agent.system.test_agent_endpoints import forward, make_certificate
from tests.system.server_state import home_with_jobs
from tests.waits import PATIENCE_S, wait_until

from cavvy import (
    AsyncClient,
    CavvyError,
    Client,
    ConsentNeeded,
    InvalidTask,
    Job,
    JobFailed,
    JobNotFound,
    NoOffer,
    ServerUnavailable,
    Task,
    WaitTimeout,
)
from cavvy.client.state import read_server, read_token

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("sdk")
    (folder / "settings.toml").write_text("[providers.local]\nprice_usd_hr = 3600\n")
    with home_with_jobs(folder / "home") as made:
        yield made


@pytest.fixture(scope="module")
def client(home: Path) -> Iterator[Client]:
    with Client() as made:
        yield made


def waits_for(file: Path, before: str = "true") -> Task:
    """A task that runs until the file exists."""
    return Task(f"{before}; while [ ! -e {file} ]; do sleep 0.05; done", name="waits")


def test_a_job_from_its_files_to_its_bill(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(
        "import os, sys\n"
        "print('lr', os.environ['CAVVY_PARAM_LR'])\n"
        'print(\'CAVVY_PROGRESS {"done": 2, "total": 2, "loss": 0.25}\')\n'
        "open('model.bin', 'w').write('weights')\n"
    )
    monkeypatch.chdir(tmp_path)
    task = Task(
        "python3 train.py",
        workdir=".",
        params={"lr": 0.1},
        outputs=[{"source": "model.bin", "target": tmp_path / "out" / "model.bin"}],
    )
    job = client.submit(task, params={"lr": 0.2}, name="whole", max_cost=50)
    assert "lr 0.2" in list(job.logs(follow=True))
    status = job.wait()
    assert (status.phase, status.exit_code, status.ended) == ("done", 0, True)
    assert job.metrics() == {"loss": 0.25}
    assert job.outputs() == {"model.bin": str(tmp_path / "out" / "model.bin")}
    assert (tmp_path / "out" / "model.bin").read_text() == "weights"
    wait_until(lambda: job.cost().final)
    cost = job.cost()
    assert cost.total_usd == sum(item.amount_usd for item in cost.items) > 0
    assert cost.items[0].rate_usd_per_hour == Decimal(3600)
    assert cost.running > timedelta(0)
    assert client.cost() >= cost.total_usd
    assert next(job.events()).kind == "queued"
    assert client.job("whole").id == job.id
    assert job.id in [each.id for each in client.jobs(phases=["done"])]
    with pytest.raises(CavvyError, match="done"):
        job.retry()
    job.remove()
    with pytest.raises(JobNotFound, match=job.id):
        job.status()


def test_operators_see_and_change_hosts_reservations_and_policies(
    client: Client, tmp_path: Path
) -> None:
    (box,) = client.hosts()
    assert (box.state, box.holders, box.reservations) == ("ready", (), ())
    job = client.submit(waits_for(tmp_path / "go"), consent=True)
    job.wait("running")
    host = client.cordon(box.name, reason="fan")
    assert (host.state, "fan" in host.why) == ("cordoned", True)
    (holder,) = host.holders
    assert (holder.job, holder.project, holder.job_id) == (job.name, job.project, job.id)
    assert (type(holder.lost), type(holder.lost_usd)) == (timedelta, Decimal)
    assert client.uncordon(box.name).state == "ready"
    host = client.drain(box.name, within=timedelta(hours=1))
    assert host.state == "draining"
    assert host.drain_by is not None
    assert client.uncordon(box.name).drain_by is None

    begin = datetime.now(UTC) + timedelta(days=1)
    made = client.reserve("4h", hosts=[box.name], begin=begin, name="demo", reason="show")
    assert (made.name, [*made.hosts], made.ends_at - begin) == (
        "demo",
        [box.name],
        timedelta(hours=4),
    )
    assert [each.name for each in client.reservations(project=made.project)] == ["demo"]
    assert client.hosts()[0].reservations == (made,)
    client.remove_reservation("demo")
    assert client.reservations() == []
    with pytest.raises(CavvyError, match="no reservation"):
        client.remove_reservation("demo")

    policy = client.set_policy(share=2, max_usd_per_hour="7200.5", user_accelerators={"H100": 4})
    assert (policy.share, policy.max_usd_per_hour) == (2, Decimal("7200.5"))
    assert client.set_policy(user_jobs=3).max_usd_per_hour == Decimal("7200.5")  # it is kept
    assert client.policies()[-1].user_accelerators == {"H100": 4}
    (share,) = client.shares(project=job.project)
    assert (share.weight, share.jobs, share.usd_per_hour) == (2, 1, Decimal(3600))
    client.delete_policy()
    assert client.policies() == []
    (tmp_path / "go").touch()
    job.wait()


def test_a_failed_job_raises_the_end_of_its_log(client: Client) -> None:
    job = client.submit(Task("echo first; echo the reason >&2; exit 7"), consent=True)
    with pytest.raises(JobFailed, match="exit code 7") as caught:
        job.wait()
    assert "  first\n  the reason" in str(caught.value)
    assert "job.logs()" in str(caught.value)
    assert caught.value.status.exit_code == 7
    assert job.wait(check=False).phase == "failed"
    retried = job.retry()
    assert retried.phase != "failed"
    job.wait(check=False)


def test_a_wait_can_end_early_and_a_stop_ends_the_job(client: Client, tmp_path: Path) -> None:
    job = client.submit(waits_for(tmp_path / "go"), consent=True)
    assert job.wait("running").phase == "running"
    with pytest.raises(WaitTimeout, match="still running") as caught:
        job.wait(timeout=timedelta(milliseconds=10))
    assert isinstance(caught.value, TimeoutError)
    html = job._repr_html_()
    for part in ("<td", "running", "local/", "$3,600", job.id):
        assert part in html
    assert job.stop().phase == "stopped"
    with pytest.raises(JobFailed, match="was stopped"):
        job.wait()


def test_a_job_in_a_notebook_is_escaped(client: Client) -> None:
    from cavvy.domain.values import replace
    from cavvy.sdk.status import show_job

    job = client.submit(Task("true"), consent=True)
    status = job.wait()
    assert str(status) == "done: the work succeeded"
    assert "the work succeeded" in status._repr_html_()
    shown = job._repr_html_()  # reads the status again: the bill may have grown
    assert "the work succeeded" in shown
    assert [str(each).endswith(f" {each.text}") for each in job.events()][-1:] == [True]
    assert "<script" not in show_job(replace(job.last_status, reason="<script>"), "<script>")


def test_what_costs_money_needs_consent(client: Client) -> None:
    with pytest.raises(ConsentNeeded, match=r"(?s)3,?600.*consent=True"):
        client.submit(Task("true"))
    client.submit(Task("true", limits={"budget": 10})).wait()
    with pytest.raises(ValueError, match="max_cost"):
        client.submit(Task("true"), max_cost="a lot")


def test_a_task_that_cannot_run_is_refused(client: Client, tmp_path: Path) -> None:
    with pytest.raises(NoOffer, match="cpu"):
        client.submit(Task("true", resources={"cpu": 10_000}), consent=True)
    with pytest.raises(InvalidTask, match="missing"):
        client.submit(Task("true", workdir=tmp_path / "missing"), consent=True)
    with pytest.raises(CavvyError, match=r"(?s)HF_TOKEN.*cavvy secret set"):
        client.submit(Task("true", secrets=["HF_TOKEN"]), consent=True)
    with pytest.raises(InvalidTask, match="lr"):
        client.submit(Task("true", params={"lr": 0.1}), params={"lr": "fast"}, consent=True)
    with pytest.raises(InvalidTask, match="cavvy run"):
        client.submit(Task("true", work={"samples": 10, "profile": "profile.json"}), consent=True)


@pytest.mark.parametrize("follows", ["wait", "logs"])
def test_ctrl_c_leaves_the_job_running(client: Client, tmp_path: Path, follows: str) -> None:
    job = client.submit(waits_for(tmp_path / "go", "echo on"), consent=True)
    job.wait("running")
    lines = job.logs(follow=True)
    assert next(lines) == "on"
    main = threading.get_ident()

    def interrupt() -> None:
        name = "look" if follows == "wait" else "log_chunks"
        wait_until(lambda: name in stack_of(main), pause_s=0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt, match=r"keeps running; job\.stop\(\)"):
        job.wait() if follows == "wait" else next(lines)
    assert job.status().phase == "running"
    (tmp_path / "go").touch()
    assert job.wait().phase == "done"


def stack_of(thread: int) -> list[str]:
    names, frame = [], sys._current_frames().get(thread)
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names


def test_threads_share_a_client(client: Client) -> None:
    found: list[str] = []

    def work(number: int) -> None:
        job = client.submit(Task(f"echo {number}"), name=f"thread-{number}", consent=True)
        found.extend(job.logs(follow=True))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sorted(found) == ["0", "1", "2", "3"]


def test_coroutines_wait_for_several_jobs(home: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with AsyncClient() as client:
            jobs = [await client.submit(Task(f"echo {n}"), consent=True) for n in range(3)]
            done = await asyncio.gather(*(job.wait() for job in jobs))
            assert [status.phase for status in done] == ["done"] * 3
            assert [line async for line in jobs[2].logs(follow=True)] == ["2"]
            assert (await jobs[0].cost()).total_usd >= 0
            assert await jobs[0].metrics() == {}
            assert jobs[0].id in {each.id for each in await client.jobs()}
            assert (await client.job(jobs[0].id)).name == jobs[0].name
            with pytest.raises(JobFailed):
                await (await client.submit(Task("exit 3"), consent=True)).wait()
            assert "done" in jobs[0]._repr_html_()

    asyncio.run(main())


def test_arrays_with_coroutines(home: Path) -> None:
    async def main() -> None:
        async with AsyncClient() as client:
            text = """echo "CAVVY_PROGRESS {\\"size\\": ${#CAVVY_PARAM_ITEM}}" """
            array = await client.map(text, ["a b", "c"], name="items", parallel=1, consent=True)
            found = await array.wait()
            assert [each.params["item"] for each in found] == ["a b", "c"]
            assert (await array.best("size", highest=True)).params == {"item": "a b"}
            await array.remove()
            with pytest.raises(JobNotFound):
                await client.array("items")
            task = Task("exit $CAVVY_ARRAY_INDEX")
            array = await client.submit_array(task, array="0-1", name="exits", consent=True)
            with pytest.raises(JobFailed):
                await array.wait()
            assert await array.counts() == {"done": 1, "failed": 1}
            assert (await (await client.array("exits")).job(1)).name == "exits.1"

    asyncio.run(main())


def test_a_cancelled_wait_leaves_the_job_running(home: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with AsyncClient() as client:
            job = await client.submit(waits_for(tmp_path / "go", "echo on"), consent=True)
            await job.wait("running")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await job.wait()
            lines = job.logs(follow=True)
            assert await anext(lines) == "on"
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await anext(lines)
            assert (await job.status()).phase == "running"
            kinds = [each.kind async for each in job.events()]
            assert kinds[0] == "queued"
            assert (await job.stop()).phase == "stopped"

    asyncio.run(main())


def test_a_server_elsewhere(
    home: Path, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, token = read_server(str(home)), read_token(str(home))
    assert server is not None
    certificate = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with forward(server.address.removeprefix("unix:"), context) as port:
        address = f"https://localhost:{port}"
        with pytest.raises(ServerUnavailable, match="is not trusted: self-signed"):
            Client(address, token=token)
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
        with pytest.raises(CavvyError, match="token"):
            Client(address, token="wrong")
        with Client(address, token=token) as there:
            job = there.submit(Task("echo far"), consent=True)
            assert list(job.logs(follow=True)) == ["far"]
            assert job.wait().phase == "done"
    with (
        forward(server.address.removeprefix("unix:"), None) as port,
        Client(f"http://127.0.0.1:{port}", token=token) as there,
    ):
        assert there.job(job.id).wait().phase == "done"
    with pytest.raises(ServerUnavailable, match="check the address"):
        Client(f"http://127.0.0.1:{port}", token=token)


@pytest.mark.parametrize(
    ("address", "token", "message"),
    [
        ("http://cavvy.example.org", "x", "others could read the token"),
        ("cavvy.example.org:80", "x", "is not the address of a server"),
        ("https://cavvy.example.org/path", "x", "is not the address of a server"),
        ("https://cavvy.example.org", None, "no token for https://cavvy.example.org"),
        (None, "x", "`token` was given without `address`"),
    ],
)
def test_an_address_that_cannot_be_used(
    address: str | None, token: str | None, message: str
) -> None:
    with pytest.raises(CavvyError, match=message):
        Client(address, token=token)


def test_a_closed_client_says_so(home: Path) -> None:
    client = Client()
    client.close()
    with pytest.raises(CavvyError, match="closed"):
        client.jobs()


def test_jobs_of_other_projects_are_apart(client: Client, home: Path) -> None:
    with Client(project="other") as other:
        job: Job = other.submit(Task("true"), consent=True)
        job.wait()
        assert job.project == "other"
        assert [each.id for each in other.jobs()] == [job.id]
        with pytest.raises(JobNotFound):
            client.job(job.id)
        assert client.job(job.id, project="other").id == job.id
