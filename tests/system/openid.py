"""A real OpenID server for tests, npm's oidc-provider, and people with a browser."""

import json
import re
import urllib.request
from html import unescape
from http.cookiejar import CookieJar
from pathlib import Path
from shutil import which
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode, urljoin

import pytest
from tests.system.ports import free_port
from tests.system.storages import answers, install, start

VERSION = "8.8.1"  # it runs on Debian's Node.js 18, too
_PAGES = 10  # at most, of one sign-in


class OpenIdServer:
    """A running server. `people` maps logins to claims; `save` makes a change of it count."""

    def __init__(self, url: str, people: Path) -> None:
        self.url = url
        self.people: dict[str, dict[str, Any]] = {}
        self._file = people

    def save(self) -> None:
        self._file.write_text(json.dumps(self.people))

    def post(self, path: str, **fields: str) -> dict[str, Any]:
        """The JSON that answers a form, also one that is refused."""
        body = urlencode(fields).encode()
        try:
            with urllib.request.urlopen(self.url + path, body, timeout=30) as answer:
                found: dict[str, Any] = json.load(answer)
        except HTTPError as error:
            with error:
                found = json.load(error)
        return found


def start_openid_server(folder: Path) -> OpenIdServer:
    """It ends with this process. Skips the test where Node.js or the package is not to be had."""
    if which("npm") is None:
        pytest.skip("oidc-provider needs npm: sudo apt-get install -y npm")
    name = f"oidc-provider-{VERSION}"
    package = "node_modules/oidc-provider/package.json"
    command = f"npm install --silent --no-fund --no-audit --ignore-scripts oidc-provider@{VERSION}"
    root = Path(str(install(name, package, command)).removesuffix(package))
    port, program = free_port(), Path(__file__).with_name("openid_provider.mjs")
    server = OpenIdServer(f"http://127.0.0.1:{port}", folder / "people.json")
    server.save()
    argv = ["node", program, root, port, folder / "people.json"]
    start(argv, lambda: answers(port), folder / "openid.log")
    return server


def sign_in_with_browser(url: str, login: str) -> str:
    """Do what a person does with the pages of the server; the text of the last one."""
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
    data: bytes | None = None
    page = ""
    for _ in range(_PAGES):
        try:
            with browser.open(url, data, timeout=30) as answer:
                url, page = answer.geturl(), answer.read().decode()
        except HTTPError as error:
            with error:
                return error.read().decode()
        form = re.search(r'<form[^>]*action="([^"]+)"', page)
        if form is None:
            return page
        fields = {
            name: unescape(value)
            for name, value in re.findall(
                r'<input type="hidden" name="(\w+)" value="([^"]*)"', page
            )
        }
        fields |= {"login": login, "password": "any"} if 'name="login"' in page else {}
        url, data = urljoin(url, unescape(form[1])), urlencode(fields).encode()
    return page
