"""What the code of a model can reach on a device."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cavvy.agent.work import confine
from cavvy.agent.work.confine import VARIABLES
from cavvy.capabilities.edge.on_device.bundle import pack_device

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="Landlock and its users are Linux's"
)
NOBODY = 65534
LANDLOCK = confine._call(confine._MAKE, None, 0, 1) > 0
# What a model's `cavvy_process.py` may try. It prints the name of each thing that it could do.
HOSTILE = """
import ctypes, glob, json, os, signal, subprocess, sys
folder, agent = sys.argv[1], os.getppid()
done = {}
def attempt(name, act):
    try:
        done[name] = str(act())
    except BaseException:
        pass
def read(path):
    return open(path, "rb").read(8)
for name in ("device.key", "card.json", "edge.json", "settings.json", "samples.db", "lists/root.json", "user.txt"):
    attempt(name, lambda: read(f"{folder}/{name}"))
    attempt(f"../{name}", lambda: read(f"models/m/a/files/../../../../{name}"))
attempt("link", lambda: (os.symlink(f"{folder}/device.key", "l"), read("l")))
attempt("hard link", lambda: (os.link(f"{folder}/device.key", "/dev/shm/l"), read("/dev/shm/l")))
attempt("list", lambda: os.listdir(folder))
attempt("write", lambda: open(f"{folder}/models/m/a/files/model.onnx", "ab"))
attempt("replace", lambda: os.rename(f"{folder}/models/m/a", f"{folder}/models/m/b"))
attempt("environ", lambda: read(f"/proc/{agent}/environ"))
attempt("memory", lambda: open(f"/proc/{agent}/mem", "rb"))
attempt("descriptors", lambda: os.readlink(f"/proc/{agent}/fd/0"))
attempt("root", lambda: (os.setuid(0), read(f"{folder}/device.key")))
attempt("program", lambda: subprocess.check_output(["cat", f"{folder}/device.key"]))
attempt("secret", lambda: os.environ["CAVVY_SECRET"])
attempt("given", lambda: os.environ["TOKEN"] == "of the model" or missing)
attempt("model", lambda: read(f"{folder}/models/m/a/files/model.onnx"))
attempt("shared", lambda: open(f"/dev/shm/cavvy-{os.getpid()}", "w").close())
attempt("shared", lambda: os.unlink(f"/dev/shm/cavvy-{os.getpid()}"))
attempt("import", lambda: __import__("sqlite3"))
attempt("work", lambda: open(f"{os.environ['HOME']}/kept", "w").close())
attempt("kill", lambda: os.kill(agent, 0))
import resource
cores = resource.getrlimit(resource.RLIMIT_CORE)
print(json.dumps({"user": os.getuid(), "cores": cores, "done": done}))
"""
START = """
import sys
from cavvy.agent.work import confine
if sys.argv[1] == "without":
    confine.restrict = lambda *_: False
confine.main(sys.argv[2:])
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """The folder of a device, in one that other users can enter."""
    made = Path(tempfile.mkdtemp(prefix="cavvy-device-"))
    files = made / "models/m/a/files"
    files.mkdir(parents=True, mode=0o700)
    (files / "model.onnx").write_text("weights")
    (files / "hostile.py").write_text(HOSTILE)
    (made / "lists").mkdir(mode=0o700)
    for name in (
        "device.key",
        "card.json",
        "edge.json",
        "settings.json",
        "samples.db",
        "lists/root.json",
    ):
        (made / name).write_text("secret")
        (made / name).chmod(0o600)
    (made / "edge.json").chmod(0o644)  # an editor's
    (made / "user.txt").write_text("secret")
    (made / "program.zip").write_bytes(pack_device())
    (made / "program.zip").chmod(0o600)
    yield made
    shutil.rmtree(made)


def find_python() -> str:
    """Return a Python that other users can run, or skip."""
    for each in (sys.executable, "/usr/bin/python3"):
        code = "import sys; assert sys.version_info >= (3, 11)"
        with_it = [each, "-Ic", code]
        user = NOBODY if os.geteuid() == 0 else None
        try:
            subprocess.run(with_it, check=True, user=user, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        return each
    pytest.skip("no Python here can be run by other users")


def run(
    folder: Path, landlock: str, user: int | None = None, work: str = ""
) -> tuple[dict[str, Any], str]:
    python, files = find_python(), folder / "models/m/a/files"
    words = [str(folder), str(files), work, python, str(files / "hostile.py"), str(folder)]
    ended = subprocess.run(
        [python, "-c", START, landlock, *words],
        capture_output=True,
        text=True,
        cwd=folder,
        user=user,
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{folder}/program.zip",
            "CAVVY_SECRET": "secret",
            "TOKEN": "of the program",
            VARIABLES: json.dumps({"TOKEN": "of the model"}),
        },
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    # 1 keeps the kernel from starting the machine's program for crashes, 0 does not
    assert found["cores"] == [1, 1]
    return found, ended.stderr


def give(folder: Path) -> int | None:
    """Give the device to a user who is not root, and return it."""
    if os.geteuid() != 0:
        return None
    for inner, _, names in os.walk(folder):
        for each in (inner, *(f"{inner}/{name}" for name in names)):
            os.chown(each, NOBODY, NOBODY)
    return NOBODY


NEEDED = {"model", "shared", "import", "given"}


@pytest.mark.parametrize("landlock", ["with", "without"])
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_the_code_of_a_model_has_no_rights_of_a_device_that_runs_as_root(
    folder: Path, landlock: str
) -> None:
    for work in ("", "", "models/m/a/work", "models/m/a/work"):  # an engine is started again
        found, said = run(folder, landlock, work=work and str(folder / work))
        assert found["user"] in confine._USERS, said
        assert set(found["done"]) == NEEDED | ({"work"} if work else set()), found
    for path in folder.rglob("*"):
        opened = path.is_relative_to(folder / "models") or path.name == "program.zip"
        opened = opened and not path.is_relative_to(folder / "models/m/a/work")
        assert bool(path.stat().st_mode & 0o077) == opened, path


@pytest.mark.skipif(not LANDLOCK, reason="no Landlock here")
def test_the_code_of_a_model_reads_no_key_of_its_own_user(folder: Path) -> None:
    found, said = run(folder, "with", give(folder))
    assert set(found["done"]) - {"kill"} == NEEDED, found
    assert "cavvy edge" not in said


@pytest.mark.skipif(not LANDLOCK or os.geteuid() != 0, reason="needs root and Landlock")
def test_a_python_that_only_root_can_read_runs_with_landlock_alone(folder: Path) -> None:
    folder.chmod(0o700)
    (closed := folder.parent / f"{folder.name}-closed").mkdir(mode=0o700)
    try:
        folder = folder.rename(closed / "device")
        found, said = run(folder, "with")
        assert found["user"] == 0
        assert set(found["done"]) - {"kill"} == NEEDED, found
        assert f"no other user can read {closed}" in said
    finally:
        folder.rename(closed.parent / closed.name.removesuffix("-closed"))
        closed.rmdir()


def test_without_root_and_landlock_the_log_says_what_the_code_of_a_model_can_read(
    folder: Path,
) -> None:
    found, said = run(folder, "without", give(folder))
    assert "can read the key of this device" in said
    assert "secret" not in found["done"], "it gets no variables of the program"


TRTEXEC = """#!/bin/sh
new=${2#--saveEngine=}
cat "%s/device.key" 2>/dev/null && exit 0
case $(cat "${1#--onnx=}") in
link) ln -s "%s/device.key" "$new" ;;
pipe) mkfifo "$new" ;;
*) cp "${1#--onnx=}" "$new" ;;
esac
"""


@pytest.mark.skipif(not LANDLOCK, reason="no Landlock here")
@pytest.mark.parametrize("confined", [True, False])
def test_what_builds_an_engine_reads_no_key_and_gives_no_link(folder: Path, confined: bool) -> None:
    pytest.importorskip("tuf", reason="the extra `edge` is not installed: make setup-dev")
    from cavvy.capabilities.edge.on_device.slots import plan_of
    from cavvy.capabilities.edge.on_device.update import VersionWrong, build_plan

    tools = folder.parent / f"{folder.name}-tools"
    tools.mkdir(mode=0o755)
    try:
        (tool := tools / "trtexec").write_text(TRTEXEC % (folder, folder))
        tool.chmod(0o755)
        options = {"trtexec": str(tool)} | ({} if confined else {"confined": False})
        (folder / "edge.json").write_text(json.dumps(options))
        model = folder / "models/m/a/files/model.onnx"
        for content in ("link", "pipe", "weights"):
            model.write_text(content)
            if confined and content == "weights":
                build_plan(str(folder), str(model))
                assert Path(plan_of(str(model))).read_text() == "weights"
                continue
            with pytest.raises(VersionWrong, match="cannot build" if confined else "secret"):
                build_plan(str(folder), str(model))
            assert not Path(plan_of(str(model))).exists()
        assert not (folder / "models/m/a/work").exists()
    finally:
        shutil.rmtree(tools)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (["{out}/bin/python", "-m", "m"], {"{out}/bin/python", "{out}/bin", "{out}"}),
        (
            ["{out}/bin/python", "--at={out}/data"],
            {"{out}/bin/python", "{out}/bin", "{out}", "{out}/data"},
        ),
        (
            ["{out}/bin/python", "/", "{home}", "--up={home}/..", "device.key", "{home}/missing"],
            {"{out}/bin/python", "{out}/bin", "{out}"},
        ),
        (["{home}/run.sh"], {"{home}/run.sh"}),
    ],
)
def test_a_command_names_what_its_program_reads(
    tmp_path: Path, line: list[str], named: set[str]
) -> None:
    places = {"out": str(tmp_path / "out"), "home": str(tmp_path / "home")}
    for path in ("out/bin/python", "out/data", "out/pyvenv.cfg", "home/run.sh", "home/device.key"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    found = confine.find_named(places["home"], [each.format(**places) for each in line])
    assert set(found) == {each.format(**places) for each in named}
