"""`cavvy dev` stands among what first users need."""

from cavvy.cli.main import FIRST


def test_dev_follows_stop() -> None:
    assert FIRST[FIRST.index("stop") + 1] == "dev"
    assert FIRST[0] == "init"
    assert FIRST[-1] == "cost"
