"""The commands about jobs: what they print for people and for programs, what they ask for, and
how they exit.
"""

import csv
import io
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import click
import msgspec
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result
from tests.unit.cli_client import (
    FakeClient,
    at,
    client,
    make_attempt,
    make_event,
    make_job,
    make_machine,
    make_node,
)

from cavvy.catalog.tables import list_api_prices
from cavvy.cli import down, logs
from cavvy.cli.access import exec_command, has_input
from cavvy.cli.main import COMMANDS, cli
from cavvy.cli.view import synonyms
from cavvy.client import ApiError, ConnectionLost, ExecChunk, wire
from cavvy.client.errors import FOR_PROGRAMS
from cavvy.client.ledger_wire import LedgerEntryView, LedgerSumView, TokensView
from cavvy.client.policy_wire import PolicyAsk, ProjectPolicyView, UserLimitsView
from cavvy.client.queue_wire import ShareReport
from cavvy.client.token_prices import rate_apis
from cavvy.domain.elastic import NodeRange
from cavvy.domain.jobs import RunOrigin
from cavvy.domain.tasks import StartWindow, TaskSpec
from cavvy.domain.values import replace

__all__ = ["client"]
FOUND = wire.CleanupItem(
    kind="gang", name="rm-0-x-1", where="local/box", why="no unfinished job wants it", done=False
)


def run(*arguments: str, given: str | None = None) -> Result:
    return CliRunner().invoke(cli, arguments, input=given, prog_name="cavvy")


def lines(result: Result) -> list[list[str]]:
    return [line.split() for line in result.stdout.splitlines()]


def test_ps_lists_jobs_for_people_and_for_programs(client: FakeClient) -> None:
    shown = lines(run("ps"))
    assert shown[0] == [
        "NAME",
        "PROJECT",
        "PHASE",
        "SUBMITTED",
        "TRY",
        "EXIT",
        "SPENT",
        "PLACEMENT",
        "QUEUE",
        "REASON",
    ]
    assert [line[0] for line in shown[1:]] == ["good", "bad", "next", "now"]
    rows = json.loads(run("ps", "-o", "json").stdout)
    assert rows[1]["exit_code"] == 3
    assert rows[1]["spent_micros"] == 10_000
    assert rows[2]["placement"] is None
    assert [row["id"] for row in csv.DictReader(io.StringIO(run("ps", "-o", "csv").stdout))] == [
        row["id"] for row in rows
    ]


def test_status_tells_how_old_the_newest_checkpoint_of_unfinished_work_is(
    client: FakeClient,
) -> None:
    task = msgspec.Raw(b'{"checkpoint": {"path": "ck"}}')
    tries = [make_attempt(1, checkpoint_at=at(5)), make_attempt(2)]
    client.all_jobs["safe"] = make_job("safe", "running", task=task, attempts=tries)
    client.all_jobs["new"] = make_job("new", "running", task=task, attempts=tries[1:])
    client.all_jobs["over"] = make_job("over", "done", task=task, attempts=tries)
    safe = " ".join(run("status", "safe").stdout.split())
    assert "newest safe checkpoint: " in safe
    assert "none yet" not in safe
    assert "newest safe checkpoint: none yet" in run("status", "new").stdout
    assert "safe checkpoint" not in run("status", "over").stdout


def test_status_names_files_that_no_checkpoint_has(client: FakeClient) -> None:
    unsafe = wire.UnsafeView(at=at(5), rank=0, reason="states.h5 has never been safe")
    task = msgspec.Raw(b'{"checkpoint": {"path": "ck"}}')
    tries = [make_attempt(1, checkpoint_at=at(5), unsafe=unsafe), make_attempt(2)]
    told = f"not safe {unsafe.reason}"
    for name, phase, attempts, shown in (
        ("own", "running", tries[:1], True),
        ("failed", "failed", tries[:1], True),
        ("next", "running", tries, True),  # as long as it has saved nothing
        ("saved", "running", [tries[0], make_attempt(2, checkpoint_at=at(9))], False),
        ("done", "done", tries[:1], False),
    ):
        job = make_job(name, phase, task=task, attempts=attempts, attempt=len(attempts))
        client.all_jobs[name] = job
        assert (told in " ".join(run("status", name).stdout.split())) is shown, name


def test_status_tells_what_was_decided_why_and_what_to_expect(client: FakeClient) -> None:
    plan_state = wire.PlanStateView(
        at=at(5), mode="spot", reason="spot is still available", placement="aws/eu/a/m:0/spot"
    )
    client.all_jobs["steered"] = make_job("steered", "running", plan_state=plan_state, standbys=[2])
    told = " ".join(run("status", "steered").stdout.split())
    assert "spot on aws/eu/a/m:0/spot" in told
    assert "spot is still available" in told
    assert "standby gang attempt 2" in told
    assert (
        "$1.50 more expected ($0.90 to $4.00 in 80 % of simulated runs); "
        "about 6h30m left; the job ends in time in 98% of the runs" in told
    )
    assert json.loads(run("status", "steered", "-o", "json").stdout)["forecast"]["in_time"] == 0.98
    client.all_jobs["over"] = make_job("over", "done", plan_state=plan_state)
    assert "forecast" not in run("status", "over").stdout


def test_status_lists_every_place_that_said_no_and_until_when_it_rests(client: FakeClient) -> None:
    placement, until = "aws/eu/a/m:0/spot", datetime(2099, 1, 1, 12, 30, tzinfo=UTC)
    refused = [
        make_attempt(
            number, placement=placement, phase="ended", outcome="capacity", reason="sold out"
        )
        for number in (1, 2)
    ]
    client.all_jobs["seeks"] = make_job(
        "seeks", "starting", attempts=[*refused, make_attempt(3)], avoid={placement: until}
    )
    told = run("status", "seeks").stdout
    [line] = [
        line.split()
        for line in told.partition("failed placements")[2].splitlines()
        if placement in line
    ]
    assert line[:2] == [placement, "2"]
    assert "12:30:00 UTC sold out" in " ".join(line)
    assert "failed placements" not in run("status", "now").stdout


def test_ps_by_phase_and_with_a_limit(client: FakeClient) -> None:
    assert [
        row["name"] for row in json.loads(run("ps", "--phase", "failed", "-o", "json").stdout)
    ] == ["bad"]
    assert [row["name"] for row in json.loads(run("ps", "-n", "2", "-o", "json").stdout)] == [
        "good",
        "bad",
    ]


def test_ps_says_that_there_are_older_jobs(client: FakeClient) -> None:
    client.all_jobs = {f"j{n}": make_job(f"j{n}", "done") for n in range(21)}
    assert run("ps").stdout.endswith("… show older jobs: cavvy ps --all\n")
    assert len(json.loads(run("ps", "--all", "-o", "json").stdout)) == 21
    client.all_jobs = {}
    assert "cavvy run" in run("ps").stdout


def test_status_lists_the_sizes_of_a_job_over_time(client: FakeClient) -> None:
    three = [make_node(rank=rank) for rank in range(3)]
    first = make_attempt(1, gang="g@1", nodes=three, running_at=at(2), finished_at=at(60))
    second = make_attempt(
        2, gang="g", nodes=three, repairs=[1], launched_at=at(60), running_at=at(73)
    )
    client.all_jobs["lost"] = make_job("lost", "running", attempts=[first, second], attempt=2)
    told = run("status", "lost").stdout.partition("sizes over time")[2]
    rows = [line.split() for line in told.splitlines()[1:4]]
    assert rows[1][:2] == ["1", "3"]
    assert rows[2][-6:] == ["1", "of", "3", "replaced", "13s", "$0.04"]
    assert "sizes over time" not in run("status", "now").stdout


def test_status_names_the_ranks_whose_gpus_are_idle(client: FakeClient) -> None:
    idle_s = (0, 299, 300, 5400)
    nodes = [make_node(rank=at, telemetry={"gpu_idle_s": each}) for at, each in enumerate(idle_s)]
    nodes[2] = replace(nodes[2], exited_at=datetime.now(UTC))
    client.all_jobs["now"] = make_job("now", "running", attempts=[make_attempt(1, nodes=nodes)])
    told = run("status", "now").stdout
    assert "idle gpus  rank 3 for 1h30m\n" in told
    client.all_jobs["now"] = make_job("now", "done", attempts=[make_attempt(1, nodes=nodes)])
    assert "idle gpus" not in run("status", "now").stdout


def test_status_tells_where_a_job_stands(client: FakeClient) -> None:
    told = run("status", "now").stdout
    assert "now (id-of-now) in project default" in told
    assert "3/12 epochs  loss 0.25  9s left" in told
    assert "queue      position 2" in run("status", "next").stdout
    assert "exit code 3" in " ".join(run("status", "bad").stdout.split())
    whole = json.loads(run("status", "now", "-o", "json").stdout)
    assert whole["attempts"][0]["nodes"][0]["progress"]["done"] == 3
    assert whole["task"]["run"] == "true"


def test_a_job_that_is_not_there_is_told_with_what_to_do(client: FakeClient) -> None:
    for command in (
        ["status"],
        ["logs"],
        ["logs", "-f"],
        ["stop"],
        ["retry"],
        ["cost"],
        ["rerun"],
        ["drill", "preempt"],
    ):
        answer = run(*command, "nobody")
        assert answer.exit_code == 1, command
        assert (
            answer.stderr
            == "error: project default has no job nobody\nhint: `cavvy ps` lists the jobs\n"
        )


def test_events_say_the_day_once(client: FakeClient) -> None:
    client.story = [
        make_event(1, "queued", "submitted", attempt=0),
        make_event(2, "placed", "starts on local/box"),
        make_event(3, "running", "runs on local/box"),
    ]
    shown = lines(run("events", "good"))
    assert shown[0] == ["2026-01-02", "UTC", "TRY", "RANK", "KIND", "TEXT"]
    assert shown[1][:4] == ["03:04:06", "-", "-", "queued"]
    assert len(shown) == 4
    client.story.append(make_event(86_400, "done", "the work succeeded"))
    shown = lines(run("events", "good"))
    assert shown[0][:2] == ["TIME", "(UTC)"]
    assert shown[-1][:2] == ["2026-01-03", "03:04:05"]
    rows = json.loads(run("events", "good", "-o", "json").stdout)
    assert [row["id"] for row in rows] == [1, 2, 3, 86_400]
    assert rows[0]["attempt"] == 0
    assert rows[1]["at"] == "2026-01-02T03:04:07+00:00"


def test_followed_events_come_as_lines(client: FakeClient) -> None:
    client.story = [make_event(1, "exited", "exit code 0", rank=3)]
    assert run("events", "-f", "good").stdout == "03:04:06 UTC  exited      rank 3: exit code 0\n"


def test_logs_print_the_bytes(client: FakeClient) -> None:
    client.log_bytes = b"one\ntwo\n\xff three\nfour"
    assert run("logs", "good").stdout_bytes == client.log_bytes
    assert run("logs", "good", "--tail", "2").stdout_bytes == b"\xff three\nfour"
    assert run("logs", "good", "--tail", "0").stdout_bytes == b""
    assert run("logs", "good", "--tail", "99").stdout_bytes == client.log_bytes


@pytest.mark.parametrize(("name", "code"), [("good", 0), ("bad", 3), ("halted", 130)])
def test_following_passes_the_exit_code_on(client: FakeClient, name: str, code: int) -> None:
    client.all_jobs["halted"] = make_job("halted", "stopped")
    client.log_bytes = b"a line\n"
    answer = run("logs", "-f", name)
    assert answer.exit_code == code
    assert answer.stdout == "a line\n"
    assert "$0.01 (1 attempt, 10s of node time at $3.60/h)" in answer.stderr
    assert "THE SAME RUN ELSEWHERE" not in answer.stderr  # below a cent; `cavvy cost` has it
    assert "queued 1s, starting 2s, running 6.5s, lost 0.5s, stopping 0s" in answer.stderr


def test_stop_says_what_became_of_each(client: FakeClient) -> None:
    answer = run("stop", "now", "bad")
    assert answer.stdout == "now: stopped, stopped by the user\nbad: failed, exit code 3\n"
    assert run("stop", "--all").stdout == "next: stopped, stopped by the user\n"
    assert run("stop", "--all").stdout == "project default has no unfinished jobs\n"
    assert [what[1] for what in client.asked] == ["now", "bad", "next"]


def test_the_jobs_of_one_user_are_listed_and_stopped(client: FakeClient) -> None:
    """Someone who leaves, or who wants to stop all of their own work on a shared server."""
    assert "USER" not in run("ps").stdout
    client.all_jobs["bobs"] = make_job("bobs", "running", user="bob")
    assert "USER" in run("ps").stdout
    assert [line[0] for line in lines(run("ps", "--user", "bob"))] == ["NAME", "bobs"]
    assert run("ps", "--user", "eve").stdout == "eve has no jobs\n"
    assert run("ps", "bobs", "--user", "bob").exit_code == 2
    client.served = [SimpleNamespace(name="web", state="ready", replicas=[])]
    stopped = run("stop", "--all", "--user", "bob")
    assert stopped.stdout == "bobs: stopped, stopped by the user\n"
    assert stopped.stderr == ""  # the service is not bob's
    again = run("stop", "--all", "--user", "bob")
    assert again.stdout == "project default has no unfinished jobs of bob\n"
    assert client.asked == [("stop", "bobs")]
    assert run("stop", "now", "--user", "bob").exit_code == 2


def test_many_jobs_of_one_user_are_listed_by_pages(client: FakeClient) -> None:
    client.all_jobs |= {f"b{n}": make_job(f"b{n}", "done", user="bob") for n in range(450)}
    assert len(lines(run("ps", "--user", "bob", "--all"))) == 451
    assert len(lines(run("ps", "--user", "bob", "--limit", "7"))) == 8


def test_the_newest_job_of_a_script_in_the_folder_is_found(
    client: FakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("status").exit_code == 2
    (tmp_path / "Now.py").touch()
    found = run("status")
    assert found.stderr == "now: the newest job of this folder's task\n"
    assert "now (id-of-now)" in found.stdout


def test_a_stop_with_an_unknown_name_stops_none_and_says_so(client: FakeClient) -> None:
    answer = run("stop", "now", "nobody")
    assert answer.exit_code == 1
    told = " ".join(answer.stderr.split())
    assert "has no job nobody: none of the 2 is stopped" in told
    assert "leave nobody out" in told
    assert client.asked == []


def test_status_shows_the_nodes_of_an_elastic_job(client: FakeClient) -> None:
    assert "1 of" not in run("status", "now").stdout
    task = TaskSpec(name="now", run="true", elastic=NodeRange(least=2, most=16))
    raw = msgspec.Raw(msgspec.json.encode(task))
    client.all_jobs["now"] = msgspec.structs.replace(client.all_jobs["now"], task=raw)
    assert ["nodes", "1", "of", "2..16"] in lines(run("status", "now"))


def test_numbers_are_refused_without_names_of_types() -> None:
    """Each number of a command has a type of Cavvy's."""

    def walk(command: click.Command) -> Iterator[click.Command]:
        yield command
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                found = command.get_command(context, name)
                assert found is not None
                yield from walk(found)

    plain = [
        (command.name, param.name)
        for command in walk(cli)
        for param in command.params
        if type(param.type) in (click.IntRange, click.FloatRange)
    ]
    assert plain == []


def test_stop_says_that_services_go_on_and_how_to_end_them(client: FakeClient) -> None:
    replica = SimpleNamespace(job="id-of-now")
    client.served = [
        SimpleNamespace(name="web", state="ready", replicas=[replica]),
        SimpleNamespace(name="idle", state="idle", replicas=[]),
        SimpleNamespace(name="gone", state="ending", replicas=[]),
    ]
    assert run("stop", "bad").stderr == ""
    told = run("stop", "now").stderr
    assert "service web goes on" in told
    assert "`cavvy stop web`" in told
    assert "idle" not in told
    every = run("stop", "--all").stderr
    assert [name in every for name in ("web", "idle", "gone")] == [True, True, False]


def test_commands_find_a_session_by_its_machines_name_unless_a_job_has_it(
    client: FakeClient,
) -> None:
    client.all_jobs |= {"dev": make_job("dev", "done"), "dev-2": make_job("dev-2", "failed")}
    client.sessions = {"dev": "dev-2"}
    assert run("wait", "dev").stdout == "dev-2: failed, exit code 3\n"
    assert run("stop", "dev").stdout == "dev-2: failed, exit code 3\n"
    assert "dev-2 (id-of-dev-2)" in run("status", "dev").stdout
    assert run("logs", "-f", "dev").exit_code == 3
    assert "result.phase" in run("diff", "dev", "dev-2").stdout
    assert run("rm", "dev", "--yes").stdout == "dev is removed\n"
    assert "dev-2" in client.all_jobs


@pytest.mark.parametrize(
    ("words", "phase"), [(["logs"], "done"), (["logs", "-f"], "done"), (["stop"], "running")]
)
def test_a_command_stays_with_its_session_when_the_name_leads_to_the_next(
    client: FakeClient, words: list[str], phase: str
) -> None:
    """The second session could end in another way, and must not be stopped."""
    client.all_jobs |= {"dev": make_job("dev", phase), "dev-2": make_job("dev-2", "failed")}
    client.next_session = {"dev": "dev-2"}
    answer = run(*words, "dev")
    assert answer.exit_code == 0, answer.output
    assert client.asked in ([], [("stop", "dev")])
    assert [name for name in client.looked if name not in ("dev", "id-of-dev")] == []
    assert client.looked.count("dev") == 1


@pytest.mark.parametrize(
    "arguments", [["stop"], ["stop", "--all", "now"], ["down"], ["down", "--all", "-p", "x"]]
)
def test_what_ends_things_wants_to_know_which(client: FakeClient, arguments: list[str]) -> None:
    answer = run(*arguments)
    assert answer.exit_code == 2
    assert "expected either" in answer.stderr
    assert client.asked == []


def test_retry_queues_and_follows_or_not(client: FakeClient) -> None:
    assert run("retry", "bad", "--detach").stdout == "bad: queued\n"
    assert run("retry", "bad").exit_code == 3
    assert client.asked == [("retry", "bad")] * 2


def test_exec_passes_output_and_code(client: FakeClient) -> None:
    answer = run("exec", "now", "--rank", "1", "--", "ls", "-l", "--rank", "9")
    assert (answer.stdout, answer.exit_code) == ("some output\n", 7)
    assert client.asked == [("exec", "now", ["ls", "-l", "--rank", "9"], 1)]


@pytest.mark.parametrize(
    ("word", "words"), [("ls", ["ls"]), ("ls | wc -l", ["sh", "-c", "ls | wc -l"])]
)
def test_one_word_of_exec_is_a_line_of_shell(
    client: FakeClient, word: str, words: list[str]
) -> None:
    assert run("exec", "now", "--", word).exit_code == 7
    assert client.asked == [("exec", "now", words, 0)]


@contextmanager
def usual_signals() -> Iterator[None]:
    """A terminal's signals: the tests may run in the background of a shell, which ignores SIGINT,
    or after a test that left a handler."""
    usual = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(
    ("fault", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
)
def test_an_interrupted_exec_ends_its_command(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch, fault: int, code: int
) -> None:
    ends = []

    def interrupt(*_: object, **__: object) -> Iterator[ExecChunk]:
        try:
            yield ExecChunk(data=b"a line\n", exit_code=None)
            signal.raise_signal(fault)
        except BaseException as error:
            ends.append(type(error))
            raise

    monkeypatch.setattr(client, "exec", interrupt)
    with usual_signals():
        answer = run("exec", "now", "--", "top", "-b")
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert (answer.stdout, answer.exit_code) == ("a line\n", code)
    assert ends == [KeyboardInterrupt if fault == signal.SIGINT else SystemExit]


def test_exec_ends_its_command_when_nobody_reads_the_output(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = []

    def produce(*_: object, **__: object) -> Iterator[ExecChunk]:
        try:
            while True:
                yield ExecChunk(data=b"y\n", exit_code=None)
        finally:
            ends.append("ended")

    monkeypatch.setattr(client, "exec", produce)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb", buffering=0) as closed:
        monkeypatch.setattr(
            sys, "stdout", SimpleNamespace(buffer=closed, flush=closed.flush, isatty=lambda: False)
        )
        with pytest.raises(SystemExit):
            exec_command.main(["now", "--", "yes"])
    assert ends == ["ended"]


def test_drill_reads_its_notice(client: FakeClient) -> None:
    told = run("drill", "preempt", "now", "--notice", "1m").stdout
    assert "now: the job's nodes will be reclaimed in 1m00s" in told
    assert client.asked == [("drill", "now", 60.0)]
    wrong = run("drill", "preempt", "now", "--notice", "soon")
    assert wrong.exit_code == 2
    assert "--notice soon" in wrong.stderr


def test_cost_of_one_job_and_of_all(client: FakeClient) -> None:
    told = run("cost", "good").stdout
    assert lines(run("cost", "good"))[1][-2:] == ["$3.60/h", "$0.01"]
    assert "bill  $0.01 (" in told
    assert "THE SAME RUN ELSEWHERE" in told
    whole = json.loads(run("cost", "good", "-o", "json").stdout)
    assert (
        whole["total_micros"]
        == sum(charge["amount_micros"] for charge in whole["charges"])
        == 10_000
    )
    assert len(whole["elsewhere"]) == 3
    assert run("cost").stdout.endswith("total $0.03\n")
    assert [row["spent_micros"] for row in json.loads(run("cost", "-o", "json").stdout)] == [
        10_000,
        10_000,
        0,
        10_000,
    ]


def test_the_cost_of_many_jobs_is_the_newest_jobs_and_the_total(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = client.all_jobs["good"]
    client.all_jobs = {f"job-{n}": msgspec.structs.replace(one, name=f"job-{n}") for n in range(50)}
    total = wire.ProjectCost(project="default", since=None, total_micros=7_770_000)
    monkeypatch.setattr(FakeClient, "project_cost", lambda *_: total)
    told = run("cost").stdout
    assert told.count("job-") == 20
    assert "show older jobs: cavvy cost --all" in told
    assert told.endswith("total $7.77 for all jobs and volumes of project default\n")
    told = run("cost", "--all").stdout
    assert told.count("job-") == 50
    removed = "total $7.77 with removed jobs and volumes of project default\n"
    assert told.endswith(f"total $0.50\n{removed}")
    assert len(json.loads(run("cost", "-o", "json").stdout)) == 50
    client.all_jobs = {}
    assert run("cost").stdout.endswith(f"no jobs yet\n{removed}")


def test_a_policy_sets_shares_and_limits_of_the_queue(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[PolicyAsk] = []
    none = ShareReport(half_life_days=7, projects=[])
    monkeypatch.setattr("cavvy.client.queue_wire.read_shares", lambda *_: none)
    monkeypatch.setattr("cavvy.client.policy_wire.list_policies", lambda *_: [])
    monkeypatch.setattr(
        "cavvy.client.policy_wire.put_policy", lambda *put, **_: asked.append(put[2])
    )
    assert (
        run("policy", "set", "--share", "0.5", "--quota", "16", "--user-jobs", "4").exit_code == 0
    )
    assert (asked[0].share, asked[0].quota_gpus, asked[0].user_jobs) == (0.5, 16, 4)
    assert run("policy", "set", "--share", "any", "--max-gpus", "0").exit_code == 0
    assert (asked[1].share, asked[1].max_gpus) == (None, 0)
    given = ["--quota", "24,H100=8,A100=16", "--max-gpus", "any", "--max-spend", "40"]
    assert run("policy", "set", *given, "--user-waiting", "9").exit_code == 0
    assert (asked[2].quota_gpus, asked[2].quota_accelerators) == (24, {"H100": 8, "A100": 16})
    assert (asked[2].max_gpus, asked[2].max_accelerators) == (None, {})
    assert (asked[2].max_micros_per_hour, asked[2].user_waiting) == (40_000_000, 9)
    before = ProjectPolicyView(
        project="default",
        providers=[],
        regions=[],
        accelerators=[],
        max_rate_micros_per_hour=None,
        images=[],
        image_digests=False,
        users={"ann": UserLimitsView(gpus=8, jobs=2), "bob": UserLimitsView(jobs=3)},
    )
    monkeypatch.setattr("cavvy.client.policy_wire.list_policies", lambda *_: [before])
    given = ["--user-gpus", "any", "--user-spend", "5", "--user-waiting", "0"]
    assert run("policy", "set", "--user", "ann", *given).exit_code == 0
    assert asked[3].users == {
        "ann": UserLimitsView(jobs=2, waiting=0, micros_per_hour=5_000_000),
        "bob": UserLimitsView(jobs=3),
    }
    assert asked[3].user_gpus is None
    refused = run("policy", "set", "--user", "ann", "--user-jobs", "1", "--max-gpus", "4")
    assert (refused.exit_code, "max-gpus does not belong to one user" in refused.stderr) == (
        2,
        True,
    )
    assert "at most 3 jobs of bob" in run("policy", "show").stdout
    for text in ("H100=8,H100=9", "8,9", "H100=", "=8", "H100=-1", "H100=nan", ""):
        refused = run("policy", "set", "--user-gpus", text)
        assert (refused.exit_code, "for example --user-gpus 16" in refused.stderr) == (2, True)
    for option, text in (
        ("share", "-1"),
        ("quota", "nan"),
        ("user-jobs", "1.5"),
        ("quota", "\u0663"),
    ):
        refused = run("policy", "set", f"--{option}", text)
        assert (refused.exit_code, "number from 0 to 1,000,000" in refused.stderr) == (2, True)


def test_a_policy_below_what_is_in_use_needs_a_confirmation(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = "project default holds 8 H100, more than its limit of 6 H100"
    calls = list[str]()

    def call(method: str, target: str, body: bytes = b"") -> None:
        calls.append(target)
        if "accept_exceeded" not in target:
            raise ApiError("policy-exceeded", told, "nothing was changed; or --yes", 409)

    monkeypatch.setattr("cavvy.client.policy_wire.list_policies", lambda *_: [])
    monkeypatch.setattr(client, "call", call, raising=False)
    limits = ("policy", "set", "--max-gpus", "20,H100=6")
    refused = run(*limits)
    assert refused.exit_code == 1
    assert told in refused.stderr
    assert "nothing was changed" in refused.stderr
    assert len(calls) == 1
    done = run(*limits, "--yes")
    assert (done.exit_code, done.stderr) == (0, f"note: {told}\n")
    # a server that does not know the parameter is asked as before
    assert calls[1:] == [calls[0], f"{calls[0]}?accept_exceeded=true"]


def test_a_waiting_job_says_whose_jobs_are_before_it(client: FakeClient) -> None:
    client.all_jobs = {
        "a": make_job("a", phase="queued", queue_position=4, queue_ahead={"": 2, "default": 1}),
        "b": make_job("b", phase="queued", queue_position=2, queue_ahead={"default": 1}),
    }
    assert "position 4, behind 2 of other projects, 1 of default" in run("status", "a").stdout
    assert "position 2\n" in run("status", "b").stdout
    assert "not known yet" in run("status", "b").stdout
    shown = run("ps").stdout
    assert "4, behind 2 of other projects, 1 of default" in shown
    assert "STARTS" not in shown


def test_a_waiting_job_says_when_it_probably_starts(client: FakeClient) -> None:
    now = datetime.now(UTC) + timedelta(seconds=20)
    start = wire.EstimatedStart(
        earliest=now + timedelta(minutes=2),
        likely=now + timedelta(minutes=25),
        latest=now + timedelta(hours=3),
    )
    client.all_jobs = {"a": make_job("a", phase="queued", queue_position=1, estimated_start=start)}
    told = r"in 25m00s \(2m\d\ds to 3h00m\)"
    assert re.search(f"starts +{told}, in 90 of 100 cases", run("status", "a").stdout)
    assert re.search(told, run("ps").stdout)
    (row,) = json.loads(run("ps", "-o", "json").stdout)
    assert (row["queue_position"], row["queue_ahead"]) == (1, {})
    assert row["latest_start"] == start.latest.isoformat()


def test_a_policy_says_which_ended_jobs_will_be_removed(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cavvy.client.policy_wire.list_policies", lambda *_: [])
    monkeypatch.setattr("cavvy.client.policy_wire.put_policy", lambda *_, **_set: "")
    told = "the server will remove jobs that ended more than 5 days ago"
    assert told in run("policy", "set", "--keep-jobs", "5").stderr
    for kept in (("--keep-jobs", "0"), ("--keep-jobs", "any"), ("--gpus", "T4")):
        assert "remove" not in run("policy", "set", *kept).stderr
    client.removes_old_from = datetime(2030, 5, 6, 7, 8, tzinfo=UTC)
    said = run("policy", "set", "--keep-jobs", "5").stderr
    assert "checkpoints, from 2030-05-06 07:08 UTC on; their costs stay" in said
    for text in ("\u0663", "9" * 5000, "-1", "1e2"):
        refused = run("policy", "set", "--keep-jobs", text)
        assert (refused.exit_code, "a whole number of days" in refused.stderr) == (2, True)


def test_costs_are_shown_to_someone_who_may_see_only_them(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise ApiError("role-needed", "this needs the role viewer", "ask", 403)

    cost = client.cost("default", "good")
    monkeypatch.setattr(client, "cost", lambda *_: cost)
    monkeypatch.setattr(client, "job", refuse)
    monkeypatch.setattr(client, "jobs", refuse)
    told = run("cost", "good").stdout
    assert "bill  $0.01 (1 attempt, " in told
    assert "ELSEWHERE" not in told
    row = LedgerSumView(groups={"job": "good"}, amount_micros=10_000, discount_micros=0, jobs=1)
    monkeypatch.setattr("cavvy.client.ledger_wire.sum_ledger", lambda *_, **__: [row])
    told = run("cost").stdout
    assert "good" in told
    assert told.endswith("total $0.01\n")


def test_nodes_that_bill(client: FakeClient) -> None:
    assert run("nodes").stdout == "nothing is running, and nothing is billed\n"
    client.rows = [
        wire.NodeListing(
            project="default",
            job="now",
            job_id="id-of-now",
            attempt=1,
            rank=0,
            gang="rm-0-x-1",
            placement="local/box/T4:1/on-demand",
            phase="running",
            rank_phase="running",
            rate_micros_per_hour=3_600_000,
            since=at(0),
            heard_at=None,
            devices=["GPU-1", "GPU-2"],
        )
    ]
    shown = lines(run("nodes"))[1]
    assert "GPU-1,GPU-2" in shown
    assert "$3.60/h" in shown
    client.rows = [msgspec.structs.replace(client.rows[0], phase="kept", kept_until=at(600))]
    assert f"{at(600):%H:%M:%S} UTC" in run("nodes").stdout
    (row,) = json.loads(run("nodes", "-o", "json").stdout)
    assert row["kept_until"] is not None
    assert row["devices"] == ["GPU-1", "GPU-2"]
    assert row["gang"] == "rm-0-x-1"


def test_diff_names_what_differs_and_nothing_else(client: FakeClient) -> None:
    assert run("diff", "good", "good").stdout == "nothing differed\n"
    again = make_attempt(nodes=[make_node(progress={"loss": 0.5})])
    client.all_jobs["other"] = make_job("good", "done", attempts=[again], attempt=2)
    rows = json.loads(run("diff", "good", "other", "-o", "json").stdout)
    assert {row["field"] for row in rows} == {
        "result.attempts",
        "result.progress.loss",
        *(f"result.progress.{name}" for name in ("done", "total", "unit", "left_s")),
    }
    assert ["result.progress.loss", "0.25", "0.5"] in lines(run("diff", "good", "other"))


def test_down_shows_before_it_removes(client: FakeClient) -> None:
    assert run("down", "--all").stdout == "nothing is running, and nothing is billed\n"
    client.found = [FOUND]
    dry = run("down", "--all", "--dry-run")
    assert lines(dry)[1][-1] == "no"
    refused = run("down", "--all")
    assert refused.exit_code == 2
    assert "--yes" in refused.stderr
    assert ("down", None, False) not in client.asked
    assert lines(run("down", "--project", "p", "--yes"))[1][-1] == "yes"
    assert ("down", "p", False) in client.asked


def test_down_calls_nothing_removed_that_is_still_there(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(down, "_PATIENCE_S", 0.0)
    client.found = client.stubborn = [FOUND]
    left = run("down", "--all", "--yes")
    assert left.exit_code == 1
    assert lines(left)[1][-1] == "no"
    assert "some nodes or jobs are not removed yet" in left.stderr
    assert run("down", "--all", "--yes", "--no-wait").exit_code == 0


def test_gc_removes_only_when_told(client: FakeClient) -> None:
    client.found = [FOUND]
    assert run("gc").stdout.endswith("remove them: cavvy nodes gc --remove\n")
    assert [row["done"] for row in json.loads(run("gc", "--remove", "-o", "json").stdout)] == [True]
    assert client.asked == [("gc", True), ("gc", False)]


def test_gc_that_finds_nothing_says_nothing_about_jobs_that_run(client: FakeClient) -> None:
    client.found = []
    assert run("gc").stdout == (
        "nothing to remove; `cavvy nodes` lists nodes that run or are billed\n"
    )


def test_rerun_sends_the_same_with_what_was_changed(client: FakeClient) -> None:
    answer = run("rerun", "good", "--param", "lr=0.5", "--detach")
    assert answer.stdout.splitlines() == [
        "good-2: queued, a rerun of good",
        "compare the jobs: cavvy diff good good-2",
    ]
    ((_, text, how),) = client.asked
    assert text == "name: x\nrun: 'true'\n"
    assert how["params"] == {"lr": "0.5"}
    assert how["origin"].rerun_of == "id-of-good"
    assert how["consent"] is True
    assert run("rerun", "good", "--param", "lr").exit_code == 2


def test_a_refused_rerun_names_the_parameters_and_no_file(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: FakeClient, text: str, **how: object) -> None:
        raise ApiError("invalid-task", "the file has no parameter 'x'", "correct the file")

    monkeypatch.setattr(FakeClient, "submit", refuse)
    answer = run("rerun", "good", "--param", "x=1")
    assert answer.exit_code == 1
    assert "hint: the task of good cannot be changed; the task's parameters: none" in answer.stderr


def test_an_invalid_request_names_the_help_of_its_command(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the server knows better what to do."""
    hints = ["", FOR_PROGRAMS, "did you mean H100?"]

    def refuse(self: FakeClient, *given: object, **how: object) -> None:
        raise ApiError("invalid-request", "PATH cannot be set", hints.pop(0))

    monkeypatch.setattr(FakeClient, "stop", refuse)
    for told in (*["`cavvy stop --help` shows the arguments"] * 2, "did you mean H100?"):
        assert f"hint: {told}" in run("stop", "now").stderr


def test_an_unknown_command_names_its_neighbour() -> None:
    answer = run("statsu")
    assert answer.exit_code == 2
    assert "did you mean `cavvy status`?" in answer.stderr
    assert "`cavvy --help` lists" in run("qqqq").stderr


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (
            "services of",
            "`cavvy services` has no command 'of'",
            "expected key, queue, show or no command",
        ),
        ("data ls", "`cavvy data` has no command 'ls'", "expected convert"),
        ("secret rm", "NAME is missing", "`cavvy secret delete --help` shows the usage"),
        ("pool remove", "NAME is missing", "`cavvy pool list` lists pools"),
        (
            "machines list stop",
            "`cavvy machines list` takes no argument 'stop'",
            "the command is `cavvy machines",
        ),
        (
            "machines ls delete dev --yes",
            "`cavvy machines list` takes no argument 'delete'",
            "leave it out",
        ),
        ("machines ls -x", "there is no option -x", "`cavvy machines --help`"),
        ("estimate no.py", "TRAIN.PY: file 'no.py' does not exist", "`cavvy estimate --help`"),
        ("estimate -m no", "TRAIN.PY: there is no module 'no'", "`cavvy estimate --help`"),
        ("events", "NAME is missing", "`cavvy ps` lists jobs; `cavvy events --help` shows"),
        ("machines stop", "NAME is missing", "`cavvy machines` lists machines; "),
        ("call", "NAME is missing", "`cavvy services` lists services; "),
        ("setup", "PROVIDER is missing", "for example `cavvy setup runpod`; there are aws, "),
        ("tco", "PLAN.YAML is missing", "for example `cavvy tco plan.yaml`; `cavvy tco --help"),
        ("cp", "SOURCE is missing", "for example `cavvy cp digits:out/weights.pt .`; "),
    ],
)
def test_a_missing_name_and_an_unknown_command_name_what_exists(
    words: str, message: str, hint: str
) -> None:
    if (
        words.split()[0] in ("estimate", "tco", "services", "call")
        and words.split()[0] not in COMMANDS
    ):
        pytest.skip("its capability is left out")
    answer = run(*words.split())
    assert answer.exit_code == 2
    assert message in answer.stderr
    assert f"hint: {hint}" in answer.stderr


@pytest.mark.parametrize(
    ("word", "command"),
    [
        ("launch", "run"),
        ("apply", "run"),
        ("attach", "logs"),
        ("kill", "stop"),
        ("cancel", "stop"),
        ("jobs", "ps"),
        ("show-gpus", "offers"),
        ("offer", "offers"),
        ("start", "rerun"),
        ("fleet", "nodes"),
        ("api", "server"),
    ],
)
def test_a_command_of_another_tool_names_ours(word: str, command: str) -> None:
    answer = run(word, "--some-option")
    assert answer.exit_code == 2
    assert f"hint: `cavvy {command}" in answer.stderr


@pytest.mark.parametrize(
    ("command", "option", "advice"),
    [
        ("run", "--infra", "use --provider or --region"),
        ("plan", "-c", "use --machine"),
        ("run", "--idle-minutes-to-autostop", "use --keep"),
        ("run", "--cpus", "set `resources.cpu` in a task file"),
        ("run", "--on-demand", "use --no-spot"),
        ("run", "-n", "use --name"),
        ("run", "--ports", "`cavvy forward NAME PORT` forwards a port to this machine"),
        ("ps", "--infra", "`cavvy ps --help` shows the usage"),
        ("ps", "--cpus", "`cavvy ps --help` shows the usage"),
        ("offers", "--cpu", "use --cpus;"),
        ("offers", "--json", "use -o json;"),
        ("offers", "--vram", "use --gpu 40GB.."),
        ("offers", "--price", "use --max-price;"),
        ("offers", "--spto", "did you mean --spot? "),
        ("run", "--evn", "did you mean --env? "),
        ("logs", "--lines", "use --tail;"),
        ("stop", "--force", "use --yes;"),
    ],
)
def test_an_option_of_another_tool_names_ours(command: str, option: str, advice: str) -> None:
    answer = run(command, option, "x")
    assert answer.exit_code == 2
    assert f"hint: {advice}" in answer.stderr


def test_every_advised_option_exists_in_a_command() -> None:
    context = click.Context(cli)
    commands = [cli.get_command(context, name) for name in cli.list_commands(context)]
    known = {word for each in commands if each is not None for p in each.params for word in p.opts}
    known |= {word for each in commands if each for p in each.params for word in p.secondary_opts}
    advised = {word.split()[0] for words in synonyms._OPTIONS.values() for word in words}
    assert advised <= known


def test_a_group_with_a_list_lists_when_it_is_called_alone(client: FakeClient) -> None:
    assert run("context").stdout == run("context", "list").stdout
    assert json.loads(run("context", "-o", "json").stdout) == json.loads(
        run("context", "list", "-o", "json").stdout
    )


@pytest.mark.parametrize(
    "words", [("run", "--env"), ("server", "start", "--database"), ("--context",)]
)
def test_a_missing_value_names_the_help_of_the_command(words: tuple[str, ...]) -> None:
    answer = run(*words)
    called = " ".join(["cavvy", *words[:-1]])
    assert answer.exit_code == 2
    assert f"hint: `{called} --help` shows the usage" in answer.stderr


def test_stop_names_the_command_for_a_machine(client: FakeClient) -> None:
    client.named = [make_machine("box")]
    answer = run("stop", "box")
    assert answer.exit_code == 1
    assert "hint: `cavvy machines stop box` stops the machine box" in answer.stderr


def test_no_synonym_hides_a_command() -> None:
    words = " ".join(synonyms._ADVICE).split()
    assert len(words) == len(set(words))
    assert not {*words} & {*COMMANDS}


def test_diff_shows_flags_and_dollars_as_people_write_them(client: FakeClient) -> None:
    client.all_jobs["flagged"] = make_job(
        "flagged",
        "done",
        task=TaskSpec(name="flagged", run="true", params={"fast": True}),
        spent_micros=44,
    )
    assert ["task.params.fast", "-", "true"] in lines(run("diff", "good", "flagged"))
    assert "0.000044" in run("diff", "good", "flagged").stdout
    rows = {
        row["field"]: row["second"]
        for row in json.loads(run("diff", "good", "flagged", "-o", "json").stdout)
    }
    assert rows["task.params.fast"] is True


def test_status_refuses_a_form_that_it_does_not_have(client: FakeClient) -> None:
    assert run("status", "good", "-o", "csv").exit_code == 2


def test_run_says_where_else_what_no_configured_place_has_is_to_be_had(
    client: FakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(text: str, **how: object) -> wire.Submitted:
        raise ApiError(
            "no-offer", "No offer: none of the configured providers (local) has H100:8", "", 422
        )

    monkeypatch.setattr(client, "submit", refuse)
    file = tmp_path / "task.yaml"
    file.write_text("run: 'true'\nresources: {gpu: H100:8}\n")
    told = run("run", str(file))
    assert told.exit_code == 1
    assert told.stderr.startswith(
        "error: No offer: none of the configured providers (local) has H100:8\n"
    )
    named = re.search(
        r"cheapest offer of a provider that you can set up is \S+ at (\w+)", told.stderr
    )
    assert named is not None
    assert f": cavvy setup {named[1]}" in told.stderr
    file.write_text("run: 'true'\nresources: {instance: p5.48xlrge}\n")
    assert "did you mean p5.48xlarge?" in run("run", str(file)).stderr


def test_tags_are_shown_with_the_job_and_exported_with_its_cost(client: FakeClient) -> None:
    task = TaskSpec(name="tagged", run="true", tags={"team": "vision"})
    client.all_jobs["tagged"] = make_job("tagged", "done", task=task)
    assert ["tags", "team=vision"] in lines(run("status", "tagged"))
    assert ["tags", "team=vision"] in lines(run("cost", "tagged"))
    assert json.loads(run("cost", "tagged", "-o", "json").stdout)["tags"] == {"team": "vision"}
    assert "tags" not in run("cost", "good").stdout


def test_a_job_that_waits_for_its_window_is_said_to_start_in_it(client: FakeClient) -> None:
    task = TaskSpec(
        name="night",
        run="true",
        window=StartWindow(spans=(), text="03:00-04:00", time_zone="Europe/Berlin"),
    )
    client.all_jobs["night"] = make_job(
        "night", "queued", task=task, queue_position=None, not_before=at(3600)
    )
    shown = lines(run("status", "night"))
    assert ["window", "starts", "in", "window", "03:00-04:00", "(Europe/Berlin)"] in shown
    assert not any(line[0] == "queue" for line in shown)
    client.all_jobs["night"] = make_job("night", "running", task=task)
    assert "window" not in run("status", "night").stdout


def test_a_job_that_is_asked_about_says_nothing_but_itself_on_standard_output(
    client: FakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A working folder is frozen and sent, and consent is asked for: all of that goes to the
    other stream.
    """

    def submit(text: str, *, consent: bool, **how: object) -> wire.Submitted:
        if not consent:
            raise ApiError("consent-needed", "It costs $3.00 an hour", "", 402)
        return wire.Submitted(id="1", name="x", project="default", phase="queued")

    monkeypatch.setattr(client, "submit", submit)
    monkeypatch.setattr("cavvy.cli.task.submission.upload", lambda *args, **how: 100)
    monkeypatch.setattr("cavvy.cli.task.submission.may_ask", lambda: True)
    monkeypatch.setenv("CAVVY_HOME", str(tmp_path / "home"))
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "train.py").write_text("pass")
    file = tmp_path / "task.yaml"
    file.write_text("run: 'true'\nworkdir: work\n")
    told = run("run", "-d", "-o", "json", str(file), given="y\n")
    assert told.exit_code == 0, told.output
    assert json.loads(told.stdout) == {
        "id": "1",
        "name": "x",
        "project": "default",
        "phase": "queued",
    }
    assert "working folder" in told.stderr
    assert "It costs $3.00 an hour" in told.stderr


def test_the_folder_of_a_named_file_is_submitted(
    client: FakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[RunOrigin] = []

    def submit(text: str, *, origin: RunOrigin, **how: object) -> wire.Submitted:
        sent.append(origin)
        return wire.Submitted(id="1", name="x", project="default", phase="queued")

    monkeypatch.setattr(client, "submit", submit)
    monkeypatch.setattr("cavvy.cli.task.submission.upload", lambda *args, **how: 100)
    monkeypatch.setenv("CAVVY_HOME", str(tmp_path / "home"))
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "train.py").write_text("pass")
    (folder / "task.yaml").write_text("run: python train.py\n")
    for words in (["task.yaml"], ["--", "python", "train.py"], ["--", "nvidia-smi"]):
        told = run("run", "-d", *words)
        note = f"`run` names train.py, so the folder {folder} is submitted" in told.stderr
        assert note == (words == ["task.yaml"])  # a command gets the folder in any case
        assert "in 2 files" in told.stderr
        assert "empty folder" not in told.stderr
        assert sent[-1].snapshot
        assert sent[-1].overrides.strip() == "workdir: ."
    explained = run("validate", "task.yaml").stdout
    assert "folder       ., frozen when it is submitted" in explained
    assert "note: `run` names train.py" in explained
    monkeypatch.setattr("cavvy.spec.own_folder.MOST_OWN_FILES", 1)
    monkeypatch.setenv("HOME", str(folder))
    told = run("run", "-d", "--", "python", "train.py")
    assert "because it is your home folder; --workdir FOLDER submits another folder" in told.stderr
    assert sent[-1].snapshot is None
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    told = run("run", "-d", "--", "python", "train.py")
    assert "is not submitted, because" in told.stderr
    assert "--workdir . submits it; --workdir FOLDER submits another folder" in told.stderr
    assert sent[-1].snapshot is None


def test_json_of_a_run_that_is_followed_is_refused(client: FakeClient, tmp_path: Path) -> None:
    file = tmp_path / "task.yaml"
    file.write_text("run: 'true'\n")
    told = run("run", "-o", "json", str(file))
    assert told.exit_code == 2
    assert "--detach" in told.stderr


def test_watching_jobs_needs_a_terminal(client: FakeClient) -> None:
    found = run("ps", "--watch")
    assert (found.exit_code, "--watch can only refresh a table on a terminal" in found.stderr) == (
        2,
        True,
    )


def test_lines_begin_with_the_time_at_which_they_arrived(client: FakeClient) -> None:
    client.log_bytes = b"one\ntwo\nend"
    stamped = [
        "2026-01-02 03:04:05 UTC  one",
        "2026-01-02 03:05:05 UTC  two",
        "2026-01-02 03:05:05 UTC  end",
    ]
    assert run("logs", "good", "--timestamps").stdout.splitlines() == stamped
    assert run("logs", "good", "--timestamps", "-n", "1").stdout.splitlines() == stamped[2:]
    run("logs", "good", "--since", "2026-01-02T03:04Z")
    assert client.log_asked["since"] == datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
    assert run("logs", "good", "--since", "1h", "--tail", "3").exit_code == 2


def test_a_line_that_was_redrawn_is_one_line(client: FakeClient) -> None:
    client.log_bytes = b"one\n\r 0%\r 9%\nend\n"
    assert run("logs", "good", "-n", "2").stdout_bytes == b"\r 0%\r 9%\nend\n"
    assert run("logs", "good", "-n", "9").stdout_bytes == client.log_bytes
    stamped = run("logs", "good", "--timestamps", "-n", "2").stdout_bytes
    assert [line.count(b"UTC") for line in stamped.split(b"\n")] == [1, 1, 0]


def test_the_time_stays_before_a_line_that_is_redrawn_on_a_terminal(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.log_bytes = b"one\r\n\r 0%\r 9%"
    chunks = list(client.log_chunks("default", "good", times=True))
    whole = b"".join(logs._stamp(chunks, redrawn=True)).decode()
    assert [line.count("UTC") for line in whole.split("\n")] == [1, 3]
    assert whole.endswith(" UTC   9%")
    piped = b"".join(logs._stamp(chunks, redrawn=False)).decode()
    assert [line.count("UTC") for line in piped.split("\n")] == [1, 1]


def test_replicas_are_neither_rerun_nor_compared_with_jobs(client: FakeClient) -> None:
    for name in ("hello", "hello.1", "hello.2"):
        client.all_jobs[name] = make_job(name, "done")
    told = run("diff", "hello", "hello.2")
    assert (told.exit_code, "hello.2 is a replica of a service" in told.stderr) == (1, True)
    assert run("diff", "hello.1", "hello.2").exit_code == 0
    told = run("rerun", "hello.1")
    assert (told.exit_code, "hello.1 is a replica of a service" in told.stderr) == (1, True)
    assert "cavvy serve" in told.stderr


def test_rm_removes_ended_jobs_only(client: FakeClient) -> None:
    refused = run("rm", "good", "now", "--yes")
    assert (refused.exit_code, client.asked) == (1, [])
    assert "now is running, so it is not removed" in refused.stderr
    assert run("rm", "good").exit_code == 2  # there is no terminal to confirm on
    assert run("rm").exit_code == 2
    assert run("rm", "good", "-y").stdout == "good is removed\n"
    client.removed = wire.JobRemoved(freed_bytes=3 << 19, kept="s3://b/kept: status 403")
    ended = run("rm", "--ended", "-y")
    assert ended.stdout == "bad is removed, with 1.5 MiB of checkpoints\n"
    assert ended.stderr == "some files of bad could not be deleted: s3://b/kept: status 403\n"
    assert set(client.all_jobs) == {"next", "now"}


def test_costs_add_up_by_what_is_asked(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    spent: list[LedgerSumView] = []

    def answer(client: object, by: list[str], **period: object) -> list[LedgerSumView]:
        asked.append((by, period))
        return spent

    def row(micros: int, jobs: int = 1, discount: int = 0, **groups: str) -> LedgerSumView:
        return LedgerSumView(
            groups=groups, amount_micros=micros, discount_micros=discount, jobs=jobs
        )

    monkeypatch.setattr("cavvy.client.ledger_wire.sum_ledger", answer)
    spent = [
        row(5_000_000, tags='{"team": "vision", "kind": "test"}'),
        row(1_000_000, tags='{"team": "vision"}', discount=-7),
    ]
    by_tag = json.loads(run("cost", "--by", "tag", "-o", "json").stdout)
    assert by_tag == [
        {"tag": "team=vision", "jobs": 2, "discount_micros": -7, "spent_micros": 6_000_000},
        {"tag": "kind=test", "jobs": 1, "discount_micros": 0, "spent_micros": 5_000_000},
    ]
    spent = [
        row(5_000_000, 2, project="default", user="ada"),
        row(1_000_000, project="other", user=""),
    ]
    told = run("cost", "--by", "project,user", "--until", "2026-06-30T00:00Z")
    assert lines(told)[1:3] == [
        ["default", "ada", "2", "$5.00"],
        ["other", "-", "1", "$1.00"],
    ]
    assert "total $6.00" in told.stdout
    until = datetime(2026, 6, 30, tzinfo=UTC)
    assert asked[-1] == (["project", "user"], {"project": None, "since": None, "until": until})
    spent = [row(74_000, job="a"), row(23_000, job="b")]
    told = run("cost", "--since", "2026-05-31T00:00Z")
    since = datetime(2026, 5, 31, tzinfo=UTC)
    assert asked[-1] == (["job"], {"project": "default", "since": since, "until": None})
    assert lines(told)[1:3] == [["a", "1", "$0.074"], ["b", "1", "$0.023"]]
    assert told.stdout.endswith("total $0.097\n")
    wrong = (
        ["--since", "soon"],
        ["good", "--by", "tag"],
        ["--by", "beauty"],
        ["--by", "tag,user"],
        ["--by", "tag:"],
        ["--by", "model,job,user,key"],
    )
    for words in wrong:
        assert run("cost", *words).exit_code == 2


def test_models_of_a_service_share_its_cost_and_are_compared_with_public_apis(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def used(model: str, prompt: int, cached: int = 0, completion: int = 0) -> TokensView:
        return TokensView(
            model=model, prompt=prompt, cached=cached, completion=completion, estimated=0
        )

    def row(micros: int, service: str, provider: str, *tokens: TokensView) -> LedgerSumView:
        return LedgerSumView(
            groups={"service": service, "provider": provider, "user": "ada"},
            amount_micros=micros,
            discount_micros=-3,
            jobs=1,
            tokens=list(tokens),
        )

    small, own = "hf://Qwen/Qwen3-32B-AWQ@main", "my-adapter"
    rows = [
        row(1_000_001, "chat", "aws", used(small, 1_000_000, 500_000, 500_000), used(own, 500_000)),
        row(70, "chat", "api.example.com", used(own, 100)),  # its price is not divided with others
        row(-5, "", "aws"),
        row(9, "", "gcp"),  # a job without tokens
    ]

    def answer(client: object, by: list[str], **period: object) -> list[LedgerSumView]:
        asked.append(by)
        return rows

    monkeypatch.setattr("cavvy.client.ledger_wire.sum_ledger", answer)
    found = json.loads(run("cost", "--by", "user,model", "-o", "json").stdout)
    assert asked == [["user", "service", "provider"]]
    spent = {each["model"]: each["spent_micros"] for each in found}
    assert spent == {small: 750_001, own: 250_070, "-": 4}
    assert {each["model"]: each["discount_micros"] for each in found} == {
        small: -2,
        own: -4,
        "-": -6,
    }
    [one, *others] = found
    assert one["micros_per_million_tokens"] == 500_001
    # the cheapest API for two prompts, one of them cached, and a completion
    price = {each.api: each for each in list_api_prices(small)}[one["api"]]
    assert one["api_micros_per_million_tokens"] == round(
        (price.prompt + price.cached + price.completion) / 3
    )
    assert all(each["api"] is None for each in others)  # nobody else has the adapter
    shown = run("cost", "--by", "model").stdout
    assert "API 1M" in shown
    assert "total $1.00" in shown
    # a few tokens, of several models, have the price of many
    for models in ([small], [small, "llama-3.1-8b-instruct"]):
        few, many = ([used(each, tokens) for each in models] for tokens in (1, 1_000_000))
        assert rate_apis(few) == rate_apis(many)


def test_names_of_models_are_found_in_any_spelling_and_no_model_is_taken_for_another() -> None:
    assert list_api_prices("hf://meta-llama/Meta-Llama-3.1-8B-Instruct-FP8@main")
    assert list_api_prices("Llama-3.1-8B-Instruct-Q4_K_M.gguf")
    assert list_api_prices("llama-3.1-8b-instruct") != list_api_prices("llama-3.1-70b-instruct")
    for unknown in (
        "",
        "/",
        "fp8",
        "stand-in",
        "org/",
        "@",
        "\0" * 9,
        "llama-3.1-8b",
        "x" * 10_000,
    ):
        assert list_api_prices(unknown) == (), unknown


def test_a_statement_is_written_for_a_month(
    client: FakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, object]] = []

    def answer(client: object, **period: object) -> list[LedgerEntryView]:
        asked.append(period)
        return [make_entry(micros=1_500_000)]

    monkeypatch.setattr("cavvy.client.ledger_wire.list_entries", answer)
    for name, begin in (("s.html", "<!doctype html>"), ("s.csv", "AvailabilityZone,BilledCost")):
        file = tmp_path / name
        told = run("cost", "statement", "--month", "2026-11", "-p", "vision", "-o", str(file))
        assert told.stdout == f"{file}: 1 line, total $1.50\n", told.output
        assert file.read_text().startswith(begin)
    since, until = datetime(2026, 11, 1, tzinfo=UTC), datetime(2026, 12, 1, tzinfo=UTC)
    assert asked[-1] == {"project": "vision", "since": since, "until": until}
    for month, name in (("11/2026", "s.csv"), ("9999-12", "s.csv"), ("2026-11", "s.txt")):
        assert run("cost", "statement", "--month", month, "-o", name).exit_code == 2


def make_entry(*, micros: int) -> LedgerEntryView:
    since = datetime(2026, 11, 3, tzinfo=UTC)
    return LedgerEntryView(
        number=1,
        id="j-1/0/1",
        corrects=None,
        project="vision",
        user="ada",
        job="train",
        job_id="j",
        machine="",
        service="",
        attempt=1,
        rank=0,
        kind="node",
        line="node",
        line_since=since,
        since=since,
        until=since + timedelta(hours=1),
        quantity=3_600_000_000,
        unit="us",
        rate_micros_per_hour=micros,
        amount_micros=micros,
        source="meter",
        provider="aws",
        account="aws",
        region="us-east-1",
        zone="",
        instance_type="g5.xlarge",
        accelerator="A10G",
        accelerators=1,
        purchase="spot",
        tags={},
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["statu"], {"status"}),
        (["logs", "g"], {"good"}),
        (["stop", "n"], {"next", "now"}),
        (["offers", "--gpu", "h100-n"], {"H100-NVL"}),
        (["run", "--provider", "prime"], {"primeintellect"}),
        (["run", "--region", "eu-west1"], {"eu-west1"}),
        (["offers", "--region", "eu-west-2"], {"eu-west-2"}),
        (["ssh", "g"], {"good"}),
        (["forward", "g"], {"good"}),
        (["cp", "g"], {"good:", "g"}),  # `g` stands for local files, which the shell completes
    ],
)
def test_names_are_completed(client: FakeClient, words: list[str], expected: set[str]) -> None:
    complete = ShellComplete(cli, {}, "cavvy", "_CAVVY_COMPLETE")
    assert {item.value for item in complete.get_completions(words[:-1], words[-1])} == expected


def test_ctrl_c_after_the_submission_says_how_to_follow_the_job(
    client: FakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **how: object) -> NoReturn:
        raise KeyboardInterrupt

    (tmp_path / "X").write_text("{machine: dev, run: 'true'}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(client, "machine", interrupt)
    told = run("run", "X")
    assert told.exit_code == 130
    assert "keeps running\nfollow it again: cavvy logs -f " in told.stderr


def test_validate_reads_standard_input() -> None:
    assert "runs         echo a" in run("validate", "-", given="run: echo a\n").stdout
    wrong = run("validate", "-", given="rum: echo a\n")
    assert wrong.exit_code == 2
    assert "-:1:1: unknown key 'rum'" in wrong.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_calls_the_command(shell: str) -> None:
    assert "_CAVVY_COMPLETE" in run("completion", shell).stdout


@pytest.mark.parametrize("command", ["ps", "status good", "logs -f good", "wait good", "run X"])
def test_a_server_that_does_not_answer_has_its_own_exit_code(
    client: FakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def lose(*_: object, **how: object) -> NoReturn:
        raise ConnectionLost("connection-lost", "the connection to unix:/x timed out")

    (tmp_path / "X").write_text("run: 'true'\n")
    monkeypatch.chdir(tmp_path)
    for name in ("job", "jobs", "submit"):
        monkeypatch.setattr(client, name, lose)
    told = run(*command.split())
    assert told.exit_code == 69
    assert told.stderr.startswith("error: no answer from the server: the connection to unix:/x")


def test_an_audit_exits_with_1_if_a_bill_differs(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = wire.AuditRow(
        job="good",
        attempt=1,
        gang="g",
        placement="p/r/t",
        billed_micros=10_000,
        unsure_micros=0,
        reported_micros=10_000,
        verdict="agrees",
    )
    told = {"report": wire.AuditReport(bills=[row], problems=[])}
    monkeypatch.setattr(client, "audit", lambda *_: told["report"], raising=False)
    agreed = run("cost", "--audit")
    assert (agreed.exit_code, "agrees" in agreed.stdout) == (0, True)
    wrong = msgspec.structs.replace(row, verdict="differs")
    told["report"] = wire.AuditReport(bills=[row, wrong], problems=[])
    assert run("cost", "good", "--audit").exit_code == 1
    told["report"] = wire.AuditReport(bills=[row], problems=["p: no answer"])
    silent = run("cost", "--audit")
    assert (silent.exit_code, "not compared: p: no answer" in silent.stderr) == (1, True)


def test_exec_sees_input_without_reading_it(client: FakeClient, tmp_path: Path) -> None:
    assert run("exec", "now", "--", "cat").stderr == ""
    reader, writer = os.pipe()
    assert not has_input(reader)
    os.write(writer, b"x")
    assert has_input(reader)
    assert os.read(reader, 9) == b"x"
    os.close(writer)
    assert not has_input(reader)
    os.close(reader)
    (tmp_path / "data").write_text("data")
    with (tmp_path / "data").open("rb") as data, open(os.devnull, "rb") as nothing:
        assert has_input(data.fileno())
        assert data.read() == b"data"
        assert not has_input(data.fileno())
        assert not has_input(nothing.fileno())
