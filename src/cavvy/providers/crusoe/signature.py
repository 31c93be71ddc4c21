"""Signs requests to Crusoe's API, as https://docs.crusoecloud.com/reference/api describes."""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Mapping
from datetime import UTC, datetime
from urllib.parse import urlsplit

_VERSION = "1.0"


def sign(key_id: str, secret: str, method: str, url: str, now: datetime) -> Mapping[str, str]:
    """Return the headers of a request. Raises ValueError if the secret is not in URL-safe base
    64."""
    parts = urlsplit(url)
    path, canonical = parts.path, "&".join(sorted(parts.query.split("&")))
    at = now.astimezone(UTC).isoformat(timespec="seconds")
    payload = f"{path}\n{canonical}\n{method}\n{at}\n".encode()
    digest = hmac.new(_decode(secret), payload, hashlib.sha256).digest()
    signature = base64.urlsafe_b64encode(digest).decode().rstrip("=")
    return {
        "X-Crusoe-Timestamp": at,
        "Authorization": f"Bearer {_VERSION}:{key_id}:{signature}",
    }


def _decode(secret: str) -> bytes:
    padding = "=" * (-len(secret) % 4)
    try:
        return base64.b64decode(secret + padding, altchars=b"-_", validate=True)
    except binascii.Error as error:  # the error's text may contain the secret
        raise ValueError("the secret key is not in URL-safe base 64") from error
