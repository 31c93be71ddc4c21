"""The engine for images that is here, with a small image made of the host's busybox."""

import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def engine_with(
    image: str, tools: Sequence[str], folder: Path, *, folders: Sequence[str] = ()
) -> Iterator[str]:
    """An engine that has `image` until the end: these tools and empty folders. Skips where no
    engine works.
    """
    found = next((path for path in map(shutil.which, ("podman", "docker")) if path), None)
    busybox = shutil.which("busybox")
    if (
        found is None
        or subprocess.run([found, "info"], capture_output=True, check=False).returncode
    ):
        pytest.skip("neither podman nor docker works here")
    if busybox is None:
        pytest.skip("there is no busybox here to make an image of")
    path = folder / "image.tar"
    with tarfile.open(path, "w") as archive:
        archive.add(busybox, "bin/busybox")
        for tool in tools:
            link = tarfile.TarInfo(f"bin/{tool}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(link)
        for name in folders:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o777
            archive.addfile(entry)
    subprocess.run([found, "import", str(path), image], check=True, capture_output=True)
    yield found
    remove_images(found, image)


def list_images(engine: str) -> list[str]:
    argv = [engine, "images", "--format", "{{.Repository}}:{{.Tag}}"]
    return subprocess.run(argv, capture_output=True, text=True, check=False).stdout.split()


def remove_images(engine: str, *names: str) -> None:
    subprocess.run([engine, "rmi", "-f", *names], check=False, capture_output=True)
