"""Links to files of a job outside of its working folder."""

import os
import subprocess
from pathlib import Path

import pytest

from cavvy.agent.config import AgentConfig, ConfigFields, read_work
from cavvy.agent.data.mounts import link_volumes, remove_links
from cavvy.agent.data.paths import find_output, link_mount
from cavvy.agent.documents import WorkConfig
from cavvy.agent.work.container import answer_question, write_entry
from cavvy.agent.work.folder import CannotBuild
from cavvy.agent.work.view import find_bucket


@pytest.fixture
def gang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a gang with two ranks, each with a file in its working folder."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for rank in "01":
        (tmp_path / "gang" / rank / "work").mkdir(parents=True)
        (tmp_path / "gang" / rank / "work" / "a").write_text(f"of rank {rank}")
    return tmp_path / "gang"


def configure(gang: Path, rank: int) -> AgentConfig:
    config = AgentConfig.__new__(AgentConfig)
    config.home = str(gang / str(rank))
    config.private = config.home
    config.folder = config.home + "/work"
    config.separates = False
    config.gang, config.rank, config.caches = "g-1", rank, str(gang.parent / "cache")
    for name in (
        "phase_file",
        "halted_file",
        "answer_file",
        "notice_file",
        "setup_script",
        "run_script",
        "entry_script",
        "enter_script",
    ):
        setattr(config, name, f"{config.home}/{name}")
    return config


def make_work(path: str, **more: object) -> WorkConfig:
    volume = {"kind": "folder", "source": "a", "path": path}
    own = {"job": "j", "job_id": "1", "project": "p", "attempt": 1, "run": "true"}
    fields = {**own, "volumes": [volume], **more}
    return read_work(ConfigFields(fields, "work"))


def test_ranks_on_one_machine_share_a_link_and_the_last_one_removes_it(
    gang: Path, tmp_path: Path
) -> None:
    path = tmp_path / "seen"
    first, second = configure(gang, 0), configure(gang, 1)
    for config in (first, second):
        link_volumes(config, make_work(str(path)), config.folder)
    assert path.read_text() == "of rank 0"
    (gang / "0" / "exit.json").write_text("{}")
    remove_links(first)
    assert path.read_text() == "of rank 0"  # the other rank still runs
    (gang / "1" / "exit.json").write_text("{}")
    remove_links(second)
    assert not os.path.lexists(path)


def test_ranks_on_one_machine_do_not_share_the_mount_of_one_of_them(
    gang: Path, tmp_path: Path
) -> None:
    """The mount ends with its rank, and uploads what the other rank has written too late."""
    path = tmp_path / "seen"
    first, second = configure(gang, 0), configure(gang, 1)
    for config in (first, second):
        os.makedirs(find_bucket(config, 0))
        link_mount(config, 0, "data")  # each rank has its own working folder
    link_mount(first, 0, str(path))
    with pytest.raises(CannotBuild, match="several ranks on this machine cannot share a mount"):
        link_mount(second, 0, str(path))
    with pytest.raises(CannotBuild, match="already has files"):
        link_mount(second, 1, str(path))  # another bucket
    assert os.readlink(path) == find_bucket(first, 0)
    for rank in "01":
        (gang / rank / "exit.json").write_text("{}")
    remove_links(first)
    assert not os.path.lexists(path)


def test_a_bucket_is_not_mounted_where_the_working_folder_has_the_same_files(
    gang: Path,
) -> None:
    """What the work writes there would stay on the node."""
    config = configure(gang, 0)
    for folder in (Path(find_bucket(config, 0)), Path(config.folder, "data")):
        folder.mkdir(parents=True)
        (folder / "a").write_text("the same")
    with pytest.raises(CannotBuild, match="already has files: choose another `target`"):
        link_mount(config, 0, "data")


def test_a_path_that_another_job_uses_stays_with_that_job(gang: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "0" / "work"
    other.mkdir(parents=True)
    path = tmp_path / "seen"
    path.symlink_to(other)
    config = configure(gang, 0)
    with pytest.raises(CannotBuild, match="already in use"):
        link_volumes(config, make_work(str(path)), config.folder)
    (gang / "0" / "exit.json").write_text("{}")
    (gang / "1" / "exit.json").write_text("{}")
    remove_links(config)
    assert path.resolve() == other


def test_a_path_with_the_same_content_is_used_as_it_is(gang: Path, tmp_path: Path) -> None:
    config = configure(gang, 0)
    for number, text in enumerate(("of rank 0", "other")):
        path = tmp_path / str(number)
        path.write_text(text)
        if text == "other":
            with pytest.raises(CannotBuild, match="already in use"):
                link_volumes(config, make_work(str(path)), config.folder)
        else:
            link_volumes(config, make_work(str(path)), config.folder)
        assert not path.is_symlink()


def test_a_container_links_files_into_the_home_folder_of_its_image(
    gang: Path, tmp_path: Path
) -> None:
    config = configure(gang, 0)
    output = {"source": "~/conf/my file", "target": "s3://b/"}
    work = make_work("~/conf/my file", image="i", outputs=[output])
    write_entry(config, work)
    (gang / "0" / "run_script").write_text("cat ~/conf/my*file")
    done = subprocess.run(
        ["sh", f"{config.home}/entry_script"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "of rank 0"
    assert (tmp_path / "home" / "conf" / "my file").is_symlink()
    assert find_output(config, work, 0)[0] == config.folder + "/a"


@pytest.mark.parametrize(("program", "signals_all"), [("podman", True), ("apptainer", False)])
def test_only_a_container_with_processes_of_its_own_signals_all(
    gang: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, signals_all: bool
) -> None:
    """Elsewhere, the signal would reach all processes of the user on the node."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / program).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    config = configure(gang, 0)
    write_entry(config, make_work("~/a", image="i"))
    assert (" -1" in Path(config.entry_script).read_text()) is signals_all


def test_a_question_of_a_container_is_answered_if_the_disk_takes_the_answer(
    gang: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The agent goes on: the work is saved meanwhile."""
    config = configure(gang, 0)
    for complete, answer in ((True, "complete\n"), (False, "interrupted\n")):
        answer_question(config, complete=complete)
        assert Path(config.answer_file).read_text() == answer
    Path(config.answer_file).unlink()
    Path(config.answer_file).mkdir()  # the work has placed it
    answer_question(config, complete=True)
    assert "cannot answer the container" in capfd.readouterr().err
    write_entry(config, make_work(str(gang / "seen")))
