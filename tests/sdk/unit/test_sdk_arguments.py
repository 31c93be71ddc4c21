"""Wrong arguments of the Python interface, and clients in forked processes."""

import asyncio
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from inspect import signature
from itertools import count
from typing import Any

import pytest

from cavvy import (
    AsyncClient,
    AsyncJob,
    AsyncJobArray,
    CavvyError,
    Client,
    InvalidArgument,
    InvalidTask,
    Job,
    JobArray,
    JobStatus,
    Task,
)
from cavvy.client import ApiClient
from cavvy.client.policy_wire import UserLimitsAsk
from cavvy.sdk.async_client import _Threads
from cavvy.sdk.connections import Connections
from cavvy.sdk.operation import UserLimits, change_policy
from cavvy.sdk.values import list_after, read_seconds

ADDRESS = "https://127.0.0.1:1"
STATUS = JobStatus(
    id="1",
    project="default",
    name="train",
    phase="running",
    reason="",
    submitted_at=datetime(2026, 1, 1, tzinfo=UTC),
    since=datetime(2026, 1, 1, tzinfo=UTC),
    ended_at=None,
    exit_code=None,
    attempt=1,
    placement=None,
    rate_usd_per_hour=None,
    spent_usd=Decimal(0),
)


@pytest.fixture
def client() -> Client:
    """A client that has not opened a connection."""
    made = Client.__new__(Client)
    made._project, made._home = None, None
    made._connections = Connections(ADDRESS, "token", None)
    return made


@pytest.fixture
def job(client: Client) -> Job:
    return Job(client._connections, STATUS)


WRONG_TYPES: list[tuple[str, Callable[[Any, Any], object]]] = [
    (r"task must be of type Task, not str; Task\.from_file", lambda c, _: c.submit("task.yaml")),
    ("task must be", lambda c, _: c.submit(None)),
    ("params must be", lambda c, _: c.submit(Task("true"), params="lr=1")),
    ("a key of params must be", lambda c, _: c.submit(Task("true"), params={1: 2})),
    ("name must be of type str, not int", lambda c, _: c.submit(Task("true"), name=1)),
    ("project must be", lambda c, _: c.submit(Task("true"), project=[])),
    ("after must be of type str, not int", lambda c, _: c.submit(Task("true"), after=["a", 1])),
    ("after must be", lambda c, _: c.submit_array(Task("true"), array="0-1", after=True)),
    ("name must be", lambda c, _: c.job(None)),
    ("project must be", lambda c, _: c.job("train", project=b"x")),
    ("limit must be of type int, not str", lambda c, _: c.jobs(limit="5")),
    ("phases must be", lambda c, _: c.jobs(phases=5)),
    ("since must be of type datetime, not str", lambda c, _: c.cost(since="today")),
    ("host must be", lambda c, _: c.cordon(None)),
    ("within must be", lambda c, _: c.drain("box", within=None)),
    ("hosts must be a list", lambda c, _: c.reserve("1h", hosts="box")),
    ("begin must be of type datetime", lambda c, _: c.reserve("1h", begin="now")),
    ("timeout must be", lambda _, j: j.wait(timeout=[])),
    ("timeout must be", lambda _, j: j.wait(timeout=True)),
    ("rank must be", lambda _, j: list(j.logs(rank="0"))),
    ("attempt must be", lambda _, j: list(j.logs(attempt="1"))),
    ("run must be", lambda *_: Task(None)),  # type: ignore[arg-type]
    ("project must be", lambda *_: Client(ADDRESS, token="t", project=1)),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("message", "call"), WRONG_TYPES)
def test_an_argument_of_a_wrong_type(
    client: Client, job: Job, message: str, call: Callable[[Client, Job], object]
) -> None:
    with pytest.raises(TypeError, match=message):
        call(client, job)


@pytest.mark.parametrize(
    "call",
    [
        lambda c, _: c.job("\0"),
        lambda c, _: c.job("\ud800"),
        lambda c, _: c.jobs(phases=["\ud800"]),
        lambda c, _: c.drain("box", within="soon"),
        lambda c, _: c.reserve("1h", begin=datetime(2026, 1, 1)),
        lambda _, j: j.wait("runing"),
        lambda _, j: j.wait(timeout="soon"),
        lambda _, j: j.wait(timeout=-1),
        lambda _, j: j.wait(timeout=float("inf")),
        lambda *_: Client(home="\0"),
        lambda *_: Task("true", limits={"deadline": datetime(2026, 1, 1)}),
    ],
)
def test_an_argument_with_an_impossible_value(
    client: Client, job: Job, call: Callable[[Client, Job], object]
) -> None:
    with pytest.raises(InvalidArgument) as found:
        call(client, job)
    assert isinstance(found.value, CavvyError)


def test_a_closed_client_of_asyncio() -> None:
    threads = _Threads()
    assert asyncio.run(threads.run(len, "abc")) == 3
    threads.close()
    with pytest.raises(CavvyError, match="the client is closed"):
        asyncio.run(threads.run(len, "abc"))


@pytest.mark.parametrize(
    ("form", "plain"), [(AsyncClient, Client), (AsyncJob, Job), (AsyncJobArray, JobArray)]
)
def test_forms_for_asyncio_have_the_same_methods(form: type, plain: type) -> None:
    def list_methods(of: type) -> dict[str, list[str]]:
        methods = {n: m for n, m in vars(of).items() if callable(m) and not n.startswith("_")}
        return {name: list(signature(method).parameters) for name, method in methods.items()}

    assert list_methods(form) == list_methods(plain)


def test_jobs_that_a_job_waits_for(client: Client, job: Job) -> None:
    array = JobArray(client._connections, "7", "default", "sweep")
    assert list_after(job) == ["1"]
    assert list_after([job, array, "prepare:any"]) == ["1", "7", "prepare:any"]
    assert list_after({"prepare": "failure"}) == ["prepare:failure"]
    assert list_after("prepare") == ["prepare"]
    assert list_after([]) == []


@pytest.mark.parametrize("items", ["abc", 3, [None]])
def test_items_of_a_wrong_type(client: Client, items: Any) -> None:
    with pytest.raises(TypeError):
        client.map("true", items)


def test_too_many_items(client: Client) -> None:
    with pytest.raises(InvalidTask, match="10,001 jobs are too many"):
        client.map("true", count())
    with pytest.raises(TypeError, match="sweep"):
        client.map("true", [1], sweep={"x": [1]})


def test_lengths_of_time() -> None:
    assert [read_seconds(each) for each in (2, 0.5, "1m", timedelta(hours=1))] == [2, 0.5, 60, 3600]


def test_a_forked_process_does_not_use_the_connections_of_its_parent() -> None:
    connections = Connections(ADDRESS, "token", None)
    connections._first = ApiClient(ADDRESS, "token")
    connections._idle = [connections._first]
    process = os.fork()
    if process == 0:
        code = 2
        try:
            code = int(connections._take() is connections._first)
        finally:  # whatever happens, the child must not run the tests that follow
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    assert connections._take() is connections._first


def test_a_policy_keeps_what_a_change_does_not_name() -> None:
    asked = change_policy(None, {"max_usd_per_hour": "1.5", "regions": ("eu",), "user_jobs": None})
    assert (asked.max_micros_per_hour, asked.regions, asked.user_jobs) == (1_500_000, ["eu"], None)
    users = {"ann": UserLimits(jobs=2, usd_per_hour=Decimal("1.5"))}
    asked = change_policy(None, {"users": users})
    assert asked.users == {"ann": UserLimitsAsk(jobs=2, micros_per_hour=1_500_000)}
    with pytest.raises(InvalidArgument, match="users: expected a mapping"):
        change_policy(None, {"users": {"ann": 3}})
    with pytest.raises(InvalidArgument, match="a policy has no max_spend; it has providers, "):
        change_policy(None, {"max_spend": 1})
    with pytest.raises(InvalidArgument, match="max_rate_usd_per_hour: "):
        change_policy(None, {"max_rate_usd_per_hour": "much"})
