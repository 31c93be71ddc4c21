"""The error that ends a command and contains the message to show."""

import re
import sys
from typing import Any

import click

_OPTIONAL = re.compile(r"\[([^\[\]]+(?:\[[^\[\]]*\])?)\]")  # an argument that may be left out


def escape_controls(text: str, keep: str = "") -> str:
    """Return the text with control characters escaped, so that it cannot move a terminal's
    cursor.
    """
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode()
        for char in text
    )


def note_out(text: str, kind: str = "note", *, err: bool = True) -> None:
    """Print a note, or a message of another kind, to stderr or stdout, wrapped on a terminal."""
    from cavvy.cli.view.layout import terminal_width, wrap_message

    shown = escape_controls(f"{kind}: {text}", keep="\n\t")
    click.echo(wrap_message(shown, terminal_width(sys.stderr if err else sys.stdout)), err=err)


class CommandFailure(click.ClickException):
    """An error for the user. The message says what went wrong, and the hint says what to do."""

    def __init__(self, message: str, hint: str = "", exit_code: int = 1) -> None:
        super().__init__(message)
        self.hint = hint
        self.exit_code = exit_code  # type: ignore[misc]  # click reads it from the instance

    def show(self, file: Any = None) -> None:
        from cavvy.cli.view.layout import takes_style, terminal_width, wrap_message

        width = terminal_width(sys.stderr)
        for title, colour, text in (("error:", "red", self.message), ("hint:", "cyan", self.hint)):
            if text:  # The text may contain output of a node.
                shown = escape_controls(text, keep="\n\t")
                shown = wrap_message(shown, width, first=len(title) + 1)
                click.echo(
                    f"{click.style(title, fg=colour, bold=colour == 'red')} {shown}",
                    err=True,
                    color=takes_style(sys.stderr),
                )


def confirm(question: str) -> None:
    """Ask a question. Raises CommandFailure without a terminal, and click.Abort if the answer is
    no.
    """
    if not sys.stdin.isatty():
        raise CommandFailure("there is no terminal to ask for confirmation", "add --yes", 2)
    click.confirm(question, abort=True)


def explain(error: click.ClickException, called: str = "cavvy") -> CommandFailure:
    """Convert an error of the command-line parser to a CommandFailure. `called` is the command that
    was called, for errors of click that do not contain the command.
    """
    if isinstance(error, CommandFailure):
        return error
    if isinstance(error, click.exceptions.NoArgsIsHelpError) and error.ctx is not None:
        group = error.ctx.command
        names = group.list_commands(error.ctx) if isinstance(group, click.Group) else []
        hint = f"`{error.ctx.command_path} --help` describes each command"
        return CommandFailure(f"expected one of {', '.join(names)}", hint, error.exit_code)
    message, hint = error.format_message(), ""
    if isinstance(error, click.UsageError):
        hint = f"`{error.ctx.command_path if error.ctx else called} --help` shows the usage"
    if isinstance(error, click.NoSuchOption):
        message = f"there is no option {error.option_name}"
        if error.option_name[1:2].isdigit():  # The command's numbers are all positive.
            message = f"a negative number ({error.option_name}…) was given"
            hint = f"expected a number of 0 or more; {hint}"
        from cavvy.cli.view.synonyms import find_option

        if advice := find_option(error.option_name, _list_options(error)):
            hint = f"{advice}{' ' if advice.endswith('?') else '; '}{hint}"
    elif isinstance(error, click.MissingParameter):
        message = f"{_name(error)} is missing"
        if listing := getattr(error.param, "listing", ""):
            hint = f"{listing}; {hint}"
        elif example := _find_example(error.ctx):
            hint = f"for example `{example}`; {hint}"
    elif isinstance(error, click.BadParameter) and error.param is not None:
        message = f"{_name(error)}: {_uncapital(error.message)}"
    return CommandFailure(_uncapital(message).removesuffix("."), hint, error.exit_code)


def _find_example(context: click.Context | None) -> str:
    """Return the first example in the help of the command that was called, or ""."""
    if context is None:
        return ""
    called = f"{context.command_path} "
    lines = (each.strip() for each in (context.command.help or "").splitlines())
    return next((each.split(" · ")[0] for each in lines if each.startswith(called)), "")


def _list_options(error: click.UsageError) -> set[str]:
    """Return the options of the command that was called."""
    params = error.ctx.command.params if error.ctx is not None else []
    return {option for param in params for option in (*param.opts, *param.secondary_opts)}


def _name(error: click.BadParameter) -> str:
    """Return the option or argument that the error is about, written as in the help."""
    param = error.param
    if isinstance(param, click.Option):
        return max(param.opts, key=len)
    named = error.param_hint
    if not named and param is not None:
        named = param.make_metavar(error.ctx)  # type: ignore[arg-type]  # the parser sets it
        if optional := _OPTIONAL.fullmatch(named):
            named = optional[1]
    return str(named or "an argument")


def _uncapital(text: str) -> str:
    """Return the text with its first letter in lower case, unless the first word is an acronym such
    as "GPU".
    """
    return text[:1].lower() + text[1:] if text[1:2].islower() or text[1:2] == " " else text
