"""Writes YAML that has readable multi-line strings, and that parsers of YAML 1.1 and YAML 1.2 read
identically.
"""

from typing import Any

import yaml

from cavvy.spec.tree import read_scalar

# YAML 1.1 has these as booleans (yaml.org/type/bool.html); PyYAML neither reads nor quotes them so.
_SHORT_BOOLEANS = frozenset("yYnN")


class LiteralDumper(yaml.SafeDumper):
    """Writes multi-line strings in YAML's literal style. Quotes strings that a parser of YAML 1.1
    or 1.2 would read as a number or a boolean.
    """

    def ignore_aliases(self, data: Any) -> bool:
        return True  # write a shared value in full each time, as people would

    def represent_str(self, data: str) -> yaml.ScalarNode:
        if "\x85" in data:
            style: str | None = '"'  # U+0085 ends a line in YAML: only an escape keeps it
        elif "\n" in data:
            style = "|"
        else:
            style = "'" if data in _SHORT_BOOLEANS or read_scalar(data) != data else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


LiteralDumper.add_representer(str, LiteralDumper.represent_str)


def dump_yaml(value: Any) -> str:
    """Return the value as one YAML document. Keys keep their order, and long lines are not
    folded."""
    text: str = yaml.dump(
        value, Dumper=LiteralDumper, sort_keys=False, width=100_000, allow_unicode=True
    )
    return text
