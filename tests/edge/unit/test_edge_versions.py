"""How the program of a device updates itself: a version that ends, hangs, or does not serve what was
served gives way to the former one, and no loss of power leaves a device without a program."""

import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tuf", reason="the extra `edge` is not installed: make setup-dev")

from tests.edge.unit.test_edge_start import start as run_script
from tests.edge.unit.test_edge_update import cut_at_each_step
from tests.edge.unit.test_model_repository import Site

from cavvy.capabilities.edge.on_device import device, update
from cavvy.capabilities.edge.on_device import program as module
from cavvy.capabilities.edge.on_device.__main__ import main
from cavvy.capabilities.edge.on_device.bundle import pack_device
from cavvy.capabilities.edge.on_device.program import (
    AGAIN,
    PROGRAM,
    ProgramVersions,
    choose,
    hold,
    open_slots,
)
from cavvy.capabilities.edge.on_device.slots import (
    LIST,
    PACKAGES,
    TRIES,
    ModelSlots,
    hash_file,
    write_json,
)

# In place of `device.py`: notes that it ran, and then does what its kind says.
STUB = """
import os, signal, sys, time
from cavvy.edge.program import ProgramVersions
def run(folder):
    versions = ProgramVersions(folder)
    with open(folder + "/ran", "a") as file:
        file.write(f"{versions.number}\\n")
    with open(folder + "/had", "a") as file:
        file.write(f"{versions.number} {os.environ.get('CAVVY_EDGE_PACKAGES', '')}\\n")
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    KIND
    return 0
"""
# writes the program that the script expects
CURL = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
printf packed >"$2"
"""
KINDS = {
    "good": "versions.checked_in(['m'], 60.0)",
    "offline": "pass",
    "ends": "os._exit(3)",
    "hangs": "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)",
    "waits": "time.sleep(600)",
    "serves-nothing": "versions.checked_in([], 60.0); time.sleep(600)",
    "stays": """versions.checked_in(['m'], 60.0); left = []
    signal.signal(signal.SIGTERM, lambda *_: left.append(0))
    while not left:
        time.sleep(0.01)
        if os.path.exists(folder + "/go"):
            versions.hand_over(2, [])
            return 75""",
    "asks": "versions.checked_in(['m'], 60.0); versions.hand_over(2, []); return 75",
}


def pack(kind: str) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(pack_device())) as old, zipfile.ZipFile(made, "w") as new:
        for each in old.namelist():
            stub = each == "cavvy/edge/device.py"
            new.writestr(each, STUB.replace("KIND", KINDS[kind]) if stub else old.read(each))
    return made.getvalue()


def put(folder: Path, number: int, kind: str, packages: str = "") -> Path:
    slots = open_slots(str(folder))
    path = Path(slots.prepare(number), "files", "program.zip")
    path.parent.mkdir(parents=True)
    path.write_bytes(pack(kind))
    file = {"path": "program.zip", "sha256": hash_file(str(path)), "size": 1}
    told = {"packages": packages, "python": sys.implementation.cache_tag}
    whole = {"model": PROGRAM, "number": number, "main": "program.zip", "files": [file]}
    slots.finish(whole | told)
    return path


def begin(folder: Path, kind: str, every_s: float = 60.0) -> "subprocess.Popen[bytes]":
    (folder / "program.zip").write_bytes(pack(kind))
    write_json(f"{folder}/edge.json", {"every_s": every_s})
    environ = {**os.environ, "PYTHONPATH": f"{folder}/program.zip"}
    line = [sys.executable, "-m", "cavvy.edge", str(folder)]
    return subprocess.Popen(line, env=environ, stderr=subprocess.DEVNULL)


def start(folder: Path, kind: str, every_s: float = 60.0) -> int:
    return begin(folder, kind, every_s).wait()


def list_runs(folder: Path) -> list[int]:
    path = folder / "ran"
    found = [int(line) for line in path.read_text().split()] if path.exists() else []
    path.unlink(missing_ok=True)
    return found


@pytest.mark.parametrize(
    ("kind", "base", "every_s", "runs", "serving", "refused"),
    [
        ("good", "good", 60.0, [1], 1, 0),
        ("ends", "good", 60.0, [1, 1, 1, 0], 0, 1),
        ("waits", "good", 0.2, [1, 0], 0, 1),
        ("serves-nothing", "good", 0.2, [1, 0], 0, 1),
        # the server cannot be reached: the version may be good, and is tried again later
        ("hangs", "offline", 0.2, [1, 0], 0, 0),
        ("offline", "good", 60.0, [1], 0, 0),  # ended in good order
    ],
)
def test_a_version_that_does_not_check_in_and_serve_gives_way_to_the_former_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    base: str,
    every_s: float,
    runs: Sequence[int],
    serving: int,
    refused: int,
) -> None:
    put(tmp_path, 1, kind)
    ProgramVersions(str(tmp_path)).hand_over(1, ["m"])
    assert start(tmp_path, base, every_s) == 0
    assert list_runs(tmp_path) == runs
    slots = open_slots(str(tmp_path))
    assert (slots.serving, slots.refused) == (serving, refused)
    versions = ProgramVersions(str(tmp_path))
    assert versions.want(1, 0) is not bool(refused)
    assert versions.want(1, 1)  # a user asks for the same bytes again
    if refused:
        assert versions.tell()[0].refused == 1
        assert versions.tell()[0].problem


def test_an_accepted_version_starts_the_next_one_and_a_damaged_one_is_not_started(
    tmp_path: Path,
) -> None:
    first = put(tmp_path, 1, "asks")
    ProgramVersions(str(tmp_path)).hand_over(1, ["m"])
    assert open_slots(str(tmp_path)).begin_trial(1)
    open_slots(str(tmp_path)).accept(1)
    second = put(tmp_path, 2, "good")
    # the accepted version replaces the process, asks for the next one, and is not started again
    assert start(tmp_path, "offline") == 0
    assert list_runs(tmp_path) == [1, 2]
    assert open_slots(str(tmp_path)).serving == 2
    second.write_bytes(b"damaged")
    first.write_bytes(pack("asks")[:-9])
    assert start(tmp_path, "good") == 0
    assert list_runs(tmp_path) == [0]


def test_an_accepted_version_that_was_damaged_and_fetched_again_is_not_on_trial(
    tmp_path: Path,
) -> None:
    """Otherwise, each start would count as a trial, and the next fetch would remove its files."""
    damaged = put(tmp_path, 1, "good")
    open_slots(str(tmp_path)).accept(1)
    damaged.write_bytes(b"damaged")
    assert start(tmp_path, "good") == 0
    assert list_runs(tmp_path) == [0]
    fresh = put(tmp_path, 1, "good")
    ProgramVersions(str(tmp_path)).hand_over(1, ["m"])
    for _ in range(TRIES + 2):
        assert start(tmp_path, "good") == 0
    assert list_runs(tmp_path) == [1] * (TRIES + 2)
    slots = open_slots(str(tmp_path))
    assert (slots.serving, slots.trial, slots.refused) == (1, 0, 0)
    assert f"/{slots.spare()}/" not in str(fresh)


def test_the_accepted_version_runs_if_another_one_cannot_be_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, 1, "good")
    open_slots(str(tmp_path)).accept(1)
    put(tmp_path, 2, "good")
    ProgramVersions(str(tmp_path)).hand_over(2, [])
    ran: list[str] = []

    def fail(slots: ModelSlots, number: int) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ModelSlots, "begin_trial", fail)
    monkeypatch.setattr(module, "_replace", lambda *given: ran.append(given[3]))
    choose(str(tmp_path), 0)
    assert ran[0] == {"CAVVY_EDGE_NUMBER": "1", PACKAGES: ""}


def test_each_version_runs_with_its_own_packages(tmp_path: Path) -> None:
    """A version whose packages break it gives way to the former one with the former packages."""
    places = {0: "", 1: f"{tmp_path}/packages/old", 2: f"{tmp_path}/packages/new"}
    for number, kind in ((1, "good"), (2, "ends")):
        Path(places[number]).mkdir(parents=True)
        write_json(f"{places[number]}/{LIST}", {})
        put(tmp_path, number, kind, Path(places[number]).name)
        ProgramVersions(str(tmp_path)).hand_over(number, [])
        assert start(tmp_path, "good") == 0
    ran = [line.split(maxsplit=1) for line in (tmp_path / "had").read_text().splitlines()]
    assert [int(number) for number, *_ in ran] == [1, *[2] * TRIES, 1]
    assert all(has == [places[int(number)]] for number, *has in ran)
    (Path(places[1]) / LIST).unlink()
    assert start(tmp_path, "good") == 0
    assert (tmp_path / "had").read_text().splitlines()[-1].strip() == "0"


def test_who_enrols_a_device_again_does_not_disturb_its_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The versions go only when no program of the device runs."""
    path = put(tmp_path / "device", 1, "good")
    open_slots(str(tmp_path / "device")).accept(1)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    ended = run_script(tmp_path, CURL, CAVVY_EDGE_PYTHON=str(python))
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "device/program.zip").exists()
    assert path.exists()
    folder = str(tmp_path / "device")
    monkeypatch.setattr(device, "enrol", lambda *_: {"device": "d", "site": "s"})
    monkeypatch.setattr(device, "run", lambda _: 0)
    lock = hold(folder)
    assert main([folder, "https://server", "pin"]) == 1
    assert path.exists()
    os.close(lock)
    assert main([folder, "https://server", "pin"]) == 0
    assert not path.exists()


def test_a_signal_during_a_trial_ends_all_and_is_no_failed_trial(tmp_path: Path) -> None:
    put(tmp_path, 1, "waits")
    ProgramVersions(str(tmp_path)).hand_over(1, [])
    process = begin(tmp_path, "good")
    while not (tmp_path / "ran").exists():
        time.sleep(0.02)
    # a second program does not disturb the trial
    assert start(tmp_path, "good") == 1
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 0
    assert list_runs(tmp_path) == [1]
    state = json.loads((tmp_path / "program/slots/state.json").read_text())
    assert (state["trial"], state["tries"]) == (1, 0)


def catches(process: Path, number: int) -> bool:
    """Whether a process handles a signal, by its folder in /proc."""
    found = re.search(r"^SigCgt:\s*([0-9a-f]+)", (process / "status").read_text(), re.M)
    return found is not None and bool(int(found[1], 16) >> (number - 1) & 1)


@pytest.mark.parametrize(
    ("end", "code", "runs"), [("signal", 0, [1]), ("crash", 1, [1]), ("update", 0, [1, 2])]
)
def test_a_shell_waits_for_an_accepted_version_and_does_as_it_ends(
    tmp_path: Path, end: str, code: int, runs: Sequence[int]
) -> None:
    put(tmp_path, 1, "stays")
    ProgramVersions(str(tmp_path)).hand_over(1, [])
    process = begin(tmp_path, "offline")
    here = Path(f"/proc/{process.pid}")
    while (here / "comm").read_text() != "sh\n":
        assert process.poll() is None
        time.sleep(0.01)
    children = (here / f"task/{process.pid}/children").read_text().split()
    assert len(children) == 1
    while not catches(here, signal.SIGTERM):  # the shell sets its trap
        time.sleep(0.01)
    assert start(tmp_path, "offline") == 1, "the folder is still held"
    if end == "signal":
        process.send_signal(signal.SIGTERM)
    elif end == "crash":
        os.kill(int(children[0]), signal.SIGKILL)
    else:
        put(tmp_path, 2, "good")
        (tmp_path / "go").touch()
    assert process.wait() == code
    assert list_runs(tmp_path) == runs
    assert open_slots(str(tmp_path)).serving == runs[-1]


def test_a_signal_while_a_version_starts_ends_the_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, made = put(tmp_path, 1, "waits"), list[subprocess.Popen[bytes]]()
    open_slots(str(tmp_path)).propose(1)

    def begin_and_signal(*given: Any, **more: Any) -> "subprocess.Popen[bytes]":
        made.append(popen(*given, **more))
        os.kill(os.getpid(), signal.SIGTERM)
        return made[0]

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", begin_and_signal)
    lock, known = hold(str(tmp_path)), signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        assert module._try(str(tmp_path), lock, 1, str(path)) == 0
        assert made[0].poll() is not None
    finally:
        made[0].kill()
        made[0].wait()
        signal.signal(signal.SIGTERM, known)
        os.close(lock)


def test_no_loss_of_power_leaves_a_device_without_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each step of a fetch, the hand-over, the trial and the acceptance."""
    contents = {1: b"program one", 2: b"program two!"}
    site = Site()
    for number, content in contents.items():
        site.publish(number, "program.zip", contents={"program.zip": content}, model=PROGRAM)
    monkeypatch.setattr(
        update,
        "read_manifest",
        lambda *given: json.loads(site.manifests[f"{PROGRAM}/{given[3]}"]),
    )
    ran: list[int] = []

    def run(folder: str, path: str, number: int) -> None:
        assert Path(path).read_bytes() == contents[number]
        assert path.startswith(folder)
        ran.append(number)

    def try_version(folder: str, lock: int, number: int, path: str) -> int:
        run(folder, path, number)
        ProgramVersions(folder)  # as a version on trial does
        open_slots(folder).accept(number)
        return AGAIN

    def replace(folder: str, lock: int, path: str, variables: dict[str, str]) -> None:
        run(folder, path, int(variables["CAVVY_EDGE_NUMBER"]))
        raise SystemExit

    monkeypatch.setattr(module, "_try", try_version)
    monkeypatch.setattr(module, "_replace", replace)

    def boot(folder: Path) -> int:
        """Start the device, and return the number of the version that runs in the end."""
        ran.clear()
        try:
            assert choose(str(folder), 0) is None
        except SystemExit:
            return ran[-1]
        return 0

    def act(folder: Path, number: int = 2) -> None:
        versions = ProgramVersions(str(folder))
        if versions.slots.serving != number:
            if versions.slots.find(number) is None:
                update.fetch_with(site, str(folder), PROGRAM, number)  # type: ignore[arg-type]
                versions.fetched(None)
            versions.hand_over(number, [])
        boot(folder)

    def check(folder: Path, cut: bool) -> None:
        assert boot(folder) in ((1, 2) if cut else (2,))
        act(folder)
        assert boot(folder) == 2

    (tmp_path / "begin").mkdir()
    act(tmp_path / "begin", 1)
    assert boot(tmp_path / "begin") == 1
    assert cut_at_each_step(tmp_path, monkeypatch, act, check) > 40, "the update was not cut"


def test_a_program_that_is_not_signed_is_not_fetched(tmp_path: Path) -> None:
    """Neither one that the signed lists do not name, nor other bytes than they name."""
    site = Site()
    site.publish(1, "program.zip", contents={"program.zip": b"good"}, model=PROGRAM)
    with pytest.raises(ValueError, match="no version 2"):
        update.fetch_with(site, str(tmp_path), PROGRAM, 2)  # type: ignore[arg-type]
    site.blobs[next(iter(site.blobs))] = b"evil"
    with pytest.raises(ValueError, match="another SHA-256"):
        update.fetch_with(site, str(tmp_path), PROGRAM, 1)  # type: ignore[arg-type]
    assert ModelSlots(f"{tmp_path}/program/slots").find(1) is None
