"""A plain PyTorch training loop that runs on any number of devices and survives the loss of
devices.
The loop works inside a Cavvy job and without Cavvy.

    from cavvy import train

    run = train.Run("checkpoints")
    model = run.model(Net)
    optimizer = run.optimizer(torch.optim.AdamW, lr=3e-4)
    data = run.data(train.Tensors(images, labels), global_batch=64)

    def loss(part):
        return F.cross_entropy(model(part[0]), part[1])

    for batch in run.batches(data, epochs=10):
        value = run.accumulate(loss, batch)
        run.step(optimizer, clip=1.0)
        run.log(loss=value)

This package imports no other module of Cavvy.
"""

try:
    from cavvy.train.checkpoint.async_saver import CheckpointNotSaved, CheckpointUnreadable
    from cavvy.train.checkpoint.notice import AGAIN
    from cavvy.train.clock import Meter, StepRecord
    from cavvy.train.data import Data, Source, Tensors, open_source, register_reader
    from cavvy.train.micro import OutOfMemory
    from cavvy.train.parallel.replicas import RanksDiverged
    from cavvy.train.plan import Plan
    from cavvy.train.run import Run, observers
    from cavvy.train.trackers import Tracker, open_tracker, track
except ModuleNotFoundError as error:
    if error.name not in ("torch", "grain", "absl", "numpy"):
        raise
    import sys

    need = (
        f"cavvy.train requires {error.name}; install it with "
        f"{sys.executable} -m pip install torch grain numpy"
    )
    raise ImportError(need, name=error.name) from error

__all__ = [
    "AGAIN",
    "CheckpointNotSaved",
    "CheckpointUnreadable",
    "Data",
    "Meter",
    "OutOfMemory",
    "Plan",
    "RanksDiverged",
    "Run",
    "Source",
    "StepRecord",
    "Tensors",
    "Tracker",
    "observers",
    "open_source",
    "open_tracker",
    "register_reader",
    "track",
]
