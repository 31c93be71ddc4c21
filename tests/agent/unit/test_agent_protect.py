"""Which sockets the work needs, and which links lead to what the machine obeys."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from cavvy.agent.work import protect
from cavvy.agent.work.protect import _follow, holds_obeyed, is_needed, is_obeyed
from cavvy.providers.local.configs import list_obeyed


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


def test_paths_are_followed_as_the_kernel_follows_them(tmp_path: Path) -> None:
    top = tmp_path.resolve()
    (top / "a/b").mkdir(parents=True)
    (top / "a/b/file").touch()
    for link, target in (
        ("up", "a/b/.."),
        ("whole", f"{top}//up/./b"),
        ("gone", "missing/x"),
        ("circle", "circle"),
        ("a/b/out", "../../whole"),
    ):
        (top / link).symlink_to(target)
    known: dict[str, str] = {}
    for path in ("whole/file", "up/b/../b/file", "a/b/out/out/file", "gone", "gone/y", "a/none"):
        real, links = _follow(f"{top}/{path}", known)
        assert real == os.path.realpath(top / path)
        assert all(os.path.islink(each) for each in links)
        assert all(
            os.path.realpath(os.path.dirname(each)) == os.path.dirname(each) for each in links
        )
    assert _follow(f"{top}/whole/file", known)[1] == [f"{top}/whole", f"{top}/up"]
    _follow(f"{top}/circle", known)  # ends


def test_folders_in_which_the_server_looks_exist_before_jobs_run(tmp_path: Path) -> None:
    environ = {"XDG_CONFIG_HOME": f"{tmp_path}/xdg", "PATH": f"/usr/bin:{tmp_path}/tools/bin:x"}
    obeyed = list_obeyed(environ)
    for path in (f"{tmp_path}/xdg/cavvy", f"{tmp_path}/tools/bin"):
        assert Path(path).is_dir()
    assert f"{tmp_path}/xdg/cavvy" in obeyed
    assert not is_obeyed(str(tmp_path / "other"), list(obeyed))
    assert not Path("x").exists()


def test_of_a_home_folder_only_missing_folders_in_free_ones_are_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "project").mkdir()
    names = ("project/bin", "other/bin", ".cargo/bin")
    list_obeyed({"PATH": ":".join(f"{tmp_path}/{name}" for name in names)})
    assert [(tmp_path / name).exists() for name in names] == [True, False, False]


def test_a_home_folder_whose_table_did_not_answer_is_found_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(user: int) -> object:
        raise KeyError(user)

    protect._read_home.cache_clear()
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", fail)
    assert str(tmp_path) not in protect.list_homes()
    monkeypatch.setattr("pwd.getpwuid", lambda user: SimpleNamespace(pw_dir=str(tmp_path)))
    assert str(tmp_path) in protect.list_homes()
    protect._read_home.cache_clear()
