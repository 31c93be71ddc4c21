"""A job in the image of its own Dockerfile, from submission to its log; skipped where no engine
works.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.providers.hosts.contract.test_provider_local import PROOF
from tests.system.engines import engine_with, list_images, remove_images
from tests.system.server_state import home_with_jobs

from cavvy.cli.main import cli

pytestmark = pytest.mark.system
BASE = "localhost/cavvy-image-jobs:1"
TOOLS = ("sh", "cat", "echo", "sleep", "kill", "env", "true", "nc")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[str]:
    """An engine with a small image, made of the host's busybox."""
    with engine_with(BASE, TOOLS, tmp_path) as found:
        before = list_builds(found)
        yield found
        remove_images(found, *(name for name in list_builds(found) if name not in before))


def list_builds(engine: str) -> list[str]:
    return [name for name in list_images(engine) if "cavvy-build" in name]


@pytest.mark.proves(PROOF, "image", "build", "mounts")
def test_a_job_builds_its_image_and_sees_its_volume(engine: str, tmp_path: Path) -> None:
    folder, data = tmp_path / "work", tmp_path / "data"
    folder.mkdir()
    data.mkdir()
    (data / "word").write_text("from the volume\n")
    (folder / "Dockerfile").write_text(f"FROM {BASE}\nARG WORD\nRUN echo $WORD >/made\n")
    file = folder / "task.yaml"
    file.write_text(
        "name: built\nworkdir: .\nimage: {build: ., args: {WORD: from the image}}\n"
        f"volumes: ['{data}:/data:ro']\nrun: cat /made /data/word; echo no >/data/word || echo kept\n"
    )
    with home_with_jobs(tmp_path / "home"):
        done = CliRunner().invoke(cli, ["run", str(file)])
        assert done.exit_code == 0, done.output
        assert "from the image\nfrom the volume\n" in done.output
        assert "kept" in done.output
    assert (data / "word").read_text() == "from the volume\n"
