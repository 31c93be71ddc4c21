"""The plan of a run: how the run is spread over ranks, and the precision of its computation. A plan
is plain data that can be saved, tuned and loaded.
"""

import dataclasses
import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal, cast, get_args

Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]
STATE_BYTES = 16  # bytes of an fp32 parameter, its gradient and the two moments of Adam
FULL = 0.6  # parameters are sharded if they need more than this share of the device's memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A plan. A plan must satisfy replicas x shards x tensor x pipeline = number of ranks.

    The batch is split over replicas x shards. Each copy of the parameters is split over `shards`
    ranks (FSDP2). Each layer is split over `tensor` ranks, and the layers are distributed over
    `pipeline` ranks.
    """

    replicas: int = 0  # number of copies of the model; 0 means as many as the ranks allow
    # number of ranks that share one copy of the parameters; 0 means all remaining ranks
    shards: int = 1
    tensor: int = 1
    pipeline: int = 1
    precision: Precision = "fp32"
    # number of samples in one forward pass on one rank; 0 means as many as fit
    micro_batch: int = 0
    # whether activations are recomputed in the backward pass instead of kept
    recompute: bool = False
    compile: bool = False
    channels_last: bool = False
    workers: int = 0  # number of processes that read data; 0 means that only threads read
    threads: int = 2  # number of threads that read data, in this process or in each worker process
    prefetch: int = 2  # number of batches that are prepared in advance
    # whether batches are put into page-locked memory if the device is an accelerator
    pin: bool = True

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            raise ValueError(
                f"precision {self.precision!r} is not one of {', '.join(get_args(Precision))}"
            )
        least = {
            "replicas": 0,
            "shards": 0,
            "tensor": 1,
            "pipeline": 1,
            "micro_batch": 0,
            "workers": 0,
        }
        least |= {"threads": 0, "prefetch": 1}
        for name, lowest in least.items():
            if getattr(self, name) < lowest:
                raise ValueError(f"{name} must be at least {lowest}, not {getattr(self, name)}")

        if self.precision == "fp8" and self.tensor > 1:
            raise ValueError(
                "fp8 is not supported with tensor parallel, whose layers are split before torchao "
                "can scale them: use bf16, or shards instead of tensor"
            )

    @property
    def data_ranks(self) -> int:
        """The number of ranks over which the batch is split. Valid only after `fit`."""
        return self.replicas * self.shards

    def fit(self, ranks: int) -> "Plan":
        """Return a copy of this plan in which `replicas` and `shards` suit the number of ranks.

        Raises: ValueError: the plan cannot be spread over `ranks` ranks.
        """
        said = {
            "replicas": self.replicas,
            "shards": self.shards,
            "tensor": self.tensor,
            "pipeline": self.pipeline,
        }
        rest, odd = divmod(ranks, prod(number or 1 for number in said.values()))
        if odd or (rest != 1 and self.replicas and self.shards):
            text = " x ".join(f"{name} {number}" for name, number in said.items() if number)
            raise ValueError(f"{text} cannot be spread over {ranks} ranks")
        replicas = self.replicas or (rest if self.shards else 1)
        return dataclasses.replace(self, replicas=replicas, shards=self.shards or rest)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        said = json.loads(text)
        unknown = set(said) - {field.name for field in dataclasses.fields(cls)}
        if unknown:
            raise ValueError(f"unknown keys in a plan: {', '.join(sorted(unknown))}")
        return cls(**said)


def choose(ranks: int, parameters: int, memory_bytes: int | None, precision: str) -> Plan:
    """Choose the plan `auto`: replicas if a whole model fits, otherwise FSDP2 over all ranks.

    `memory_bytes` is one device's memory, or None if the memory is unknown.
    """
    whole = memory_bytes is None or parameters * STATE_BYTES <= FULL * memory_bytes
    shards = 1 if whole else ranks
    return Plan(shards=shards, precision=cast("Precision", precision)).fit(ranks)


def read(where: "Plan | str | Path") -> Plan | None:
    """Return a plan unchanged, or read it from a JSON file. Returns None for "auto"."""
    if isinstance(where, Plan):
        return where
    if where == "auto":
        return None
    path = Path(where)
    if not path.is_file():
        raise ValueError(
            f"plan {str(where)!r} is neither 'auto' nor the path of a file with the text of "
            "`Plan.to_json`"
        )
    return Plan.from_json(path.read_text())
