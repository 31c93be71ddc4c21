"""Options of `run`, `plan`, `dev` and `serve` that override a task file, and the command after
`--`.

Reads files with environment variables, such as `.env`, for the option `--env-file`.
"""

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from itertools import dropwhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cavvy.cli.reach.arguments import (
    complete_gpus,
    complete_machines,
    complete_pools,
    complete_providers,
    complete_regions,
)
from cavvy.cli.task.option_groups import GroupedCommand
from cavvy.cli.view.failure import CommandFailure, note_out
from cavvy.frame.discover import list_file_tools
from cavvy.named_files import read_named

if TYPE_CHECKING:
    from cavvy.domain.tasks import TaskSpec
    from cavvy.task_files import ReadOptions


_Function = TypeVar("_Function", bound=Callable[..., None])
# the key in the click context under which the words after `--` are stored
COMMAND_WORDS = "cavvy.command"
_NAME = "cavvy.command.name"
_STARTS = "cavvy.command.starts"
_FILES = "cavvy.files"

_TOOLS = [name.lower() for name in list_file_tools()]
_TOOLS_BEFORE = f"{', '.join(_TOOLS)} or " if _TOOLS else ""
as_option = click.option(
    "--as",
    "dialect",
    metavar="TOOL",
    type=click.Choice([*_TOOLS, "cavvy"]),
    help=f"The file is one of this tool: {_TOOLS_BEFORE}cavvy; otherwise, its content tells.",
)
# Each row: option, key of the task file, metavar ("" for a switch, + if the option is repeatable),
# help.
_OVERRIDES = (
    ("--gpu", "resources.gpu", "NAME:COUNT +", "Accelerators of each node, such as H100:8."),
    ("--spot/--no-spot", "resources.spot", "", "Use only spot capacity, or none."),
    ("--provider", "resources.providers", "NAME +", "Use only this provider."),
    ("--region", "resources.regions", "NAME +", "Use only this region, or an area such as eu."),
    ("--max-price", "resources.max_price", "USD", "The maximum price of a node per hour."),
    ("--nodes", "nodes", "COUNT", "The number of nodes."),
    (
        "--after",
        "after",
        "JOB[:CONDITION] +",
        "Start after this job: success (the default), failure or any.",
    ),
    ("--group", "group", "NAME", "Join this group of jobs, which exists already."),
    (
        "--machine",
        "machine",
        "NAME",
        "Run on this named machine; a new name gets a new machine.",
    ),
    ("--pool", "pool", "NAME", "Run on nodes of this pool; see `cavvy pool`."),
    ("--keep", "keep", "TIME", "How long idle nodes are kept, and billed, for the next job."),
    ("--image", "image", "IMAGE", "The container image."),
    ("--workdir", "workdir", "FOLDER", "The folder to submit."),
    (
        "--env-file",
        "env",
        "FILE +",
        "Set the variables in a file of lines NAME=VALUE; --env has priority.",
    ),
    (
        "--env",
        "env",
        "NAME=VALUE +",
        "Set an environment variable; NAME alone copies its local value.",
    ),
    ("--secret", "secrets", "NAME +", "Pass a secret of the project to the job."),
    ("--budget", "limits.budget", "USD", "The maximum cost of the job."),
    (
        "--deadline",
        "limits.deadline",
        "TIME",
        "Stop the job after this time, such as 8h, or at a date.",
    ),
)

SENT = "cavvy.sent"  # what the user sends, in click's context

_VARIABLE = re.compile(
    r"""[ \t]*(?:export[ \t]+)?(?P<name>[A-Za-z_][A-Za-z0-9_]*)[ \t]*=[ \t]*
    (?:'(?P<single>[^']*)'|"(?P<double>(?:[^"\\]|\\.)*)"|(?P<plain>(?!(?<=[ \t])\#)[^\n'"].*?|))
    [ \t]*(?:(?<=[\s'"])\#.*)?(?:\n|\Z)""",
    re.VERBOSE,
)
_SKIPPED = re.compile(r"[ \t]*(?:#.*)?(?:\n|\Z)")
_MOST_BYTES = 1 << 20
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}


class TaskCommand(GroupedCommand):
    """A command that takes a task file and, optionally, `-- COMMAND`. If `several` is set, it also
    takes several files, see `list_files`."""

    several = False

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.meta[COMMAND_WORDS] = args[at + 1 :]
            args = args[:at]
        ctx.allow_extra_args = True
        flags = {name for each in self.params if _is_flag(each) for name in each.opts}
        given = list(dropwhile(flags.__contains__, args))  # the parser changes `args`
        try:
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if hint := _advise_parameter(given, error.option_name):
                text = f"there is no option {error.option_name}"
                raise CommandFailure(text, hint, 2) from error
            if COMMAND_WORDS in ctx.meta or not given or not _looks_like_command(given[0]):
                raise
            hint = _advise_command(ctx, shlex.join(given))
            raise CommandFailure(f"{given[0]}: the file does not exist", hint, 2) from error
        if rest and not ctx.resilient_parsing:
            words = [word for word in (ctx.params.get("file"), *rest) if word]
            if self.several and COMMAND_WORDS not in ctx.meta and all(map(os.path.isfile, words)):
                ctx.meta[_FILES] = words
                return []
            if self.several and os.path.isfile(words[0]) and (missing := _find_missing(words)):
                hint = "check the name; all files are submitted together, or none"
                what = "is a folder" if os.path.isdir(missing) else "the file does not exist"
                raise CommandFailure(f"{missing}: {what}", hint, exit_code=2)
            hint = "" if COMMAND_WORDS in ctx.meta else _advise_words(ctx, words)
            text = f"expected one task file, but {len(words)} words were given"
            raise CommandFailure(text, hint, exit_code=2)
        return rest

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND]"]


def _find_missing(words: list[str]) -> str | None:
    """Return the first of the words after a file that is written like another file."""
    kind = os.path.splitext(words[0])[1]
    return next(
        (each for each in words if kind and each.endswith(kind) and not os.path.isfile(each)), None
    )


def list_files() -> list[str]:
    """Return the task files that the user has given, if there are several."""
    found: list[str] = click.get_current_context().meta.get(_FILES, [])
    return found


def _is_flag(parameter: click.Parameter) -> bool:
    return isinstance(parameter, click.Option) and parameter.is_flag


def _advise_words(context: click.Context, words: list[str]) -> str:
    """Return what to write instead of several words where a task file was expected."""
    if os.path.isfile(words[0]) and all(re.fullmatch(r"[\w-]+=.*", each) for each in words[1:]):
        params = " ".join(f"--param {shlex.quote(each)}" for each in words[1:])
        return f"to set parameters: `{context.command_path} {shlex.quote(words[0])} {params}`"
    return _advise_command(context, shlex.join(words))


def _advise_parameter(given: list[str], option: str) -> str:
    """Return how to set the parameter of the given task file that was written as an option."""
    from cavvy.spec import SpecError
    from cavvy.spec.tree import read_table

    file = next((each for each in given if os.path.isfile(each)), "")
    try:
        table = read_table(Path(file).read_text(), file) if file else None
    except (OSError, ValueError, SpecError):
        return ""
    params = table.get("params") if isinstance(table, dict) else None
    names = list(params) if isinstance(params, dict) else []
    name = next((each for each in names if option in (f"--{each}", f"-{each}")), "")
    return f"--param {name}=VALUE sets the parameter {name} of {file}" if name else ""


def _advise_command(context: click.Context, line: str) -> str:
    return f"to run a command, write it after --: `{context.command_path} -- {line}`"


def replace_command(context: click.Context, line: str, name: str, *, starts: bool = True) -> None:
    """Run this shell line of a session instead of the task's commands. Messages call it `name`.
    Unless it `starts`, the session's folder exists already.
    """
    context.meta[COMMAND_WORDS], context.meta[_NAME] = [line], name
    context.meta[_STARTS] = starts


_COMPLETE = {
    "--gpu": complete_gpus,
    "--provider": complete_providers,
    "--machine": complete_machines,
    "--pool": complete_pools,
    "--region": complete_regions,
}


def task_options(function: Callable[..., None]) -> Callable[..., None]:
    """Return a decorator that adds arguments for the task file, its tool and the overrides to a
    command. The command's function receives the arguments as `file` and `options`.
    """

    @wraps(function)
    def wrapped(file: str | None, dialect: str | None, **given: Any) -> None:
        values = {flags: given.pop(_name(flags)) for flags, *_ in _OVERRIDES}
        words = click.get_current_context().meta.get(COMMAND_WORDS)
        file, options = _read_options(file, dialect, words, _read_overrides(values))
        function(file=file, options=options, **given)

    for row in reversed(_OVERRIDES):
        wrapped = _make_option(*row)(wrapped)
    kind = click.Path(allow_dash=True)
    send = click.option(
        "--send",
        multiple=True,
        metavar="PATH",
        expose_value=False,
        callback=_note_sent,
        help="Send this file or folder outside of the task file's repository without a question; "
        "repeatable.",
    )
    return click.argument("file", metavar="[TASK.YAML|-]", required=False, type=kind)(
        send(as_option(wrapped))
    )


def _note_sent(context: click.Context, _: click.Parameter, paths: tuple[str, ...]) -> None:
    from cavvy.spec.sent_folders import name_places

    context.meta[SENT] = name_places(paths)


def resource_options(function: Callable[..., None]) -> Callable[..., None]:
    """Return a decorator that adds the options of `resources` to a command that takes no task file.
    The command's function receives them as `resources`, a table with keys of the task file.
    """
    rows = [each for each in _OVERRIDES if each[1].startswith("resources.")]

    @wraps(function)
    def wrapped(**given: Any) -> None:
        values = {flags: given.pop(_name(flags)) for flags, *_ in rows}
        function(resources=_read_overrides(values).get("resources", {}), **given)

    for row in reversed(rows):
        wrapped = _make_option(*row)(wrapped)
    return wrapped


def _make_option(
    flags: str, path: str, metavar: str, words: str
) -> Callable[[_Function], _Function]:
    several = metavar.endswith("+")
    return click.option(
        flags,
        _name(flags),
        metavar=metavar.removesuffix(" +") or None,
        multiple=several,
        default=() if several else None,
        shell_complete=_COMPLETE.get(flags),
        help=f"{words.removesuffix('.')}; repeatable." if several else words,
    )


def _read_options(
    file: str | None, dialect: str | None, words: list[str] | None, overrides: dict[str, Any]
) -> tuple[str, "ReadOptions"]:
    """Return the options for reading the task, and the name of the task file or of the command that
    replaces the file. Raises UsageError.
    """
    from cavvy.task_files import ReadOptions

    text = sys.stdin.read() if file == "-" else None
    takes_folder = False
    script = None if dialect or "run" in overrides else read_script_task(file, words, overrides)
    if file is not None and script is not None:
        text, dialect, takes_folder = script, "cavvy", True
        file = Path(file).stem
    elif words:
        # A single word is a command line for the shell, as with ssh. Several words are a program
        # and its arguments.
        line = words[0] if len(words) == 1 else _join_words(words, overrides)
        if file is None:
            told = click.get_current_context().meta
            file = told.get(_NAME) or Path(words[0].split(" ")[0]).name
            text, dialect = json.dumps(_read_command(words, line, overrides)), "cavvy"
            takes_folder = _NAME not in told
            starts = not takes_folder and told.get(_STARTS, True) and "workdir" not in overrides
            if starts and not _names_file(line):
                note_out(f"the session starts in an empty folder; {_say_folder()}")
        else:
            overrides["run"] = line
    context = click.get_current_context()
    takes_command = isinstance(context.command, TaskCommand)
    if file is None or not file.strip() or words == []:
        other = ", - or a command after --" if takes_command else " or -"
        raise click.UsageError(f"expected a task file{other}")
    if words is None and script is None and takes_command and _looks_like_command(file):
        # a shell that reads the hint must not take `;` or `$` for its own
        plain = re.fullmatch(r"[\w@%+=:,./ -]+", file) is not None
        hint = _advise_command(context, file if plain else shlex.quote(file))
        raise CommandFailure(f"{file}: the file does not exist", hint, exit_code=2)
    replaced = json.dumps(overrides) if overrides else ""
    return file, ReadOptions(
        dialect=dialect or "", overrides=replaced, text=text, takes_folder=takes_folder
    )


def add_array(
    options: "ReadOptions",
    array: str | None,
    sweep: tuple[str, ...],
    parallel: str | None,
    trials: str | None = None,
) -> "ReadOptions":
    """Add the options that make a task an array of jobs. Raises CommandFailure."""
    from cavvy.domain.values import replace

    given: dict[str, Any] = {}
    if array is not None:
        read_value("--array", "array", array)
        given["array"] = array
    for key, value in (("parallel", parallel), ("trials", trials)):
        if value is not None:
            read_value(f"--{key}", key, value)
            given[key] = value
    for pair in sweep:
        name, equals, values = pair.partition("=")
        if not equals or not name or not values:
            hint = "for example --sweep lr=0.1,0.01 or --sweep seed=0..4"
            raise CommandFailure(f"--sweep {pair}: expected NAME=VALUES", hint, exit_code=2)
        if name in given.setdefault("sweep", {}):
            hint = f"write all its values together: --sweep {name}=VALUE,VALUE"
            raise CommandFailure(f"--sweep {pair}: {name} is swept twice", hint, exit_code=2)
        given["sweep"][name] = values
    if not given:
        return options
    return replace(options, overrides=json.dumps(json.loads(options.overrides or "{}") | given))


def _say_folder() -> str:
    """Return how to submit the folder with the command's files."""
    from cavvy.spec.own_folder import explain_unfit

    if not (unfit := explain_unfit(Path.cwd())):
        return "--workdir . submits this folder"
    return f"--workdir FOLDER submits a folder, but not {Path.cwd()}, because {unfit}"


def read_script_task(
    file: str | None, words: list[str] | None, overrides: dict[str, Any], beside: str = "."
) -> str | None:
    """Return the task of a script of Python or of a shell, as the text of a task file, or None if
    the file is none. `words` are the script's arguments, and `beside` is the folder from which the
    paths of the task count.
    """
    if file is None or file == "-" or not os.path.isfile(file):
        return None
    if file.endswith((".yaml", ".yml")) and not words:
        return None  # a task file; with words, one that says how to launch them may be meant
    from cavvy.task_files import load_script

    gpus = overrides.get("resources", {}).get("gpu") or []
    counts = [each.rpartition(":")[2] for each in ([gpus] if isinstance(gpus, str) else gpus)]
    most = max((int(each) if each.isdecimal() else 1 for each in counts), default=1)
    nodes = str(overrides.get("nodes") or 1)
    processes = most * (int(nodes) if nodes.isdecimal() else 1)
    try:
        found = load_script(file, words or [], processes=processes)
    except (OSError, UnicodeDecodeError):
        return None  # the reader of task files says why
    except ValueError as error:
        raise CommandFailure(str(error), exit_code=2) from None
    if found is None:
        return None
    for note in found.notes:
        note_out(note)
    return json.dumps(_settle_uses(found.keys, overrides, beside))


def _settle_uses(
    keys: Mapping[str, Any], overrides: Mapping[str, Any], beside: str
) -> Mapping[str, Any]:
    """Return the keys of a script's task with the folder that has the files of its setup, or
    without the list of these files if it counts for nothing: in an image, and if the current folder
    is not submitted.
    """
    from cavvy.spec.own_folder import explain_unsent

    setup = keys.get("setup") or {}
    if "uses" not in setup:
        return keys
    whole = {key: value for key, value in setup.items() if key != "uses"}
    if overrides.get("image") or keys.get("image"):
        return {**keys, "setup": whole}
    if not setup["uses"] or "workdir" in keys:
        return keys
    if "workdir" not in overrides and explain_unsent(Path.cwd()) != "":
        return {**keys, "setup": whole}
    return {**keys, "workdir": os.path.relpath(".", beside)}


def _read_command(words: list[str], line: str, overrides: dict[str, Any]) -> Mapping[str, Any]:
    """Return the keys of the task of a command, which may be a line of another tool."""
    from cavvy.task_files import load_line

    try:
        found = load_line(words)
    except ValueError as error:
        raise CommandFailure(str(error), exit_code=2) from None
    if found is None:
        return {"run": line}
    for note in found.notes:
        note_out(note)
    run = _join_words(list(found.command), overrides)
    return _settle_uses({**found.keys, "run": run}, overrides, ".")


def _join_words(words: list[str], overrides: dict[str, Any]) -> str:
    """Return the words of a command as a line. On several nodes, a launcher is told of them."""
    if str(overrides.get("nodes") or 1) == "1":
        return shlex.join(words)
    from cavvy.cli.task.launch_lines import add_other_nodes

    found = add_other_nodes(words)
    if found is None:
        return shlex.join(words)
    note_out(f"{found[1]} is told of the other nodes: {found[0]}")
    return found[0]


def _names_file(line: str) -> bool:
    """Return whether a command names a file of the current folder, which is then submitted."""
    from cavvy.domain.tasks import TaskSpec
    from cavvy.spec.own_folder import list_named

    return bool(list_named(TaskSpec(name="", run=line), Path.cwd()))


def _looks_like_command(file: str) -> bool:
    """Return whether the given name of a task file is probably a command, as in
    `sky launch 'python train.py'`.
    """
    if not file.strip() or file.startswith("-") or os.path.exists(file):
        return False
    is_word = "." not in file and not os.path.exists(f"{file}.yaml")  # such as nvidia-smi
    return is_word or " " in file.strip() or shutil.which(file) is not None


def _name(flags: str) -> str:
    """Return the name of the Python parameter for an option. The prefix `set_` makes the name
    different from the names of the command's own parameters.
    """
    return "set_" + flags.split("/")[0].strip("-").replace("-", "_")


def _read_overrides(values: dict[str, Any]) -> dict[str, Any]:
    """Return the given options as a table with the keys of a task file. Raises CommandFailure."""
    found: dict[str, Any] = {}
    for flags, path, _, _ in _OVERRIDES:
        value = values.get(flags)
        if value is None or value == ():
            continue
        flag = flags.split("/")[0]
        section, _, key = path.rpartition(".")
        value = _convert(flag, value)
        read_value(flag, path, value, values[flags])
        table = found.setdefault(section, {}) if section else found
        table[key] = table.get(key, {}) | value if isinstance(value, dict) else value
    return found


def _convert(flag: str, value: Any) -> Any:
    match flag:
        case "--spot":
            return "only" if value else "never"
        case "--env-file":
            return {name: text for each in value for name, text in read_env_file(each).items()}
        case "--env":
            return dict(_read_variable(each) for each in value)
        case "--secret":
            return [_read_secret(each) for each in value]
        case "--workdir":
            return value if "://" in value else str(Path(value).resolve())
        case _:
            return list(value) if isinstance(value, tuple) else value


def _read_variable(pair: str) -> tuple[str, str]:
    name, equals, value = pair.partition("=")
    if not equals and name not in os.environ:
        hint = f"--env {name}=VALUE sets it"
        raise CommandFailure(
            f"--env {pair}: the local environment has no such variable", hint, exit_code=2
        )
    return name, value if equals else os.environ[name]


def _read_secret(text: str) -> str:
    """Return the name of a secret. Raises CommandFailure if the text is NAME=VALUE, because a
    command line must not contain a secret.
    """
    name, equals, _ = text.partition("=")
    if equals:
        hint = (
            f"`cavvy secret set {name}` stores the value encrypted; --env {name}=VALUE passes a "
            "value unencrypted"
        )
        message = f"--secret {name}=…: expected only the name of a stored secret"
        raise CommandFailure(message, hint, exit_code=2)
    return name


def read_value(flag: str, path: str, value: object, given: object = None) -> "TaskSpec":
    """Return a task in which the field `path` has this value. If the value is invalid, raises a
    CommandFailure with the name of the option and the text `given`.
    """
    from datetime import UTC, datetime

    from cavvy.domain.tasks import TaskSpec
    from cavvy.spec import SpecError
    from cavvy.spec.overrides import apply_overrides

    section, _, key = path.rpartition(".")
    overrides = {section: {key: value}} if section else {key: value}
    try:
        return apply_overrides(TaskSpec(name="", run=""), json.dumps(overrides), datetime.now(UTC))
    except SpecError as error:
        first = error.problems[0]
        shown = " ".join(given) if isinstance(given, tuple) else given or value
        hint = first.suggestion or (f"expected: {first.expected}" if first.expected else "")
        raise CommandFailure(f"{flag} {shown}: {first.message}", hint, exit_code=2) from error


def read_env_file(path: str) -> dict[str, str]:
    """Return the variables in a file. Each line is empty, a comment that starts with #, or
    NAME=VALUE. A value in quotes can have several lines; a value in double quotes can have the
    escapes of C. Raises CommandFailure.
    """
    try:
        content = read_named(Path(path).expanduser(), _MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            message = f"--env-file {path}: the file is larger than 1 MiB"
            raise CommandFailure(message, "name a file with lines NAME=VALUE", exit_code=2)
        text = content.decode("utf-8-sig").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "the file is not UTF-8 text"
        raise CommandFailure(f"--env-file {path}: {reason}", exit_code=2) from error
    found: dict[str, str] = {}
    at, number = 0, 1
    while at < len(text):
        match = _SKIPPED.match(text, at) or _VARIABLE.match(text, at)
        line = f"--env-file {path}: line {number}"
        if match is None:
            hint = "write for example NAME=VALUE or NAME='a value with spaces'"
            raise CommandFailure(f"{line}: expected NAME=VALUE", hint, exit_code=2)
        if match.re is _VARIABLE:
            found[match["name"]] = _read_value(match, line)
        at = match.end()
        number += match[0].count("\n")
    return found


def _read_value(match: re.Match[str], line: str) -> str:
    """Return the value of a variable. Raises CommandFailure if the value names another variable."""
    if match["single"] is not None:
        return match["single"]
    value = match["plain"] or match["double"] or ""
    if named := re.search(r"(?<!\\)\$\{[^}]*\}", value):
        hint = f"write the value in full; in single quotes, {named[0]} is plain text"
        raise CommandFailure(
            f"{line}: Cavvy does not replace {named[0]} by the value of a variable",
            hint,
            exit_code=2,
        )
    if match["double"] is None:
        return value
    return re.sub(r"\\(.)", lambda escape: _ESCAPES.get(escape[1], escape[1]), value)
