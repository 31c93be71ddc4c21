"""What files tell that training programs write, such as TensorBoard's event files."""

from __future__ import annotations


class RunEvent:
    """What a record of a file tells. Its time is in seconds since 1970."""

    __slots__ = ("at", "params", "step", "values")

    def __init__(self) -> None:
        self.at, self.step = 0.0, 0.0
        self.values: dict[str, float] = {}
        self.params: dict[str, str] = {}
