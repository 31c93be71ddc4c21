"""A job in the image of its own Dockerfile, from submission to its log; skipped where no engine works."""

import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.system.server_home import home_at, wait_until

from remuda.cli.main import cli
from remuda.client import connect
from remuda.client.state import server_holds_lock

pytestmark = pytest.mark.system
BASE = "localhost/remuda-image-jobs:1"
TOOLS = ("sh", "cat", "echo", "sleep", "kill", "env", "true")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[str]:
    """An engine with a small image, made of the host's busybox."""
    found = next((path for path in map(shutil.which, ("podman", "docker")) if path), None)
    busybox = shutil.which("busybox")
    if found is None or subprocess.run([found, "info"], capture_output=True, check=False).returncode:
        pytest.skip("neither podman nor docker works here")
    if busybox is None:
        pytest.skip("there is no busybox here to make an image of")
    path = tmp_path / "image.tar"
    with tarfile.open(path, "w") as archive:
        archive.add(busybox, "bin/busybox")
        for tool in TOOLS:
            link = tarfile.TarInfo(f"bin/{tool}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(link)
    subprocess.run([found, "import", str(path), BASE], check=True, capture_output=True)
    before = list_builds(found)
    yield found
    made = [name for name in list_builds(found) if name not in before]
    subprocess.run([found, "rmi", "-f", *made, BASE], check=False, capture_output=True)


def list_builds(engine: str) -> list[str]:
    argv = [engine, "images", "--format", "{{.Repository}}:{{.Tag}}"]
    names = subprocess.run(argv, capture_output=True, text=True, check=False).stdout.split()
    return [name for name in names if "remuda-build" in name]


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
    with home_at(tmp_path / "home"):
        try:
            done = CliRunner().invoke(cli, ["run", str(file)])
            assert done.exit_code == 0, done.output
            assert "from the image\nfrom the volume\n" in done.output
            assert "kept" in done.output
        finally:
            if server_holds_lock(str(tmp_path / "home")):
                with connect() as client:
                    client.down()
                    wait_until(lambda: not client.nodes())
    assert (data / "word").read_text() == "from the volume\n"
