"""The controller of GitHub's runners against a strict stand-in of the protocol, over HTTP, with
jobs of Cavvy in memory: each CI job gets a runner of its own, nothing is left, and no runner is
removed before its job arrives, also if the controller is killed at any request.
"""

import itertools
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from tests.github_site import (
    CLIENT_ID,
    INSTALLATION,
    OWNER,
    REPOSITORY,
    TOKEN,
    CiJob,
    GitHubSite,
    act_as_runner,
    github_site,
)

from cavvy.capabilities.runners.controller import (
    RunnerController,
    RunnerFacts,
    RunnerTask,
    decide_keep,
    decide_runners,
    write_overrides,
)
from cavvy.capabilities.runners.github import _submit
from cavvy.capabilities.runners.scale_sets import (
    AppKey,
    GitHubProblem,
    GitHubSilent,
    ScaleSetService,
    SessionTaken,
)
from cavvy.cli.view.failure import CommandFailure
from cavvy.client import ApiError

_T = TypeVar("_T")
T0 = datetime(2026, 1, 2, tzinfo=UTC)
TASK = RunnerTask(label="gpu", file="gpu.yaml", project="default")


class Killed(BaseException):
    """The controller's process has ended."""


class Fuse:
    """Kills the controller at its request number `at`: before it is sent, or, with `after`, before
    its answer arrives."""

    def __init__(self, at: int = 0, *, after: bool = False) -> None:
        self.at, self.after, self.count = at, after, 0

    def burn(self, act: Callable[[], _T]) -> _T:
        self.count += 1
        if self.count == self.at and not self.after:
            raise Killed
        result = act()
        if self.count == self.at:
            raise Killed
        return result


class MemoryCavvy:
    """A server of Cavvy whose jobs are threads that act as GitHub's runner."""

    def __init__(self) -> None:
        self.secret_values: dict[str, tuple[datetime, str]] = {}
        self.jobs: dict[str, tuple[threading.Thread, threading.Event]] = {}
        self.refused = False
        self.starts = True  # whether submitted jobs start
        self.fuse = Fuse()
        self._clock = itertools.count()

    def secrets(self, project: str) -> list[Any]:
        return self.fuse.burn(
            lambda: [
                SimpleNamespace(name=name, updated_at=at)
                for name, (at, _) in [*self.secret_values.items(), ("HF_TOKEN", (T0, ""))]
            ]
        )

    def put_secret(self, project: str, name: str, value: str) -> None:
        at = T0 + timedelta(seconds=next(self._clock))
        self.fuse.burn(lambda: self.secret_values.update({name: (at, value)}))

    def delete_secret(self, project: str, name: str) -> None:
        def act() -> None:
            if self.secret_values.pop(name, None) is None:
                raise ApiError("secret-not-found", "no such secret", "", 404)

        self.fuse.burn(act)

    def job(self, project: str, name: str) -> Any:
        def act() -> Any:
            if name not in self.jobs:
                raise ApiError("job-not-found", "no such job", "", 404)
            phase = "running" if self.lives(name) else "done"
            return SimpleNamespace(phase=phase, attempts=[])

        return self.fuse.burn(act)

    def lives(self, name: str) -> bool:
        thread, stopped = self.jobs[name]
        return thread.is_alive() if self.starts or thread.ident else not stopped.is_set()

    def stop(self, project: str, name: str, *, reason: str) -> None:
        self.fuse.burn(lambda: self.jobs[name][1].set())

    def submit(
        self, client: object, task: RunnerTask, name: str, secret: str, keep_s: float
    ) -> None:
        def act() -> None:
            if self.refused:
                raise ApiError("no-offer", "no offer fits", "", 422)
            value = self.secret_values[secret][1]
            stopped = threading.Event()
            thread = threading.Thread(target=act_as_runner, args=(value, stopped), daemon=True)
            self.jobs[name] = (thread, stopped)
            if self.starts:
                thread.start()

        self.fuse.burn(act)

    def running(self) -> list[str]:
        return [name for name in self.jobs if self.lives(name)]


class FusedService(ScaleSetService):
    fuse: Fuse

    def _send(self, *arguments: Any, **options: Any) -> Any:
        return self.fuse.burn(lambda: super(FusedService, self)._send(*arguments, **options))


@pytest.fixture
def site() -> Iterator[GitHubSite]:
    with github_site(poll_s=0.01) as site:
        yield site
        assert (site.violations, site.early) == ([], [])


@pytest.fixture
def cavvy() -> MemoryCavvy:
    return MemoryCavvy()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


def make_controller(
    site: GitHubSite, cavvy: MemoryCavvy, fuse: Fuse | None = None, **options: Any
) -> RunnerController:
    service = FusedService(f"{site.url}/{OWNER}/{REPOSITORY}", options.pop("credentials", TOKEN))
    service.fuse = cavvy.fuse = fuse or Fuse()
    options = {"most": 100, "report": lambda text: None, **options}
    return RunnerController(cast(Any, cavvy), service, TASK, submit=cavvy.submit, **options)


def is_over(site: GitHubSite, cavvy: MemoryCavvy) -> bool:
    completed = all(job.state == "completed" for job in site.jobs)
    return completed and not (site.runners or cavvy.secret_values or cavvy.running())


def work(
    site: GitHubSite,
    cavvy: MemoryCavvy,
    controller: RunnerController,
    cancelled: CiJob | None = None,
) -> None:
    while not is_over(site, cavvy):
        controller.step()
        if cancelled is not None and cancelled.state == "assigned":
            site.cancel(cancelled)


def runners_of(site: GitHubSite) -> list[str]:
    return [job.runner for job in site.jobs if job.result == "succeeded"]


def test_thirty_jobs_at_once_get_thirty_runners(site: GitHubSite, cavvy: MemoryCavvy) -> None:
    site.queue("gpu", 30)
    work(site, cavvy, make_controller(site, cavvy))
    assert len(set(runners_of(site))) == 30
    assert sorted(site.registered) == sorted(runners_of(site)) == sorted(cavvy.jobs)


def test_jobs_that_must_be_acquired_get_runners_too(site: GitHubSite, cavvy: MemoryCavvy) -> None:
    site.acquires = True
    site.queue("gpu", 3)
    work(site, cavvy, make_controller(site, cavvy))
    assert len(set(runners_of(site))) == len(cavvy.jobs) == 3


def test_no_more_runners_than_the_maximum(site: GitHubSite, cavvy: MemoryCavvy) -> None:
    cavvy.starts = False
    site.queue("gpu", 6)
    controller = make_controller(site, cavvy, most=2)
    for _ in range(4):
        controller.step()
    assert len(cavvy.jobs) == 2
    cavvy.starts = True
    for thread, _ in cavvy.jobs.values():
        thread.start()
    work(site, cavvy, controller)
    assert (site.most, len(set(runners_of(site)))) == (2, 6)


@pytest.mark.parametrize(
    ("an_hour", "start_s", "kept", "keep_s"),
    [
        (10, 180.0, 0, 0),  # half a runner is expected in the time of a start
        (30, 180.0, 0, 180),
        (30, 180.0, 1, 0),  # for the second node, none is expected
        (100, 180.0, 3, 180),
        (1000, 20.0, 0, 0),  # nodes that start fast
        (1000, 5000.0, 0, 900),
        (0, 180.0, 0, 0),
    ],
)
def test_nodes_are_kept_if_a_runner_is_expected_in_the_time_of_a_start(
    an_hour: int, start_s: float, kept: int, keep_s: float
) -> None:
    begun = [10_000.0 - 3600 * n / max(1, an_hour) for n in range(an_hour)]
    old = [1.0] * 1000  # hours ago
    assert decide_keep([*old, *begun], [2.0, start_s], kept, 10_000.0) == keep_s
    assert decide_keep(begun, [], kept, 10_000.0) == 0


IMAGE = "run: ./run.sh\nresources: {cpu: 2}\nimage: ubuntu:24.04\n"


@pytest.mark.parametrize(
    ("text", "keep_s"),
    [
        (IMAGE, 180),
        # what a CI job leaves on a node without images would reach the next one
        (IMAGE.partition("image")[0], 0),
        (IMAGE + "keep: 0s\n", 0),
        (IMAGE + "keep: 10m\n", 600),
        (IMAGE + "limits: {duration: 1h}\n", 0),
        (IMAGE + "volumes: [{name: cache, path: /cache, size: 10GB}]\n", 0),
    ],
)
def test_a_node_waits_only_if_its_file_may_leave_it_to_the_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, keep_s: float
) -> None:
    file = tmp_path / "gpu.yaml"
    file.write_text(f"name: gpu\n{text}")
    submitted: list[Any] = []
    monkeypatch.setattr(
        "cavvy.cli.task.submission.submit_loaded",
        lambda client, loaded, *rest: submitted.append(loaded.task),
    )
    task = RunnerTask(label="gpu", file=str(file), project="default")
    _submit(MemoryCavvy(), task, "gpu-1", "CI_RUNNER_1", 180.0, yes=True)  # type: ignore[arg-type]  # is not asked
    assert [each.keep.total_seconds() for each in submitted] == [keep_s]


@pytest.mark.parametrize("after", [False, True])
def test_the_controller_is_killed_at_each_of_its_requests(after: bool) -> None:
    """The next controller goes on; at last, each job had a runner of its own and nothing is left."""
    at, killed = 0, True
    while killed:
        at, killed = at + 1, False
        cavvy = MemoryCavvy()
        with github_site(poll_s=0.01) as site:
            jobs = site.queue("gpu", 3)
            controller = make_controller(site, cavvy, Fuse(at, after=after))
            try:
                work(site, cavvy, controller, jobs[0])
            except Killed:
                killed = True
                site.sessions.clear()  # which GitHub ends after some minutes
                work(site, cavvy, make_controller(site, cavvy), jobs[0])
            assert (site.violations, site.early) == ([], []), at
            ran = runners_of(site)
            assert len(set(ran)) == len(ran) >= 2, at
    assert at > 20


def test_thirty_jobs_with_a_controller_that_is_killed_again_and_again(
    site: GitHubSite, cavvy: MemoryCavvy
) -> None:
    site.queue("gpu", 30)
    lives = 0
    while not is_over(site, cavvy):
        lives += 1
        try:
            work(site, cavvy, make_controller(site, cavvy, Fuse(40, after=lives % 2 == 0)))
        except Killed:
            site.sessions.clear()
    assert lives > 3
    assert len(set(runners_of(site))) == 30


def test_a_cancelled_job_takes_its_runner_along_and_no_other(
    site: GitHubSite, cavvy: MemoryCavvy
) -> None:
    cavvy.starts = False  # the runners wait for nodes
    kept, cancelled = site.queue("gpu", 2)
    controller = make_controller(site, cavvy)
    while len(cavvy.jobs) < 2:
        controller.step()
    site.cancel(cancelled)
    while len(cavvy.running()) == 2:
        controller.step()
    for _ in range(5):
        controller.step()
    assert len(cavvy.running()) == len(site.runners) == 1
    (left,) = cavvy.running()
    cavvy.starts = True
    cavvy.jobs[left][0].start()
    work(site, cavvy, controller)
    assert (kept.runner, len(cavvy.jobs)) == (left, 2)


def queue_until_submitted(site: GitHubSite, cavvy: MemoryCavvy) -> tuple[CiJob, RunnerController]:
    """A job of the workflow for which a job of ours is submitted, and does not start yet."""
    cavvy.starts = False
    (job,) = site.queue("gpu")
    controller = make_controller(site, cavvy)
    while not cavvy.jobs:
        controller.step()
    return job, controller


def test_a_runner_that_is_lost_before_its_job_is_replaced(
    site: GitHubSite, cavvy: MemoryCavvy
) -> None:
    job, controller = queue_until_submitted(site, cavvy)
    (lost,) = cavvy.jobs
    cavvy.jobs[lost][1].set()  # its node is gone
    cavvy.starts = True
    work(site, cavvy, controller)
    assert job.runner not in ("", lost)


def test_a_node_that_is_lost_in_its_job_gets_no_second_runner(
    site: GitHubSite, cavvy: MemoryCavvy
) -> None:
    job, controller = queue_until_submitted(site, cavvy)
    (name,) = cavvy.jobs
    with site.news:
        site.runners[name].job, job.state, job.runner = job, "running", name
        site.events.append(site.tell("JobStarted", job))
    cavvy.jobs[name][1].set()  # its node is gone
    for _ in range(5):
        controller.step()
    assert (list(cavvy.jobs), len(cavvy.secret_values)) == ([name], 1)
    with site.news:  # GitHub gives the job up
        job.state, job.result = "completed", "failed"
        site.events.append(site.tell("JobCompleted", job))
        del site.runners[name]
    work(site, cavvy, controller)
    assert list(cavvy.jobs) == [name]


def test_a_job_whose_runner_github_has_deleted_is_stopped(
    site: GitHubSite, cavvy: MemoryCavvy
) -> None:
    clock = Clock()
    cavvy.starts = False
    (job,) = site.queue("gpu")
    controller = make_controller(site, cavvy, monotonic=clock.monotonic)
    while not cavvy.jobs:
        controller.step()
    site.cancel(job)
    site.runners.clear()
    controller.step()
    assert len(cavvy.running()) == 1
    clock.now += 61
    controller.step()
    clock.now += 181
    controller.step()
    assert cavvy.running() == []


def test_a_refused_runner_leaves_nothing_and_is_tried_again(
    site: GitHubSite, cavvy: MemoryCavvy
) -> None:
    said: list[str] = []
    cavvy.refused = True
    site.queue("gpu")
    controller = make_controller(site, cavvy, report=said.append)
    for _ in range(3):
        controller.step()
    assert (site.runners, cavvy.secret_values) == ({}, {})
    assert not controller._begun, "runners that never began warm no nodes"
    assert sum("no offer fits" in text for text in said) == 1
    cavvy.refused = False
    work(site, cavvy, controller)


def test_tokens_that_expire_are_renewed(site: GitHubSite, cavvy: MemoryCavvy) -> None:
    site.token_uses = 2
    site.queue("gpu", 3)
    work(site, cavvy, make_controller(site, cavvy))


def test_an_app_signs_in_with_its_key(site: GitHubSite, cavvy: MemoryCavvy) -> None:
    key = rsa.generate_private_key(65537, 2048)
    site.app_key = key.public_key()
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    ).decode()
    app = AppKey(client_id=CLIENT_ID, installation=INSTALLATION, pem=pem)
    site.queue("gpu")
    work(site, cavvy, make_controller(site, cavvy, credentials=app))
    broken = AppKey(client_id=CLIENT_ID, installation=INSTALLATION, pem=pem[:200])
    with pytest.raises(GitHubProblem) as found:
        make_controller(site, cavvy, credentials=broken).step()
    assert "RSA" in str(found.value)
    assert pem[60:100] not in str(found.value)


def test_a_second_controller_waits_for_the_end_of_the_session(
    site: GitHubSite, cavvy: MemoryCavvy
) -> None:
    site.session_s = 1000.0
    first = make_controller(site, cavvy)
    first.step()
    cavvy.secret_values[f"{first._prefix}0A0B0C0D"] = (T0, "of a runner that the first one starts")
    with pytest.raises(SessionTaken):
        make_controller(site, cavvy).step()
    assert len(cavvy.secret_values) == 1
    first.end()
    make_controller(site, cavvy).step()


def test_faults_of_github_pass(site: GitHubSite, cavvy: MemoryCavvy) -> None:
    site.queue("gpu", 3)
    controller = make_controller(site, cavvy)
    controller.step()
    site.faults = [502, 503, 429]
    faults = 0
    while not is_over(site, cavvy):
        try:
            controller.step()
        except GitHubSilent:
            faults += 1
    assert faults == 3
    assert len(set(runners_of(site))) == 3


def test_a_wrong_token_is_told_without_the_token(site: GitHubSite, cavvy: MemoryCavvy) -> None:
    with pytest.raises(GitHubProblem) as found:
        make_controller(site, cavvy, credentials="ghp_wrong").step()
    assert found.value.status == 401
    assert "ghp_wrong" not in str(found.value)


def test_delete_leaves_no_scale_set(site: GitHubSite, cavvy: MemoryCavvy) -> None:
    controller = make_controller(site, cavvy)
    controller.step()
    controller.end()
    assert site.sets
    controller.delete()
    assert site.sets == {}


def test_delete_stops_runners_that_wait(site: GitHubSite, cavvy: MemoryCavvy) -> None:
    cavvy.starts = False
    (job,) = site.queue("gpu")
    controller = make_controller(site, cavvy, sleep=lambda seconds: None)
    while not cavvy.jobs:
        controller.step()
    site.cancel(job)
    make_controller(site, cavvy, sleep=lambda seconds: None).delete()
    assert (site.sets, site.runners, cavvy.running()) == ({}, {}, [])


def test_odd_messages_do_not_stop_the_controller(site: GitHubSite, cavvy: MemoryCavvy) -> None:
    said: list[str] = []
    controller = make_controller(site, cavvy, report=said.append)
    controller.step()
    (job,) = site.queue("gpu")
    odd = {"messageType": "JobStarted", "runnerName": 3}
    named = {"messageType": "JobCompleted", "jobDisplayName": "a\x1b[2J", "runnerName": "x" * 5000}
    site.events += [odd, {"messageType": "Unknown"}, named, None, [], {}]  # type: ignore[list-item]
    work(site, cavvy, controller)
    assert job.result == "succeeded"
    site.message = {
        "messageId": site.next(),
        "messageType": "Other",
        "body": "{",
        "statistics": None,
    }
    controller.step()
    assert site.message is None


def test_runners_of_other_labels_are_not_touched(site: GitHubSite, cavvy: MemoryCavvy) -> None:
    cavvy.secret_values["CI_RUNNER_00000000_0A0B0C0D"] = (T0, "another controller's")
    controller = make_controller(site, cavvy)
    controller.step()
    assert len(cavvy.secret_values) == 1


@pytest.mark.parametrize(
    "url",
    [
        "github.com/team",
        "http://github.com/team",
        "https://github.com",
        "https://github.com/a/b/c",
        "https://user:word@github.com/team",
        "https://[github.com/team",
    ],
)
def test_odd_addresses_are_refused(url: str) -> None:
    with pytest.raises(GitHubProblem, match=r"expected https://github\.com/ORGANIZATION"):
        ScaleSetService(url, TOKEN)


def test_the_decision_counts_runners_that_can_still_take_a_job() -> None:
    runners = [
        RunnerFacts(name="a"),
        RunnerFacts(name="b", finished=True),
        RunnerFacts(name="c"),
    ]
    assert decide_runners(runners, 3).start == 1
    assert decide_runners(runners, 2) == decide_runners([], 0)
    surplus = decide_runners(runners, 1)
    assert (surplus.start, surplus.remove, surplus.idle) == (0, 1, ("c", "a"))


def test_the_configuration_reaches_only_the_runner() -> None:
    text = write_overrides("./run.sh", "CI_RUNNER_1_2", {"ci": "github"})
    assert 'export ACTIONS_RUNNER_INPUT_JITCONFIG=\\"$CI_RUNNER_1_2\\"' in text
    assert "unset CI_RUNNER_1_2" in text


def test_an_answer_of_the_server_is_a_command_failure(
    site: GitHubSite, cavvy: MemoryCavvy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(project: str) -> Any:
        raise ApiError("forbidden", "you may not list secrets", "", 403)

    monkeypatch.setattr(cavvy, "secrets", refuse)
    with pytest.raises(CommandFailure, match="you may not list secrets"):
        make_controller(site, cavvy).step()
