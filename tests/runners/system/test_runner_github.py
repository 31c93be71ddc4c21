"""`cavvy runner github` with a real server, whose jobs act as GitHub's runner against the strict
stand-in of GitHub's protocol. The command is killed again and again.
"""

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.github_site import OWNER, REPOSITORY, TOKEN, GitHubSite, github_site
from tests.system.trust import User
from tests.waits import wait_until

pytestmark = pytest.mark.system
ROOT = Path(__file__).resolve().parents[3]
TASK = f"""
name: ci
resources: {{cpu: 0.05, memory: 64MB}}
run: PYTHONPATH={ROOT} exec {sys.executable} -m tests.github_site
limits: {{duration: 10m}}
"""


@pytest.fixture
def site() -> Iterator[GitHubSite]:
    with github_site(poll_s=1.0, session_s=2.0) as site:
        yield site


def names_of_secrets(user: User) -> list[str]:
    return [row.name for row in user.api.secrets("default")]


def unfinished(user: User) -> list[str]:
    phases = ("queued", "starting", "running", "stopping")
    return [job.name for job in user.api.jobs("default", phases=phases, limit=100).jobs]


def test_thirty_jobs_get_thirty_runners_while_the_controller_is_killed(
    user: User, site: GitHubSite
) -> None:
    user.variables["GITHUB_TOKEN"] = TOKEN
    file = user.task(TASK, "ci.yaml")
    command = ("runner", "github", f"{site.url}/{OWNER}/{REPOSITORY}", file, "--max", "30")
    controller = user.start(*command)
    wait_until(lambda: bool(site.sessions))
    site.queue("ci", 30)
    for done in (1, 10, 20):
        wait_until(lambda: sum(j.state == "completed" for j in site.jobs) >= done, seconds=240)  # noqa: B023
        controller.kill()
        controller = user.start(*command)
    wait_until(lambda: all(job.result == "succeeded" for job in site.jobs), seconds=240)
    wait_until(lambda: not (site.runners or unfinished(user) or names_of_secrets(user)))
    assert len({job.runner for job in site.jobs}) == 30
    assert (site.early, site.violations) == ([], [])
    wait_until(lambda: not user.json("nodes"))
    controller.send_signal(signal.SIGTERM)
    said = "".join(controller.communicate(timeout=60))
    assert site.sessions == {}
    runner = site.jobs[-1].runner
    assert ("build" in said, "\x1b" in said, TOKEN in said) == (True, False, False)
    assert "key-" not in user.log(runner) + str(user.scenario(runner))


def test_a_label_gives_the_file_other_resources(user: User, site: GitHubSite) -> None:
    user.variables["GITHUB_TOKEN"] = TOKEN
    file, url = user.task(TASK, "ci.yaml"), f"{site.url}/{OWNER}/{REPOSITORY}"
    controller = user.start("runner", "github", url, file, "--label", "big={memory: 70MB}")
    wait_until(lambda: bool(site.sessions))
    [job] = site.queue("big")
    wait_until(lambda: job.result == "succeeded", seconds=120)
    assert job.runner.startswith("big-")
    needs = json.loads(bytes(user.api.job("default", job.runner).task))["resources"]
    assert (needs["cpus_min"], needs["memory_min_mib"]) == (0.05, 70), "the file's, and the label's"
    wait_until(lambda: not (site.runners or unfinished(user) or names_of_secrets(user)))
    controller.send_signal(signal.SIGTERM)
    controller.communicate(timeout=60)


def test_jobs_of_several_labels_get_the_runner_that_has_all_of_them(
    user: User, site: GitHubSite
) -> None:
    user.variables["GITHUB_TOKEN"] = TOKEN
    file, url = user.task(TASK, "ci.yaml"), f"{site.url}/{OWNER}/{REPOSITORY}"
    small, big = ("--label", "small={memory: 64MB}"), ("--label", "big={memory: 70MB}")
    labels = ("--also", "self-hosted", "--also", "gpu")
    controller = user.start("runner", "github", url, file, *small, *big, *labels)
    wait_until(lambda: len(site.sessions) == 2)
    mine = site.queue(("self-hosted", "gpu", "big"), 3)
    [other] = site.queue(("self-hosted", "small"))
    foreign = site.queue(("self-hosted", "windows"), 2)
    wait_until(lambda: all(job.result for job in (*mine, other)), seconds=240)
    assert [job.runner.split("-")[0] for job in (*mine, other)] == ["big"] * 3 + ["small"]
    assert [job.state for job in foreign] == ["queued", "queued"], "no runner has this label"
    wait_until(lambda: not (site.runners or unfinished(user) or names_of_secrets(user)))
    controller.send_signal(signal.SIGTERM)
    controller.communicate(timeout=60)
    kept = {name: number for number, name in site.sets.items()}
    controller = user.start("runner", "github", url, file, *big, "--also", "windows")
    wait_until(lambda: site.labels[kept["big"]] == {"big", "windows"})
    assert {name: number for number, name in site.sets.items()} == kept
    controller.send_signal(signal.SIGTERM)
    controller.communicate(timeout=60)
    assert (site.early, site.violations) == ([], [])


def test_what_is_wrong_is_told(user: User, site: GitHubSite) -> None:
    url = f"{site.url}/{OWNER}/{REPOSITORY}"
    file = user.task(TASK, "ci.yaml")
    user.variables["GITHUB_APP_ID"] = "1"
    said = user.cli("runner", "github", url, file, code=2)
    assert "GITHUB_APP_INSTALLATION_ID and GITHUB_APP_PRIVATE_KEY is not set" in said
    user.variables["GITHUB_TOKEN"] = "ghp_wrong"
    said = user.cli("runner", "github", url, file, code=1)
    assert "the token or the key of the app is wrong or has expired" in said
    assert "ghp_wrong" not in said
    assert "does not begin with https://" in user.cli(
        "runner", "github", "http://github.com/a", file, code=2
    )
    user.variables["GITHUB_TOKEN"] = TOKEN
    assert "two files have the same name" in user.cli("runner", "github", url, file, file, code=2)
    for label, told in {
        "x": "names no resources",
        "=H100": "names no resources",
        "x=": "names no resources",
        "Not A Name=H100": "name",
        "x={gpus: 3}": "gpus",
        "x={": "this is not YAML",
        "x=H100\nrun: id": "gpu",
    }.items():
        assert told in user.cli("runner", "github", url, file, "--label", label, code=2)
    for wrong in ("", "a b", "x" * 99, "-x", "a,b", "a\n"):
        told = user.cli("runner", "github", url, file, "--also", wrong, code=2)
        assert "is not a label" in told
    same = ("--label", "x={cpu: 1}", "--label", "x={cpu: 2}")
    assert "two labels have the same name" in user.cli("runner", "github", url, file, *same, code=2)
    several = user.cli("runner", "github", url, file, file, *same, code=2)
    assert "--label needs exactly one file" in several
    pair = user.task(f"{TASK}\nnodes: 2\n", "pair.yaml")
    assert "a runner is one job on one node" in user.cli("runner", "github", url, pair, code=2)
    user.cli("runner", "github", url, file, "--delete")
    assert site.sets == {}
