"""A job cannot decide how it is started, and what it does to its own agent is its own failure.

The job runs on the server's machine, on SSH hosts and on a joined machine, as root and as a user
without privileges, with the default isolation and with namespaces.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from tests.agent.hostile.test_hostile_task import LOCAL, SEPARATED, find_python, joined, nobody
from tests.providers.hosts.system.test_host_caches import WORKER
from tests.system.hosts import Lab, lab_at
from tests.system.trust import User, user_at

PROGRAM = Path(__file__).parents[2].joinpath("hostile", "hostile_start.py")
# the ways in which the job ends its own agent
ENDS_AGENT = [
    "rewrite, then end the agent",
    "end the agent, then rewrite",
    "remove marks in a loop",
    "end the reaper",
    "end the agent",
]
# the ways in which the job harms its own records and goes on to its own end
GOES_ON = [
    "remove the log", "links", "links to nothing", "pipes", "folders", "large files", "rewrite",
]  # fmt: skip


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with lab_at(tmp_path_factory.mktemp("lab")) as lab, lab.entered():
        yield lab


@contextmanager
def own_user(settings: str) -> Iterator[User]:
    with TemporaryDirectory(prefix="cavvy-hostile-") as top, user_at(Path(top) / "user") as user:
        user.settings(settings)
        yield user


USERS: dict[str, Callable[[str], AbstractContextManager[User]]] = {
    "own user": own_user,
    "nobody": nobody,
}


def submit(user: User, number: int, way: str, python: str) -> str:
    name = f"hostile-{number}"
    folder = user.work / name
    folder.mkdir()
    shutil.copy(PROGRAM, folder / "program.py")
    task = {
        "name": name,
        "workdir": ".",
        "run": f"{python or find_python()} -u program.py",
        "env": {"WAY": way},
        "resources": {"cpu": 0.2},
        "retry": {"node": 3},
    }
    (folder / "task.yaml").write_text(json.dumps(task))
    for path in (folder, *folder.iterdir()):
        path.chmod(0o755)
    user.cli("run", "-d", str(folder / "task.yaml"))
    return name


def check(user: User, ways: list[str], *, python: str = "", sees: bool = False) -> None:
    names = {way: submit(user, number, way, python) for number, way in enumerate(ways)}
    try:
        for way, name in names.items():
            job, log = user.ended(name), user.cli("logs", name, code=None)
            told = f"{way}: {job.phase} {job.exit_code} {job.reason}\n{log[:3000]}"
            assert log.count("attempt 1") == 1, told
            assert sees or not [word for word in ("ESCAPED", "READ") if word in log], told
            assert (job.phase, job.attempt) == ("failed", 1), told
            reached = way in ENDS_AGENT and "separated False" in log
            expected = 137 if reached else 3
            assert job.exit_code == expected, told
            assert ("tried" in log) == (expected == 3), told
    finally:
        user.forget()


@pytest.mark.parametrize("who", USERS)
@pytest.mark.parametrize("ways", [ENDS_AGENT, GOES_ON], ids=["ends its agent", "goes on"])
def test_a_job_does_not_decide_how_it_is_started(who: str, ways: list[str]) -> None:
    with USERS[who](LOCAL) as user:
        if "hidden from jobs" not in user.cli("check", "local"):
            pytest.skip("this system offers no namespaces")
        check(user, ways)


def test_a_separated_job_does_not_decide_how_it_is_started() -> None:
    with nobody(LOCAL + "isolation = 'namespaces'") as user:
        if SEPARATED not in user.cli("check", "local"):
            pytest.skip("this system offers no namespaces")
        check(user, ENDS_AGENT + GOES_ON)


def test_a_job_that_reaches_its_agent_is_not_repeated_after_it_ends_the_agent() -> None:
    with own_user(LOCAL + "hide_server = false") as user:
        check(user, ["end the agent", "end the reaper"], sees=True)


@pytest.mark.parametrize("isolation", ["", "namespaces"])
def test_the_same_on_a_joined_machine(isolation: str) -> None:
    with joined(f"isolation = '{isolation}'") as there:
        if isolation and SEPARATED not in there.user.cli("joined"):
            pytest.skip("this system offers no namespaces")
        check(there.user, ENDS_AGENT + GOES_ON)


@pytest.mark.parametrize(
    ("login", "isolation"), [("root", ""), ("worker", ""), ("worker", "namespaces")]
)
def test_the_same_on_an_ssh_host(lab: Lab, login: str, isolation: str, tmp_path: Path) -> None:
    host = lab.add(script=WORKER.format(folder=tmp_path, lab=lab.root) if login != "root" else "")
    text = lab.ssh_config.read_text()
    lab.ssh_config.write_text(text.replace("User root", f"User {login}"))
    with user_at(tmp_path / "user") as user:
        user.settings(
            "[providers.local]\nenabled = false\n"
            f'[providers.ssh]\nhosts = "{host.name}"\nssh_config = "{lab.ssh_config}"\n'
            f'isolation = "{isolation}"\n'
        )
        check(user, ENDS_AGENT + GOES_ON, python="python3")
        user.cli("down", "--all", "--yes")
    lab.remove(host)
