import time

from cavvy_reminders.wire import list_reminders
from click.testing import CliRunner

from cavvy.cli.main import cli
from cavvy.client import connect


def test_a_reminder_is_listed_until_it_is_announced(tmp_path, monkeypatch):
    monkeypatch.setenv("CAVVY_HOME", str(tmp_path))
    try:
        for seconds in ("0", "9999"):
            CliRunner().invoke(cli, ["remind", seconds, "--in", seconds])
        with connect() as client:
            while len(found := list_reminders(client, "default")) > 1:
                time.sleep(0.1)
        assert [each.text for each in found] == ["9999"]
    finally:
        CliRunner().invoke(cli, ["server", "stop"])
