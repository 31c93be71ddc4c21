"""Reads a task file from the page of a repository, for the editor of the console.

The console calls an address that a user wrote, or that a link names. So it calls only public
addresses over HTTPS, sends no credentials, follows no redirects, and reads a short text in a short
time (`cavvy.http_client`).
"""

import re
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from urllib.parse import urlsplit

from cavvy.http_client import HttpClient, HttpReply, NoReply, ReplyTooLong, TargetDenied
from cavvy.spec import SpecError
from cavvy.task_files import parse_file

MOST_BYTES = 256 << 10
_LIMIT_S = 8.0
_LONGEST_ADDRESS = 2000
_NAME = r"[\w.~%+-]+"
# The page of a file at well-known sites, and where its text is. Each has a repository, a commit or
# a branch, and a path.
_PAGES = (
    (
        re.compile(rf"https://github\.com/({_NAME}/{_NAME})/(?:blob|raw)/({_NAME})/(.+)"),
        "https://raw.githubusercontent.com/{0}/{1}/{2}",
    ),
    (
        re.compile(rf"(https://[\w.-]+(?:/{_NAME})+)/-/(?:blob|raw)/({_NAME})/(.+)"),
        "{0}/-/raw/{1}/{2}",
    ),
    (
        re.compile(rf"(https://bitbucket\.org/{_NAME}/{_NAME})/(?:src|raw)/({_NAME})/(.+)"),
        "{0}/raw/{1}/{2}",
    ),
    (
        re.compile(rf"(https://[\w.-]+/{_NAME}/{_NAME})/(?:src|raw)/((?:branch|commit|tag)/{_NAME})/(.+)"),
        "{0}/raw/{1}/{2}",
    ),
    (
        re.compile(rf"(https://huggingface\.co(?:/{_NAME}){{2,3}})/(?:blob|raw|resolve)/({_NAME})/(.+)"),
        "{0}/raw/{1}/{2}",
    ),
)  # fmt: skip
_COMMIT = re.compile(r"(?:commit/)?([0-9a-f]{40})")
_Fetch = Callable[[str], HttpReply]


class NoFile(Exception):
    """There is no task file at an address; says why, and what to do."""


def find_raw(address: str) -> str:
    """Return where the text of a file is, of the address of its page. Raises NoFile."""
    address = address.strip().partition("#")[0]
    parts = None
    with suppress(ValueError):  # such as of "https://[::1"
        parts = urlsplit(address) if len(address) <= _LONGEST_ADDRESS else None
    if parts is None or parts.scheme != "https" or not parts.hostname or parts.username:
        raise NoFile(
            "The address of a file begins with https://, such as "
            "https://github.com/OWNER/REPOSITORY/blob/main/task.yaml"
        )
    for page, raw in _PAGES:
        if found := page.fullmatch(address.partition("?")[0]):
            return raw.format(*found.groups())
    return address


def find_workdir(address: str) -> str:
    """Return the working folder of a task whose file lies at the top of a repository, if its
    address names a commit: GIT-URL@COMMIT. Otherwise, return an empty text.
    """
    for page, _ in _PAGES:
        found = page.fullmatch(address.strip().partition("#")[0].partition("?")[0])
        commit = _COMMIT.fullmatch(found[2]) if found else None
        if found and commit and "/" not in found[3]:
            repository = (
                found[1] if found[1].startswith("https:") else f"https://github.com/{found[1]}"
            )
            return f"{repository}.git@{commit[1]}"
    return ""


def read_file(address: str, fetch: _Fetch | None = None) -> str:
    """Return the text of the task file at an address. A task file of Cavvy without `workdir` at the
    top of a repository gets the repository, if the address names a commit. Raises NoFile.
    """
    url = find_raw(address)
    try:
        reply = (fetch or _fetch)(url)
    except TargetDenied as error:
        raise NoFile(f"The console does not read {url}: {error}") from error
    except ReplyTooLong as error:
        raise NoFile(f"{url} has more than {MOST_BYTES:,} bytes, so it is no task file") from error
    except NoReply as error:
        raise NoFile(f"{url} cannot be read: {error}") from error
    if reply.status != HTTPStatus.OK:
        raise NoFile(
            f"{url} answers {reply.status}. Is the address right, and is the repository public? "
            "The console reads no private ones: download the file, and open it below"
        )
    try:
        text = reply.body.decode()
    except UnicodeDecodeError:
        raise NoFile(f"{url} is no text") from None
    if text.lstrip()[:1] == "<":
        raise NoFile(f"{url} is a page, not a file: use the address of the file's plain text")
    return _add_workdir(text, url, find_workdir(address))


def _add_workdir(text: str, url: str, workdir: str) -> str:
    named = re.search(r"^(?:workdir\s*:|---)", text, re.MULTILINE)
    if not workdir or named or not url.endswith((".yaml", ".yml")):
        return text
    added = f"{text.rstrip()}\nworkdir: {workdir}\n"
    try:  # files of other tools have no such key, or mean something else by it
        tasks = parse_file(added).tasks
    except SpecError:
        return text
    folders = [each.workdir for each in tasks]
    meant = [each is not None and f"{each.git}@{each.commit}" == workdir for each in folders]
    return added if meant and all(meant) else text


def _fetch(url: str) -> HttpReply:
    client = HttpClient(targets="", limit_s=_LIMIT_S, idle_s=_LIMIT_S, most_bytes=MOST_BYTES)
    return client.send("GET", url, headers={"Accept": "text/plain, */*;q=0.1"})
