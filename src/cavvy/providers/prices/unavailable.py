"""The reasons why Cavvy does not read the price lists of some providers yet, for `cavvy catalog
refresh` and `info`.
"""

from collections.abc import Mapping

_NO_READER = "Cavvy cannot read the provider's price list yet"
REASONS: Mapping[str, str] = {
    "oci": _NO_READER,
    "lambda": "the provider's price API needs an API key",
    "runpod": _NO_READER,
    "tpu": "Cavvy cannot read the prices of TPUs in Google's price list",
    "vast": _NO_READER,
    "nebius": "the provider's price API needs credentials",
    "verda": "the provider's price API needs credentials",
    "primeintellect": _NO_READER,
    "shadeform": _NO_READER,
    "coreweave": "the provider publishes prices on a web page, not through an API",
    "cudo": _NO_READER,
    "do": "the provider's price API needs a token",
    "fluidstack": _NO_READER,
    "hyperbolic": _NO_READER,
    "ibm": _NO_READER,
    "paperspace": _NO_READER,
    "seeweb": _NO_READER,
}
