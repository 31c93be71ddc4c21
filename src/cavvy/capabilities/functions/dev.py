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
_Marks = dict[str, tuple[int, int]]


class CodeChanged(BaseException):
    """Raised in the main function when a file was saved. No `except Exception` catches it."""


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

    def run(self) -> None:
        """Run until the user ends the command."""
        sys.argv = [str(self._path), *self._words]
        sys.dont_write_bytecode = True  # a file may be saved twice in a second
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
        click.echo(f"-- waiting for a change in {self._folder}", err=True)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Raise CodeChanged inside the block when a file has changed."""
        over = threading.Event()
        main = threading.main_thread().ident
        assert main is not None

        def watch() -> None:
            while not over.wait(self._pause()):
                if self._look() != self._marks:
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
        while self._look() == self._marks:
            time.sleep(self._pause())

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
            os.path.relpath(each, self._folder)
            for each in marks.keys() | self._marks.keys()
            if marks.get(each) != self._marks.get(each)
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


def _tell(error: CommandFailure | CavvyError) -> None:
    note_out(error.message, "error")
    if error.hint:
        note_out(error.hint, "hint")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise CodeChanged
