"""Explains why an address cannot be used."""

import os


def explain_reason(error: OSError | ValueError) -> str:
    """Return the error's reason without the address that Python adds to some error messages.
    ValueErrors come from host names that cannot be encoded.
    """
    number = getattr(error, "errno", None) or 0
    # the numbers of errors in host names are negative, and strerror() does not know them
    return os.strerror(number) if number > 0 else getattr(error, "strerror", None) or str(error)
