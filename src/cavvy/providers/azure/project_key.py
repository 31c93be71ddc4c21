"""Checks the file of a service principal. The check reads only the fields that identify the
principal, because the files of other kinds of credentials can point to local files or addresses.
"""

import json
import re
from collections.abc import Mapping

from cavvy.providers.base import KeyFileRefused

_HOME = "https://login.microsoftonline.com"
_GUID = r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
# field -> its names in the two output formats of `az ad sp create-for-rbac`, and its pattern
_TAKEN = {
    "clientId": (("appId", "clientId"), re.compile(_GUID)),
    "tenantId": (("tenant", "tenantId"), re.compile(rf"{_GUID}|[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+")),
    "clientSecret": (("password", "clientSecret"), re.compile(r"[!-~]{1,200}")),
}


def clean_key(text: str) -> str:
    """Return the text of a key file that contains only the necessary fields. Raises KeyFileRefused;
    the error message contains no part of the key.
    """
    return json.dumps(read_principal(text))


def read_principal(text: str) -> Mapping[str, str]:
    """Return the values of `clientId`, `tenantId` and `clientSecret`. Raises KeyFileRefused."""
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        raise KeyFileRefused("the key is not JSON") from None
    if not isinstance(told, dict):
        raise KeyFileRefused("expected the output of `az ad sp create-for-rbac`")
    if str(told.get("activeDirectoryEndpointUrl", _HOME)).rstrip("/") != _HOME:
        raise KeyFileRefused(f"`activeDirectoryEndpointUrl` must be {_HOME}")
    taken = {}
    for field, (names, form) in _TAKEN.items():
        value = next((told[name] for name in names if name in told), None)
        if not isinstance(value, str) or not form.fullmatch(value):
            raise KeyFileRefused(
                f"`{names[0]}` is missing, or is not valid for a service principal"
            )
        taken[field] = value
    return taken
