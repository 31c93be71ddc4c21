"""The programs that a host gets are compared with their names before each use, on the host alike by
its shell and by its supervisor.
"""

import gzip
import hashlib
import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from cavvy.providers.hosts import bundles
from cavvy.providers.hosts.ssh_link import UNPACK
from cavvy.providers.hosts.supervisor.files import ChangedProgram, check_programs
from cavvy.providers.join.remote.machine import _is_intact

SCRIPT = Path(bundles.__file__).with_name("ssh_link.sh")
FILES = {"bin/python3": b"program", "lib/loader": b"loader", "lib/python3/os.py": b"import sys\n"}


def pack() -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name, data in FILES.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return gzip.compress(content.getvalue())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A host's folder with an agent and an unpacked Python."""
    folder = tmp_path / "folder"
    python = folder / (bundles._hash_files(pack())[:20] + ".python")
    for name, data in FILES.items():
        (python / name).parent.mkdir(parents=True, exist_ok=True)
        (python / name).write_bytes(data)
    (folder / bundles.make_bundle(b"agent", ".pyz").name).write_bytes(b"agent")
    return folder


def change(path: Path, how: str) -> None:
    python = path / "lib/python3"
    match how:
        case "content":
            path.write_bytes(b"other")
        case "link":
            path.rename(path.with_name("theirs"))
            path.symlink_to("theirs")
        case "dead link":
            path.unlink()
            path.symlink_to("nothing")
        case "folder":
            path.unlink()
            (path / "inner").mkdir(parents=True)
        case "pipe":
            path.unlink()
            os.mkfifo(path)
        case "module":
            (python / "os.py").write_bytes(b"import evil\n")
        case "further module":
            (python / "site.py").write_bytes(b"import evil\n")
        case "compiled module":
            (python / "__pycache__").mkdir()
            (python / "__pycache__/os.cpython-311.pyc").write_bytes(b"evil")
        case "link to a module":
            (python / "json").symlink_to("/tmp/evil")


CHANGES = [
    *((".pyz", how) for how in ("content", "link", "dead link", "folder", "pipe")),
    *(
        (".python", how)
        for how in ("module", "further module", "compiled module", "link to a module")
    ),
]


def ask(folder: Path) -> set[str]:
    """Which of its files the host says it has."""
    names = [each.name for each in folder.iterdir()]
    done = subprocess.run(
        ["sh", "-s", str(folder), "mark", "host", *names],
        input=SCRIPT.read_text(),
        capture_output=True,
        text=True,
        check=True,
    )
    return {line[4:] for line in done.stdout.splitlines() if line.startswith("has=")}


def list_programs(folder: Path) -> list[str]:
    names = sorted(each.name for each in folder.iterdir() if each.suffix in (".pyz", ".python"))
    return [f"{folder}/{name}" + ("/bin/x" if name.endswith("python") else "") for name in names]


def test_unchanged_programs_are_used(folder: Path) -> None:
    before = {each.name for each in folder.iterdir()}
    assert ask(folder) == before
    check_programs(["/usr/bin/python3", "-I", *list_programs(folder), "/x/config.json"])


@pytest.mark.parametrize(("suffix", "how"), CHANGES)
def test_a_changed_program_is_removed_and_asked_for_again(
    folder: Path, suffix: str, how: str
) -> None:
    (path,) = (each for each in folder.iterdir() if each.suffix == suffix)
    command = list_programs(folder)
    change(path, how)
    assert path.name not in ask(folder)
    assert not os.path.lexists(path)
    assert all(each in ("theirs", "mark") or suffix not in each for each in os.listdir(folder))
    assert len(command) == 2


@pytest.mark.parametrize(("suffix", "how"), CHANGES)
def test_a_supervisor_starts_no_changed_program(folder: Path, suffix: str, how: str) -> None:
    (path,) = (each for each in folder.iterdir() if each.suffix == suffix)
    command = list_programs(folder)
    change(path, how)
    with pytest.raises(ChangedProgram, match="sent again"):
        check_programs(command)
    assert not os.path.lexists(path)


@pytest.mark.parametrize("how", ["content", "link", "dead link", "folder", "pipe"])
def test_a_joined_machine_fetches_a_changed_program_again(tmp_path: Path, how: str) -> None:
    path, digest = tmp_path / "agent", hashlib.sha256(b"agent").hexdigest()
    path.write_bytes(b"agent")
    assert _is_intact(str(path), digest)
    change(path, how)
    assert not _is_intact(str(path), digest)
    assert not os.path.lexists(path)


def test_a_python_that_is_sent_twice_at_the_same_time_stays_as_it_is(tmp_path: Path) -> None:
    """The first try took longer than its time limit, and ends beside the second one."""
    packed = pack()
    target = tmp_path / (bundles._hash_files(packed)[:20] + ".python")
    for _ in range(2):
        script = f'cat >"$1.$$"; {UNPACK}'
        subprocess.run(["sh", "-euc", script, "sh", target], input=packed, check=True)
    check_programs([f"{target}/bin/python3"])
    assert list(tmp_path.iterdir()) == [target]
