"""Which sockets the work needs, and which links lead to what the machine obeys."""

from pathlib import Path

import pytest

from cavvy.agent.work.protect import holds_obeyed, is_needed, is_obeyed


@pytest.mark.parametrize(
    "path",
    [
        "/run/nscd/socket",
        "/var/run/nscd/socket",
        "/var/lib/sss/pipes/nss",
        "/run/systemd/resolve/io.systemd.Resolve",
        "/run/munge/munge.socket.2",
        "/run/nvidia-persistenced/socket",
        "/tmp/nvidia-mps/control",
        "/tmp/mps_0/control",
    ],
)
def test_sockets_for_names_and_gpus_stay(path: str) -> None:
    assert is_needed(path)


@pytest.mark.parametrize(
    "path",
    [
        "/home/thompson/.docker/run/docker.sock",
        "/home/nvidia/agent.sock",
        "/tmp/tmps0a1/agent.1",
        "/data/nvidia/engine.sock",
        "/run/systemd/private",
        "/run/docker.sock",
        "/run/user/1000/nvidia/x",
    ],
)
def test_other_sockets_are_hidden_whatever_their_folders_are_called(path: str) -> None:
    assert not is_needed(path)


def test_links_to_obeyed_files_are_obeyed(tmp_path: Path) -> None:
    for name in ("real", "links", "free"):
        (tmp_path / name).mkdir()
    (tmp_path / "real/s.toml").touch()
    (tmp_path / "folder").symlink_to("real")
    (tmp_path / "links/s.toml").symlink_to("../folder/s.toml")
    obeyed = [str(tmp_path / "links/s.toml")]
    for name in ("real/s.toml", "links/s.toml", "folder"):
        assert is_obeyed(str(tmp_path / name), obeyed)
    for name in ("real", "links"):
        assert holds_obeyed(str(tmp_path / name), obeyed)
    assert not is_obeyed(str(tmp_path / "free/x"), obeyed)
    assert not holds_obeyed(str(tmp_path / "free"), obeyed)
