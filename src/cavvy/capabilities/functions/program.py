"""`cavvy run app.py`: recognises a Python file that makes an app, and calls its main function."""

import ast
import asyncio
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from cavvy.capabilities.functions.app import MAIN, list_apps
from cavvy.capabilities.functions.app_file import find_entry, load_file, print_traceback, read_words
from cavvy.cli.task.programs import Program
from cavvy.cli.view.failure import CommandFailure
from cavvy.sdk.errors import CavvyError


def find_program(text: str) -> Program | None:
    """Return what the commands do with the file of this text if it makes an app: if it assigns
    `cavvy.App(...)` at its upper level. For `modal.App(...)`, they say how to rewrite it.
    """
    for module, program in (("cavvy", APP_PROGRAM), ("modal", _MODAL_PROGRAM)):
        if module in text and "App" in text and _makes_app(text, module):
            return program
    return None


def _makes_app(text: str, source: str) -> bool:
    """Return whether a program assigns `App(...)` of this module at its upper level."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    modules, names = set(), set()
    for step in tree.body:
        if isinstance(step, ast.Import):
            modules |= {each.asname or each.name for each in step.names if each.name == source}
        elif isinstance(step, ast.ImportFrom) and step.module == source and not step.level:
            names |= {each.asname or each.name for each in step.names if each.name == "App"}
        elif isinstance(step, ast.Assign | ast.AnnAssign) and isinstance(step.value, ast.Call):
            match step.value.func:
                case ast.Attribute(attr="App", value=ast.Name(id=module)) if module in modules:
                    return True
                case ast.Name(id=name) if name in names:
                    return True
    return False


def run_program(path: Path, words: Sequence[str], project: str | None, consent: bool) -> None:
    """Call the main function of the app in a file, with the words of the command line. Raises
    CommandFailure.
    """
    from cavvy.capabilities.functions.jobs import ended_by_signals

    sys.argv = [str(path), *words]
    load_file(path)
    app = find_entry(path)
    assert app.entry is not None
    args = read_words(app.entry, words)
    app.project = project or app.project
    try:
        with ended_by_signals(), app.run(consent=consent):
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
    from cavvy.capabilities.functions.web_deploy import deploy_web, say_addresses

    load_file(path)
    for app in list_apps():
        if app.place.module != MAIN:
            continue
        try:
            if not app.functions and app.web:
                click.echo(f"{app.name}:")
                say_addresses(deploy_web(app, project, consent=consent))
                continue
            done = deploy_app(app, project, consent=consent)
            urls = deploy_web(app, project, consent=consent)
        except CavvyError as error:
            raise CommandFailure(error.message, error.hint) from error
        state = "deployed" if done.changed else "is deployed already"
        click.echo(f"{app.name}: revision {done.revision} {state} in project {done.project}")
        for name in done.schedules:
            click.echo(f"  {name} runs at {app.functions[name].options.schedule} (UTC)")
        for name in done.functions:
            click.echo(f'  cavvy.Function.lookup("{app.name}", "{name}").remote(...)')
        say_addresses(urls)


def dev_program(path: Path, words: Sequence[str], project: str | None, consent: bool) -> None:
    """Call the main function of the app in a file whenever the file's folder changes. Raises
    CommandFailure.
    """
    from cavvy.capabilities.functions.dev import DevSession
    from cavvy.capabilities.functions.jobs import ended_by_signals

    with ended_by_signals():
        DevSession(path.resolve(), words, project, consent=consent).run()


def _refuse_modal(path: Path, *_: object) -> None:
    raise CommandFailure(
        f"{path} makes an app of modal",
        f"`cavvy import {path} --to NEW.py` rewrites it for Cavvy; `cavvy run -- python {path}` "
        "runs it as it is",
        exit_code=2,
    )


_MODAL_PROGRAM = Program(_refuse_modal, _refuse_modal, _refuse_modal)
APP_PROGRAM = Program(run_program, deploy_program, dev_program)
