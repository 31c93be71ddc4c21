"""`cavvy secret`: what is refused before any server is asked."""

from click.testing import CliRunner

from cavvy.cli.main import cli


def test_a_value_given_in_the_name_is_refused_and_not_repeated() -> None:
    result = CliRunner().invoke(cli, ["secret", "set", "TOKEN=hunter2"], input="x")
    assert result.exit_code == 2
    assert "a secret's name cannot contain =" in result.output
    assert "`cavvy secret set TOKEN`" in result.output
    assert "hunter2" not in result.output
