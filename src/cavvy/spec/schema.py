"""The JSON Schema of a task file, for editors; `cavvy validate --schema` prints it."""

from cavvy.spec.fields.kinds import Schema
from cavvy.spec.fields.task import TASK

EXPRESSION = {
    "type": "string",
    "pattern": r"\$\{\{\s*params\.[A-Za-z_][A-Za-z0-9_]*\s*\}\}",
    "description": "A parameter's value, as in ${{ params.lr }}.",
}


def make_schema() -> Schema:
    """The JSON Schema (2020-12) derived from the parser's own table of fields.

    It is slightly stricter than the parser, which reads "8" as a number, and checks neither
    accelerators nor dates.
    """
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Cavvy task file",
        "description": TASK.help,
        **TASK.schema,
        "$defs": {"expression": EXPRESSION},
    }
