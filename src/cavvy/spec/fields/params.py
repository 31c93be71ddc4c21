"""The parameters of a task. A task file declares parameters with a type under `params`. The option
`--param` sets a parameter, and `${{ params.NAME }}` inserts its value.
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

from cavvy.domain.tasks import Scalar, SweptParam, TaskSpec
from cavvy.domain.values import Struct, replace
from cavvy.spec.fields.kinds import (
    EitherKind,
    ListKind,
    MapKind,
    ScalarKind,
    SectionReader,
    WrongValue,
    read_text,
    section,
)
from cavvy.spec.problems import ProblemNotes, SourceMark, listed, nearest, shown
from cavvy.spec.tree import (
    MAX_CHARACTERS,
    ListNode,
    MapNode,
    Node,
    ScalarNode,
    describe,
    read_scalar,
)

TYPES: Final[Mapping[str, type]] = {"int": int, "float": float, "str": str, "bool": bool}
_SLIPS = {
    "integer": "int",
    "number": "float",
    "double": "float",
    "string": "str",
    "text": "str",
    "boolean": "bool",
}
_NAME = "[A-Za-z_][A-Za-z0-9_-]*"
# `$${{` stands for a literal `${{`.
# An expression that is not closed matches up to the end of the text. Otherwise, the search would
# read the rest of the text again for each of these expressions.
_LATER = ("image.command", "image.entrypoint")
_EXPRESSION = re.compile(r"\$\$\{\{|\$\{\{(.*?)(\}\}|\Z)", re.DOTALL)


class WrittenValue(Struct, frozen=True, kw_only=True):
    """A value and its original text, so that 1e-3 is inserted into strings as 1e-3 and not as
    0.001.
    """

    value: Scalar
    text: str


class ParamSpec(Struct, frozen=True, kw_only=True):
    """The declaration of one parameter."""

    mark: SourceMark
    type: str
    default: WrittenValue | None = None
    low: float | None = None
    high: float | None = None
    choices: tuple[WrittenValue, ...] = ()

    def check(self, given: WrittenValue) -> WrittenValue:
        """Convert a value to the type of the parameter. Raises WrongValue if the value is
        invalid."""
        value = given.value
        if self.type == "str":
            value = given.text
        elif self.type == "float" and isinstance(value, int) and not isinstance(value, bool):
            value = _to_float(value)
        # The types are compared exactly: in Python, a bool is also an int, but users do not expect
        # that.
        if type(value) is not TYPES[self.type] or (
            isinstance(value, float) and not math.isfinite(value)
        ):
            raise WrongValue(
                f"{shown(given.text)} is not {_TYPE_WORDS[self.type]}",
                suggestion=_type_hint(self.type, given),
            )
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if self.low is not None and value < self.low:
                raise WrongValue(f"{given.text} is below the minimum, {self.low:g}")
            if self.high is not None and value > self.high:
                raise WrongValue(f"{given.text} is above the maximum, {self.high:g}")
        texts = [choice.text for choice in self.choices]
        if self.choices and value not in [choice.value for choice in self.choices]:
            close = nearest(given.text, texts)
            hint = f"did you mean {close}?" if close else ""
            raise WrongValue(
                f"{shown(given.text)} is not one of the parameter's choices",
                expected=listed(texts),
                suggestion=hint,
            )
        return WrittenValue(value=value, text=given.text)


_TYPE_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
}


def read_params(
    root: Node,
    overrides: Mapping[str, Scalar],
    notes: ProblemNotes,
    sweep: Mapping[str, Sequence[WrittenValue]] = {},
) -> tuple[dict[str, WrittenValue | None], tuple[SweptParam, ...]]:
    """Return the value of every declared parameter, and the values of those in the sweep. If the
    file declares no parameters, the sweep declares its own. An invalid parameter has the value
    None, and a problem is added to `notes`.
    """
    section = root.get("params") if isinstance(root, MapNode) else None
    declared: dict[str, ParamSpec] = {}
    if section is not None and not (isinstance(section, ScalarNode) and section.value is None):
        declared = PARAMS.read(section, notes) or {}
        _check_names(section, notes)
    values: dict[str, WrittenValue | None] = {}
    if isinstance(section, MapNode):
        values = dict.fromkeys(key.text for key, _ in section.entries)
    for name, param in declared.items():
        values[name] = param.default
        if name not in overrides and name not in sweep and param.default is None:
            message = f"the parameter {name!r} has no default and was not set"
            hint = f"set it with `--param {name}=…`, or add a `default`"
            notes.add(param.mark, message, suggestion=hint)
    for name, given in overrides.items():
        text = str(given).lower() if isinstance(given, bool) else str(given)
        place = f"--param {name}={text if len(text) <= 40 else text[:39] + '…'}"
        if name in declared:
            values[name] = _override(declared[name], text, place, notes)
        elif name not in values:
            _note_unknown(name, place, declared, notes)
    if not values:
        declared = {name: _declare(texts) for name, texts in sweep.items()}
        for name, message in _find_twins(sweep):
            notes.outside(f"sweep.{name}", message, suggestion="rename one")
        values = dict.fromkeys(declared)
    return values, _read_sweep(sweep, declared, values, overrides, notes)


def _read_sweep(
    sweep: Mapping[str, Sequence[WrittenValue]],
    declared: Mapping[str, ParamSpec],
    values: dict[str, WrittenValue | None],
    overrides: Collection[str],
    notes: ProblemNotes,
) -> tuple[SweptParam, ...]:
    """Return the values of the parameters in the sweep, and set the first of each in `values`."""
    swept = []
    for name, texts in sweep.items():
        place = f"sweep.{name}"
        if name in overrides:
            notes.outside(place, "--param sets the parameter, too", suggestion="delete one of them")
        elif name in declared:
            swept.append(_sweep(name, declared[name], texts, notes))
            values[name] = texts[0] if texts else None
        elif name not in values:
            _note_unknown(name, place, declared, notes, option="sweep")
    return tuple(swept)


def _declare(values: Sequence[WrittenValue]) -> ParamSpec:
    """Return a parameter of the narrowest type for the values of a sweep."""
    found = {type(each.value).__name__ for each in values}
    kind = "float" if found == {"int", "float"} else found.pop() if len(found) == 1 else "str"
    return ParamSpec(mark=SourceMark(line=1, column=1), type=kind if kind in TYPES else "str")


def _sweep(
    name: str, param: ParamSpec, given: Sequence[WrittenValue], notes: ProblemNotes
) -> SweptParam:
    """Return the values of a parameter in a sweep, in the type of the parameter."""
    if not given:
        notes.outside(f"sweep.{name}", "the list has no values", suggestion="add one")
    places = [f"sweep.{name}={shown(each.text)}" for each in given]
    fits = [
        _override(param, each.text, place, notes) for each, place in zip(given, places, strict=True)
    ]
    found = [each for each in fits if each is not None]
    if len(found) == len(given) > len({each.value for each in found}):
        notes.outside(f"sweep.{name}", "a value is in the list twice", suggestion="delete one")
    return SweptParam(name, tuple(each.value for each in found), tuple(each.text for each in found))


def _note_unknown(
    name: str,
    place: str,
    declared: Mapping[str, ParamSpec],
    notes: ProblemNotes,
    option: str = "param",
) -> None:
    close = nearest(name, declared)
    names = f"one of {', '.join(sorted(declared))}"
    notes.outside(
        place,
        f"the file has no parameter {shown(name)}",
        expected=names if declared else "no parameter, because the file declares none",
        suggestion=f"did you mean `--{option} {close}=…`?"
        if close
        else f"to declare it, add `params: {{{name}: …}}` with a default value to the file",
    )


class ParamFiller:
    """Replaces expressions in the nodes of one file, and limits the length of the result. In the
    node `run`, the expressions for the image's own command are kept: they are filled in later.

    If parameters are `swept`, `run` and `env` differ between the jobs of the sweep. There, the
    expressions of these parameters are kept, and `make_member` fills them in.
    """

    def __init__(
        self,
        values: Mapping[str, WrittenValue | None],
        notes: ProblemNotes,
        run: Node | None = None,
        swept: Collection[str] = (),
    ) -> None:
        self._values, self._notes, self._run = values, notes, run
        self._swept = {f"params.{name}" for name in swept}
        self._keeps = False
        self._left = MAX_CHARACTERS

    def fill_key(self, key: str, node: Node) -> Node:
        """Fill in the value of a key of the task."""
        self._keeps = bool(self._swept) and key in ("run", "env")
        return self.fill(node)

    def fill(self, node: Node) -> Node:
        """Replace every `${{ params.NAME }}` in a node. If a value is a single expression and
        nothing else, the result has the type of the parameter.
        """
        match node:
            case ScalarNode():
                return self._fill_scalar(node) if "${{" in node.text else node
            case ListNode():
                return replace(node, items=tuple(self.fill(item) for item in node.items))
            case MapNode():
                entries = tuple((key, self.fill(value)) for key, value in node.entries)
                return replace(node, entries=entries)

    def _fill_scalar(self, node: ScalarNode) -> ScalarNode:
        bad = is_open = False
        parts: list[str] = []
        end = 0
        found = list(_EXPRESSION.finditer(node.text))
        whole = len(found) == 1 and found[0][0] == node.text.strip()
        for match in found:
            parts.append(node.text[end : match.start()])
            end = match.end()
            if match[1] is None:
                parts.append("$${{" if self._keeps else "${{")
                continue
            if not match[2]:
                is_open = True
                continue
            if match[1].strip() in _LATER and node is self._run:
                parts.append(match[0])
                continue
            expression = match[1].strip()
            if expression in self._swept and self._keeps:
                parts.append(match[0])
                continue
            written = (
                _explain_swept(expression)
                if expression in self._swept
                else _look_up(expression, self._values)
            )
            if isinstance(written, WrongValue):
                bad = True
                _note(node, match, written, self._notes)
                written = None
            if not self._has_room(node, written):
                return node
            if whole:
                return (
                    replace(node, text="", value=None, plain=True)
                    if written is None
                    else _put(node, written, escaped=self._keeps)
                )
            text = written.text if written else ""
            parts.append(escape(text) if self._keeps else text)
        parts.append(node.text[end:])
        if is_open and not bad:
            suggestion = "write `${{ params.NAME }}`, or `$${{` for a literal `${{`"
            self._notes.add(node.mark, "`${{` is never closed", suggestion=suggestion)
        text = "".join(parts)
        return replace(node, text=text, value=text, plain=False)

    def _has_room(self, node: ScalarNode, written: WrittenValue | None) -> bool:
        """Count the characters of an inserted value; return False if the file is full."""
        before = self._left
        self._left -= len(written.text) if written else 0
        if self._left < 0 <= before:
            self._notes.add(
                node.mark,
                f"the inserted parameters have more than {MAX_CHARACTERS:,} characters",
                suggestion="use shorter values for the parameters, or insert the parameters in "
                "fewer places of the file",
            )
        return self._left >= 0


# What other tools, or a typing error, would have replaced. Shells read `${lr}` as a variable.
_UNREPLACED = re.compile(
    rf"(?<!\$)\{{\{{\s*(params\.)?({_NAME})\s*\}}\}}|\$\{{(params\.)({_NAME})\}}"
)
_VARIABLE = re.compile(r"\$(?:\{[A-Za-z_]\w*\}|[A-Za-z_]\w*)")


def list_unreplaced(task: TaskSpec) -> list[str]:
    """Return notes on texts of a task that look like parameters or variables, but stay as they
    are."""
    notes = []
    for key, commands in (("setup", task.setup or ""), ("run", task.run)):
        for found in _UNREPLACED.finditer(commands):
            name = found[2] or found[4]
            if (found[1] or found[3]) or name in task.params:
                notes.append(
                    f"`{key}` contains `{found[0]}`, which Cavvy does not replace: parameters are "
                    f"written ${{{{ params.{name} }}}}"
                )
    for key, value in task.env.items():
        if variable := _VARIABLE.search(value):
            name = variable[0].strip("${}")
            notes.append(
                f"`env.{key}` contains the text {variable[0]}, because `env` is not expanded: "
                f"`secrets: [{name}]` passes a secret, --env {name} a local value, and `export "
                f"{key}=...` in `run` uses variables of the node"
            )
    return list(dict.fromkeys(notes))


def escape(text: str) -> str:
    """Escape a string, so that `ParamFiller` returns the original string."""
    return text.replace("${{", "$${{")


def _override(param: ParamSpec, text: str, place: str, notes: ProblemNotes) -> WrittenValue | None:
    try:
        if "\0" in text:
            raise WrongValue("a NUL byte cannot be passed to a program")
        value = text if param.type == "str" else read_scalar(text.strip())
        return param.check(WrittenValue(value=text if value is None else value, text=text))
    except WrongValue as error:
        expected = _TYPE_WORDS[param.type] if error.expected is None else error.expected
        notes.outside(place, str(error), expected=expected, suggestion=error.suggestion)
        return None


def _check_names(section: Node, notes: ProblemNotes) -> None:
    """Add a problem for each name that `_find_twins` finds."""
    if isinstance(section, MapNode):
        marks = {key.text: key.mark for key, _ in section.entries}
        for name, message in _find_twins(marks):
            notes.add(marks[name], message, suggestion="rename one")


def _find_twins(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the names that differ from another only in case, or in - and _, with what is wrong:
    such names would set the same environment variable.
    """
    seen: dict[str, str] = {}
    for name in names:
        variable = name.upper().replace("-", "_")
        other = seen.setdefault(variable, name)
        if other != name:
            yield (
                name,
                f"the parameters {other!r} and {name!r} would both be CAVVY_PARAM_{variable}",
            )


def _to_float(value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _type_hint(wanted: str, given: WrittenValue) -> str:
    if wanted == "bool" and given.text.lower() in (
        "yes",
        "on",
        "1",
        "no",
        "off",
        "0",
        "true",
        "false",
    ):
        return f"write {'true' if given.text.lower() in ('yes', 'on', '1', 'true') else 'false'}"
    if wanted == "int" and isinstance(given.value, float):
        return "declare it with `type: float` to allow fractions"
    return ""


def _put(node: ScalarNode, written: WrittenValue, *, escaped: bool) -> ScalarNode:
    text, value = written.text, written.value
    if escaped and isinstance(value, str):
        text, value = escape(text), escape(value)
    return replace(node, text=text, value=value, plain=not isinstance(value, str))


def _explain_swept(expression: str) -> WrongValue:
    return WrongValue(
        f"{expression} differs between the jobs of the sweep, which share everything but `run` "
        "and `env`",
        suggestion="use it in `run` or `env`, or submit a job for each value with --param",
    )


def _look_up(
    expression: str, values: Mapping[str, WrittenValue | None]
) -> WrittenValue | WrongValue | None:
    scope, _, name = expression.partition(".")
    if scope == "params" and name in values:
        return values[name]
    known = ", ".join(sorted(values)) or "none"
    if scope == "params":
        close = nearest(name, values)
        hint = (
            f"did you mean `params.{close}`?"
            if close
            else f"declare it under `params:` (declared so far: {known})"
        )
        return WrongValue(f"unknown parameter {shown(name)}", suggestion=hint)
    if scope in ("secrets", "env"):
        hint = f"list it under `{scope}:` and use it as ${name or 'NAME'} in `run`"
        return WrongValue(f"`{scope}` cannot be inserted into the file's text", suggestion=hint)
    if expression in _LATER:
        return WrongValue(f"{expression} can be used in `run` only")
    close = nearest(expression, values)
    hint = (
        f"did you mean `${{{{ params.{close} }}}}`?"
        if close
        else "write `$${{` for a literal `${{`"
    )
    return WrongValue(
        f"only parameters are allowed in `${{{{ }}}}`, not {shown(expression)}", suggestion=hint
    )


def _note(node: ScalarNode, match: "re.Match[str]", wrong: WrongValue, notes: ProblemNotes) -> None:
    """Add a problem at the position of the expression, for example in the middle of a long `run`.
    If the expression is not found in the source, the problem is added at the value.
    """
    mark = node.mark
    number = node.text.count("${{", 0, match.start())
    at = mark.index - 1
    for _ in range(number + 1):
        at = notes.text.find("${{", at + 1)
        if at < 0:
            break
    else:
        before = notes.text[:at]
        line_start = max(before.rfind("\n"), before.rfind("\r")) + 1
        line = mark.line + notes.text.count("\n", mark.index, at)
        width = len(match[0]) if "\n" not in match[0] else 1
        mark = SourceMark(line=line, column=at - line_start + 1, index=at, width=width)
    notes.add(mark, str(wrong), expected=wrong.expected or "", suggestion=wrong.suggestion)


# The kinds of values in `params`


def check_name(name: str) -> None:
    if not re.fullmatch(_NAME, name) or len(name) > 60:
        raise WrongValue(
            f"{shown(name)} cannot be a parameter's name",
            expected="at most 60 letters, digits, _ and -, beginning with a letter or _",
        )


def _read_scalar_param(node: ScalarNode) -> WrittenValue:
    if node.value is None:
        raise WrongValue(
            "a parameter needs a default",
            suggestion="write `{type: float}` for a parameter that must be set",
        )
    if isinstance(node.value, float) and not math.isfinite(node.value):
        raise WrongValue(f"{node.text} is too large for a number")
    if "${{" in node.text:
        raise WrongValue("a parameter cannot refer to others")
    return WrittenValue(value=node.value, text=read_text(node))


def _read_type(node: ScalarNode) -> str:
    if node.text not in TYPES:
        meant = _SLIPS.get(node.text.lower()) or nearest(node.text, TYPES)
        raise WrongValue(
            f"{describe(node)} is not a type",
            suggestion=f"did you mean `{meant}`?" if meant else "",
        )
    return node.text


def _read_bound(node: ScalarNode) -> float:
    if isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        value = _to_float(node.value)
        if math.isfinite(value):
            return value
    raise WrongValue(f"{describe(node)} is not a number in range")


def _build(table: SectionReader) -> ParamSpec:
    default: WrittenValue | None = table.get("default")
    type_name = table.get("type") or (type(default.value).__name__ if default else None)
    if type_name is None and not table.has("type"):
        table.notes.add(
            table.node.mark,
            "a parameter needs a type or a default",
            suggestion="write `type: float`",
        )
    table.get("help")
    param = ParamSpec(
        mark=table.node.mark,
        type=type_name or "str",
        low=table.get("min"),
        high=table.get("max"),
    )
    _check_bounds(table, param)
    choices = [_fit(table, param, each, "choices") for each in table.get("choices", ())]
    param = replace(param, choices=tuple(choices))
    return replace(param, default=_fit(table, param, default, "default")) if default else param


def _check_bounds(table: SectionReader, param: ParamSpec) -> None:
    if param.low is not None and param.high is not None and param.low > param.high:
        table.wrong("min", f"min {param.low:g} is above max {param.high:g}", suggestion="swap them")
    if param.type in ("str", "bool") and (param.low is not None or param.high is not None):
        at = "min" if param.low is not None else "max"
        table.wrong(
            at,
            f"a parameter of type {param.type} cannot have `min` or `max`",
            suggestion="use `choices`",
        )


def _fit(table: SectionReader, param: ParamSpec, given: WrittenValue, at: str) -> WrittenValue:
    try:
        return param.check(given)
    except WrongValue as error:
        expected = _TYPE_WORDS[param.type] if error.expected is None else error.expected
        table.wrong(at, f"{at}: {error}", expected=expected, suggestion=error.suggestion)
        return given


def _read_alone(node: ScalarNode) -> ParamSpec:
    written = _read_scalar_param(node)
    return ParamSpec(mark=node.mark, type=type(written.value).__name__, default=written)


_SCALAR_SCHEMA = {"type": ["string", "number", "boolean"]}
WRITTEN = ScalarKind("a string, a number, true or false", _read_scalar_param, _SCALAR_SCHEMA)
_BOUND = ScalarKind("a number", _read_bound, {"type": "number"})
PARAM = section(
    "params.NAME",
    _build,
    type=ScalarKind(listed(TYPES), _read_type, {"enum": list(TYPES)}),
    default=WRITTEN,
    min=_BOUND,
    max=_BOUND,
    choices=ListKind(WRITTEN),
    help=ScalarKind("a string", read_text),
)
_ALONE = ScalarKind("a default", _read_alone, _SCALAR_SCHEMA)
PARAMS = MapKind(
    "names with defaults", check_name, EitherKind((_ALONE, PARAM)), {"pattern": f"^{_NAME}$"}
)
