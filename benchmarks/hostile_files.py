"""Measures how `cavvy validate` and `cavvy convert` bear files that were written to harm them.

    python benchmarks/hostile_files.py

The files are bombs of aliases, values nested deeply, lists without an end, large notebooks, NUL
bytes, shell in names, paths outside of the folder, and loops of links. Each must be answered within
a second of CPU time and 100 MiB of memory, without a traceback. Ends with 1 if one is not.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from measure import CAVVY, judge, record, table

BAR_S, BAR_MIB = 1.0, 100
LINES = 100_000
SBATCH = "#!/bin/bash\n#SBATCH "
POD = "apiVersion: batch/v1\nkind: Job\nmetadata: {name: a}\n"


def make_bomb() -> str:
    """Return values of which each is the one before, nine times."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    return "\n".join(lines) + "\n"


def make_merges() -> str:
    lines = ["x0: &x0 {k: v}"]
    lines += [f"x{i}: &x{i}\n  <<: [*x{i - 1}, *x{i - 1}, *x{i - 1}]" for i in range(1, 60)]
    return "\n".join(lines) + "\nservices: {a: {image: i, environment: {<<: *x59}}}\n"


def make_notebook(source: object, outputs: object = ()) -> str:
    cell = {"cell_type": "code", "source": source, "outputs": [outputs]}
    return json.dumps({"metadata": {}, "cells": [cell]})


def list_texts() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each file."""
    yield "bomb.yaml", f"{make_bomb()}num_nodes: 1\nrun: x\n"
    yield "bomb-job.yaml", POD + make_bomb()
    yield "bomb/compose.yaml", f"{make_bomb()}services: {{a: {{image: i, environment: *a8}}}}\n"
    yield "merges/compose.yaml", make_merges()
    yield "deep.yaml", f"run: {'[' * LINES}{']' * LINES}"
    yield "deep-tables.yaml", "".join(f"{' ' * i}a:\n" for i in range(1400))
    yield "anchors.yaml", "".join(f"a{i}: &a{i} {i and f'*a{i - 1}'}\n" for i in range(60_000))
    yield "inside.yaml", "run: &a [*a]\nresources: *a\n"
    yield (
        "inside-job.yaml",
        f"{POD}spec: &s {{template: {{spec: {{containers: [{{env: *s}}]}}}}}}\n",
    )
    yield "inside/compose.yaml", "services: &s {a: {image: i, deploy: *s}}\n"
    yield "large.yaml", "run: x\nenvs:\n" + "".join(f"  A{i}: {'y' * 90}\n" for i in range(LINES))
    yield "large.sbatch", SBATCH + "-N 1\n#SBATCH " * 800_000
    yield "large.pbs", "#!/bin/bash\n" + "#PBS -l select=1:ncpus=1\n" * 400_000
    yield "line.sbatch", f"{SBATCH}-N 1\n" + "a=$b " * 700_000
    yield "array.sbatch", f"{SBATCH}--array=0-{'9' * 30}\n"
    yield "hosts.sbatch", f"{SBATCH}-w n[{'1-999999999,' * 1000}1]\n"
    yield "names.sbatch", f"{SBATCH}-J '$(touch harmed)`touch harmed`' -o '$(touch harmed)'\n"
    yield "names.yaml", "type: task\nname: a; touch harmed\ncommands: [x]\n"
    yield "outside.sbatch", f"{SBATCH}--chdir=../..\n"
    yield "outside/compose.yaml", "services: {a: {image: i, env_file: ../../../../etc/shadow}}\n"
    yield "nul.yaml", "run: a\0b\n"
    yield "nul.sbatch", f"{SBATCH}-N 1\necho \0\n"
    yield "nul.ipynb", '{"cells": [\0]}'
    yield "deep.ipynb", '{"cells":' + "[" * 200_000
    yield "outputs.ipynb", make_notebook("x", "y" * 52_000_000)
    yield "cells.ipynb", make_notebook("a" * 3_000_000 + "\n" * LINES)
    yield "heads.py", "# /// script\n" * 700_000
    yield "head.py", "# /// script\n" + "# a\n" * 2_000_000
    yield "words.py", "import torch.distributed\nadd_argument(" + " " * 5_000_000
    yield "words.sh", "#!/bin/bash\n" + "A=1 " * 2_000_000
    yield "MLproject", f"name: x\nentry_points: {{main: {{command: '{'{a}' * 2_000_000}'}}}}\n"


def write_files(folder: Path) -> list[str]:
    """Write the files into a folder. Returns their names."""
    names = []
    for name, text in list_texts():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
        names.append(name)
    for name, target in (("loop.sbatch", "pool.sbatch"), ("pool.sbatch", "loop.sbatch")):
        (folder / name).symlink_to(target)
    (folder / "endless.sbatch").symlink_to("/dev/zero")
    (folder / "bytes.sbatch").write_bytes(SBATCH.encode() + b"-J \xff\n")
    return [*names, "loop.sbatch", "endless.sbatch", "bytes.sbatch"]


def measure(words: list[str], folder: Path) -> tuple[float, float, str]:
    """Return the CPU seconds and the MiB of a command, and what it said."""
    with (folder / "said").open("wb") as said:
        home = {**os.environ, "CAVVY_HOME": str(folder / "home")}
        work = subprocess.Popen(words, cwd=folder, env=home, stdout=said, stderr=said)
        _, _, used = os.wait4(work.pid, 0)
    return (
        used.ru_utime + used.ru_stime,
        used.ru_maxrss / 1024,
        (folder / "said").read_text(errors="replace"),
    )


def main() -> int:
    rows, failed = [], False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # in a process of its own: a child counts what its parent holds while it starts
        made = subprocess.run(
            [sys.executable, __file__, "--write", name], check=True, capture_output=True, text=True
        )
        for file in made.stdout.split():
            for verb in ("validate", "convert"):
                cpu_s, mib, said = measure([CAVVY, verb, file], folder)
                wrong = "Traceback" in said or (folder / "harmed").exists()
                failed = failed or wrong or cpu_s > BAR_S or mib > BAR_MIB
                rows.append(
                    (f"{verb} {file}", cpu_s, mib, "wrong" if wrong else judge(cpu_s, BAR_S))
                )
    table("Hostile files", ("command", "CPU s", "MiB", ""), rows)
    record("a hostile file (the slowest)", max(row[1] for row in rows), BAR_S, "CPU s")
    record("a hostile file (the largest)", max(row[2] for row in rows), BAR_MIB, "MiB")
    return int(failed)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--write"]:
        print(*write_files(Path(sys.argv[2])))
    else:
        sys.exit(main())
