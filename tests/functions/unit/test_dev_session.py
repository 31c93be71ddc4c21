"""What `cavvy dev app.py` sends to the jobs when files are saved, with runs that note it."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from cavvy.capabilities.functions import dev
from cavvy.capabilities.functions.app import App
from cavvy.capabilities.functions.app_file import find_entry, load_file
from cavvy.capabilities.functions.calls import AppRun
from cavvy.cli.view.failure import CommandFailure

_APP = "import cavvy{}\napp = cavvy.App('{}')\n@app.main()\ndef main(): {}\n"


class NotedRun(AppRun):
    def __init__(self) -> None:
        self.closed = False
        self.sent: list[list[str]] = []

    def change_code(self, app: App, files: Mapping[str, bytes | None]) -> None:
        self.sent.append(sorted(files))

    def close(self) -> None:
        self.closed = True


class OpenedSession(dev.DevSession):
    """One that has called its main function once, with an app named `first`."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "app.py"
        self.file.write_text(_APP.format("", "first", "pass"))
        super().__init__(self.file, [], None, consent=False)
        self._marks = self._look()
        load_file(self.file)
        self.noted = NotedRun()
        self._runs["first"] = self.noted

    def save(self, name: str, text: str) -> bool:
        (self._folder / name).write_text(text)
        return self._load()


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OpenedSession:
    monkeypatch.setattr(sys, "path", [*sys.path])
    return OpenedSession(tmp_path)


def test_a_change_that_could_not_be_loaded_is_sent_with_the_next(session: OpenedSession) -> None:
    assert not session.save("app.py", _APP.format(", helper_of_dev", "first", "pass"))
    assert session.save("helper_of_dev.py", "VALUE = 1\n")
    assert session.save("notes.txt", "not again: app.py")
    assert session.noted.sent == [["app.py", "helper_of_dev.py"], ["notes.txt"]]


def test_an_app_may_get_another_name(session: OpenedSession) -> None:
    assert session.save("app.py", _APP.format("", "second", "pass"))
    assert find_entry(session.file).name == "second"
    assert session.noted.closed  # the job of the old name would stay for nobody


def test_a_file_that_ends_the_program_does_not_end_the_session(
    session: OpenedSession, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not session.save("app.py", "raise SystemExit(3)\n")
    assert "app.py ends the program while it is imported (exit code 3)" in capsys.readouterr().err
    assert session.save("app.py", _APP.format("", "first", "raise SystemExit('enough')"))
    session._call_main()
    told = capsys.readouterr().err
    assert "error: the main function has ended the program: enough" in told
    assert "waiting for a change" in told


def test_wrong_words_end_the_command(session: OpenedSession) -> None:
    wrong = dev.DevSession(session.file, ["--x", "3"], None, consent=False)
    with pytest.raises(CommandFailure, match="--x is no option of the main function"):
        wrong.run()


def test_what_the_main_function_writes_is_no_change(session: OpenedSession) -> None:
    folder = session._folder
    session._own.note("open", (str(folder / "results.csv"), "w", os.O_WRONLY | os.O_CREAT))
    session._own.note("open", (str(folder / "table.csv"), "r", os.O_RDONLY))
    session._own.note("open", (3, "w", os.O_WRONLY))
    for name in ("results.csv", "table.csv"):
        (folder / name).write_text("1")
    assert session._find_changes() == {str(folder / "table.csv")}
    session._call_main()  # it has ended, so the next change is the user's
    (folder / "results.csv").write_text("2, by hand")
    assert session._find_changes() == {str(folder / each) for each in ("results.csv", "table.csv")}


def test_only_what_is_written_during_the_command_is_noted(tmp_path: Path) -> None:
    """Python keeps the hook for as long as the process lives."""
    own = dev.OwnOutputs(tmp_path)
    with own.watching():
        (tmp_path / "during").write_text("1")
    (tmp_path / "after").write_text("1")
    assert own.written == {str(tmp_path / "during")}


def test_where_the_command_prints_is_no_change(tmp_path: Path) -> None:
    with (tmp_path / "out.log").open("w") as file:
        kept = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            own = dev.OwnOutputs(tmp_path)
        finally:
            os.dup2(kept, 1)
            os.close(kept)
    assert own.has(str(tmp_path / "out.log"))
    assert not own.has(str(tmp_path / "missing.log"))


def test_ignored_files_begin_no_run(session: OpenedSession) -> None:
    (session._folder / ".cavvyignore").write_text("*.log\n")
    session._load()
    (session._folder / "a.log").write_text("1")
    assert session._find_changes() == set()
    (session._folder / ".cavvyignore").write_text("\n")
    (session._folder / "a.log").write_text("22")
    assert str(session._folder / "a.log") in session._find_changes()


def test_a_file_that_each_run_changes_begins_no_run_for_ever(
    session: OpenedSession, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as that of `tee`."""
    for number in range(9):
        session._call_main()
        (session._folder / "out.txt").write_text("x" * number)
        if not (changed := session._find_changes()):
            break
        session._stop_loops(frozenset(changed))
        session._load()
    assert number == 5
    assert "out.txt has changed in each of 5 runs" in capsys.readouterr().err
    for number in range(9):  # code always begins one
        session._call_main()
        (session._folder / "helper_of_dev.py").write_text("#" * number)
        changed = session._find_changes()
        assert changed
        session._stop_loops(frozenset(changed))
        assert session._load()
