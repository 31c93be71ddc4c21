"""A real server and real devices: a model is published, rolled out, broken, taken back, and served
while the server is away."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
from scripts import demo_edge
from tests.system.ports import free_port
from tests.system.server_state import home_at, kill_server
from tests.waits import PATIENCE_S, wait_until

from cavvy.capabilities.edge.wire import (
    DeviceTaskView,
    EnrolmentAsk,
    RolloutAsk,
    SettingsAsk,
    SiteAsk,
    ask_device,
    change_settings,
    deploy_model,
    get_device,
    get_device_settings,
    invite_devices,
    limit_site,
    list_rollouts,
    list_samples,
    read_device_task,
    retire_device,
)
from cavvy.capabilities.models.wire import ModelAsk, publish_model
from cavvy.client import ApiClient, ApiError, connect
from cavvy.client.account_wire import read_newest
from cavvy.client.blobs import upload
from cavvy.client.model_wire import ModelView
from cavvy.client.service_wire import EdgePathView, end_service, list_named_services, put_service
from cavvy.spec.workdir import freeze

pytestmark = pytest.mark.system
onnx = pytest.importorskip("onnx", reason="the extra `onnx` is not installed: make setup-dev")
pytest.importorskip("onnxruntime", reason="the extra `onnx` is not installed: make setup-dev")
pytest.importorskip("tuf", reason="the extra `edge` is not installed: make setup-dev")

ROOT = Path(__file__).resolve().parents[3]
SETTINGS = """
[server]
tls_listen = "127.0.0.1:0"
idle_stop_s = 0
"""
SERVICE = """
name: line
run: >-
  exec {python} -m cavvy.model_server --model {model} --name digits --host 127.0.0.1 --port $PORT
resources: {{cpu: 0.1, memory: 64MiB}}
service:
  replicas: {{min: 1, max: 1}}
  probe: /v2/models/digits/ready
  concurrency: 16
  edge: {{site: lyon, model: digits, below: 0.999}}
"""


def make_model(path: Path, *, broken: bool = False, scale: float = 1.0) -> None:
    """Write a model with three inputs, which returns three probabilities, or fails each request."""
    from numpy import arange, array, eye, float32, int64
    from onnx import TensorProto, helper, numpy_helper

    weights = numpy_helper.from_array(eye(3, dtype=float32) * float32(scale), "w")
    shape = numpy_helper.from_array(array([7, 7], dtype=int64), "s")
    filling = numpy_helper.from_array(arange(5000, dtype=float32), "f")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"])]
    if broken:
        nodes.append(helper.make_node("Reshape", ["h", "s"], ["g"]))
    nodes.append(helper.make_node("Softmax", ["g" if broken else "h"], ["y"]))
    graph = helper.make_graph(
        nodes,
        "m",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [weights, shape, filling],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(made, str(path))


def publish(client: ApiClient, path: Path) -> ModelView:
    snapshot = freeze(path.parent, only=path.name)
    upload(client, "default", snapshot.blobs())
    return publish_model(client, "default", ModelAsk(name="digits", snapshot=snapshot.hash))


class RunningDevice:
    """The program of a device, enrolled with the command that a user would paste."""

    def __init__(self, folder: Path, command: str, **more: str) -> None:
        self.folder, self.port, self._command = folder, free_port(), command
        folder.mkdir()
        options = {
            "listen": f"127.0.0.1:{self.port}",
            "probation_s": 1,
            "every_s": 1,
            "look_s": 0.1,
        }
        (folder / "edge.json").write_text(json.dumps({**options, **more}))
        self.answered_by = ""
        self.start()

    def start(self) -> None:
        there = (self.folder / "start").exists()
        line = str(self.folder / "start") if there else self._command
        environ = {**os.environ, "CAVVY_EDGE_FOLDER": str(self.folder)}
        environ["CAVVY_EDGE_PYTHON"] = sys.executable
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                ["sh", "-c", line], env=environ, stderr=log, stdout=log, start_new_session=True
            )

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def predict(self) -> list[float]:
        answer, self.answered_by = self.ask()
        return answer

    def ask(self) -> tuple[list[float], str]:
        """Return an answer, and who gave it."""
        body = json.dumps({"instances": [[1.0, 2.0, 3.0]]}).encode()
        url = f"http://127.0.0.1:{self.port}/v1/models/digits:predict"
        asked = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=30) as reply:
            answer = list(json.load(reply)["predictions"][0])
            return answer, reply.headers["Cavvy-Answered-By"]

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def signal_engine(self, signal_number: int) -> None:
        """Send a signal to the engine, which has the device's folder in its command."""
        for each in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):
                line = Path(f"/proc/{each}/cmdline").read_bytes()
                if b"cavvy.model_server" in line and f"{self.folder}/models".encode() in line:
                    os.kill(int(each), signal_number)

    def answers(self) -> bool:
        try:
            return len(self.predict()) == 3
        except OSError:
            return False


@pytest.fixture
def client(tmp_path: Path) -> Iterator[ApiClient]:
    with home_at(tmp_path / "home"):
        (tmp_path / "settings.toml").write_text(SETTINGS)
        with connect() as made:
            yield made


@contextmanager
def device_at(folder: Path, command: str, **more: str) -> Iterator[RunningDevice]:
    made = RunningDevice(folder, command, **more)
    try:
        yield made
    except BaseException:
        print(made.log())
        raise
    finally:
        made.kill()


def serving(client: ApiClient, name: str) -> list[int]:
    return [each.serving for each in get_device(client, "default", name).models]


def test_a_model_reaches_a_device_and_a_broken_one_goes_back(
    client: ApiClient, tmp_path: Path
) -> None:
    good, broken = tmp_path / "good", tmp_path / "broken"
    for folder in (good, broken):
        folder.mkdir()
    make_model(good / "model.onnx")
    make_model(broken / "model.onnx", broken=True)
    invited = invite_devices(client, "default", EnrolmentAsk(site="lyon"))
    assert publish(client, good / "model.onnx").name == "digits@1"
    with device_at(tmp_path / "device", invited.command) as device:
        wait_until(lambda: (device.folder / "card.json").exists(), "the device enrols")
        name = json.loads((device.folder / "card.json").read_text())["device"]
        deploy_model(client, "default", RolloutAsk(model="digits", to=1, soak_s=0))
        wait_until(device.answers)
        before = device.predict()
        wait_until(lambda: serving(client, name) == [1])

        second = publish(client, broken / "model.onnx")
        assert second.number == 2
        assert second.files[0].deltas["digits@1"] < second.size / 10
        deploy_model(client, "default", RolloutAsk(model="digits", to=2, soak_s=3600))
        deadline = time.monotonic() + 120
        while list_rollouts(client, None)[0].phase == "running":
            assert time.monotonic() < deadline, (device.folder / "log").read_text()
            assert device.predict() == before  # no request is lost in the trial
        newest = list_rollouts(client, None)[0]
        assert newest.phase == "halted"
        assert "requests failed" in newest.reason
        assert serving(client, name) == [1]
        assert "fetched whole" not in (device.folder / "log").read_text()

        # the program updates itself in the same way, and serves what it served
        deploy_model(client, "default", RolloutAsk(model="cavvy.edge", soak_s=0))
        wait_until(lambda: serving(client, name) == [1, 1], device.log)
        wait_until(lambda: list_rollouts(client, None)[0].phase == "done", device.log)
        assert "version 1 of this program runs" in device.log()
        wait_until(device.answers)
        assert device.predict() == before

        # without the server, also after a loss of power
        kill_server(tmp_path / "home")
        device.kill()
        device.start()
        wait_until(device.answers)
        assert device.predict() == before


def test_a_device_sends_its_log_and_runs_only_commands_that_it_was_enrolled_for(
    client: ApiClient, tmp_path: Path
) -> None:
    for allowed in (True, False):
        invited = invite_devices(client, "default", EnrolmentAsk(site="lyon", allow_exec=allowed))
        folder = tmp_path / str(allowed)
        with device_at(folder, invited.command):
            wait_until((folder / "card.json").exists)
            name = json.loads((folder / "card.json").read_text())["device"]

            def ask(name: str, *command: str) -> DeviceTaskView:
                found = ask_device(client, "default", name, list(command))
                while found.exit_code is None:
                    found = read_device_task(client, "default", name, found.id, wait_s=10)
                return found

            assert "listens on" in ask(name).output
            if allowed:
                found = ask(name, "sh", "-c", "pwd; exit 4")
                assert (found.exit_code, found.output.strip()) == (4, os.getcwd())
                assert "pwd" in str(read_newest(client, 50))
            else:
                with pytest.raises(ApiError, match="runs no commands of users"):
                    ask(name, "ls")
            retire_device(client, "default", name)


def test_one_device_of_a_site_fetches_a_model_and_gives_it_to_the_other(
    client: ApiClient, tmp_path: Path
) -> None:
    good = tmp_path / "good"
    good.mkdir()
    make_model(good / "model.onnx")
    publish(client, good / "model.onnx")
    limit_site(client, "default", "lyon", SiteAsk(mib_per_s=5.0))
    invited = invite_devices(client, "default", EnrolmentAsk(site="lyon", count=2))
    shares = [{"share": f"127.0.0.1:{free_port()}"} for _ in range(2)]
    with (
        device_at(tmp_path / "one", invited.command, **shares[0]) as one,
        device_at(tmp_path / "two", invited.command, **shares[1]) as two,
    ):
        devices = one, two
        wait_until(lambda: all((each.folder / "card.json").exists() for each in devices))
        deploy_model(client, "default", RolloutAsk(model="digits", to=1, waves=[1.0], soak_s=0))
        wait_until(lambda: one.answers() and two.answers(), lambda: one.log() + two.log())
        took = ["1 of 1 files came from other devices" in each.log() for each in devices]
        assert sorted(took) == [False, True], one.log() + two.log()
        assert one.predict() == two.predict()


PROCESS = """
import os
def after(request, answer):
    for key in os.environ["DEVICE"], "settings.json", "device.key":
        try:
            answer["read"] = open(os.environ["DEVICE"] + "/" + key).read()
        except OSError:
            pass
    return dict(answer, told=[os.environ.get(each) for each in ("LINE", "TOKEN")])
"""


def test_settings_reach_the_engine_of_a_device_and_a_retired_one_gets_nothing_more(
    client: ApiClient, tmp_path: Path
) -> None:
    (good := tmp_path / "good").mkdir()
    make_model(good / "model.onnx")
    (good / "cavvy_process.py").write_text(PROCESS)
    snapshot = freeze(good)
    upload(client, "default", snapshot.blobs())
    publish_model(client, "default", ModelAsk(name="digits", snapshot=snapshot.hash))
    invited = invite_devices(client, "default", EnrolmentAsk(site="lyon"))
    client.put_secret("default", "TOKEN", "hush-hush")
    with device_at(tmp_path / "device", invited.command) as device:
        card, kept = device.folder / "card.json", device.folder / "settings.json"
        wait_until(card.exists)
        name = json.loads(card.read_text())["device"]
        place = {"DEVICE": str(device.folder), "LINE": "4"}
        ask = SettingsAsk(site="lyon", values={**place, "spool_mib": "1"}, secrets=["TOKEN"])
        change_settings(client, "default", ask)
        deploy_model(client, "default", RolloutAsk(model="digits", to=1, soak_s=0))
        asked = {"instances": [[1.0, 2.0, 3.0]]}

        def told() -> object:
            url = f"http://127.0.0.1:{device.port}/v1/models/digits:predict"
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(url, json.dumps(asked).encode(), headers)
            with suppress(OSError), urllib.request.urlopen(request, timeout=30) as reply:
                answer = json.load(reply)
                assert "read" not in answer
                return answer["told"]
            return None

        def used() -> bool:
            found = get_device_settings(client, "default", name)
            return found.used == found.revision

        wait_until(lambda: told() == ["4", "hush-hush"], device.log)
        wait_until(used, device.log)
        change_settings(client, "default", SettingsAsk(device=name, values={"LINE": "5"}))
        wait_until(lambda: told() == ["5", "hush-hush"], device.log)
        client.delete_secret("default", "TOKEN")
        wait_until(lambda: told() == ["5", None], device.log)
        assert "hush" not in kept.read_text() + device.log()
        client.put_secret("default", "TOKEN", "anew")
        wait_until(lambda: told() == ["5", "anew"], device.log)

        assert retire_device(client, "default", name).variables == ["TOKEN"]
        wait_until(lambda: told() == ["5", None], device.log)
        wait_until(lambda: "anew" not in kept.read_text(), device.log)
        assert "not one of the project's" in device.log()
        device.kill()  # without the server, after a restart
        device.start()
        wait_until(lambda: told() == ["5", None], device.log)
    with device_at(tmp_path / "second", invited.command) as second:
        wait_until(lambda: "has been used" in (second.folder / "log").read_text())


def test_uncertain_requests_come_back_once_and_the_cloud_answers_what_a_device_cannot(
    client: ApiClient, tmp_path: Path
) -> None:
    good = tmp_path / "good"
    good.mkdir()
    make_model(good / "model.onnx")
    invited = invite_devices(
        client, "default", EnrolmentAsk(site="lyon", labels={"residency": "eu"})
    )
    elsewhere = invite_devices(client, "default", EnrolmentAsk(site="paris"))
    publish(client, good / "model.onnx")
    with device_at(tmp_path / "cloud", invited.command) as cloud:
        rollout = RolloutAsk(model="digits", to=1, site="lyon", soak_s=0, collect_below=0.999)
        wait_until((cloud.folder / "card.json").exists)
        deploy_model(client, "default", rollout)
        wait_until(cloud.answers)
        options = {"cloud": f"http://127.0.0.1:{cloud.port}"}
        with device_at(tmp_path / "empty", elsewhere.command, **options) as empty:
            wait_until(empty.answers)
            assert empty.predict() == cloud.predict()
            assert (empty.answered_by, cloud.answered_by) == ("cloud", "device")
        wait_until(lambda: list_samples(client, "default", "digits", residency="eu").samples)
        kept = list_samples(client, "default", "digits", residency="eu").samples
        bodies = [json.loads(each.body) for each in kept]
        assert {each["version"] for each in bodies} == {1}
        assert bodies[0]["request"] == {"instances": [[1.0, 2.0, 3.0]]}
        assert len({(each.device, each.number) for each in kept}) == len(kept)
        hidden = list_samples(client, "default", "digits")
        assert not hidden.samples
        later = list_samples(client, "default", "digits", residency="eu").samples
        # more may have come in the meantime
        assert 0 < len(kept) <= hidden.left_out <= len(later)


class SteadyCallers:
    """Threads that send requests to a device without a pause, and count who answered them."""

    def __init__(self, device: RunningDevice, expected: list[float]) -> None:
        self.seen: Counter[str] = Counter()
        self._device, self._expected = device, expected
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._call) for _ in range(4)]

    def __enter__(self) -> "SteadyCallers":
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for each in self._threads:
            each.join()

    def _call(self) -> None:
        while not self._over.is_set():
            try:
                answer, by = self._device.ask()
            except OSError as error:
                self.seen[f"lost: {error}"] += 1
                continue
            self.seen[by if answer == self._expected else f"wrong: {answer}"] += 1

    def await_one(self, by: str) -> None:
        before = self.seen[by]
        wait_until(lambda: self.seen[by] > before, lambda: f"{self.seen}\n{self._device.log()}")


@contextmanager
def services_of(client: ApiClient) -> Iterator[None]:
    """End the services of a test, whose replicas would outlive its server."""
    try:
        yield
    finally:
        for each in list_named_services(client):
            end_service(client, each.project, each.name)
        wait_until(lambda: not list_named_services(client))


def test_one_service_answers_on_its_devices_and_in_the_cloud_without_a_lost_request(
    client: ApiClient, tmp_path: Path
) -> None:
    find_service = pytest.importorskip("cavvy.capabilities.serving.wire").find_service
    good = tmp_path / "good"
    good.mkdir()
    make_model(good / "model.onnx")
    invited = invite_devices(client, "default", EnrolmentAsk(site="lyon"))
    bound = invite_devices(client, "default", EnrolmentAsk(site="lyon", labels={"residency": "eu"}))
    publish(client, good / "model.onnx")
    with services_of(client), device_at(tmp_path / "device", invited.command) as device:
        wait_until((device.folder / "card.json").exists)
        text = SERVICE.format(python=sys.executable, model=good / "model.onnx")
        named = {"project": "default", "name": "line", "path": "line.yaml", "params": {}}
        put_service(client, text, **named, origin=None, user="ada", consent=True)
        wait_until(lambda: find_service(client, "default", "line").ready == 1)
        # before the device has the model, the cloud answers
        wait_until(device.answers)
        assert device.answered_by == "cloud"
        deploy_model(client, "default", RolloutAsk(model="digits", to=1, soak_s=0))
        wait_until(lambda: device.ask()[1] == "device")
        with SteadyCallers(device, device.predict()) as callers:
            for fault in (signal.SIGSTOP, signal.SIGKILL):
                callers.await_one("device")
                device.signal_engine(fault)
                callers.await_one("cloud")
                if fault == signal.SIGSTOP:
                    device.signal_engine(signal.SIGCONT)
                callers.await_one("device")
        assert set(callers.seen) == {"device", "cloud"}, callers.seen

        with device_at(tmp_path / "bound", bound.command) as kept:
            wait_until((kept.folder / "card.json").exists)

            def shown() -> EdgePathView:
                (found,) = find_service(client, "default", "line").edge
                return found

            def told() -> bool:
                path, seen = shown(), callers.seen
                counted = path.answered >= seen["device"] and path.cloud_answered >= seen["cloud"]
                return path.kept == 1 and counted

            wait_until(told)
            path = shown()
            assert (path.devices, path.lost) == (2, 0)
            assert 0 < (path.p50_s or 0) <= (path.p95_s or 0)
            name = json.loads((kept.folder / "card.json").read_text())["device"]
            wait_until(lambda: name in str(read_newest(client, 50, outcome="refused")))
            wait_until(kept.answers)  # by itself
            assert kept.answered_by == "device"
        wait_until(lambda: list_samples(client, "default", "digits").samples)


def test_devices_of_the_demo_have_links_of_their_own_until_it_ends(tmp_path: Path) -> None:
    """The demo is ended while it starts its devices."""
    folder, log, script = tmp_path / "demo", tmp_path / "log", ROOT / "scripts/demo_edge.sh"
    environ = {**os.environ, "DEMO_FOLDER": str(folder)}
    with log.open("wb") as file:
        demo = subprocess.Popen(
            [script], env=environ, stdout=file, stderr=file, start_new_session=True
        )
    try:
        wait_until(lambda: "curl" in log.read_text() or demo.poll() is not None, log.read_text)
        spaces = demo_edge.find_spaces(folder)
        if spaces is None:
            pytest.skip(log.read_text().partition("\n")[0])
        host, port = spaces.address(0), int(log.read_text().split(f"{spaces.address(0)}:")[1][:5])
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port)).close()
        lines = [(partial(spaces.enter, number), (host, port)) for number in range(1, 11)]
        assert demo_edge.count_reached(lines) == 10
        demo_edge.ip("link", "set", spaces.name(3), "down")
        assert demo_edge.count_reached(lines[2:3]) == 0
        assert demo_edge.count_reached(lines) == 9
        again = subprocess.run([script], env=environ, capture_output=True, text=True)
        assert (again.returncode, "another demo uses" in again.stderr) == (1, True)
    finally:
        os.killpg(demo.pid, signal.SIGTERM)
        demo.wait(PATIENCE_S)
    left = [*os.listdir("/sys/class/net"), *os.listdir("/run/netns")]
    assert not [each for each in left if each.startswith(spaces.bridge)]
    for process in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            assert os.fsencode(folder) not in Path(f"/proc/{process}/cmdline").read_bytes()
