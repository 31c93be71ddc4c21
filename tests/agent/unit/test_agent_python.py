"""Jobs on the server's machine use the Python of the shell that submitted them."""

import os
import sys
from pathlib import Path

import pytest
from tests.control.unit.test_control_reports import ATTEMPT, NODE

from cavvy.agent.config import AgentConfig, ConfigFields, read_work
from cavvy.agent.documents import WorkConfig
from cavvy.agent.work.environment import add_python, make_environment, own_environment
from cavvy.client.addresses import list_own_path
from cavvy.control.agents.work import make_assignment
from cavvy.domain.values import replace


def make_programs(folder: Path, mark: str = "") -> Path:
    """A folder with `python` and `python3`, in an environment with this mark."""
    (folder / "bin").mkdir(parents=True)
    for name in ("python", "python3"):
        (folder / "bin" / name).write_text("#!/bin/sh\n")
        (folder / "bin" / name).chmod(0o755)
    if mark:
        (folder / mark).mkdir()
    return folder / "bin"


def make_work(**fields: object) -> WorkConfig:
    work = {"job": "x", "job_id": "1", "project": "p", "attempt": 1, "run": "true", **fields}
    return read_work(ConfigFields(work, "work"))


def read_config(home: Path, **fields: object) -> AgentConfig:
    basics = {"gang": "g", "rank": 0, "address": "", "token": "", "home": str(home)}
    return AgentConfig(ConfigFields({**basics, **fields}, "configuration"))


@pytest.mark.parametrize(
    ("mark", "variable"), [("pyvenv.cfg", "VIRTUAL_ENV"), ("conda-meta", "CONDA_PREFIX")]
)
def test_the_environment_of_the_submitting_shell_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str, variable: str
) -> None:
    server, mine = make_programs(tmp_path / "server"), make_programs(tmp_path / "mine", mark)
    monkeypatch.setenv("PATH", f"{server}:/usr/bin")
    config = read_config(tmp_path)
    path = f"{mine}:/gone/bin:relative:{server}"
    env = make_environment(config, make_work(path=path))
    assert env["PATH"] == f"{mine}:{server}:/usr/bin"
    assert env[variable] == str(tmp_path / "mine")
    # without a known shell, in an image and in separated work, the server's PATH counts
    for fields in ({}, {"path": path, "image": "x"}):
        env = make_environment(config, make_work(**fields))
        assert env["PATH"] == f"{server}:/usr/bin"
        assert variable not in env
    separated = read_config(tmp_path, separates=True)
    assert make_environment(separated, make_work(path=path))["PATH"] == f"{server}:/usr/bin"
    # the user's own variables come last
    assert make_environment(config, make_work(path=path, env={"PATH": "/a"}))["PATH"] == "/a"


def test_the_agents_own_environment_is_used_only_where_work_cannot_change_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other = make_programs(tmp_path / "own", "pyvenv.cfg"), make_programs(tmp_path / "other")
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setattr(sys, "executable", f"{own}/python3")
    assert own_environment() == str(tmp_path / "own")
    work = make_work(path=f"{own}:{other}")
    assert make_environment(read_config(tmp_path), work)["PATH"] == f"{other}:/usr/bin"
    covers = make_environment(read_config(tmp_path, covers=True), work)
    assert covers["PATH"] == f"{own}:{other}:/usr/bin"
    monkeypatch.setattr(sys, "executable", f"{other}/python3")
    assert own_environment() == ""


def test_setups_of_different_pythons_are_kept_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin")
    keys = []
    for name in ("one", "two", "one"):
        folder = tmp_path / name / "bin"
        work = make_work(path=str(folder if folder.exists() else make_programs(folder.parent)))
        work.setup_key = "key"
        add_python(read_config(tmp_path), work)
        keys.append(work.setup_key)
    assert keys[0] == keys[2] != keys[1]
    assert all(key.startswith("key-") for key in keys)
    work = make_work(setup_key="key")
    add_python(read_config(tmp_path), work)
    assert work.setup_key == "key"


def test_a_path_is_sent_only_to_servers_and_nodes_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/mine/bin:/bin")
    for address in ("unix:///run/x.sock", "http://127.0.0.1:8700", "http://localhost:1"):
        assert list_own_path(address) == "/mine/bin:/bin"
    assert list_own_path("http://[::1]:1", "/kernel/bin") == "/kernel/bin:/mine/bin:/bin"
    assert list_own_path("https://cavvy.example.org") == ""
    monkeypatch.setenv("PATH", os.pathsep.join(["/a"] * 9999))
    assert list_own_path("http://127.0.0.1:1") == ""


def test_nodes_of_other_machines_do_not_get_the_path() -> None:
    from tests.control.unit.test_control_reports import JOB

    job = replace(JOB, origin=replace(JOB.origin, path="/mine/bin"))
    for address, path in (("127.0.0.1", "/mine/bin"), ("10.0.0.5", ""), (None, "")):
        node = replace(NODE, address=address)
        assert make_assignment(job, ATTEMPT, [node], accelerators=0, secrets={}).path == path


def test_two_jobs_have_different_folders_for_open_mpi(tmp_path: Path) -> None:
    """Both name their session folder after a process ID, the same in both process namespaces."""
    folders = [
        make_environment(read_config(tmp_path, gang=gang), make_work())["PRTE_MCA_prte_tmpdir_base"]
        for gang in ("a", "b", "a")
    ]
    assert folders[0] != folders[1]
    assert folders[0] == folders[2]  # every node of a job has the same
