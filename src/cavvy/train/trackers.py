"""A common interface, `log(values, step)` and `close()`, to TensorBoard, W&B, MLflow, Aim and
trackio. Each tracker requires its own Python package.
"""

import atexit
import logging
import os
import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from secrets import token_hex
from time import monotonic, strftime
from types import SimpleNamespace
from typing import Any, Protocol

from cavvy.train.clock import Meter, StepRecord
from cavvy.train.progress import plain

# seconds between two rows; each row waits until the loss has been read from the device
EVERY_S = 1.0


class Tracker(Protocol):
    def log(self, values: dict[str, float], step: int, /) -> None: ...
    def close(self) -> None: ...


def _tensorboard(name: str, folder: str) -> Any:
    writer = import_module("torch.utils.tensorboard").SummaryWriter(
        os.path.join(folder or "runs", name)
    )

    def log(values: dict[str, float], step: int) -> None:
        for key, value in values.items():
            writer.add_scalar(key, value, step)

    return SimpleNamespace(log=log, close=writer.close)


def _wandb(name: str, folder: str) -> Any:
    options = {"dir": folder} if folder else {}
    run = import_module("wandb").init(
        project=_project(), name=name, id=name, resume="allow", **options
    )
    return SimpleNamespace(log=lambda values, step: run.log(values, step=step), close=run.finish)


def _mlflow(name: str, folder: str) -> Any:
    mlflow = import_module("mlflow")
    if folder:
        mlflow.set_tracking_uri(f"sqlite:///{os.path.join(os.path.abspath(folder), 'mlflow.db')}")
    mlflow.set_experiment(_project())
    before = mlflow.search_runs(
        filter_string=f"attributes.run_name = '{name}'", output_format="list", max_results=1
    )
    said = {"run_id": before[0].info.run_id} if before else {"run_name": name}
    mlflow.start_run(**said)
    return SimpleNamespace(
        log=lambda values, step: mlflow.log_metrics(values, step=step), close=mlflow.end_run
    )


def _aim(name: str, folder: str) -> Any:
    aim, project = import_module("aim"), _project()
    repo = import_module("aim.sdk.repo_utils").get_repo(folder or None)
    rows = (
        repo.structured_db.search_runs(name) if repo.structured_db is not None else ()
    )  # A remote server has no local database.
    before = next(
        (row.hash for row in rows if row.name == name and row.experiment == project), None
    )
    run = aim.Run(
        before, repo=repo, experiment=project, force_resume=before is not None
    )  # A machine that was lost may still hold the lock of the run.
    run.name = name

    def log(values: dict[str, float], step: int) -> None:
        for key, value in values.items():
            run.track(value, name=key, step=step)

    return SimpleNamespace(log=log, close=run.close)


def _trackio(name: str, folder: str) -> Any:
    if folder:
        os.environ.setdefault("TRACKIO_DIR", folder)
    run = import_module("trackio").init(project=_project(), name=name, resume="allow", embed=False)
    return SimpleNamespace(log=lambda values, step: run.log(values, step=step), close=run.finish)


MAKERS: dict[str, Callable[[str, str], Tracker]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
    "aim": _aim,
    "trackio": _trackio,
}


def open_tracker(kind: str, *, name: str = "", folder: str = "") -> Tracker:
    """Open a tracker of this kind. If a run called `name` exists, it is continued, except on an Aim
    server. Without `name`, the job's earlier run is continued; outside a job, a new run is created.

    Raises:
        ValueError: the kind is unknown, or its package is not installed.
    """
    if kind not in MAKERS:
        raise ValueError(f"tracker {kind!r} is not one of {', '.join(MAKERS)}")
    try:
        return MAKERS[kind](name or name_run(), folder)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"tracker {kind} needs {error.name}; install it with pip install {kind}"
        ) from error


def name_run(before: str | None = None) -> str:
    """Return the ID of the job. Outside a job, return the name of the continued run (`before`) or
    else a new name, which consists of the script's name, the time, and four random digits.

    The result contains only letters, digits, - and _, which all trackers accept.
    """
    script = Path(sys.argv[0])
    words = script.parent.name if script.stem == "__main__" else script.stem
    plain = re.sub(r"[^0-9A-Za-z_]+", "-", words).strip("-") or "run"
    new = f"{plain}-{strftime('%Y%m%d-%H%M%S')}-{token_hex(2)}"
    return os.environ.get("CAVVY_JOB_ID") or before or new


def track(run: Any, *trackers: "Tracker | str", meter: Meter | None = None) -> None:
    """Send the values of `run.log`, rates and costs to trackers, about once a second, from rank 0.

    train.track(run, "tensorboard", "trackio")

    A tracker that fails is reported once and removed; the training continues.
    """
    if not run.world.is_first:
        return
    if meter is not None:
        run.progress.measure(meter)
    opened = [
        open_tracker(each, name=run.name) if isinstance(each, str) else each for each in trackers
    ]
    run.clock.listeners.append(
        _Sender(run, opened, meter or Meter(run.world.device, run.world.size)).hear
    )


class _Sender:
    def __init__(self, run: Any, trackers: list[Tracker], meter: Meter) -> None:
        self._run, self._trackers, self._meter, self._next = run, trackers, meter, 0.0
        atexit.register(self._all, lambda tracker: tracker.close())

    def hear(self, record: StepRecord) -> None:
        self._meter.hear(record)
        if not self._meter.samples and self._run._open:
            self._meter.samples = self._run._open[-1].length
        if monotonic() < self._next:
            return
        self._next = monotonic() + EVERY_S
        said = {name: plain(value) for name, value in record.values.items()}
        values = {
            name: float(value) for name, value in said.items() if isinstance(value, int | float)
        }
        values |= self._meter.read()
        self._all(lambda tracker: tracker.log(dict(values), record.step))

    def _all(self, call: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                call(tracker)
            except Exception:  # A tracker that fails must not stop the training.
                logging.getLogger("cavvy.train").exception(
                    "a tracker failed and receives no more values"
                )
                self._trackers.remove(tracker)


def _project() -> str:
    return os.environ.get("CAVVY_PROJECT") or "cavvy"
