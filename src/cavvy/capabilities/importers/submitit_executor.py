"""An executor of submitit, which submits Python functions as jobs of Cavvy:
`submitit.AutoExecutor(folder="log", cluster="cavvy")`.

submitit loads this module by its entry points, and Cavvy itself never imports it. A function is
pickled here, and sent beside the current folder. On the node, submitit's own program runs it in a
folder that is a checkpoint of the job, from which its result is fetched when the job has ended. The
node needs submitit and the same Python, and nothing of Cavvy. What plug-ins implement is in
https://github.com/facebookincubator/submitit/blob/main/docs/plugins.md.
"""

import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from shlex import quote
from tempfile import mkdtemp
from typing import Any, ClassVar, TypeVar

from submitit.core import core, utils
from submitit.core.job_environment import JobEnvironment

from cavvy.capabilities.importers.submitit_results import fetch_results
from cavvy.sdk.client import Client
from cavvy.sdk.errors import CavvyError, JobNotFound
from cavvy.sdk.task import Task

_R = TypeVar("_R")
_FOLDER = "submitit"  # the checkpoint, in the working folder of the job
_AGAIN = 144  # submitit's exit code for "run me again from my checkpoint"
_PHASES = {
    **{"queued": "PENDING", "starting": "PENDING", "running": "RUNNING", "done": "COMPLETED"},
    **{"stopping": "COMPLETING", "failed": "FAILED", "stopped": "CANCELLED"},
}
_ENDED = ("COMPLETED", "FAILED", "CANCELLED")
# keys of a task file that `cavvy_NAME` of `update_parameters` sets, and others
_KEYS = ("image", "env", "project", "pool", "machine", "retry", "secrets", "volumes", "tags")
_NEEDS = ("gpu", "spot", "disk", "providers", "regions", "max_price", "network")
_OWN = ("array_parallelism", "consent", "max_cost", "packages", "python", "setup")
# Each task is a process. A notice of the agent becomes the signal on which submitit saves, and so
# does the end of the time, for which submitit's own `timeout_min` stands.
_RUN = """\
_python={python}
_has="$("$_python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
[ "$_has" = {version} ] || {{
  echo "the function was pickled by Python {version}, and the node has Python $_has" >&2
  exit 1
}}
_folder="$CAVVY_CHECKPOINT_DIR"
export SUBMITIT_EXECUTOR=local SUBMITIT_LOCAL_JOB_ID="$CAVVY_JOB_ID"
export SUBMITIT_LOCAL_NTASKS={tasks} SUBMITIT_LOCAL_JOB_NUM_NODES=1 SUBMITIT_LOCAL_NODEID=0
[ -e "$_folder/${{CAVVY_JOB_ID}}_submitted.pkl" ] ||
  cp {pickles}/"${{CAVVY_ARRAY_INDEX:-0}}.pkl" "$_folder/${{CAVVY_JOB_ID}}_submitted.pkl" || exit
_all= _told=
trap '_told=1; for _each in $_all; do kill -USR2 "$_each"; done' TERM
for _rank in $(seq 0 {last}); do
  SUBMITIT_LOCAL_LOCALID="$_rank" SUBMITIT_LOCAL_GLOBALID="$_rank" \\
    "$_python" -u -m submitit.core._submit "$_folder" &
  _all="$_all $!"
done
(
  trap 'kill "$!"; exit' TERM
  sleep {save_s} & wait "$!"
  for _each in $_all; do kill -USR2 "$_each"; done
  sleep {left_s} & wait "$!"
  for _each in $_all; do kill -KILL "$_each"; done
) >/dev/null 2>&1 &
_timer=$!
_code=0
for _each in $_all; do
  wait "$_each"
  _own=$?
  while [ -n "$_told" ]; do  # the notice has interrupted the wait
    _told=
    wait "$_each"
    _own=$?
  done
  [ "$_own" -gt "$_code" ] && _code="$_own"
done
kill "$_timer" 2>/dev/null
exit "$_code"
"""


class CavvyInfoWatcher(core.InfoWatcher):  # type: ignore[misc,unused-ignore]  # without types here
    """Asks the server for the states of the jobs of this process."""

    def __init__(self, delay_s: int = 60) -> None:
        super().__init__(delay_s)
        self._client: Client | None = None

    @property
    def client(self) -> Client:
        """The client of the server of this machine, which is started if necessary."""
        if self._client is None:
            self._client = Client()
        return self._client

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        """Return the state of a job in submitit's words."""
        return str(self.get_info(job_id, mode=mode).get("State") or "UNKNOWN")

    def update(self) -> None:
        """Ask for the state of each job that has not ended."""
        for job_id in self._registered - self._finished:
            try:
                status = self.client.status(job_id)
            except JobNotFound:
                self._info_dict[job_id] = {"State": "CANCELLED"}
            except CavvyError:
                continue  # a server that does not answer does not end a job
            else:
                self._info_dict[job_id] = {"State": _PHASES[status.phase], "JobName": status.name}
            if self._info_dict[job_id]["State"] in _ENDED:
                self._finished.add(job_id)
        self._num_calls += 1
        self._last_status_check = time.time()  # noqa: TID251  # of submitit, which compares it


class CavvyJob(core.Job[_R]):  # type: ignore[misc,unused-ignore]  # without types here
    """A function that runs as a job of Cavvy. `job_id` is the job's ID, which `cavvy` knows."""

    watcher = CavvyInfoWatcher(delay_s=5)

    def done(self, force_check: bool = False) -> bool:
        """Return whether the job has ended; its results are then on this machine."""
        if self._sub_jobs:
            return all(each.done(force_check) for each in self._sub_jobs)
        if self.paths.result_pickle.exists():
            return True
        if not self.watcher.is_done(self.job_id, mode="force" if force_check else "standard"):
            return False
        with suppress(CavvyError):  # a job without results, which `result` explains
            fetch_results(self.watcher.client, self.job_id, self.paths.folder)
        return True

    def cancel(self, check: bool = True) -> None:
        """Stop the job. With `check`, wait until it has ended."""
        self.watcher.client.stop(self.job_id, wait=check)

    def _get_logs_string(self, name: str) -> str | None:
        with suppress(CavvyError):  # the log of a job has both
            return "\n".join(self.watcher.client.logs(self.job_id))
        return None


class CavvyJobEnvironment(JobEnvironment):  # type: ignore[misc,unused-ignore]  # without types here
    """The environment of a function on a node; there, submitit's own environment for processes is
    active, so that nodes need nothing of Cavvy."""

    _env: ClassVar[dict[str, str]] = {"job_id": "CAVVY_JOB_ID"}

    def activated(self) -> bool:
        """Return False: the environment of processes is active."""
        return False

    def _requeue(self, countdown: int) -> None:
        sys.exit(_AGAIN)


class CavvyExecutor(core.PicklingExecutor):  # type: ignore[misc,unused-ignore]  # without types here
    """Submits functions as jobs of Cavvy. `folder` is where results and logs are kept here. Raises
    CavvyError if the server refuses a job, such as for its costs, to which `cavvy_consent=True` or
    `cavvy_max_cost=5` agrees.
    """

    job_class = CavvyJob

    @classmethod
    def affinity(cls) -> int:
        """Return 0: this executor is used when it is asked for."""
        return 0

    @classmethod
    def _valid_parameters(cls) -> set[str]:
        return {*_KEYS, *_NEEDS, *_OWN}

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        if int(kwargs.get("nodes", 1)) > 1:
            raise ValueError(
                "a function runs on one node here: nodes=1; a task file with `nodes` starts a "
                "command on several"
            )
        super()._internal_update_parameters(**kwargs)

    def _num_tasks(self) -> int:
        return int(self.parameters.get("tasks_per_node", 1))

    def _internal_process_submissions(
        self, delayed_submissions: list[utils.DelayedSubmission]
    ) -> list[core.Job[Any]]:
        """Submit functions: one as a job, and several as an array."""
        sent = Path(mkdtemp(prefix=".submitit-", dir=Path.cwd()))
        self.folder.mkdir(parents=True, exist_ok=True)
        timeout = float(self.parameters.get("timeout_min", 5))
        try:
            for index, delayed in enumerate(delayed_submissions):
                delayed.set_timeout(timeout, self.max_num_timeout)
                delayed.dump(sent / f"{index}.pkl")
            self._check_size(sent)
            ids = self._submit(sent.name, len(delayed_submissions))
        finally:
            for each in sent.iterdir():
                each.unlink()
            sent.rmdir()
        tasks = list(range(self._num_tasks()))
        jobs: list[core.Job[Any]] = []
        for job_id, delayed in zip(ids, delayed_submissions, strict=True):
            job: CavvyJob[Any] = CavvyJob(self.folder, job_id, tasks)
            job.paths.folder.mkdir(parents=True, exist_ok=True)
            delayed.dump(job.paths.submitted_pickle)
            jobs.append(job)
        return jobs

    def _check_size(self, folder: Path) -> None:
        size = sum(each.stat().st_size for each in folder.iterdir())
        if size > self.max_pickle_size_gb * 1024**3:
            raise RuntimeError(
                f"the functions and their arguments are {size / 1024**3:.2f} GB, and "
                f"max_pickle_size_gb is {self.max_pickle_size_gb}: pass paths, or raise it"
            )

    def _submit(self, sent: str, count: int) -> list[str]:
        """Return the IDs of the jobs."""
        client = CavvyJob.watcher.client
        given = {
            key: self.parameters[key] for key in ("consent", "max_cost") if key in self.parameters
        }
        name, task = self.parameters.get("name"), self._make_task(sent)
        if count == 1:
            return [client.submit(task, name=name, **given).id]
        array = client.submit_array(
            task,
            array=f"0-{count - 1}",
            parallel=self.parameters.get("array_parallelism"),
            name=name,
            **given,
        )
        return [array.job(index).id for index in range(count)]

    def _make_task(self, sent: str) -> Task:
        """Return the task that runs what the folder `sent` holds."""
        stated, tasks = self.parameters, self._num_tasks()
        needs: dict[str, Any] = {key: stated[key] for key in _NEEDS if key in stated}
        if "cpus_per_task" in stated:
            needs["cpu"] = tasks * int(stated["cpus_per_task"])
        if "mem_gb" in stated:
            needs["memory"] = f"{stated['mem_gb']}GB"
        if gpus := int(stated.get("gpus_per_node", 0)):
            needs["gpu"] = f"{needs.get('gpu', 'any')}:{gpus}"
        seconds = round(60 * float(stated.get("timeout_min", 5)))
        save_s = max(1, seconds - int(stated.get("signal_delay_s", 30)))
        python = str(stated.get("python", "python3"))
        run = _RUN.format(
            python=quote(python),
            version=f"{sys.version_info[0]}.{sys.version_info[1]}",
            tasks=tasks,
            last=tasks - 1,
            pickles=quote(sent),
            save_s=save_s,
            left_s=max(1, seconds - save_s),
        )
        keys: dict[str, Any] = {key: stated[key] for key in _KEYS if key in stated}
        keys.setdefault("retry", {"exit": self.max_num_timeout, "exit_codes": [_AGAIN]})
        return Task(
            f"exec bash -c {quote(run)}",
            workdir=os.curdir,
            checkpoint={"path": _FOLDER},
            resources=needs,  # type: ignore[arg-type]  # read as text
            setup=self._make_setup(python),
            grace=timedelta(seconds=30),
            **keys,
        )

    def _make_setup(self, python: str) -> Any:
        """Return what installs submitit, and what `cavvy_packages` names."""
        own = [f"{name}=={version(name)}" for name in ("submitit", "cloudpickle")]
        named: Sequence[str] = self.parameters.get("packages", ())
        lines = [f"{quote(python)} -m pip install -q {' '.join(map(quote, [*own, *named]))}"]
        run = "\n".join([*lines, *self.parameters.get("setup", ())])
        return run if "image" in self.parameters else {"run": run, "uses": []}

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return command  # of executors with files for a command of a cluster

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return [str(submission_file_path)]

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        return str(string)
