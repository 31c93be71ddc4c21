"""The web console as a user runs it: a real `cavvy console` over a real server with jobs, for one
user and for two users whose roles differ.
"""

import re
import signal
import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from tests.certificates import Authority
from tests.system.trust import User, user_at
from tests.waits import wait_until

pytestmark = pytest.mark.system
WORK = "name: {name}\nrun: |\n  echo '<script>alert(1)</script>'\n  exec sleep 1000\n"
OPENED = {"sec-fetch-mode": "navigate"}


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start_console(user: User, *options: str) -> tuple[int, str]:
    """Start a console; its process id and the address that it prints."""
    command = user.start("console", *options)
    assert command.stdout is not None
    title, address = command.stdout.readline(), command.stdout.readline().strip()
    assert "until Ctrl-C" in title, title
    return command.pid, address


def browser_of(stack: ExitStack, address: str, ca: Path | None = None) -> httpx.Client:
    """A browser without a cookie yet. Its forms are those of the console's own pages."""
    trust = ssl.create_default_context(cafile=ca)
    parts = urlsplit(address)
    origin = f"{parts.scheme}://{parts.netloc}"
    client = httpx.Client(
        base_url=origin, headers={"origin": origin}, follow_redirects=True, timeout=60, verify=trust
    )
    return stack.enter_context(client)


def test_a_user_watches_and_stops_a_job_in_a_browser(tmp_path: Path, stack: ExitStack) -> None:
    user = stack.enter_context(user_at(tmp_path))
    user.settings("[providers.local]\n")
    name = user.submit(WORK.format(name="train"))
    user.wait(name, "running")
    wait_until(lambda: "alert" in user.said(name))
    command, address = start_console(user, "--no-browser", "--port", "0")
    browser, stranger = browser_of(stack, address), browser_of(stack, address)

    assert "Newest jobs" in browser.get(address).text
    assert "train" in browser.get("/jobs").text
    assert "Newest jobs" not in stranger.get("/").text, "without the key, nothing is shown"
    job = browser.get("/jobs/default/train").text
    assert "&lt;script&gt;alert(1)" in job
    assert "<script>alert(1)" not in job
    assert browser.get("/jobs/default/train/log?attempt=1&offset=0").json()["offset"] > 0
    for page in ("/machines", "/services", "/costs"):
        assert browser.get(page).status_code == 200

    other_site = {"origin": "http://evil.example"}
    assert browser.post("/jobs/default/train/stop", headers=other_site).status_code == 403
    assert stranger.post("/jobs/default/train/stop").url.path == "/sign-in"
    assert user.job(name).phase == "running"
    assert browser.post("/jobs/default/train/stop").status_code == 200
    assert user.ended(name).reason.startswith("stopped by ")

    user.forget()
    user.cli("server", "stop")
    assert "No server is running" in browser.get("/jobs").text
    assert user.server() is None, "a page that updates itself starts no server"
    assert "stopped" in browser.get("/jobs", headers=OPENED).text
    assert user.server() is not None
    user.kill_server()
    assert "stopped" in browser.get("/jobs", headers=OPENED).text
    end(user, command)


def end(user: User, command: int) -> None:
    """End a console as a shell does, and check that it says nothing on the way."""
    (console,) = (each for each in user._commands if each.pid == command)
    console.send_signal(signal.SIGTERM)
    out, err = console.communicate(timeout=60)
    assert console.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in out + err


def test_each_user_sees_what_their_own_role_permits(tmp_path: Path, stack: ExitStack) -> None:
    root, ada, ben = (stack.enter_context(user_at(tmp_path / name)) for name in ("r", "a", "b"))
    root.settings("[providers.local]\n")
    authority = Authority(tmp_path)
    certificate, key = map(str, authority.issue())
    tls = ("--listen", "127.0.0.1:0", "--tls-cert", certificate, "--tls-key", key)
    (url,) = re.findall(r"https://127\.0\.0\.1:\d+", root.cli("server", "start", *tls))
    ada_token = root.output("server", "init", "--admin", "ada").split()[-1]
    ada.cli("login", url, "--token", ada_token, "--ca-file", str(authority.ca))
    for project in ("vision", "speech"):
        ada.cli("project", "create", project)
    ada.cli("user", "add", "ben")
    ada.cli("role", "grant", "ben", "viewer", "-p", "speech")
    ben_token = ada.output("token", "create", "--user", "ben").strip()
    for project in ("vision", "speech"):
        ada.submit(WORK.format(name=f"job-of-{project}"), "-p", project)

    command, address = start_console(ada, *tls)
    browsers = [browser_of(stack, address, authority.ca) for _ in range(3)]
    of_ada, of_ben, of_nobody = browsers
    for browser, token in zip(browsers, (ada_token, ben_token, "a-wrong-token"), strict=True):
        assert "job-of-" not in browser.get("/jobs").text
        browser.post("/sign-in?next=/jobs", data={"token": token})
    check_what_each_sees(of_ada, of_ben, of_nobody)
    assert all(each.secure and each.name.startswith("__Host-") for each in of_ada.cookies.jar)

    trust = ("--ca-file", str(authority.ca))
    ben.cli("login", url, "--token", ben_token, *trust)
    own_command, own_address = start_console(ben, "--no-browser", "--port", "0")
    own = browser_of(stack, own_address)
    assert "job-of-speech" in own.get(own_address + "&next=/jobs").text

    (token_id,) = (each["id"] for each in ada.json("token", "list") if each["account"] == "ben")
    ada.cli("token", "revoke", token_id)
    page = of_ben.get("/jobs")
    assert page.url.path == "/sign-in"
    assert "no longer accepts your token" in page.text
    assert "cavvy login" in own.get("/jobs").text
    end(ben, own_command)
    port = url.rpartition(":")[2]
    root.cli("server", "stop")
    assert "The server does not answer" in of_ada.get("/jobs").text
    root.cli("server", "start", "--listen", f"127.0.0.1:{port}", *tls[2:])
    assert "job-of-vision" in of_ada.get("/jobs").text
    assert "job-of-" not in of_ben.get("/jobs").text
    of_ada.post("/sign-out")
    assert of_ada.get("/jobs").url.path == "/sign-in"
    end(ada, command)


def check_what_each_sees(
    of_ada: httpx.Client, of_ben: httpx.Client, stranger: httpx.Client
) -> None:
    assert "job-of-vision" in of_ada.get("/jobs").text
    assert "job-of-speech" in of_ada.get("/jobs").text
    assert "job-of-" not in stranger.get("/jobs").text
    for page in (
        "/",
        "/jobs",
        "/machines",
        "/devices",
        "/services",
        "/costs",
        "/jobs/speech/job-of-speech",
    ):
        answer = of_ben.get(page)
        assert answer.status_code == 200, (page, answer.text)
        assert "job-of-vision" not in answer.text
    assert "job-of-speech" in of_ben.get("/jobs").text
    assert of_ben.get("/jobs/vision/job-of-vision").status_code in (403, 404)
    assert of_ben.get("/jobs/vision/job-of-vision/log").status_code in (403, 404)
    refused = of_ben.post("/jobs/speech/job-of-speech/stop")
    assert refused.status_code == 403
    assert "role" in refused.text
