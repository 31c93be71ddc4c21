"""The image of Cavvy's server, without a registry: the cluster's image with Python, and above it a
layer with what the Dockerfile installs from the locked versions.
"""

import io
import json
import re
import subprocess
import sys
import tarfile
from hashlib import sha256
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from tests.conftest import ROOT
from tests.system.kubernetes.cluster import CACHE, Cluster, add

NAME = "localhost/cavvy:1"
USER = 1000
_SITE = "opt/cavvy/lib"
_START = f"""#!/bin/sh
export PYTHONPATH=/{_SITE} LD_LIBRARY_PATH=/opt/python/lib
exec /opt/python/bin/python3 -c 'from cavvy.cli.main import main; main()' "$@"
"""


def load_image(cluster: Cluster, folder: Path) -> None:
    """Give the first node of the cluster the image."""
    path = folder / "server.tar"
    (base,) = (CACHE / "images").glob("python-*.tar")
    write_image(path, base)
    address = cluster.folder / "k/n1/ctd/c.sock"
    command = ["ctr", "-a", str(address), "-n", "k8s.io", "images", "import", str(path)]
    subprocess.run(command, check=True, capture_output=True)
    path.unlink()


def write_image(path: Path, base: Path) -> None:
    """A docker archive: the layers of `base`, and one with the server."""
    layer = make_layer()
    with tarfile.open(base) as old, tarfile.open(path, "w") as new:
        (found,) = json.loads(_read(old, "manifest.json"))
        config: dict[str, Any] = json.loads(_read(old, found["Config"]))
        config["rootfs"]["diff_ids"].append(f"sha256:{sha256(layer).hexdigest()}")
        config["config"] |= {"User": str(USER), "Entrypoint": ["cavvy"], "Cmd": ["--help"]}
        for each in found["Layers"]:
            add(new, each, _read(old, each), 0o644)
        add(new, "server.tar", layer, 0o644)
        text = json.dumps(config).encode()
        name = f"{sha256(text).hexdigest()}.json"
        add(new, name, text, 0o644)
        layers = [*found["Layers"], "server.tar"]
        manifest = [{"Config": name, "RepoTags": [NAME], "Layers": layers}]
        add(new, "manifest.json", json.dumps(manifest).encode(), 0o644)


def make_layer() -> bytes:
    """The locked distributions and Cavvy, with the modules that are compiled already."""
    content = io.BytesIO()
    libraries: set[Path] = set()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for name in re.findall(r"^([\w-]+)==", (ROOT / "requirements/base.lock").read_text(), re.M):
            installed = distribution(name)
            for file in installed.files or ():
                path = Path(str(installed.locate_file(file)))
                if path.is_file() and not str(file).startswith(".."):
                    tar.add(path, f"{_SITE}/{file}")
                    libraries |= {path} if path.suffix == ".so" else set()
        tar.add(ROOT / "src/cavvy", f"{_SITE}/cavvy")
        for path in _needed(libraries):
            tar.add(path.resolve(), str(path).removeprefix("/usr").lstrip("/"))
        add(tar, "bin/cavvy", _START.encode(), 0o755)
        users = f"root:x:0:0::/root:/bin/sh\ncavvy:x:{USER}:{USER}::/home/cavvy:/bin/sh\n"
        add(tar, "etc/passwd", users.encode(), 0o644)
    return content.getvalue()


def _needed(libraries: set[Path]) -> set[Path]:
    said = subprocess.run(
        ["ldd", *sorted(libraries)], capture_output=True, text=True, check=False
    ).stdout
    words = {Path(word) for line in said.splitlines() for word in line.split()}
    return {each for each in words if str(each).startswith(("/lib", "/usr/lib"))}


def _read(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    assert file is not None, f"{archive.name!r} has no {name}"
    return file.read()


if __name__ == "__main__":  # for trying things out: FOLDER of a running cluster
    load_image(Cluster(Path(sys.argv[1])), Path("/tmp"))
