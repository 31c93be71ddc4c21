"""Cuts the power of programs that write checkpoints all the time, at random moments.

    python scripts/drills/checkpoint_cuts.py --cuts 40

Each program of `checkpoint_writers.py` runs in a process of its own, while the agent's upload takes
checkpoints of its folder into memory, as often as the agent would. At each cut, the newest
checkpoint is laid out in an empty folder, and the program must be able to resume from it. The drill
prints how old the resumed states were, and how many files the largest checkpoint had: what the
program has removed must leave the checkpoint. `--python` names the Python that has the programs'
packages; a program whose packages it lacks is left out.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, ClassVar, Self

from scripts.drills.checkpoint_writers import WRITERS, Writer

from cavvy.agent.work import checkpoint_hand_over
from cavvy.agent.work.checkpoint_upload import CheckpointUpload

_HEAD = "import json, os, shutil, sys, time\n"
_WRITER = "os.chdir(sys.argv[1])\n"
# Reads a folder's name from each line, and answers with a line of JSON.
_READER = """
out, _ = os.dup(1), os.dup2(2, 1)
def answer(**fields):
    os.write(out, (json.dumps(fields) + "\\n").encode())
answer(ready=True)
for line in sys.stdin:
    os.chdir(line.strip())
    try:
        answer(at=read())
    except Exception as error:
        answer(error=f"{type(error).__name__}: {error}"[:300])
"""


class MemoryUpload(CheckpointUpload):
    """Keeps the newest checkpoint in memory instead of sending it."""

    contents: ClassVar[dict[str, bytes]] = {}
    newest: ClassVar[list[dict[str, Any]]] = []
    count: ClassVar[int] = 0
    most_files: ClassVar[int] = 0

    def send(self) -> tuple[int, int]:
        found = self.describe()["files"]
        assert isinstance(found, list)
        for entry in self.entries:
            if not entry.link:
                data = self._read_at(entry, 0, entry.size)
                MemoryUpload.contents[self._names[entry.path]] = data
        MemoryUpload.newest = found
        MemoryUpload.count += 1
        MemoryUpload.most_files = max(MemoryUpload.most_files, len(found))
        wanted = {row["sha256"] for row in found if "sha256" in row}
        for name in MemoryUpload.contents.keys() - wanted:
            del MemoryUpload.contents[name]
        return 1, 0


class Cutter:
    """A program that runs, the checkpoints that are taken of its folder, and a process that reads
    them."""

    def __init__(self, writer: Writer, python: list[str], every_s: float, home: str) -> None:
        self._every_s, self._home, self._next = every_s, home, 0.0
        self._folder = Path(home, "work", "ckpt")
        self._folder.mkdir(parents=True)
        self._config: Any = SimpleNamespace(
            private=home, home=home, folder=home + "/work", address="unix:/"
        )
        self._number = 0
        MemoryUpload.contents, MemoryUpload.newest, MemoryUpload.most_files = {}, [], 0
        write, read = _WRITER + writer.start + writer.write, writer.start + writer.read + _READER
        with open(Path(home, "log"), "wb") as log:
            self._reader = subprocess.Popen(
                [*python, "-c", _HEAD + read],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=home,
            )
            self._said()
            self._program = subprocess.Popen(
                [*python, "-c", _HEAD + write, str(self._folder)], stdout=log, stderr=log
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in (self._program, self._reader):
            process.kill()
            process.communicate()  # which closes its pipes too

    def stop(self) -> None:
        """Kill the program, so that what was found is read without it."""
        self._program.kill()
        self._program.wait()

    def take_first(self) -> None:
        """Wait for the first checkpoint from which the program can resume: before its first save,
        there are only logs. Raises RuntimeError if the program ends."""
        while not MemoryUpload.newest or self.resume(*self.cut())[1]:
            if self._program.poll() is not None:
                raise RuntimeError(Path(self._home, "log").read_text(errors="replace")[-2000:])
            self.take_until(time.monotonic() + self._every_s / 4)

    def take_until(self, end: float) -> None:
        """Take checkpoints until then, as often as the agent does in a folder that always
        changes."""
        while (now := time.monotonic()) < end:
            if now < self._next:
                time.sleep(min(end, self._next) - now)
                continue
            before = MemoryUpload.count
            checkpoint_hand_over.hand_over(
                self._config,
                str(self._folder),
                copy_first=True,
                since_ns=0,
                began_ns=0,
                settle_s=min(1.0, self._every_s / 16),
                filled_s=max(2.0, self._every_s),
            )
            saved = MemoryUpload.count > before
            self._next = now + (self._every_s / 2 if saved else min(3.0, self._every_s / 4))

    def cut(self) -> tuple[float, Path]:
        """Lay out the newest checkpoint in a new folder. Return when, and the folder."""
        self._number += 1
        now, folder = time.time(), Path(self._home, f"again-{self._number}")
        folder.mkdir()
        for row in MemoryUpload.newest:
            path = folder / row["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            if "link" in row:
                path.symlink_to(row["link"])
                continue
            path.write_bytes(MemoryUpload.contents[row["sha256"]])
            os.utime(path, ns=(row["mtime_ns"],) * 2)
        return now, folder

    def resume(self, at: float, folder: Path) -> tuple[float, str]:
        """Resume from what was laid out then. Return the age of what was resumed in seconds, or
        why it could not be."""
        assert self._reader.stdin is not None
        self._reader.stdin.write(f"{folder}\n".encode())
        self._reader.stdin.flush()
        said = self._said()
        return (0.0, said["error"]) if "error" in said else (at - said["at"], "")

    def _said(self) -> dict[str, Any]:
        assert self._reader.stdout is not None
        line = self._reader.stdout.readline()
        if not line:
            raise RuntimeError(Path(self._home, "log").read_text(errors="replace")[-2000:])
        found: dict[str, Any] = json.loads(line)
        return found


def cut_often(
    writer: Writer, python: list[str], *, cuts: int, every_s: float, seed: int
) -> tuple[list[float], list[str]]:
    """Return the ages in seconds of what was resumed, and why the other cuts left nothing that
    could be."""
    chance, ages, faults = random.Random(seed), [], []
    with (
        tempfile.TemporaryDirectory() as home,
        Quiet(),
        Cutter(writer, python, every_s, home) as cutter,
    ):
        cutter.take_first()
        cutter.take_until(time.monotonic() + 2 * every_s)
        found = []
        for _ in range(cuts):
            cutter.take_until(time.monotonic() + chance.uniform(0, 2 * every_s))
            found.append(cutter.cut())
        cutter.stop()
        for each in found:
            age, fault = cutter.resume(*each)
            if fault:
                faults.append(fault)
            else:
                ages.append(age)
    return ages, faults


class Quiet:
    """Within it, the upload reports nothing on standard output and keeps nothing of this
    process."""

    def __enter__(self) -> None:
        self._out, null = os.dup(1), os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.close(null)
        self._real = checkpoint_hand_over.CheckpointUpload
        self._nice = os.nice
        os.nice = lambda by: 0
        checkpoint_hand_over.CheckpointUpload = MemoryUpload  # type: ignore[misc]  # for the drill

    def __exit__(self, *error: object) -> None:
        os.dup2(self._out, 1)
        os.close(self._out)
        os.nice = self._nice
        checkpoint_hand_over.CheckpointUpload = self._real  # type: ignore[misc]  # as above


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuts", type=int, default=40)
    parser.add_argument("--every", type=float, default=4.0, help="seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--program", choices=WRITERS, action="append")
    parser.add_argument("--python", default=sys.executable)
    asked = parser.parse_args()
    for name in asked.program or WRITERS:
        writer = WRITERS[name]
        has = f"import importlib.util as u; assert all(map(u.find_spec, {writer.modules!r}))"
        if subprocess.run([asked.python, "-c", has], check=False, capture_output=True).returncode:
            print(json.dumps({"program": name, "lacks": writer.modules}), flush=True)
            continue
        ages, faults = cut_often(
            writer, [asked.python], cuts=asked.cuts, every_s=asked.every, seed=asked.seed
        )
        result = {"program": name, "whole": len(ages), "torn": len(faults)}
        result["most_files"] = MemoryUpload.most_files
        if ages:
            middle, oldest = sorted(ages)[len(ages) // 2], max(ages)
            result |= {"middle_s": round(middle, 1), "oldest_s": round(oldest, 1)}
        print(json.dumps(result | {"faults": sorted(set(faults))[:3]}), flush=True)


if __name__ == "__main__":
    main()
