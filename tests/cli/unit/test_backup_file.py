"""The file that `cavvy server backup` writes, in a folder that others can write to."""

import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from cavvy.cli.reach.session import ended_by_signals
from cavvy.cli.view.new_file import new_file


def test_the_archive_is_private_and_goes_through_no_link(tmp_path: Path) -> None:
    other, archive = tmp_path / "other", tmp_path / "archive"
    other.write_text("theirs")
    (tmp_path / "archive.part").symlink_to(other)
    with new_file(str(archive)) as out:
        out.write(b"keys")
    assert other.read_text() == "theirs"
    assert archive.read_bytes() == b"keys"
    assert archive.stat().st_mode & 0o777 == 0o600


def test_a_failure_leaves_the_former_archive_and_names_the_file(tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    archive.write_bytes(b"former")

    def fill_the_disk() -> None:
        with new_file(str(archive)) as out:
            out.write(b"half")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError) as failure:
        fill_the_disk()
    assert failure.value.filename == str(archive)
    assert [each.name for each in tmp_path.iterdir()] == ["archive"]
    assert archive.read_bytes() == b"former"


@pytest.mark.parametrize("handler", [signal.SIG_DFL, lambda *_: None])
def test_a_backup_that_is_told_to_end_leaves_no_copy(tmp_path: Path, handler: Any) -> None:
    def end() -> None:
        with ended_by_signals(), new_file(str(tmp_path / "archive")) as out:
            out.write(b"half")
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)

    before = signal.signal(signal.SIGTERM, handler)
    try:
        with pytest.raises(SystemExit) as ended:
            end()
        assert signal.getsignal(signal.SIGTERM) == handler
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())


def test_a_backup_under_nohup_goes_on_when_its_session_ends() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ended_by_signals():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("kind", ["pipe", "socket", "link to a pipe", "link to an open file"])
def test_a_special_file_is_not_replaced_with_the_archive(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "target"
    with socket.socket(socket.AF_UNIX) as listener:
        if kind == "socket":
            listener.bind(str(target))
        elif kind == "link to an open file":
            target.symlink_to("/proc/self/fd/1")
        else:
            os.mkfifo(tmp_path / "pipe" if kind == "link to a pipe" else target)
            if kind == "link to a pipe":
                target.symlink_to(tmp_path / "pipe")
        before = os.lstat(target)
        with (
            pytest.raises(OSError, match="is a device, pipe or socket"),
            new_file(str(target)) as out,
        ):
            out.write(b"archive")
    assert os.lstat(target).st_ino == before.st_ino
