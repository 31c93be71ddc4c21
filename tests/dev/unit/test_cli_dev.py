"""`cavvy dev`: the session that it submits, and how it shows the way in."""

import json
from datetime import timedelta
from pathlib import Path

import pytest
from tests.unit.cli_client import FakeClient, client, make_job, make_machine

from cavvy.capabilities.dev import command as dev
from cavvy.cli.view.failure import CommandFailure
from cavvy.domain.tasks import TaskSpec
from cavvy.task_files import ReadOptions

__all__ = ["client"]
FILE = """\
type: dev-environment
init: [echo first]
inactivity_duration: 45m
"""


def read(tmp_path: Path, text: str, ide: str = "ssh", **overrides: object) -> dict[str, object]:
    path = tmp_path / "task.yaml"
    path.write_text(text)
    given = json.dumps({"run": "the session", **overrides})
    task = dev._read_session(str(path), {}, ReadOptions(overrides=given), ide, None).task
    return {
        "run": task.run,
        "machine": task.machine,
        "keep": task.keep.total_seconds() / 60,
        "idle": task.limits.idle and task.limits.idle.total_seconds() / 60,
        "session": task.session,
        "setup": task.setup,
    }


def test_a_task_becomes_a_session_with_its_setup(tmp_path: Path) -> None:
    found = read(tmp_path, "{run: python train.py, setup: make, keep: 1h}", machine="gpu")
    assert found == {
        "run": "the session",
        "machine": "gpu",
        "keep": 60.0,
        "idle": 60.0,
        "session": True,
        "setup": "make",
    }


def test_a_session_in_a_pool_has_a_name_and_an_idle_limit_but_no_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("getpass.getuser", lambda: "Ada Lovelace")
    path = tmp_path / "task.yaml"

    def read_named(text: str, **overrides: object) -> tuple[str, float]:
        path.write_text(text)
        found = read(tmp_path, text, **overrides)
        assert (found["machine"], found["keep"], found["session"]) == (None, 0.0, True)
        given = ReadOptions(overrides=json.dumps({"run": "x", **overrides}))
        task = dev._read_session(str(path), {}, given, "ssh", None).task
        assert task.pool == "gpus"
        return task.name, float(str(found["idle"]))

    assert read_named("run: train", pool="gpus") == ("dev-ada-lovelace", 30.0)
    assert read_named("run: train", pool="gpus", machine="mine", keep="1h") == ("mine", 60.0)
    in_file = "{run: train, pool: gpus}"
    assert read_named(in_file, machine="mine", keep="1h") == ("mine", 60.0)
    for key, value in (("machine", "mine"), ("keep", "1h")):
        with pytest.raises(CommandFailure, match=f"`{key}` has no meaning with `pool`"):
            read_named(f"{{run: train, {key}: {value}}}", pool="gpus")
    assert read_named("{run: train, pool: gpus, limits: {idle: 5m}}") == ("dev-ada-lovelace", 5.0)


def test_a_dev_environment_keeps_its_commands_and_its_idle_limit(tmp_path: Path) -> None:
    found = read(tmp_path, FILE)
    assert "echo first" in str(found["run"])
    assert (found["keep"], found["idle"]) == (45.0, 45.0)


@pytest.mark.parametrize(
    ("text", "installs"), [("{run: x}", True), ("{run: x, setup: make}", False)]
)
def test_jupyter_is_installed_in_the_setup_of_a_task_without_one(
    tmp_path: Path, text: str, installs: bool
) -> None:
    assert (read(tmp_path, text, "jupyter")["setup"] == dev._INSTALL) is installs


def test_a_session_waits_for_the_start_of_its_machine(client: FakeClient) -> None:
    client.named = [make_machine(state="busy", job="dev-start")]
    client.all_jobs["dev-start"] = make_job("dev-start", "running", machine="dev")
    assert dev._find_session(client, "default", "dev") is None  # type: ignore[arg-type]
    client.named = [make_machine(state="busy", job="train")]
    client.all_jobs["train"] = make_job("train", "running", machine="dev")
    with pytest.raises(CommandFailure, match="machine dev runs job train"):
        dev._find_session(client, "default", "dev")  # type: ignore[arg-type]


def test_a_later_session_in_a_pool_is_found_by_the_name_that_it_asked_for(
    client: FakeClient,
) -> None:
    def add(name: str, phase: str, asked: str, *, session: bool = True) -> None:
        task = TaskSpec(name=asked, run="true", pool="gpus", session=session)
        client.all_jobs[name] = make_job(name, phase, task=task)

    def find(name: str) -> str | None:
        found = dev._find_session(client, "default", name)  # type: ignore[arg-type]
        return found and found.name

    add("dev-ada", "stopped", "dev-ada")
    add("dev-ada-3", "running", "dev-ada-3")  # of another user, who named it so
    add("dev-ada-4", "running", "dev-ada", session=False)
    assert find("dev-ada") is None
    add("dev-ada-2", "running", "dev-ada")  # the server has added the number
    assert (find("dev-ada"), find("dev-ada-2")) == ("dev-ada-2", "dev-ada-2")
    session = client.all_jobs["dev-ada-2"]
    assert dev._again_command(session, "dev-ada") == "cavvy dev --pool gpus --machine dev-ada"
    assert dev._end_command(session) == "cavvy stop dev-ada-2"


GPU_LIMIT = "{run: x, limits: {idle: {gpu: 8%, for: 45m}}}"


@pytest.mark.parametrize(
    ("text", "option", "percent", "minutes"),
    [
        (GPU_LIMIT, None, 8, 45),
        (GPU_LIMIT, "3", 3, 45),
        ("{run: x, keep: 1h}", "5%", 5, 60),
        ("{run: x}", None, 0, 30),
    ],
)
def test_a_session_has_a_limit_of_its_gpus(
    tmp_path: Path, text: str, option: str | None, percent: float, minutes: float
) -> None:
    path = tmp_path / "task.yaml"
    path.write_text(text)
    task = dev._read_session(str(path), {}, ReadOptions(overrides="{}"), "ssh", option).task
    assert task.limits.idle_gpu_percent == percent
    assert task.limits.idle == task.keep == timedelta(minutes=minutes)


@pytest.mark.parametrize("said", [b"--install-extension=x\n", b"", b"work\n", b"/a\x1b[2J\n"])
def test_a_node_passes_no_option_to_the_editor(said: bytes) -> None:
    assert dev._read_folder(b"/home/me/my work\n") == "/home/me/my work"
    with pytest.raises(CommandFailure, match="instead of the path"):
        dev._read_folder(said)
