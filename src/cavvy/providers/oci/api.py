"""Calls OCI's Core Services and Identity APIs, version 20160918
(https://docs.oracle.com/en-us/iaas/api/#/en/iaas/20160918/), and its Limits API in several regions.

Requests are signed with the API key that the configuration file of OCI's own tools names. The file:
https://docs.oracle.com/en-us/iaas/Content/API/Concepts/sdkconfig.htm. The signature:
https://docs.oracle.com/en-us/iaas/Content/API/Concepts/signingrequests.htm.

A configuration that a project has set must not refer to files on the server, so it contains the
private key itself, as `key_content`.
"""

import base64
import configparser
import email.utils
import hashlib
import io
import os
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from cavvy.domain.tasks import Scalar
from cavvy.domain.values import Struct
from cavvy.providers.base import KeyFileRefused, Refused
from cavvy.providers.vm.cloud import CloudFault
from cavvy.providers.vm.rest import Json, RestClient

_FILE = "~/.oci/config"
_NEEDED = ("user", "fingerprint", "tenancy", "region")
_PAGE = "https://docs.oracle.com/en-us/iaas/Content/API/Concepts/sdkconfig.htm"

_OCID = re.compile(r"ocid1\.[a-z0-9]+\.[a-z0-9-]+\.[a-z0-9-]*\.[a-z0-9]+")
_TAKEN = {
    "user": _OCID,
    "tenancy": _OCID,
    "region": re.compile(r"[a-z0-9-]{1,40}"),  # becomes a part of the host name in URLs
    "fingerprint": re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){15}"),
    "key_content": re.compile(
        r"\s*-----BEGIN [A-Z ]*PRIVATE KEY-----[A-Za-z0-9+/=\s]+-----END [^-]+-----\s*"
    ),
}


class OciProfile(Struct, frozen=True, kw_only=True):
    """One profile of the configuration file, with its private key."""

    file: str
    user: str
    tenancy: str
    region: str
    fingerprint: str
    key: rsa.RSAPrivateKey

    @property
    def key_id(self) -> str:
        return f"{self.tenancy}/{self.user}/{self.fingerprint}"


class OciCredentials:
    """The credentials with which one server calls OCI. The methods block and are thread-safe."""

    def __init__(self, settings: Mapping[str, Scalar]) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._found: OciProfile | None = None

    def profile(self) -> OciProfile:
        """Return the profile that the settings name. Raises Refused."""
        with self._lock:
            if self._found is None:
                self._found = self._read()
            return self._found

    def sign(self, method: str, url: str, body: bytes | None) -> Mapping[str, str]:
        """Return the headers that sign a request. Raises Refused."""
        profile, parts = self.profile(), urlsplit(url)
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        signed = {
            "date": email.utils.formatdate(usegmt=True),
            "(request-target)": f"{method.lower()} {target}",
            "host": parts.netloc,
        }
        if body is not None:
            signed |= {
                "content-length": str(len(body)),
                "content-type": "application/json",
                "x-content-sha256": base64.b64encode(hashlib.sha256(body).digest()).decode(),
            }
        text = "\n".join(f"{name}: {value}" for name, value in signed.items())
        signature = profile.key.sign(text.encode(), padding.PKCS1v15(), hashes.SHA256())
        fields = {
            "version": "1",
            "keyId": profile.key_id,
            "algorithm": "rsa-sha256",
            "headers": " ".join(signed),
            "signature": base64.b64encode(signature).decode(),
        }
        told = ",".join(f'{name}="{value}"' for name, value in fields.items())
        sent = {name: value for name, value in signed.items() if not name.startswith("(")}
        return {**sent, "Authorization": f"Signature {told}"}

    def _read(self) -> OciProfile:
        file = str(self._settings.get("key_file") or os.environ.get("OCI_CONFIG_FILE") or _FILE)
        name = str(self._settings["profile"])
        parser = configparser.ConfigParser(interpolation=None)
        try:
            parser.read_string(Path(file).expanduser().read_text("utf-8"))
        except (OSError, UnicodeDecodeError, configparser.Error) as error:
            raise _refuse(
                f"{file} cannot be read: {_why(error)}; create it as in {_PAGE}"
            ) from error
        if name != parser.default_section and not parser.has_section(name):
            raise _refuse(f"{file} has no profile [{name}]")
        told = parser[name]
        missing = [each for each in _NEEDED if not told.get(each)]
        if not told.get("key_file") and not told.get("key_content"):
            missing.append("key_file")
        if missing:
            raise _refuse(f"{file} [{name}] lacks {', '.join(missing)}; see {_PAGE}")
        return OciProfile(
            file=file,
            user=told["user"],
            tenancy=told["tenancy"],
            region=told["region"],
            fingerprint=told["fingerprint"],
            key=_read_key(told),
        )


def _read_key(told: Mapping[str, str]) -> rsa.RSAPrivateKey:
    """Read the private key from the profile or, if the profile contains no key, from the file that
    the profile names.
    """
    inline, phrase = told.get("key_content", "").strip(), told.get("pass_phrase", "")
    file = "key_content" if inline else told["key_file"]
    try:
        content = inline.encode() if inline else Path(file).expanduser().read_bytes()
        # the profile may inherit a pass phrase from [DEFAULT] that its own key does not need
        given = phrase.encode() if b"ENCRYPTED" in content else None
        key = serialization.load_pem_private_key(content, given)
    except OSError as error:
        raise _refuse(f"the API key {file} cannot be read: {error.strerror}") from error
    # the text of these errors is left out, because it may quote the key
    except (ValueError, TypeError) as error:
        raise _refuse(
            f"{file} is not a PEM private key, or `pass_phrase` does not decrypt it"
        ) from error
    if not isinstance(key, rsa.RSAPrivateKey):
        raise _refuse(f"{file} is not an RSA key")
    return key


def _why(error: Exception) -> str:
    """Return the cause of the error, but no text from the file, because the error may quote lines
    of the file.
    """
    return str(error.strerror) if isinstance(error, OSError) else type(error).__name__


def _refuse(text: str) -> Refused:
    return Refused(f"[providers.oci]: {text}")


def clean_key(text: str) -> str:
    """Return a configuration file that contains only the profile [DEFAULT] with the needed keys.
    Raises KeyFileRefused, whose text contains nothing from the key.
    """
    parser = configparser.ConfigParser(interpolation=None)
    try:
        # a carriage return would end a line only when the clean file is read
        parser.read_string(re.sub(r"\r\n?", "\n", text))
    except configparser.Error:
        raise KeyFileRefused("the key is not a configuration file of OCI's tools") from None
    told = parser.defaults()
    if parser.sections():
        raise KeyFileRefused("the file must have one profile, [DEFAULT]")
    taken: dict[str, str] = {}
    for name, form in _TAKEN.items():
        if not form.fullmatch(told.get(name, "")):
            hint = " (which contains the private key itself, on lines that begin with spaces)"
            more = hint if name == "key_content" else ""
            raise KeyFileRefused(f"`{name}`{more} is missing, or is not valid for OCI")
        taken[name] = told[name].strip().replace("\n", "\n  ")
    if "pass_phrase" in told:
        raise KeyFileRefused("`pass_phrase` is not supported here; use a key without a pass phrase")
    clean = configparser.ConfigParser(interpolation=None, defaults=taken)
    file = io.StringIO()
    clean.write(file)
    return file.getvalue()


# a header: https://docs.oracle.com/en-us/iaas/Content/API/Concepts/usingapi.htm
_NEXT = "opc-next-page"
# the names of the services in their addresses
IDENTITY, COMPUTE, LIMITS = "identity", "iaas", "limits"


class OciApi:
    """Calls the APIs of each region. Calls raise CloudFault and Refused."""

    def __init__(self, settings: Mapping[str, Scalar], credentials: OciCredentials) -> None:
        self._endpoint, self._sign = str(settings["endpoint"]), credentials.sign
        self._limits_endpoint = str(settings["limits_endpoint"])
        self._clients: dict[tuple[str, str], RestClient] = {}

    def close(self) -> None:
        for each in self._clients.values():
            each.close()

    async def get(self, region: str, path: str, service: str = COMPUTE, **query: str) -> Json:
        target = f"{path}?{urlencode(query)}" if query else path
        return await self._client(service, region).get(target)

    async def send(
        self,
        region: str,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        token: str = "",
    ) -> Json:
        """Send a request that creates or deletes a resource. OCI executes repeated requests with
        the same token only once.
        """
        headers = {"opc-retry-token": token} if token else {}
        return await self._client(COMPUTE, region).send(method, path, body, headers)

    async def list(
        self, region: str, path: str, service: str = COMPUTE, **query: str
    ) -> Sequence[Json]:
        """Return all items of a list."""
        first = f"{path}?{urlencode(query)}"

        def read_next(page: Json) -> str | None:
            return f"{first}&{urlencode({'page': page['next']})}" if page["next"] else None

        try:
            pages = await self._client(service, region).pages(first, read_next)
        except CloudFault as fault:
            if fault.status != 404:
                raise
            raise Refused(
                f"[providers.oci]: {region} does not list {path[1:]}: {fault}; check the setting "
                "`compartment`, and the policy of the user's group (docs/guides/oci.md)"
            ) from fault
        return [each for page in pages for each in page["items"]]

    def _client(self, service: str, region: str) -> RestClient:
        if (service, region) not in self._clients:
            endpoint = self._limits_endpoint if service == LIMITS else self._endpoint
            self._clients[service, region] = RestClient(
                endpoint.replace("{service}", service).replace("{region}", region),
                lambda: "",
                lambda told: (told["code"], told["message"]),
                sign=self._sign,
                read_reply=_read_reply,
            )
        return self._clients[service, region]


def _read_reply(told: Any, headers: Mapping[str, str]) -> Any:
    """Return a reply. Lists are arrays, or objects with the array `items`; a header names the next
    page."""
    if isinstance(told, dict) and told.keys() == {"items"}:
        told = told["items"]
    return {"items": told, "next": headers.get(_NEXT)} if isinstance(told, list) else told
