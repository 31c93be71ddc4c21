"""`cavvy init`: asks a few questions and writes a commented task file, or copies a template.

The commented starter file that `cavvy init` writes.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import click

from cavvy.cli.view.failure import CommandFailure
from cavvy.domain.tasks import SpotPolicy
from cavvy.domain.values import Struct
from cavvy.frame.discover import load_all
from cavvy.spec.fields.params import escape


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
    from cavvy.cli.view.output_file import write_text
    from cavvy.spec import SpecError
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
    except SpecError as error:
        raise CommandFailure(
            f"the task file from these answers is invalid:\n{error}",
            "start again with different answers",
        ) from error
    write_text(file, text)
    click.echo(f"wrote {file}")
    _next_steps(str(file))


def list_templates() -> dict[str, Path]:
    """Return the folders of the templates that capabilities contribute: each has a task file, a
    program and, if it needs packages, their names. Of two with one name, the first counts.
    """
    files = [
        file
        for _, package in load_all(lambda each: [each.templates] if each.templates else [])
        for file in Path(package.__file__).parent.glob("*/task.yaml")
    ]
    return dict(sorted({file.parent.name: file.parent for file in reversed(files)}.items()))


def _list_templates() -> None:
    from cavvy.cli.view.output import TableColumn, rows_out

    rows = [
        (name, (folder / "task.yaml").read_text().splitlines()[0].lstrip("# "))
        for name, folder in list_templates().items()
    ]
    rows_out([TableColumn("template"), TableColumn("shows", "WHAT IT SHOWS", wrap=True)], rows)
    click.echo("write a template: cavvy init --template NAME [FOLDER]")


def _copy_template(name: str, folder: Path) -> None:
    from difflib import get_close_matches

    from cavvy.cli.view.output_file import make_folder, open_output

    found = list_templates()
    if name not in found:
        close = get_close_matches(name, found, n=1)
        hint = f"did you mean {close[0]}?" if close else "`cavvy init --list` lists the templates"
        raise CommandFailure(f"there is no template {name!r}", hint, exit_code=2)
    files = _read_template(found[name])
    for taken in (folder / each for each in files):
        if taken.exists():
            raise CommandFailure(f"{taken} exists already", "choose another folder", exit_code=2)
    make_folder(folder)
    for each, data in files.items():
        with open_output(folder / each) as out:
            out.write(data)
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

    # The default name, task.yaml, does not describe the task, so the name of the folder is used.
    folder = file.resolve().parent.name
    return StarterAnswers(name=slug(folder if file.stem == "task" else file.stem) or "hello")


def _ask(file: Path) -> "StarterAnswers":
    plain = _defaults(file)
    name = click.prompt(
        "Name", default=plain.name, value_proc=_checked("name: {}\nrun: x\nenv: {{}}")
    )
    run = click.prompt("Command to run", default=plain.run)
    gpu = _ask_if_any(
        "Accelerators, such as H100:8 or A100:80GB (none)", "run: x\nresources: {{gpu: {}}}"
    )
    spot = click.prompt(
        "Spot capacity: cheap, but can be reclaimed at any time",
        type=click.Choice([policy.value for policy in SpotPolicy]),
        default=SpotPolicy.AUTO.value if gpu else SpotPolicy.NEVER.value,
    )
    checkpoint = _ask_if_any(
        "Checkpoint folder, which survives the loss of a node (none)", "run: x\ncheckpoint: {}"
    )
    budget = _ask_if_any("Budget in US dollars (none)", "run: x\nlimits: {{budget: {}}}")
    return StarterAnswers(
        name=name, run=run, gpu=gpu, spot=SpotPolicy(spot), checkpoint=checkpoint, budget=budget
    )


def _ask_if_any(question: str, template: str) -> str:
    """Return the answer to a question that may be left open, checked in the template's place."""
    return str(
        click.prompt(question, default="", show_default=False, value_proc=_checked(template))
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


class StarterAnswers(Struct, frozen=True, kw_only=True):
    """The user's answers to the questions of `cavvy init`, as typed. An empty string means no
    answer.
    """

    name: str = "hello"
    run: str = "echo hello from $(hostname)"
    gpu: str = ""
    spot: SpotPolicy = SpotPolicy.NEVER
    checkpoint: str = ""
    budget: str = ""


def make_starter(answers: StarterAnswers) -> str:
    """Build a task file from the user's answers. Common keys without an answer are included as
    comments.
    """
    run = escape(answers.run.strip())
    return f"""\
# A task for Cavvy: what to run, and what it needs.
#   cavvy validate FILE   check it        cavvy plan FILE   compare the costs of all offers
#   cavvy run FILE        run it          every key: docs/reference/task-file.md
name: {answers.name}

# Parameters: override them with --param NAME=VALUE, use them as ${{{{ params.NAME }}}} or
# $CAVVY_PARAM_NAME.
# params:
#   lr: 0.1

# What each node must have. A key that is left out sets no limit.
resources:
{_line("gpu", answers.gpu, "H100:8", "NAME:COUNT, NAME:MEMORY, or a list of alternatives")}
  # cpu: 8+
  # memory: 64GB
  spot: {answers.spot}  # never, auto (whichever costs less in total) or only

# nodes: 2  # run on two nodes at once; NODE_RANK and MASTER_ADDR are set for torchrun

# The folder where the task runs, frozen on submission without the files that .gitignore and
# .cavvyignore list.
workdir: .

# Commands that run before `run`. A finished setup is reused until its commands or the files in
# `uses` change.
# setup: {{run: pip install -r requirements.txt, uses: [requirements.txt]}}

run: |
{_block(run)}

# A folder within the working folder that outlives a node: write checkpoints to it, and resume from
# it at the start.
{_checkpoint(answers.checkpoint)}

# How long the work takes on these GPUs; `cavvy plan` scales the time to other GPUs and shows the
# cost.
# work: {{duration: 10h, measured_on: A100:8}}

limits:
{_line("budget", answers.budget, "25", "US dollars; the job is stopped before it costs more")}
  # duration: 6h

# env: {{EPOCHS: 10}}
# secrets: [HF_TOKEN]  # first run: cavvy secret set HF_TOKEN
"""


def _line(key: str, value: str, example: str, comment: str) -> str:
    if value:
        return f"  {key}: {_quoted(value)}  # {comment}"
    return f"  # {key}: {example}  # {comment}"


def _checkpoint(path: str) -> str:
    return (
        f"checkpoint: {{path: {_quoted(path)}, every: 10m}}"
        if path
        else "# checkpoint: {path: checkpoints, every: 10m}"
    )


def _block(text: str) -> str:
    return "\n".join(f"  {line}".rstrip() for line in text.splitlines())


def _quoted(text: str) -> str:
    """Write a text as a YAML scalar on one line, quoted only if necessary."""
    plain = (
        text.replace(":", "")
        .replace(".", "")
        .replace("-", "")
        .replace("_", "")
        .replace("/", "")
        .isalnum()
    )
    return (
        text
        if plain and ": " not in text and not text.endswith(":")
        else json.dumps(text, ensure_ascii=False)
    )
