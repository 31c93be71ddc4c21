"""`cavvy setup` asks for what a provider needs, checks it, and changes only its table."""

import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from cavvy.cli import setup
from cavvy.cli.check import ProviderFinding
from cavvy.cli.main import main
from cavvy.cli.reach.settings_file import change_table
from cavvy.cli.task import submission
from cavvy.settings import Settings

FILE = """\
# mine
[server]
tls_listen = ""  # none

[providers.local]
price_usd_hr = 3.6 # made up

# the rest
[providers."runpod"]
# regions = "old"
regions = "EU" # near
text = '''
[providers.vast]
'''
"""


def test_only_the_keys_of_the_providers_table_change() -> None:
    changed = change_table(FILE, "runpod", {"regions": "US"})
    assert changed == FILE.replace('"EU" # near', '"US" # near')
    own = '[providers.vast]\nregions = "US"\n'  # what looks like a table is part of a text
    assert change_table(FILE, "vast", {"regions": "US"}) in (None, f"{FILE}\n{own}")


@given(
    name=st.sampled_from(["local", "runpod", "vast", "aws-batch"]),
    key=st.sampled_from(["regions", "price_usd_hr", "image"]),
    value=st.one_of(st.text(), st.booleans(), st.integers(0, 9), st.floats(0, 9)),
)
def test_a_changed_file_reads_as_wanted_or_is_refused(name: str, key: str, value: Any) -> None:
    simple = FILE[: FILE.index("text = '''")]
    changed = change_table(simple, name, {key: value})
    assert changed is not None
    wanted = tomllib.loads(simple)
    wanted["providers"].setdefault(name, {})[key] = value
    assert tomllib.loads(changed) == wanted
    comments = [line for line in simple.splitlines() if line.startswith("#")]
    assert [line for line in changed.splitlines() if line.startswith("#")] == comments


@pytest.mark.parametrize("text", ["providers.runpod.regions = 'EU'\n", "[providers]\nrunpod={}\n"])
def test_a_table_in_another_form_is_refused(text: str) -> None:
    assert change_table(text, "runpod", {"regions": "US"}) is None


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "settings.toml"
    path.write_text("# mine\n")
    monkeypatch.setenv("CAVVY_CONFIG", str(path))
    monkeypatch.setattr(setup, "examine_one", examine)
    return path


async def examine(entry: Any, settings: Settings, endpoint: Any) -> ProviderFinding:
    """A provider that wants the key `good` and the region `eu`."""
    table = settings.providers[entry.name]
    key = table.get("key_file")
    problem = ""
    if key is None or Path(str(key)).read_text().strip() != "good":
        problem = "no API key"
    elif table.get("regions") != "eu":
        problem = "no such region"
    return ProviderFinding(name=entry.name, enabled=True, problem=problem)


def run(*words: str, given: str = "") -> Result:
    return CliRunner().invoke(setup.command, list(words), input=given)


def test_a_key_and_settings_are_asked_for_checked_and_written(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "may_ask", lambda: True)
    told = run("runpod", given="good\nus\nnonsense=1\nregions=eu\n")
    assert told.exit_code == 0, told.output
    assert "good" not in told.output  # a key is never shown
    assert "no such region" in told.output
    key = file.parent / "keys" / "runpod"
    assert key.read_text() == "good\n"
    assert key.stat().st_mode & 0o777 == 0o600
    text = file.read_text()
    assert text.startswith("# mine\n")
    assert tomllib.loads(text)["providers"] == {"runpod": {"regions": "eu", "key_file": str(key)}}
    again = run("runpod")
    assert again.exit_code == 0
    assert "has this already" in again.output
    assert file.read_text() == text


def test_without_a_provider_a_terminal_asks_for_one_and_a_script_is_told(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = run()
    assert (refused.exit_code, "runpod" in refused.output) == (2, True)
    monkeypatch.setattr(submission, "may_ask", lambda: True)
    told = run(given="nonsense\nrunpod\ngood\neu\n")
    assert told.exit_code == 0, told.output
    assert "Lambda Cloud" in told.output
    assert tomllib.loads(file.read_text())["providers"]["runpod"]["regions"] == "eu"


def test_hosts_are_asked_for_before_a_table_without_any_is_written(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("CAVVY_CONFIG", str(file))
    refused = run("ssh")
    assert (refused.exit_code, "no host is listed" in refused.output) == (1, True)
    assert file.read_text() == "# mine\n"
    monkeypatch.setattr(submission, "may_ask", lambda: True)
    asked = run("ssh", given="no-such-host.invalid\n\n")
    assert "hosts (Enter: none):" in asked.output
    assert "no host can be used" in asked.output
    assert file.read_text() == "# mine\n"


def test_without_a_terminal_it_takes_options_and_writes_nothing_that_fails(file: Path) -> None:
    refused = run("runpod", "--set", "regions=eu", "--key-file", "-", given="bad-secret")
    assert refused.exit_code == 1
    assert isinstance(refused.exception, SystemExit | Exception)
    assert "bad-secret" not in refused.output + str(refused.exception)
    assert file.read_text() == "# mine\n"
    assert not [*(file.parent / "keys").iterdir()]
    assert run("runpod", "--set", "regions=eu", "--key-file", "-", given="good").exit_code == 0
    before = file.read_text()
    run("runpod", "--key-file", "-", given="worse")
    assert (file.parent / "keys" / "runpod").read_text() == "good\n"
    assert file.read_text() == before
    assert run("runpod", "--set", "disk_gib=80", "--no-check").exit_code == 0
    assert tomllib.loads(file.read_text())["providers"]["runpod"]["disk_gib"] == 80


@pytest.mark.parametrize(
    "words",
    [
        ("runpod", "--set", "foo=1"),
        ("runpod", "--set", "disk_gib=many"),
        ("runpod", "--set", "regions"),
        ("runpod", "--key-file", "sk-secret"),
        ("runpod", "--set", "key_file=sk-secret"),
        ("local", "--key-file", __file__),
        ("nowhere",),
    ],
)
def test_what_is_wrong_is_said_and_no_key_is_repeated(file: Path, words: tuple[str, ...]) -> None:
    told = run(*words)
    assert told.exit_code == 2
    assert "sk-secret" not in told.output + str(told.exception)
    assert file.read_text() == "# mine\n"


def test_a_provider_from_outside_says_what_it_asks_for(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, info = tmp_path / "steppe_provider", tmp_path / "steppe-1.0.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "__init__.py").write_text(
        "from cavvy.domain.values import replace\n"
        "from cavvy.providers import fake\n"
        "from cavvy.providers.settings import text\n"
        'SETTINGS = (text("owner", "Whose it is."), text("yurt", "The yurt.").for_setup())\n'
        'MANIFEST = replace(fake.MANIFEST, name="steppe", settings=SETTINGS)\n'
    )
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: steppe\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[cavvy.providers]\nsteppe = steppe_provider\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(submission, "may_ask", lambda: True)

    async def examine_yurt(entry: Any, settings: Settings, endpoint: Any) -> ProviderFinding:
        problem = "" if settings.providers["steppe"].get("yurt") == "white" else "no yurt"
        return ProviderFinding(name="steppe", enabled=True, problem=problem)

    monkeypatch.setattr(setup, "examine_one", examine_yurt)
    told = run("steppe", given="white\n")
    assert told.exit_code == 0, told.output
    assert "The yurt." in told.output
    assert "Whose it is." not in told.output
    assert tomllib.loads(file.read_text())["providers"] == {"steppe": {"yurt": "white"}}


@pytest.mark.parametrize(
    ("fault", "code", "told"),
    [(KeyboardInterrupt, 130, "\ninterrupted\n"), (EOFError, 1, "not confirmed")],
)
def test_ctrl_c_at_a_prompt_ends_with_one_line(
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    fault: type[BaseException],
    code: int,
    told: str,
) -> None:
    def ask(text: str) -> str:
        raise fault

    monkeypatch.setattr(submission, "may_ask", lambda: True)
    monkeypatch.setattr(click.termui, "hidden_prompt_func", ask)
    with pytest.raises(SystemExit) as ended:
        main(["setup", "runpod"])
    assert ended.value.code == code
    shown = capfd.readouterr()
    assert told in shown.err
    assert "Traceback" not in shown.err
    assert file.read_text() == "# mine\n"
