"""Links that the work placed lead the agent to no file outside of the job's folders."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cavvy.agent.config import AgentConfig, ConfigFields, WorkConfig
from cavvy.agent.data import upload
from cavvy.agent.data.paths import find_folders, find_output
from cavvy.agent.work.prepare import bring_inputs, carry_out
from cavvy.agent.work.trees import copy_tree, replace_in


@pytest.fixture
def config(tmp_path: Path) -> AgentConfig:
    """An agent whose job has an output folder `work/out`; the file `secret` is not the job's."""
    (tmp_path / "home/work/out/sub").mkdir(parents=True)
    (tmp_path / "home/work/out/sub/file").write_text("of the job")
    (tmp_path / "home/work/model").write_text("model")
    (tmp_path / "others").mkdir()
    (tmp_path / "others/secret").write_text("secret")
    base = {"gang": "g", "rank": 0, "address": "http://a", "token": "t"}
    return AgentConfig(ConfigFields({**base, "home": f"{tmp_path}/home"}, "configuration"))


def make_work(**fields: object) -> WorkConfig:
    given = {"job": "j", "job_id": "1", "project": "p", "attempt": 1, "run": "x", **fields}
    return WorkConfig(ConfigFields(given, "work"))


def place_links(config: AgentConfig, tmp_path: Path) -> None:
    out = Path(config.folder, "out")
    (out / "best").symlink_to("sub/file")
    (out / "last").symlink_to(f"{config.folder}/model")
    (out / "stolen").symlink_to(tmp_path / "others/secret")
    (out / "folder").symlink_to("../../../others")
    (out / "missing").symlink_to("nothing")


class StandInStorage:
    """Takes the place of the control plane and the storage; keeps the files that it gets."""

    def __init__(self) -> None:
        self.files: dict[object, bytes] = {}

    def read(self, method: str, route: str, ask: object) -> dict[str, object]:
        return {"upload": "", "part_bytes": 1 << 20, "relay": True}

    def ask(self, method: str, route: str, data: bytes, **where: object) -> bytes:
        self.files[where["path"]] = data
        return b""

    def abort(self, ask: object) -> None:
        raise AssertionError(ask)


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInStorage]:
    made = StandInStorage()
    monkeypatch.setattr(upload, "TransferClient", lambda *_: made)
    return made


def test_links_out_of_the_jobs_folders_are_named_and_not_sent(
    config: AgentConfig, tmp_path: Path, storage: StandInStorage, capfd: pytest.CaptureFixture[str]
) -> None:
    place_links(config, tmp_path)
    work = make_work(outputs=[{"source": "out", "target": "s3://b/out/"}])
    assert carry_out(config, work, os.open(os.devnull, os.O_WRONLY)) == 0
    assert storage.files == {
        "best": b"of the job",
        "last": b"model",
        "sub/file": b"of the job",
    }
    told = capfd.readouterr().err
    leads = "was not sent: a symbolic link leads out of the job's folders, to"
    assert f"cavvy: stolen of the output out {leads} {tmp_path}/others/secret\n" in told
    assert f"cavvy: folder of the output out {leads} {tmp_path}/others\n" in told
    assert told.count("cavvy:") == 2


@pytest.mark.parametrize("target", ["s3://b/out", "TOP/copied"])
def test_an_output_that_is_such_a_link_fails(
    config: AgentConfig,
    tmp_path: Path,
    storage: StandInStorage,
    target: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    Path(config.folder, "stolen").symlink_to(tmp_path / "others/secret")
    output = {"source": "stolen", "target": target.replace("TOP", str(tmp_path))}
    code = carry_out(config, make_work(outputs=[output]), os.open(os.devnull, os.O_WRONLY))
    assert code == os.EX_IOERR
    assert "stolen: a symbolic link leads out of the job's folders" in capfd.readouterr().err
    assert storage.files == {}
    assert not (tmp_path / "copied").exists()


def test_a_link_to_the_jobs_checkpoints_or_volumes_is_sent(
    config: AgentConfig, tmp_path: Path, storage: StandInStorage
) -> None:
    for name in ("storage", "volume"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
        Path(config.folder, name).symlink_to(tmp_path / name)
        Path(config.folder, "out", name).symlink_to(f"../{name}/file")
    volume = {"kind": "host", "source": f"{tmp_path}/volume", "path": "volume", "read_only": False}
    work = make_work(
        outputs=[{"source": "out", "target": "s3://b/out/"}],
        volumes=[volume],
        checkpoint={"path": "storage", "storage": f"{tmp_path}/storage", "sync": False},
    )
    assert carry_out(config, work, os.open(os.devnull, os.O_WRONLY)) == 0
    assert (storage.files["storage"], storage.files["volume"]) == (b"storage", b"volume")


def test_a_replaced_working_folder_sends_nothing(config: AgentConfig, tmp_path: Path) -> None:
    os.rename(config.folder, tmp_path / "moved")
    Path(config.folder).symlink_to(tmp_path / "others")
    work = make_work(outputs=[{"source": "secret", "target": "s3://b/out"}])
    path, known = find_output(config, work, 0)
    with pytest.raises(OSError):
        upload.send_output(config, find_folders(config, work), 0, path, "s3://b/out", print, known)


def test_a_copied_output_is_not_written_through_links_at_its_target(
    config: AgentConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    place_links(config, tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "results/sub").symlink_to(tmp_path / "others")
    (tmp_path / "model").symlink_to(tmp_path / "others/secret")
    (tmp_path / "model.cavvy-new").symlink_to(tmp_path / "others/secret")
    (tmp_path / "shown").symlink_to("results")
    outputs = [
        {"source": "out", "target": f"{tmp_path}/shown"},
        {"source": "model", "target": f"{tmp_path}/model"},
    ]
    assert carry_out(config, make_work(outputs=outputs), os.open(os.devnull, os.O_WRONLY)) == 0
    assert sorted(os.listdir(tmp_path / "results")) == ["best", "last", "missing", "sub"]
    assert (tmp_path / "results/best").read_text() == "of the job"
    assert not (tmp_path / "results/sub").is_symlink()
    assert (tmp_path / "model").read_text() == "model"
    assert os.listdir(tmp_path / "others") == ["secret"]
    assert (tmp_path / "others/secret").read_text() == "secret"
    told = capfd.readouterr().err
    assert "stolen of the output out was not copied: a symbolic link" in told


def test_an_input_is_not_written_through_links_of_the_working_folder(
    config: AgentConfig, tmp_path: Path
) -> None:
    (tmp_path / "given").mkdir()
    (tmp_path / "given/file").write_text("given")
    (tmp_path / "given/link").symlink_to("/anywhere")
    Path(config.folder, "data").mkdir()
    Path(config.folder, "data/file").symlink_to(tmp_path / "others/secret")
    Path(config.folder, "one").symlink_to(tmp_path / "others/secret")
    Path(config.folder, "one.cavvy-new").symlink_to(tmp_path / "others/secret")
    inputs = [
        {"source": f"{tmp_path}/given", "target": "data"},
        {"source": f"{tmp_path}/given/file", "target": "one"},
    ]
    bring_inputs(config, make_work(inputs=inputs), -1)
    for name in ("data/file", "one"):
        assert Path(config.folder, name).read_text() == "given"
    assert Path(config.folder, "data/link").readlink() == Path("/anywhere")
    assert (tmp_path / "others/secret").read_text() == "secret"


def test_a_copied_tree_contains_its_links_and_not_their_targets(
    config: AgentConfig, tmp_path: Path
) -> None:
    place_links(config, tmp_path)
    os.mkfifo(f"{config.folder}/out/pipe")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/sub").symlink_to(tmp_path / "others")
    (tmp_path / "tree/best").mkdir()
    Path(config.folder, "out/sub").chmod(0o550)
    marked = copy_tree(f"{config.folder}/out", f"{tmp_path}/tree", b"of the")
    assert marked == ["sub/file"]
    assert Path(tmp_path / "tree/stolen").readlink() == tmp_path / "others/secret"
    assert (tmp_path / "tree/sub").stat().st_mode & 0o777 == 0o550
    assert (tmp_path / "tree/best").is_symlink()
    assert not (tmp_path / "tree/pipe").exists()
    assert os.listdir(tmp_path / "others") == ["secret"]
    (tmp_path / "link").symlink_to("tree")
    for source, target in (("link", "made"), ("tree", "link")):
        with pytest.raises(OSError):
            copy_tree(f"{tmp_path}/{source}", f"{tmp_path}/{target}")
    replace_in(f"{tmp_path}/tree", "sub/file", b"of the", b"of a")
    assert (tmp_path / "tree/sub/file").read_text() == "of a job"
    for path in ("stolen", "../others/secret"):
        with pytest.raises(OSError):
            replace_in(f"{tmp_path}/tree", path, b"secret", b"")
    assert (tmp_path / "others/secret").read_text() == "secret"
