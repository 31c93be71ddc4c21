"""What users ask of devices: commands and logs, with their bounds."""

import threading
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from cavvy.capabilities.edge import command as edge
from cavvy.capabilities.edge.devices import GIVEN, DeviceTasks, TooManyTasks
from cavvy.capabilities.edge.on_device import tasks as device
from cavvy.capabilities.edge.on_device.documents import TaskOutput, read_task, write
from cavvy.capabilities.edge.on_device.tasks import perform, run_command, say

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def ask(task: Any, allowed: bool) -> dict[str, Any]:
    """Return what the device sends, or {} if it ignores the task."""
    sent, done = dict[str, Any](), threading.Event()

    def send(path: str, output: TaskOutput) -> None:
        sent.update(write(output), path=path)
        done.set()

    if (read := read_task(task)) is not None:
        perform(read, allowed, send)
        done.wait(30)
    return sent


def test_a_command_runs_only_where_it_is_allowed() -> None:
    task = {"id": "a1", "command": ["sh", "-c", "echo hello; exit 3"]}
    assert ask(task, True) == {"output": "hello\n", "exit_code": 3, "path": "/edge/v1/tasks/a1"}
    refused = ask(task, False)
    assert (refused["exit_code"], "--allow-exec" in refused["output"]) == (126, True)
    say("a line")
    assert "a line\n" in ask({"id": "a1", "command": []}, False)["output"]


@pytest.mark.parametrize(
    "task",
    [None, 3, {}, {"id": "../x", "command": []}, {"id": 1, "command": []}]
    + [{"id": "b", "command": each} for each in ("ls", [1], None)],
)
def test_a_task_without_a_valid_form_is_left_alone(task: Any) -> None:
    assert ask(task, True) == {}


def test_the_output_and_the_time_of_a_command_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    output, code = run_command(["sh", "-c", "head -c 900000 /dev/zero; echo end"])
    assert (len(output), output[-4:], code) == (32 * 1024, "end\n", 0)
    assert run_command(["/no/such/program"])[1] == 127
    assert run_command(["a\0b"])[1] == 127
    assert run_command(["sh", "-c", "sleep 1000 & echo left"]) == ("left\n", 0)
    monkeypatch.setattr(device, "_TIME_S", 0.2)
    output, code = run_command(["sleep", "1000"])
    assert ("was ended after" in output, code) == (True, 137)


def test_a_task_is_given_once_and_answered_once_by_its_device() -> None:
    tasks = DeviceTasks()
    made = tasks.add("p", "d", ["ls"], NOW)
    assert tasks.find("p", "other", made.id, NOW) is None
    assert tasks.find("other", "d", made.id, NOW) is None
    tasks.end(made, "too early", 0)
    assert [tasks.take("p", "other", NOW), tasks.take("other", "d", NOW)] == [[], []]
    assert [each.id for each in tasks.take("p", "d", NOW)] == [made.id]
    assert tasks.take("p", "d", NOW) == []
    for output in ("one", "two"):
        found = tasks.find("p", "d", made.id, NOW)
        assert found is not None
        tasks.end(found, output, 0)
    answered = tasks.find("p", "d", made.id, NOW)
    assert answered is not None
    assert answered.output == "one"
    for _ in range(8):
        tasks.add("p", "d", [], NOW)
    with pytest.raises(TooManyTasks):
        tasks.add("p", "d", [], NOW)
    tasks.add("p", "d", [], NOW + timedelta(hours=1))
    assert tasks.find("p", "d", made.id, NOW) is None


def test_a_project_cannot_use_up_the_tasks_of_the_others() -> None:
    tasks = DeviceTasks()
    for each in range(200):
        tasks.add("p", f"d{each}", [], NOW)
    with pytest.raises(TooManyTasks, match="p has had 200"):
        tasks.add("p", "d200", [], NOW)
    tasks.add("other", "d", [], NOW)
    tasks.add("p", "d", [], NOW + timedelta(minutes=10))


def test_full_tasks_are_shared_by_projects_and_devices() -> None:
    tasks = DeviceTasks()
    for project in range(10):  # at their bound: all that the server keeps
        for each in range(200):
            tasks.add(f"p{project}", f"d{each % 100 or 1}", [], NOW + timedelta(seconds=each))
    late = NOW + timedelta(seconds=300)
    made = [tasks.add("other", f"d{each}", [], late).id for each in range(50)]
    for project in range(10):
        for _ in range(201):
            with suppress(TooManyTasks):
                tasks.add(f"p{project}", "d0", [], late)
    # none of them can be pushed out by projects that have more
    for each, task in enumerate(made):
        assert tasks.find("other", f"d{each}", task, late) is not None
    counts = Counter(each.project for each in tasks._all.values())
    assert counts.total() == 2000
    assert min(counts[f"p{each}"] for each in range(10)) >= 190
    # of a project, the device with the most tasks loses first
    of_first = Counter(each.device for each in tasks._all.values() if each.project == "p0")
    assert of_first["d1"] < 4


def test_a_command_is_not_given_to_a_device_after_its_user_gave_up() -> None:
    assert GIVEN.total_seconds() == edge._PATIENCE_S
    tasks = DeviceTasks()
    made = [tasks.add("p", "d", ["reboot"], NOW) for _ in range(8)]
    later = NOW + GIVEN
    assert tasks.take("p", "d", later) == []
    fresh = tasks.add("p", "d", [], later)  # the old ones do not keep it out
    assert [each.id for each in tasks.take("p", "d", later)] == [fresh.id]
    days = NOW + timedelta(days=2)
    assert (tasks.find("p", "d", made[0].id, days), tasks.take("p", "d", days)) == (None, [])


def test_a_busy_device_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_running", threading.BoundedSemaphore(1))
    with device._running:
        found = ask({"id": "a1", "command": ["true"]}, True)
    assert (found["exit_code"], "is busy" in found["output"]) == (126, True)
    assert ask({"id": "a1", "command": ["true"]}, True)["exit_code"] == 0
