"""`cavvy init`: asks a few questions and writes a commented task file, or copies a template."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cavvy.cli.view.failure import CommandFailure

if TYPE_CHECKING:
    from cavvy.spec.starter import StarterAnswers

# One folder per template: a task file, a program and, if it needs packages, their names.
TEMPLATES = Path(__file__).parents[1] / "templates"


@click.command("init")
@click.argument("file", default="task.yaml", type=click.Path(path_type=Path))
@click.option("--defaults", is_flag=True, help="Use the default answer to every question.")
@click.option(
    "--template",
    metavar="NAME",
    help="Write the template NAME, a program with a task file, to the folder FILE (default: NAME).",
)
@click.option("--list", "wanted", is_flag=True, help="List the templates.")
@click.pass_context
def command(
    context: click.Context, file: Path, defaults: bool, template: str | None, wanted: bool
) -> None:
    """Write a commented task file to start from. The file's name is FILE (default: task.yaml).

    The command asks for a name, a command line, accelerators, spot capacity, checkpoints and a
    budget. The command asks for confirmation before it overwrites a file.
    """
    from cavvy.spec import SpecError
    from cavvy.spec.starter import make_starter
    from cavvy.task_files import parse_task

    if wanted:
        _list_templates()
        return
    if template is not None:
        named = context.get_parameter_source("file") is not click.core.ParameterSource.DEFAULT
        _copy_template(template, file if named else Path(template))
        return
    if not defaults and not _has_terminal():
        raise CommandFailure(
            "there is no terminal to ask questions on", "use `cavvy init --defaults`", exit_code=2
        )
    _check_file(file, ask=not defaults)
    text = make_starter(_defaults(file) if defaults else _ask(file))
    try:
        parse_task(text, file=str(file))
        file.write_text(text)
    except SpecError as error:
        raise CommandFailure(
            f"the task file from these answers is invalid:\n{error}",
            "start again with different answers",
        ) from error
    except OSError as error:
        raise CommandFailure(f"cannot write {file}: {error.strerror}") from error
    click.echo(f"wrote {file}")
    _next_steps(str(file))


def _templates() -> dict[str, Path]:
    return {
        folder.name: folder
        for folder in sorted(TEMPLATES.iterdir())
        if (folder / "task.yaml").is_file()
    }


def _list_templates() -> None:
    from cavvy.cli.view.output import TableColumn, rows_out

    rows = [
        (name, (folder / "task.yaml").read_text().splitlines()[0].lstrip("# "))
        for name, folder in _templates().items()
    ]
    rows_out([TableColumn("template"), TableColumn("shows", "WHAT IT SHOWS", wrap=True)], rows)
    click.echo("write a template: cavvy init --template NAME [FOLDER]")


def _copy_template(name: str, folder: Path) -> None:
    from difflib import get_close_matches

    found = _templates()
    if name not in found:
        close = get_close_matches(name, found, n=1)
        hint = f"did you mean {close[0]}?" if close else "`cavvy init --list` lists the templates"
        raise CommandFailure(f"there is no template {name!r}", hint, exit_code=2)
    files = _read_template(found[name])
    for taken in (folder / each for each in files):
        if taken.exists():
            raise CommandFailure(f"{taken} exists already", "choose another folder", exit_code=2)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for each, data in files.items():
            (folder / each).write_bytes(data)
    except OSError as error:
        raise CommandFailure(f"cannot write to {folder}: {error.strerror}") from error
    click.echo(f"wrote {', '.join(str(folder / each) for each in files)}")
    _next_steps(f"{folder}/task.yaml", serves=b"\nservice:" in files["task.yaml"])


def _next_steps(file: str, *, serves: bool = False) -> None:
    start = "start the service: cavvy serve" if serves else "run the task: cavvy run"
    click.echo(f"see the cost: cavvy plan {file}    {start} {file}")


def _read_template(folder: Path) -> dict[str, bytes]:
    """Return the template's files by name. If this version of Cavvy cannot be installed from a
    package index, the setup uses a wheel that each submission adds.
    """
    from importlib.metadata import distribution

    from cavvy.spec.uses import NAME, make_wheel

    files = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
    if (
        b"cavvy[train]" in files.get("requirements.txt", b"")
        and make_wheel(distribution("cavvy")) is not None
    ):
        for name, old, new in (
            (
                "requirements.txt",
                "cavvy[train]",
                f"./{NAME}[train]  # `cavvy run` adds this file; omit the line elsewhere",
            ),
            ("task.yaml", "uses: [requirements.txt]", f"uses: [requirements.txt, {NAME}]"),
        ):
            files[name] = files[name].replace(old.encode(), new.encode())
    return files


def _has_terminal() -> bool:
    return sys.stdin.isatty()


def _check_file(file: Path, *, ask: bool) -> None:
    if file.is_dir():
        raise CommandFailure(f"{file} is a folder", "name a file in this folder", exit_code=2)
    if not file.parent.is_dir():
        raise CommandFailure(
            f"there is no folder {file.parent}", "create the folder first", exit_code=2
        )
    if file.exists():
        if not ask:
            raise CommandFailure(
                f"{file} exists already",
                "choose another file: `cavvy init --defaults FILE`",
                exit_code=2,
            )
        click.confirm(f"{file} exists already. Overwrite it?", abort=True)


def _defaults(file: Path) -> "StarterAnswers":
    from cavvy.spec.problems import slug
    from cavvy.spec.starter import StarterAnswers

    # The default name, task.yaml, does not describe the task, so the name of the folder is used.
    folder = file.resolve().parent.name
    return StarterAnswers(name=slug(folder if file.stem == "task" else file.stem) or "hello")


def _ask(file: Path) -> "StarterAnswers":
    from cavvy.domain.tasks import SpotPolicy
    from cavvy.spec.starter import StarterAnswers

    plain = _defaults(file)
    name = click.prompt(
        "Name", default=plain.name, value_proc=_checked("name: {}\nrun: x\nenv: {{}}")
    )
    run = click.prompt("Command to run", default=plain.run)
    gpu = click.prompt(
        "Accelerators, such as H100:8 or A100:80GB (none)",
        default="",
        show_default=False,
        value_proc=_checked("run: x\nresources: {{gpu: {}}}"),
    )
    spot = click.prompt(
        "Spot capacity: cheap, but can be reclaimed at any time",
        type=click.Choice([policy.value for policy in SpotPolicy]),
        default=SpotPolicy.AUTO.value if gpu else SpotPolicy.NEVER.value,
    )
    checkpoint = click.prompt(
        "Checkpoint folder, which survives the loss of a node (none)",
        default="",
        show_default=False,
        value_proc=_checked("run: x\ncheckpoint: {}"),
    )
    budget = click.prompt(
        "Budget in US dollars (none)",
        default="",
        show_default=False,
        value_proc=_checked("run: x\nlimits: {{budget: {}}}"),
    )
    return StarterAnswers(
        name=name, run=run, gpu=gpu, spot=SpotPolicy(spot), checkpoint=checkpoint, budget=budget
    )


def _checked(template: str) -> Callable[[str], str]:
    """Return a function that checks an answer by the rules of the task file. If the answer is
    invalid, the function raises an error, so that the question is repeated.
    """

    def check(answer: str) -> str:
        from cavvy.spec import SpecError
        from cavvy.task_files import parse_task

        answer = answer.strip()
        if answer in ("", "none"):
            return ""
        try:
            parse_task(template.format(json.dumps(answer)))
        except SpecError as error:
            problem = error.problems[0]
            raise click.BadParameter(
                "; ".join(filter(None, (problem.message, problem.suggestion)))
            ) from error
        return answer

    return check
