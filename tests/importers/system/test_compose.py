"""The compose file and the image: docker-compose accepts the file, and its server's command serves
on a real PostgreSQL with the settings beside it, outside of a container.
"""

import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest
import yaml
from tests.certificates import Authority
from tests.conftest import ROOT
from tests.system.packages import install_packages
from tests.system.ports import free_port
from tests.system.postgres import PostgresMissing, new_database
from tests.waits import START_S, wait_until

pytestmark = pytest.mark.system

FOLDER = ROOT / "deploy" / "compose"
OWN = str(Path(sys.executable).with_name("cavvy"))
PASSWORD = "CAVVY_DATABASE_PASSWORD"


def test_docker_compose_accepts_the_file_and_wants_a_password() -> None:
    if shutil.which("docker-compose") is None:
        why = install_packages(["docker-compose"])
        if shutil.which("docker-compose") is None:
            pytest.skip(f"docker-compose is not installed, so the file is unchecked: {why}")
    command = ["docker-compose", "--file", str(FOLDER / "compose.yaml"), "config"]
    environ = {name: text for name, text in os.environ.items() if name != PASSWORD}
    done = subprocess.run(
        command, env={**environ, PASSWORD: "x"}, capture_output=True, text=True, timeout=START_S
    )
    assert done.returncode == 0, done.stderr
    server = yaml.safe_load(done.stdout)["services"]["server"]
    assert server["environment"]["PGPASSWORD"] == "x"
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=START_S)
    assert "write it to the file .env" in done.stderr


def test_the_servers_command_serves(tmp_path: Path) -> None:
    try:
        url = new_database().replace("+psycopg", "")
    except PostgresMissing as missing:
        pytest.skip(f"no PostgreSQL: {missing}")
    services = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    server, image = services["server"], read_image()
    listen, environ = settle(server, image, url, tmp_path)
    assert image["ENTRYPOINT"] == '["cavvy"]'
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([OWN, *server["command"]], env=environ, stderr=log)
    try:
        trusted = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
        health = f"https://{listen}/v1/health"
        wait_until(lambda: answers(health, trusted), (tmp_path / "log").read_text, START_S)
        # the check of the container's health
        check = server["healthcheck"]["test"]
        told = subprocess.run([OWN, *check[2:]], env=environ, capture_output=True, text=True)
        assert (check[:2], told.returncode) == (["CMD", "cavvy"], 0), told.stderr
        assert re.search(r"database +postgresql", told.stdout)
        process.send_signal(signal.SIGTERM)
        assert process.wait(START_S) == 0
    finally:
        process.kill()
        process.wait()


def settle(
    server: dict[str, Any], image: dict[str, str], url: str, folder: Path
) -> tuple[str, dict[str, str]]:
    """The address and the environment of the server, with the paths of this machine in place of
    the container's, and the tests' PostgreSQL in place of the service `database`.
    """
    certificate, key = Authority(folder).issue()
    port = free_port()
    inner = server["ports"][0].partition(":")[2]
    settings = (FOLDER / "settings.toml").read_text()
    for old, new in (
        (f"0.0.0.0:{inner}", f"127.0.0.1:{port}"),
        ("/etc/cavvy/tls/tls.crt", str(certificate)),
        ("/etc/cavvy/tls/tls.key", str(key)),
    ):
        assert old in settings
        settings = settings.replace(old, new)
    (folder / "settings.toml").write_text(settings)
    mounts = dict(each.split(":")[:2][::-1] for each in server["volumes"])
    environ: dict[str, str] = server["environment"]
    assert mounts[environ["CAVVY_CONFIG"]] == "./settings.toml"
    home = re.search(r"CAVVY_HOME=(\S+)", image["ENV"])
    assert home is not None
    assert mounts[home[1]] == "state"
    assert image["VOLUME"] == home[1]
    database = urlsplit(environ["CAVVY_SERVER_DATABASE"])
    assert (database.hostname, database.username, database.path) == ("database", "cavvy", "/cavvy")
    return f"127.0.0.1:{port}", {
        **environ,
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "CAVVY_CONFIG": str(folder / "settings.toml"),
        "CAVVY_HOME": str(folder / "state"),
        "CAVVY_SERVER_DATABASE": url,
    }


def answers(url: str, trusted: ssl.SSLContext) -> bool:
    try:
        with urlopen(url, context=trusted, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def read_image() -> dict[str, str]:
    """The last instruction of each kind in the Dockerfile. What it copies from the repository is
    there, and its locked versions are those of the tests.
    """
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.partition(" ") for line in text.splitlines() if line and line[0] != "#"]
    for kind, _, rest in lines:
        if kind == "COPY" and not rest.startswith("--from"):
            assert all((ROOT / each).exists() for each in rest.split()[:-1]), rest
    assert "requirements/server.lock" in text
    return {kind: rest for kind, _, rest in lines}


def test_the_images_versions_are_those_of_the_tests() -> None:
    base, server, dev = (
        re.split(r"\n(?=\S)", (ROOT / f"requirements/{name}.lock").read_text().rstrip("\n"))
        for name in ("base", "server", "dev")
    )
    assert set(base) < set(server) < set(dev)
    assert {each.partition("==")[0] for each in set(server) - set(base)} >= {"psycopg"}
