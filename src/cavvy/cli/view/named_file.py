"""The type of options that name a file to read."""

from typing import BinaryIO

import click


class NamedFile(click.ParamType["BinaryIO"]):
    """A file that is opened to read its bytes; - is standard input. A pipe into which nothing
    writes is refused."""

    name = "filename"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> BinaryIO:
        import sys

        from cavvy.named_files import open_named

        path = str(value)
        if path == "-":
            return sys.stdin.buffer
        try:
            file = open_named(path)
        except OSError as error:
            self.fail(f"'{path}': {error.strerror}", param, ctx)
        if ctx is not None:
            ctx.call_on_close(file.close)
        return file
