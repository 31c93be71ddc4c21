"""Versions of models from and for other registries, whose servers may lie."""

import json
import threading
from collections.abc import Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from cavvy.capabilities.models import version_files
from cavvy.cli.view.failure import CommandFailure
from cavvy.client.mlflow import MlflowRegistry, RegistryRefused
from cavvy.http_client import MOST_BYTES

COMMIT = "a" * 40


class Registry(BaseHTTPRequestHandler):
    """An MLflow server, and a Hub with one repository, org/name."""

    files: dict[str, bytes]
    versions: list[dict[str, Any]]
    names: set[str]
    listed: list[dict[str, Any]] | None
    uri: str
    hub: dict[str, bytes]
    ended: list[str]  # the states of runs that were ended
    full: bool
    busy: list[int]  # the answers to the next requests for files of the Hub
    seen: list[str]

    def do_GET(self) -> None:
        split = urlsplit(self.path)
        asked = {key: each[0] for key, each in parse_qs(split.query).items()}
        self.seen.append(self.headers.get("Authorization") or "")
        path = unquote(split.path)
        if path.startswith("/api/models/org/gated"):
            return self.send(403, b"")
        if path.startswith("/api/models/"):
            rows = [
                {"rfilename": name, "size": len(data)}
                | (
                    {"lfs": {"sha256": sha256(b"weights").hexdigest(), "size": len(data)}}
                    if name.endswith("onnx")
                    else {}
                )
                for name, data in self.hub.items()
            ]
            return self.reply({"sha": COMMIT, "siblings": rows})
        if "/resolve/" in path and self.busy:
            return self.send(self.busy.pop(), b"")
        if "/resolve/" in path:
            return self.send(200, self.hub[path.partition(f"/resolve/{COMMIT}/")[2]])
        if path.endswith("/registered-models/alias"):
            return self.reply({"model_version": {"version": "2"}})
        if path.endswith("/experiments/get-by-name"):
            return self.reply({"experiment": {"experiment_id": "7"}})
        if path.endswith("/get-download-uri"):
            return self.reply({"artifact_uri": self.uri})
        root = "/api/2.0/mlflow-artifacts/artifacts"
        if path == root:
            if self.listed is not None:
                return self.reply({"files": self.listed})
            below = asked["path"] + "/"
            inner = {
                each.removeprefix(below).partition("/")[::2]
                for each in self.files
                if each.startswith(below)
            }
            found = {name: bool(rest) for name, rest in inner}
            return self.reply({"files": [{"path": k, "is_dir": v} for k, v in found.items()]})
        name = path.removeprefix(f"{root}/")
        if name in self.files:
            return self.send(200, self.files[name])
        return self.send(404, json.dumps({"message": "no \x1b[31m file"}).encode())

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path.endswith(("/registered-models/create", "/experiments/create")):
            if asked["name"] in self.names:
                return self.send(400, b'{"error_code": "RESOURCE_ALREADY_EXISTS"}')
            self.names.add(asked["name"])
            return self.reply({})
        if self.path.endswith("/runs/create"):
            assert asked["experiment_id"] == "7"
            uri = f"mlflow-artifacts:/7/run{len(self.versions)}/artifacts"
            info = {"run_id": f"run{len(self.versions)}", "artifact_uri": uri}
            return self.reply({"run": {"info": info}})
        if self.path.endswith("/runs/update"):
            self.ended.append(asked["status"])
            return self.reply({})
        # as MLflow 3.x does
        if asked["run_id"] not in asked["source"]:
            return self.send(400, b"{}")
        self.versions.append(asked)
        return self.reply({"model_version": {"version": str(len(self.versions))}})

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if self.full:
            return self.send(507, b"{}")
        self.files[unquote(self.path).partition("/artifacts/")[2]] = data
        self.reply({})

    def reply(self, answer: object) -> None:
        self.send(200, json.dumps(answer).encode())

    def send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Registry]]:
    Registry.files, Registry.versions, Registry.names = {}, [], set()
    Registry.listed, Registry.hub, Registry.seen = None, {}, []
    Registry.busy, Registry.ended, Registry.full = [], [], False
    Registry.uri = "mlflow-artifacts:/0/run/artifacts/model"
    with ThreadingHTTPServer(("127.0.0.1", 0), Registry) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
        monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret")
        monkeypatch.setenv("HF_ENDPOINT", url)
        yield Registry
        server.shutdown()


def read(folder: Path) -> dict[str, bytes]:
    return {
        str(each.relative_to(folder)): each.read_bytes()
        for each in folder.rglob("*")
        if each.is_file()
    }


def test_a_version_goes_to_mlflow_and_comes_back(tmp_path: Path, there: type[Registry]) -> None:
    source = tmp_path / "model"
    (source / "deep").mkdir(parents=True)
    contents = {"model.onnx": b"weights", "deep/a b#?.txt": b"labels", "empty": b""}
    for path, data in contents.items():
        (source / path).write_bytes(data)
    registry = MlflowRegistry()
    for number in (1, 2):  # also if the model exists
        title = f"digits@{number} of project p"
        assert registry.push("models:/digits", source, title) == f"digits/{number}"
    there.uri = there.versions[1]["source"]
    assert there.uri == "mlflow-artifacts:/7/run1/artifacts/model"
    assert registry.pull("models:/digits@production", tmp_path / "back") == "digits/2"
    assert read(tmp_path / "back") == contents
    assert set(there.seen) == {"Bearer secret"}
    assert there.ended == ["FINISHED"] * 2
    there.full = True
    with pytest.raises(RegistryRefused, match="status 507"):
        registry.push("models:/digits", source, "")
    assert there.ended[2:] == ["FAILED"]
    with pytest.raises(RegistryRefused, match="numbers its versions"):
        registry.push("models:/digits/3", source, "")


@pytest.mark.parametrize(
    ("name", "listed", "uri", "told"),
    [
        ("models:/m/1", [{"path": "../x"}], "mlflow-artifacts:/r", "names a file"),
        ("models:/m/1", [{"path": "/etc/x"}], "mlflow-artifacts:/r", "names a file"),
        ("models:/m/1", [{"path": ".."}], "mlflow-artifacts:/r", "names a file"),
        ("models:/m/1", [{"path": 7}], "mlflow-artifacts:/r", "names a file"),
        ("models:/m/1", ["x"], "mlflow-artifacts:/r", "list of files is none"),
        ("models:/m/1", {"path": "x"}, "mlflow-artifacts:/r", "list of files is none"),
        ("models:/m/1", [{"path": "n" * 300}], "mlflow-artifacts:/r", "cannot be written"),
        ("models:/m/1", [{"path": "y"}, {"path": "y"}], "mlflow-artifacts:/r", "cannot be written"),
        ("models:/m/1", [], "mlflow-artifacts://[", "are in a folder"),
        ("models:/m/1", [], "mlflow-artifacts:/\ud800", "are in a folder"),
        ("models:/m/1", [{"path": "d", "is_dir": True}], "mlflow-artifacts:/r", "1000 folders"),
        ("models:/m/1", [], "mlflow-artifacts:/r", "has no files"),
        ("models:/m/1", [{"path": "x"}], "mlflow-artifacts:/r", "status 404: no .* file"),
        ("models:/m/1", [], "s3://bucket/m", "are in s3:"),
        ("models:/m", [], "", "expected models:/NAME/NUMBER"),
        ("models:/a/b/c", [], "", "expected models:/NAME/NUMBER"),
    ],
)
def test_what_an_mlflow_server_must_not_do_is_refused(
    tmp_path: Path, there: type[Registry], name: str, listed: Any, uri: str, told: str
) -> None:
    there.listed, there.uri, there.files = listed, uri, {"r/y": b"y"}
    with pytest.raises(CommandFailure, match=told) as caught:
        version_files.pull_from(name, tmp_path / "new")
    assert "\x1b" not in str(caught.value)
    assert {each.name for each in tmp_path.iterdir()} <= {"new"}


def test_a_large_file_comes_from_mlflow(tmp_path: Path, there: type[Registry]) -> None:
    size = MOST_BYTES + 1  # more than a body that is kept in memory may have
    there.files = {"0/run/artifacts/model/m.onnx": bytes(size)}
    MlflowRegistry().pull("models:/m/1", tmp_path / "back")
    assert (tmp_path / "back/m.onnx").stat().st_size == size


def test_a_model_is_read_from_the_hub_and_checked(
    tmp_path: Path, there: type[Registry], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version_files, "_PIECE", 3)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    there.hub = {"onnx/m.onnx": b"weights", "onnx/labels.txt": b"cat", "onnx2/x": b"", "r.md": b"r"}
    pull = version_files.pull_from
    assert set(read(pull("hf://org/name", tmp_path / "all"))) == set(there.hub)
    found = read(pull("hf://org/name@main/onnx", tmp_path / "part"))
    assert found == {"m.onnx": b"weights", "labels.txt": b"cat"}
    monkeypatch.setattr(version_files, "_PAUSES_S", (0.0,) * 2)
    there.busy = [503, 429]  # a large model must not begin again for it
    assert read(pull("hf://org/name/onnx/m.onnx", tmp_path / "one")) == {"m.onnx": b"weights"}
    there.busy = [503] * 3
    with pytest.raises(CommandFailure, match="status 503"):
        pull("hf://org/name/onnx/m.onnx", tmp_path / "busy")
    there.busy = []
    with pytest.raises(CommandFailure, match="refuses access") as denied:
        pull("hf://org/gated", tmp_path / "gated")
    assert "it is not set" in denied.value.hint
    there.hub["onnx/m.onnx"] = b"WEIGHTS"
    with pytest.raises(CommandFailure, match="other bytes"):
        pull("hf://org/name/onnx", tmp_path / "other")
    there.hub = {"../x": b"x"}
    with pytest.raises(CommandFailure, match="leads out"):
        pull("hf://org/name", tmp_path / "out")
    with pytest.raises(CommandFailure, match="has no files"):
        pull("hf://org/name/nothing", tmp_path / "none")
    there.hub = {"a": b"", "b": b"", "c": b""}
    monkeypatch.setattr(version_files, "_MOST_FILES", 2)
    with pytest.raises(CommandFailure, match="more than 2 files"):
        pull("hf://org/name", tmp_path / "many")
    assert not (tmp_path / "x").exists()


def test_without_a_server_a_user_is_told_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for malformed in ("sqlite:///mlflow.db", "https://[", ""):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", malformed)
        with pytest.raises(CommandFailure, match="MLFLOW_TRACKING_URI must be the URL"):
            version_files.pull_from("models:/m/1", tmp_path / "new")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:hunter2@127.0.0.1:1/mlflow")
    with pytest.raises(CommandFailure, match="MLFLOW_TRACKING_PASSWORD") as caught:
        version_files.pull_from("models:/m/1", tmp_path / "new")
    assert "hunter2" not in str(caught.value)
