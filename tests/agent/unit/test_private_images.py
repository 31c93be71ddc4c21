"""A machine that separates projects gives a task an image that was pulled with a login only if the
registry permits the task to pull it: against stand-ins of the engines with a registry of their own.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.waits import wait_until

from cavvy.agent.config import AgentConfig, ConfigFields, read_work
from cavvy.agent.data import fetch
from cavvy.agent.images.apptainer import bring_sif
from cavvy.agent.images.engine import bring_image
from cavvy.agent.work import container, prepare
from cavvy.agent.work.folder import CannotBuild
from cavvy.agent.work.reaper import ChildCommand

IMAGE, ID = "registry.example/team/image:1", "sha256:0123456789ab"
OWN, OTHER, PUBLIC = "ann:opensesame", "eve:guessed", None
# The state has the images of this machine by name and by ID, and the logins that the registry
# permits.
DOCKER = """\
import base64, json, os, sys
argv, path = sys.argv[1:], os.path.dirname(sys.argv[0]) + "/state"
state = json.load(open(path))
if argv[:2] == ["image", "inspect"]:
    if argv[-1] not in state["here"]:
        sys.exit("No such image")
    print(state["id"] if argv[3] == "{{.Id}}" else "{}")
elif "pull" in argv:
    login = None
    if argv[0] == "--config":
        (entry, *_) = json.load(open(argv[1] + "/config.json"))["auths"].values()
        login = base64.b64decode(entry["auth"]).decode()
    state["pulls"] += 1
    if argv[-1] != state["image"] or login not in state["permits"]:
        json.dump(state, open(path, "w"))
        sys.exit("denied")
    state["here"] = [state["image"], state["id"], state["id"].partition(":")[2][:6]]
elif argv[0] == "build":
    state["here"].append("built")
    state["builds"].append("--pull" in argv)
json.dump(state, open(path, "w"))
"""
APPTAINER = """\
import json, os, sys
argv, path = sys.argv[1:], os.path.dirname(sys.argv[0]) + "/state"
state = json.load(open(path))
if argv[0] == "pull":
    user = os.environ.get("APPTAINER_DOCKER_USERNAME")
    login = user and user + ":" + os.environ["APPTAINER_DOCKER_PASSWORD"]
    state["pulls"] += 1
    json.dump(state, open(path, "w"))
    if login not in state["permits"]:
        sys.exit("denied")
    open(argv[argv.index("--force") + 1], "w").close()
else:
    print("{}")
"""


@dataclass
class Machine:
    """A machine with an engine of this kind."""

    folder: Path
    bring: Callable[..., object]
    program: str
    separates: bool = True
    own_cache: str = ""

    def start(self, login: str | None, image: str = IMAGE, **work: object) -> None:
        """Get the image for a task with this login."""
        self.bring(self.program, *self.describe(login, image, **work), *self.environments())

    def describe(self, login: str | None, image: str, **work: object) -> tuple[Any, Any]:
        config = {
            "gang": "g",
            "rank": 0,
            "address": "http://127.0.0.1:1",
            "token": "t",
            "home": str(self.folder / "home"),
            "cache": str(self.folder / "cache"),
            "separates": self.separates,
            "own_cache": self.own_cache,
        }
        asked = {"job": "j", "job_id": "i", "project": "p", "attempt": 1, "run": "true", **work}
        asked.update(image=image, image_login=login)
        return (
            AgentConfig(ConfigFields(config, "configuration")),
            read_work(ConfigFields(asked, "work")),
        )

    def environments(self) -> tuple[object, ...]:
        environment = {"PATH": "/usr/bin:/bin"}
        if self.bring is bring_sif:
            return (environment,)
        command = ChildCommand([], environment, "/")
        command.channel = os.open(os.devnull, os.O_WRONLY)
        return command, environment

    def refuses(self, login: str | None, image: str = IMAGE) -> bool:
        with pytest.raises(CannotBuild, match="could not be pulled"):
            self.start(login, image)
        return True

    def state(self, **changes: object) -> dict[str, Any]:
        path = self.folder / "state"
        state: dict[str, Any] = json.loads(path.read_text()) | changes
        path.write_text(json.dumps(state))
        return state


@pytest.fixture(params=["docker", "apptainer"])
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Machine:
    text, bring = (DOCKER, bring_image) if request.param == "docker" else (APPTAINER, bring_sif)
    program = tmp_path / request.param
    program.write_text(f"#!{sys.executable} -IS\n{text}")  # starts without what is installed
    program.chmod(0o755)
    state = {"here": [], "image": IMAGE, "id": ID, "permits": [OWN], "pulls": 0, "builds": []}
    (tmp_path / "state").write_text(json.dumps(state))
    return Machine(tmp_path, bring, str(program))


def test_only_a_login_that_the_registry_permits_gets_a_private_image(machine: Machine) -> None:
    machine.start(OWN)
    assert machine.refuses(PUBLIC)
    assert machine.refuses(OTHER)
    machine.start(OWN)
    machine.state(permits=[])  # the login was revoked
    assert machine.refuses(OWN)
    machine.separates = False
    machine.start(PUBLIC)


@pytest.mark.parametrize("login", [OWN, OTHER])
def test_the_image_is_pulled_while_inputs_are_copied(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, login: str | None
) -> None:
    """A pull that fails fails again, with its message, when the container starts."""
    if machine.bring is bring_sif:
        login = None if login == OWN else login  # an image with a login would be copied twice
        machine.state(permits=[login] if login is None else [])
    monkeypatch.setattr(container, "find_engine", lambda: machine.program)

    def wait_for_pull(*args: object) -> None:
        if machine.bring is bring_sif and login:
            return
        wait_until(lambda: '"pulls": 1' in (machine.folder / "state").read_text())

    monkeypatch.setattr(fetch, "fetch_input", wait_for_pull)
    config, work = machine.describe(
        login, IMAGE, inputs=[{"source": "s3://b/weights", "target": "weights"}]
    )
    Path(config.folder).mkdir(parents=True)
    with (machine.folder / "channel").open("wb") as channel:
        assert prepare.prepare(config, work, {}, channel.fileno()) == 0
    if login in machine.state()["permits"]:
        machine.start(login)
        assert machine.state()["pulls"] == (1 if login is None else 2)  # it asks for each login
    else:
        assert machine.refuses(login)


def test_a_private_image_cannot_be_named_by_its_id(machine: Machine) -> None:
    machine.start(OWN)
    for name in (ID, ID.partition(":")[2][:6]):
        assert machine.refuses(OTHER, name)


def test_images_that_need_no_login_are_not_pulled_again(machine: Machine) -> None:
    machine.state(permits=[OWN, PUBLIC])
    machine.start(PUBLIC)
    machine.start(OTHER)  # the machine had the image before any task with a login
    assert machine.state()["pulls"] == 1


def test_an_image_proves_to_be_public(machine: Machine) -> None:
    machine.state(permits=[OWN, PUBLIC])
    for login in (OWN, PUBLIC, PUBLIC, OTHER):
        machine.start(login)
    assert machine.state()["pulls"] == 2


def test_a_refused_login_keeps_the_image_private(machine: Machine) -> None:
    assert machine.refuses(OTHER)
    machine.start(OWN)
    assert machine.refuses(PUBLIC)


def test_a_build_does_not_start_from_the_private_image_of_others(machine: Machine) -> None:
    if machine.bring is bring_sif:
        return  # Apptainer builds nothing
    blobs = machine.folder / "cache/blobs"
    blobs.mkdir(parents=True)

    def store(data: bytes) -> str:
        name = hashlib.sha256(data).hexdigest()
        (blobs / name).write_bytes(data)
        return name

    file = {"path": "Dockerfile", "sha256": store(f"FROM {IMAGE}\n".encode()), "size": 1 << 20}
    made = {
        "workdir": {"snapshot": store(json.dumps({"files": [file]}).encode())},
        "build": {"path": "."},
    }
    machine.start(PUBLIC, "built", **made)
    machine.start(OWN)
    for _ in range(2):
        machine.start(PUBLIC, "built", **made)
    machine.separates = False
    machine.start(PUBLIC, "built", **made)
    assert machine.state()["builds"] == [False, True, True]


def test_a_project_does_not_use_an_image_that_another_project_may_have_replaced(
    machine: Machine,
) -> None:
    if machine.bring is bring_sif:
        return  # each project has its own files of images
    machine.own_cache, machine.separates = "h-own", False
    machine.state(permits=[PUBLIC])
    for _ in range(2):
        machine.start(PUBLIC)
    assert machine.state()["pulls"] == 1
    machine.state(id="sha256:eeeeeeeeeeee")  # another image has the name now
    machine.start(PUBLIC)
    assert machine.state()["pulls"] == 2
    machine.start(PUBLIC)
    assert machine.state()["pulls"] == 2
    machine.state(id="sha256:ffffffffffff", permits=[])  # the registry does not answer
    machine.start(PUBLIC)
    assert machine.state()["pulls"] == 3


def test_a_project_builds_an_image_again_that_another_project_may_have_replaced(
    machine: Machine,
) -> None:
    if machine.bring is bring_sif:
        return  # Apptainer builds nothing
    machine.own_cache, machine.separates = "h-own", False
    blobs = machine.folder / "cache/blobs"
    blobs.mkdir(parents=True)
    made = {"workdir": {"snapshot": ""}, "build": {"path": "."}}
    content = {"Dockerfile": b"FROM x\n"}
    entries = []
    for path, data in content.items():
        name = hashlib.sha256(data).hexdigest()
        (blobs / name).write_bytes(data)
        entries.append({"path": path, "sha256": name, "size": 1 << 20})
    manifest = json.dumps({"files": entries}).encode()
    made["workdir"] = {"snapshot": hashlib.sha256(manifest).hexdigest()}
    (blobs / made["workdir"]["snapshot"]).write_bytes(manifest)
    for changes in ({}, {}, {"id": "sha256:eeeeeeeeeeee"}):
        machine.state(**changes)
        machine.start(PUBLIC, "built", **made)
    assert len(machine.state()["builds"]) == 2
