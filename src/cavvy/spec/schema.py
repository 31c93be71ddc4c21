"""The JSON Schema of a task file, for editors; `cavvy validate --schema` prints it."""

from cavvy.spec.fields.kinds import Schema
from cavvy.spec.fields.task import TASK

EXPRESSION = {
    "type": "string",
    "pattern": r"\$\{\{\s*params\.[A-Za-z_][A-Za-z0-9_-]*\s*\}\}",
    "description": "A parameter's value, as in ${{ params.lr }}.",
}


def make_schema() -> Schema:
    """Build the JSON Schema (2020-12) from the table of fields that the parser uses.

    Some values that the parser accepts do not match the schema: for example, the parser reads "8"
    as a number. The schema checks neither names of accelerators nor dates.
    """
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Cavvy task file",
        "description": TASK.help,
        **{name: value for name, value in TASK.schema.items() if name != "required"},
        # An image and an engine name their own commands.
        "anyOf": [{"required": [name]} for name in ("run", "image", "service", "batch", "edge")],
        "$defs": {"expression": EXPRESSION},
    }
