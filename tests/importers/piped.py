"""The commands that read files which users name, for `tests/cli/unit/test_named_files.py`."""

WORDS: tuple[str, ...] = ("convert PIPE",)
OF_SCRIPTS: tuple[str, ...] = ()  # those that take a training script
