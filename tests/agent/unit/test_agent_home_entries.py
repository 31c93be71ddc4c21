"""What jobs created in a home folder is moved there when nothing obeys it, and otherwise said."""

import errno
import os
from pathlib import Path

import pytest

from cavvy.agent.work.home_entries import HomeEntries, is_data, is_named
from cavvy.agent.work.protect import find_kept, mark_place


class Machine:
    """A home folder, and the folder of a project for the home folder's new entries."""

    def __init__(self, top: Path) -> None:
        self.home, self.below = top / "home", str(top / "kept")
        self.home.mkdir()
        self.kept = Path(find_kept(self.below, str(self.home)))
        self.kept.mkdir(parents=True)
        self.entries = self.open()

    def open(self, *obeyed: Path) -> HomeEntries:
        return HomeEntries(self.below, [str(each) for each in obeyed])

    def write(self, *names: str) -> None:
        for name in names:
            (self.kept / name).parent.mkdir(parents=True, exist_ok=True)
            (self.kept / name).write_text("by the job")

    def listed(self) -> list[str]:
        return sorted(os.listdir(self.home))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return Machine(tmp_path)


def test_folders_and_data_are_moved_and_the_rest_is_said(machine: Machine) -> None:
    machine.write(
        "results/a", "model.pt", "nohup.out", "Ergebnis für A/x", ".netrc", ".local/lib/x"
    )
    assert machine.entries.begin() == f"new in the home folder {machine.home}: " + (
        "Ergebnis für A, model.pt, nohup.out and 1 more"
    )
    (machine.kept / "empty").mkdir()
    (machine.kept / "place").mkdir()
    mark_place(str(machine.kept / "place"))
    machine.write(
        "metrics.json",
        "results_2.json",
        "log4j2.json",
        "out/b",
        "bin/git",
        "Makefile",
        ".zshenv",
        ".triton/x",
        ".bash_history",
    )
    moved, left = machine.entries.finish()
    assert moved == f"new in the home folder {machine.home}: empty, metrics.json, out and 1 more"
    assert ".zshenv, Makefile, bin and 1 more, in " + str(machine.kept) in left
    own = ["metrics.json", "model.pt", "nohup.out", "out", "results", "results_2.json"]
    assert machine.listed() == ["Ergebnis für A", "empty", *own]
    assert (machine.home / "results/a").read_text() == "by the job"
    assert machine.open().begin() == ""


@pytest.mark.parametrize(
    "name",
    [
        *("bin/git", "Bin/git", "public_html/x.cgi", "www/x", "Desktop/x.desktop", "Maildir/new/x"),
        *("node_modules/x/index.js", "R/x86_64/x/R/x", "perl5/lib/x.pm", "octave/x", "Documents/x"),
        *("objects/x", "refs/x", "HEAD", "config", "hooks/post-checkout", "__pycache__/x.pyc"),
        *("Makefile", "conftest.py", "sitecustomize.py", "package.json", "pyproject.toml", "a.sh"),
        *("CMakeLists.txt", "requirements.txt", "Justfile", "compose.yaml", "go.mod"),
        *("miniconda3/bin/conda", "my-anaconda/x", "miniforge3/x", "json/x.py", "torch/x.py", "gensim-data/x.py", "a;b/x"),
        *("venv/bin/activate", "site-packages/x.pth", "-rf/x", "~/x", "$HOME/x", "\x1b[31m/x"),
        *(".zshenv", "..x/y", "google-cloud-sdk/path.bash.inc", "lib/libc.so.6", "_darcs/prefs/x"),
        *("sitecustomize/__init__.py", "usercustomize/x", "common-lisp/x.asd", "privatemodules/x"),
    ],
)  # fmt: skip
def test_what_something_could_obey_stays(machine: Machine, name: str) -> None:
    machine.entries.begin()
    machine.write(name)
    moved, left = machine.entries.finish()
    assert (machine.listed(), moved) == ([], "")
    assert str(machine.kept) in left
    assert left.isprintable()


def test_what_start_files_settings_and_links_name_stays(machine: Machine) -> None:
    (machine.home / ".bashrc").write_text('[ -f "$HOME/tools/env.sh" ] && . ~/tools/env.sh\n')
    (machine.home / ".profile").write_text("cd\nsource setup.txt\n. other.txt; python app/x.py\n")
    (machine.home / ".config/systemd/user").mkdir(parents=True)
    (machine.home / ".config/systemd/user/x.service").write_text("ExecStart=%h/daemon/run\n")
    (machine.home / ".ssh").mkdir()
    (machine.home / ".ssh/config").symlink_to("../dotfiles/ssh")
    (machine.home / ".zshrc").symlink_to(machine.home / "zsh files/zshrc")
    (machine.home / ".bash_history").write_text("ls ~/results\n")
    named = machine.home.parent / "settings.toml"
    named.write_text(f'key = "{machine.home}/keys/service.txt"\n')
    (machine.home / ".zprofile").write_text("source $HOME/my\\ tools/env.sh; . ~/'your tools'/x\n")
    (machine.home / ".pyenv/versions/3/lib/python3.11/site-packages/mine").mkdir(parents=True)
    names = (
        "my tools/env.sh",
        "your tools/x",
        "mine/x.py",
        "tools/env.sh",
        "setup.txt",
        "other.txt",
        "app/x.py",
        "daemon/run",
        "dotfiles/ssh",
    )
    more = ("zsh files/zshrc", "keys/service.txt", "cavvy/settings.toml", "server.log")
    machine.write(*names, *more, "results/x")
    obeyed = (named, machine.home / "cavvy/settings.toml", machine.home / "server.log")
    assert machine.open(*obeyed).begin().endswith(": results")
    assert [each for each in machine.listed() if not each.startswith(".")] == ["results"]


def test_caches_that_work_can_write_are_not_read(machine: Machine) -> None:
    cache, last = machine.home / ".config/wandb", machine.home / ".config/x/settings"
    for path in (cache, last.parent):
        path.mkdir(parents=True)
    for number in range(600):
        (cache / f"{number}").write_text("~/results/x")
    last.write_text("file = ~/tools/x")
    machine.write("tools/x", "results/x")
    assert machine.entries.begin().endswith(": results")


def test_entries_that_cannot_be_moved_do_not_keep_the_others(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.entries.begin()
    machine.write("a.txt", "b/x", "c/x")
    rename = os.rename

    def refuse(name: str, to: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        if name == "b":
            raise PermissionError(13, "the folder is read-only")
        rename(name, to, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(os, "rename", refuse)
    moved, left = machine.entries.finish()
    assert moved.endswith(": a.txt and c")
    assert ": b, in" in left


def test_names_behind_links_of_the_work_are_not_told(machine: Machine, tmp_path: Path) -> None:
    machine.entries.begin()
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden/secret").write_text("x")
    (machine.kept / ".local").symlink_to(tmp_path / "hidden")
    left = machine.entries.finish()[1]
    assert left == ""


def test_links_devices_and_other_names_of_a_file_stay(machine: Machine, tmp_path: Path) -> None:
    machine.entries.begin()
    (machine.kept / "results").symlink_to("/etc")
    (machine.kept / "log.txt").symlink_to(machine.home / ".bashrc")
    os.mkfifo(machine.kept / "fifo.txt")
    (tmp_path / "one").write_text("another file")
    os.link(tmp_path / "one", machine.kept / "linked.txt")
    machine.write("set.txt", "foreign.txt")
    (machine.kept / "set.txt").chmod(0o4755)
    names = ["linked.txt", "log.txt", "set.txt"]  # `results` holds nothing itself
    if os.getuid() == 0:
        os.chown(machine.kept / "foreign.txt", 65534, 65534)
        names = ["foreign.txt", *names]
    left = machine.entries.finish()[1]
    assert not {*names, "results", "fifo.txt"} & set(machine.listed())
    assert names[0] in left
    assert sorted({*names, "fifo.txt"} - {*os.listdir(machine.kept)}) == []


def test_nothing_is_replaced_or_filled(machine: Machine) -> None:
    machine.entries.begin()
    machine.write("results/x", "model.pt", "link/x", "log.txt", "data/x")
    (machine.home / "results").mkdir()
    (machine.home / "model.pt").write_text("mine")
    (machine.home / "link").symlink_to("results")
    (machine.home / "log.txt").symlink_to("nothing")
    (machine.home / "data").write_text("mine")
    moved, left = machine.entries.finish()
    assert moved == ""
    assert "data, link, log.txt and 2 more" in left
    assert os.listdir(machine.home / "results") == []
    assert (machine.home / "model.pt").read_text() == (machine.home / "data").read_text() == "mine"
    assert not (machine.home / "nothing").exists()
    assert (machine.kept / "results/x").exists()


def test_other_work_of_the_project_keeps_the_entries_until_it_ends(machine: Machine) -> None:
    other = machine.open()
    machine.entries.begin()
    other.begin()
    machine.write("results/x")
    moved, left = machine.entries.finish()
    assert (moved, machine.listed()) == ("", [])
    assert "when this project's other jobs on this machine have ended" in left
    assert other.finish()[0].endswith(": results")
    assert machine.listed() == ["results"]


def test_an_interrupted_move_goes_on(machine: Machine) -> None:
    stage = Path(str(machine.kept) + ".moving")
    (stage / "results").mkdir(parents=True)
    (stage / "results/x").write_text("x")
    assert machine.entries.begin().endswith(": results")
    assert (machine.home / "results/x").exists()


def test_a_full_disk_leaves_folders_with_their_names(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.write("results/x")
    mkdir = os.mkdir

    def fail(path: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        if dir_fd is not None:
            raise OSError(errno.ENOSPC, "No space left on device")
        mkdir(path, mode)

    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", fail)
        assert machine.entries.begin() == ""
    assert os.listdir(machine.kept) == ["results"]
    assert machine.entries.finish()[0].endswith(": results")
    assert (machine.home / "results/x").exists()


def test_an_entry_that_is_exchanged_after_the_first_look_stays(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.entries.begin()
    machine.write("results/x", "late.txt")
    rename = os.rename

    def exchange(name: str, to: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        if (machine.kept / "results").is_dir() and name == "results":
            rename(machine.kept / "results", machine.kept / "elsewhere")
            (machine.kept / "results").symlink_to("/etc")
        rename(name, to, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(os, "rename", exchange)
    machine.entries.finish()
    assert "results" not in machine.listed()
    assert (machine.kept / "results").is_symlink()


def test_names_of_data() -> None:
    assert all(map(is_data, ("results", "out", "runs", "checkpoints", "llama-3.1 8B", "结果")))
    assert not is_named("results", "see ~/results-old, my.results and results\n")
    assert is_named("results", "PATH=$HOME/results:$PATH")
