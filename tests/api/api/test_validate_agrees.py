"""What `cavvy validate` accepts, the server accepts too: only a server knows its offers, secrets and
machines.
"""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.api.api_state import Api, open_api
from tests.api.mutated_tasks import KINDS, make_task

from cavvy.cli.task.problems import check_task
from cavvy.cli.view.failure import CommandFailure
from cavvy.domain.tasks import TaskSpec
from cavvy.spec import SpecError
from cavvy.task_files import ReadOptions, load_file

COUNT = 4 * len(KINDS)
# What the file alone does not tell.
OF_SERVER = ("no-offer", "secret-missing", "machine-unfit", "snapshot-missing")


def validate(file: Path) -> TaskSpec | None:
    """The task, if `cavvy validate` accepts the file. Raises nothing else than its errors."""
    try:
        found = load_file(str(file), {}, now=datetime.now(UTC), options=ReadOptions())
        check_task(str(file), found, file.parent, whole=True)
    except (SpecError, CommandFailure):
        return None
    return None if found.refused else found.task


async def submit(api: Api, task: TaskSpec, text: str) -> Any:
    if task.service is None:
        answer = await api.post_job(text, consent=True, path="task.yaml")
        if answer.is_success:
            job = answer.json()
            await api.http.post(f"/v1/projects/{job['project']}/jobs/{job['name']}/stop")
        return answer
    body = {"text": text, "consent": True, "path": "task.yaml"}
    path = f"/v1/projects/default/services/{task.name}"
    answer = await api.http.put(path, json=body)
    if answer.is_success:
        await api.http.delete(path)
    return answer


@pytest.fixture
def accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[TaskSpec, str]]:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "Dockerfile").write_text("FROM python\n")
    (tmp_path / "none.toml").touch()
    monkeypatch.setenv("CAVVY_HOME", str(tmp_path / "user"))
    monkeypatch.setenv("CAVVY_CONFIG", str(tmp_path / "none.toml"))
    found = []
    for number in range(COUNT):
        data = make_task(number)
        (tmp_path / "task.yaml").write_bytes(data)
        if (task := validate(tmp_path / "task.yaml")) is not None:
            found.append((task, data.decode()))
    return found


async def test_the_server_accepts_what_validate_accepts(
    accepted: list[tuple[TaskSpec, str]], tmp_path: Path
) -> None:
    assert len(accepted) > len(KINDS)
    wrong = []
    async with open_api("sqlite", tmp_path) as api:
        for task, text in accepted:
            answer = await submit(api, task, text)
            if answer.is_error and answer.json().get("code") not in OF_SERVER:
                wrong.append(f"{answer.status_code} {answer.text[:300]} to\n{text[:500]}")
    assert wrong == []
