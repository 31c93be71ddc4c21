"""Reads manifests and blobs of one repository in a registry of container images.

The requests follow the OCI distribution specification 1.1 and its token authentication
(distribution.github.io/distribution/spec/auth/token). All content is checked against its digest.
"""

import base64
import re
from hashlib import sha256
from time import monotonic
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from cavvy.client.addresses import is_loopback
from cavvy.domain.targets import EVERY
from cavvy.domain.values import Struct
from cavvy.http_client import HttpClient, HttpReply, NoReply, TargetDenied
from cavvy.planner.objections import name_image

# what may be a manifest: of an image, or of an image for several platforms
_INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_MANIFESTS = (
    *_INDEXES,
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_HUB, _HUB_HOST = "docker.io", "registry-1.docker.io"
_LONGEST = 4 << 20  # bytes of a manifest, which the distribution specification recommends
_WAIT_S = 10.0  # maximum seconds for each part of an answer
_MOST_S = 30.0  # maximum seconds for all requests about one image
_MOST_REQUESTS = 100  # for one image
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_PARAMETER = re.compile(r'(\w+)="([^"]*)"')


class RegistrySilent(Exception):
    """Raised if the registry returns no usable answer. The message explains why the answer is
    unusable."""


class ImageName(Struct, frozen=True, kw_only=True):
    """The parts of an image's name. `plain` is the name as given, without tag and digest;
    `reference` is a digest or a tag.
    """

    plain: str
    registry: str
    repository: str
    reference: str

    @property
    def digest(self) -> str | None:
        return self.reference if _DIGEST.fullmatch(self.reference) else None

    def at(self, digest: str) -> str:
        """Return the name of the image with this digest."""
        return f"{self.plain}@{digest}"


class OciDescriptor(Struct, frozen=True, kw_only=True):
    """An entry that describes one blob of a manifest, or one manifest of a list."""

    media_type: str = msgspec.field(name="mediaType", default="")
    digest: str = ""
    annotations: dict[str, str] | None = None


class OciManifest(Struct, frozen=True, kw_only=True):
    """The parts of a manifest, or of a list of manifests, that refer to manifests or blobs."""

    config: OciDescriptor | None = None
    layers: tuple[OciDescriptor, ...] = ()
    manifests: tuple[OciDescriptor, ...] = ()


def parse_image(image: str) -> ImageName:
    """Split an image's name into its parts, as container engines do. The tag is `latest` if the
    name has no tag, and is ignored if the name has a digest.
    """
    registry, _, repository = name_image(image).partition("/")
    before, at, digest = image.partition("@")
    head, slash, last = before.rpartition("/")
    bare, _, tag = last.partition(":")
    reference = digest if at else tag or "latest"
    return ImageName(
        registry=registry,
        repository=repository,
        plain=f"{head}{slash}{bare}",
        reference=reference,
    )


class ImageRepository:
    """One repository of a registry. `login` has the form USER:PASSWORD, or is None. `targets` are
    the private targets that may be called.
    """

    def __init__(self, name: ImageName, login: str | None = None, targets: str = EVERY) -> None:
        host = _HUB_HOST if name.registry == _HUB else name.registry
        self._host = host
        self._name = name
        self._login = login
        self._http = HttpClient(
            targets=targets, redirects=True, idle_s=_WAIT_S, most_bytes=_LONGEST
        )
        # Container engines, too, use http for registries of their own machine only.
        scheme = "http" if is_loopback(urlsplit(f"//{host}").hostname or "") else "https"
        self._root = f"{scheme}://{host}/v2/{quote(name.repository)}"
        self._authorization = ""
        self._left = _MOST_REQUESTS
        self._until = monotonic() + _MOST_S

    def find_digest(self) -> str | None:
        """Return the digest of the named image, or None if the registry does not have it. Raises
        RegistrySilent.
        """
        if self._name.digest is not None:
            return self._name.digest
        body = self._read(f"manifests/{quote(self._name.reference)}", _MANIFESTS)
        return None if body is None else f"sha256:{sha256(body).hexdigest()}"

    def read_manifest(self, reference: str) -> OciManifest | None:
        """Return the manifest with this tag or digest, or None if the manifest does not exist.
        Raises RegistrySilent.
        """
        body = self._read(f"manifests/{quote(reference)}", _MANIFESTS)
        return None if body is None else self._decode(_check(body, reference))

    def list_referrers(self, digest: str) -> tuple[OciDescriptor, ...]:
        """Return the manifests that refer to an image. If a registry does not have the referrers
        API, the list of referrers is stored under a tag. Raises RegistrySilent.
        """
        body = self._read(f"referrers/{digest}", _INDEXES)
        if body is not None:
            return self._decode(body).manifests
        listed = self.read_manifest(digest.replace(":", "-"))
        return () if listed is None else listed.manifests

    def read_blob(self, digest: str) -> bytes:
        """Raises RegistrySilent."""
        body = self._read(f"blobs/{quote(digest)}", ("*/*",))
        if body is None:
            raise RegistrySilent(f"{self._host} does not have the blob {digest[:80]}")
        return _check(body, digest)

    def _decode(self, body: bytes) -> OciManifest:
        try:
            return msgspec.json.decode(body, type=OciManifest)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise RegistrySilent(f"{self._host} sent a manifest of an unknown form") from error

    def _read(self, path: str, accept: tuple[str, ...]) -> bytes | None:
        """Return the content, or None if it does not exist."""
        answer = self._send(f"{self._root}/{path}", accept, self._authorization)
        if answer.status == 401 and not self._authorization:
            self._authorization = self._log_in(answer.headers.get("www-authenticate", ""))
            answer = self._send(f"{self._root}/{path}", accept, self._authorization)
        if answer.status == 404:
            return None
        if answer.status in (401, 403):
            raise RegistrySilent(
                f"{self._host} does not permit access to {self._name.repository} (status "
                f"{answer.status}); name a secret with a login in `image.login`"
            )
        if answer.status != 200:
            raise RegistrySilent(f"{self._host} answers with status {answer.status}")
        return answer.body

    def _log_in(self, challenge: str) -> str:
        """Return the value of `Authorization` that the registry requires."""
        scheme, _, rest = challenge.partition(" ")
        basic = "Basic " + base64.b64encode((self._login or "").encode()).decode()
        if scheme.lower() == "basic":
            return basic
        told = dict(_PARAMETER.findall(rest))
        realm = told.pop("realm", "")
        if scheme.lower() != "bearer" or not self._may_send_to(realm):
            raise RegistrySilent(f"{self._host} requires a login of an unknown kind")
        asked = {name: told[name] for name in ("service",) if name in told}
        scope = {"scope": f"repository:{self._name.repository}:pull"}
        url = f"{realm}{'&' if '?' in realm else '?'}{urlencode(asked | scope)}"
        answer = self._send(url, ("application/json",), basic if self._login else "")
        try:
            found = answer.parse_json()
            token = found.get("token") or found.get("access_token")
        except (NoReply, AttributeError):
            token = None
        if answer.status != 200 or not isinstance(token, str) or not token.isprintable():
            raise RegistrySilent(
                f"{urlsplit(realm).hostname} issues no token for {self._name.repository} (status "
                f"{answer.status}); name a secret with a login in `image.login`"
            )
        return f"Bearer {token}"

    def _may_send_to(self, realm: str) -> bool:
        """Return whether a login may be sent to this URL. A URL with http is accepted only for a
        registry on this machine.
        """
        return realm.startswith("https://" if self._root.startswith("https:") else "http")

    def _send(self, url: str, accept: tuple[str, ...], authorization: str) -> HttpReply:
        self._left -= 1
        if self._left < 0:
            raise RegistrySilent(f"more than {_MOST_REQUESTS} requests are needed")
        login = {"Authorization": authorization} if authorization else {}
        headers = {"Accept": ", ".join(accept), **login}
        try:
            return self._http.send("GET", url, None, headers, limit_s=self._until - monotonic())
        except TargetDenied as error:
            raise RegistrySilent(str(error)) from error
        except NoReply as error:
            host, reason = urlsplit(url).hostname, str(error)[:200]
            if monotonic() > self._until:
                reason = f"the answers of the registry take more than {_MOST_S:.0f} s"
            raise RegistrySilent(f"{host} does not answer: {reason}") from error


def _check(body: bytes, reference: str) -> bytes:
    """Check that the content matches its digest, and return the content. Raises RegistrySilent."""
    if _DIGEST.fullmatch(reference) and reference != f"sha256:{sha256(body).hexdigest()}":
        raise RegistrySilent(f"the registry sent content that differs from {reference}")
    return body
