from cavvy_today import capability, command
from click.testing import CliRunner


class FakeClient:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def jobs(self):
        return []


def test_nothing_ran_today(monkeypatch):
    monkeypatch.setattr(command, "Client", FakeClient)
    assert CliRunner().invoke(command.command).output == ""


def test_the_description_names_the_command():
    place = capability.CAPABILITY.commands[0].place
    assert place == f"{command.__name__}:command"
