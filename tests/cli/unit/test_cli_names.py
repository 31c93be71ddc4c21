"""What the name in a command of jobs means: a job, a machine's session, an array or a service."""

import json
from collections.abc import Generator, Iterator
from typing import Any

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result
from tests.unit.cli_client import T0, FakeClient, client, make_event, make_job, make_machine

import cavvy.client
from cavvy.cli import logs
from cavvy.cli.main import cli
from cavvy.cli.reach import services
from cavvy.client import ApiError, ExecChunk, wire
from cavvy.client.array_wire import ArrayDetail, ArrayMemberView
from cavvy.client.ledger_wire import LedgerSumView
from cavvy.client.service_wire import NamedService, ReplicaView

__all__ = ["client"]


def make_service(*states: str, target: int | None = None, state: str = "ready") -> NamedService:
    replicas = [
        ReplicaView(
            job=f"id-of-web.{number}",
            number=number,
            revision=1,
            state=each,
            reason="",
            place="",
            port=8000,
            ordered_at=T0,
            ready_at=T0,
            ended_at=None,
            in_flight=0,
            start_s={},
        )
        for number, each in enumerate(states, 1)
    ]
    return NamedService(
        project="default",
        name="web",
        state=state,
        url="http://127.0.0.1:1/default/web",
        models=[],
        revision=1,
        ready=states.count("ready"),
        target=len(states) if target is None else target,
        why="no request",
        problem="",
        replicas=replicas,
    )


def make_array(*phases: str) -> ArrayDetail:
    job = make_job("sweep", "running")
    listing = {each: getattr(job, each) for each in wire.JobListing.__struct_fields__}
    members = [
        ArrayMemberView(
            index=index,
            id=f"id-of-sweep.{index}",
            name=f"sweep.{index}",
            phase=phase,
            reason="",
            attempt=1,
            exit_code=None,
            placement=None,
            since=T0,
            ended_at=None,
            spent_micros=0,
            params={},
            progress={},
        )
        for index, phase in enumerate(phases)
    ]
    return ArrayDetail(array=wire.JobListing(**listing), parallel=None, jobs=members)


class Named(FakeClient):
    """A client whose project has a service `web` and an array `sweep`."""

    services: list[NamedService | None]  # as they are from one look to the next
    array: ArrayDetail
    ledger: list[LedgerSumView]

    def ask(self, target: str, kind: Any, body: Any = None, *, method: str = "") -> Any:
        if target.startswith("/v1/projects/default/services/web"):
            found = self.services.pop(0) if len(self.services) > 1 else self.services[0]
            if found is not None:
                return found
        if target.startswith("/v1/projects/default/arrays/sweep"):
            return self.array
        if kind == list[LedgerSumView]:
            return self.ledger
        return super().ask(target, kind, body, method=method)

    def events(
        self, project: str, name: str, *, after: int = 0, wait_s: float = 0
    ) -> wire.EventPage:
        self.job(project, name)
        return super().events(project, name, after=after, wait_s=wait_s)

    def follow(self, project: str, name: str, *, after: int = 0) -> Iterator[wire.EventView]:
        self.job(project, name)
        return super().follow(project, name, after=after)

    def exec(
        self, project: str, name: str, command: list[str], *, rank: int = 0
    ) -> Generator[ExecChunk]:
        yield from super().exec(project, self.job(project, name).name, command, rank=rank)

    def cost(self, project: str, name: str) -> wire.CostView:
        return super().cost(project, self.job(project, name).name)


@pytest.fixture
def named(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> Named:
    names = ("web.1", "web.2", "sweep.0", "sweep.1", "dev-3")
    found = Named(all_jobs={each: make_job(each, "running") for each in names})
    found.services, found.array, found.ledger = [make_service("ready")], make_array("running"), []
    monkeypatch.setattr(cavvy.client, "connect", lambda **how: found)
    monkeypatch.setattr(services, "_LOOK_AGAIN_S", 0)
    return found


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments, prog_name="cavvy")


def test_a_command_on_a_node_finds_a_replica_that_is_ready(named: Named) -> None:
    assert run("exec", "web", "--", "ls").stdout == "some output\n"
    assert named.asked == [("exec", "web.1", ["ls"], 0)]
    named.services = [make_service("starting", "ready")]
    found = run("exec", "web", "--", "ls")
    assert (named.asked[-1][1], found.stderr) == ("web.2", "web.2: one of 2 replicas of web\n")
    run("nodes", "drill", "preempt", "web")
    assert named.asked[-1][:2] == ("drill", "id-of-web.2")
    named.services = [make_service()]
    found = run("exec", "web", "--", "ls")
    assert (found.exit_code, "has no replica now" in found.stderr) == (1, True)
    assert "`cavvy call web`" in found.stderr


def test_a_command_on_a_node_acts_on_the_only_job_that_runs_of_an_array(named: Named) -> None:
    named.array = make_array("done", "running")
    assert run("exec", "sweep", "--", "ls").exit_code == 7
    assert named.asked == [("exec", "sweep.1", ["ls"], 0)]
    named.array = make_array("running", "running")
    found = run("exec", "sweep", "--", "ls")
    assert (found.exit_code, "sweep.0, sweep.1 run now" in found.stderr) == (2, True)
    named.array = make_array("done")
    assert "no job runs" in run("exec", "sweep", "--", "ls").stderr
    assert len(named.asked) == 1


def test_a_command_that_needs_one_job_names_those_of_an_array_or_a_service(named: Named) -> None:
    named.services = [make_service("ready", "ready")]
    found = run("diff", "web", "sweep.0")
    assert (found.exit_code, "its jobs are web.1, web.2" in found.stderr) == (2, True)
    found = run("diff", "sweep", "sweep.0")
    assert (found.exit_code, "its jobs are sweep.0" in found.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "instead"),
    [
        (("rm", "web"), "cavvy stop web"),
        (("retry", "web"), "cavvy serve"),
        (("rerun", "web"), "cavvy serve"),
    ],
)
def test_what_a_service_cannot_do_says_what_to_do(
    named: Named, arguments: tuple[str, ...], instead: str
) -> None:
    found = run(*arguments)
    assert (found.exit_code, "web is a service" in found.stderr) == (2, True), found.stderr
    assert instead in found.stderr


def test_events_are_those_of_all_jobs(named: Named) -> None:
    named.story = [make_event(1, "queued", "submitted"), make_event(2, "running", "runs")]
    named.array = make_array("done", "done")
    rows = json.loads(run("events", "sweep", "-o", "json").stdout)
    assert {each["job"] for each in rows} == {"sweep.0", "sweep.1"}
    shown = run("events", "sweep", "-f").stdout.splitlines()
    assert len(shown) == len(rows) == 4
    assert sum("sweep.1" in each for each in shown) == 2
    rows = json.loads(run("events", "web", "-o", "json").stdout)
    assert {each["replica"] for each in rows} == {"web.1"}
    named.sessions = {"dev": "dev-3"}
    assert len(json.loads(run("events", "dev", "-o", "json").stdout)) == 2
    assert len(run("events", "dev", "-f").stdout.splitlines()) == 2


def test_the_cost_of_a_service_is_that_of_its_replicas_also_after_its_end(named: Named) -> None:
    def make_sum(service: str | None, job: str, micros: int) -> LedgerSumView:
        groups = {"service": service, "job": job}
        return LedgerSumView(groups=groups, amount_micros=micros, discount_micros=0, jobs=1)

    assert "nothing was charged for web yet" in run("cost", "web").stdout
    named.ledger = [make_sum("web", "web.1", 1_250_000), make_sum(None, "train", 5_000_000)]
    for found in (make_service("ready"), None):
        named.services = [found]
        shown = run("cost", "web").stdout
        assert "total $1.25" in shown
        assert "train" not in shown
    found_cost = run("cost", "nothing")
    assert (found_cost.exit_code, "has no job nothing" in found_cost.stderr) == (1, True)
    named.sessions = {"dev": "dev-3"}
    assert run("cost", "dev").exit_code == 0


def test_a_service_is_waited_for_until_it_is_ready_or_has_ended(named: Named) -> None:
    starting = make_service("starting", "ready")
    named.services = [starting, starting, make_service("ready", "ready")]
    found = run("wait", "web", "--for", "running")
    assert (found.exit_code, found.stdout) == (0, "web: 2 of 2 replicas ready\n")
    assert found.stderr == "web: 1 of 2 replicas ready\n"
    named.services = [make_service(target=0, state="idle")]
    assert run("wait", "web", "--for", "running").exit_code == 0
    named.services = [make_service("ready"), make_service("ready", state="ending"), None]
    found = run("wait", "web")
    assert (found.exit_code, found.stdout) == (0, "service web has ended\n")
    named.services = [make_service("ready")]
    assert run("wait", "web", "--timeout", "0s").exit_code == 124
    named.services = [starting]
    assert run("wait", "web", "--for", "running", "--timeout", "0s").exit_code == 124


def test_ps_lists_the_replicas_of_a_service(named: Named) -> None:
    named.services = [make_service("ready", "ready")]
    assert [each["name"] for each in json.loads(run("ps", "web", "-o", "json").stdout)] == [
        "web.1",
        "web.2",
    ]
    assert [each["name"] for each in json.loads(run("ps", "web.1", "-o", "json").stdout)] == [
        "web.1"
    ]
    assert run("ps", "web", "--best", "loss:min").exit_code == 2


@pytest.mark.parametrize("command", ["status", "stop", "events", "cost", "wait"])
def test_a_name_that_nothing_has_is_refused_with_what_the_server_says(
    named: Named, command: str
) -> None:
    found = run(command, "nothing")
    assert (found.exit_code, found.stdout) == (1, "")
    assert "project default has no job nothing" in found.stderr


def test_a_machine_without_a_session_is_named(named: Named) -> None:
    named.named = [make_machine("box")]
    found = run("events", "box")
    assert "machine box has no session" in found.stderr
    assert "`cavvy machines stop box`" in found.stderr


def test_another_error_of_the_server_is_not_hidden(
    named: Named, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(project: str, name: str, **how: object) -> None:
        raise ApiError("role-needed", "you may not see jobs", "", 403)

    monkeypatch.setattr(named, "job", refuse)
    assert "you may not see jobs" in run("status", "web").stderr


def test_replicas_have_the_names_of_their_jobs(named: Named) -> None:
    """A service of a former one's name has replicas whose jobs are called otherwise."""
    named.all_jobs["web.1"] = make_job("web.1", "done", id="old")
    named.all_jobs["web.1-2"] = make_job("web.1-2", "running", id="id-of-web.1")
    named.services = [make_service("ready", "ready")]
    assert run("exec", "web", "--", "ls").stderr == "web.1-2: one of 2 replicas of web\n"
    assert named.asked[-1][1] == "web.1-2"
    assert "its jobs are web.1-2, web.2" in run("diff", "web", "web.2").stderr
    named.story = [make_event(1, "queued", "submitted")]
    rows = json.loads(run("events", "web", "-o", "json").stdout)
    assert {each["replica"] for each in rows} == {"web.1-2", "web.2"}
    run("logs", "web", "--replica", "1")
    assert named.looked[-1] == "id-of-web.1"


def test_names_of_services_are_completed_where_those_of_jobs_are(named: Named) -> None:
    named.served = [make_service("ready")]
    complete = ShellComplete(cli, {}, "cavvy", "_CAVVY_COMPLETE")
    assert {each.value for each in complete.get_completions(["logs"], "we")} == {
        "web",
        "web.1",
        "web.2",
    }
    assert {each.value for each in complete.get_completions(["cp"], "we")} >= {"web:"}
    assert "web" not in {each.value for each in complete.get_completions(["logs"], "web.")}


def test_events_of_a_large_array_are_those_of_its_first_jobs(
    named: Named, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "MOST_HISTORIES", 1)
    named.story = [make_event(1, "queued", "submitted")]
    named.array = make_array("done", "done")
    found = run("events", "sweep", "-o", "json")
    assert {each["job"] for each in json.loads(found.stdout)} == {"sweep.0"}
    assert "the first 1 of 2 jobs; name a job, such as sweep.1" in found.stderr
