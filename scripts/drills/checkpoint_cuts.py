"""Cuts the power of programs that write checkpoints all the time, at random moments.

    python scripts/drills/checkpoint_cuts.py --cuts 40

Each program runs in a process of its own, while the agent's upload takes checkpoints of its folder
into memory. At each cut, the newest checkpoint is laid out in an empty folder, and a reader of the
program must be able to resume from it. The drill prints how old the resumed states were.
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
from types import SimpleNamespace
from typing import Any, ClassVar

from cavvy.agent.work import checkpoint_upload
from cavvy.agent.work.checkpoint_upload import CheckpointUpload

_HEAD = "import json, os, shutil, sys, time\nos.chdir(sys.argv[1])\n"
# name -> what the program does again and again, and how it reads its state when it starts; the
# state is the time at which its save began
PROGRAMS = {
    "torch.save onto one file": (
        "import torch\n"
        "data = torch.zeros(4_000_000)\n"
        "while True:\n"
        "    torch.save({'at': time.time(), 'data': data}, 'last.pt')\n"
        "    time.sleep(0.4)\n",
        "import torch\nprint(torch.load('last.pt')['at'])\n",
    ),
    "a file that is renamed into place": (
        "while True:\n"
        "    with open('new', 'w') as file:\n"
        "        file.write(json.dumps([time.time(), *[0] * 100_000]))\n"
        "    os.replace('new', 'last')\n"
        "    time.sleep(0.1)\n",
        "print(json.load(open('last'))[0])\n",
    ),
    "numbered folders beside a log": (
        "log = open('train.log', 'a')\n"
        "step = 0\n"
        "while True:\n"
        "    step, at = step + 1, time.time()\n"
        "    os.mkdir(f'checkpoint-{step}')\n"
        "    for name in ('model', 'optimizer', 'state'):\n"
        "        with open(f'checkpoint-{step}/{name}', 'w') as file:\n"
        "            for _ in range(20):\n"
        "                file.write('x' * 100_000)\n"
        "                time.sleep(0.005)\n"
        "            file.write(f' {at}')\n"
        "        print('saved', name, file=log, flush=True)\n"
        "    shutil.rmtree(f'checkpoint-{step - 2}', ignore_errors=True)\n"
        "    time.sleep(0.2)\n",
        "newest = max(int(name.split('-')[1]) for name in os.listdir() if '-' in name)\n"
        "names = ('model', 'optimizer', 'state')\n"
        "states = [open(f'checkpoint-{newest}/{name}').read().split()[1] for name in names]\n"
        "[at] = set(states)\nprint(at)\n",
    ),
}


class MemoryUpload(CheckpointUpload):
    """Keeps the newest checkpoint in memory instead of sending it."""

    contents: ClassVar[dict[str, bytes]] = {}
    newest: ClassVar[list[dict[str, Any]]] = []

    def send(self) -> tuple[int, int]:
        found = self.describe()["files"]
        assert isinstance(found, list)
        for entry in self.entries:
            if not entry.link:
                data = self._read_at(entry, 0, entry.size)
                MemoryUpload.contents[self._names[entry.path]] = data
        MemoryUpload.newest = found
        return 1, 0


def take(config: Any, folder: Path, settle_s: float) -> None:
    """Try to take a checkpoint, as the agent does."""
    checkpoint_upload.hand_over(
        config, str(folder), copy_first=True, since_ns=0, began_ns=0, settle_s=settle_s
    )


def lay_out(folder: Path) -> None:
    for row in MemoryUpload.newest:
        path = folder / row["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(MemoryUpload.contents[row["sha256"]])


def cut_often(name: str, cuts: int, every_s: float, seed: int) -> tuple[int, int, float]:
    """Return how many cuts found a checkpoint that is whole, how many a damaged one, and the
    greatest age of a resumed state in seconds."""
    run, read = PROGRAMS[name]
    whole = torn = 0
    oldest, chance = 0.0, random.Random(seed)
    MemoryUpload.contents, MemoryUpload.newest = {}, []
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home, "work", "ckpt")
        folder.mkdir(parents=True)
        config = SimpleNamespace(private=home, home=home, folder=home + "/work", address="unix:/")
        program = subprocess.Popen([sys.executable, "-c", _HEAD + run, str(folder)])
        try:
            while not MemoryUpload.newest:
                take(config, folder, every_s / 16)
            for number in range(cuts):
                ends = time.monotonic() + chance.uniform(0, every_s)
                while time.monotonic() < ends:
                    take(config, folder, every_s / 16)
                now, again = time.time(), Path(home, f"again-{number}")
                again.mkdir()
                lay_out(again)
                command = [sys.executable, "-c", _HEAD + read, str(again)]
                found = subprocess.run(command, capture_output=True, text=True, check=False)
                if found.returncode:
                    torn += 1
                    print(found.stderr.splitlines()[-1], file=sys.stderr)
                    continue
                whole += 1
                oldest = max(oldest, now - float(found.stdout))
        finally:
            program.kill()
            program.wait()
    return whole, torn, oldest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuts", type=int, default=40)
    parser.add_argument("--every", type=float, default=4.0, help="seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--program", choices=PROGRAMS, action="append")
    asked = parser.parse_args()
    checkpoint_upload.CheckpointUpload = MemoryUpload  # type: ignore[misc]
    out, quiet = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    for name in asked.program or PROGRAMS:
        os.dup2(quiet, 1)  # the upload reports each result there
        whole, torn, oldest = cut_often(name, asked.cuts, asked.every, asked.seed)
        os.dup2(out, 1)
        result = {"program": name, "whole": whole, "torn": torn, "oldest_s": round(oldest, 1)}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
