"""Loads the file of an app, and finds its main function and the arguments for it."""

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from cavvy.capabilities.functions.app import MAIN, App, drop_apps, list_apps, name_place
from cavvy.cli.view.failure import CommandFailure
from cavvy.sdk.errors import CavvyError

_WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def load_file(path: Path) -> ModuleType:
    """Import the file. Raises CommandFailure."""
    drop_apps(MAIN)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    found = importlib.util.spec_from_file_location(MAIN, path.resolve())
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[MAIN] = module
    try:
        found.loader.exec_module(module)
    except CavvyError as error:
        raise CommandFailure(error.message, error.hint, exit_code=2) from error
    except SystemExit as error:
        raise CommandFailure(
            f"{path} ends the program while it is imported (exit code {error.code})",
            "call sys.exit inside the function marked with @app.main()",
            exit_code=2,
        ) from error
    except Exception as error:
        print_traceback(error)
        raise CommandFailure(
            f"{path} cannot be imported: {type(error).__name__}: {error}",
            "the file is imported on this computer, too: import what only the nodes have inside "
            "the functions",
            exit_code=2,
        ) from error
    return module


def calls_main() -> bool:
    """Return whether the main function of a loaded file is called: not if it has only web
    endpoints."""
    apps = [each for each in list_apps() if each.place.module == MAIN]
    return any(each.entry for each in apps) or not any(each.web for each in apps)


def find_entry(path: Path) -> App:
    """Return the app of a loaded file that has a main function. Raises CommandFailure."""
    apps = [each for each in list_apps() if each.place.module == MAIN]
    found = [each for each in apps if each.entry is not None]
    if not apps:
        raise CommandFailure(
            f"{path} makes no app",
            'assign one at the upper level of the file: app = cavvy.App("NAME")',
            exit_code=2,
        )
    if not found:
        names = ", ".join(each.name for each in apps)
        raise CommandFailure(
            f"{path}: no app ({names}) has a function marked with @app.main()",
            "put @app.main() above the function that `cavvy run` calls on this computer",
            exit_code=2,
        )
    if len(found) > 1:
        told = " and ".join(f"{each.name} ({name_place(each.entry)})" for each in found)
        raise CommandFailure(f"{path} has two main functions: {told}", "keep one", exit_code=2)
    return found[0]


def read_words(entry: Callable[..., Any], words: Sequence[str]) -> dict[str, Any]:
    """Return the arguments for the main function: `--name VALUE`, `--name=VALUE`, or `--name` and
    `--no-name` for a bool. Raises CommandFailure.
    """
    parameters = inspect.signature(entry, eval_str=True).parameters
    flags = {each.replace("_", "-"): each for each in parameters}
    listed = " ".join(f"--{each}" for each in flags) or "none"
    args: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.removeprefix("--").partition("=")
        name = flags.get(flag) or flags.get(flag.removeprefix("no-"))
        if not word.startswith("--") or name is None:
            text = f"{word} is no option of the main function"
            raise CommandFailure(text, f"its options are {listed}", exit_code=2)
        kind = _find_kind(parameters[name])
        if kind is bool and not equals:
            args[name] = flag in flags
            continue
        if not equals:
            if not rest:
                raise CommandFailure(f"--{flag} needs a value", exit_code=2)
            value = rest.pop(0)
        args[name] = _read_value(f"--{flag}", value, kind)
    for name, each in parameters.items():
        if name not in args and each.default is each.empty and each.kind is not each.VAR_KEYWORD:
            flag = f"--{name.replace('_', '-')}"
            hint = f"add it behind --, such as `-- {flag} VALUE`"
            raise CommandFailure(f"the main function needs {flag}", hint, exit_code=2)
    return args


def _find_kind(parameter: inspect.Parameter) -> type:
    """Return the type of a parameter: its annotation, or else that of its default."""
    for kind in (bool, int, float, str):
        if parameter.annotation in (kind, kind | None):
            return kind
    default = parameter.default
    if parameter.annotation is parameter.empty and isinstance(default, bool | int | float):
        return type(default)
    return str


def _read_value(flag: str, text: str, kind: type) -> Any:
    try:
        return _WORDS[text.lower()] if kind is bool else kind(text)
    except (ValueError, KeyError):
        told = f"{flag}: {text!r} is not of type {kind.__name__}"
        raise CommandFailure(told, exit_code=2) from None


def print_traceback(error: Exception) -> None:
    """Print the traceback of the user's code, without the lines of this command."""
    trace = error.__traceback__
    own = (__file__, "<frozen importlib")
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(own):
        trace = trace.tb_next
    traceback.print_exception(error.with_traceback(trace))
