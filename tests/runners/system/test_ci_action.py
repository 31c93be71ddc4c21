"""The step of the action in deploy/github, with the example that deploys only a better model."""

import json
import os
import shlex
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.system.trust import User, serving_user_at
from tests.waits import START_S, wait_until

pytestmark = pytest.mark.system
ROOT = Path(__file__).resolve().parents[3]
ACTION = yaml.safe_load((ROOT / "deploy/github/action.yml").read_text())


class Step:
    """Runs the action's step as GitHub does."""

    def __init__(self, user: User) -> None:
        self.user = user
        self.output, self.summary = user.root / "output", user.root / "summary.md"
        folder = user.root / "bin"
        folder.mkdir()
        program = folder / "cavvy"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m cavvy "$@"\n')
        program.chmod(0o755)
        self.path = f"{folder}:{os.environ['PATH']}"

    def start(self, **inputs: str) -> "subprocess.Popen[str]":
        self.output.write_text("")
        self.summary.write_text("")
        (step,) = ACTION["runs"]["steps"]
        defaults = {name: str(each.get("default", "")) for name, each in ACTION["inputs"].items()}
        values = {**defaults, **inputs}
        env = {}
        for name, text in step["env"].items():
            env[name] = values[text.removeprefix("${{ inputs.").removesuffix(" }}")]
        folder = str(ROOT / "deploy/github")
        line = step["run"].replace("${{ github.action_path }}", folder)
        return subprocess.Popen(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", line],
            env={
                **self.user.environ,
                **env,
                "PATH": self.path,
                "GITHUB_OUTPUT": str(self.output),
                "GITHUB_STEP_SUMMARY": str(self.summary),
            },
            cwd=self.user.work,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, **inputs: str) -> tuple[int, str]:
        step = self.start(**inputs)
        out, _ = step.communicate(timeout=START_S)
        return step.returncode, out

    def outputs(self) -> dict[str, str]:
        rows = (line.partition("=") for line in self.output.read_text().splitlines())
        return {name: value for name, _, value in rows}


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    with serving_user_at(tmp_path / "user") as user:
        yield user


@pytest.fixture
def step(user: User) -> Step:
    return Step(user)


def test_only_a_better_model_is_deployed(user: User, step: Step) -> None:
    models, served = user.root / "models", user.root / "models/served/model.json"
    models.mkdir()

    def train(steps: int) -> tuple[int, str]:
        arguments = f"--param models={models} --param steps={steps}"
        return step.run(task=str(ROOT / "examples/ci/train.yaml"), arguments=arguments)

    code, out = train(20)
    assert code == 0, out
    first = json.loads(served.read_text())
    assert step.outputs()["outcome"] == "success"
    assert len(step.outputs()["job"].split()) == 2
    summary = step.summary.read_text()
    assert ("### train" in summary, "### better" in summary, "bill" in summary) == (True,) * 3
    assert train(200)[0] == 0
    second = json.loads(served.read_text())
    assert second != first
    service = (str(ROOT / "examples/ci/service.yaml"), "--param", f"models={models}", "--yes")
    deployed = user.json("serve", *service, "--param", "version=abc")
    with urllib.request.urlopen(f"{deployed['url']}?x=0", timeout=START_S) as answer:
        assert json.load(answer) == {"y": second["b"]}
    code, out = train(20)
    assert (code, step.outputs()["outcome"]) == (1, "failure"), out
    assert json.loads(served.read_text()) == second
    assert "### better" in step.summary.read_text()


def test_a_cancelled_step_stops_its_jobs(user: User, step: Step) -> None:
    file = user.task("name: long\nrun: sleep 1000\n")
    running = step.start(task=file)
    wait_until(lambda: user.has("long") and user.job("long").phase == "running")
    running.send_signal(signal.SIGINT)
    out, _ = running.communicate(timeout=START_S)
    assert running.returncode == 130, out
    assert user.ended("long").phase == "stopped"


def test_a_refused_task_fails_the_step(user: User, step: Step) -> None:
    file = user.task("name: odd\nrun: x\nresources: {cpu: many}\n")
    code, out = step.run(task=file)
    assert (code, "cpu" in out) == (2, True), out


@pytest.mark.parametrize("name", ["deploy/github/run.yaml", "examples/ci/workflow.yaml"])
def test_the_workflows_give_inputs_that_the_action_has(name: str) -> None:
    workflow = yaml.safe_load((ROOT / name).read_text())
    for job in workflow["jobs"].values():
        for each in job["steps"]:
            if each.get("uses") == "./deploy/github":
                assert set(each["with"]) <= set(ACTION["inputs"])
                assert {"task", "server"} <= set(each["with"])
    assert shlex.split(ACTION["runs"]["steps"][0]["run"])[:2] == ["exec", "bash"]
