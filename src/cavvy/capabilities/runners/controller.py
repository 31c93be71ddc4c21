"""Starts a runner for each job that GitHub assigns to a scale set, as a job of Cavvy.

The controller keeps no state of its own, so it may be killed at any time. The list of its runners
is the list of their secrets, whose values are the runners' configurations: a secret is set before
the runner is registered at GitHub, and is deleted after the runner has ended and is not registered
any more. How many runners are needed is what GitHub says when a session begins and in each message.

GitHub gives a job to any runner of the scale set. So a runner that has not started its job is
removed only if there are more runners than assigned jobs, and only if GitHub agrees.

Reads the task files of runners.
"""

import hashlib
import json
import os
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import inf
from typing import TYPE_CHECKING

from cavvy.capabilities.runners.scale_sets import (
    CiJobMessage,
    GitHubProblem,
    GitHubSilent,
    RunnerBusy,
    ScaleSet,
    ScaleSetService,
    SessionTaken,
    SetMessage,
    SetSession,
)
from cavvy.cli.reach.session import make_failure
from cavvy.cli.task.load import read_task
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.formatting import ENDED
from cavvy.client import ApiError
from cavvy.domain.values import Struct

if TYPE_CHECKING:
    from cavvy.client import ApiClient
    from cavvy.task_files import LoadedTask


JIT_VARIABLE = "ACTIONS_RUNNER_INPUT_JITCONFIG"  # which GitHub's runner reads
# the runner's program in GitHub's image ghcr.io/actions/actions-runner
DEFAULT_RUN = "cd /home/runner && exec ./run.sh"
_PENDING = "not registered yet"  # the value of a secret until its runner is registered
# A runner that GitHub has deleted ends within seconds. After this time, its job is stopped.
_GRACE_S = 180.0
_LOOK_S = 60.0  # how often GitHub is asked whether a runner is still registered
# how long a message that a job has completed may follow the end of the job's runner
_LATE_S = 300.0
_DELETE_LOOKS = 60  # how often is looked whether stopped runners have ended
_HOUR_S = 3600.0  # whose runners tell how many are expected
_SHORT_START_S = 30.0  # nodes that start faster need not wait for runners
_LONGEST_KEEP_S = 900.0
_MOST_BEGUN, _MOST_STARTS = 1000, 20  # the newest runners that count
_SHORTEST_S, _LONGEST_S = 1.0, 30.0  # pauses after problems that may pass

# A configuration is valid once, and scripts of a CI job cannot go on elsewhere.
NO_RETRY = {"preemption": 0, "node": 0, "exit": 0}


class RunnerFacts(Struct, frozen=True, kw_only=True):
    """A runner whose job of Cavvy has not ended. `finished` is whether its CI job has completed, or
    GitHub has deleted the runner for another reason.
    """

    name: str
    finished: bool = False


class RunnerChanges(Struct, frozen=True, kw_only=True):
    """The number of runners to start, and the number of `idle` runners to remove."""

    start: int = 0
    remove: int = 0
    idle: tuple[str, ...] = ()


def decide_runners(runners: Sequence[RunnerFacts], wanted: int) -> RunnerChanges:
    """Decide how many runners start or leave, so that each of the `wanted` jobs has one. The newest
    runners leave first; the list begins with the oldest."""
    ready = [each.name for each in runners if not each.finished]
    more = wanted - len(ready)
    if more >= 0:
        return RunnerChanges(start=more)
    return RunnerChanges(remove=-more, idle=tuple(reversed(ready)))


def decide_keep(begun: Sequence[float], starts: Sequence[float], kept: int, now: float) -> float:
    """Return for how many seconds the node of a new runner waits for another one, or 0.

    `begun` are the times at which runners began, `starts` how many seconds their nodes took to
    start, and `kept` is the number of runners whose nodes wait already. An idle second costs as
    much as a second of a start, so a node pays if more than one runner is expected in the time of
    a start. It waits for at most this time, so it never costs more than another start.
    """
    start = max(starts, default=0.0)
    if start < _SHORT_START_S:
        return 0.0
    expected = sum(now - each <= _HOUR_S for each in begun) / _HOUR_S * start
    return min(start, _LONGEST_KEEP_S) if kept + 1 <= expected else 0.0


class RunnerTask(Struct, frozen=True, kw_only=True):
    """A task file, whose name is the label of its runners. `own` are overrides of this label, as
    YAML, or "". `others` are further labels of the runners.
    """

    label: str
    file: str
    own: str = ""
    project: str
    others: tuple[str, ...] = ()


class RunnerController:
    """Keeps the runners of one label. `submit` submits the job of a runner: it gets the file, the
    name of the job, its secret, and for how many seconds its node waits for another runner if the
    file does not say it. `report` gets sentences for the log.
    """

    def __init__(
        self,
        client: "ApiClient",
        service: ScaleSetService,
        task: RunnerTask,
        *,
        most: int,
        submit: Callable[["ApiClient", RunnerTask, str, str, float], None],
        report: Callable[[str], None],
        group: str | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._client, self._service, self._task = client, service, task
        self._most, self._group = most, group
        self._submit, self._report = submit, report
        self._monotonic, self._sleep = monotonic, sleep
        self._scale_set: ScaleSet | None = None
        self._session: SetSession | None = None
        self._assigned = 0
        self._finished: dict[str, float] = {}  # since when runners are finished
        self._looked: dict[str, float] = {}  # when GitHub was asked for a runner
        # when runners ended whose completed jobs no message has reported yet
        self._unreported: dict[str, float] = {}
        self._begun = deque[float](maxlen=_MOST_BEGUN)  # when runners began
        self._starts: dict[str, float] = {}  # how many seconds runners waited for their nodes
        # until when nodes wait for another runner; infinite while theirs has not ended
        self._kept: dict[str, float] = {}
        self._said = ""
        self._over = threading.Event()
        # Scale sets of several organizations can have the same name.
        place = hashlib.sha256(f"{service.url}/{group}/{task.label}".encode()).hexdigest()
        self._prefix = f"CI_RUNNER_{place[:8]}_".upper()

    def run(self) -> None:
        """Keep the runners, until another thread calls `end`. Raises GitHubProblem if GitHub
        refuses the credentials or the address."""
        pause = _SHORTEST_S
        while not self._over.is_set():
            try:
                self.step()
                pause = _SHORTEST_S
            except (GitHubSilent, SessionTaken) as problem:
                self._say(f"{problem}; trying again")
                self._sleep(pause)
                pause = min(_LONGEST_S, pause * 2)

    def step(self) -> None:
        """Open the session if there is none, start and remove runners, and wait for a message.
        Raises GitHubProblem."""
        if self._session is None:
            self._open()
        self.reconcile()
        session = self._session
        try:
            message = session.next_message(self._most) if session is not None else None
            if session is not None and message is not None:
                self._take(session, message)
        except GitHubSilent:
            raise
        except GitHubProblem as problem:  # the session is over
            if not self._over.is_set():
                self._say(str(problem))
                self._close()

    def end(self) -> None:
        """End the session, so that the next controller need not wait until GitHub ends it."""
        self._over.set()
        self._close()

    def delete(self) -> None:
        """Stop the runners that have no job, and delete the scale set. Raises GitHubProblem."""
        scale_set = self._service.open_scale_set(self._task.label, self._group)
        runners = tuple(self._list_runners())
        self._remove(RunnerChanges(remove=len(runners), idle=runners))
        for _ in range(_DELETE_LOOKS):
            self._tidy()
            if not (left := self._list_runners()):
                break
            self._sleep(_SHORTEST_S)
        else:
            raise GitHubProblem(f"{self._task.label} still has runners: {', '.join(left)}")
        self._service.delete_scale_set(scale_set.id)

    def reconcile(self) -> None:
        """Tidy up behind runners that have ended, and start or remove runners. Raises
        GitHubSilent."""
        runners, busy = self._tidy()
        now = self._monotonic()
        self._unreported = {name: at for name, at in self._unreported.items() if now - at < _LATE_S}
        wanted = min(self._assigned - len(self._unreported) - busy, self._most)
        changes = decide_runners(runners, max(0, wanted))
        for _ in range(changes.start):
            if not self._start():
                break
        self._remove(changes)

    def _open(self) -> None:
        """Open the session, whose number of assigned jobs is newer than what was known before.
        Runners are touched only with a session, because another controller may have it."""
        if self._scale_set is None:
            task = self._task
            self._scale_set = self._service.open_scale_set(task.label, self._group, task.others)
        owner = f"cavvy-{socket.gethostname()}-{os.getpid()}"
        self._session = self._service.open_session(self._scale_set.id, owner)
        self._assigned, self._said = self._session.assigned, ""
        self._report(f"{self._task.label}: waiting for jobs at {self._service.url}")
        self._tidy()
        self._unreported = {}

    def _close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            with suppress(GitHubProblem):
                session.close()

    def _take(self, session: SetSession, message: SetMessage) -> None:
        """Note what a message says. The message is deleted before runners start, because the next
        session would begin with newer numbers than those of the message."""
        if available := [j for j in message.jobs if j.message_type == "JobAvailable"]:
            session.acquire([job.runner_request_id for job in available])
        session.delete_message(message)
        self._assigned = message.assigned
        for job in message.jobs:
            runner = job.runner_name or ""
            if job.message_type == "JobStarted":
                self._report(f"{runner} runs {_describe(job)}")
            elif job.message_type == "JobCompleted":
                self._report(f"{_describe(job)}: {job.result}")
                if runner and self._unreported.pop(runner, None) is None:
                    self._finished.setdefault(runner, self._monotonic())

    def _tidy(self) -> tuple[list[RunnerFacts], int]:
        """Forget the runners that have ended, and return the others, and the number of ended
        runners whose jobs GitHub has not given up yet."""
        left, busy = [], 0
        for name in self._list_runners():
            phase = self._read_phase(name)
            if phase and phase not in ENDED:
                left.append(self._look(name))
            elif not self._forget(name, ran=bool(phase)):
                busy += 1
        known = {each.name for each in left}
        self._finished = {name: at for name, at in self._finished.items() if name in known}
        self._looked = {name: at for name, at in self._looked.items() if name in known}
        return left, busy

    def _look(self, name: str) -> RunnerFacts:
        """Return the state of a runner. A job that goes on although GitHub has deleted its runner
        is stopped after a while."""
        now = self._monotonic()
        if name not in self._finished and now - self._looked.get(name, -_LOOK_S) >= _LOOK_S:
            self._looked[name] = now
            if not self._service.is_registered(name):
                self._finished[name] = self._unreported[name] = now
        since = self._finished.get(name)
        if since is not None and now - since >= _GRACE_S:
            self._stop(name, "GitHub has deleted this runner")
            self._finished[name] = now
        return RunnerFacts(name=name, finished=since is not None)

    def _read_phase(self, name: str) -> str:
        """Return the phase of a runner's job, or "" if it was never submitted."""
        with self._answers():
            try:
                job = self._client.job(self._task.project, name)
            except ApiError as error:
                if error.code != "job-not-found":
                    raise
                return ""
        if job.attempts and (running_at := job.attempts[-1].running_at) is not None:
            took = (running_at - job.attempts[-1].created_at).total_seconds()
            if name not in self._starts:
                self._starts = dict([*self._starts.items(), (name, took)][-_MOST_STARTS:])
        return job.phase

    def _forget(self, name: str, *, ran: bool) -> bool:
        """Delete what is left of a runner that has ended, or whose job never `ran`. Return False if
        GitHub has not given up its CI job yet."""
        try:
            removed = self._service.remove_runner(name)
        except RunnerBusy:
            return False
        if ran and not removed and name not in self._finished:
            # GitHub has deleted the runner after its job, and has not told so yet.
            self._unreported[name] = self._monotonic()
        with self._answers(), suppress_missing("secret-not-found"):
            self._client.delete_secret(self._task.project, self._secret(name))
        if name in self._kept:
            self._kept[name] = self._monotonic() + max(self._starts.values(), default=0.0)
        return True

    def _choose_keep(self, name: str) -> float:
        now = self._monotonic()
        self._kept = {other: until for other, until in self._kept.items() if until > now}
        keep_s = decide_keep([*self._begun, now], [*self._starts.values()], len(self._kept), now)
        if keep_s:
            self._kept[name] = inf
        return keep_s

    def _start(self) -> bool:
        """Start a runner. Return False if the server refuses its job; the controller tries again
        after the next message or wait."""
        name = f"{self._task.label}-{os.urandom(4).hex()}"
        secret = self._secret(name)
        assert self._scale_set is not None
        try:
            with self._answers():
                self._client.put_secret(self._task.project, secret, _PENDING)
            value = self._service.register_runner(self._scale_set.id, name)
            with self._answers():
                self._client.put_secret(self._task.project, secret, value)
                self._submit(self._client, self._task, name, secret, self._choose_keep(name))
        except CommandFailure as failure:
            self._say(f"{self._task.label}: no runner could start: {failure.message}")
            self._forget(name, ran=False)
            return False
        self._begun.append(self._monotonic())
        self._looked[name], self._said = self._begun[-1], ""
        self._report(f"{name} starts")
        return True

    def _remove(self, changes: RunnerChanges) -> None:
        """Remove runners without a job. GitHub refuses to remove a runner with a job."""
        left = changes.remove
        for name in changes.idle if left else ():
            try:
                self._service.remove_runner(name)
            except RunnerBusy:
                continue
            self._finished[name] = self._monotonic()
            self._stop(name, "its CI job was cancelled")
            left -= 1
            if not left:
                return

    def _stop(self, name: str, reason: str) -> None:
        with self._answers(), suppress_missing("job-not-found"):
            self._client.stop(self._task.project, name, reason=reason)
        self._report(f"{name} stops: {reason}")

    def _list_runners(self) -> list[str]:
        """Return the names of all runners of this scale set, the oldest first."""
        form = re.compile(self._prefix + "([0-9A-F]{8})")
        with self._answers():
            found = self._client.secrets(self._task.project)
        rows = [(row.updated_at, m[1].lower()) for row in found if (m := form.fullmatch(row.name))]
        return [f"{self._task.label}-{mark}" for _, mark in sorted(rows)]

    def _secret(self, name: str) -> str:
        return self._prefix + name.rpartition("-")[2].upper()

    @contextmanager
    def _answers(self) -> Iterator[None]:
        """Turn an ApiError into a CommandFailure."""
        try:
            yield
        except ApiError as error:
            raise make_failure(error) from error

    def _say(self, text: str) -> None:
        """Report a problem once, not each time."""
        if text != self._said:
            self._said = text
            self._report(text)


@contextmanager
def suppress_missing(code: str) -> Iterator[None]:
    """Suppress the ApiError with this code."""
    try:
        yield
    except ApiError as error:
        if error.code != code:
            raise


def write_overrides(run: str, secret: str, tags: Mapping[str, str]) -> str:
    """Return the overrides of a runner's job, as YAML: its configuration reaches only the program
    of the runner."""
    commands = f'export {JIT_VARIABLE}="${secret}"\nunset {secret}\n{run}'
    made = {"run": commands, "secrets": [secret], "retry": NO_RETRY, "tags": dict(tags)}
    return "".join(f"{key}: {json.dumps(value)}\n" for key, value in made.items())


def _describe(job: CiJobMessage) -> str:
    where = f"{job.owner_name}/{job.repository_name}" if job.repository_name else "a repository"
    return f"{job.job_display_name or 'a job'} of {where}, run {job.workflow_run_id}"


def read_runner_task(
    file: str, params: Mapping[str, str], overrides: str = "", *, tells: bool = False
) -> "LoadedTask":
    """Return the task of a runner, which is one job on one node. Raises CommandFailure."""
    from cavvy.domain.arrays import is_array
    from cavvy.task_files import ReadOptions

    loaded = read_task(file, params, ReadOptions(overrides=overrides), tells=tells)
    task = loaded.task
    unfit = {
        "nodes": task.nodes > 1,
        "array": is_array(task),
        "schedule": task.schedule is not None,
        "after": bool(task.after),
        "group": task.group is not None,
    }
    if found := [name for name, given in unfit.items() if given]:
        hint = f"remove {' and '.join(f'`{name}`' for name in found)} from the file"
        raise CommandFailure(f"{file}: a runner is one job on one node", hint, exit_code=2)
    return loaded


def may_wait(loaded: "LoadedTask") -> bool:
    """Return whether the node of a runner may wait for another runner although the file does not
    ask for it. Without an image, what a CI job leaves on the node would reach the next one.
    """
    from cavvy.spec.tree import read_table

    task = loaded.task
    if not (task.image or task.image_build) or "keep" in (read_table(loaded.text) or {}):
        return False
    return not (task.pool or task.machine or task.volumes or task.limits.duration)
