"""The mistakes of a newcomer's first hour: each answer names the cause and the next step."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripts.drills.newcomer_inputs import MISTAKES, Mistake
from tests.system.server_state import PYTHON, home_at

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with home_at(tmp_path_factory.mktemp("home")):
        yield


@pytest.mark.parametrize("mistake", MISTAKES, ids=[f"{n}" for n in range(1, len(MISTAKES) + 1)])
def test_the_answer_names_the_cause_and_the_next_step(
    mistake: Mistake, home: None, tmp_path: Path
) -> None:
    for name, text in {"train.py": "print(1)\n", **mistake.files}.items():
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [str(Path(PYTHON).with_name("cavvy")), *shlex.split(mistake.line)],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0, done.stdout
    assert re.search(mistake.cause, done.stdout), done.stdout
    assert re.search(mistake.step, done.stdout), done.stdout
