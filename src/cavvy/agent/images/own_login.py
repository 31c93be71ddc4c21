"""Logs in to a cloud's image registry with the node's own identity. The identity is the role of an
EC2 instance, the service account of a Google machine, or the managed identity of an Azure machine.

The node's metadata service supplies short-lived credentials. Amazon's and Azure's registries
exchange these credentials for a login:
https://docs.aws.amazon.com/AmazonECR/latest/APIReference/API_GetAuthorizationToken.html
https://cloud.google.com/artifact-registry/docs/docker/authentication#token
https://github.com/Azure/acr/blob/main/docs/AAD-OAuth.md
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import json
import re
import time
import urllib.error
import urllib.request
from urllib.parse import urlencode, urlsplit

METADATA = "http://169.254.169.254"  # the address of the metadata service in all three clouds
_METADATA_S = 3.0  # time limit of a request to the metadata service, which may not exist
_API_S = 15.0
_MOST_BYTES = 1 << 20
_MOST_SAID = 300  # maximum bytes of a registry's refusal that are shown to the user

_ECR = re.compile(r"\d{12}\.dkr\.(ecr|ecr-fips)\.([a-z0-9-]+)\.(amazonaws\.com(?:\.cn)?)")
_GOOGLE = re.compile(r"[a-z0-9-]+-docker\.pkg\.dev|(?:[a-z]+\.)?gcr\.io")
_AZURE = re.compile(r"[a-z0-9-]+\.azurecr\.(?:io|cn|us)")
_AZURE_USER = "00000000-0000-0000-0000-000000000000"
_TARGET = "AmazonEC2ContainerRegistry_V20150921.GetAuthorizationToken"


class NoIdentity(Exception):
    """Raised if the node has no identity, or if the registry gave no login for the node's identity.
    The message says why.
    """


def find_own_login(image: str, metadata: str = METADATA, api: str = "") -> str | None:
    """Return the login USER:PASSWORD for the image's registry, or None if the image is not in a
    cloud's registry. `metadata` and `api` are the addresses of the metadata service and of the
    registry's API; only tests set them. Raises NoIdentity.
    """
    registry = image.partition("/")[0] if "/" in image else ""
    try:
        if found := _ECR.fullmatch(registry):
            return _ask_amazon(found, metadata, api)
        if _GOOGLE.fullmatch(registry):
            return _ask_google(metadata)
        if _AZURE.fullmatch(registry):
            return _ask_azure(registry, metadata, api or f"https://{registry}")
    except (OSError, http.client.HTTPException) as error:
        raise NoIdentity(str(getattr(error, "reason", error)) or type(error).__name__) from error
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise NoIdentity(f"an answer cannot be read: {error!r}") from error
    return None


def _ask_amazon(registry: re.Match[str], metadata: str, api: str) -> str:
    token = _ask(
        f"{metadata}/latest/api/token",
        {"X-aws-ec2-metadata-token-ttl-seconds": "60"},
        method="PUT",
        timeout_s=_METADATA_S,
    )
    headers = {"X-aws-ec2-metadata-token": token.decode("ascii").strip()}
    roles = f"{metadata}/latest/meta-data/iam/security-credentials/"
    role = _ask(roles, headers, timeout_s=_METADATA_S).decode("utf-8").strip()
    keys = json.loads(_ask(roles + role, headers, timeout_s=_METADATA_S))
    service, region, domain = registry.groups()
    host = f"api.ecr.{region}.{domain}" if service == "ecr" else f"ecr-fips.{region}.{domain}"
    body = b"{}"
    signed = sign(keys, host, region, body, time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()))
    told = json.loads(_ask(api or f"https://{host}/", signed, body=body))
    login = told["authorizationData"][0]["authorizationToken"]
    return base64.b64decode(login, validate=True).decode("ascii")


def sign(keys: dict[str, str], host: str, region: str, body: bytes, at: str) -> dict[str, str]:
    """Return the headers of a GetAuthorizationToken call, signed with AWS signature version 4. `at`
    is the time, such as 20300101T120000Z.

    https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv-create-signed-request.html
    """
    headers = {
        "content-type": "application/x-amz-json-1.1",
        "host": host,
        "x-amz-date": at,
        "x-amz-security-token": keys["Token"],
        "x-amz-target": _TARGET,
    }
    names = ";".join(headers)
    lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
    request = f"POST\n/\n\n{lines}\n{names}\n{hashlib.sha256(body).hexdigest()}"
    scope = f"{at[:8]}/{region}/ecr/aws4_request"
    digest = hashlib.sha256(request.encode()).hexdigest()
    key = f"AWS4{keys['SecretAccessKey']}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, f"AWS4-HMAC-SHA256\n{at}\n{scope}\n{digest}".encode(), "sha256")
    credential = f"Credential={keys['AccessKeyId']}/{scope}"
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 {credential}, SignedHeaders={names}, Signature={signature.hex()}"
    )
    return headers


def _ask_google(metadata: str) -> str:
    url = f"{metadata}/computeMetadata/v1/instance/service-accounts/default/token"
    told = json.loads(_ask(url, {"Metadata-Flavor": "Google"}, timeout_s=_METADATA_S))
    return f"oauth2accesstoken:{told['access_token']}"


def _ask_azure(registry: str, metadata: str, api: str) -> str:
    resource = {"api-version": "2018-02-01", "resource": "https://management.azure.com/"}
    url = f"{metadata}/metadata/identity/oauth2/token?{urlencode(resource)}"
    told = json.loads(_ask(url, {"Metadata": "true"}, timeout_s=_METADATA_S))
    form = {
        "grant_type": "access_token",
        "service": registry,
        "access_token": told["access_token"],
    }
    kind = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = _ask(f"{api}/oauth2/exchange", kind, body=urlencode(form).encode())
    return f"{_AZURE_USER}:{json.loads(answer)['refresh_token']}"


def _ask(
    url: str,
    headers: dict[str, str],
    *,
    method: str | None = None,
    body: bytes | None = None,
    timeout_s: float = _API_S,
) -> bytes:
    """Send a request and return the body of the answer. A proxy that is set in the environment is
    used for the registry's API, but not for the metadata service. Raises OSError, HTTPException,
    NoIdentity.
    """
    request = urllib.request.Request(url, data=body, headers=headers, method=method)
    direct = [urllib.request.ProxyHandler({})] if timeout_s == _METADATA_S else []
    try:
        with urllib.request.build_opener(*direct).open(request, timeout=timeout_s) as answer:
            return bytes(answer.read(_MOST_BYTES))
    except urllib.error.HTTPError as error:
        with error:
            said = error.read(_MOST_SAID).decode("utf-8", "replace").strip()
        place = urlsplit(url)._replace(query="").geturl()
        raise NoIdentity(f"{place} answered {error.code} {said}".strip()) from error
