"""An AWS account that answers from a recording of `cavvy check NAME --live`."""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from cavvy.domain.tasks import Scalar
from cavvy.providers.aws.account import AwsAccount, AwsFault
from cavvy.providers.contract.rest_stand_in import Recorded, ReplayedCalls


class ReplayedAws(AwsAccount):
    """An AWS account, from a recording."""

    def __init__(self, settings: Mapping[str, Scalar], recording: Recorded) -> None:
        super().__init__(settings)
        self.calls = ReplayedCalls(recording["calls"])

    def _call(
        self, region: str, service: str, operation: str, arguments: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        found = self.calls.play(f"{region} {service} {operation}")
        if "code" in found:
            raise AwsFault(found["code"], found["reply"])
        told: Mapping[str, Any] = json.loads(json.dumps(found["reply"]), object_hook=_read_times)
        return told


def _read_times(table: dict[str, Any]) -> Any:
    return datetime.fromisoformat(table["$time"]) if "$time" in table else table
