"""The Python packages of a version on a device: which wheels it takes, what of them it writes, and
what is left after a loss of power, damage and later versions."""

import io
import sys
import urllib.request
import zipfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("tuf", reason="the extra `edge` is not installed: make setup-dev")

from tests.edge.unit.test_edge_confine import LANDLOCK
from tests.edge.unit.test_edge_program import FakeServer, look, start
from tests.edge.unit.test_edge_update import OLD, StrictDisk, cut_at_each_step, read_served, update
from tests.edge.unit.test_model_repository import Site

from cavvy.capabilities.edge.on_device import packages as module
from cavvy.capabilities.edge.on_device.packages import (
    PackagesWrong,
    choose_files,
    install,
    is_wheel,
    this_target,
)
from cavvy.capabilities.edge.on_device.slots import LIST, ModelSlots, is_installed, packages_of
from cavvy.capabilities.edge.on_device.update import fetch_with

ENGINE = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
import needed
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(str(needed.VERSION).encode())
    def log_message(self, *_): pass
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
PI = "3.11-aarch64-2.36"
WHEEL = "packages/needed-1-py3-none-any.whl"


def make_wheel(**files: str) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return made.getvalue()


def make_version(text: str, early: str = "") -> dict[str, bytes]:
    files = {"needed/__init__.py": text, "needed-1.dist-info/METADATA": ""}
    wheel = make_wheel(**files, **{"sitecustomize.py": early})
    return {"m.onnx": text.encode(), WHEEL: wheel}


def find_packages(folder: Path, number: int) -> Path | None:
    main = ModelSlots(f"{folder}/models/m").find(number)
    return None if main is None else Path(packages_of(main))


@pytest.mark.parametrize(
    ("wheels", "chosen"),
    [
        (["a-1-cp311-cp311-manylinux_2_28_aarch64", "a-1-cp312-cp312-manylinux_2_28_aarch64"], 0),
        (["a-1-cp311-cp311-manylinux_2_17_x86_64", "a-1-py3-none-any"], 1),
        (["a-1-cp311-cp311-manylinux_2_38_aarch64", "a-1-cp38-abi3-manylinux2014_aarch64"], 1),
        (["a-1-py3-none-any", "a-1-7-cp311-cp311-manylinux2014_aarch64.manylinux_2_17_aarch64"], 1),
        (["a-1-cp311-abi3-linux_aarch64", "a-1-cp310-cp310-linux_aarch64"], 0),
        (["a-1-py2.py3-none-any"], 0),
        (["a-1-cp312-abi3-linux_aarch64"], "no wheel of a 1 for this device (3.11-aarch64-2.36)"),
        (["a-1-cp311-cp311-macosx_11_0_arm64", "b-1-py3-none-any"], "no wheel of a 1"),
        (["a-1-cp311-cp311-musllinux_1_2_aarch64"], "no wheel of a 1"),
        (["a-1-py4-none-any"], "no wheel of a 1"),
        (["a-1"], "not the name of a wheel"),
    ],
)
def test_a_device_takes_the_wheel_that_fits_it_best(
    wheels: list[str], chosen: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "abiflags", "", raising=False)
    files = [{"path": f"packages/{each}.whl"} for each in wheels]
    others = [{"path": "m.onnx"}, {"path": "deep/a-1-cp312-cp312-win32.whl"}]
    if isinstance(chosen, int):
        assert choose_files([*others, *files], PI) == [*others, files[chosen]]
        return
    with pytest.raises(PackagesWrong) as raised:
        choose_files([*others, *files], PI)
    assert chosen in str(raised.value)


def test_this_device_takes_what_pip_takes() -> None:
    tags = pytest.importorskip("pip._vendor.packaging.tags")
    files = [{"path": f"packages/a{n}-1-{each}.whl"} for n, each in enumerate(tags.sys_tags())]
    assert choose_files(files, this_target()) == files


def test_no_loss_of_power_leaves_a_version_without_its_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(folder: Path, cut: bool) -> None:
        if read_served(folder, contents) == 2:
            found = find_packages(folder, 2)
            assert found is not None
            assert is_installed(str(found))
        update(site, folder, 2)
        assert read_served(folder, contents) == 2
        found = find_packages(folder, 2)
        assert found is not None
        assert (found / "needed/__init__.py").read_text() == "VERSION = 2"
        assert [each.name for each in (folder / "packages").iterdir()] == [found.name]

    monkeypatch.setattr(StrictDisk, "piece", 10_000)  # other tests cut each piece of a file
    site = Site()
    contents = {1: OLD, 2: make_version("VERSION = 2")}
    for number, each in contents.items():
        site.publish(number, contents=each)
    update(site, tmp_path / "begin", 1)
    kinds = ("nothing", "all")
    act = partial(update, site, number=2)
    assert cut_at_each_step(tmp_path, monkeypatch, act, check, kinds) > 50


def test_packages_are_shared_and_go_with_the_last_version_that_has_them(tmp_path: Path) -> None:
    site = Site()
    versions = [make_version("1"), {**make_version("1"), "m.onnx": b"2"}, OLD, make_version("4")]
    for number, each in enumerate(versions, 1):
        site.publish(number, contents=each)
        site.sent.clear()
        update(site, tmp_path, number)
        if number == 2:
            assert len(site.sent) == 1, "a wheel that is here is not fetched again"
            assert find_packages(tmp_path, 1) == find_packages(tmp_path, 2)
        assert len(list((tmp_path / "packages").iterdir())) == 1
    found = find_packages(tmp_path, 4)
    assert found is not None
    assert (found / "needed/__init__.py").read_text() == "4"


def test_damaged_packages_give_way_to_the_other_version_and_are_installed_again(
    tmp_path: Path,
) -> None:
    site = Site()
    for number in (1, 2):
        site.publish(number, contents=make_version(f"VERSION = {number}"))
        update(site, tmp_path, number)
    found = find_packages(tmp_path, 2)
    assert found is not None
    (found / "needed/__init__.py").write_text("VERSION = 3")
    slots = ModelSlots(f"{tmp_path}/models/m")
    assert not slots.check(2)
    assert slots.serving == 1
    update(site, tmp_path, 2)
    assert (found / "needed/__init__.py").read_text() == "VERSION = 2"
    assert slots.check(2)


def test_packages_for_a_former_python_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site()
    site.publish(1, contents=make_version("1"))
    update(site, tmp_path, 1)
    before = find_packages(tmp_path, 1)
    monkeypatch.setattr(sys.implementation, "cache_tag", "cpython-399")
    slots = ModelSlots(f"{tmp_path}/models/m")
    assert (slots.find(1), slots.check(1)) == (None, False)
    update(site, tmp_path, 1)
    assert find_packages(tmp_path, 1) not in (None, before)


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("needed/../../../key", None),
        ("/etc/key", None),
        ("a//b", None),
        ("a/..", None),
        ("a-1.data/purelib/../../key", None),
        ("a-1.data/scripts/../../key", []),
        ("a-1.data/platlib/a/b.py", ["a/b.py"]),
        (f"a-1.data/purelib/{LIST}", []),
        ("a\\..\\b", ["a\\..\\b"]),
    ],
)
def test_a_hostile_wheel_writes_nothing_outside_its_folder(
    tmp_path: Path, name: str, written: list[str] | None
) -> None:
    (files := tmp_path / "files" / "packages").mkdir(parents=True)
    (tmp_path / "files" / WHEEL).write_bytes(make_wheel(**{name: "x"}))
    before = {*tmp_path.rglob("*")}
    if written is None:
        with pytest.raises(PackagesWrong, match="does not write"):
            install(str(tmp_path), str(files.parent), [WHEEL])
        made = {*tmp_path.rglob("*")} - before
        assert not [each for each in made if not each.is_dir()]
        return
    install(str(tmp_path), str(files.parent), [WHEEL])
    [target] = (tmp_path / "packages").iterdir()
    found = [str(each.relative_to(target)) for each in target.rglob("*") if each.is_file()]
    assert sorted(each for each in found if not each.endswith(".pyc")) == sorted([LIST, *written])
    assert is_installed(str(target))


def test_what_cannot_be_unpacked_is_wrong_and_a_full_disk_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path := tmp_path / WHEEL).parent.mkdir()
    good = make_wheel(**{"a.py": "x = 1"})
    twice = make_wheel(**{"a": "", "a/b": ""})
    with zipfile.ZipFile(packed := io.BytesIO(), "w", zipfile.ZIP_LZMA) as wheel:
        wheel.writestr("a.py", "x = 1")
    odd = packed.getvalue()
    for content in (b"", good[:-9], good.replace(b"x = 1", b"x = 2"), twice, odd):
        path.write_bytes(content)
        with pytest.raises(PackagesWrong):
            install(str(tmp_path / "d"), str(tmp_path), [WHEEL])
    path.write_bytes(good)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_MOST_ENTRIES", 0)
        with pytest.raises(PackagesWrong, match="more than 0 files"):
            install(str(tmp_path / "d"), str(tmp_path), [WHEEL])
    with monkeypatch.context() as patch:
        patch.setattr(module.shutil, "disk_usage", lambda _: SimpleNamespace(free=64 << 20))
        with pytest.raises(OSError, match="64 MiB free"):
            install(str(tmp_path / "d"), str(tmp_path), [WHEEL])
    install(str(tmp_path / "d"), str(tmp_path), [WHEEL])
    assert is_wheel(WHEEL)
    assert not is_wheel("packages/deep/a.whl")


def test_each_version_has_its_own_packages_and_a_broken_one_goes_back(tmp_path: Path) -> None:
    def ask(at: int) -> bytes:
        target = device.front.routes["m"][at]
        with urllib.request.urlopen(f"http://127.0.0.1:{target.port}") as reply:
            return bytes(reply.read())

    site, server = Site(), FakeServer()
    early = f"open({str(tmp_path / 'stolen')!r}, 'w')"  # Python runs it first of all
    for number, text in ((1, "VERSION = 1"), (2, "VERSION = 2"), (3, "raise ImportError")):
        site.publish(number, contents=make_version(text, early))
    update(site, tmp_path, 1)
    starting = start(tmp_path, server)
    device = next(starting)
    device.options |= {"engine": [sys.executable, "-c", ENGINE, "{port}"], "probation_s": 60.0}
    try:
        model = look(device)
        for number in (2, 3):
            fetch_with(site, str(tmp_path), "m", number)  # type: ignore[arg-type]
            model.fetched(None)
            server.models = [{"name": "m", "number": number}]
            device._check_in()
            if number == 2:
                assert (ask(0), ask(1)) == (b"2", b"1")
                server.models = [{"name": "m", "number": 1}]
                device._check_in()
            assert ask(0) == b"1"
        assert (model.slots.serving, model.slots.refused) == (1, 3)
        assert not LANDLOCK or not (tmp_path / "stolen").exists(), "it ran before it was confined"
    finally:
        next(starting, None)
