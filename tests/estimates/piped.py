"""The commands that read files which users name, for `tests/cli/unit/test_named_files.py`."""

WORDS: tuple[str, ...] = ("estimate --profile PIPE",)
OF_SCRIPTS: tuple[str, ...] = ("estimate", "profile")  # those that take a training script
