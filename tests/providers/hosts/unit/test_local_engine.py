"""Which container engine this machine has: a docker without its daemon is none."""

import socket
from pathlib import Path

import pytest

from cavvy.domain.tasks import TaskSpec
from cavvy.providers.local.provider import check_task, find_engine


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def install(folder: Path, name: str) -> None:
    (folder / name).write_text("#!/bin/sh\n")
    (folder / name).chmod(0o755)


def test_none_is_installed(bin_folder: Path) -> None:
    assert find_engine() is None


def test_docker_counts_while_its_daemon_listens(
    bin_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(bin_folder, "docker")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{bin_folder}/engine.sock")
    assert find_engine() is None
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(f"{bin_folder}/engine.sock")
        daemon.listen()
        assert find_engine() == "docker"
    assert find_engine() is None


def test_podman_needs_no_daemon_and_goes_first(
    bin_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(bin_folder, "docker")
    install(bin_folder, "podman")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{bin_folder}/nobody.sock")
    assert find_engine() == "podman"


def test_a_docker_elsewhere_is_trusted(bin_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(bin_folder, "docker")
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:2375")
    assert find_engine() == "docker"


@pytest.mark.parametrize(("image", "searches"), [(None, 0), ("busybox", 1)])
def test_only_a_task_with_an_image_searches_for_an_engine(image: str | None, searches: int) -> None:
    """Each attempt to place a job checks its task, and a search reads all folders of PATH."""
    searched: list[str] = []

    def engine() -> str:
        searched.append("PATH")
        return "podman"

    task = TaskSpec(name="t", run="true", image=image)
    for _ in range(3):
        assert check_task(task, engine, None) == []
    assert len(searched) == 3 * searches
