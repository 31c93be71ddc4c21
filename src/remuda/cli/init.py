"""`remuda init`: write a commented starter task file after a few questions."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from remuda.cli.session import Failure

if TYPE_CHECKING:
    from remuda.spec.starter import Answers


@click.command("init")
@click.argument("file", default="task.yaml", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--defaults", is_flag=True, help="Ask nothing and take the default of every answer.")
def command(file: Path, defaults: bool) -> None:
    """Write a commented starter task file, task.yaml unless FILE is given.

    Asks for a name, a command, accelerators, spot capacity, checkpoints and a budget. An existing file is
    overwritten only after a question.
    """
    from remuda.spec import SpecError, parse_task
    from remuda.spec.starter import make_starter

    if not defaults and not _has_terminal():
        raise Failure("there is no terminal to ask on", "`remuda init --defaults` asks nothing", exit_code=2)
    _check_file(file, ask=not defaults)
    text = make_starter(_defaults(file) if defaults else _ask(file))
    try:
        parse_task(text, file=str(file))
        file.write_text(text)
    except SpecError as error:
        raise Failure(f"this makes no valid task file:\n{error}", "start again with other answers") from error
    except OSError as error:
        raise Failure(f"cannot write {file}: {error.strerror}") from error
    click.echo(f"wrote {file}")
    click.echo(f"what it would cost: remuda plan {file}    run it: remuda run {file}")


def _has_terminal() -> bool:
    return sys.stdin.isatty()


def _check_file(file: Path, *, ask: bool) -> None:
    if not file.parent.is_dir():
        raise Failure(f"there is no folder {file.parent}", "make it first", exit_code=2)
    if file.exists():
        if not ask:
            raise Failure(f"{file} exists already", "name another file: `remuda init --defaults FILE`", exit_code=2)
        click.confirm(f"{file} exists already. Overwrite it?", abort=True)


def _defaults(file: Path) -> "Answers":
    from remuda.spec.problems import slug
    from remuda.spec.starter import Answers

    # A file called task.yaml says nothing; its folder says what this is about.
    folder = file.resolve().parent.name
    return Answers(name=slug(folder if file.stem == "task" else file.stem) or "hello")


def _ask(file: Path) -> "Answers":
    from remuda.domain.tasks import SpotPolicy
    from remuda.spec.starter import Answers

    plain = _defaults(file)
    name = click.prompt("Name", default=plain.name, value_proc=_checked("name: {}\nrun: x"))
    run = click.prompt("Command to run", default=plain.run)
    gpu = click.prompt(
        "Accelerators, such as H100:8 or A100:80GB (none)",
        default="",
        show_default=False,
        value_proc=_checked("run: x\nresources: {{gpu: {}}}"),
    )
    spot = click.prompt(
        "Spot capacity, which is cheap and can be taken away",
        type=click.Choice([policy.value for policy in SpotPolicy]),
        default=SpotPolicy.AUTO.value if gpu else SpotPolicy.NEVER.value,
    )
    checkpoint = click.prompt(
        "Folder of checkpoints, which outlives a node (none)",
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
    return Answers(name=name, run=run, gpu=gpu, spot=SpotPolicy(spot), checkpoint=checkpoint, budget=budget)


def _checked(template: str) -> Callable[[str], str]:
    """Checks one answer as the whole file will be checked, so that the question is asked again at once."""

    def check(answer: str) -> str:
        import json

        from remuda.spec import SpecError, parse_task

        answer = answer.strip()
        if answer in ("", "none"):
            return ""
        try:
            parse_task(template.format(json.dumps(answer)))
        except SpecError as error:
            problem = error.problems[0]
            raise click.BadParameter("; ".join(filter(None, (problem.message, problem.suggestion)))) from error
        return answer

    return check
