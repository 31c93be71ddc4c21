"""The holes of sparse files are neither sent nor restored as data."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from cavvy.agent.work.checkpoint_files import list_folder
from cavvy.agent.work.checkpoint_upload import CheckpointUpload
from cavvy.agent.work.sparse_files import find_extents, map_stored, restore_holes
from cavvy.domain.checkpoints import CheckpointFile
from cavvy.store.blobs import BlobStore
from cavvy.store.checkpoint_folders import CheckpointFolders, find_fault

GIB, MIB = 2**30, 2**20


def make_sparse(path: Path, size: int, **data: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for text, place in data.items():
            file.seek(place)
            file.write(text.encode() * 4096)
        file.truncate(size)
    if path.stat().st_blocks * 512 > size // 2:
        pytest.skip("the file system has no sparse files")
    return path


def test_what_is_stored_is_the_data_between_the_holes(tmp_path: Path) -> None:
    path = make_sparse(tmp_path / "file", 8 * MIB, a=0, b=3 * MIB, c=8 * MIB - 4096)
    with path.open("rb") as file:
        extents = find_extents(file.fileno(), 8 * MIB)
    whole = path.read_bytes()
    assert extents == [[0, 4096], [3 * MIB, 4096], [8 * MIB - 4096, 4096]]
    stored = b"".join(whole[at : at + n] for at, n in map_stored(extents, 100, 5000))
    assert stored == b"a" * 3996 + b"b" * 1004
    packed = tmp_path / "packed"
    packed.write_bytes(b"a" * 4096 + b"b" * 4096 + b"c" * 4096)
    restore_holes(str(packed), extents, 8 * MIB)
    assert packed.read_bytes() == whole
    assert packed.stat().st_blocks == path.stat().st_blocks


@pytest.mark.parametrize("size", [0, 4096, 2 * MIB])
def test_a_file_without_a_long_hole_is_stored_as_it_is(tmp_path: Path, size: int) -> None:
    (tmp_path / "file").write_bytes(b"x" * size)
    with (tmp_path / "file").open("rb") as file:
        assert find_extents(file.fileno(), size) is None


def test_two_gib_with_4_kib_of_data_are_sent_as_4_kib(tmp_path: Path) -> None:
    folder = tmp_path / "work" / "ckpt"
    make_sparse(folder / "file", 2 * GIB, x=GIB)
    config: Any = SimpleNamespace(
        private=str(tmp_path), folder=str(tmp_path / "work"), address="unix:/nowhere"
    )
    upload = CheckpointUpload(config, str(folder), list_folder(str(folder)), packs=True)
    upload.copy()
    upload.hash()
    [(entry, read)] = upload.list_contents().values()
    assert upload.get_stored_size(entry) == 4096
    assert read(0, 4096) == b"x" * 4096
    [row] = msgspec.convert(upload.describe()["files"], list[CheckpointFile])
    assert (row.size, row.stored_size, row.data) == (2 * GIB, 4096, ((GIB, 4096),))
    upload.close()


def test_the_server_keeps_and_lays_out_sparse_files_without_their_holes(tmp_path: Path) -> None:
    folders = CheckpointFolders(tmp_path)
    path = make_sparse(tmp_path / "p" / "j" / "checkpoint" / "file", 64 * MIB, x=MIB, y=40 * MIB)
    content = path.read_bytes()
    [file] = folders.take_in("p", "j")
    assert file.stored_size == 8192
    path.unlink()
    folders.lay_out("p", "j", [file])
    assert path.read_bytes() == content
    assert path.stat().st_blocks * 512 < MIB
    [copied] = folders.copy("p", "j", [file], BlobStore(tmp_path / "models"))
    with BlobStore(tmp_path / "models").open(copied.sha256) as plain:
        assert plain.read() == content, "models are stored with their holes"


@pytest.mark.parametrize(
    "data", [((0, 0),), ((0, 9),), ((4, 2), (0, 2)), ((0, 4), (2, 4)), ((-1, 2),)]
)
def test_extents_of_an_agent_are_checked(data: tuple[tuple[int, int], ...]) -> None:
    assert "extents" in find_fault([CheckpointFile(path="a", sha256="0", size=8, data=data)])
    assert not find_fault([CheckpointFile(path="a", sha256="0", size=8, data=((0, 2), (4, 4)))])
