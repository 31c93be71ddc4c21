"""Opens the object store that a URL names. Requests the regions of buckets, and measures data in
buckets by listing the objects; several such calls run at the same time, with one time limit.

The keys of a storage come from the project's secrets or, if the project has none for this storage,
from the server's environment. The keys have the names that the cloud's own tools use. Only the
server has the keys of a storage. The server signs requests with the keys, and nodes receive the
signed requests.
"""

import configparser
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import TimeoutError as TooSlow
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from cavvy.domain.targets import EVERY
from cavvy.domain.values import Struct
from cavvy.store.objects import azure
from cavvy.store.objects.azure import AzureContainer, AzureDirectory
from cavvy.store.objects.base import (
    ObjectDenied,
    ObjectError,
    ObjectMissing,
    ObjectReader,
    ObjectTryAgain,
)
from cavvy.store.objects.http import WebPages
from cavvy.store.objects.hub import ENDPOINT, HubRepository
from cavvy.store.objects.s3 import AmazonKey, GoogleKey, NoSigner, RequestSigner, XmlBucket
from cavvy.store.objects.threads import start_apart

# Names of the keys that projects may set as secrets. Keys in the server's environment are used for
# every project.
KEYS = (
    *(
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_REGION",
        "AWS_DEFAULT_REGION",
    ),
    *("AWS_PROFILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    *("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT", "STORAGE_EMULATOR_HOST"),
    *(
        "AZURE_STORAGE_ACCOUNT",
        "AZURE_STORAGE_KEY",
        "AZURE_STORAGE_CONNECTION_STRING",
        "AZURE_STORAGE_ENDPOINT",
    ),
    *azure.KEYS,
    *("HF_TOKEN", "HF_ENDPOINT"),
    *("SFTP_USER", "SFTP_PASSWORD", "SFTP_PRIVATE_KEY", "SFTP_KNOWN_HOSTS"),
)
# The values of these names are paths of files on the server, so projects must not set them.
_FILES = ("AWS_PROFILE", "AWS_SHARED_CREDENTIALS_FILE", "GOOGLE_APPLICATION_CREDENTIALS")
# Not a variable of the environment: the URL of the bucket with the server's own files. No key of
# the server opens a URL of a project there.
OWN_FILES = "server.files"
# Not a variable either: no key is read from the server's file of AWS profiles.
_NO_PROFILE = "no profile"
# Not variables either: the private targets that storages of the user's choice may be at. The name
# of a family follows.
_TARGETS = "private targets of "
_AWS_KEY = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
SCHEMES = ("s3", "gs", "az", "hf", "sftp", "http", "https")
_FAMILIES = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}
_BUCKET = re.compile(r"[A-Za-z0-9$][A-Za-z0-9._-]*")


class ObjectLocation(Struct, frozen=True, kw_only=True):
    """The store and the key that a URL names. A key that ends with a slash is a folder."""

    place: ObjectReader
    key: str


def merge_keys(
    environment: Mapping[str, str], secrets: Mapping[str, str], targets: str = EVERY
) -> dict[str, str]:
    """Return the keys to use for one project. If the project's secrets contain a key of one family,
    such as AWS, no key of that family is taken from the server's environment or files. `targets`
    are the private targets at which a storage may be whose host the project chooses.
    """
    own = {name: value for name, value in secrets.items() if name in KEYS and name not in _FILES}
    families = {name.partition("_")[0] for name in own}
    if "STORAGE_EMULATOR_HOST" in own:  # the project chooses the host, so it needs its own key
        families.add("GOOGLE")
    kept = {name: environment[name] for name in KEYS if name in environment}
    keys = {name: kept[name] for name in kept if name.partition("_")[0] not in families} | own
    if "AWS" in families and not own.keys() >= _AWS_KEY:
        keys[_NO_PROFILE] = "1"
    reserved = environment.get(OWN_FILES, "")
    if reserved and _FAMILIES.get(urlsplit(reserved).scheme.lower()) not in families:
        keys[OWN_FILES] = reserved
    if targets != EVERY:
        keys |= {f"{_TARGETS}{family}": targets for family in (*families, "HTTP", "SFTP")}
    return keys


def overlaps(url: str, folder: str) -> bool:
    """Return whether the objects below `url` and the objects in `folder` may overlap."""
    (one, key), (other, prefix) = _split(url), _split(folder)
    if one != other:
        return False
    prefix = f"{prefix.rstrip('/')}/" if prefix.rstrip("/") else ""
    unclear = not {".", ".."}.isdisjoint(key.split("/"))
    return unclear or prefix.startswith(key) or f"{key}/".startswith(prefix)


def _split(url: str) -> tuple[tuple[str, str], str]:
    """Return the scheme and bucket of a URL, and its key."""
    parts = urlsplit(url)
    return (parts.scheme.lower(), parts.netloc.lower()), unquote(parts.path.lstrip("/"))


def open_place(url: str, keys: Mapping[str, str], now: Callable[[], datetime]) -> ObjectLocation:
    """Open the store that a URL names. Raises ObjectDenied if a key is missing, if the scheme is
    unknown, or if the URL overlaps the location of the server's own files.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise ObjectDenied(f"{url:.200} is not the URL of a storage: {error}") from error
    key, scheme = unquote(parts.path.lstrip("/")), parts.scheme.lower()
    if scheme in _FAMILIES and not _BUCKET.fullmatch(parts.netloc):
        raise ObjectDenied(f"{url} names no bucket")
    if (reserved := keys.get(OWN_FILES)) and overlaps(url, reserved):
        raise ObjectDenied(f"the server stores its own files at {url}: use another bucket")
    match scheme:
        case "s3":
            storage: XmlBucket | AzureContainer = _open_s3(parts.netloc, keys, now)
        case "gs":
            storage = _open_google(parts.netloc, keys, now)
        case "az":
            storage = _open_azure(parts.netloc, keys, now)
        case "http" | "https":
            raw = parts.path.lstrip("/") + (f"?{parts.query}" if parts.query else "")
            root, targets = f"{parts.scheme}://{parts.netloc}", _targets(keys, "HTTP")
            return ObjectLocation(place=WebPages(root=root, targets=targets), key=raw)
        case "hf":
            endpoint = _check_endpoint("HF_ENDPOINT", keys.get("HF_ENDPOINT") or ENDPOINT)
            token, targets = keys.get("HF_TOKEN", ""), _targets(keys, "HF")
            hub = HubRepository(url, token=token, endpoint=endpoint, targets=targets)
            return ObjectLocation(place=hub, key=unquote(hub.key))
        case "sftp":
            from cavvy.store.objects.sftp import SftpServer

            server = SftpServer(parts.netloc, keys, _targets(keys, "SFTP"))
            return ObjectLocation(place=server, key=unquote(parts.path))
        case _:
            known = ", ".join(SCHEMES)
            raise ObjectDenied(f"{url} is not the URL of a storage; known schemes: {known}")
    storage.targets = _targets(keys, _FAMILIES[scheme])
    return ObjectLocation(place=storage, key=key)


def _targets(keys: Mapping[str, str], family: str) -> str:
    return keys.get(f"{_TARGETS}{family}", EVERY)


def _check_endpoint(name: str, url: str) -> str:
    """Return the URL of a service of the user's choice; "" is none. Raises ObjectDenied."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        good = False
    if url and not good:
        raise ObjectDenied(f"{name} is not a URL such as https://storage.example.com")
    return url


def _open_s3(bucket: str, keys: Mapping[str, str], now: Callable[[], datetime]) -> XmlBucket:
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    endpoint = next((_check_endpoint(each, keys[each]) for each in names if keys.get(each)), "")
    region = keys.get("AWS_REGION") or keys.get("AWS_DEFAULT_REGION") or "us-east-1"
    key_id, secret, token = _amazon_key(keys)
    signer = AmazonKey(key_id=key_id, secret=secret, token=token, region=region)
    if endpoint:
        return XmlBucket(bucket, signer, now, endpoint=endpoint)
    root = f"https://s3.{region}.amazonaws.com"
    # The certificate of Amazon's hosts does not cover names with dots below them.
    own = "." not in bucket
    return XmlBucket(bucket, signer, now, endpoint=root, in_host=own, regional=True)


def _amazon_key(keys: Mapping[str, str]) -> tuple[str, str, str]:
    if keys.keys() >= _AWS_KEY:
        return (
            keys["AWS_ACCESS_KEY_ID"],
            keys["AWS_SECRET_ACCESS_KEY"],
            keys.get("AWS_SESSION_TOKEN", ""),
        )
    wanted = "set the project's secrets AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    if _NO_PROFILE in keys:
        raise ObjectDenied(
            f"no key for S3 is configured: {wanted}; with any other AWS secret, the project uses "
            "no key of the server"
        )
    path = Path(keys.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials").expanduser()
    profile = keys.get("AWS_PROFILE", "default")
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read(path, encoding="utf-8")
        table = parser[profile]
        return (
            table["aws_access_key_id"],
            table["aws_secret_access_key"],
            table.get("aws_session_token", ""),
        )
    except (KeyError, configparser.Error, OSError) as error:
        raise ObjectDenied(
            f"no key for S3 is configured: {wanted}, "
            f"or add a profile [{profile}] to {path} on the server"
        ) from error


def _open_google(bucket: str, keys: Mapping[str, str], now: Callable[[], datetime]) -> XmlBucket:
    emulator = keys.get("STORAGE_EMULATOR_HOST", "")
    if emulator:
        url = emulator if "://" in emulator else f"http://{emulator}"
        emulator = _check_endpoint("STORAGE_EMULATOR_HOST", url)
    endpoint = emulator or "https://storage.googleapis.com"
    text = keys.get("GOOGLE_SERVICE_ACCOUNT", "")
    path = keys.get("GOOGLE_APPLICATION_CREDENTIALS", "")
    signer: RequestSigner
    try:
        if not text and path:
            text = Path(path).read_text("utf-8")
        account = json.loads(text) if text else {}
        if account:
            email, private_key = str(account["client_email"]), str(account["private_key"])
            signer = GoogleKey(email=email, private_key=private_key)
        elif emulator:
            signer = NoSigner()
        else:
            raise KeyError("GOOGLE_SERVICE_ACCOUNT")
    except (KeyError, OSError, ValueError, TypeError, RecursionError) as error:
        raise ObjectDenied(
            "no service account key for Google Cloud Storage is configured: set the project's "
            "secret GOOGLE_SERVICE_ACCOUNT to the JSON of a key, or set "
            "GOOGLE_APPLICATION_CREDENTIALS on the server to the path of a key file; "
            "a user's own login cannot sign"
        ) from error
    return XmlBucket(bucket, signer, now, endpoint=endpoint)


def _open_azure(
    container: str, keys: Mapping[str, str], now: Callable[[], datetime]
) -> AzureContainer:
    text = keys.get("AZURE_STORAGE_CONNECTION_STRING", "")
    pairs = dict(part.split("=", 1) for part in text.split(";") if "=" in part)
    account = pairs.get("AccountName") or keys.get("AZURE_STORAGE_ACCOUNT", "")
    key = pairs.get("AccountKey") or keys.get("AZURE_STORAGE_KEY", "")
    endpoint = pairs.get("BlobEndpoint") or keys.get("AZURE_STORAGE_ENDPOINT", "")
    _check_endpoint("the blob endpoint of the Azure storage", endpoint)
    if not account or not re.fullmatch(r"[A-Za-z0-9+/]+={0,2}", key) or len(key) % 4:
        raise ObjectDenied(
            "no key for Azure Blob is configured: set the project's secrets AZURE_STORAGE_ACCOUNT "
            "and "
            "AZURE_STORAGE_KEY, "
            "or AZURE_STORAGE_CONNECTION_STRING"
        )
    return AzureContainer(container, account, key, now, endpoint=endpoint)


T = TypeVar("T")
# the endpoints in the cloud whose accounts AzureDirectory can query
_AZURE = ".blob.core.windows.net"
_OWN_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
# only data at URLs that start like this can be measured
MEASURED = ("s3://", "gs://", "az://", "hf://")
_MOST_PAGES = 50  # maximum number of listing pages, of 1,000 objects each
_MIB = 1 << 20


def call_all(
    calls: Mapping[str, Callable[[], T]], patience_s: float
) -> Mapping[str, T | ObjectError]:
    """Make the calls, and return the result or the error of each call; block for at most
    `patience_s` seconds in total. A call that has no result within this time gets the result
    ObjectTryAgain. The call's thread continues, but does not delay the end of the process.
    """
    asked = {name: start_apart(call, "storage-call") for name, call in calls.items()}
    until = time.monotonic() + patience_s
    found: dict[str, T | ObjectError] = {}
    for name, answer in asked.items():
        left = max(0.0, until - time.monotonic())
        try:
            found[name] = answer.result(left)
        except TooSlow:
            found[name] = ObjectTryAgain(f"the storage did not answer within {patience_s:g} s")
        except ObjectError as error:
            found[name] = error
    return found


class FoundRegions(Struct, frozen=True, kw_only=True):
    """Maps the URL of each bucket either to its region in `regions` or, if the storage reports
    none, to the reason in `problems`.
    """

    regions: Mapping[str, str]
    problems: Mapping[str, str]


def find_regions(
    urls: Sequence[str], keys: Mapping[str, str], now: Callable[[], datetime], patience_s: float
) -> FoundRegions:
    """Query the region of each bucket; block for at most `patience_s` seconds in total."""
    calls = {url: partial(find_region, url, keys, now) for url in urls}
    answers = call_all(calls, patience_s)
    return FoundRegions(
        regions={url: each for url, each in answers.items() if isinstance(each, str)},
        problems={url: str(each) for url, each in answers.items() if not isinstance(each, str)},
    )


def find_region(url: str, keys: Mapping[str, str], now: Callable[[], datetime]) -> str:
    """Return the region of a bucket in lower case, such as `eu-west-1`; `eu` for a multi-region of
    Google. Raises ObjectError, with the reason, for a storage that does not report its region.
    """
    if url.startswith("s3:") and any(keys.get(each) for each in _OWN_ENDPOINTS):
        raise ObjectDenied("the bucket has a custom endpoint that does not belong to AWS")
    place = open_place(url, keys, now).place
    if isinstance(place, AzureContainer):
        if not place.root.endswith(_AZURE):
            raise ObjectDenied("the container has a custom endpoint that does not belong to Azure")
        return AzureDirectory().find_region(place.account, keys)
    if not isinstance(place, XmlBucket):
        raise ObjectDenied("the storage does not report its region")
    return place.region()


def find_sizes(
    urls: Sequence[str], keys: Mapping[str, str], now: Callable[[], datetime], patience_s: float
) -> Mapping[str, int | ObjectError]:
    """Return, for each URL, the size of its objects in MiB or the reason why the size is unknown.
    The call blocks for at most `patience_s` seconds in total.
    """
    return call_all({url: partial(_measure, url, keys, now) for url in urls}, patience_s)


def _measure(url: str, keys: Mapping[str, str], now: Callable[[], datetime]) -> int:
    """Return the size of the objects at the URL in MiB. Raises ObjectError."""
    if not url.startswith(MEASURED):
        raise ObjectDenied("the objects cannot be listed from this server")
    opened = open_place(url, keys, now)
    place, key, total, after = opened.place, opened.key, 0, ""
    one = place.head(key) if key and not key.endswith("/") else None
    if one is not None and one.size is not None:
        return max(1, round(one.size / _MIB))
    prefix = key if key.endswith("/") or not key else f"{key}/"
    for _ in range(_MOST_PAGES):
        objects, after = place.list(prefix, after)
        total += sum(each.size or 0 for each in objects)
        if not after:
            break
    else:
        raise ObjectDenied(f"the URL has more than {_MOST_PAGES * 1000:,} objects")
    if not total:
        raise ObjectMissing("no object exists there")
    return max(1, round(total / _MIB))
