"""What a model can reach while `cavvy model publish` converts it."""

import errno
import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import pytest

from cavvy.agent.work import confine
from cavvy.capabilities.models import conversion
from cavvy.capabilities.models.version_files import VersionFiles, copy_source
from cavvy.cli.view.failure import CommandFailure


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.skipif(not confine.is_able(), reason="needs Landlock (Linux 5.13)")
def test_a_hostile_model_writes_and_reads_nothing_of_the_user(tmp_path: Path) -> None:
    torch: Any = pytest.importorskip("torch")
    numpy: Any = pytest.importorskip("numpy")
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    home, folder = tmp_path / "home", tmp_path / "model"
    home.mkdir()
    folder.mkdir()
    secret, written = home / "secret", home / "written"
    secret.write_bytes(b"\x00\x00\x80\x3f" * 4)
    samples = tmp_path / "set.npz"
    numpy.savez(samples, x=numpy.ones((4, 3), "float32"))
    body = {
        "write": f'torch.save(x, "{written}")\n        return x * 2',
        "read": f'return x + torch.from_file("{secret}", False, 4).sum()',
        "none": "return x * 2",
    }
    for name, lines in body.items():
        source = tmp_path / f"{name}_model.py"
        source.write_text(
            "import torch\n\n\nclass Model(torch.nn.Module):\n"
            f"    def forward(self, x):\n        {lines}\n"
        )
        space: dict[str, Any] = {"__name__": f"{name}_model", "__file__": str(source)}
        exec(compile(source.read_text(), str(source), "exec"), space)
        torch.jit.script(space["Model"]()).save(str(folder / f"{name}.pt"))
    target = folder / "made.onnx"
    assert conversion.convert_confined(folder / "none.pt", "onnx", target, samples)["compared"] == 4
    assert target.is_file()
    for name in ("write", "read"):
        made = folder / f"{name}.onnx"
        try:
            conversion.convert_confined(folder / f"{name}.pt", "onnx", made, samples)
        except CommandFailure:
            continue
        # ONNX has no operation for what the model asks, so the exporter may leave it out
        assert name == "write"
    assert not written.exists()
    assert sorted(os.listdir(home)) == ["secret"]


# What code that has taken over a conversion may try. It prints what it could do.
REACHES = """
import ctypes, json, os, socket, sys
# without the first slash, since what a command names may be read
place, port, name, outside = "/" + sys.argv[1], int(sys.argv[2]), sys.argv[3], "/" + sys.argv[4]
done, refused = {}, {}
def attempt(what, act):
    try:
        done[what] = str(act())
    except OSError as error:
        refused[what] = error.errno
def call(number, *values):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, values)) < 0:
        raise OSError(ctypes.get_errno(), str(number))
unix, inet = socket.AF_UNIX, socket.AF_INET
attempt("path", lambda: socket.socket(unix).connect(place))
attempt("abstract", lambda: socket.socket(unix).connect("\\0" + name))
attempt("tcp", lambda: socket.create_connection(("127.0.0.1", port)))
attempt("udp", lambda: socket.socket(inet, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", port)))
attempt("name", lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))
attempt("listen", lambda: socket.socket(inet).bind(("127.0.0.1", 0)))
pair = socket.socketpair(unix, socket.SOCK_DGRAM)
attempt("pair", lambda: pair[0].connect(place))
x86 = os.uname().machine == "x86_64"
ring = ctypes.create_string_buffer(256)
attempt("ring", lambda: call(425, 8, ctypes.addressof(ring)))
attempt("keys", lambda: call(250 if x86 else 219, 0, -3, 0))
attempt("memory", lambda: call(29 if x86 else 194, 0x7EEE, 4096, 0))
attempt("parent", lambda: call(101 if x86 else 117, 0x4206, os.getppid(), 0, 0))
attempt("shared", lambda: os.listdir("/dev/shm"))
attempt("read", lambda: open(outside).read())
code = os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", "import socket; socket.socket()"])
print(json.dumps({"done": sorted(done), "refused": refused, "child": code}))
"""


@pytest.mark.skipif(not confine.is_able(), reason="needs Landlock (Linux 5.13) and seccomp")
def test_a_confined_program_reaches_no_other_program(tmp_path: Path) -> None:
    with TemporaryDirectory(prefix="cavvy-") as short, ExitStack() as stack:
        place, name, outside = f"{short}/socket", f"cavvy-{os.getpid()}", tmp_path / "outside"
        outside.write_text("mine")
        kinds = [(socket.AF_UNIX, place), (socket.AF_UNIX, f"\0{name}")]
        for kind, address in [*kinds, (socket.AF_INET, ("127.0.0.1", 0))]:
            server = stack.enter_context(socket.socket(kind))
            server.bind(address)
            server.listen()
        port = server.getsockname()[1]
        files, work = Path(short, "files"), Path(short, "work")
        files.mkdir()
        words = [sys.executable, "-c", REACHES, place[1:], str(port), name, str(outside)[1:]]
        confine_it = [sys.executable, "-P", "-m", confine.__name__, "--strict", short]
        free, confined = (
            json.loads(subprocess.run([*before, *words], stdout=subprocess.PIPE, check=True).stdout)
            for before in ([], [*confine_it, str(files), str(work)])
        )
    assert {"path", "abstract", "tcp", "udp", "name", "listen", "read"} <= set(free["done"])
    assert free["child"] == 0 != confined["child"]
    assert confined["done"] == []
    assert set(confined["refused"].values()) == {errno.EACCES}


# the module that confines, and its packages
OWN = [
    "cavvy/__init__.py",
    "cavvy/agent/__init__.py",
    "cavvy/agent/work/__init__.py",
    "cavvy/agent/work/confine.py",
]


def test_a_module_of_the_working_folder_converts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cloned repository may have a folder `cavvy`, or a file `json.py`."""
    for name in (*OWN, "json.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"open({str(tmp_path / 'taken')!r}, 'w')")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/m.onnx").write_bytes(b"no model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(confine, "is_able", lambda: True)
    with pytest.raises(CommandFailure):
        conversion.convert_confined(tmp_path / "model/m.onnx", "", tmp_path / "made", None)
    assert not (tmp_path / "taken").exists()


def test_a_machine_that_cannot_confine_runs_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confine, "is_able", lambda: False)
    with pytest.raises(CommandFailure, match="cannot confine") as refused:
        conversion.convert_confined(tmp_path / "m.pt", "onnx", tmp_path / "m.onnx", None)
    assert "in a job" in refused.value.hint


@pytest.mark.parametrize("kind", ["link", "hard link", "pipe", "folder", "nothing"])
def test_only_a_plain_file_is_taken_from_a_conversion(tmp_path: Path, kind: str) -> None:
    secret, made, target = tmp_path / "secret", tmp_path / "made", tmp_path / "target"
    secret.write_text("secret")
    if kind == "link":
        made.symlink_to(secret)
    elif kind == "hard link":
        made.hardlink_to(secret)
    elif kind == "pipe":
        os.mkfifo(made)
    elif kind == "folder":
        made.mkdir()
    with pytest.raises(CommandFailure):
        conversion._take(made, target)
    assert not target.exists()


@pytest.mark.parametrize("said", ["", "[]", "null", '{"a": "x"}', "[" * 100_000, '{"a": {}}'])
def test_figures_of_a_hostile_model_are_refused(said: str) -> None:
    with pytest.raises(CommandFailure, match="figures"):
        conversion._read_figures(said)


def test_a_published_folder_does_not_follow_links_out_of_it(tmp_path: Path) -> None:
    no_client = cast(Any, None)  # only a job's checkpoint is read from a server
    source = tmp_path / "model"
    source.mkdir()
    (tmp_path / "id_ed25519").write_text("key")
    (source / "weights").write_text("w")
    (source / "inside").symlink_to("weights")
    copy_source(no_client, "p", VersionFiles(source), tmp_path / "good")
    (source / "deep").mkdir()
    (source / "deep" / "data").symlink_to("../../id_ed25519")
    with pytest.raises(CommandFailure, match="leads out of the folder"):
        copy_source(no_client, "p", VersionFiles(source), tmp_path / "bad")
