"""`devcontainer.json` becomes a session, or is refused with the place and what to do."""

import json
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cavvy.capabilities.dev import command as dev
from cavvy.capabilities.dev.devcontainer import DevContainer
from cavvy.capabilities.dev.devcontainer import read_file as read_devcontainer
from cavvy.cli.task import submission
from cavvy.cli.view.failure import CommandFailure
from cavvy.spec import SpecError
from cavvy.task_files import ReadOptions, parse_task

FULL = """\
// For format details, see https://aka.ms/devcontainer.json
{
\t"name": "Python /* no comment */",
\t"image": "mcr.microsoft.com/devcontainers/python:3.12", // the image
\t/* several
\t   lines */
\t"features": {
\t\t"ghcr.io/devcontainers/features/git-lfs:1": {"autoPull": false},
\t\t"ghcr.io/rocker-org/devcontainer-features/apt-packages:1": {"packages": "jq, ffmpeg"},
\t},
\t"containerEnv": {"A": "1", "WHO": "${localEnv:WHO:nobody}"},
\t"remoteEnv": {"B": "${containerEnv:A}2"},
\t"forwardPorts": [8888, "localhost:6006"],
\t"onCreateCommand": ["echo", "two words"],
\t"postCreateCommand": {"one": "pip install -r requirements.txt", "two": ["make", "all"]},
\t"postStartCommand": "echo started",
\t"hostRequirements": {"cpus": 4, "memory": "8gb", "storage": "500mb", "gpu": "optional"},
\t"customizations": {
\t\t"vscode": {"extensions": ["ms-python.python", "--evil arg"]},
\t\t"codespaces": {},
\t},
\t"remoteUser": "vscode",
}
"""


def read(tmp_path: Path, text: str, **environ: str) -> DevContainer:
    path = tmp_path / ".devcontainer" / "devcontainer.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return read_devcontainer(path, environ)


def test_a_file_becomes_a_task_of_cavvy(tmp_path: Path) -> None:
    found = read(tmp_path, FULL, WHO="me")
    task = parse_task(json.dumps(found.task), options=ReadOptions(dialect="cavvy"))
    assert task.image == "mcr.microsoft.com/devcontainers/python:3.12"
    assert task.session
    assert task.workdir is not None
    assert task.workdir.path == str(tmp_path)
    assert task.env == {"A": "1", "WHO": "me", "B": "12"}
    setup = (task.setup or "").splitlines()
    assert setup[2].endswith("--no-install-recommends git-lfs jq ffmpeg")
    assert setup[3:] == ["echo 'two words'", "pip install -r requirements.txt", "make all"]
    assert task.run.startswith("echo started\ntrap")
    needs = task.resources
    assert (needs.cpus_min, needs.memory_min_mib, needs.disk_gib) == (4, 8192, 1)
    assert found.ports == (8888, 6006)
    assert found.extensions == ("ms-python.python",)
    assert not found.needs_gpu
    said = {each.key: each for each in found.kept}
    assert said["containerEnv"].reason == "contains the value of this machine's variable WHO"
    assert said["containerEnv"].line == 11
    assert "autoPull" in said["features"].reason
    assert "codespaces" in said["customizations"].reason
    assert set(said) >= {"remoteUser", "hostRequirements"}


def test_a_dockerfile_is_built_from_the_folder(tmp_path: Path) -> None:
    text = '{"build": {"dockerfile": "Dockerfile", "context": "..", "args": {"V": "3"}}}'
    found = read(tmp_path, text)
    assert found.task["image"] == {
        "build": ".",
        "dockerfile": ".devcontainer/Dockerfile",
        "args": {"V": "3"},
    }
    assert read(tmp_path, '{"dockerFile": "Dockerfile"}').task["image"]["build"] == ".devcontainer"


IMAGE = '"image": "python:3.12"'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"image": "python:3.12"', "1:24: this is not JSON"),
        ("", "this is not JSON"),
        ("[]", "the file has no keys"),
        ("{}", "`image` or `build` is missing"),
        ('{"image": 3}', "`image` must be a text"),
        ("{IMAGE, \"imgae\": 1}", "did you mean `image`?"),
        ('{IMAGE, "build": {"dockerfile": "D"}}', "`image` and `build` are both given"),
        ('{"build": {"dockerfile": "../../D"}}', "the image cannot be built from these paths"),
        ('{"build": {"dockerfile": ["D"]}}', "the value cannot be read"),
        ('{"dockerComposeFile": "c.yml"}', "Docker Compose is not supported"),
        ('{IMAGE, "features": {"ghcr.io/devcontainers/features/nvidia-cuda:1": {}}}', "use an image that contains it"),
        ('{IMAGE, "features": {"./local": {}}}', "runs no install scripts"),
        ('{IMAGE, "features": {"ghcr.io/evil.io/features/git:1": {}}}', "runs no install"),
        ('{IMAGE, "features": {"ghcr.io/rocker-org/x/apt-packages:1": {"packages": "jq; rm -rf /"}}}', "is not the name of a package"),
        ('{IMAGE, "forwardPorts": [0]}', "'0' is no port"),
        ('{IMAGE, "forwardPorts": [true]}', "is no port"),
        ('{IMAGE, "forwardPorts": ["db:5432"]}', "only the session's own ports"),
        ('{IMAGE, "containerEnv": {"A B": "x"}}', "has no name or value of a variable"),
        ('{IMAGE, "remoteEnv": {"PATH": "${containerEnv:PATH}:/x"}}', "known only on the node"),
        ('{IMAGE, "postCreateCommand": 3}', "the command cannot be read"),
        ('{IMAGE, "hostRequirements": {"memory": "much"}}', "`memory` is no size"),
        ('{IMAGE, "hostRequirements": {"memory": "' + "9" * 5000 + 'gb"}}', "`memory` is no size"),
        ('{IMAGE, "hostRequirements": {"cpus": 0}}', "`cpus` must be a whole number"),
        ('{IMAGE, "runArgs": ["--privileged"]}', "'--privileged' cannot be passed"),
        ('{IMAGE, "privileged": true}', "no further rights"),
        ('{IMAGE, "mounts": ["source=a,target=/b"]}', "write a task file with `volumes`"),
    ],
)  # fmt: skip
def test_what_a_session_cannot_have_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(SpecError) as found:
        read(tmp_path, text.replace("IMAGE", IMAGE))
    assert said in str(found.value)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a":' * 50_000,
        "/*" * 100_000,
        '"' + '\\"' * 100_000,
        '{"image": "x"' + ",   " * 60_000 + "}",
        "x" * 400_000,
        "\x00\ud7ff",
    ],
)
def test_hostile_files_are_refused_quickly(tmp_path: Path, text: str) -> None:
    with pytest.raises(SpecError):
        read(tmp_path, text)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8), st.sampled_from(["build", "features", "containerEnv", "forwardPorts", "postCreateCommand", "hostRequirements", "customizations", "runArgs", "secrets", "extensions", "image"]))  # fmt: skip
def test_any_value_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, value: Any, key: str
) -> None:
    folder = tmp_path_factory.mktemp("folder")
    try:
        found = read(folder, json.dumps({"image": "python:3.12", key: value}))
    except SpecError:
        return
    assert isinstance(json.loads(json.dumps(found.task)), dict)


def test_the_folder_is_searched_as_editors_do(tmp_path: Path) -> None:
    assert dev._find_devcontainer(tmp_path) is None
    for name in ("a", "b"):
        (tmp_path / ".devcontainer" / name).mkdir(parents=True)
        (tmp_path / ".devcontainer" / name / "devcontainer.json").write_text("{}")
    with pytest.raises(CommandFailure, match="there are several"):
        dev._find_devcontainer(tmp_path)
    (tmp_path / ".devcontainer.json").write_text("{}")
    assert dev._find_devcontainer(tmp_path) == str(tmp_path / ".devcontainer.json")


def test_a_needed_gpu_must_be_named(tmp_path: Path) -> None:
    found = read(tmp_path, '{"image": "python:3.12", "hostRequirements": {"gpu": {"cores": 1}}}')
    with pytest.raises(CommandFailure, match="needs a GPU"):
        dev._follow_devcontainer(found, ReadOptions())
    chosen = ReadOptions(overrides='{"resources": {"gpu": ["A10"]}}')
    assert dev._follow_devcontainer(found, chosen).text is not None
    resumed = dev.command.make_context("dev", ["resume", "--no-devcontainer"])
    with resumed:  # has its GPU; an option would ask for another place
        assert dev._follow_devcontainer(found, ReadOptions()).text is not None


def test_variables_of_this_machine_leave_it_only_if_the_user_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """{"image": "x", "containerEnv": {"A": "${localEnv:TOKEN}", "B": "${localEnv:NONE:b}"},
               "remoteEnv": {"C": "${env:OTHER}"}}"""
    found = read(tmp_path, text, TOKEN="secret", OTHER="other", UNUSED="u")
    assert found.taken == ("OTHER", "TOKEN")
    monkeypatch.setattr(submission, "may_ask", lambda: False)
    with pytest.raises(CommandFailure, match="OTHER, TOKEN; nothing was sent") as refused:
        dev._follow_devcontainer(found, ReadOptions())
    assert "--env OTHER --env TOKEN" in refused.value.hint
    named = ReadOptions(overrides='{"env": {"TOKEN": "secret", "OTHER": "other"}}')
    followed = json.loads(dev._follow_devcontainer(found, named).overrides)
    assert followed["workdir"] == str(tmp_path), "the file does not choose the folder"

    asked: list[str] = []
    monkeypatch.setattr(submission, "may_ask", lambda: True)
    monkeypatch.setattr(click, "confirm", lambda text, **_: asked.append(text))
    dev._follow_devcontainer(found, ReadOptions())
    assert asked == ["send them to the session?"]
