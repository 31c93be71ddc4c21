"""Settings: files, variables, and errors that help."""

from pathlib import Path

import pytest

from cavvy import settings
from cavvy.settings import SETTINGS, SettingsError


def env(tmp_path: Path, text: str | None = None, **extra: str) -> dict[str, str]:
    given = {"HOME": str(tmp_path), **extra}
    if text is not None:
        (tmp_path / "s.toml").write_text(text)
        given["CAVVY_CONFIG"] = str(tmp_path / "s.toml")
    return given


def test_defaults_need_no_file(tmp_path: Path) -> None:
    found = settings.load(env(tmp_path))
    assert found == settings.load(
        env(tmp_path, CAVVY_CONFIG="", CAVVY_HOME="")
    )  # an empty variable is none
    assert found.home == tmp_path / ".cavvy"
    assert found.values == {setting.name: setting.default for setting in SETTINGS}
    assert found.providers == {}


def test_a_home_that_is_no_folder_has_no_settings(tmp_path: Path) -> None:
    found = settings.load({"HOME": "/dev/null", "CAVVY_HOME": str(tmp_path)})
    assert (found.home, found.providers) == (tmp_path, {})


def test_a_variable_wins_over_the_file(tmp_path: Path) -> None:
    text = "[server]\nidle_stop_s = 5\nlog_mib = 3\n[providers.local]\nprice_usd_hr = 3.6\n"
    found = settings.load(
        env(tmp_path, text, CAVVY_SERVER_IDLE_STOP_S="7", CAVVY_PROVIDERS_LOCAL_PRICE_USD_HR="1.25")
    )
    assert found.whole("server.idle_stop_s") == 7
    assert found.whole("server.log_mib") == 3
    assert found.providers == {"local": {"price_usd_hr": 1.25}}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[server]\nidle_stop = 5\n", "did you mean `server.idle_stop_s`?"),
        ("[server]\nport = 5\n", "known: advertise, "),
        ("[sever]\nidle_stop_s = 5\n", "did you mean `server`?"),
        ("[server]\nidle_stop_s = '5'\n", "must be a whole number"),
        ("[server]\nidle_stop_s = true\n", "must be a whole number"),
        ("[server]\nidle_stop_s = -1\n", "at least 0"),
        ("[server\n", "TOML"),
        (f"[server]\nidle_stop_s = {'9' * 5000}\n", "TOML"),
        ("providers = 3\n", "must be a table"),
        ("[providers]\nlocal = 3\n", "must be a table"),
        ("[providers.local]\nx = [1]\n", "must be a string, number or boolean"),
        ("[providers.ssh]\nhosts = ['a', 'b']\n", 'write one string: hosts = "a, b"'),
        ("[providers.ssh.hosts.a]\nport = 22\n", "docs/reference/providers list the settings"),
    ],
)
def test_a_wrong_file_says_what_and_where(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        settings.load(env(tmp_path, text))
    told = f"{caught.value.message} | {caught.value.hint}"
    assert said in told
    assert "s.toml" in told


def test_a_wrong_variable_names_itself(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="CAVVY_SERVER_IDLE_STOP_S") as caught:
        settings.load(env(tmp_path, CAVVY_SERVER_IDLE_STOP_S="soon"))
    assert "600" in caught.value.hint
    for text in ("9" * 5000, "[" * 5000):
        with pytest.raises(SettingsError, match="must be a whole number"):
            settings.load(env(tmp_path, CAVVY_SERVER_IDLE_STOP_S=text))
    with pytest.raises(SettingsError, match=r"server\.idl_stop_s"):
        settings.load(env(tmp_path, CAVVY_SERVER_IDL_STOP_S="7"))


def test_variables_of_a_running_task_are_no_settings(tmp_path: Path) -> None:
    given = env(
        tmp_path, CAVVY_JOB="x", CAVVY_PARAM_LR="0.1", CAVVY_CHECKPOINT_DIR="/c", CAVVY_HOME="/h"
    )
    assert settings.load(given).home == Path("/h")


def test_a_named_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no such file"):
        settings.load({"HOME": str(tmp_path), "CAVVY_CONFIG": str(tmp_path / "none.toml")})


def test_text_settings_take_a_variable_as_it_is(tmp_path: Path) -> None:
    found = settings.load(env(tmp_path, CAVVY_SERVER_LISTEN="127.0.0.1:0"))
    assert found.text("server.listen") == "127.0.0.1:0"


def test_every_setting_is_documented() -> None:
    page = Path(__file__).parents[3] / "docs" / "reference" / "settings.md"
    assert page.read_text("utf-8") == settings.reference(), (
        "run: python -m cavvy.settings > docs/reference/settings.md"
    )


def test_every_text_is_a_whole_sentence() -> None:
    """A comma outside of quotes in a table of settings would end its text there."""
    texts = {each.name: (each.text, each.consequence) for each in SETTINGS}
    assert [name for name, found in texts.items() if not all(t.endswith(".") for t in found)] == []
