"""`cavvy dev` with JupyterLab, and a stand-in of code-server, in a real browser, through the tunnel
of the command.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.dev.system.test_dev import terminal
from tests.system.chromium import Tab, chromium
from tests.system.storages import install
from tests.system.trust import User, user_at

pytestmark = pytest.mark.system
VERSION = "4.6.6"
NOTEBOOK = """\
{"cells": [{"cell_type": "code", "execution_count": null, "id": "first", "metadata": {},
  "outputs": [], "source": ["6 * 7"]}],
 "metadata": {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}},
 "nbformat": 4, "nbformat_minor": 5}
"""
SOCKETS = """{
  const Real = window.WebSocket;
  window.sockets = [];
  window.WebSocket = class extends Real {
    constructor(...given) { super(...given); window.sockets.push(this.url); }
  };
}"""


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    with user_at(tmp_path / "user") as made:
        made.settings("[providers.local]\n")
        yield made


@pytest.fixture
def tab(tmp_path: Path) -> Iterator[Tab]:
    (tmp_path / "browser").mkdir()
    with chromium(tmp_path / "browser") as made:
        made.call("Page.addScriptToEvaluateOnNewDocument", source=SOCKETS)
        made.call("Emulation.setFocusEmulationEnabled", enabled=True)
        yield made


def finds(program: Path) -> tuple[str, str]:
    """The options with which a session has the program, instead of installing it."""
    return "--env", f"PATH={program.parent}:{os.environ['PATH']}"


def press(tab: Tab, key: str, code: int, modifiers: int = 0, text: str = "") -> None:
    common = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
    tab.call("Input.dispatchKeyEvent", type="keyDown", **common, **({"text": text} if text else {}))
    tab.call("Input.dispatchKeyEvent", type="keyUp", **common)


def test_a_cell_of_jupyter_runs_on_the_node_and_shows_its_output(user: User, tab: Tab) -> None:
    program = install(
        f"jupyterlab-{VERSION}",
        "bin/jupyter-lab",
        f"{sys.executable} -m venv .",
        f"bin/pip install -q jupyterlab=={VERSION}",
    )
    (user.work / "answer.ipynb").write_text(NOTEBOOK)
    with terminal(user, "dev", "--ide", "jupyter", "--sync", ".", *finds(program)) as session:
        parts = urlsplit(session.wait(r"(http://127\.0\.0\.1:\d+/\S*)\s"))
        tab.open(f"http://{parts.netloc}/lab/tree/answer.ipynb?{parts.query}")
        editor = "document.querySelector('.jp-Notebook .jp-CodeCell .cm-content')"
        tab.wait(f"{editor}?.innerText.includes('6 * 7')")
        tab.wait("document.body.innerText.includes('| Idle')")
        assert tab.evaluate("sockets.some(each => each.includes('/api/kernels/'))")
        tab.evaluate(f"{editor}.focus()")
        press(tab, "Enter", 13, modifiers=8, text="\r")  # Shift+Enter
        output = "document.querySelector('.jp-OutputArea-output')?.innerText.trim()"
        tab.wait(f"{output} === '42'")
        tab.evaluate("document.querySelectorAll('.cm-content')[1].focus()")
        tab.call("Input.insertText", text="import os; print(os.environ['CAVVY_JOB_ID'])")
        press(tab, "Enter", 13, modifiers=8, text="\r")
        job = user.job("dev").id
        tab.wait(f"[...document.querySelectorAll('.jp-OutputArea-output')].some(e => e.innerText.includes('{job}'))")  # fmt: skip
        stranger = "fetch('/lab', {credentials: 'omit'}).then(each => new URL(each.url).pathname)"
        assert tab.evaluate(stranger) == "/login"


def test_code_server_asks_for_its_password_and_keeps_a_socket(
    user: User, tab: Tab, tmp_path: Path
) -> None:
    program = tmp_path / "bin" / "code-server"
    program.parent.mkdir()
    source = Path(__file__).parents[2].joinpath("system", "code_server_stand_in.py").read_text()
    program.write_text(f"#!{sys.executable}\n{source}")
    program.chmod(0o755)
    login = "document.querySelector('[name=password]').value = '{}'; document.forms[0].submit()"
    with terminal(user, "dev", "--ide", "code-server", *finds(program)) as session:
        secret = session.wait(r"password: (\w{32})\s")
        address = session.wait(r"(http://127\.0\.0\.1:\d+/)\s")
        tab.open(address)
        tab.wait("location.pathname === '/login' && document.forms.length === 1")
        tab.evaluate(login.format("x" * 32))
        tab.wait("document.body.innerText.includes('Incorrect password')")
        tab.evaluate(login.format(secret))
        tab.wait("document.querySelector('#said')?.textContent.includes('sent')")
        said = json.loads(tab.evaluate("document.querySelector('#said').textContent"))
        folder = user.cli("exec", "dev", "--", "pwd", "-P").strip()
        assert said == {"sent": 70000, "folder": folder, "job": user.job("dev").id}
        assert tab.evaluate("document.title") == "workbench"
        stranger = "fetch('/', {credentials: 'omit'}).then(each => new URL(each.url).pathname)"
        assert tab.evaluate(stranger) == "/login"
        mode = user.cli("exec", "dev", "--", "stat", "-c", "%a", ".code-server").strip()
        assert mode == "700"  # it has the password
    with terminal(user, "dev", "--ide", "code-server") as again:
        assert again.wait(r"password: (\w{32})\s") == secret  # the same server
    user.cli("machines", "stop", "dev", "--yes")
