"""Google Cloud Functions and Cloud Run functions: the entry point is `forward_event`, for any
trigger that delivers CloudEvents (Eventarc, Pub/Sub, Cloud Storage).
"""

from typing import Any

from cavvy.cloud_functions.forward import forward


def forward_event(cloud_event: Any) -> None:
    attributes = {k: v for k, v in cloud_event.get_attributes().items() if v is not None}
    forward([{**attributes, "data": cloud_event.get_data()}])
