"""Named volumes on real SSH hosts, by the real command and server: a volume is a folder on the host
on which a job first used it, and later jobs that name it run there.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.hosts import Lab, LabHost, lab_at, worked
from tests.system.trust import User, user_at, wait_until

pytestmark = pytest.mark.system
APP = """
import os
import cavvy

app = cavvy.App("fill")
models = cavvy.Volume("models")

@app.function(volumes={"/cache": models}, cpu=1)
def keep(text: str) -> str:
    before = sorted(os.listdir("/cache"))
    with open(f"/cache/{text}", "w") as file:
        file.write(text)
    models.commit()
    return f"{before} on {os.uname().nodename}"

@app.main()
def main() -> None:
    print(keep.remote("one"))
    print(keep.remote("two"))
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with lab_at(tmp_path_factory.mktemp("lab")) as lab:
        lab.add()
        lab.add()
        with lab.entered():
            yield lab


@pytest.fixture
def user(lab: Lab, tmp_path: Path) -> Iterator[User]:
    with user_at(tmp_path / "user") as user:
        use(user, lab, "h1 h2")
        yield user
        user.cli("down", "--all", "--yes")
        wait_until(
            lambda: not [line for host in lab.hosts for line in worked(host)],
            lambda: "work is left on a host",
        )


def use(user: User, lab: Lab, hosts: str) -> None:
    user.settings(
        "[providers.local]\nenabled = false\n"
        f'[providers.ssh]\nhosts = "{hosts}"\nssh_config = "{lab.ssh_config}"\n'
    )


def task(name: str, run: str, volume: str = "models", more: str = "") -> str:
    return f"name: {name}\nvolumes: ['{volume}:/cache']\n{more}run: |\n  {run}\n"


def folders(lab: Lab, name: str) -> list[tuple[LabHost, Path]]:
    """The folders of a volume on the hosts."""
    return [
        (host, path)
        for host in lab.hosts
        for path in host.home.glob(f".cavvy-agent/*/*/volumes/*/{name}")
    ]


def listed(user: User) -> dict[str, tuple[str, int]]:
    rows = user.json("state", "list")
    return {each["name"]: (each["place"], each["entries"]) for each in rows}


def test_jobs_find_the_volume_on_the_host_of_its_first_job(user: User, lab: Lab) -> None:
    first = user.submit(task("first", "echo x > /cache/file; echo at $(hostname)"))
    assert user.ended(first).phase == "done", user.scenario(first)
    [(host, path)] = folders(lab, "models")
    assert f"at {host.name}" in user.log(first)
    assert (path / "file").read_text() == "x\n"
    assert listed(user) == {"models": (f"ssh/{host.name}", 1)}
    # the host is full, and only it has the volume
    most = f"resources: {{cpu: {len(os.sched_getaffinity(0))}}}\n"
    held = user.submit(task("held", "while [ ! -e /cache/go ]; do sleep 0.1; done", more=most))
    wait_until(lambda: user.job(held).phase == "running", lambda: str(user.scenario(held)))
    late = user.submit(task("late", "ls /cache", more=most))
    wait_until(
        lambda: f"only {host.name} has the volume models" in (user.job(late).reason or ""),
        lambda: str(user.job(late)),
    )
    assert "uses the volume models" in user.cli("state", "rm", "volume", "models", code=1)
    (path / "go").touch()
    assert user.ended(late).phase == "done", user.scenario(late)
    assert "file" in user.log(late)
    for number in range(3):
        name = user.submit(task(f"more{number}", "cat /cache/file; echo at $(hostname)"))
        assert user.ended(name).phase == "done", user.scenario(name)
        assert f"x\nat {host.name}" in user.log(name)
    pair = user.task(task("pair", "true", more="nodes: 2\n"), "pair.yaml")
    told = user.cli("run", pair, "--yes", code=1)
    assert "each node of a gang gets its own host; use an `nfs` export" in " ".join(told.split())
    user.cli("state", "rm", "volume", "models")
    assert folders(lab, "models") == []
    assert listed(user) == {}


def test_an_app_keeps_its_files_and_a_link_leads_nowhere(
    user: User, lab: Lab, tmp_path: Path
) -> None:
    app = tmp_path / "app.py"
    app.write_text(APP)
    told = user.output("run", str(app))
    [(host, path)] = folders(lab, "models")
    assert f"[] on {host.name}" in told
    assert f"['one'] on {host.name}" in told
    (path / "link").symlink_to(host.home)  # as a job may leave it
    kept = host.home / "kept"
    kept.write_text("x")
    assert listed(user)["models"] == (f"ssh/{host.name}", 3)
    user.cli("down", "--all", "--yes")
    wait_until(lambda: "removed" in user.output("state", "rm", "volume", "models", code=None))
    assert folders(lab, "models") == []
    assert kept.exists()


def test_a_lost_server_database_and_a_host_out_of_reach(user: User, lab: Lab) -> None:
    name = user.submit(task("first", "echo x > /cache/file", "kept"))
    assert user.ended(name).phase == "done", user.scenario(name)
    [(host, _)] = folders(lab, "kept")
    other = next(each for each in lab.hosts if each is not host)
    # a host that is no longer listed: the job is refused with what to do
    use(user, lab, other.name)
    user.cli("server", "stop")
    file = user.task(task("away", "cat /cache/file", "kept"))
    told = user.cli("run", "-d", file, code=1)
    assert f"kept is on {host.name}, which is no longer in the inventory" in told
    [row] = user.json("state", "list")
    assert (row["place"], row["bytes"]) == (f"ssh/{host.name}", None)
    use(user, lab, "h1 h2")
    user.cli("server", "stop")
    name = user.submit(task("again", "cat /cache/file", "kept"))
    assert user.ended(name).phase == "done", user.scenario(name)
    assert "x" in user.log(name)
    user.cli("state", "rm", "volume", "kept")
    assert folders(lab, "kept") == []
