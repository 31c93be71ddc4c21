"""What a machine does with a disk that comes to it: a file system is made where nothing is, and
nowhere else.
"""

import time
from pathlib import Path

import pytest

from cavvy.providers.hosts.boot import mount


@pytest.mark.parametrize(
    ("content", "blkid", "done"),
    [
        (bytes(1 << 20), 2, ["blkid", "mkfs.ext4", "mount"]),
        (bytes(4096) + b"data", 2, ["blkid", "mount"]),  # blkid could not see what is there
        (b"data", 0, ["blkid", "mount"]),
    ],
)
def test_a_file_system_is_made_on_a_blank_disk_alone(
    content: bytes, blkid: int, done: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("blkid", "mkfs.ext4", "mount"):
        tool = tmp_path / "bin" / name
        tool.write_text(
            f"#!/bin/sh\necho {name} >>{tmp_path}/done\nexit {blkid if name == 'blkid' else 0}\n"
        )
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    (tmp_path / "disk").write_bytes(content)
    disk = {
        "devices": ["/nowhere", str(tmp_path / "disk")],
        "path": str(tmp_path / "at"),
        "read_only": False,
    }
    mount({**disk, "make": True}, time.monotonic() + 10)
    assert (tmp_path / "done").read_text().split() == done


def test_a_disk_that_cannot_be_read_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "blkid").write_text("#!/bin/sh\nexit 2\n")
    (tmp_path / "blkid").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    disk = {
        "devices": [str(tmp_path)],
        "path": str(tmp_path / "at"),
        "read_only": False,
        "make": True,
    }
    with pytest.raises(OSError, match="Is a directory"):
        mount(disk, time.monotonic() + 10)
