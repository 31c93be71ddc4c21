"""Reads the keys that another tool allows from the file `keys.yaml` in the folder of its importer.

An entry of `keys.yaml` describes a shape, which is the set of allowed values. The possible shapes
are:

* a word: a shape that the importer defines, or the name of another entry of the file
* a word with its arguments, such as `whole 1..8`, `number above 0` or `one-of aws gcp`
* `list of SHAPE`, or `{$list: SHAPE, $least: 1}`
* `{$match: PATTERN, $words: WHAT}`: a string that matches a regular expression
* a list: any of these shapes
* a table. A key that is written `key!` is required; a key that is written `key?` may have no value.
  `$with` names entries whose keys are added to the table; the other `$` keys are the options of a
  `TableRule`.
"""

from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from cavvy.importers.shapes import (
    NULL,
    AnyRule,
    ListRule,
    OneOfRule,
    Rule,
    ScalarRule,
    ShapeRule,
    TableRule,
    alternatives,
    optional,
)

Bounded = Callable[..., ShapeRule]  # the arguments are `low`, `high` and, if requested, `above`


class KeyTables:
    """The shapes that one `keys.yaml` describes. Each shape is created when it is first used."""

    def __init__(
        self,
        file: Path,
        *,
        shapes: Mapping[str, ShapeRule],
        text: Callable[..., ScalarRule],
        bounded: Mapping[str, Bounded],
        chosen: Mapping[str, Callable[[Iterable[str]], ShapeRule]],
        rules: Iterable[Rule],
    ) -> None:
        import yaml

        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        self._entries: dict[str, Any] = yaml.load(file.read_text(), Loader=loader)
        self._known: dict[str, ShapeRule] = {"any": AnyRule(), "nothing": NULL, **shapes}
        self._text = text
        self._bounded = bounded
        self._chosen = chosen
        self._rules = {each.__name__.removeprefix("_check_"): each for each in rules}

    def table(self, name: str) -> TableRule:
        shape = self[name]
        assert isinstance(shape, TableRule)
        return shape

    def __getitem__(self, name: str) -> ShapeRule:
        if name not in self._known:
            self._known[name] = self._make(self._entries[name])
        return self._known[name]

    def _make(self, written: Any) -> ShapeRule:
        match written:
            case str():
                return self._make_word(written)
            case list():
                made = [self._make(each) for each in written]
                return OneOfRule(tuple(inner for each in made for inner in alternatives(each)))
            case {"$match": pattern, **words}:
                return self._text(words.get("$words", "a string"), pattern=pattern)
            case {"$list": item, **options}:
                return ListRule(self._make(item), **_plain(options))
            case _:
                return self._make_table(self._with(written))

    def _make_word(self, text: str) -> ShapeRule:
        word, _, rest = text.partition(" ")
        if text in self._known or text in self._entries:
            return self[text]
        if word == "list":
            return ListRule(self._make(rest.removeprefix("of ")))
        if word in self._chosen:
            return self._chosen[word](rest.split())
        make = self._bounded[word]
        if rest.startswith("above "):
            make, rest = partial(make, above=True), rest.removeprefix("above ")
        bounds = [float(Fraction(end)) if end else None for end in rest.split("..")]
        return make(*bounds) if rest else make()

    def _with(self, written: Mapping[str, Any]) -> dict[str, Any]:
        """Return the table with additional keys: `$with` contains the names of other entries, whose
        keys are added.
        """
        found: dict[str, Any] = {}
        for key, value in written.items():
            for name in value.split() if key == "$with" else ():
                found |= self._with(self._entries[name])
            if key != "$with":
                found[key] = value
        return found

    def _make_table(self, written: Mapping[str, Any]) -> TableRule:
        options = _plain({key: value for key, value in written.items() if key.startswith("$")})
        if "other" in options:
            options["other"] = self._make(options["other"])
        if "rule" in options:
            options["rule"] = self._rules[options["rule"]]
        keys = [key for key in written if not key.startswith("$")]
        fields = {key.rstrip("!?"): self._make(written[key]) for key in keys}
        fields |= {key[:-1]: optional(fields[key[:-1]]) for key in keys if key.endswith("?")}
        required = tuple(key[:-1] for key in keys if key.endswith("!"))
        return TableRule(fields=fields, required=required, **options)


def _plain(options: Mapping[Any, Any]) -> dict[str, Any]:
    return {key.removeprefix("$"): value for key, value in options.items()}
