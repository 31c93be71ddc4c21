"""Where the API key of a cloud is found, and what a user is told if it is missing."""

from pathlib import Path

import pytest

from cavvy.providers.base import Refused, SettingKind
from cavvy.providers.vm.keys import ApiKeySource


def source(file: Path) -> ApiKeySource:
    return ApiKeySource(
        provider="prairie",
        variables=("PRAIRIE_KEY",),
        files=(str(file),),
        made_at="https://prairie.example/keys",
    )


@pytest.mark.parametrize(
    "text",
    [
        "k-123\n",
        "api_key = k-123\n",
        'other: 1\napi_key: "k-123"\nmore: 2\n',
        '{\n\t"name": "mine",\n\t"api_key": "k-123",\n\t"createdAt": "now"\n}\n',
    ],
)
def test_a_key_is_read_from_the_usual_file(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PRAIRIE_KEY", raising=False)
    (tmp_path / "key").write_text(text)
    assert source(tmp_path / "key").find({}) == ("k-123", str(tmp_path / "key"))


def test_an_empty_value_does_not_take_the_next_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PRAIRIE_KEY", raising=False)
    (tmp_path / "key").write_text("api_key:\napi-url: https://prairie.example\n")
    with pytest.raises(Refused, match="no API key"):
        source(tmp_path / "key").read({})


def test_a_key_with_white_space_is_refused_and_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRAIRIE_KEY", "k-123\nmore")
    with pytest.raises(Refused, match=r"\$PRAIRIE_KEY contains white space") as found:
        source(tmp_path / "key").read({})
    assert "k-123" not in str(found.value)


def test_the_named_file_precedes_the_environment_which_precedes_the_usual_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRAIRIE_KEY", "from-environment")
    (tmp_path / "usual").write_text("from-file")
    (tmp_path / "named").write_text("from-named")
    keys = source(tmp_path / "usual")
    assert keys.read({"key_file": str(tmp_path / "named")}) == "from-named"
    assert keys.find({}) == ("from-environment", "$PRAIRIE_KEY")
    monkeypatch.setenv("PRAIRIE_KEY", "")
    assert keys.read({}) == "from-file"


def test_a_missing_key_is_refused_with_all_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PRAIRIE_KEY", raising=False)
    keys = source(tmp_path / "none")
    with pytest.raises(Refused) as found:
        keys.read({})
    for text in ("$PRAIRIE_KEY", str(tmp_path / "none"), "https://prairie.example/keys"):
        assert text in str(found.value)
    with pytest.raises(Refused, match="named"):
        keys.read({"key_file": str(tmp_path / "named")})
    (tmp_path / "empty").write_text("# no key here\n")
    with pytest.raises(Refused, match="no API key"):
        source(tmp_path / "empty").read({})
    with pytest.raises(Refused, match=r"cannot be read: Is a directory$"):
        keys.read({"key_file": str(tmp_path)})
    (tmp_path / "binary").write_bytes(b"k\xf9y")
    with pytest.raises(Refused, match=r"cannot be read: the file is not a text file$"):
        keys.read({"key_file": str(tmp_path / "binary")})
    assert keys.setting().kind is SettingKind.KEY_FILE


@pytest.mark.parametrize("settings", [{}, {"key_file": "KEYS"}])
def test_a_file_of_several_words_is_told_from_a_missing_file(
    settings: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PRAIRIE_KEY", raising=False)
    (tmp_path / "keys").write_text("my key is k-123\n")
    given = dict.fromkeys(settings, str(tmp_path / "keys"))
    with pytest.raises(Refused) as found:
        source(tmp_path / "keys").read(given)
    assert "keys (it has several words, and no line `api_key = KEY` with a key)" in str(found.value)
    assert "k-123" not in str(found.value)
