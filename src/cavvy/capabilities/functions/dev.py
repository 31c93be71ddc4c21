"""`cavvy dev app.py`: calls the main function of an app again whenever a file of its folder is
saved. The jobs go on: they get the changed files, and their processes start again with them.
"""

import asyncio
import importlib
import inspect
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import click

from cavvy.capabilities.functions.app import MAIN, App, list_apps
from cavvy.capabilities.functions.app_file import (
    calls_main,
    find_entry,
    load_file,
    print_traceback,
    read_words,
)
from cavvy.capabilities.functions.calls import AppRun
from cavvy.capabilities.functions.jobs import EndedBySignal
from cavvy.cli.view.failure import CommandFailure, note_out
from cavvy.sdk.errors import CavvyError
from cavvy.spec.ignore import list_files

_LOOK_S = 0.05  # between two looks at the folder; longer if a look takes long
_SHARE = 5  # a look takes at most one part of so many
_DEV = "-dev"  # behind the names of services, beside those of the deployed app
_SKIPPED = {"__pycache__", "node_modules"}
_RULES = {".gitignore", ".cavvyignore"}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
# runs in a row that the same file has begun, each so soon after the begin or end of the one before
_MOST_AGAIN, _SOON_S = 5, 2.0
_Marks = dict[str, tuple[int, int]]


class CodeChanged(BaseException):
    """Raised in the main function when a file was saved. No `except Exception` catches it."""


class OwnOutputs:
    """The files that this program writes itself: what its main function opens, and where its
    standard output goes. They are no files that a user has saved.
    """

    def __init__(self, folder: Path) -> None:
        self._prefix = os.path.join(os.path.realpath(folder), "")
        self._watches = False
        self.written: set[str] = set()
        self._streams: set[tuple[int, int]] = set()
        for number in (1, 2):
            with suppress(OSError):
                status = os.fstat(number)
                self._streams.add((status.st_dev, status.st_ino))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note what is opened for writing inside the block."""

        def hook(event: str, args: tuple[object, ...]) -> None:
            if self._watches:
                self.note(event, args)

        self._watches = True
        sys.addaudithook(hook)  # Python removes no such hook before the process ends
        try:
            yield
        finally:
            self._watches = False

    def note(self, event: str, args: tuple[object, ...]) -> None:
        """Take an event of Python's audit hooks."""
        if event == "open" and isinstance(args[2], int) and args[2] & _WRITES:
            path = args[0]
        elif event == "os.rename":
            path = args[1]
        elif event == "os.remove":
            path = args[0]
        else:
            return
        if isinstance(path, str | bytes):
            whole = os.path.realpath(os.fsdecode(path))
            if whole.startswith(self._prefix):
                self.written.add(whole)

    def has(self, path: str) -> bool:
        """Return whether the program has written this file since `written` was cleared, or prints
        into it."""
        if os.path.realpath(path) in self.written:
            return True
        with suppress(OSError):
            status = os.stat(path)
            return (status.st_dev, status.st_ino) in self._streams
        return False


class DevSession:
    """The file, its folder, and the jobs of its apps."""

    def __init__(
        self, path: Path, words: Sequence[str], project: str | None, *, consent: bool
    ) -> None:
        self._path, self._words, self._project, self._consent = path, words, project, consent
        self._folder = path.parent
        self._marks: _Marks = {}
        self._unsent: set[str] = set()  # changed files that the jobs do not have yet
        self._runs: dict[str, AppRun] = {}
        self._web: dict[str, App] = {}  # apps whose web endpoints are served
        self._look_s = 0.0  # how long a look takes
        self._own = OwnOutputs(path.parent)
        self._left_out: set[str] = set()  # files that are not sent, or written by each run
        self._begun_by: tuple[frozenset[str], int] = frozenset(), 0  # and how often in a row
        self._turned_at = 0.0  # when the main function has begun or ended

    def run(self) -> None:
        """Run until the user ends the command."""
        sys.argv = [str(self._path), *self._words]
        sys.dont_write_bytecode = True  # a file may be saved twice in a second
        with self._own.watching():
            self._run_again()

    def _run_again(self) -> None:
        """Call the main function after each change, until the user ends the command."""
        self._marks = self._look()
        load_file(self._path)
        if calls_main():
            entry = find_entry(self._path).entry
            assert entry is not None
            # wrong words end the command: no change of a file mends them
            read_words(entry, self._words)
        signal.signal(signal.SIGUSR1, _interrupt)
        try:
            while True:
                self._serve_web()
                with suppress(CodeChanged):
                    self._call_main()
                self._wait()
                while not self._load():
                    self._wait()
        except KeyboardInterrupt:
            click.echo("", err=True)
        finally:
            for each in self._runs.values():
                each.close()
            self._end_web()

    def _serve_web(self) -> None:
        """Let services answer the requests of the web endpoints with the code that is here now."""
        from cavvy.capabilities.functions.web_deploy import deploy_web

        for app in list_apps():
            if app.place.module != MAIN or not app.web:
                continue
            self._web[app.name] = app
            try:
                urls = deploy_web(app, self._project, consent=self._consent, suffix=_DEV)
            except CavvyError as error:
                _tell(error)
                continue
            for name, url in urls.items():
                click.echo(f"{name} is at {url}", err=True)

    def _end_web(self) -> None:
        from cavvy.capabilities.functions.web_deploy import end_web

        for app in self._web.values():
            with suppress(CavvyError):
                end_web(app, self._project, _DEV)

    def _call_main(self) -> None:
        """Call the main function; a change of a file ends it by CodeChanged."""
        if not calls_main():
            click.echo(f"-- waiting for a change in {self._folder}", err=True)
            return
        app = find_entry(self._path)
        assert app.entry is not None
        app.project, app.consent = self._project or app.project, self._consent
        run = app.running()
        assert isinstance(run, AppRun)
        self._runs[app.name] = run
        self._own.written.clear()
        self._turned_at = time.monotonic()
        with self._watched():
            try:
                found = app.entry(**read_words(app.entry, self._words))
                if inspect.iscoroutine(found):
                    asyncio.run(found)
            except (CommandFailure, CavvyError) as error:
                _tell(error)
            except EndedBySignal:
                raise
            except SystemExit as error:
                if error.code not in (None, 0):
                    told = error.code if isinstance(error.code, str) else f"exit code {error.code}"
                    note_out(f"the main function has ended the program: {told}", "error")
            except Exception as error:  # noqa: BLE001 - the user's code raises anything
                print_traceback(error)
            sys.stdout.flush()
        self._find_changes()  # what the function has written is no change
        self._own.written.clear()
        self._turned_at = time.monotonic()
        click.echo(f"-- waiting for a change in {self._folder}", err=True)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Raise CodeChanged inside the block when a file has changed."""
        over = threading.Event()
        main = threading.main_thread().ident
        assert main is not None

        def watch() -> None:
            while not over.wait(self._pause()):
                if self._find_changes():
                    if not over.is_set():
                        signal.pthread_kill(main, signal.SIGUSR1)
                    return

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _wait(self) -> None:
        while not (changed := self._find_changes()):
            time.sleep(self._pause())
        self._stop_loops(frozenset(changed))

    def _find_changes(self) -> set[str]:
        """Return the files that were saved since the last run. Others that have changed, which are
        ignored or which this program writes itself, are looked at no more until they change again.
        """
        marks = self._look()
        changed = _compare(marks, self._marks)
        if not changed:
            return set()
        if any(os.path.basename(each) in _RULES for each in changed):
            self._left_out.clear()
        own = {each for each in changed if each in self._left_out or self._own.has(each)}
        if rest := changed - own:
            with suppress(OSError):
                sent = {os.path.join(self._folder, each) for each in list_files(self._folder)}
                ignored = {each for each in rest if each in marks and each not in sent}
                self._left_out |= ignored
                own |= ignored
        for each in own:
            self._marks.pop(each, None)
            if each in marks:
                self._marks[each] = marks[each]
        return changed - own

    def _stop_loops(self, changed: frozenset[str]) -> None:
        """Leave files out that another program writes in each run of the main function, such as
        `tee`, which would begin the next run for ever."""
        before, count = self._begun_by
        soon = time.monotonic() - self._turned_at < _SOON_S
        count = count + 1 if soon and changed <= before else int(soon)
        self._begun_by = changed, count
        loaded = {getattr(each, "__file__", None) for each in list(sys.modules.values())}
        written = sorted(each for each in changed if each not in loaded and each[-3:] != ".py")
        if count >= _MOST_AGAIN and len(written) == len(changed):
            self._left_out |= changed
            names = ", ".join(os.path.relpath(each, self._folder) for each in written)
            note_out(
                f"{names} has changed in each of {count} runs: it is left out from now on, until "
                "an ignore file changes. A line in .cavvyignore leaves it out from the beginning"
            )

    def _pause(self) -> float:
        return max(_LOOK_S, _SHARE * self._look_s)

    def _look(self) -> _Marks:
        """Return the time and size of each file in the folder."""
        began = time.monotonic()
        found: _Marks = {}
        for folder, folders, files in os.walk(self._folder):
            folders[:] = [each for each in folders if each[0] != "." and each not in _SKIPPED]
            for name in files:
                path = os.path.join(folder, name)
                with suppress(OSError):
                    status = os.stat(path)
                    found[path] = status.st_mtime_ns, status.st_size
        self._look_s = time.monotonic() - began
        return found

    def _load(self) -> bool:
        """Load the changed files here, and send them to the jobs. Return False if they cannot be
        loaded, after saying why."""
        marks = self._look()
        self._unsent |= {
            os.path.relpath(each, self._folder) for each in _compare(marks, self._marks)
        }
        self._marks = marks
        importlib.invalidate_caches()
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None) or ""
            if file in marks and name != "__main__":
                del sys.modules[name]
        try:
            load_file(self._path)
            if calls_main():
                find_entry(self._path)
            apps = {each.name: each for each in list_apps() if each.place.module == MAIN}
            for name in self._runs.keys() - apps.keys():
                self._runs.pop(name).close()
            for name, run in self._runs.items():
                self._send(apps[name], run, self._unsent)
        except (CommandFailure, CavvyError) as error:
            _tell(error)
            return False
        self._unsent = set()
        return True

    def _send(self, app: App, run: AppRun, changed: set[str]) -> None:
        """Let the jobs of the app before go on as those of this one."""
        app.runner, app.project, app.consent = run, self._project or app.project, self._consent
        sent = changed & {*list_files(self._folder), *self._list_removed(changed)}
        run.change_code(app, {each: self._read(each) for each in sorted(sent)})

    def _list_removed(self, changed: set[str]) -> list[str]:
        return [each for each in changed if not (self._folder / each).exists()]

    def _read(self, inside: str) -> bytes | None:
        try:
            return (self._folder / inside).read_bytes()
        except OSError:
            return None


def _compare(marks: _Marks, before: _Marks) -> set[str]:
    """Return the files that are new, gone or changed."""
    return {each for each in marks.keys() | before.keys() if marks.get(each) != before.get(each)}


def _tell(error: CommandFailure | CavvyError) -> None:
    note_out(error.message, "error")
    if error.hint:
        note_out(error.hint, "hint")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise CodeChanged
