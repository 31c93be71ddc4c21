"""Checks the service account key that a project has set. Google's library would send requests to
the addresses in the key, so only the fields that identify the account are used.
"""

import json
import re

from cavvy.providers.base import KeyFileRefused

TOKEN_URI = "https://oauth2.googleapis.com/token"
_HOME = "googleapis.com"
_TAKEN = {
    "project_id": re.compile(r"[a-z0-9.:-]{1,100}"),
    "private_key_id": re.compile(r"[0-9A-Za-z]{1,100}"),
    "client_email": re.compile(r"[A-Za-z0-9._-]+@[A-Za-z0-9.-]+"),
    "private_key": re.compile(
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----[A-Za-z0-9+/=\s]+-----END [^-]+-----\s*"
    ),
}


def clean_key(text: str) -> str:
    """Return the text of a key file that contains only the required fields, with Google's own
    addresses. Raises KeyFileRefused; the error message contains no part of the key.
    """
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        raise KeyFileRefused("the key is not JSON") from None
    if not isinstance(told, dict) or told.get("type") != "service_account":
        raise KeyFileRefused(
            "the key must be the key of a service account (`type: service_account`)"
        )
    if told.get("universe_domain", _HOME) != _HOME:
        raise KeyFileRefused(f"`universe_domain` must be {_HOME}")
    if told.get("token_uri", TOKEN_URI) != TOKEN_URI:
        raise KeyFileRefused(f"`token_uri` must be {TOKEN_URI}")
    for name, form in _TAKEN.items():
        if not isinstance(told.get(name), str) or not form.fullmatch(told[name]):
            raise KeyFileRefused(f"`{name}` is missing, or is not valid for Google")
    taken = {name: told[name] for name in _TAKEN}
    return json.dumps({"type": "service_account", **taken, "token_uri": TOKEN_URI})
