"""Task files of repositories in the console's editor."""

from collections.abc import Callable
from html import unescape

import pytest
from tests.console.unit.test_console_submit import client
from tests.console_rig import sign_in

from cavvy.console.pages import repository_file
from cavvy.console.pages.repository_file import NoFile, find_raw, read_file
from cavvy.http_client import HttpClient, HttpReply, NoReply, TargetDenied

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILE = "https://github.com/ada/digits/blob/main/task.yaml"
TEXT = "name: digits\nrun: python train.py\n"


def answer(body: bytes = TEXT.encode(), status: int = 200) -> Callable[[str], HttpReply]:
    return lambda url: HttpReply(status=status, body=body, headers={}, reason="")


@pytest.mark.parametrize(
    ("page", "raw"),
    [
        (FILE, "https://raw.githubusercontent.com/ada/digits/main/task.yaml"),
        (f"{FILE}?plain=1#L3", "https://raw.githubusercontent.com/ada/digits/main/task.yaml"),
        (
            "https://gitlab.com/group/sub/digits/-/blob/main/jobs/a.yaml",
            "https://gitlab.com/group/sub/digits/-/raw/main/jobs/a.yaml",
        ),
        (
            "https://bitbucket.org/ada/digits/src/main/task.yaml",
            "https://bitbucket.org/ada/digits/raw/main/task.yaml",
        ),
        (
            "https://codeberg.org/ada/digits/src/branch/main/task.yaml",
            "https://codeberg.org/ada/digits/raw/branch/main/task.yaml",
        ),
        (
            "https://huggingface.co/spaces/ada/digits/blob/main/task.yaml",
            "https://huggingface.co/spaces/ada/digits/raw/main/task.yaml",
        ),
        ("https://example.com/task.yaml?version=2", "https://example.com/task.yaml?version=2"),
    ],
)
def test_the_page_of_a_file_leads_to_its_text(page: str, raw: str) -> None:
    assert find_raw(page) == raw


@pytest.mark.parametrize(
    "address",
    [
        *("http://example.com/task.yaml", "file:///etc/passwd", "task.yaml", "", "https://"),
        *("https://ada:secret@example.com/task.yaml", "https://example.com/" + "a" * 3000),
        *("https://[::1/task.yaml", "https://[x]/task.yaml"),
    ],
)
def test_only_short_addresses_with_https_and_without_secrets_are_read(address: str) -> None:
    with pytest.raises(NoFile, match="begins with https"):
        read_file(address, fetch=answer())


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "[::1]", "169.254.169.254", "10.0.0.1", "[::ffff:10.0.0.1]"]
)
def test_no_address_that_is_not_public_is_called(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(NoFile, match="does not"):
        read_file(f"https://{host}/task.yaml")


def test_a_redirect_is_not_followed() -> None:
    with pytest.raises(NoFile, match="answers 302"):
        read_file(FILE, fetch=answer(status=302))


def refuse(error: Exception) -> Callable[[str], HttpReply]:
    def fetch(url: str) -> HttpReply:
        raise error

    return fetch


@pytest.mark.parametrize(
    ("fetch", "reason"),
    [
        (answer(b"\xff\xfe\0"), "is no text"),
        (answer(b"\n<!doctype html><title>Sign in</title>"), "is a page"),
        (answer(status=404), "is the repository public"),
        (refuse(NoReply("no reply")), "cannot be read"),
        (refuse(TargetDenied("it is private")), "it is private"),
    ],
)
def test_what_is_no_task_file_is_told(fetch: Callable[[str], HttpReply], reason: str) -> None:
    with pytest.raises(NoFile, match=reason):
        read_file(FILE, fetch=fetch)


def test_a_commit_brings_the_repository_along() -> None:
    page = FILE.replace("main", COMMIT)
    assert read_file(FILE, fetch=answer()) == TEXT
    whole = read_file(page, fetch=answer())
    assert whole == f"{TEXT}workdir: https://github.com/ada/digits.git@{COMMIT}\n"
    assert read_file(page.replace("task", "jobs/task"), fetch=answer()) == TEXT
    own = f"workdir: https://example.org/other.git@{COMMIT}\n{TEXT}"
    assert read_file(page, fetch=answer(own.encode())) == own


@pytest.mark.parametrize(
    "text",
    [
        "{name: digits, run: python train.py}\n",
        "type: task\nname: digits\ncommands: [python train.py]\n",
        "resources:\n  accelerators: A100:1\nsetup: pip install x\nrun: |\n  python train.py\n",
        "services:\n  train:\n    image: python:3.12\n    command: python train.py\n",
        """\
apiVersion: batch/v1
kind: Job
metadata: {name: digits}
spec:
  template:
    spec:
      containers: [{name: a, image: python, command: [python]}]
""",
        "a list, of nothing\n",
    ],
)
def test_files_to_which_workdir_means_something_else_stay_as_they_are(text: str) -> None:
    page = FILE.replace("main", COMMIT)
    assert read_file(page, fetch=answer(text.encode())) == text


def test_the_editor_opens_a_file_or_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    browser = sign_in(client())
    monkeypatch.setattr(repository_file, "_fetch", answer())
    page = unescape(browser.get("/submit", params={"file": FILE}).text)
    assert TEXT in page
    assert f'value="{FILE}"' in page
    monkeypatch.setattr(repository_file, "_fetch", answer(status=404))
    page = unescape(browser.get("/submit", params={"file": FILE}).text)
    assert "is the repository public?" in page
    assert "echo hello" in page, "the example is still there"


def test_the_client_has_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, object]] = []

    class Counting(HttpClient):
        def __init__(self, **options: object) -> None:
            made.append(options)
            super().__init__(**options)  # type: ignore[arg-type]  # what `_fetch` gives

    monkeypatch.setattr(repository_file, "HttpClient", Counting)
    with pytest.raises(NoFile):
        read_file("https://127.0.0.1/task.yaml")
    [options] = made
    assert options["targets"] == "", "only public addresses"
    assert options["most_bytes"] == repository_file.MOST_BYTES
    assert not options.get("redirects")
