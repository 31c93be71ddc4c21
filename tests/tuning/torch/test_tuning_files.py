"""What `cavvy profile` leaves of the files of a script with a plain loop."""

import io
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cavvy.capabilities.tuning.probe.kept_files import KEPT, KeptFiles
from cavvy.capabilities.tuning.session import TuningSession

OLD = ("best.pt", "last.pt", "epoch-1.pt", "folder/model.pt")
STATE = {"weight": torch.ones(2)}
pytestmark = pytest.mark.usefixtures("warm")
LOOP = """
import io, os, pickle, shutil, torch
from pathlib import Path

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(30):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    save(model.state_dict(), step)
"""


def save_path(state: Any) -> None:
    torch.save(state, "best.pt")


def save_by_name(state: Any) -> None:
    torch.save(obj=state, f="best.pt")


def save_open_file(state: Any) -> None:
    with open("best.pt", "wb") as file:
        torch.save(state, file)


def save_updated_file(state: Any) -> None:
    with open("best.pt", "r+b") as file:
        torch.save(state, file)


def save_with_pathlib(state: Any) -> None:
    with Path("best.pt").open("wb") as file:
        torch.save(state, file)


def save_bytes(state: Any) -> None:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    Path("best.pt").write_bytes(buffer.getvalue())


def save_and_replace(state: Any) -> None:
    torch.save(state, "best.tmp")
    os.replace("best.tmp", "best.pt")


def save_open_file_and_replace(state: Any) -> None:
    with open("best.tmp", "wb") as file:
        torch.save(state, file)
    Path("best.tmp").replace("best.pt")


def save_and_copy(state: Any) -> None:
    torch.save(state, "last.pt")
    shutil.copyfile("last.pt", "best.pt")


def copy_a_new_file(state: Any) -> None:
    with open("new.pt", "wb") as file:
        torch.save(state, file)
    shutil.copy("new.pt", "best.pt")


def save_and_move(state: Any) -> None:
    os.rename("last.pt", "best.pt")
    torch.save(state, "last.pt")
    torch.save(state, "best.pt")


def save_and_delete(state: Any) -> None:
    torch.save(state, "best.pt")
    for name in ("epoch-1.pt", "last.pt"):
        os.remove(name)
    shutil.rmtree("folder")


def save_and_empty_folder(state: Any) -> None:
    Path("folder/model.pt").unlink()
    os.rmdir("folder")
    torch.save(state, "best.pt")


def save_and_link(state: Any) -> None:
    torch.save(state, "epoch-2.pt")
    os.remove("best.pt")
    os.symlink("epoch-2.pt", "best.pt")


SAVES = [
    save_path,
    save_by_name,
    save_open_file,
    save_with_pathlib,
    save_bytes,
    save_and_replace,
    save_open_file_and_replace,
    save_and_copy,
    copy_a_new_file,
    save_and_move,
    save_and_delete,
    save_and_empty_folder,
    save_and_link,
]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KeptFiles]:
    """Files that are installed in a folder with old checkpoints, which is the working folder."""
    session, work = tmp_path / "session", tmp_path / "work"
    session.mkdir()
    (work / "folder").mkdir(parents=True)
    for name in OLD:
        (work / name).write_text(f"old {name}")
    monkeypatch.chdir(work)
    time.sleep(0.05)  # several ticks of the kernel's clock for files
    files = KeptFiles(str(session))
    files.install()
    yield files
    files.remove()


def look(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file() or path.is_symlink())
    return {str(path.relative_to(folder)): path.read_text() for path in files}


@pytest.mark.parametrize("save", SAVES, ids=lambda save: save.__name__)
def test_no_way_of_saving_changes_a_checkpoint_and_the_new_one_can_be_read(
    save: Any, kept: KeptFiles, tmp_path: Path
) -> None:
    for _ in range(3):
        save(STATE)
        assert torch.load("best.pt")["weight"].tolist() == [1.0, 1.0]
        if save is save_and_empty_folder:
            break
    kept.remove()
    assert look(tmp_path / "work") == {name: f"old {name}" for name in OLD}


def test_an_old_file_that_is_open_for_an_update_is_not_written(
    kept: KeptFiles, tmp_path: Path
) -> None:
    save_updated_file(STATE)
    kept.remove()
    assert look(tmp_path / "work") == {name: f"old {name}" for name in OLD}


def test_other_new_files_are_real_and_few_checkpoints_are_kept(
    kept: KeptFiles, tmp_path: Path
) -> None:
    Path("log.csv").write_text("loss")
    Path("log.csv").write_text("loss 2")
    os.rename("log.csv", "losses.csv")
    with open("gone.txt", "w") as file:
        file.write("x")
    os.remove("gone.txt")
    os.mkdir("new")
    shutil.copy("losses.csv", "new")
    shutil.rmtree("new")
    with pytest.raises(FileNotFoundError):
        os.remove("gone.txt")
    for number in range(9):
        torch.save(STATE, f"step-{number}.pt")
    assert len(list((tmp_path / "session").iterdir())) == KEPT
    kept.remove()
    assert look(tmp_path / "work") == {
        **{name: f"old {name}" for name in OLD},
        "losses.csv": "loss 2",
    }
    torch.save(STATE, "best.pt")
    assert torch.load("best.pt").keys() == STATE.keys()


def test_a_profile_of_a_plain_loop_leaves_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("best.pt", "last.pt", "other.pt", "epoch-0.pt"):
        (tmp_path / name).write_text(f"old {name}")
    script = tmp_path / "train.py"
    script.write_text(
        "def save(state, step):\n"
        "    with open('best.pt', 'wb') as file:\n"
        "        torch.save(state, file)\n"
        "    torch.save(state, f='last.tmp')\n"
        "    os.replace('last.tmp', 'last.pt')\n"
        "    with Path('other.pt').open('wb') as file:\n"
        "        pickle.dump(state, file)\n"
        "    torch.save(state, f'epoch-{step + 1}.pt')\n"
        "    os.remove(f'epoch-{step}.pt')\n" + LOOP
    )
    before = look(tmp_path)
    with TuningSession(str(script)) as session:
        assert session.is_plain
        assert session.reports[0]["parts"]["checkpoint"] > 0
    assert look(tmp_path) == before
