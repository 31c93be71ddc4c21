"""`cavvy server setup` in a terminal and without one, up to an admin who signs in."""

import os
import pty
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.certificates import Authority
from tests.system.ports import free_port
from tests.system.server_state import PYTHON
from tests.system.trust import user_at
from tests.waits import START_S

pytestmark = pytest.mark.system


def answer(environ: dict[str, str], answers: list[str], *options: str) -> tuple[str, str]:
    """What the command prints on its two streams, when a person types these answers."""
    code = f"from cavvy.cli.main import cli; cli(['server', 'setup', *{options!r}])"
    controller, terminal = pty.openpty()
    with os.fdopen(controller, "wb"):
        process = subprocess.Popen(
            [PYTHON, "-c", code],
            stdin=terminal,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
        )
        os.write(controller, "".join(f"{each}\n" for each in answers).encode())
        out, err = process.communicate(timeout=START_S)
    os.close(terminal)
    return out, err


def test_a_person_answers_and_signs_in(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = map(str, authority.issue())
    with ExitStack() as stack:
        root, ada = (stack.enter_context(user_at(tmp_path / name)) for name in "ra")
        told = root.cli("server", "setup", "--listen", "0.0.0.0:7443", code=2)
        assert "no terminal to ask questions on, and --tls-cert is missing" in told
        listen = f"127.0.0.1:{free_port()}"
        wrong = ("--listen", listen, "--tls-cert", key, "--tls-key", key)
        assert "tls_cert" in answer(root.environ, ["sqlite", "no", "ada"], *wrong)[1]
        assert not root.config.read_text()

        url = f"https://{listen}"
        answers = [listen, "sqlite", "no", "ada"]
        out, err = answer(root.environ, answers, "--tls-cert", certificate, "--tls-key", key)
        assert out.startswith(f"cavvy login {url} --token "), err
        assert root.config.stat().st_mode & 0o077 == 0
        line = out.split()
        assert "signed in" in ada.cli(*line[1:], "--ca-file", str(authority.ca))
        assert ada.json("user", "list")[0]["name"] == "ada"
        assert "exists, and this command does not change it" in root.cli("server", "setup", code=1)


def test_options_answer_every_question(tmp_path: Path) -> None:
    with user_at(tmp_path) as user:
        options = ["--listen", "127.0.0.1:0", "--database", "sqlite", "--jobs-here", "--no-start"]
        mysql = [*options, "--database", "mysql://x"]
        assert "expected postgresql://" in user.cli("server", "setup", *mysql, code=1)
        assert "wrote " in user.cli("server", "setup", *options)
        lines = user.config.read_text().splitlines()
        assert lines[2:] == ["[server]", "idle_stop_s = 0", 'listen = "127.0.0.1:0"']
        assert not (user.home / "server.json").exists()
