"""The Python for hosts is packed once, also if many hosts start at the same moment."""

import io
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from cavvy.client.state import write_private
from cavvy.providers.hosts import bundles

HOSTS = 32


def test_hosts_that_start_at_once_get_the_same_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together, packed = Barrier(HOSTS), []

    def pack(program: Path) -> bytes:  # the real one takes seconds
        packed.append(program)
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w:gz") as archive:
            archive.addfile(tarfile.TarInfo("lib/python"))
        return content.getvalue()

    monkeypatch.setattr(bundles, "_make_archive", pack)

    def start(host: int) -> str:
        together.wait()
        return bundles.pack_python(tmp_path).name

    with ThreadPoolExecutor(HOSTS) as threads:
        names = set(threads.map(start, range(HOSTS)))
    assert (len(names), len(packed)) == (1, 1)
    assert len(list(tmp_path.iterdir())) == 1


def test_threads_that_write_one_file_leave_it_whole(tmp_path: Path) -> None:
    together, path = Barrier(HOSTS), tmp_path / "file"

    def write(host: int) -> None:
        together.wait()
        for _ in range(3):
            write_private(str(path), b"x" * 4096)

    with ThreadPoolExecutor(HOSTS) as threads:
        list(threads.map(write, range(HOSTS)))
    assert path.read_bytes() == b"x" * 4096
    assert list(tmp_path.iterdir()) == [path]
