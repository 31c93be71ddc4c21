"""What users ask of devices: commands and logs, with their bounds."""

import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from cavvy.control.edge_tasks import DeviceTasks, TooManyTasks
from cavvy.edge import tasks as device
from cavvy.edge.tasks import perform, run_command, say

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def ask(task: Any, allowed: bool) -> dict[str, Any]:
    """Return what the device sends, or {} if it ignores the task."""
    sent, done = dict[str, Any](), threading.Event()

    def send(path: str, output: dict[str, Any]) -> None:
        sent.update(output, path=path)
        done.set()

    perform(task, allowed, send)
    done.wait(30 if isinstance(task, dict) and task.get("id") == "a1" else 0.2)
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
    assert tasks.find("p", "other", made.id) is None
    assert tasks.find("other", "d", made.id) is None
    tasks.end(made, "too early", 0)
    assert [tasks.take("p", "other"), tasks.take("other", "d")] == [[], []]
    assert [each.id for each in tasks.take("p", "d")] == [made.id]
    assert tasks.take("p", "d") == []
    for output in ("one", "two"):
        found = tasks.find("p", "d", made.id)
        assert found is not None
        tasks.end(found, output, 0)
    answered = tasks.find("p", "d", made.id)
    assert answered is not None
    assert answered.output == "one"
    for _ in range(8):
        tasks.add("p", "d", [], NOW)
    with pytest.raises(TooManyTasks):
        tasks.add("p", "d", [], NOW)
    tasks.add("p", "d", [], NOW + timedelta(hours=1))
    assert tasks.find("p", "d", made.id) is None
