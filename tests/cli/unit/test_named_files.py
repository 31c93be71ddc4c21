"""Files that users name, such as pipes into which nothing writes."""

import os
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.own_parts import read_own

from cavvy import named_files
from cavvy.cli.main import cli
from cavvy.named_files import NothingWrites, open_named, read_named, read_named_text


@pytest.fixture
def pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pipe for which no program is waited for."""
    monkeypatch.setattr(named_files, "WAIT_S", 0.1)
    path = tmp_path / "pipe.yaml"
    os.mkfifo(path)
    return path


def test_a_pipe_into_which_nothing_writes_is_refused(pipe: Path) -> None:
    with pytest.raises(NothingWrites, match=r"no program has opened it to write") as caught:
        read_named(pipe)
    assert caught.value.filename == str(pipe)


@pytest.mark.parametrize("parts", [[b"all"], [b"a", b"ll"], [b"x" * 200_000, b"y"]])
def test_a_pipe_is_read_to_its_end_while_it_is_written(
    pipe: Path, parts: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(named_files, "WAIT_S", 60)

    def write() -> None:
        with pipe.open("wb", buffering=0) as out:
            for part in parts:
                out.write(part)

    thread = threading.Thread(target=write)
    thread.start()
    assert read_named(pipe) == b"".join(parts)
    thread.join()


def test_what_was_written_before_the_pipe_is_named_is_read() -> None:
    read, write = os.pipe()
    os.write(write, b"run: x\r\n")
    os.close(write)
    with open(read, closefd=True):
        assert read_named_text(f"/dev/fd/{read}") == "run: x\n"


def test_folders_and_missing_files_fail_as_they_do_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        open_named(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_named(tmp_path / "none")
    (tmp_path / "some").write_bytes(b"0123")
    assert read_named(tmp_path / "some", 2) == b"01"


OWN = [each for each in read_own("piped")]


@pytest.mark.parametrize(
    "words",
    [
        *(words for each in OWN for words in each.WORDS),
        "validate PIPE",
        "run PIPE",
        "plan PIPE",
        "image build PIPE",
        "pool apply PIPE",
        "run --env-file PIPE FILE",
        "secret set name --file PIPE",
        "login https://192.0.2.1 --token-file PIPE",
        "server restore PIPE",
    ],
)
def test_commands_do_not_wait_for_a_pipe_into_which_nothing_writes(
    words: str, pipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAVVY_HOME", str(tmp_path / "home"))
    (tmp_path / "task.yaml").write_text("name: t\nrun: 'true'\n")
    given = {"PIPE": str(pipe), "FILE": str(tmp_path / "task.yaml")}
    done = CliRunner().invoke(cli, [given.get(word, word) for word in words.split()])
    assert done.exit_code in (1, 2), done.output
    assert "no program has opened it to write" in done.output


@pytest.mark.parametrize("command", [word for each in OWN for word in each.OF_SCRIPTS])
def test_a_training_script_is_a_file(command: str, pipe: Path) -> None:
    done = CliRunner().invoke(cli, [command, str(pipe)])
    assert done.exit_code == 2, done.output
    assert "is a pipe or a device" in done.output
