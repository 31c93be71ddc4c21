"""Has the programs that a run with `-p tests.sentences` starts say `x` in place of sentences."""

from contextlib import suppress

with suppress(ImportError):  # another Python than Cavvy's
    from blank import blank_all

    blank_all()
