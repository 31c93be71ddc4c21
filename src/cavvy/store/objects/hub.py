"""Reads repositories of the Hugging Face Hub, or of a server with the same API.

A repository is listed once, at one commit: later changes of a branch do not mix its files. Large
files have a SHA-256, and the Hub redirects to signed URLs on other hosts, which nodes get. The
token is sent only to the Hub itself. Small files of repositories that need a token are read by the
server, because their URLs are not signed.

Source: https://huggingface.co/docs/hub/api and the requests of huggingface_hub 1.x, read 2026-11.
"""

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from cavvy.domain.targets import EVERY
from cavvy.http_client import (
    MOST_BYTES,
    HttpClient,
    HttpReply,
    InvalidRequest,
    NoReply,
    TargetDenied,
    is_same_server,
)
from cavvy.store.objects.base import (
    ObjectDenied,
    ObjectInfo,
    ObjectMissing,
    ObjectTryAgain,
    SignedRequest,
)
from cavvy.store.objects.http import ask, check, make_range, parsing

ENDPOINT = "https://huggingface.co"
_URL = re.compile(
    r"hf://(?P<kind>(?:datasets/)?)(?P<repo>[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*)"
    r"(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9._-]*(?:%2F[A-Za-z0-9._-]+)*))?(?P<path>/.*)?"
)
_SIGNERS = 8  # requests to the Hub at a time
_MOST_REDIRECTS = 3
_SHA256 = re.compile(r"[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")


class HubRepository:
    """The files of one repository at one revision. Keys are paths in the repository."""

    def __init__(
        self, url: str, *, token: str = "", endpoint: str = ENDPOINT, targets: str = EVERY
    ) -> None:
        """Raises ObjectDenied."""
        found = _URL.fullmatch(url)
        if found is None:
            raise ObjectDenied(
                f"{url:.200} is no repository; write hf://ORGANISATION/NAME@REVISION/"
            )
        self.key = (found["path"] or "").removeprefix("/")
        self._name, self._kind = found["repo"], found["kind"]
        self._revision = found["revision"] or "main"
        self._root, self.targets = endpoint.rstrip("/"), targets
        self._token = token
        self._files: dict[str, ObjectInfo] | None = None
        self._commit = ""
        self._signed: dict[str, SignedRequest | None] = {}

    def head(self, key: str) -> ObjectInfo | None:
        return self._list().get(key)

    def list(
        self, prefix: str, after: str = "", limit: int = 1000
    ) -> tuple[Sequence[ObjectInfo], str]:
        names = [name for name in self._list() if name.startswith(prefix) and name > after]
        page = names[:limit]
        files = self._list()
        return [files[name] for name in page], page[-1] if len(page) < len(names) else ""

    def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        if length == 0:
            return b""
        span = make_range(offset, length)
        signed = self._resolve(key)
        if signed is not None:
            answer = ask("GET", signed.url, headers=span, targets=self.targets)
        else:
            answer = self._send(self._locate(key), span)[0]
        body = check(answer, self._say(key)).body
        if answer.status == 200 and span:
            return body[offset:] if length is None else body[offset : offset + length]
        return body

    def sign_all(self, keys: Sequence[str]) -> None:
        """Ask for the requests of several files at the same time; `sign_get` returns them once."""
        with ThreadPoolExecutor(_SIGNERS) as pool:
            self._signed.update(zip(keys, pool.map(self._resolve, keys), strict=True))

    def sign_get(self, key: str, expires_s: int) -> SignedRequest | None:
        return self._signed.pop(key) if key in self._signed else self._resolve(key)

    def _list(self) -> Mapping[str, ObjectInfo]:
        if self._files is not None:
            return self._files
        kind = "datasets" if self._kind else "models"
        url = f"{self._root}/api/{kind}/{self._name}/revision/{self._revision}?blobs=true"
        answer = self._send(url)[0]
        if answer.status in (401, 403):
            raise ObjectDenied(
                f"{self._name}: the Hub refuses access; set the project's secret HF_TOKEN to a "
                "token that may read the repository, and accept its terms on its page"
            )
        reply = check(answer, self._say(f"revision {self._revision}"))
        try:
            found = reply.parse_json()
        except NoReply as error:
            raise ObjectTryAgain(f"{self._name}: {error}") from error
        with parsing(self._name):
            self._commit = _match(_COMMIT, found["sha"])
            files = sorted((_read(each) for each in found["siblings"]), key=lambda each: each.key)
        self._files = {each.key: each for each in files}
        return self._files

    def _locate(self, key: str) -> str:
        if key not in self._list():
            raise ObjectMissing(f"{self._say(key)} does not exist")
        return f"{self._root}/{self._kind}{self._name}/resolve/{self._commit}/{quote(key)}"

    def _resolve(self, key: str) -> SignedRequest | None:
        """Return a request with which everybody can read the file, or None if it needs the
        token.
        """
        url = self._locate(key)
        answer, url = self._send(url, {"Range": "bytes=0-0"}, reads=False)
        if place := answer.headers.get("location"):
            return SignedRequest(method="GET", url=urljoin(url, place))
        if answer.status != 416:  # an empty file has no first byte
            check(answer, self._say(key))
        return None if self._token else SignedRequest(method="GET", url=url)

    def _send(
        self, url: str, headers: Mapping[str, str] = MappingProxyType({}), *, reads: bool = True
    ) -> tuple[HttpReply, str]:
        """Send a request to the Hub. Return the reply and its URL; a reply with a `location` leads
        to another server. Raises ObjectDenied, ObjectTryAgain.
        """
        client = HttpClient(targets=self.targets, most_bytes=MOST_BYTES if reads else 0)
        own = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        try:
            for _ in range(_MOST_REDIRECTS):
                answer = client.send("GET", url, headers={**headers, **own})
                place = answer.headers.get("location", "")
                if answer.status not in (301, 302, 303, 307, 308) or not place:
                    return answer, url
                following = urljoin(url, place)
                if not is_same_server(following, self._root):
                    self._check_other(following)
                    return answer, url
                url = following
        except TargetDenied as error:
            raise ObjectDenied(str(error)) from error
        except InvalidRequest as error:
            raise ObjectDenied(f"{self._name}: {error}") from error
        except NoReply as error:
            raise ObjectTryAgain(f"the Hub does not answer: {error}") from error
        raise ObjectDenied(f"{self._name}: the Hub redirects too often")

    def _check_other(self, url: str) -> None:
        """Raise ObjectDenied for a redirect to a server without TLS from one with TLS."""
        scheme = urlsplit(url).scheme
        if scheme != "https" and (scheme != "http" or self._root.startswith("https:")):
            raise ObjectDenied(f"{self._name}: the Hub redirects to an address without https://")

    def _say(self, key: str) -> str:
        return f"{self._name}/{key}"


def _read(sibling: Any) -> ObjectInfo:
    """Raises ValueError, LookupError, TypeError."""
    name, large = sibling["rfilename"], sibling.get("lfs") or {}
    size = large["size"] if large else sibling["size"]
    if not isinstance(name, str) or not isinstance(size, int) or size < 0:
        raise ValueError(f"a file has no name or size: {name!r:.100}")
    if not name.encode() or "\0" in name:  # `encode` raises ValueError for half a character
        raise ValueError(f"a name cannot be that of a file: {name!r:.100}")
    digest = _match(_SHA256, large["sha256"]) if large else ""
    return ObjectInfo(key=name, size=size, sha256=digest)


def _match(pattern: re.Pattern[str], text: object) -> str:
    if not isinstance(text, str) or pattern.fullmatch(text) is None:
        raise ValueError(f"{text!r:.100} is no hash")
    return text
