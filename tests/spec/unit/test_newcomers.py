"""Wrong values that a newcomer gives are refused before anything happens, in Cavvy's own words."""

from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from tests.own_parts import reads_other_tools

from cavvy.cli.main import cli
from cavvy.domain.targets import is_web_address
from cavvy.domain.units import Money, UnitError, parse_usd
from cavvy.spec import SpecError
from cavvy.task_files import parse_task


def refuse(*words: str) -> str:
    """The error of a command that must end before it asks a server."""
    environment = {"CAVVY_HOME": "/proc/none", "CAVVY_CONFIG": "/dev/null"}
    done: Result = CliRunner().invoke(cli, words, env=environment)
    assert done.exit_code == 2, done.output
    assert "hint: " in done.stderr or "; check " in done.stderr
    return done.stderr.partition("\n")[0].removeprefix("error: ")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("call web --timeout nan", "--timeout: expected a number, not 'nan'"),
        ("call web --timeout 0", "--timeout: expected a number above 0, not 0"),
        ("join --valid-h nan", "--valid-h: expected a number, not 'nan'"),
        ("quota --to x", "--to: expected a number, not 'x'"),
        ("ps --limit many", "--limit: expected a whole number, not 'many'"),
        ("sandbox create --cpu nan", "--cpu: expected a number, not 'nan'"),
        ("sandbox create --cpu 0", "--cpu: expected a number above 0, not 0"),
        ("drill lose-node train --rank -2", "--rank: expected a whole number of 0 or more, not -2"),
        ("budget set team -5", "a negative number (-5…) was given"),
        ("role grant ann king", "ROLE: 'king' is not one of"),
        ("completion powershell", "SHELL: 'powershell' is not one of"),
        ("cost --by user,,job", "--by: '' is not one of"),
        ("cost --since 1d --until 2d", "--until, "),
        ("call web -X A\\ B", "--method: expected a method such as GET or PUT, not 'A B'"),
        ("call web -H nocolon", "--header: expected NAME: VALUE"),
        ("policy set --max-price nan", "--max-price: expected 0 or more dollars"),
        ("policy set --keep-jobs soon", "--keep-jobs: 'soon' is not a whole number of days"),
        ("policy set --all-projects -p a --gpus T4", "--project and --all-projects are both"),
    ],
)
def test_a_wrong_value_of_an_option(line: str, message: str) -> None:
    words = [word.replace("\0", " ") for word in line.replace("\\ ", "\0").split()]
    assert message in refuse(*words)


@pytest.mark.parametrize("option", ["providers", "regions", "gpus", "images"])
@pytest.mark.parametrize("names", ["", " ", "aws,", ",,"])
def test_an_empty_name_does_not_remove_a_restriction(option: str, names: str) -> None:
    assert "one of the names is empty" in refuse("policy", "set", f"--{option}", names)


def test_a_group_without_a_role_is_shown_as_it_was_written() -> None:
    line = "trust add people --issuer https://a.example --client-id c --group admins"
    assert refuse(*line.split()).startswith("--group admins: expected GROUP=ROLE")


@pytest.mark.parametrize("text", ["1.000,50", "2,50", "1,00", ",5", "1,0000", "1,000,50"])
def test_a_comma_is_not_a_decimal_point(text: str) -> None:
    with pytest.raises(UnitError, match="expected an amount of dollars"):
        parse_usd(text)


@pytest.mark.parametrize(
    ("text", "dollars"), [("1,000", 1000), ("$1,234,567.50", 1_234_567.5), ("999", 999)]
)
def test_commas_separate_thousands(text: str, dollars: float) -> None:
    assert parse_usd(text) == Money(round(dollars * 1_000_000))


@pytest.mark.parametrize(
    "text",
    ["https://[::1/", "https://a:99999/", "https://a:x/", "https://:80/", "ftp://a", "https://a b"],
)
def test_no_request_can_be_sent_to_such_an_address(text: str) -> None:
    assert not is_web_address(text)
    with pytest.raises(SpecError, match="is not a web address"):
        parse_task(f"run: x\nwebhooks: ['{text}']")


def test_a_web_address_with_a_password_is_refused() -> None:
    text = "https://ann:secret@a.example/x"
    assert not is_web_address(text)
    with pytest.raises(SpecError, match="user name or password, which cannot be sent"):
        parse_task(f"run: x\nwebhooks: ['{text}']")


@pytest.mark.parametrize("text", ["https://a", "http://[::1]:80/x", "https://a.example/h?b=c@d"])
def test_a_web_address(text: str) -> None:
    assert is_web_address(text)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ('[task]\nrun = "x"\n', "`key: value` lines"),
        ('run: "\\udcff"\n', "use single quotes"),
        ("resources: &a {any_of: [*a]}\n", "write the value out"),
    ],
)
def test_yaml_is_explained_without_the_words_of_its_parser(text: str, hint: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_task(text)
    assert hint in caught.value.problems[0].suggestion
    assert "document start" not in str(caught.value)


def test_a_path_that_is_too_long_is_a_problem_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "task.yaml"
    file.write_text(f"run: x\nworkdir: {'y' * 5000}\n")
    assert "File name too long" in refuse("run", str(file))


def test_a_file_that_is_no_audit_log() -> None:
    assert refuse("audit", "verify", "/none/x.jsonl") == (
        "cannot read /none/x.jsonl: No such file or directory"
    )


@reads_other_tools
def test_every_option_with_a_number_has_a_type_of_cavvy() -> None:
    def walk(command: click.Command) -> list[str]:
        with click.Context(command) as ctx:
            inner = [
                found
                for name in (command.list_commands(ctx) if isinstance(command, click.Group) else ())
                if (found := command.get_command(ctx, name)) is not None
            ]
        wrong = [
            f"{command.name} {param.name}"
            for param in command.params
            if isinstance(param.type, click.types.IntParamType | click.types.FloatParamType)
            and not type(param.type).__module__.startswith("cavvy.")
        ]
        return wrong + [each for one in inner for each in walk(one)]

    assert walk(cli) == []
