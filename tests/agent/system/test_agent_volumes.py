"""Volumes of work on this node: folders and what is mounted already, in the work's own paths."""

import os
from pathlib import Path

import pytest
from tests.proofs import ALONE
from tests.system.agent_server import make_rig

from cavvy.agent.config import ConfigFields, read_record
from cavvy.agent.data import mounts
from cavvy.agent.documents import VolumeConfig

pytestmark = pytest.mark.system


def volume(
    source: Path | str, path: Path | str, kind: str = "host", **more: object
) -> dict[str, object]:
    return {"kind": kind, "source": str(source), "path": str(path), **more}


@pytest.mark.proves(ALONE, "mounts")
def test_folders_of_the_node_are_seen_under_their_paths(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "file").write_text("content\n")
    seen = tmp_path / "seen" / "here"
    volumes = [volume(data, "in/data"), volume(data, seen)]
    run = f"cat in/data/file {seen}/file; echo new >in/data/made"
    with make_rig(run=run) as rig:
        rig.stub.work["volumes"] = volumes
        assert rig.finish() == 0
        assert rig.output() == "content\ncontent\n"
    assert (data / "made").read_text() == "new\n"
    with make_rig(run=run) as rig:  # the link is there already
        rig.stub.work["volumes"] = volumes
        assert rig.finish() == 0
        assert rig.exited()["outcome"] == "succeeded"


def test_a_part_of_the_working_folder_is_seen_elsewhere(tmp_path: Path) -> None:
    seen = tmp_path / "code"
    with make_rig(run=f"cat {seen}/a ~/.cavvy-test; rm ~/.cavvy-test") as rig:
        rig.stub.work["workdir"] = {
            "snapshot": rig.stub.add_folder({"code/a": b"alpha\n", "b": b"beta\n"})
        }
        rig.stub.work["volumes"] = [
            volume("code", seen, "folder"),
            volume("b", "~/.cavvy-test", "folder"),
        ]
        assert rig.finish() == 0
        assert rig.output() == "alpha\nbeta\n"


@pytest.mark.parametrize(
    ("kind", "source", "path", "told"),
    [
        ("host", "/nonexistent", "in", "is not a folder on this node"),
        ("named", "disk-1", "/nonexistent/disk", "is not mounted under /nonexistent/disk"),
        ("folder", "none", "/nonexistent/x", "the working folder has no none"),
        ("host", "/tmp", "/proc/version", "already in use on this node"),
    ],
)
def test_what_cannot_be_is_told(kind: str, source: str, path: str, told: str) -> None:
    with make_rig(run="echo never") as rig:
        rig.stub.work["volumes"] = [volume(source, path, kind)]
        assert rig.finish() == 0
        assert rig.exited()["outcome"] == "setup"
        assert told in str(rig.exited()["reason"])
        assert rig.output() == ""


def test_reading_only_is_refused_where_it_cannot_be_kept(tmp_path: Path) -> None:
    with make_rig(run="echo never") as rig:
        rig.stub.work["volumes"] = [volume(tmp_path, "in", read_only=True)]
        assert rig.finish() == 0
        assert "add an `image`" in str(rig.exited()["reason"])


def test_a_mount_point_of_the_place_is_left_as_it_is() -> None:
    with make_rig(run="test -d /proc/self && echo there") as rig:
        rig.stub.work["volumes"] = [volume("claim", "/proc", "named")]
        assert rig.finish() == 0
        assert rig.output() == "there\n"


def test_nfs_that_is_mounted_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "mounts"
    table.write_text(
        "nas:/export/a\\040b/ /mnt/a\\040b nfs4 rw,vers=4.2 0 0\n/dev/sda1 / ext4 rw 0 0\n"
    )
    real = open
    monkeypatch.setattr(
        mounts,
        "open",
        lambda path, **more: real(table if "mounts" in path else path, **more),
        raising=False,
    )
    assert mounts.find_mounted("nas:/export/a b") == "/mnt/a b"
    assert mounts.find_mounted("nas:/export") is None


def test_nfs_needs_root_to_be_mounted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    wanted = read_record(VolumeConfig, ConfigFields(volume("nas:/none", "in", "nfs"), "volume"))
    with pytest.raises(mounts.CannotBuild, match="only root can mount it"):
        mounts.mount_nfs(None, wanted)  # type: ignore[arg-type]  # it does not come to that
