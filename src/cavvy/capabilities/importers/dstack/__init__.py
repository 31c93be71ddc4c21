"""Checks dstack's configurations by the rules of dstack, and translates them into tasks. `TABLES`
has the rules for the keys, by type of file.
"""

from pathlib import Path

from cavvy.capabilities.importers.dstack import rules, scalars, services
from cavvy.capabilities.importers.dstack.scalars import (
    FLAG,
    SIZE,
    TEXT,
    choice,
    duration,
    number,
    switched,
    text,
    whole,
)
from cavvy.capabilities.importers.shapes import KeyTables

TABLES = KeyTables(
    Path(__file__).with_name("keys.yaml"),
    shapes={
        "text": TEXT,
        "flag": FLAG,
        "size": SIZE,
        "switched": switched(),
        "switched_any": switched(None),
        **scalars.SHAPES,
        **rules.SHAPES,
        **services.SHAPES,
    },
    text=text,
    bounded={
        "whole": whole,
        "number": number,
        "length": lambda low=None, high=None: duration(low),
    },
    chosen={"one-of": choice},
    rules=(*scalars.RULES, *rules.RULES, *services.RULES),
)
