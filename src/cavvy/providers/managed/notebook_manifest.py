"""The parts of a manifest that the providers of managed notebooks share. Imports nothing that calls
a service.
"""

from collections.abc import Mapping

from cavvy.providers.base import Feature


def list_unsupported(service: str, notebook: str, page: str) -> Mapping[Feature, str]:
    """The features that managed notebooks lack. `notebook` is the service's word for a notebook,
    with its article; `page` is the page about its images.
    """
    image = f"{notebook} has {service}'s own image ({page})"
    return {
        Feature.IMAGE: image,
        Feature.BUILD: image,
        Feature.LOGIN: image,
        Feature.CAPACITY: f"{service} does not report free capacity; {notebook} without capacity "
        "fails, and Cavvy tries the next best offer",
        Feature.RESULTS: f"{notebook} is deleted with its disk when the session ends. If the "
        "server is away then, the results go to the bucket in `checkpoint.storage` or "
        "`server.results_url`",
        Feature.NOTICE: f"{notebook} is not taken back",
    }
