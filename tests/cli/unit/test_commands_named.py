"""Every command that a text of ours names exists, with these options and enough arguments, as
the parser has it.
"""

import ast
import re
import shlex
from collections.abc import Iterator
from itertools import takewhile

import click
import pytest
from tests.pages import ROOT, Block, read_blocks

from cavvy.cli.main import MERGED, cli
from cavvy.cli.reach.session import named
from cavvy.cli.task.options import TaskCommand

SOURCES = sorted((ROOT / "src/cavvy").rglob("*.py"))
# Decisions may name the words of their time.
PAGES = [
    path
    for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
    if path.parent.name != "adr"
]
HOLE = "HOLE"  # what a program puts into a text
QUOTED = re.compile(r"`cavvy ([^`\n]+)`")
# `follow it: cavvy logs -f NAME    stop it: cavvy stop NAME`, and the examples of a help text.
PLAIN = re.compile(
    r"(?:\w: |^ {4,})cavvy ((?:[a-z-]+|HOLE)(?: [^\n·;]*?)?)(?=  |[;·]|\.?$)", re.MULTILINE
)
ENDS = ("|", "||", "&&", ";", "&", "(", ")", "do", "then", "<", ">", ">>")  # of a command
CALLERS = ("--", "server", "cavvy")  # of `docker compose exec server` and `sudo -Hu cavvy`


def list_texts(source: str) -> Iterator[tuple[int, str]]:
    """The string literals of a program with their lines; what an f-string puts in is a HOLE."""
    tree = ast.parse(source)
    parts = {
        id(each)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for each in node.values
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            words = [each.value if isinstance(each, ast.Constant) else HOLE for each in node.values]
            yield node.lineno, "".join(str(word) for word in words)
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts
        ):
            yield node.lineno, node.value


def find_fault(line: str, *, whole: bool) -> str:
    """Why `cavvy LINE` could not be called; "" where it could, or where it only names a command.

    With `whole` False it may also only name an option, as pages do.
    """
    words = list(takewhile(lambda word: word not in ENDS, shlex.split(line, comments=True)))
    return find_fault_of(words, whole=whole)


def find_fault_of(words: list[str], *, whole: bool) -> str:
    command: click.Command = cli
    context = click.Context(cli, info_name="cavvy")
    path = []
    if words and words[0] in MERGED:
        return f"{words[0]} is a former word of `cavvy {MERGED[words[0]]}`"
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        path.append(words.pop(0))
        if path[-1] in (HOLE, "COMMAND"):
            return ""
        found = command.get_command(context, path[-1])
        if found is None:
            return f"there is no command {' '.join(path)}"
        command, context = found, click.Context(found, context, path[-1], **found.context_settings)
    return find_wrong_words(command, context, words, whole) if words else ""


def find_wrong_words(
    command: click.Command, context: click.Context, words: list[str], whole: bool
) -> str:
    if isinstance(command, TaskCommand):  # which takes a command of the user's after `--`
        words = list(takewhile(lambda word: word != "--", words))
    try:
        given, rest, _ = command.make_parser(context).parse_args(list(words))
    except click.NoSuchOption as error:
        return error.format_message()
    except click.UsageError as error:
        return error.format_message() if whole else ""
    for param in command.get_params(context):
        told = given.get(str(param.name))
        missing = told in (None, (), "") or "UNSET" in str(told)
        # The Python file of an app says itself what the options of a command say of other files.
        complete = {"-h", "--help"} & set(words) or any(word.endswith(".py") for word in words)
        if whole and param.required and missing and not complete:
            return f"{param.get_error_hint(context)} is missing"
        choices = param.type.choices if isinstance(param.type, click.Choice) else ()
        if choices and isinstance(told, str) and told != HOLE and told not in choices:
            return f"{told} is none of {', '.join(map(str, choices))}"
    if isinstance(command, TaskCommand) and command.several:
        rest = [word for word in rest if not word.endswith((".yaml", ".yml"))]
    return f"{' '.join(rest)} is too much" if rest and not context.allow_extra_args else ""


def list_commands(script: str) -> Iterator[list[str]]:
    """The words of each `cavvy` command of a shell script."""
    inner = re.compile(r"\$\(([^()]*)\)")  # commands whose output becomes a word
    lines = script.replace("\\\n", " ").splitlines()
    for line in [*inner.findall(script), *(inner.sub(HOLE, line) for line in lines)]:
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words = ["", *(word.removeprefix("/opt/cavvy/bin/") for word in lexer)]
        for number, word in enumerate(words[1:], 1):
            before = words[number - 1]
            if word == "cavvy" and (before in ("", *ENDS, *CALLERS) or "=" in before):
                yield list(takewhile(lambda word: word not in ENDS, words[number + 1 :]))


def list_scripts(block: Block) -> Iterator[str]:
    if block.language == "console":
        yield "\n".join(line[2:] for line in block.text.splitlines() if line.startswith("$ "))
    elif block.language == "yaml":  # of CI systems
        yield "\n".join(re.findall(r"^ *- (?:run: )?(cavvy .*)$", block.text, re.MULTILINE))
    elif block.language == "sh":
        yield block.text


def find_faults(text: str, *shapes: re.Pattern[str], whole: bool = True) -> list[str]:
    lines = [line for shape in shapes for line in shape.findall(text)] if "cavvy " in text else []
    return [f"cavvy {line}: {fault}" for line in lines if (fault := find_fault(line, whole=whole))]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("see `cavvy status`", ""),
        ("see `cavvy status NAME -p team`", ""),
        ("see `cavvy state NAME`", "there is no command state"),
        ("see `cavvy gc`", "gc is a former word of `cavvy nodes gc`"),
        ("see `cavvy server stat`", "there is no command server stat"),
        ("see `cavvy status --all`", "No such option"),
        ("see `cavvy status NAME RANK`", "RANK is too much"),
        ("see `cavvy forward NAME`", "is missing"),
        ("see `cavvy estimate --save`", "requires an argument"),
        ("see `cavvy status NAME -o yaml`", "yaml is none of"),
        ("see `cavvy HOLE`", ""),
        ("see `cavvy check NAME --policy | kubectl apply -f -`", ""),
        ("follow it: cavvy logs -f HOLE    stop it: cavvy stop --every HOLE", "No such option"),
        ("Examples:\n\n    cavvy tuna train.py\n", "there is no command tuna"),
        ("measured by cavvy bench", ""),
    ],
)
def test_faults_are_found(text: str, fault: str) -> None:
    found = find_faults(text, QUOTED, PLAIN)
    assert fault in "".join(found)
    assert bool(found) is bool(fault)


def test_texts_of_programs_name_commands_that_can_be_called() -> None:
    faults = [
        f"{path.relative_to(ROOT)}:{line}: {fault}"
        for path in SOURCES
        if "cavvy " in (source := path.read_text("utf-8"))
        for line, text in list_texts(source)
        for fault in find_faults(text, QUOTED, PLAIN)
    ]
    assert faults == []


def test_a_job_is_named_with_its_project_where_commands_would_look_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CAVVY_PROJECT", raising=False)
    assert (named("default", "j"), named("team", "j")) == ("j", "j -p team")
    monkeypatch.setenv("CAVVY_PROJECT", "team")
    assert (named("default", "j"), named("team", "j")) == ("j -p default", "j")


def test_pages_name_commands_that_can_be_called() -> None:
    faults = [
        f"{path.relative_to(ROOT)}: {fault}"
        for path in PAGES
        for fault in find_faults(strip_former(path.read_text("utf-8")), QUOTED, whole=False)
    ]
    assert faults == []


def strip_former(text: str) -> str:
    """A page without the rows that only say which command a former word became."""
    starts = tuple(f"| `cavvy {former}` | [`cavvy {now}`]" for former, now in MERGED.items())
    return "\n".join(line for line in text.splitlines() if not line.startswith(starts))


@pytest.mark.parametrize(
    ("script", "commands"),
    [
        ("A=1 cavvy ps && cavvy stop x | cat", ["ps", "stop x"]),
        ("id=$(cavvy call a / -d - <b)   # cavvy rm", ["call a / -d -"]),
        ("cavvy stop $(cavvy ps -o json | jq .)", ["ps -o json", "stop HOLE"]),
        ("for i in 1 2; do cavvy run $i; done", ["run $i"]),
        ("cavvy offers --gpu 'H100|A100' > out\nmake cavvy", ["offers --gpu H100|A100"]),
        ("docker compose exec server cavvy ps", ["ps"]),
        ("sudo -Hu cavvy /opt/cavvy/bin/cavvy ps", ["ps"]),
        ("kubectl get pods -n cavvy", []),
        ("kubectl exec deploy/cavvy -- cavvy ps", ["ps"]),
    ],
)
def test_commands_of_scripts_are_found(script: str, commands: list[str]) -> None:
    assert [" ".join(words) for words in list_commands(script)] == commands


def test_scripts_of_pages_call_commands_as_they_are() -> None:
    faults = [
        f"{path.relative_to(ROOT)}:{block.line}: cavvy {shlex.join(words)}: {fault}"
        for path in PAGES
        for block in read_blocks(path)
        for script in list_scripts(block)
        for words in list_commands(script)
        if (fault := find_fault_of(words, whole=True))
    ]
    assert faults == []
