"""Azure Functions: `main` has a binding `eventGridTrigger` with the name `event`. Event Grid
delivers the events of blobs.
"""

from typing import Any

from cavvy.cloud_functions.forward import forward


def main(event: Any) -> None:
    forward(
        [
            {
                "id": event.id,
                "source": event.topic,
                "type": event.event_type,
                "subject": event.subject,
                "time": event.event_time.isoformat(),
                "data": event.get_json(),
            }
        ]
    )
