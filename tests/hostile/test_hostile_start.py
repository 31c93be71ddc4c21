"""A job cannot decide how it is started, and what it does to its own agent is its own failure.

The job runs as the user who runs the tests and as a user without privileges, with the default
isolation and with namespaces.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from tests.hostile.test_hostile_task import LOCAL, SEPARATED, find_python, nobody
from tests.system.trust import User, user_at

PROGRAM = Path(__file__).with_name("hostile_start.py")
# the ways in which the job ends its own agent
ENDS_AGENT = [
    "rewrite, then end the agent",
    "end the agent, then rewrite",
    "remove marks in a loop",
]
# the ways in which the job harms its own records and goes on to its own end
GOES_ON = [
    "remove the log", "links", "links to nothing", "pipes", "folders", "large files", "rewrite",
]  # fmt: skip


@contextmanager
def own_user(settings: str) -> Iterator[User]:
    with TemporaryDirectory(prefix="cavvy-hostile-") as top, user_at(Path(top) / "user") as user:
        user.settings(settings)
        yield user


USERS: dict[str, Callable[[str], object]] = {"own user": own_user, "nobody": nobody}


def submit(user: User, number: int, way: str) -> str:
    name = f"hostile-{number}"
    folder = user.work / name
    folder.mkdir()
    shutil.copy(PROGRAM, folder / "program.py")
    task = {
        "name": name,
        "workdir": ".",
        "run": f"{find_python()} -u program.py",
        "env": {"WAY": way},
        "resources": {"cpu": 0.2},
        "retry": {"node": 3},
    }
    (folder / "task.yaml").write_text(json.dumps(task))
    for path in (folder, *folder.iterdir()):
        path.chmod(0o755)
    user.cli("run", "-d", str(folder / "task.yaml"))
    return name


def check(user: User, ways: list[str], *, separated: bool) -> None:
    if SEPARATED not in user.cli("check", "local") if separated else False:
        pytest.skip("this system offers no namespaces")
    if "hidden from jobs" not in user.cli("check", "local"):
        pytest.skip("this system offers no namespaces")
    try:
        _check(user, ways, separated=separated)
    finally:
        user.forget()


def _check(user: User, ways: list[str], *, separated: bool) -> None:
    names = {way: submit(user, number, way) for number, way in enumerate(ways)}
    for way, name in names.items():
        job = user.ended(name)
        log = user.cli("logs", name, code=None)
        told = f"{way}: {job.phase} {job.exit_code} {job.reason}\n{log[:3000]}"
        assert "attempt 1" in log, told
        assert not [word for word in ("ESCAPED", "READ") if word in log], told
        assert (job.phase, job.attempt) == ("failed", 1), told
        expected = 137 if way in ENDS_AGENT and not separated else 3
        assert job.exit_code == expected, told
        assert ("tried" in log) == (expected == 3), told


@pytest.mark.parametrize("who", USERS)
@pytest.mark.parametrize("ways", [ENDS_AGENT, GOES_ON], ids=["ends its agent", "goes on"])
def test_a_job_does_not_decide_how_it_is_started(who: str, ways: list[str]) -> None:
    with USERS[who](LOCAL) as user:  # type: ignore[attr-defined]
        check(user, ways, separated=False)


def test_a_separated_job_does_not_decide_how_it_is_started() -> None:
    with nobody(LOCAL + "isolation = 'namespaces'") as user:
        check(user, GOES_ON, separated=True)
