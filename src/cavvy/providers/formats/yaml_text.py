"""Writes YAML in which texts of several lines stay readable."""

from typing import Any

import yaml


class LiteralDumper(yaml.SafeDumper):
    """Writes texts of several lines in the literal style."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar(
            "tag:yaml.org,2002:str", data, style="|" if "\n" in data else None
        )


LiteralDumper.add_representer(str, LiteralDumper.represent_str)


def dump_yaml(value: Any) -> str:
    """One document; keys keep their order, and lines are not folded."""
    text: str = yaml.dump(
        value, Dumper=LiteralDumper, sort_keys=False, width=100_000, allow_unicode=True
    )
    return text
