"""An issuer of ID tokens on this machine, with keys of its own."""

import base64
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

AUDIENCE = "https://cavvy.example.com"
DISCOVERY, KEYS = "/.well-known/openid-configuration", "/keys"


@dataclass(frozen=True)
class IssuerAnswer:
    """An answer to a request."""

    body: bytes
    status: int = 200
    location: str = ""

    @staticmethod
    def of(value: object, status: int = 200) -> "IssuerAnswer":
        return IssuerAnswer(json.dumps(value).encode(), status)


BROKEN = IssuerAnswer(b"{}", 500)


class Issuer:
    """Publishes `keys` and signs with them. `asked` are the paths of the requests. `given` are
    answers in place of its own, by their paths, and `forms` the forms that were posted; with
    `delay` set, it answers when that is set.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.keys: dict[str, Any] = {"one": rsa.generate_private_key(65537, 2048)}
        self.asked: list[str] = []
        self.restore()

    def restore(self) -> None:
        """Publish the first key only, and answer as an issuer should."""
        self.keys = {"one": self.keys["one"]}
        self.asked.clear()
        self.given: dict[str, IssuerAnswer] = {}
        self.forms: dict[str, dict[str, str]] = {}
        self.delay: threading.Event | None = None

    def claims(self, **changes: object) -> dict[str, Any]:
        now = int(time.time())
        facts = {
            "iss": self.url,
            "aud": AUDIENCE,
            "sub": "repo:acme/train:ref:refs/heads/main",
            "iat": now,
            "exp": now + 300,
            "repository": "acme/train",
            "ref": "refs/heads/main",
            **changes,
        }
        return {name: value for name, value in facts.items() if value is not None}

    def sign(
        self, key: str = "one", *, headers: dict[str, Any] | None = None, **changes: object
    ) -> str:
        signer = self.keys[key]
        algorithm = "ES256" if isinstance(signer, ec.EllipticCurvePrivateKey) else "RS256"
        every = {"kid": key, **(headers or {})}
        return str(jwt.encode(self.claims(**changes), signer, algorithm, headers=every))

    def public_pem(self, key: str = "one") -> bytes:
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        public = self.keys[key].public_key()
        return bytes(public.public_bytes(serialization.Encoding.PEM, form))

    def jwk(self, key: str) -> dict[str, Any]:
        public = self.keys[key].public_key()
        kinds = jwt.algorithms
        kind = kinds.ECAlgorithm if hasattr(public, "curve") else kinds.RSAAlgorithm
        return {**kind.to_jwk(public, as_dict=True), "kid": key, "use": "sig"}

    def describe(self, **changes: object) -> "IssuerAnswer":
        """The answer about the issuer."""
        facts = {"issuer": self.url, "jwks_uri": f"{self.url}/keys", **changes}
        return IssuerAnswer.of(facts)

    def answer(self, path: str) -> "IssuerAnswer":
        self.asked.append(path)
        if self.delay is not None:
            self.delay.wait(60)
        if path in self.given:
            return self.given[path]
        if path == DISCOVERY:
            return self.describe()
        if path == KEYS:
            return IssuerAnswer.of({"keys": [self.jwk(name) for name in self.keys]})
        return BROKEN


def encode_part(value: object) -> str:
    """A part of a JSON Web Token."""
    return encode_bytes(json.dumps(value).encode())


def encode_bytes(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).rstrip(b"=").decode()


@contextmanager
def run_issuer() -> Iterator[Issuer]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = issuer.answer(self.path)
            with suppress(ConnectionError):  # the reader has had enough
                self.send_response(found.status)
                self.send_header("Content-Length", str(len(found.body)))
                if found.location:
                    self.send_header("Location", found.location)
                self.end_headers()
                self.wfile.write(found.body)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            issuer.forms[self.path] = dict(parse_qsl(body))
            self.do_GET()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        issuer = Issuer(f"http://127.0.0.1:{server.server_address[1]}")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield issuer
        finally:
            server.shutdown()
