"""What the guides on training show runs as it stands there: the programs, and the options of the
commands.
"""

import difflib
import io
import shlex
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch
from tests.pages import ROOT, read_blocks
from torch import nn

from cavvy import train
from cavvy.cli.main import cli
from cavvy.train import trackers
from cavvy.train.data import sources

PAGES = (
    "guides/train.md",
    "guides/formats.md",
    "guides/profile-and-tune.md",
    "guides/templates.md",
    "tutorials/training-with-resume.md",
)
SAMPLES = 512


def blocks(page: str, *kinds: str) -> list[str]:
    found = read_blocks(ROOT / "docs" / page)
    return [block.text for block in found if block.language in kinds]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))

    def forward(self, images: torch.Tensor) -> Any:
        return self.layers(images)


def augment(sample: Any, random: np.random.Generator) -> Any:
    image, label = sample
    return image + 0.1 * float(random.random()), label


def prepare(sample: dict[str, Any]) -> int:
    return int(sample["cls"])


class Silent:
    def log(self, values: dict[str, float], step: int, /) -> None: ...
    def close(self) -> None: ...


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[train.Run]]:
    """The runs that a program begins, in a folder of its own; they are closed as its process
    would.
    """
    made: list[train.Run] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cavvy.train.run.observers", [made.append])
    monkeypatch.setattr(sources, "_READERS", dict(sources._READERS))
    monkeypatch.setattr(
        trackers, "MAKERS", dict.fromkeys(trackers.MAKERS, lambda name, folder: Silent())
    )
    yield made
    for run in made:
        run.close()


def write_shard(folder: Path) -> None:
    folder.mkdir()
    with tarfile.open(folder / "0.tar", "w") as file:
        for number in range(4):
            member = tarfile.TarInfo(f"{number}.cls")
            member.size = 1
            file.addfile(member, io.BytesIO(b"%d" % number))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_a_guides_programs_run(page: str, runs: list[train.Run], tmp_path: Path) -> None:
    write_shard(tmp_path / "shards")
    samples = [(torch.full((3, 2, 2), n / SAMPLES), n % 3) for n in range(SAMPLES)]
    has = {
        "Net": Net,
        "dataset": samples,
        "augment": augment,
        "prepare": prepare,
        "MySource": lambda path: samples,
    }
    names: dict[str, Any] = {
        "__name__": "__main__",
        "train": train,
        "run": train.Run("other", device="cpu"),
        **has,
    }
    for block in blocks(page, "python"):
        program = block.replace("/data/shards", str(tmp_path / "shards"))
        if "train.Run(" not in block:
            names["run"] = runs[0]  # The block belongs to the beginning of a program.
        exec(compile(program, page, "exec"), names)
    if page == "guides/train.md":
        assert [run.steps for run in runs[1:]] == [10, 1]
        assert names["data"].fetch(range(4))[0].shape == (4, 3, 2, 2)
    if page == "guides/formats.md":
        assert sorted(names["data"].fetch(range(4)).tolist()) == [0, 1, 2, 3]
    if page == "guides/profile-and-tune.md":
        assert len(names["run"].clock.listeners) == 3


def test_a_plain_loop_needs_eight_new_or_changed_lines() -> None:
    plain, ours = (block.splitlines() for block in blocks("guides/train.md", "python")[:2])
    lines = [line for line in difflib.ndiff(plain, ours) if line.startswith("+ ") and line[2:]]
    assert len(lines) == 8, lines
    assert "With Cavvy, 8 lines are new or changed" in (ROOT / "docs/guides/train.md").read_text(
        "utf-8"
    )


def commands(page: str) -> list[list[str]]:
    texts = blocks(page, "sh", "console")
    lines = [line.removeprefix("$ ") for text in texts for line in text.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("cavvy ")]


@pytest.mark.parametrize(
    "words", [words for page in PAGES for words in commands(page)], ids=" ".join
)
def test_a_guides_commands_are_understood(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("train.py", "gradcam/task.yaml", "examples/digits/train.py"):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).touch()
    command: click.Command = cli
    context, rest = click.Context(cli), words
    while isinstance(command, click.Group):
        _, *rest = rest
        found = command.get_command(context, rest[0])
        assert found is not None, f"there is no {words}"
        command = found
    command.make_context(rest[0], rest[1:])  # which raises where an option is not known
