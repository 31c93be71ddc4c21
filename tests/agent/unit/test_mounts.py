"""Which file systems machines share."""

import pytest

from cavvy.mounts import is_shared, read_mounts

TABLE = "/dev/vda / ext4 rw 0 0\nbroken\nfiler:/x /shared {} rw 0 0\n"


@pytest.mark.parametrize("kind", ["nfs4", "wekafs", "lustre", "fuse.juicefs", "fuse.rclone"])
def test_a_folder_on_a_network_file_system_is_shared(kind: str) -> None:
    assert is_shared("/shared/home", TABLE.format(kind))
    assert not is_shared("/sharedhome", TABLE.format(kind))


@pytest.mark.parametrize("kind", ["ext4", "xfs", "fuse.gocryptfs", "overlay"])
def test_a_folder_on_a_local_file_system_is_not_shared(kind: str) -> None:
    assert not is_shared("/shared/home", TABLE.format(kind))


def test_a_missing_table_has_no_mounts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAVVY_MOUNTS_FILE", "/nowhere/mounts")
    assert read_mounts() == ""
    assert not is_shared("/shared", read_mounts())
