"""Checks the OCI configuration that a project has set. The configuration must not refer to files on
the server, so it contains the private key itself, as `key_content`.
"""

import configparser
import io
import re

from cavvy.providers.base import KeyFileRefused

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
