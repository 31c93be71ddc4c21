"""The parts of a manifest that the providers of managed notebooks share. The module imports nothing
that calls a service.
"""

from collections.abc import Mapping

from cavvy.providers.base import Feature


def list_unsupported(
    service: str, notebook: str, *, images: str, api: str, deletion: str
) -> Mapping[Feature, str]:
    """Return the features that managed notebooks lack. `notebook` is the service's word for a
    notebook, with an article, such as "a notebook instance". Three arguments are pages of the
    service's documentation: `images` about the images of notebooks, `api` about the call that
    creates a notebook, and `deletion` about the objects that are deleted with a notebook.
    """
    image = f"{notebook} has {service}'s own image ({images})"
    return {
        Feature.IMAGE: image,
        Feature.BUILD: image,
        Feature.LOGIN: image,
        Feature.SPOT: f"{service}'s API has no spot option for {notebook} ({api})",
        Feature.CAPACITY: f"{service} does not report free capacity; {notebook} without capacity "
        f"fails, and Cavvy tries the next best offer ({api})",
        Feature.RESULTS: f"{notebook} is deleted with its disk when the session ends "
        f"({deletion}). If the server is unreachable when the session ends, the "
        "results are stored in the bucket in `checkpoint.storage` or `server.results_url`",
        Feature.NOTICE: f"{notebook} is not reclaimed, because there is no spot option ({api})",
    }
