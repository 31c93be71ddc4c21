"""What a device takes from its server."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cavvy.capabilities.edge.on_device import device
from cavvy.capabilities.edge.on_device.bundle import make_script
from cavvy.capabilities.edge.on_device.device import DeviceProgram
from cavvy.capabilities.edge.on_device.documents import PeersTold, WantedVersion, read_answer


def test_the_wanted_models_are_read() -> None:
    told = {"name": "m", "number": 2, "mib_per_s": 1, "window": [22, 6], "later": "ignored"}
    [wanted] = read_answer(json.dumps({"models": [told]}).encode(), "p").models
    assert wanted == WantedVersion(
        name="m", number=2, mib_per_s=1.0, window=(22, 6), site_window=()
    )


@pytest.mark.parametrize(
    "model",
    [
        {"name": "../../home/me", "number": 1},
        {"name": "/etc", "number": 1},
        {"name": "", "number": 1},
        {"name": 1, "number": 1},
        {"name": "m"},
        {"name": "m", "number": [1]},
        {"name": "m", "number": 1e999},
        {"name": "m", "number": 1, "window": 3},
        {"name": "m", "number": 1, "collect_below": "x"},
        "m",
        None,
    ],
)
def test_no_answer_of_the_server_ends_the_program(model: object) -> None:
    for answer in ({"models": [model]}, {}, [], None):
        with pytest.raises(ValueError):
            read_answer(json.dumps(answer).encode(), "p")


def test_the_token_is_not_among_the_arguments_of_the_program() -> None:
    lines = make_script("https://h", ("p", "k"), "0" * 64).splitlines()
    [started] = [line for line in lines if line.startswith("exec") and "https://h" in line]
    assert "$1" not in started  # any user of the device can list arguments


# a fetch, and the `trtexec` that it has started
FETCH = """#!/bin/sh
sleep 1000 &
echo $! >"{file}.new"
mv "{file}.new" "{file}"
wait
"""


def is_running(pid: str) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_what_a_fetch_has_started_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, each night's fetch, which the end of the site's hours cuts, would leave one more
    `trtexec` that builds for an hour."""
    started, program, over = tmp_path / "pid", tmp_path / "python", threading.Event()
    program.write_text(FETCH.format(file=started))
    program.chmod(0o755)
    monkeypatch.setattr(device.sys, "executable", str(program))
    asked = SimpleNamespace(
        folder=str(tmp_path),
        options={"every_s": 60.0, "look_s": 0.02},
        _over=over,
        _peers=PeersTold(),
        _look=lambda: over.set() if started.exists() else None,
    )
    wanted = WantedVersion(name="m", number=1)
    assert not DeviceProgram._fetch(cast(Any, asked), "m", 1, wanted)
    ended, pid = threading.Event(), started.read_text().strip()
    while is_running(pid):
        ended.wait(0.02)


def test_a_fetch_ends_when_the_program_of_the_device_is_killed() -> None:
    pytest.importorskip("tuf", reason="the extra `edge` is not installed: make setup-dev")
    code = (
        "import subprocess; from cavvy.capabilities.edge.on_device import update; "
        "update.end_with_parent(); print('fetches', flush=True); subprocess.run(['sleep', '1000'])"
    )
    line = f'setsid "{sys.executable}" -c "{code}" & wait'
    parent = subprocess.Popen(["sh", "-c", line], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "fetches\n"
    parent.kill()
    parent.wait()
    assert parent.stdout.read() == "", "until all that write there have ended"
    parent.stdout.close()
