"""The program of a device: wrong options, a taken port, a full disk, a wrong clock, a moved server,
and engines that end."""

import http.client
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.edge.unit.test_edge_slots import NEW, OLD, update

from cavvy.capabilities.edge.on_device import __main__ as main
from cavvy.capabilities.edge.on_device import device as module
from cavvy.capabilities.edge.on_device import front as module_front
from cavvy.capabilities.edge.on_device import settings, slots
from cavvy.capabilities.edge.on_device.device import (
    DeviceOptionInvalid,
    DeviceProgram,
    ModelEngine,
    RunningModel,
    enrol,
    free_port,
    read_options,
)
from cavvy.capabilities.edge.on_device.documents import CloudService, write
from cavvy.capabilities.edge.on_device.program import hold
from cavvy.capabilities.edge.on_device.server_calls import DeviceCalls, DeviceRefused
from cavvy.capabilities.edge.on_device.settings import ServerSettings, find_every_s
from cavvy.capabilities.edge.on_device.slots import ModelSlots
from cavvy.capabilities.edge.on_device.spool import open_spool

# It answers by hand: to import http.server would be most of what such a program computes.
ENGINE = """
import json, os, socket, sys
from contextlib import suppress
if open(sys.argv[1], "rb").read() == b"spoilt" or "BAD" in os.environ: sys.exit(1)
with open(os.environ["TMPDIR"] + "/seen-" + str(os.getpid()), "w") as file:
    json.dump(dict(os.environ), file)
listener = socket.create_server(("127.0.0.1", int(sys.argv[2])))
while True:
    connection, asked = listener.accept()[0], b""
    with connection, suppress(OSError):  # who asked may be gone
        while b"\\r\\n\\r\\n" not in asked and (more := connection.recv(65536)):
            asked += more
        status = b"200 OK" if asked.startswith(b"GET ") else b"501 Unsupported"
        connection.sendall(b"HTTP/1.0 " + status + b"\\r\\nContent-Length: 0\\r\\n\\r\\n")
"""


class FakeServer:
    """Answers check-ins with `models` and the time `now`, and has `settings` for the device."""

    def __init__(self) -> None:
        self.models: list[dict[str, Any]] = []
        self.now = module.time.time()
        self.told: dict[str, Any] = {}
        self.settings: dict[str, Any] = {"revision": ""}
        self.fetched = 0
        self.refusal: DeviceRefused | None = None
        self.key_is_missing = False  # of its secrets

    def call(self, method: str, path: str, body: Any = None) -> bytes:
        if self.refusal is not None:
            raise self.refusal
        if path.endswith("/settings"):
            self.fetched += 1
            if self.key_is_missing:
                raise OSError("the secret cannot be read (status 503)")
            return json.dumps(self.settings).encode()
        self.told = body
        revision = self.settings.get("revision", "")
        if self.settings.get("undecrypted"):
            revision = revision.removesuffix("-partial")
        return json.dumps({"now": self.now, "models": self.models, "settings": revision}).encode()


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def device(tmp_path: Path, server: FakeServer) -> Iterator[DeviceProgram]:
    """A device that serves m@1, and has m@2 whole in the other slot."""
    for number, content in ((2, NEW), (1, OLD)):
        update(ModelSlots(f"{tmp_path}/models/m"), number, content)
    yield from start(tmp_path, server)


def start(folder: Path, server: FakeServer) -> Iterator[DeviceProgram]:
    card = {"address": "https://127.0.0.1:1", "pin": "", "project": "p", "device": "d"}
    (folder / "card.json").write_text(json.dumps(card))
    options = {
        "listen": f"127.0.0.1:{free_port()}",
        "engine": [sys.executable, "-S", "-c", ENGINE, "{model}", "{port}"],
        "probation_s": 0,
    }
    (folder / "edge.json").write_text(json.dumps(options))
    made = DeviceProgram(str(folder))
    made._calls = server  # type: ignore[assignment]
    try:
        yield made
    finally:
        for each in made._models.values():
            each.stop()
        made.front.server_close()
        made._spool.close()


def look(device: DeviceProgram) -> RunningModel:
    device._look()
    return device._models["m"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"every_s": 0}', "expected a number from 0.01"),
        ('{"every_s": NaN}', "expected a number from 0.01"),
        ('{"probation_s": true}', "expected a number from 0 "),
        ('{"engine": "docker run"}', "a list of texts"),
        ('{"engine": ["run", "{x}"]}', "a list of texts"),
        ('{"cloud": 1}', "expected a text"),
        ('{"confined": 0}', "expected true or false"),
        ('{"spool_mib": true}', "expected a number"),
    ],
)
def test_wrong_options_are_told(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "edge.json").write_text(text)
    with pytest.raises(DeviceOptionInvalid, match=told):
        read_options(str(tmp_path))


def test_a_program_that_cannot_start_says_why(
    tmp_path: Path, device: DeviceProgram, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main.main([str(tmp_path)]) == 1
    assert "which `listen` in" in capfd.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main.main([str(tmp_path / "empty")]) == 1
    assert "card.json is missing or damaged" in capfd.readouterr().err


def test_a_second_program_in_a_folder_ends(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hold(str(tmp_path / "new"))
    assert main.main([str(tmp_path / "new"), "https://127.0.0.1:1", "", "token"]) == 1
    assert "another program runs this device" in capfd.readouterr().err


def test_a_device_takes_the_new_address_of_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Calls:
        def __init__(self, card: dict[str, str], folder: str) -> None:
            self.address = card["address"]

        def ask(self, *_: object) -> dict[str, str]:
            if self.address == "https://stranger":
                raise DeviceRefused("this enrolment token is unknown")
            return {"project": "p", "device": "d", "site": "lyon"}

    monkeypatch.setattr(module, "DeviceCalls", Calls)
    monkeypatch.setattr(module, "run_key", lambda *_: "0" * 64)
    for address in ("https://old", "https://new"):
        assert enrol(str(tmp_path), address, "pin", "token")["address"] == address
    assert enrol(str(tmp_path), "https://stranger", "pin", "token")["address"] == "https://new"
    with pytest.raises(DeviceRefused):
        enrol(str(tmp_path / "other"), "https://stranger", "pin", "token")


def test_a_full_disk_ends_neither_the_program_nor_what_it_serves(
    device: DeviceProgram, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    look(device)
    served = device.front.routes["m"]
    server.models = [{"name": "m", "number": 2}, {"name": "new", "number": 1}]
    with monkeypatch.context() as patch:
        patch.setattr(slots, "write_json", fail)
        patch.setattr(module.DeviceProgram, "_fetch", fail)
        device._check_in()
        look(device)
    assert device.front.routes["m"] == served
    assert device._models["m"].slots.serving == 1
    device._check_in()
    assert look(device).slots.serving == 2


@pytest.mark.parametrize("year", [-1, 1])
def test_a_wrong_clock_is_told_once(
    device: DeviceProgram, server: FakeServer, year: int, capfd: pytest.CaptureFixture[str]
) -> None:
    server.now -= year * 365 * 86400
    for _ in range(3):
        device._check_in()
    told = capfd.readouterr().err
    assert told.count("the clock of this device is 3153") == 1
    assert ("ahead of" if year > 0 else "behind") in told
    look(device)
    assert device.front.routes["m"]


def test_a_damaged_served_model_gives_way_to_the_other_one(device: DeviceProgram) -> None:
    model = device._models["m"]
    Path(str(model.slots.find(1))).write_bytes(b"spoilt")
    look(device)
    assert look(device).slots.serving == 2
    assert device.front.routes["m"][0].number == 2


def test_an_engine_that_is_missing_does_not_end_the_program(
    device: DeviceProgram, server: FakeServer
) -> None:
    model = device._models["m"]
    model._options = {**model._options, "engine": ["/missing/engine"]}
    assert look(device)._served is None
    server.models = [{"name": "m", "number": 2}]
    device._check_in()
    assert model.slots.refused == 2
    assert "does not start" in model.slots.problem


def test_a_refused_version_is_tried_again_only_if_a_user_rolls_it_out_again(
    device: DeviceProgram, server: FakeServer
) -> None:
    model = look(device)
    good = model._options
    model._options = {**good, "engine": ["/missing/engine"]}  # as long as a disk is full
    for rollout in (5, 7):
        server.models = [{"name": "m", "number": 2, "rollout": rollout}]
        device._check_in()
        assert (model.slots.refused, model.slots.refused_in) == (2, rollout)
    model._options = good
    for rollout in (7, 6, 0):  # the same one, a former one, a server that names none
        server.models = [{"name": "m", "number": 2, "rollout": rollout}]
        device._check_in()
        assert look(device).slots.serving == 1
    told = {each["name"]: each for each in server.told["models"]}["m"]
    assert (told["refused"], told["refused_in"]) == (2, 7)
    server.models = [{"name": "m", "number": 2, "rollout": 8}]
    device._check_in()
    assert look(device).slots.serving == 2
    assert model.slots.refused == 0


def test_an_engine_whose_port_was_taken_starts_again_on_another_one(
    device: DeviceProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = look(device)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = [taken.getsockname()[1], free_port()]
        monkeypatch.setattr(module, "free_port", lambda: ports.pop(0))
        model.try_version(2)
    assert not ports
    assert look(device).slots.serving == 2
    assert model.slots.refused == 0


def test_a_version_that_was_taken_back_may_be_tried_again(
    device: DeviceProgram, server: FakeServer
) -> None:
    model = look(device)
    model._probation_s = 1e6
    for number in (2, 1, 2):
        server.models = [{"name": "m", "number": number}]
        device._check_in()
        assert model.tell().serving == number
        assert model.slots.refused == 0
    model.stop()  # in good order, which is no failed trial
    assert ModelSlots(model.slots.folder)._state["tries"] == 0


def test_a_version_stays_on_trial_until_it_has_had_requests(
    device: DeviceProgram, server: FakeServer
) -> None:
    def answer(engine: ModelEngine | None, status: int, times: int) -> None:
        assert engine is not None
        for _ in range(times):
            begun = engine.target.begin()
            engine.target.end(begun, status=status, late=False, counts=True)

    model = look(device)
    model._probation_s = 1e-9
    for rollout, good in ((1, False), (2, True)):
        server.models = [{"name": "m", "number": 2, "rollout": rollout}]
        device._check_in()
        look(device)
        told = write(model.tell())
        assert (told["serving"], told["on_trial"]) == (2, False), "a rollout does not wait for it"
        answer(model._tried, 400, 9)  # what both versions refuse says nothing about either
        answer(model._served, 400, 9)
        answer(model._tried, 200 if good else 500, 3)
        device._check_in()
        look(device)
        kept = ModelSlots(model.slots.folder)  # what a device that loses its power would read
        assert (kept.serving, kept.trial, kept._state["tries"]) == (1, 2, 0)
        answer(model._tried, 200 if good else 500, 1)
        look(device)
        kept = ModelSlots(model.slots.folder)
        assert (kept.serving, kept.refused) == ((2, 0) if good else (1, 2))
        assert [each.number for each in device.front.routes["m"]] == [kept.serving]


@pytest.mark.parametrize("fault", ["dies", "is taken back", "refuses"])
def test_a_trial_without_requests_keeps_one_engine_and_loses_no_request(
    device: DeviceProgram, server: FakeServer, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(module, "_IDLE_S", 0.0)
    threading.Thread(target=device.front.serve_forever, daemon=True).start()
    model = look(device)
    model._probation_s = 1e-9
    server.models = [{"name": "m", "number": 2}]
    device._check_in()
    for _ in range(2):
        look(device)
    served, tried = model._served, model._tried
    assert served is not None
    assert tried is not None
    assert (served.target.asleep, served._process.poll() is None) == (True, False)
    assert device._list_serving() == ["m"]
    monkeypatch.setattr(module, "_IDLE_S", 1e6)
    if fault == "dies":
        tried._process.kill()
        tried._process.wait()
    elif fault == "is taken back":
        server.models = [{"name": "m", "number": 1}]
        device._check_in()
    path = "/v2/models/m/infer" if fault == "refuses" else "/v2/models/m/ready"
    asked = http.client.HTTPConnection(*device.front.server_address[:2], timeout=60)
    if fault == "refuses":
        monkeypatch.setattr(tried.target, "ask", lambda *_: (400, "", b""))
    # the engine answers a GET with 200 and a POST with 501
    asked.request("POST" if fault == "refuses" else "GET", path, b"{}")
    until = time.monotonic() + 60
    while served.target.asleep and time.monotonic() < until:
        look(device)
    assert asked.getresponse().status == (501 if fault == "refuses" else 200)
    asked.close()
    assert served._process.poll() is None
    kept = look(device).slots
    assert (kept.serving, kept.refused) == (1, 2 if fault == "dies" else 0)
    device.front.shutdown()


def test_the_first_version_is_tried_again_without_the_server(
    tmp_path: Path, server: FakeServer
) -> None:
    made = ModelSlots(f"{tmp_path}/models/m")
    update(made, 1, OLD)
    made._write(number=0, slot="", trial=1, tries=1)
    for device in start(tmp_path, server):
        assert look(device).tell().serving == 1


def test_the_first_version_serves_until_its_trial_ends_if_another_is_wanted(
    tmp_path: Path, server: FakeServer
) -> None:
    made = ModelSlots(f"{tmp_path}/models/m")
    update(made, 1, OLD)
    made._write(number=0, slot="", trial=1, tries=0)
    for device in start(tmp_path, server):
        device._models["m"]._probation_s = 1e6
        look(device)
        server.models = [{"name": "m", "number": 2}]
        device._check_in()
        look(device)
        assert [each.number for each in device.front.routes["m"]] == [1]


def test_a_fetch_that_fails_is_told_and_tried_later(
    device: DeviceProgram, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.models = [{"name": "m", "number": 3}]
    started: list[object] = []

    def popen(command: list[str], **more: Any) -> Any:
        if "cavvy.capabilities.edge.on_device.update" not in command:
            return real(command, **more)
        started.append(command)
        # much more than a pipe holds, and not only UTF-8
        program = (
            "import os, sys; os.write(2, b'\\xff\\n' * 500000); sys.exit('the lists have expired')"
        )
        return real([sys.executable, "-S", "-c", program], **more)

    real = module.subprocess.Popen
    monkeypatch.setattr(module.subprocess, "Popen", popen)
    for _ in range(3):
        device._check_in()
    assert len(started) == 1
    told = {each["name"]: each for each in server.told["models"]}["m"]
    assert told["problem"].startswith("m@3 was not fetched: ")
    assert told["problem"].endswith("the lists have expired")
    assert told["refused"] == 0
    assert told["unfetched"] == 3
    model = device._models["m"]
    model.note_wanted(3)
    assert model.tell().unfetched == 3
    model.note_wanted(4)
    told = write(model.tell())
    assert (told["unfetched"], told["problem"]) == (0, ""), "it speaks of the version before"
    assert model.fetch_at == 0.0, "the other version is fetched at once"


def test_a_fetch_ends_with_the_hours_for_updates_and_is_no_failed_one(
    device: DeviceProgram, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {"name": "m", "number": 3, "window": [1, 5], "site_window": [3, 8]}
    server.models, hour, started = [wanted], [0], list[Any]()
    monkeypatch.setattr(module.time, "localtime", lambda *_: SimpleNamespace(tm_hour=hour[0]))

    def popen(command: list[str], **more: Any) -> Any:
        if "cavvy.capabilities.edge.on_device.update" not in command:
            return real(command, **more)
        started.append(real(["sleep", "600"], **more))
        hour[0] = 5  # the hours end meanwhile
        return started[-1]

    real = module.subprocess.Popen
    monkeypatch.setattr(module.subprocess, "Popen", popen)
    for closed in (2, 5, 7, 23):
        hour[0] = closed
        device._check_in()
    assert not started, "3 and 4 are in both windows"
    for _ in range(2):  # another night
        hour[0] = 3
        device._check_in()
        assert started[-1].poll() is not None
    assert len(started) == 2
    assert look(device).failed == 0
    assert device._models["m"].trouble == ""


def test_a_version_waits_for_another_device_of_the_site_unless_it_is_here(
    device: DeviceProgram, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = list[object]()
    monkeypatch.setattr(device, "_fetch", lambda *given: fetched.append(given[1]))
    look(device)
    for number in (3, 2):
        server.models = [{"name": "m", "number": number, "wait": True}]
        device._check_in()
    assert not fetched
    assert look(device).slots.serving == 2, "it was whole in the other slot"
    server.models = [{"name": "m", "number": 3}]
    device._check_in()
    assert fetched == [3]


def test_samples_survive_a_damaged_file_and_a_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "samples.db"
    path.write_bytes(b"no database" * 100)
    spool = open_spool(str(path), 1000)
    spool.put({"a": 1})
    assert spool.waiting == 1
    spool._db.execute("PRAGMA query_only = 1")  # as a disk that takes no writes
    spool.put({"a": 2})
    assert spool.waiting == 1
    spool.close()
    missing = open_spool(str(tmp_path / "missing" / "samples.db"), 1000)
    missing.put({"a": 1})
    assert missing.batch()[0]["a"] == 1
    missing.close()


def test_a_report_has_only_models_with_requests_and_no_more_than_the_server_takes(
    device: DeviceProgram, server: FakeServer
) -> None:
    clouds = [f"c{number}" for number in range(100)]
    device._use_clouds([CloudService(model=name, url="http://127.0.0.1:9") for name in clouds])
    device.front.counts["c7"] = module_front.AnswerCounts()
    device._report()
    assert [each["name"] for each in server.told["models"]] == ["m", "c7"]
    assert type(server.told["up_s"]) is int
    for name in clouds:
        device.front.counts[name] = module_front.AnswerCounts()
    device._report()
    names = [each["name"] for each in server.told["models"]]
    assert (len(names), names[0]) == (64, "m")


def test_a_retired_device_keeps_no_key_of_a_service(
    tmp_path: Path, device: DeviceProgram, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    device._set_clouds([CloudService(model="m", url="http://127.0.0.1:9", key="s3cret")])
    kept = tmp_path / "clouds.json"
    for code, has_key in (("forbidden", True), ("enrolment-refused", False)):

        def refuse(*_: object, code: str = code) -> bytes:
            DeviceCalls({"address": "https://h"}, "")._fail(
                403, json.dumps({"code": code, "message": "no"}).encode()
            )
            return b""

        monkeypatch.setattr(server, "call", refuse)
        device._check_in()
        assert ("m" in device.front.clouds, "s3cret" in kept.read_text()) == (has_key, has_key)
    look(device)
    assert device.front.routes["m"], "it goes on serving"


def set_for(server: FakeServer, revision: str, **tables: Any) -> None:
    server.settings = {"revision": revision, "options": {}, "variables": {}, "secrets": {}}
    server.settings.update(tables)


def seen(model: RunningModel, engine: str = "_served") -> dict[str, str]:
    """Return the variables of an engine of the model."""
    pid = getattr(model, engine)._process.pid
    [found] = Path(model.slots.folder).glob(f"*/work/seen-{pid}")
    return dict(json.loads(found.read_text()))


def test_settings_of_the_server_are_used_and_kept_for_a_start_without_it(
    tmp_path: Path, device: DeviceProgram, server: FakeServer
) -> None:
    model = look(device)
    served = model._served
    set_for(server, "r1", options={"spool_mib": 1.0, "probation_s": 30.0, "every_s": 100.0})
    device._check_in()
    assert (device.options["every_s"], model._probation_s) == (100.0, 30.0)
    assert (device._spool._most, model._served) == (1 << 20, served), "no engine starts again"
    set_for(server, "r2", options={"every_s": 100.0}, variables={"A": "1"}, secrets={"S": "s3cret"})
    device._check_in()
    assert (model._probation_s, device._spool._most) == (0.0, 64 << 20), "as the device has it"
    assert (seen(model)["A"], seen(model)["S"]) == ("1", "s3cret")
    assert device.front.routes["m"] == [model._served and model._served.target]
    kept = tmp_path / "settings.json"
    assert kept.stat().st_mode & 0o777 == 0o600
    device._check_in()
    assert (server.told["settings"], server.told["settings_problem"]) == ("r2", "")
    assert server.fetched == 2, "each revision once"
    assert find_every_s(str(tmp_path)) == 100.0, "also for the program that tries another version"
    device.front.server_close()
    model.stop()
    server.refusal = DeviceRefused("away")
    for again in start(tmp_path, server):
        assert seen(look(again))["S"] == "s3cret"
        assert again.options["every_s"] == 100.0
        server.refusal = None
        again._check_in()
        set_for(server, "")
        again._check_in()
        assert not {"A", "S"} & seen(look(again)).keys()
        assert not kept.exists()


def test_an_engine_that_does_not_get_ready_keeps_its_former_settings(
    tmp_path: Path, device: DeviceProgram, server: FakeServer
) -> None:
    update(ModelSlots(f"{tmp_path}/models/a"), 1, OLD)  # whose engine starts before
    other = device._add("a")
    model = look(device)
    set_for(server, "r1", variables={"A": "1"})
    device._check_in()
    before = model._served
    set_for(server, "r2", options={"every_s": 20.0}, variables={"A": "2", "BAD": "1"})
    for _ in range(3):
        device._check_in()
    assert server.fetched == 2
    assert server.told["settings"] == "r1"
    assert "the engine of m does not get ready" in server.told["settings_problem"]
    assert (model._served, device.options["every_s"]) == (before, 60.0)
    assert seen(look(device))["A"] == seen(other)["A"] == "1"
    assert "BAD" not in (tmp_path / "settings.json").read_text()
    set_for(server, "r3", variables={"A": "3"})
    device._check_in()
    assert seen(look(device))["A"] == "3"


@pytest.mark.parametrize("fresh", [{}, {"S": "fresh"}], ids=["deleted", "rotated"])
def test_a_secret_that_was_taken_back_goes_also_if_no_engine_gets_ready_without_it(
    tmp_path: Path, device: DeviceProgram, server: FakeServer, fresh: dict[str, str]
) -> None:
    model = look(device)
    set_for(server, "r1", secrets={"S": "s3cret"})
    device._check_in()
    pid = model._served and model._served._process.pid
    set_for(server, "r2", variables={"BAD": "1"}, secrets=fresh)
    device._check_in()
    assert not Path(f"/proc/{pid}").exists()
    assert "s3cret" not in (tmp_path / "settings.json").read_text()
    assert not device.front.routes.get("m")
    device._check_in()
    assert server.told["settings"] == "r2"
    assert "a secret was taken back" in server.told["settings_problem"]
    set_for(server, "r3", secrets=fresh)
    device._check_in()
    model._start_at = 0.0
    assert "s3cret" not in str(seen(look(device)))


def test_settings_that_cannot_be_fetched_delay_nothing_else(
    device: DeviceProgram, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(device._program, "checked_in", lambda *_: done.append("program"))
    monkeypatch.setattr(device, "_send_samples", lambda: done.append("samples"))
    set_for(server, "r1", secrets={"S": "s3cret"})
    server.key_is_missing = True
    device._check_in()
    assert done == ["program", "samples"]
    server.key_is_missing = False
    device._check_in()
    device._check_in()
    assert server.told["settings"] == "r1"


def test_a_secret_that_cannot_be_decrypted_delays_no_other_and_comes_when_it_can(
    tmp_path: Path,
    device: DeviceProgram,
    server: FakeServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    look(device)
    set_for(server, "r1", secrets={"S": "s3cret", "GONE": "x"})
    device._check_in()
    set_for(server, "r2-partial", undecrypted=["GONE"], secrets={"T": "t"})
    written: list[str] = []
    monkeypatch.setattr(settings, "write_json", lambda path, value: written.append(path))
    for _ in range(3):
        device._check_in()
        assert {"S", "GONE", "T"} & seen(look(device)).keys() == {"T"}
    assert len(written) == 1, "a memory card wears out"
    assert "cannot decrypt GONE" in server.told["settings_problem"]
    set_for(server, "r2", secrets={"T": "t", "GONE": "back"})
    device._check_in()
    assert seen(look(device))["GONE"] == "back"
    device._check_in()
    assert (server.told["settings"], server.told["settings_problem"]) == ("r2", "")


def test_a_retired_device_keeps_no_secret(
    tmp_path: Path, device: DeviceProgram, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise OSError("the disk is full")

    model = look(device)
    model._probation_s = 1e6
    server.models = [{"name": "m", "number": 2}]
    set_for(server, "r1", variables={"A": "1"}, secrets={"S": "s3cret"})
    device._check_in()
    monkeypatch.setattr(model.slots, "pause_trial", fail)
    device.options["every_s"] = 480.0
    server.refusal = DeviceRefused("not one of the project's devices", retired=True)
    assert device._check_in() == 600.0
    assert (seen(model)["A"], "S" in seen(model)) == ("1", False)
    assert "s3cret" not in (tmp_path / "settings.json").read_text()


def test_a_version_on_trial_gets_new_variables_and_its_trial_is_no_failed_one(
    device: DeviceProgram, server: FakeServer
) -> None:
    model = look(device)
    model._probation_s = 1e6
    server.models = [{"name": "m", "number": 2}]
    device._check_in()
    resting = model._served
    assert resting is not None
    resting.sleep()
    set_for(server, "r1", options={"probation_s": 80_000.0}, secrets={"S": "s3cret"})
    device._check_in()
    assert seen(model)["S"] == seen(model, "_tried")["S"] == "s3cret"
    assert (model.slots.refused, model.slots._state["tries"]) == (0, 1)
    assert model._served is not None
    assert resting.target.port == model._served.target.port, "where requests that waited go"
    assert not resting.target.asleep


def test_settings_that_a_device_cannot_use_are_told_and_the_others_used(
    device: DeviceProgram, server: FakeServer, tmp_path: Path
) -> None:
    model = look(device)
    options = {"every_s": 1e9, "warp": 9, "look_s": 2.0, "share": "0.0.0.0:80"}
    variables = {"LD_PRELOAD": "x.so", "Ld_Audit": "x", "PYTHONPATH": "x", "CAVVY_X": "x"}
    variables |= {"PATH": "x", "A=B": "x", "": "x", "N": "a\0b", "U": "\ud800", "GOOD": "ü\n"}
    variables |= {"JAVA_TOOL_OPTIONS": "x", "PS4": "$(x)"}  # both are a command
    set_for(server, "r1", options=options, variables=variables)
    for _ in range(2):
        device._check_in()
        told = server.told
    assert told["settings"] == "r1"
    for name in (*options.keys() - {"look_s"}, *variables.keys() - {"GOOD", ""}):
        assert name in told["settings_problem"], name
    assert (device.options["look_s"], device.options["every_s"]) == (2.0, 60.0)
    assert seen(model)["GOOD"] == "ü\n"
    assert not {"LD_PRELOAD", "CAVVY_X", "Ld_Audit"} & seen(model).keys()
    for wrong in ([], {"variables": []}, {"revision": 1}, {"variables": {"A": "x" * 10**5}}):
        server.settings = {"revision": f"w{wrong}"[:60]}
        device._report()
        server.settings = wrong  # type: ignore[assignment]
        device._follow_settings()
    set_for(server, "s", variables={"GOOD": "ü\n"}, secrets={"KEPT": "k", "GONE": "s3cret"})
    device._check_in()
    device._check_in()
    many = {f"V{number}": "x" for number in range(100)}
    set_for(server, "gone", variables=many, secrets={"KEPT": "k"})
    device._check_in()
    device._check_in()
    assert (seen(look(device)).get("GONE"), seen(model)["KEPT"]) == (None, "k")
    assert "s3cret" not in (tmp_path / "settings.json").read_text()
    for each in (many, {f"V{number}": "é" * 4000 for number in range(20)}):
        set_for(server, f"m{len(each)}", variables=each)
        device._check_in()
        device._check_in()
        assert server.told["settings_problem"]
    assert seen(look(device))["GOOD"] == "ü\n"
    (tmp_path / "settings.json").write_text("{")
    assert ServerSettings(str(tmp_path), {}).held.revision == ""


def test_the_owner_of_a_device_has_the_last_word(tmp_path: Path, server: FakeServer) -> None:
    address = f"127.0.0.1:{free_port()}"
    for device in start(tmp_path, server):
        set_for(server, "r1", options={"share": address, "spool_mib": 1.0})
        device._check_in()
        assert device._share is not None
        set_for(server, "")
        device._check_in()
        assert device._share is None
        with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))):
            set_for(server, "r2", options={"share": address, "spool_mib": 1.0})
            device._check_in()
            device._check_in()
            assert "`share` cannot be opened" in server.told["settings_problem"]
            stated = json.loads((tmp_path / "edge.json").read_text())
            for own, told in (({"share": ""}, "sets share"), ({"managed": False}, '"managed"')):
                (tmp_path / "edge.json").write_text(json.dumps({**stated, **own}))
                device.options = {**device.options, "share": ""}
                device._settings = ServerSettings(str(tmp_path), {**stated, **own})
                device._check_in()
                device._check_in()
                assert told in server.told["settings_problem"]
    assert not (tmp_path / "settings.json").exists()
    assert server.told["settings"] == ""
