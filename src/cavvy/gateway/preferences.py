"""Parses the field Prefer of requests (RFC 7240): `respond-async` and `wait`."""

from cavvy.domain.values import Struct


class Preferences(Struct, frozen=True, kw_only=True):
    respond_async: bool = False
    wait_s: int | None = None


def read_prefer(value: bytes) -> Preferences:
    """Read the preferences. Unknown and invalid preferences are ignored, as RFC 7240 requires."""
    respond_async = False
    wait_s = None
    for part in value.split(b","):
        name, _, rest = part.partition(b";")[0].partition(b"=")
        name = name.strip(b" \t").lower()
        if name == b"respond-async":
            respond_async = True
        elif name == b"wait":
            digits = rest.strip(b' \t"')
            if digits.isdigit() and len(digits) < 7 and wait_s is None:
                wait_s = int(digits)
    return Preferences(respond_async=respond_async, wait_s=wait_s)
