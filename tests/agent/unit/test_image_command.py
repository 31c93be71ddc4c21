"""An image's own command: in task files, by the image's registry and by the container engine."""

import asyncio
import json
import re
import subprocess
import threading
from collections.abc import Iterator, Mapping
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest

from cavvy.agent.images.own_command import fill_in_command, names_own_command
from cavvy.api.errors import ApiProblem
from cavvy.api.images.pinned import ImageVerifier
from cavvy.domain.tasks import TaskSpec
from cavvy.spec import SpecError
from cavvy.task_files import parse_file, parse_task

OWN = "${{ image.command }}"
CONFIG = {"Entrypoint": ["python", "-u"], "Cmd": ["app.py", "it's"], "WorkingDir": "/app"}


@pytest.mark.parametrize(
    ("image", "run", "words"),
    [
        (CONFIG, OWN, ["python", "-u", "app.py", "it's"]),
        (CONFIG, "exec ${{image.entrypoint}} b", ["python", "-u", "b"]),
        ({"Cmd": ["serve"]}, OWN, ["serve"]),
        # without an entry point, the words that follow are the command
        ({"Cmd": ["a"]}, "exec ${{ image.entrypoint }} serve b", ["serve", "b"]),
        ({"Entrypoint": ["serve"], "Cmd": None}, OWN, ["serve"]),
    ],
)
def test_the_command_runs_in_the_images_folder(
    tmp_path: Path, image: Mapping[str, object], run: str, words: list[str]
) -> None:
    program = tmp_path / words[0]
    program.write_text('#!/bin/sh\npwd\nfor word in "$0" "$@"; do echo "${word##*/}"; done\n')
    program.chmod(0o755)
    filled = fill_in_command(run, {**image, "WorkingDir": str(tmp_path)})
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    ran = subprocess.run(["sh", "-c", filled], env=env, capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == [str(tmp_path), *words]


@pytest.mark.parametrize(
    ("image", "run", "said"),
    [
        ({}, OWN, "names no command; write `run`"),
        ({"Entrypoint": "sh -c"}, OWN, "names no command"),
        ({"Cmd": ["a\0b"]}, OWN, "cannot be run"),
        ({"Cmd": ["a"], "WorkingDir": "/\0"}, OWN, "cannot be run"),
        ({"Cmd": ["a" * 70000]}, OWN, "cannot be run"),
    ],
)
def test_an_image_without_a_command_is_told(
    image: Mapping[str, object], run: str, said: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        fill_in_command(run, image)


def test_an_image_without_an_entry_point_needs_words() -> None:
    filled = fill_in_command("exec ${{ image.entrypoint }}", {"Cmd": ["a"]})
    ran = subprocess.run(["sh", "-c", filled], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (127, "the image names no entry point; write `run`\n")


@pytest.mark.parametrize("image", ["a", "{name: a, login: L}", "{build: .}\nworkdir: ."])
def test_a_task_with_an_image_needs_no_run(image: str) -> None:
    task = parse_task(f"image: {image}")
    assert task.run == OWN
    assert names_own_command(task.run)
    assert not names_own_command(parse_task("image: a\nrun: echo").run)
    (found,) = parse_file("type: task\nimage: a").tasks
    assert names_own_command(found.run)


def test_arguments_follow_the_entry_point() -> None:
    run = "exec ${{ image.entrypoint }} --n ${{ params.n }}"
    assert parse_task(f"params: {{n: 3}}\nimage: a\nrun: {run}").run == (
        "exec ${{ image.entrypoint }} --n 3"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: a", "`run` is missing"),
        ("image:", "`run` is missing"),
        ("image: a\nrun:", "`run` is empty"),
        ("run: a\nenv: {A: '${{ image.command }}'}", "can be used in `run` only"),
        ("image: a\nrun: '${{ image.comand }}'", "only parameters are allowed"),
    ],
)
def test_mistakes_are_told(text: str, said: str) -> None:
    with pytest.raises(SpecError, match=re.escape(said)):
        parse_task(text)


class _Registry(BaseHTTPRequestHandler):
    blobs: Mapping[str, bytes] = {}

    def do_GET(self) -> None:
        body = self.blobs.get(unquote(self.path).rpartition("/")[2])
        self.send_response(200 if body is not None else 404)
        self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def registry() -> Iterator[str]:
    def blob(value: object) -> tuple[str, bytes]:
        body = json.dumps(value).encode()
        return f"sha256:{sha256(body).hexdigest()}", body

    config, text = blob({"architecture": "amd64", "config": CONFIG})
    bare, bare_text = blob({"architecture": "amd64"})
    own, manifest = blob({"config": {"digest": config}, "layers": []})
    _, empty = blob({"config": {"digest": bare}, "layers": []})
    _, index = blob({"manifests": [{"digest": own}]})
    _Registry.blobs = {
        config: text, own: manifest, bare: bare_text, "1": manifest, "all": index, "bare": empty
    }  # fmt: skip
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Registry)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def fill_in(image: str) -> str:
    task = TaskSpec(name="a", run=OWN, image=image)
    return asyncio.run(ImageVerifier().fill_in_command(task, None)).run


@pytest.mark.parametrize("tag", ["1", "all"])
def test_the_registry_tells_the_command(registry: str, tag: str) -> None:
    assert fill_in(f"{registry}/app:{tag}") == fill_in_command(OWN, CONFIG)


def test_a_silent_registry_leaves_the_command_to_the_node(registry: str) -> None:
    assert fill_in(f"{registry}/app:2") == OWN
    assert fill_in("localhost:1/app") == OWN
    with pytest.raises(ApiProblem, match="names no command"):
        fill_in(f"{registry}/app:bare")
