"""The state of a run without its tensors, as plain data: the position in the data, the loss scale,
and the user's objects.
"""

from typing import Any

from cavvy.train.data import Data
from cavvy.train.micro import MicroBatch
from cavvy.train.plan import Plan


class RunState:
    """The state that is written into the completion mark of each checkpoint and restored from
    it.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.data: list[Data] = []
        self.things: dict[str, Any] = {}
        self.micro = MicroBatch("", {})

    def to_facts(self, numbers: Any, plan: Plan) -> dict[str, Any]:
        return {
            "version": 1,
            "step": self.steps,
            "positions": [data.position for data in self.data],
            "orders": [data.order for data in self.data],
            "scale": numbers.state(),
            "micro": self.micro.known,
            "plan": plan.to_json(),
        }

    def from_facts(self, facts: dict[str, Any], numbers: Any) -> None:
        """Restore the state of a checkpoint.

        Raises: ValueError: the checkpoint does not match this script.
        """
        positions, things = facts["positions"], facts["things"]
        if len(positions) != len(self.data):
            raise ValueError(
                f"the checkpoint has {len(positions)} data sets, but the script has "
                f"{len(self.data)}"
            )
        if missing := sorted(set(self.things) - set(things)):
            raise ValueError(
                f"the checkpoint has no state for {', '.join(missing)}, which the script adds with "
                "run.keep"
            )
        self.steps = facts["step"]
        orders = facts.get("orders", [{} for _ in positions])
        for data, position, order in zip(self.data, positions, orders, strict=True):
            data.resume(position, order)
        for name, thing in self.things.items():
            thing.load_state_dict(things[name])
        numbers.load(facts["scale"])
        self.micro.known = facts["micro"] | self.micro.known
