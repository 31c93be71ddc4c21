"""An image in a cloud's registry is pulled with the identity of the node: against a stand-in of the
metadata services and of the registries' APIs, which checks signatures and tokens.
"""

import base64
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from cavvy.agent.images import engine
from cavvy.agent.images.own_login import NoIdentity, find_own_login, sign

ECR = "123456789012.dkr.ecr.eu-west-1.amazonaws.com/team/train:1"
KEYS = {"AccessKeyId": "ASIAEXAMPLE", "SecretAccessKey": "for/the+stand-in", "Token": "session=="}


@dataclass(slots=True, kw_only=True)
class Clouds:
    """What the metadata services and the registries answer."""

    address: str = ""
    role: str | None = "node"  # of the instance profile
    google: str | None = "ya29.token"
    azure: str | None = "aad-token"
    region: str = "eu-west-1"
    domain: str = "amazonaws.com"
    denied: bool = False  # the role may not ask for logins
    asked: list[str] = field(default_factory=list)

    def answer(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[int, bytes]:
        self.asked.append(f"{method} {path}")
        url = urlsplit(path)
        roles = "/latest/meta-data/iam/security-credentials/"
        match method, url.path:
            case "PUT", "/latest/api/token":
                assert int(headers["X-aws-ec2-metadata-token-ttl-seconds"]) > 0
                return 200, b"imds-token"
            case "GET", path_ if path_.startswith(roles):
                if headers.get("X-aws-ec2-metadata-token") != "imds-token":
                    return 401, b""
                if self.role is None:
                    return 404, b""
                if path_ == roles:
                    return 200, self.role.encode()
                assert path_ == roles + self.role
                return 200, json.dumps({"Code": "Success", **KEYS}).encode()
            case "GET", "/computeMetadata/v1/instance/service-accounts/default/token":
                assert headers["Metadata-Flavor"] == "Google"
                told = {"access_token": self.google, "expires_in": 3599, "token_type": "Bearer"}
                return (200, json.dumps(told).encode()) if self.google else (404, b"")
            case "GET", "/metadata/identity/oauth2/token":
                assert headers["Metadata"] == "true"
                assert parse_qs(url.query)["resource"] == ["https://management.azure.com/"]
                told = {"access_token": self.azure}
                return (200, json.dumps(told).encode()) if self.azure else (400, b"")
            case "POST", "/oauth2/exchange":
                form = parse_qs(body.decode())
                assert form["grant_type"] == ["access_token"]
                assert form["service"] == ["team.azurecr.io"]
                assert form["access_token"] == [self.azure]
                return 200, json.dumps({"refresh_token": "acr-token"}).encode()
            case "POST", "/":
                return self._log_in(headers, body)
        return 404, b""

    def _log_in(self, headers: Mapping[str, str], body: bytes) -> tuple[int, bytes]:
        target = "AmazonEC2ContainerRegistry_V20150921.GetAuthorizationToken"
        assert headers["X-Amz-Target"] == target
        assert headers["Host"] == f"api.ecr.{self.region}.{self.domain}"
        if self.denied or headers["Authorization"] != _signature(headers, body, self.region):
            return 400, b'{"__type": "AccessDeniedException"}'
        token = base64.b64encode(b"AWS:ecr-password").decode()
        return 200, json.dumps({"authorizationData": [{"authorizationToken": token}]}).encode()


def _signature(headers: Mapping[str, str], body: bytes, region: str) -> str:
    """The signature that botocore computes for the same request."""
    host = headers["Host"]
    names = ("Content-Type", "X-Amz-Target")
    request = AWSRequest("POST", f"https://{host}/", {name: headers[name] for name in names}, body)
    keys = Credentials(KEYS["AccessKeyId"], KEYS["SecretAccessKey"], KEYS["Token"])
    signer = cast(Any, SigV4Auth(keys, "ecr", region))
    request.context["timestamp"] = headers["X-Amz-Date"]
    request.headers["X-Amz-Date"] = headers["X-Amz-Date"]
    request.headers["X-Amz-Security-Token"] = KEYS["Token"]
    request.headers["Host"] = host
    text = signer.string_to_sign(request, signer.canonical_request(request))
    signer._inject_signature_to_request(request, signer.signature(text, request))
    return str(request.headers["Authorization"])


@pytest.fixture
def clouds() -> Iterator[Clouds]:
    found = Clouds()

    class Handler(BaseHTTPRequestHandler):
        def _reply(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, answer = found.answer(
                self.command, self.path, cast(Mapping[str, str], self.headers), body
            )
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_PUT = do_POST = _reply

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        found.address = f"http://127.0.0.1:{server.server_address[1]}"
        yield found
        server.shutdown()
        thread.join()


def find(clouds: Clouds, image: str) -> str | None:
    return find_own_login(image, clouds.address, clouds.address)


def test_the_instance_s_role_logs_in_to_ecr(clouds: Clouds) -> None:
    assert find(clouds, ECR) == "AWS:ecr-password"
    clouds.region, clouds.domain = "cn-north-1", "amazonaws.com.cn"
    china = ECR.replace("eu-west-1.amazonaws.com", "cn-north-1.amazonaws.com.cn")
    assert find(clouds, china) == "AWS:ecr-password"


def test_the_signature_is_that_of_botocore() -> None:
    at = datetime(2030, 1, 2, 3, 4, 5).strftime("%Y%m%dT%H%M%SZ")
    host = "api.ecr.ap-south-1.amazonaws.com"
    headers = {
        name.title(): value for name, value in sign(KEYS, host, "ap-south-1", b"{}", at).items()
    }
    assert headers["Authorization"] == _signature(headers, b"{}", "ap-south-1")


@pytest.mark.parametrize(
    "image", ["europe-west4-docker.pkg.dev/p/r/train:1", "gcr.io/p/train", "eu.gcr.io/p/train"]
)
def test_the_service_account_logs_in_to_google_s_registries(clouds: Clouds, image: str) -> None:
    assert find(clouds, image) == "oauth2accesstoken:ya29.token"


def test_the_managed_identity_logs_in_to_azure_s_registry(clouds: Clouds) -> None:
    login = find(clouds, "team.azurecr.io/train:1")
    assert login == "00000000-0000-0000-0000-000000000000:acr-token"


@pytest.mark.parametrize(
    "image",
    [
        "python:3.12",
        "pytorch/pytorch",
        "ghcr.io/team/train",
        "localhost/cavvy-build:1",
        "evil.com.azurecr.io.example.com/train",
        "123456789012.dkr.ecr.eu-west-1.amazonaws.com.example.com/train",
        "example.com/123456789012.dkr.ecr.eu-west-1.amazonaws.com/train",
        "gcr.io.example.com/train",
    ],
)
def test_other_registries_get_no_credentials(clouds: Clouds, image: str) -> None:
    assert find(clouds, image) is None
    assert clouds.asked == []


def test_a_node_without_an_identity_says_so(clouds: Clouds) -> None:
    clouds.role = clouds.google = clouds.azure = None
    for image in (ECR, "gcr.io/p/train", "team.azurecr.io/train"):
        with pytest.raises(NoIdentity, match=r"answered 40[04]"):
            find(clouds, image)
    with pytest.raises(NoIdentity, match="refused"):
        find_own_login(ECR, "http://127.0.0.1:9", clouds.address)


def test_a_role_without_the_right_has_no_login(clouds: Clouds) -> None:
    clouds.denied = True
    with pytest.raises(NoIdentity, match=r"answered 400 .*AccessDenied"):
        find(clouds, ECR)


class Node:
    """A node whose container engine is a script: it writes down its logins, and pulls an image
    only with one of the `good` logins; the login "" is an anonymous pull.
    """

    def __init__(self, home: Path, *good: str) -> None:
        self.home, self.log = home, home / "log"
        good_auths = [base64.b64encode(each.encode()).decode() if each else "" for each in good]
        self.engine = home / "podman"
        self.engine.write_text(
            "#!/usr/bin/env python3\n"
            "import json, sys\n"
            "auth = ''\n"
            "if '--authfile' in sys.argv:\n"
            "    (entry,) = json.load(open(sys.argv[3]))['auths'].values()\n"
            "    auth = entry['auth']\n"
            "if 'pull' not in sys.argv:\n"
            "    sys.exit(1)\n"
            f"open({str(self.log)!r}, 'a').write(auth + '\\n')\n"
            f"sys.exit(0 if auth in {good_auths!r} else 125)\n"
        )
        self.engine.chmod(0o755)

    def pull(self, clouds: Clouds, image: str, login: str | None = None) -> list[str]:
        """Pull an image; the logins that the engine got."""

        @dataclass
        class Settings:
            home: str = str(self.home)
            private: str = str(self.home)
            cache: str = str(self.home / "cache")
            caches: str = str(self.home / "cache")
            own_cache: str = ""

        @dataclass
        class Work:
            image: str
            image_login: str | None

        engine.pull(
            str(self.engine),
            cast(Any, Settings()),
            cast(Any, Work(image, login)),
            {"PATH": "/usr/bin:/bin:/usr/local/bin"},
            lambda name: find(clouds, name),
        )
        assert not (self.home / "login").exists()
        return self.logins()

    def logins(self) -> list[str]:
        lines = self.log.read_text().splitlines()
        return [base64.b64decode(line).decode() for line in lines]


def test_an_image_without_a_login_is_pulled_with_the_node_s_identity(
    clouds: Clouds, tmp_path: Path
) -> None:
    node = Node(tmp_path, "AWS:ecr-password")
    assert node.pull(clouds, ECR) == ["AWS:ecr-password"]


def test_the_task_s_login_comes_before_the_node_s(clouds: Clouds, tmp_path: Path) -> None:
    assert Node(tmp_path, "me:secret").pull(clouds, ECR, "me:secret") == ["me:secret"]
    assert clouds.asked == []


def test_a_public_image_is_pulled_although_the_identity_has_no_right(
    clouds: Clouds, tmp_path: Path
) -> None:
    node = Node(tmp_path, "")
    assert node.pull(clouds, "gcr.io/p/public") == ["oauth2accesstoken:ya29.token", ""]


def test_a_refusal_tells_why_there_was_no_login(clouds: Clouds, tmp_path: Path) -> None:
    clouds.role = None
    node = Node(tmp_path)
    with pytest.raises(engine.CannotBuild, match=r"no identity for this registry \(.*answered 404"):
        node.pull(clouds, ECR)
    clouds.role = "node"
    with pytest.raises(engine.CannotBuild, match="with the node's own identity"):
        node.pull(clouds, ECR)
    assert node.logins() == ["", "AWS:ecr-password", ""]
