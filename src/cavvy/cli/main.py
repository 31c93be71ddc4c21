"""The group of all commands, which `entry.py` runs. A table lists the commands, so `cavvy --help`
need not import their modules.
"""

import errno
import io
import os
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import click

from cavvy import __version__
from cavvy.frame.capability import FIRST_ONE, Capability, Command
from cavvy.frame.discover import find_capabilities

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


_INTERRUPTED = 130  # the exit code that shells report for an interrupt
_USUAL_FILES = 1024  # the usual soft limit on the open files of a process
# The core's commands by section, in the order of `cavvy --help` and of the reference page. Each one
# is the function `command` of the module with the same name, if FAMILIES does not name it.
_OWN: dict[str, dict[str, str]] = {
    "Describe and plan": {
        "init": "Write a commented starter task file after a few questions.",
        "validate": "Check a task file and explain what is wrong.",
        "offers": "List the machines that you can rent or use, filtered and sorted by price.",
        "plan": "Rank the offers that a task could run on, with cost, time and reasons.",
        "export": "Write a task as a provider's own job file, for use without Cavvy.",
        "image": "Build container images of tasks.",
        "catalog": "Show, refresh and compare the price catalog.",
        "data": "Write training data as shards that are fast to read.",
    },
    "Run and watch": {
        "run": "Run a task: submit it, follow its log, exit with its exit code.",
        "rerun": "Run a job again, unchanged or with changed parameters.",
        "ps": "List jobs.",
        "status": "Show one job: phase, placement, attempts, reasons, position in the queue.",
        "top": "Show the use of GPUs, CPUs, memory, network and disks of all nodes, live.",
        "logs": "Print or follow a job's log.",
        "console": "Show jobs, services, machines and costs in a browser.",
        "events": "Show a job's history and the reason for each step.",
        "wait": "Wait until jobs are running or have ended.",
        "stop": "Stop jobs.",
        "retry": "Queue an ended job again.",
        "resize": "Change the number of nodes of an elastic job.",
        "rm": "Remove ended jobs with their logs; their bills stay.",
        "schedules": "List repeating jobs and their next start times.",
    },
    "Serve requests": {},  # capabilities have its commands; it stands here in the help
    "Work on nodes": {
        "machines": "List, start, stop and remove named machines, and set their keep times.",
        "exec": "Run a command in the environment of a running job.",
        "ssh": "Open a shell on a job's node, or let plain ssh and editors reach it.",
        "cp": "Copy files to or from a job's node.",
        "forward": "Forward ports to or from a job's node.",
    },
    "Account and clean up": {
        "cost": "Show spending by job, tag, user, project, GPU or provider.",
        "budget": "Limit the monthly spending of a project, a user or a tag.",
        "advise": "List avoidable costs, with dollars per month and remedies.",
        "reserve": "Show which commitments to clouds would save money.",
        "diff": "Show what differed between two runs.",
        "nodes": "List nodes that run or are billed now, and maintain own hosts.",
        "reservations": "Reserve own hosts or GPUs for a project and a time.",
        "quota": "Show the account's quotas, and print the commands that request higher limits.",
        "join": "Print a command that turns any machine into a node.",
        "joined": "List machines that joined, or dismiss one.",
        "drill": "Rehearse failures on your own jobs, such as a preemption.",
        "down": "Terminate all nodes and jobs that this installation manages.",
        "gc": "Find and remove nodes that belong to no unfinished job.",
    },
    "Share a server": {
        "login": "Sign in to a server.",
        "logout": "Forget a server and the token for it.",
        "context": "List the servers that you signed in to, and choose one.",
        "user": "Add, list and remove accounts of people and services.",
        "role": "Grant, revoke and list roles of accounts in projects.",
        "project": "Create and list projects.",
        "audit": "Read, export and check the log of all changes and refusals.",
        "credential": "Set, list and remove a project's own credentials for providers.",
        "policy": "Restrict what the jobs of a project may use, and set its share of the queue.",
        "pool": "Share nodes that are added and removed with the work of a project's jobs.",
        "shares": "Show each project's share of the queue, its use, and what waits.",
        "trust": "Manage the identity providers whose sign-ins the server accepts.",
        "token": "Create, list and revoke access tokens.",
    },
    "Set up": {
        "setup": "Set up a provider: ask for what it needs, check it, and write the settings.",
        "check": "Show whether each provider is configured and which features it lacks.",
        "doctor": "Show what GPU jobs lack on a machine, and the commands that mend it.",
        "secret": "Set, list and delete secrets.",
        "server": "Start, stop, share and back up the server: accounts, roles, tokens, audit.",
        "completion": "Print the completion script for a shell.",
    },
}
# What a first user needs, in the order in which it is needed, as far as it is installed.
_FIRST = ("init", "setup", "plan", "run", "ps", "logs", "stop", "cost")
# Commands that end or remove what the user may still need.
_ENDING = ("stop", "rm", "down", "gc")
# Modules that hold several commands of one noun. A command whose name the module does not have is
# the function `NAME_command`.
FAMILIES: dict[str, tuple[str, ...]] = {
    "ps": ("ps", "schedules"),
    "logs": ("logs", "events", "wait"),
    "stop": ("stop", "rm", "drill", "resize"),
    "rerun": ("rerun", "retry", "diff"),
    "access": ("exec", "ssh", "cp", "forward"),
    "advise": ("advise", "reserve"),
    "join": ("join", "joined"),
    "down": ("down", "gc"),
    "nodes": ("nodes", "reservations"),
    "policy": ("policy", "shares"),
    "accounts": ("user", "role", "project", "token"),
    "login": ("login", "logout", "context"),
    "secret": ("secret", "credential"),
    "main": ("completion",),
}
# Commands that belong to another one, and how they are called there. The words of before are still
# answered, but not listed.
_OWN_MERGED = {
    "top": "nodes top",
    "budget": "cost budget",
    "advise": "cost advise",
    "reserve": "cost reserve",
    "reservations": "nodes reservations",
    "quota": "nodes quota",
    "join": "nodes join",
    "joined": "nodes joined",
    "drill": "nodes drill",
    "down": "nodes down",
    "gc": "nodes gc",
    "logout": "context logout",
    "credential": "project credential",
    "policy": "project policy",
    "shares": "project shares",
    "user": "server user",
    "role": "server role",
    "audit": "server audit",
    "trust": "server trust",
    "token": "server token",
}
_HOMES = {name: home for home, names in FAMILIES.items() for name in names}


class _CommandTable(NamedTuple):
    """The commands of the core and of the capabilities."""

    sections: dict[str, dict[str, str]]  # what each command does, by section
    places: dict[str, str]  # MODULE:NAME of each command
    merged: dict[str, str]  # how commands are called that belong to another one
    inner: tuple[str, ...]  # the names of two words: commands of capabilities in a group
    left_out: dict[str, str]  # why something of a capability is left out
    first: tuple[str, ...]  # what first users need
    ending: frozenset[str]  # what ends or removes something


def _add_commands() -> _CommandTable:
    found = find_capabilities()
    left_out = dict(found.faults)
    own = [name for names in _OWN.values() for name in names]
    homes = ((name, _HOMES.get(name, name)) for name in own)
    places = {
        name: f"cavvy.cli.{home}:{'command' if home == name else f'{name}_command'}"
        for name, home in homes
    }
    sections = {title: list(names.items()) for title, names in _OWN.items()}
    merged, inner = dict(_OWN_MERGED), list[str]()
    first, ending = list(_FIRST), set(_ENDING)
    for owner, each in _order(found.capabilities):
        if each.name in places:
            left_out[f"{owner}, command {each.name}"] = "another command has its name"
            continue
        places[each.name] = each.place
        if " " in each.name:
            inner.append(each.name)
            continue
        rows = sections.setdefault(each.section, [])
        at = {name: index + 1 for index, (name, _) in enumerate(rows)}
        before = [0] if each.after == FIRST_ONE else []
        before += [at[name] for name in each.after.split() if name in at]
        rows.insert(before[0] if before else len(rows), (each.name, each.summary))
        if each.called:
            merged[each.name] = each.called
        if each.first_after:
            places_first = [first.index(name) for name in each.first_after.split() if name in first]
            first.insert(places_first[0] + 1 if places_first else len(first), each.name)
        if each.ends:
            ending.add(each.name)
    table = {title: dict(rows) for title, rows in sections.items() if rows}
    return _CommandTable(
        table, places, merged, tuple(inner), left_out, tuple(first), frozenset(ending)
    )


def _order(capabilities: Sequence[Capability]) -> Iterator[tuple[str, Command]]:
    """Yield the commands with the names of their capabilities; each follows those after which it
    may stand.
    """
    waiting = [(owner.name, command) for owner in capabilities for command in owner.commands]
    while waiting:
        names = {command.name for _, command in waiting}
        free = (each for each in waiting if names.isdisjoint(each[1].after.split()))
        first = next(free, waiting[0])
        waiting.remove(first)
        yield first


SECTIONS, PLACES, MERGED, _INNER, LEFT_OUT, FIRST, ENDING = _add_commands()
COMMANDS = {name: text for names in SECTIONS.values() for name, text in names.items()}


class _OutputClosed(Exception):
    """The reader of the command's output has closed the pipe."""


class LazyGroup(click.Group):
    """A click group that imports a command only when it is used, and prints usage errors in the
    same format as other errors.
    """

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, False, **extra)
        from click.exceptions import NoArgsIsHelpError

        from cavvy.cli.view.failure import CommandFailure, explain

        try:
            code = super().main(args, prog_name, complete_var, False, **extra)
        except click.ClickException as error:
            if isinstance(error, NoArgsIsHelpError) and error.ctx and error.ctx.parent is None:
                error.show()
                sys.exit(error.exit_code)
            failure = explain(error, self._find_called(sys.argv[1:] if args is None else args))
        except click.Abort as error:
            if isinstance(error.__cause__, KeyboardInterrupt):
                sys.exit(_INTERRUPTED)
            if isinstance(error.__context__, KeyboardInterrupt):  # at a prompt
                click.echo("\ninterrupted", err=True)
                sys.exit(_INTERRUPTED)
            failure = CommandFailure("not confirmed, so nothing was changed")
        else:
            sys.exit(code if isinstance(code, int) else 0)
        failure.show()
        sys.exit(failure.exit_code)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:  # click would exit with 1
            if _is_output_closed():
                raise _OutputClosed from error
            raise

    def _find_called(self, args: Sequence[str]) -> str:
        """Return the command that the arguments call, such as `cavvy server start`."""
        command: click.Command | None = self
        called = ["cavvy"]
        for word in args:
            if not isinstance(command, click.Group):
                break
            with click.Context(command) as context:
                command = command.get_command(context, word) or command
            called += [word] if command.name == word else []
        return " ".join(called)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = _load(cmd_name)
        if isinstance(command, click.Group):
            for former, words in (*MERGED.items(), *((name, name) for name in _INNER)):
                group, _, name = words.partition(" ")
                if group == cmd_name and name not in command.commands:
                    command.add_command(_load(former), name)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> "list[CompletionItem]":
        from click.shell_completion import CompletionItem

        options = click.Command.shell_complete(self, ctx, incomplete)
        names = [name for name in COMMANDS if name.startswith(incomplete) and name not in MERGED]
        return options + [CompletionItem(name, help=COMMANDS[name]) for name in names]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            from difflib import get_close_matches

            from cavvy.cli.view.failure import CommandFailure
            from cavvy.cli.view.synonyms import find_advice

            advice = find_advice(args[0])
            likely = _guess(get_close_matches(args[0], COMMANDS, n=2))
            hint = advice or likely or _advise_run(args) or "`cavvy --help` lists the commands"
            raise CommandFailure(f"no command {args[0]!r}", hint, 2)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        longest = max(map(len, SECTIONS))
        with formatter.section("First"):
            formatter.write_dl([(name, COMMANDS[name]) for name in FIRST])
        with formatter.section("More"):
            more = (
                (title, [name for name in names if name not in FIRST and name not in MERGED])
                for title, names in SECTIONS.items()
            )
            formatter.write_dl([(title.ljust(longest), ", ".join(names)) for title, names in more])


def _load(name: str) -> click.Command:
    """Import a command."""
    from importlib import import_module

    module, _, function = PLACES[name].partition(":")
    command = getattr(import_module(module), function)
    assert isinstance(command, click.Command)
    return command


def _list_commands(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    """Print every command with what it does, and exit."""
    if not value or ctx.resilient_parsing:
        return
    formatter = ctx.make_formatter()
    longest = max(map(len, COMMANDS))
    for title, names in SECTIONS.items():
        with formatter.section(title):
            rows = [(name.ljust(longest), text) for name, text in names.items()]
            formatter.write_dl([row for row in rows if row[0].strip() not in MERGED])
    if LEFT_OUT:
        with formatter.section("Capabilities that cannot be used"):
            formatter.write_dl(list(LEFT_OUT.items()))
    click.echo(formatter.getvalue().strip())
    ctx.exit()


def _guess(close: Sequence[str]) -> str:
    """Return the hint that names the commands that a misspelled word is close to. One that ends or
    removes something is named last, with what it does, and never alone."""
    now = {name: MERGED.get(name, name) for name in close}
    safe = [f"`cavvy {now[name]}`" for name in close if name not in ENDING]
    ending = [
        f"`cavvy {now[name]}` ({COMMANDS[name].rstrip('.')})" for name in close if name in ENDING
    ]
    if ending and not safe:
        return f"`cavvy --help` lists the commands; the nearest is {ending[0]}"
    return f"did you mean {' or '.join([*safe[:1], *ending[:1]])}?" if safe else ""


def _choose_context(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value is not None:
        os.environ["CAVVY_CONTEXT"] = value


@click.group(
    cls=LazyGroup,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "show_default": True,
    },
)
@click.version_option(__version__, message="cavvy %(version)s")
@click.option(
    "--context",
    metavar="NAME",
    expose_value=False,
    callback=_choose_context,
    help="Use this server, one of `cavvy context list`; the default is CAVVY_CONTEXT.",
)
@click.option(
    "--commands",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list_commands,
    help="List every command with what it does.",
)
def cli() -> None:
    """One control plane for every GPU that a team can rent or own.

    To start: `cavvy init` writes a task file, `cavvy plan task.yaml` shows where the task could run
    and what it would cost, and `cavvy run task.yaml` runs it. `cavvy COMMAND --help` says more of
    each command.
    """


@click.command("completion")
@click.argument("shell", metavar="SHELL", type=click.Choice(["bash", "zsh", "fish"]))
def completion_command(shell: str) -> None:
    """Print the script that completes commands, options, jobs, providers and GPUs.

    \b
    bash: cavvy completion bash > ~/.local/share/bash-completion/completions/cavvy
    zsh:  cavvy completion zsh > ~/.zfunc/_cavvy  (with fpath+=~/.zfunc before compinit)
    fish: cavvy completion fish > ~/.config/fish/completions/cavvy.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "cavvy", "_CAVVY_COMPLETE").source())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the CLI."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # The caller closed this stream, for example by `>&-`.
            # the file lives as long as the process
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    for out in (sys.stdout, sys.stderr):
        if isinstance(out, io.TextIOWrapper):  # The encoding of an old locale may lack a character.
            out.reconfigure(errors="replace")
    _check_file_limit()
    try:
        try:
            cli.main(args=list(arguments) if arguments is not None else None, prog_name="cavvy")
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    except (BrokenPipeError, _OutputClosed):
        # `cavvy … | head -1` got what it wanted, also under `set -o pipefail`. The usual flush of
        # standard output would fail.
        os._exit(0 if _is_output_closed() else 1)
    except OSError as error:
        _report_shortage(error)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            _report_fault(error)
        with suppress(OSError):
            click.echo(f"error: cannot write: {error.strerror}", err=True)
        # Exit without the usual flush of the streams, because the flush would fail, too.
        os._exit(1)
    except Exception as error:  # noqa: BLE001 - a fault of this program, which a file describes
        _report_fault(error)


def _check_file_limit() -> None:
    """Exit with an error if this process may open too few files."""
    if not 0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[0] < _USUAL_FILES:
        return  # without the import, which takes time
    from cavvy.cli.view.failure import CommandFailure
    from cavvy.client.file_limit import HINT, find_low_limit

    if too_low := find_low_limit():
        CommandFailure(too_low, HINT).show()
        sys.exit(1)


def _report_shortage(error: OSError) -> None:
    """If the error means that too many files are open, report that, and exit."""
    if error.errno not in (errno.EMFILE, errno.ENFILE):
        return
    from cavvy.cli.view.failure import CommandFailure
    from cavvy.client.file_limit import HINT, describe_shortage

    CommandFailure(describe_shortage(error), HINT).show()
    sys.exit(1)


def _advise_run(args: Sequence[str]) -> str:
    """Return how to run a task file or a program that was given as a command, or ""."""
    import shlex
    import shutil

    if args[0].endswith((".yaml", ".yml")) and os.path.isfile(args[0]):
        return f"`cavvy run {shlex.join(args)}` runs the task"
    if shutil.which(args[0]):
        return f"`cavvy run -- {shlex.join(args)}` runs the program as a job"
    return ""


def _is_output_closed() -> bool:
    """Tell whether the reader of standard output or standard error has closed its pipe."""
    from select import POLLERR, poll

    looking = poll()
    for stream in (1, 2):
        looking.register(stream, 0)
    return any(event & POLLERR for _, event in looking.poll(0))


def _report_fault(error: Exception) -> NoReturn:
    """Report an unexpected exception, write its traceback to a file, and exit."""
    import traceback
    from tempfile import NamedTemporaryFile

    from cavvy.cli.view.failure import CommandFailure

    if isinstance(error, FileNotFoundError) and error.filename is None:
        CommandFailure("the current folder no longer exists", "change to another folder").show()
        sys.exit(2)
    reason = hint = ""
    if isinstance(error, OSError):
        reason = f"{error.filename or 'the system'}: {error.strerror}"
    with suppress(OSError), NamedTemporaryFile("w", prefix="cavvy-fault-", delete=False) as file:
        traceback.print_exception(error, file=file)
        hint = f"{file.name} has the details; attach this file to a bug report"
    CommandFailure(reason or "cavvy stopped because of a bug in its own code", hint).show()
    sys.exit(1)
