"""What a registry may answer: a token's login, redirects, other content, too much content."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cavvy.api.images.registry import ImageRepository, RegistrySilent, parse_image

DIGEST = f"sha256:{'0' * 64}"


class TokenRegistry(BaseHTTPRequestHandler):
    """A registry that asks for a token, and keeps its blobs elsewhere."""

    seen: list[tuple[str, str]]

    def do_GET(self) -> None:
        authorization = self.headers.get("Authorization", "")
        self.seen.append((self.path, authorization))
        host = self.headers["Host"]
        if self.path.startswith("/token"):
            return self._reply(200, b'{"token": "abc"}')
        if self.path.startswith("/elsewhere"):
            return self._reply(200, b"other content")
        if authorization != "Bearer abc":
            told = f'Bearer realm="http://{host}/token?x=1",service="s",scope="repository:b:push"'
            return self._reply(401, b"", ("WWW-Authenticate", told))
        if "/blobs/" in self.path:
            return self._reply(307, b"", ("Location", f"http://{host}/elsewhere"))
        if self.path.endswith("large"):
            return self._reply(200, b"x" * (5 << 20))
        return self._reply(404, b"")

    def _reply(self, status: int, body: bytes, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        for name, value in (*headers, ("Content-Length", str(len(body)))):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def registry() -> Iterator[str]:
    TokenRegistry.seen = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), TokenRegistry)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_token_is_asked_for_once_and_stays_at_the_registry(registry: str) -> None:
    repository = ImageRepository(parse_image(f"{registry}/a:1"), "user:word")
    assert repository.find_digest() is None
    with pytest.raises(RegistrySilent, match="content that differs"):
        repository.read_blob(DIGEST)
    asked = [path for path, _ in TokenRegistry.seen if path.startswith("/token")]
    assert asked == ["/token?x=1&service=s&scope=repository%3Aa%3Apull"]
    sent = dict(TokenRegistry.seen)
    assert sent[asked[0]] == "Basic dXNlcjp3b3Jk"
    assert sent["/elsewhere"] == "", "the storage of the blobs does not get the token"


def test_too_much_content_is_not_read(registry: str) -> None:
    repository = ImageRepository(parse_image(f"{registry}/a:large"))
    with pytest.raises(RegistrySilent, match="longer than 4 MiB"):
        repository.find_digest()


def test_a_registry_with_tls_cannot_send_a_login_to_one_without() -> None:
    repository = ImageRepository(parse_image("ghcr.io/a:1"), "user:word")
    with pytest.raises(RegistrySilent, match="unknown kind"):
        repository._log_in('Bearer realm="http://evil.example/token"')
