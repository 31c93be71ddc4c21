"""Checks the credentials of Nebius that a project has set, and extracts the fields that identify
the account.
"""

import json
import re

from cavvy.providers.base import KeyFileRefused

_FORM = re.compile(r"[A-Za-z0-9._-]{1,200}")
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]+")
_PEM = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----[A-Za-z0-9+/=\s]+-----END [^-]+-----\s*")


def clean_key(text: str) -> str:
    """Return an IAM token, or a service account's key, reduced to the fields that are needed.
    Raises KeyFileRefused, whose text contains nothing from the key.
    """
    if _TOKEN.fullmatch(text.strip()):
        return text.strip()
    try:
        told = json.loads(text)["subject-credentials"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise KeyFileRefused(
            "the key is neither an IAM token nor JSON with `subject-credentials`"
        ) from None
    names = {"alg": "RS256", "type": "JWT"}
    if not isinstance(told, dict) or any(told.get(name) != is_ for name, is_ in names.items()):
        raise KeyFileRefused("`subject-credentials` must have the type JWT and the alg RS256")
    for name, form in {"kid": _FORM, "iss": _FORM, "sub": _FORM, "private-key": _PEM}.items():
        if not isinstance(told.get(name), str) or not form.fullmatch(told[name]):
            raise KeyFileRefused(f"`{name}` is missing, or is not valid for Nebius")
        names[name] = told[name]
    return json.dumps({"subject-credentials": names})
