"""Links that the work placed lead the agent to no file outside of the job's folders."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cavvy.agent.allowed_folders import AllowedFolders, LeadsOutside
from cavvy.agent.checkpoint_sync import CheckpointSync
from cavvy.agent.config import AgentConfig, ConfigFields, read_work
from cavvy.agent.data import upload
from cavvy.agent.data.deposit import Results
from cavvy.agent.data.mounts import link, link_volumes, list_binds, list_checkpoint_volumes
from cavvy.agent.data.paths import find_folders, find_output, list_input_folders
from cavvy.agent.data.stream import make_pipe, open_pipe
from cavvy.agent.data.transfer import save_object
from cavvy.agent.disk import read_text, write_whole
from cavvy.agent.documents import WorkConfig
from cavvy.agent.log import LogSpool
from cavvy.agent.main import clear
from cavvy.agent.outbox import MessageOutbox
from cavvy.agent.sidecar import SidecarPlace
from cavvy.agent.work.blobs import write_anew
from cavvy.agent.work.checkpoint_files import list_checkpoint
from cavvy.agent.work.checkpoint_upload import CheckpointUpload, FileChanged
from cavvy.agent.work.folder import CannotBuild, transfer
from cavvy.agent.work.monitor import ProgressScanner
from cavvy.agent.work.prepare import bring_inputs, carry_out
from cavvy.agent.work.trees import copy_open, copy_tree, replace_in


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
    return read_work(ConfigFields(given, "work"))


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


def place_file(tmp_path: Path) -> Path:
    """A file at a full path, which is a link in its path."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "data").symlink_to("disk")
    (tmp_path / "disk/model.pt").write_text("trained")
    return tmp_path / "data/model.pt"


def test_an_output_may_be_a_file_at_a_full_path(
    config: AgentConfig, tmp_path: Path, storage: StandInStorage
) -> None:
    path = place_file(tmp_path)
    outputs = [
        {"source": f"{path}", "target": target}
        for target in ("s3://b/model.pt", "s3://b/models/", f"{tmp_path}/copied/model.pt")
    ]
    assert carry_out(config, make_work(outputs=outputs), os.open(os.devnull, os.O_WRONLY)) == 0
    assert storage.files == {"": b"trained", "model.pt": b"trained"}
    assert (tmp_path / "copied/model.pt").read_text() == "trained"


def test_a_file_at_a_full_path_may_be_an_input_and_an_output(
    config: AgentConfig, tmp_path: Path, storage: StandInStorage
) -> None:
    seen = tmp_path / "seen/model.pt"
    work = make_work(
        inputs=[{"source": f"{place_file(tmp_path)}", "target": f"{seen}"}],
        outputs=[
            {"source": f"{seen}", "target": target} for target in ("s3://b/x", f"{tmp_path}/copied")
        ],
    )
    bring_inputs(config, work, -1)
    seen.write_text("trained on")
    assert carry_out(config, work, os.open(os.devnull, os.O_WRONLY)) == 0
    assert storage.files == {"": b"trained on"}
    assert (tmp_path / "copied").read_text() == "trained on"
    Path(config.home, "inputs/0").unlink()
    Path(config.home, "inputs/0").symlink_to(tmp_path / "others/secret")
    assert carry_out(config, work, os.open(os.devnull, os.O_WRONLY)) == os.EX_IOERR
    assert storage.files == {"": b"trained on"}


def test_a_file_at_a_full_path_is_stored_while_the_server_is_away(
    config: AgentConfig, tmp_path: Path
) -> None:
    output = {"source": f"{place_file(tmp_path)}", "target": "s3://b/model.pt"}
    log = LogSpool(config.log_folder, 1)
    results = Results(config, make_work(outputs=[output]), [], log, "", [0])
    results.collect()
    assert results.read(0, 7) == b"trained"


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


@pytest.mark.parametrize("outcome", ["succeeded", "preempted"])
@pytest.mark.parametrize("bad", ["stolen", "pipe", "TOP/copied"])
def test_a_bad_output_does_not_keep_results_from_being_stored(
    config: AgentConfig, tmp_path: Path, bad: str, outcome: str
) -> None:
    """Otherwise its node would wait for the server until the lease ends."""
    Path(config.folder, "stolen").symlink_to(tmp_path / "others/secret")
    os.mkfifo(f"{config.folder}/pipe")
    outputs = [
        {"source": "out", "target": "s3://b/out/"},
        {"source": bad, "target": "s3://b/bad"},
        {"source": "out", "target": "s3://b/same/"},
    ]
    if bad.startswith("TOP"):
        outputs[1] = {"source": "stolen", "target": bad.replace("TOP", str(tmp_path))}
    exit = {"seq": 1, "kind": "exited", "outcome": outcome, "exit_code": 0, "reason": "done"}
    log = LogSpool(config.log_folder, 1)
    sent = [at for at, each in enumerate(outputs) if "://" in each["target"]]
    results = Results(config, make_work(outputs=outputs), [json.dumps(exit)], log, "", sent)
    results.collect()
    manifest = json.loads(results.make_manifest(1 << 24))
    assert [(each["index"], each["name"]) for each in manifest["pieces"]] == [
        (0, "sub/file"),
        (2, "sub/file"),
    ]
    if outcome == "succeeded":
        exit |= {"outcome": "exit", "exit_code": os.EX_IOERR}
        exit["reason"] = "the work succeeded, but " + {
            "pipe": "the output pipe is missing: the file is not a regular file",
            "stolen": "the output stolen is missing: a symbolic link leads out of the job's folders",
        }.get(bad, "an output with a path as its target is missing: the output could not be copied")
    assert manifest["messages"] == [exit]


LINKS = {
    "to_input": "{top}/seen/images/cat",
    "to_file": "{top}/seen/weights",
    "to_host": "{top}/seen/data/file",
    "to_part": "{top}/seen/part/file",
    "relative": "../../../seen/data/file",
    "below": "../below/file",
    "out_of_input": "{top}/seen/images/stolen",
    "out_of_volume": "{top}/seen/data/../others/secret",
    "beside": "{top}/seen/other/file",
}


@pytest.mark.parametrize("image", [None, "python:3.12"])
def test_links_to_inputs_and_volumes_at_full_paths_are_sent(
    config: AgentConfig,
    tmp_path: Path,
    storage: StandInStorage,
    image: str | None,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A container sees the files at these paths; elsewhere the paths are links of the machine."""
    for name in ("images/cat", "volume/file", "home/work/part/file", "seen/other/file"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(name)
    seen, host = f"{tmp_path}/seen", {"kind": "host", "source": f"{tmp_path}/volume"}
    work = make_work(
        image=image,
        inputs=[
            {"source": f"{tmp_path}/images", "target": f"{seen}/images"},
            {"source": f"{tmp_path}/home/work/model", "target": f"{seen}/weights"},
        ],
        volumes=[
            {**host, "path": f"{seen}/data", "read_only": False},
            {**host, "path": "below", "read_only": False},
            {"kind": "folder", "source": "part", "path": f"{seen}/part", "read_only": False},
        ],
        outputs=[{"source": "out", "target": "s3://b/out/"}],
    )
    if image is None:
        link_volumes(config, work, config.folder)
    else:
        list_binds(config, work, config.folder)
    bring_inputs(config, work, -1)
    assert Path(seen, "data").exists() == (image is None)
    Path(config.home, "inputs/0/stolen").symlink_to(tmp_path / "others/secret")
    for name, target in LINKS.items():
        Path(config.folder, "out", name).symlink_to(target.format(top=tmp_path))
    assert carry_out(config, work, os.open(os.devnull, os.O_WRONLY)) == 0
    assert storage.files == {
        "sub/file": b"of the job",
        "to_input": b"images/cat",
        "to_file": b"model",
        "to_host": b"volume/file",
        "to_part": b"home/work/part/file",
        "relative": b"volume/file",
        "below": b"volume/file",
    }
    told = capfd.readouterr().err
    assert [name for name in LINKS if f"cavvy: {name} of the output out was not sent" in told] == [
        "out_of_input",
        "out_of_volume",
        "beside",
    ]


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


# The checkpoint folder


def test_a_checkpoint_folder_that_became_a_link_is_not_uploaded(
    config: AgentConfig, tmp_path: Path
) -> None:
    folder = Path(config.folder, "state")
    folder.mkdir()
    (folder / "file").write_text("mine")
    (folder / "link").symlink_to(tmp_path / "others/secret")
    entries = list_checkpoint(config, str(folder))
    assert [(each.path, each.link) for each in entries] == [
        ("file", ""),
        ("link", f"{tmp_path}/others/secret"),
    ]
    said: list[str] = []
    loop: Any = SimpleNamespace(after=lambda seconds, call: None)
    sync = CheckpointSync(
        SidecarPlace(loop, config, lambda kind, **fields: said.append(fields["text"])),
        str(folder),
        every_s=None,
    )
    folder.rename(folder.with_name("moved"))
    folder.symlink_to(tmp_path / "others")
    sync._look()
    sync._look()
    assert said == [
        "the checkpoint folder cannot be uploaded: a symbolic link leads out of the job's folders, "
        f"to {tmp_path}/others"
    ]
    folder.unlink()
    folder.symlink_to("moved")  # a link within the working folder is fine
    assert list_checkpoint(config, str(folder)) == entries


def test_a_checkpoint_folder_may_be_a_volume(config: AgentConfig, tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    (tmp_path / "volume/file").write_text("saved")
    volume = {"kind": "host", "source": f"{tmp_path}/volume", "path": "state", "read_only": False}
    checkpoint = {"path": "state", "storage": None, "sync": True, "every_s": None}
    work = make_work(volumes=[volume], checkpoint=checkpoint)
    link_volumes(config, work, config.folder)
    folder, given = f"{config.folder}/state", list_checkpoint_volumes(config, work)
    entries = list_checkpoint(config, folder, given)
    assert [each.path for each in entries] == ["file"]
    assert CheckpointUpload(config, folder, entries, given=given).get_file(entries[0])
    results = Results(config, work, [], LogSpool(config.log_folder, 1), folder, [])
    results.collect()
    assert results.read(0, 5) == b"saved"
    Path(folder).unlink()
    Path(folder).symlink_to(tmp_path / "others")
    with pytest.raises(LeadsOutside):
        list_checkpoint(config, folder, given)


def test_a_file_that_becomes_a_link_is_not_part_of_the_checkpoint(
    config: AgentConfig, tmp_path: Path
) -> None:
    """The other file has the same size and time, which the job can set on its own file."""
    folder = Path(config.folder, "state")
    (folder / "sub").mkdir(parents=True)
    stolen = tmp_path / "others/secret"
    for name in ("file", "sub/secret"):
        (folder / name).write_text("fooled")
        os.utime(folder / name, (10, 10))
    os.utime(stolen, (10, 10))
    entries = list_checkpoint(config, str(folder))
    (folder / "file").unlink()
    (folder / "file").symlink_to(stolen)
    with pytest.raises(FileChanged, match="file"):
        CheckpointUpload(config, str(folder), entries)
    (folder / "file").unlink()
    (folder / "sub").rename(folder / "moved")
    (folder / "sub").symlink_to(tmp_path / "others")
    with pytest.raises(FileChanged, match="sub/secret"):
        CheckpointUpload(config, str(folder), entries[1:])


def test_copies_of_a_checkpoint_stay_in_their_folder(config: AgentConfig, tmp_path: Path) -> None:
    folder = Path(config.folder, "state")
    folder.mkdir()
    (folder / "file").write_text("mine")
    Path(config.home, "copies").symlink_to(tmp_path / "others")
    upload = CheckpointUpload(config, str(folder), list_checkpoint(config, str(folder)))
    upload.copy()
    upload.hash()
    assert os.listdir(tmp_path / "others") == ["secret"]
    assert not Path(config.home, "copies").is_symlink()


# The agent's own files, which a container of the job shows and lets it change


def test_the_agent_writes_and_reads_its_files_through_no_link(
    config: AgentConfig, tmp_path: Path
) -> None:
    secret = tmp_path / "others/secret"
    secret.write_text('{"seq": 1, "kind": "event", "step": 5}\n')
    home, kept = Path(config.home), secret.read_text()
    for name in ("outbox", "exit.json", "status", "progress.json", "links", "notice.json"):
        (home / name).symlink_to(secret)
    (home / f"exit.json.{os.getpid()}").symlink_to(secret)
    (home / "log").symlink_to(tmp_path / "others")
    log = LogSpool(config.log_folder, 1)
    log.write(b"lines")
    assert log.chunk()[2] == b"lines"  # kept in memory, as on a full disk
    assert ProgressScanner(config.progress_file).look() == {}
    assert read_text(str(home / "status")) == ""
    with pytest.raises(OSError):
        MessageOutbox(config.outbox_file)
    with pytest.raises(OSError):
        link(config, str(home), str(tmp_path / "seen"))
    write_whole(config.exit_file, "{}")
    assert Path(config.exit_file).read_text() == "{}"
    assert not Path(config.exit_file).is_symlink()
    assert os.listdir(tmp_path / "others") == ["secret"]
    assert secret.read_text() == kept


def test_a_log_folder_that_becomes_a_link_gets_no_output(
    config: AgentConfig, tmp_path: Path
) -> None:
    log = LogSpool(config.log_folder, 1)
    log.write(b"first")
    os.rename(config.log_folder, tmp_path / "moved")
    Path(config.log_folder).symlink_to(tmp_path / "others")
    (tmp_path / "others" / f"{0:020d}").write_text("secret")
    with pytest.raises(OSError):
        log.chunk()
    assert (tmp_path / "others" / f"{0:020d}").read_text() == "secret"


def test_a_stream_writes_to_no_file_in_place_of_its_pipe(
    config: AgentConfig, tmp_path: Path
) -> None:
    folders, pipe = list_input_folders(config), Path(config.folder, "data/pipe")
    Path(config.folder, "data").mkdir()
    pipe.symlink_to(tmp_path / "others/secret")
    make_pipe(folders, str(pipe))
    assert pipe.is_fifo()
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    os.close(open_pipe(folders, str(pipe)))
    os.close(reader)
    pipe.unlink()
    pipe.symlink_to(tmp_path / "others/secret")
    with pytest.raises(OSError):
        open_pipe(folders, str(pipe))
    pipe.unlink()
    pipe.write_text("a file")
    with pytest.raises(OSError, match="has replaced the pipe"):
        open_pipe(folders, str(pipe))


def test_a_download_replaces_links(config: AgentConfig, tmp_path: Path) -> None:
    folders, path = list_input_folders(config), Path(config.folder, "data/file")
    Path(config.folder, "data").mkdir()
    for name in ("file", "file.cavvy-part"):
        path.with_name(name).symlink_to(tmp_path / "others/secret")
    download: Any = SimpleNamespace(read=lambda: iter([b"given"]))
    save_object(folders, str(path), download)
    assert path.read_text() == "given"
    Path(config.folder, "away").symlink_to(tmp_path / "others")
    with pytest.raises(LeadsOutside):
        save_object(folders, f"{config.folder}/away/file", download)
    assert (tmp_path / "others/secret").read_text() == "secret"


@pytest.mark.parametrize("name", ["l" * 255, "é" * 127, os.fsdecode(b"\xff" * 250)])
def test_files_with_the_longest_names_are_written(
    config: AgentConfig, tmp_path: Path, name: str
) -> None:
    """A file that is not complete yet has another name, which must not be longer."""
    top = Path(config.folder)
    download: Any = SimpleNamespace(read=lambda: iter([b"given"]))
    save_object(list_input_folders(config), str(top / "data" / name), download)
    assert write_anew(str(top / "data" / name), [b"given", b" again"])
    given = AllowedFolders([config.folder])
    transfer(config, given, str(top / "data" / name), given, str(top / "copy" / name), "output")
    assert (top / "copy" / name).read_bytes() == b"given again"
    assert [os.listdir(top / each) for each in ("data", "copy")] == [[name], [name]]


def copy_file(source: Path, target: Path) -> None:
    with source.open("rb") as file:
        copy_open(file.fileno(), str(target))


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {0: b"all"},
        {5 << 20: b"at the end"},
        {0: b"a", 3 << 20: b"b" * (1 << 20), 9 << 20: b"c"},
        {1 << 20: b"x", 40 << 20: b""},
    ],
)
def test_a_copy_of_a_sparse_file_is_the_same_and_sparse(
    tmp_path: Path, parts: dict[int, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "from").open("wb") as file:
        for at, data in parts.items():
            file.seek(at)
            file.write(data)
            file.truncate(at + len(data))
    copy_file(tmp_path / "from", tmp_path / "sparse")
    monkeypatch.delattr(os, "SEEK_DATA")
    copy_file(tmp_path / "from", tmp_path / "whole")
    content = (tmp_path / "from").read_bytes()
    assert [(tmp_path / name).read_bytes() for name in ("sparse", "whole")] == [content] * 2
    blocks = [(tmp_path / name).stat().st_blocks for name in ("from", "sparse")]
    assert blocks[1] <= blocks[0] + 8


def test_a_file_whose_size_is_not_stated_is_copied_whole(tmp_path: Path) -> None:
    copy_file(Path("/proc/self/environ"), tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == Path("/proc/self/environ").read_bytes()


def test_a_folder_of_the_working_folder_that_is_such_a_link_is_no_volume(
    config: AgentConfig, tmp_path: Path
) -> None:
    Path(config.folder, "data").symlink_to(tmp_path / "others")
    volume = {"kind": "folder", "source": "data", "path": "/data", "read_only": False}
    with pytest.raises(CannotBuild, match="the volume at /data: a symbolic link leads out"):
        list_binds(config, make_work(volumes=[volume]), config.folder)


def test_a_kept_node_keeps_no_link_in_place_of_a_file(config: AgentConfig, tmp_path: Path) -> None:
    home = Path(config.home)
    (home / "cache").symlink_to(tmp_path / "others")
    (home / "work/link").symlink_to(tmp_path / "others")
    for name in ("lock", "config.json"):
        (home / name).touch()
    clear(config)
    assert sorted(os.listdir(home)) == ["config.json", "lock"]
    assert os.listdir(tmp_path / "others") == ["secret"]
