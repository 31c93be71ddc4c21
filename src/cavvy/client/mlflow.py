"""Reads and writes versions of models in an MLflow registry, over its REST API:
`models:/NAME/NUMBER` or `models:/NAME@ALIAS`.

The server is that of MLFLOW_TRACKING_URI, with the credentials of MLFLOW_TRACKING_TOKEN, or of
MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, as for MLflow's own client. The server must
pass artifacts on (its default): those in a bucket that only clients reach are refused.

Source: https://mlflow.org/docs/latest/api_reference/rest-api.html, read 2026-11, and MLflow 3.
"""

import base64
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from time import time
from typing import Any
from urllib.parse import SplitResult, quote, urlencode, urlsplit

from cavvy.client.landing import Landing
from cavvy.http_client import MOST_BYTES, HttpClient, NoReply

PREFIX = "models:/"
_NAME = re.compile(r"models:/(?P<name>[^/@]{1,250})(?:/(?P<number>[0-9]{1,9})|@(?P<alias>[^/@]+))?")
_API, _FILES = "/api/2.0/mlflow", "/api/2.0/mlflow-artifacts/artifacts"
_EXPERIMENT = "cavvy"
_MOST_FILES, _MOST_FOLDERS = 10_000, 1000
_MOST_READ = 1 << 40  # bytes of a file, which goes to the disk piece by piece
_MOST_SENT = 1 << 30  # bytes of a file, which is in memory while it is sent


class RegistryRefused(Exception):
    """Raised if a registry cannot be used, or has not what was asked for."""


class MlflowRegistry:
    """The registry at a URL."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        """Raises RegistryRefused."""
        self._url = environ.get("MLFLOW_TRACKING_URI", "").rstrip("/")
        split = _split(self._url)
        if split.scheme not in ("http", "https"):
            raise RegistryRefused(
                "MLFLOW_TRACKING_URI must be the URL of an MLflow server, such as "
                "https://mlflow.example.com"
            )
        if "@" in split.netloc:  # errors show the URL
            raise RegistryRefused(
                "MLFLOW_TRACKING_URI must have no user name and password: set "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            )
        self._headers = {"Content-Type": "application/json"}
        if token := environ.get("MLFLOW_TRACKING_TOKEN"):
            self._headers["Authorization"] = f"Bearer {token}"
        elif user := environ.get("MLFLOW_TRACKING_USERNAME"):
            both = f"{user}:{environ.get('MLFLOW_TRACKING_PASSWORD', '')}"
            self._headers["Authorization"] = f"Basic {base64.b64encode(both.encode()).decode()}"

    def pull(self, model: str, folder: Path) -> str:
        """Write the files of a version to a new folder. Return the version, as NAME/NUMBER. Raises
        RegistryRefused, LandingRefused, OSError."""
        name, number, alias = _read_name(model)
        if alias:
            found = self._ask("GET", "/registered-models/alias", {"name": name, "alias": alias})
            number = str(_take(found, "model_version", "version"))
        if not number:
            raise RegistryRefused(f"{model}: expected {PREFIX}NAME/NUMBER or {PREFIX}NAME@ALIAS")
        asked = {"name": name, "version": number}
        place = str(
            _take(self._ask("GET", "/model-versions/get-download-uri", asked), "artifact_uri")
        )
        root, count = _find_root(place, f"{name}/{number}"), 0
        folder.mkdir()
        with Landing(folder) as landing:
            for path in self._walk(root):
                count += 1
                if count > _MOST_FILES:
                    raise RegistryRefused(f"{name}/{number} has more than {_MOST_FILES} files")
                with landing.create(path) as file:
                    self._send("GET", f"{_FILES}/{quote(f'{root}/{path}')}", into=file)
        if not count:
            raise RegistryRefused(f"{name}/{number} has no files")
        return f"{name}/{number}"

    def push(self, model: str, folder: Path, title: str) -> str:
        """Register the files of a folder as the next version of a model. They become artifacts of a
        new run with this title, in the experiment `cavvy`, because MLflow takes them only from one.
        Return the version, as NAME/NUMBER. Raises RegistryRefused, OSError."""
        name, number, alias = _read_name(model)
        if number or alias:
            raise RegistryRefused(f"{model}: expected {PREFIX}NAME; MLflow numbers its versions")
        files = sorted(each for each in folder.rglob("*") if each.is_file())
        for path in files:
            if path.stat().st_size > _MOST_SENT:
                raise RegistryRefused(f"{path.name} has more than {_MOST_SENT >> 30} GiB")
        self._ask("POST", "/registered-models/create", {"name": name}, exists=True)
        self._ask("POST", "/experiments/create", {"name": _EXPERIMENT}, exists=True)
        asked = {"experiment_name": _EXPERIMENT}
        found = self._ask("GET", "/experiments/get-by-name", asked)
        experiment = str(_take(found, "experiment", "experiment_id"))
        run = self._ask(
            "POST",
            "/runs/create",
            {"experiment_id": experiment, "run_name": title, "start_time": round(time() * 1000)},
        )
        run_id = str(_take(run, "run", "info", "run_id"))
        try:
            uri = f"{_take(run, 'run', 'info', 'artifact_uri')}/model"
            root = _find_root(uri, f"a run of the experiment {_EXPERIMENT}")
            for path in files:
                inner = f"{root}/{path.relative_to(folder)}"
                self._send("PUT", f"{_FILES}/{quote(inner)}", path.read_bytes())
            version = {"name": name, "source": uri, "run_id": run_id, "description": title}
            made = self._ask("POST", "/model-versions/create", version)
        except BaseException:  # also if the user stops it
            with suppress(RegistryRefused):
                self._end_run(run_id, "FAILED")
            raise
        self._end_run(run_id, "FINISHED")
        return f"{name}/{_take(made, 'model_version', 'version')}"

    def _end_run(self, run_id: str, status: str) -> None:
        ended = {"run_id": run_id, "status": status, "end_time": round(time() * 1000)}
        self._ask("POST", "/runs/update", ended)

    def _walk(self, root: str) -> Iterator[str]:
        """Yield the paths of the files below a folder, relative to it."""
        folders, seen = [""], 0
        while folders:
            below, seen = folders.pop(), seen + 1
            if seen > _MOST_FOLDERS:
                raise RegistryRefused(f"the model has more than {_MOST_FOLDERS} folders")
            path = f"{root}/{below}".rstrip("/")
            found = json_of(self._send("GET", f"{_FILES}?{urlencode({'path': path})}"))
            listed = found.get("files") or []
            if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
                raise RegistryRefused("the MLflow server's list of files is none")
            for each in listed:
                inner = _check_name(each.get("path"))
                full = f"{below}/{inner}" if below else inner
                if each.get("is_dir"):
                    folders.append(full)
                else:
                    yield full

    def _ask(
        self, method: str, path: str, asked: Mapping[str, object], *, exists: bool = False
    ) -> Mapping[str, Any]:
        query = f"?{urlencode(asked)}" if method == "GET" else ""
        body = None if query else json.dumps(asked).encode()
        return json_of(self._send(method, f"{_API}{path}{query}", body, exists=exists))

    def _send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        into: Any = None,
        exists: bool = False,
    ) -> bytes:
        try:
            client = HttpClient(limit_s=3600.0, most_bytes=_MOST_READ if into else MOST_BYTES)
            answer = client.send(method, f"{self._url}{path}", body, self._headers, into=into)
        except NoReply as error:
            raise RegistryRefused(f"{self._url} does not answer: {error}") from error
        if answer.status < 300:
            return answer.body
        known = b"RESOURCE_ALREADY_EXISTS" in answer.body
        if exists and known:
            return b"{}"
        reason = ""
        try:
            reason = str(json.loads(answer.body)["message"])
        except (ValueError, LookupError, TypeError, RecursionError):
            reason = "it gives no reason"
        told = "".join(each if each.isprintable() else " " for each in reason[:300])
        raise RegistryRefused(f"{self._url} answers with status {answer.status}: {told}")


def json_of(body: bytes) -> dict[str, Any]:
    """Return the object that a body holds. Raises RegistryRefused."""
    try:
        return dict(json.loads(body or b"{}"))
    except (ValueError, TypeError, RecursionError) as error:
        raise RegistryRefused("the MLflow server's answer is no object in JSON") from error


def _find_root(uri: str, what: str) -> str:
    """Return the path of artifacts on the server. Raises RegistryRefused."""
    split = _split(uri)
    if split.scheme != "mlflow-artifacts":
        raise RegistryRefused(
            f"the files of {what} are in {split.scheme[:20] or 'a folder'}:, which the MLflow "
            "server does not pass on: use MLflow's own client, and publish a folder"
        )
    return split.path.strip("/")


def _split(url: str) -> SplitResult:
    """Return the parts of a URL; none of a malformed one."""
    try:
        return urlsplit(url if url.isprintable() else "")
    except ValueError:
        return urlsplit("")


def _read_name(model: str) -> tuple[str, str, str]:
    found = _NAME.fullmatch(model)
    if found is None:
        raise RegistryRefused(f"{model:.100}: expected {PREFIX}NAME/NUMBER or {PREFIX}NAME@ALIAS")
    return found["name"], found["number"] or "", found["alias"] or ""


def _take(found: Mapping[str, Any], *keys: str) -> object:
    value: Any = found
    for key in keys:
        if not isinstance(value, Mapping) or key not in value:
            raise RegistryRefused(f"the MLflow server's answer has no {'.'.join(keys)}")
        value = value[key]
    return value


def _check_name(path: object) -> str:
    """Return the name of a file or folder in another one: it must not lead out of it."""
    good = isinstance(path, str) and path not in ("", ".", "..") and path.isprintable()
    if not good or "/" in str(path) or "\\" in str(path):
        raise RegistryRefused(f"the MLflow server names a file {path!r:.100}")
    return str(path)
