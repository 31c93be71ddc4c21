"""Every text that shows a time goes through one function, which no time zone makes fail."""

import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

import cavvy
from cavvy.cli.view.formatting import show_clock, show_minute, show_time
from cavvy.domain.local_time import to_local

NOW = datetime(2026, 1, 31, 9, 0, tzinfo=UTC)


@pytest.fixture
def zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield request.param
    monkeypatch.undo()
    time.tzset()


ZONES = ["UTC+25", "UTC-24", "XXX+167:59:59", "CET-1", "", "no/such", "<+0530>-5:30", "UTC"]


@pytest.mark.parametrize("zone", ZONES, indirect=True)
def test_a_time_is_shown_in_every_zone(zone: str) -> None:
    for moment in (NOW, datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)):
        assert to_local(moment) == moment
        assert show_time(moment)
        assert show_clock(moment)
        assert show_minute(moment)


@pytest.mark.parametrize("zone", ["UTC+25", "CET-1"], indirect=True)
def test_an_impossible_zone_is_utc(zone: str) -> None:
    shown = {"UTC+25": "2026-01-31 09:00:00 UTC", "CET-1": "2026-01-31 10:00:00 CET"}
    assert show_time(NOW) == shown[zone]


def test_no_other_code_converts_to_local_time() -> None:
    root = Path(cavvy.__file__).parent
    found = [
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if re.search(r"\.astimezone\(\)", path.read_text())
    ]
    assert found == ["domain/local_time.py"]
