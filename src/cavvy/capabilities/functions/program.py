"""`cavvy run app.py`: recognises a Python file that makes an app, and calls its main function."""

import ast
import asyncio
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from cavvy.capabilities.functions.app import MAIN, App, list_apps, name_place
from cavvy.cli.task.programs import Program
from cavvy.cli.view.failure import CommandFailure
from cavvy.sdk.errors import CavvyError

_WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def find_program(text: str) -> Program | None:
    """Return what the commands do with the file of this text if it makes an app: if it assigns
    `cavvy.App(...)` at its upper level.
    """
    if "cavvy" not in text or "App" not in text:
        return None
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return None
    modules, names = set(), set()
    for step in tree.body:
        if isinstance(step, ast.Import):
            modules |= {each.asname or each.name for each in step.names if each.name == "cavvy"}
        elif isinstance(step, ast.ImportFrom) and step.module == "cavvy" and not step.level:
            names |= {each.asname or each.name for each in step.names if each.name == "App"}
        elif isinstance(step, ast.Assign | ast.AnnAssign) and isinstance(step.value, ast.Call):
            match step.value.func:
                case ast.Attribute(attr="App", value=ast.Name(id=module)) if module in modules:
                    return APP_PROGRAM
                case ast.Name(id=name) if name in names:
                    return APP_PROGRAM
    return None


def run_program(path: Path, words: Sequence[str], project: str | None, consent: bool) -> None:
    """Call the main function of the app in a file, with the words of the command line. Raises
    CommandFailure.
    """
    sys.argv = [str(path), *words]
    load_file(path)
    app = find_entry(path)
    assert app.entry is not None
    args = read_words(app.entry, words)
    app.project = project or app.project
    try:
        with app.run(consent=consent):
            found = app.entry(**args)
            if inspect.iscoroutine(found):
                asyncio.run(found)
    except CavvyError as error:
        raise CommandFailure(error.message, error.hint) from error
    except Exception as error:  # noqa: BLE001 - the user's code raises anything
        print_traceback(error)
        sys.exit(1)


def deploy_program(path: Path, project: str | None, consent: bool) -> None:
    """Deploy the apps of a file. Raises CommandFailure."""
    from cavvy.capabilities.functions.deployed import deploy_app

    load_file(path)
    for app in list_apps():
        if app.place.module != MAIN:
            continue
        try:
            done = deploy_app(app, project, consent=consent)
        except CavvyError as error:
            raise CommandFailure(error.message, error.hint) from error
        state = "deployed" if done.changed else "is deployed already"
        click.echo(f"{app.name}: revision {done.revision} {state} in project {done.project}")
        for name in done.schedules:
            click.echo(f"  {name} runs at {app.functions[name].options.schedule} (UTC)")
        for name in done.functions:
            click.echo(f'  cavvy.Function.lookup("{app.name}", "{name}").remote(...)')


def dev_program(path: Path, words: Sequence[str], project: str | None, consent: bool) -> None:
    """Call the main function of the app in a file whenever the file's folder changes. Raises
    CommandFailure.
    """
    from cavvy.capabilities.functions.dev import dev_program as run

    run(path, words, project, consent)


def load_file(path: Path) -> ModuleType:
    """Import the file. Raises CommandFailure."""
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
    except Exception as error:
        print_traceback(error)
        raise CommandFailure(
            f"{path} cannot be imported: {type(error).__name__}: {error}",
            "the file is imported on this computer, too: import what only the nodes have inside "
            "the functions",
            exit_code=2,
        ) from error
    return module


def find_entry(path: Path) -> App:
    """Return the app of a loaded file that has a main function. Raises CommandFailure."""
    apps = [each for each in list_apps() if each.place.module == MAIN]
    found = [each for each in apps if each.entry is not None]
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


APP_PROGRAM = Program(run_program, deploy_program, dev_program)
