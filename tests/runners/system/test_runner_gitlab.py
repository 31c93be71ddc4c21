"""The stages of the custom executor, called as GitLab Runner calls them: a process for each stage,
with the documents and variables of https://docs.gitlab.com/runner/executors/custom/.
"""

import json
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.system.trust import User
from tests.waits import wait_until

pytestmark = pytest.mark.system
BUILD_FAILURE, SYSTEM_FAILURE = 1, 2
TASK = """
name: ci
params: {word: {default: none, choices: [none, hello]}}
resources: {cpu: 0.05, memory: 64MB}
env: {WORD: "${{ params.word }}"}
run: exit 3
"""


class Executor:
    """What GitLab Runner does with one CI job."""

    def __init__(self, user: User, number: int, **document: object) -> None:
        self.user, self.folder = user, user.root / f"gitlab-{number}"
        self.folder.mkdir()
        self.code_file = self.folder / "build_exit_code"
        document = {
            "id": number,
            "runner_info": {"timeout": 600},
            "image": {"name": ""},
            **document,
        }
        (self.folder / "response.json").write_text(json.dumps(document))
        self.file = user.task(TASK, "ci.yaml")
        self.variables: dict[str, str] = {}

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        # not the user's variables, which the threads of other CI jobs would use
        variables = {
            "BUILD_FAILURE_EXIT_CODE": str(BUILD_FAILURE),
            "SYSTEM_FAILURE_EXIT_CODE": str(SYSTEM_FAILURE),
            "BUILD_EXIT_CODE_FILE": str(self.code_file),
            "JOB_RESPONSE_FILE": str(self.folder / "response.json"),
            # what a pipeline can set is not believed
            "CUSTOM_ENV_CI_JOB_ID": "1",
            **self.variables,
        }
        return self.user.start("runner", "gitlab", *arguments, variables=variables)

    def stage(self, *arguments: str) -> tuple[int, str, str]:
        command = self.start(*arguments)
        out, err = command.communicate(timeout=120)
        return command.returncode, out, err

    def prepare(self) -> tuple[int, str, str]:
        return self.stage("prepare", self.file)

    def run(self, script: str, stage: str = "step_script") -> tuple[int, str, str]:
        path = self.folder / stage
        path.write_text(f"#!/usr/bin/env bash\n{script}\n")
        return self.stage("run", str(path), stage)


def test_a_job_from_its_first_stage_to_its_last(user: User) -> None:
    job = Executor(user, 71)
    code, out, _ = job.stage("config")
    assert (code, json.loads(out)["driver"]["name"]) == (0, "Cavvy")
    job.variables["CUSTOM_ENV_CAVVY_PARAM_WORD"] = "hello"
    code, out, err = job.prepare()
    assert code == 0, err
    assert "gitlab-71 runs on local" in out
    assert job.prepare()[0] == 0  # GitLab Runner repeats a stage that it took for failed
    assert [each.name for each in user.api.jobs("default").jobs] == ["gitlab-71"]
    large = "# " + "x" * 300_000  # longer than an argument of a command can be
    code, out, err = job.run(
        f"{large}\necho $WORD there; echo no >&2; echo kept >file", "get_sources"
    )
    assert (code, out, err) == (0, "hello there\n", "no\n")
    assert job.run("cat file")[:2] == (0, "kept\n")
    assert job.run("exit 42")[0] == BUILD_FAILURE
    assert job.code_file.read_text() == "42"
    assert job.stage("cleanup")[0] == 0
    # the job ends by itself, so that its nodes can be kept
    assert user.ended("gitlab-71").phase == "done"
    assert job.stage("cleanup")[0] == 0
    code, _, err = job.run("true")
    assert (code, "does not run any more" in err) == (SYSTEM_FAILURE, True)
    assert not user.json("nodes")


def test_failures_of_the_executor_are_told_from_those_of_scripts(user: User) -> None:
    job = Executor(user, 72)
    job.variables["CUSTOM_ENV_CAVVY_PARAM_WORD"] = "rm -rf"
    code, _, err = job.prepare()
    assert (code, "word" in err) == (SYSTEM_FAILURE, True)
    job = Executor(user, 73, runner_info={})
    code, _, err = job.prepare()
    assert (code, "timeout" in err) == (SYSTEM_FAILURE, True)
    (job.folder / "response.json").write_text('{"id": "../x"}')
    assert job.prepare()[0] == SYSTEM_FAILURE
    job.variables["JOB_RESPONSE_FILE"] = ""
    assert "JOB_RESPONSE_FILE is not set" in job.prepare()[2]
    assert user.api.jobs("default").jobs == []


def test_a_second_attempt_to_prepare_has_a_job_of_its_own(user: User) -> None:
    job, mark = Executor(user, 76), user.root / "mark"
    user.task(f"{TASK}setup: test -e {mark} || {{ touch {mark}; exit 5; }}\n", "ci.yaml")
    code, _, err = job.prepare()
    assert (code, "exit code 5" in err) == (SYSTEM_FAILURE, True), err
    code, _, err = job.prepare()
    assert code == 0, err
    assert job.run("echo here")[:2] == (0, "here\n")
    assert job.stage("cleanup")[0] == 0
    phases = sorted(user.ended(each.id).phase for each in user.api.jobs("default").jobs)
    assert phases == ["done", "failed"]


def test_a_job_ends_by_itself_if_gitlab_runner_is_gone(user: User) -> None:
    job = Executor(user, 75, runner_info={"timeout": 2 - 900})
    job.prepare()
    assert user.ended("gitlab-75").phase == "failed"
    assert "the time of the CI job is over" in user.log("gitlab-75")


def test_a_cancelled_script_ends_on_the_node(user: User) -> None:
    job = Executor(user, 74)
    assert job.prepare()[0] == 0
    mark = user.root / "began"
    path: Path = job.folder / "step"
    path.write_text(f"touch {mark}; sleep 1000")
    command = job.start("run", str(path), "step_script")
    wait_until(mark.exists)
    command.send_signal(signal.SIGTERM)
    command.communicate(timeout=60)
    assert job.stage("cleanup")[0] == 0
    user.ended("gitlab-74")
    wait_until(lambda: not user.left())


def test_ten_jobs_at_once_leave_no_job(user: User) -> None:
    user.api  # noqa: B018 - starts the server
    jobs = [Executor(user, 80 + n) for n in range(10)]

    def live(job: Executor) -> str:
        started = [job.prepare(), job.run("pwd"), job.stage("cleanup")]
        assert [code for code, *_ in started] == [0, 0, 0], started
        return started[1][1].strip()

    with ThreadPoolExecutor(3) as threads:
        names = list(threads.map(live, jobs))
    assert len(set(names)) == 10
    for job in user.api.jobs("default").jobs:
        user.ended(job.name)
    assert not user.json("nodes")
