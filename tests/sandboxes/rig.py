"""What hosts tell of sandboxes, for tests."""

from datetime import datetime
from typing import Any

from cavvy.capabilities.sandboxes.wire import SandboxReport


def make_report(now: datetime, **fields: Any) -> SandboxReport:
    usual = {
        "name": "5a",
        "title": "zebra-agent",
        "user": "ada",
        "state": "running",
        "why": "",
        "began_s": now.timestamp() - 60,
        "until_s": now.timestamp() + 600,
        "ended_s": None,
        "cpu": 2.0,
        "memory_mib": 2048,
        "network": False,
    }
    return SandboxReport(**usual | fields)
