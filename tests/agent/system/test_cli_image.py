"""`cavvy image build` on a real engine; skipped where there is none that works."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.system.engines import engine_with, list_images, remove_images

from cavvy.cli.main import cli

pytestmark = pytest.mark.system
BASE = "localhost/cavvy-image-base:1"


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[str]:
    """An engine with a small image, made of the host's busybox."""
    with engine_with(BASE, ("sh", "echo", "cat", "dd", "true"), tmp_path, folders=["tmp"]) as found:
        yield found
        made = [
            name
            for name in list_images(found)
            if name.startswith("localhost/cavvy-image/imagetest:")
        ]
        remove_images(found, *made)


def build(file: Path, *options: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli, ["image", "build", str(file), *options])
    return done.exit_code, done.output


def test_an_image_is_built_once_for_equal_content(engine: str, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "word").write_text("hello\n")
    file = folder / "task.yaml"
    text = (
        f"name: imagetest\nimage: {BASE}\nworkdir: .\nrun: cat /made\n"
        "setup: {run: 'cat word >/made; dd if=/dev/zero of=/large bs=1024 count=3000', uses: "
        "[word]}\n"
    )
    file.write_text(
        text.replace("{run:", "").replace(", uses: [word]}", "")
    )  # `uses` has no meaning in a container
    code, output = build(file, "--print")
    assert (code, f"FROM {BASE}" in output) == (0, True)
    code, output = build(file)
    assert code == 0, output
    assert "3.08 MB" in output or "3.07MB" in output
    name = output.strip().splitlines()[-1].removeprefix("image: ")
    ran = subprocess.run(
        [
            engine,
            "run",
            "--rm",
            "--network",
            "none",
            "--ulimit",
            "nofile=4096:4096",
            "--ulimit",
            "nproc=4096:4096",
            name,
            "cat",
            "/made",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout == "hello\n" or "not permitted" in ran.stderr or "cgroup" in ran.stderr, (
        ran.stderr
    )
    code, output = build(file)
    assert (code, "exists already" in output) == (0, True)
    assert output.strip().splitlines()[-1] == f"image: {name}"
    (folder / "word").write_text("other\n")
    code, output = build(file)
    assert (code, "exists already" in output) == (0, False)


def test_a_setup_that_fails_is_told(engine: str, tmp_path: Path) -> None:
    file = tmp_path / "task.yaml"
    file.write_text(f"name: imagetest\nimage: {BASE}\nrun: x\nsetup: exit 3\n")
    code, output = build(file)
    assert code == 1
    assert "could not be built" in output
