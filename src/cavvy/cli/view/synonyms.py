"""Maps command and option names of other tools, and synonyms, to the matching command or option of
Cavvy.
"""

from collections.abc import Collection, Sequence
from difflib import get_close_matches

# Unknown commands -> the replacement that the error message suggests.
_ADVICE = {
    "launch apply submit create sbatch srun qsub": "`cavvy run TASK.YAML` runs a task; with "
    "--machine NAME, the machine is kept for later jobs",
    "jobs runs list ls squeue qstat sacct": "`cavvy ps` lists jobs",
    "attach tail": "`cavvy logs -f NAME` follows a job, `cavvy ssh NAME` logs in to its node",
    "kill cancel terminate abort scancel qdel": "`cavvy stop NAME` stops a job",
    "delete remove prune": "`cavvy rm NAME` removes a job that has ended; to stop a job first, "
    "use `cavvy stop NAME`",
    "show-gpus gpus offer instances": "`cavvy offers --accelerators` lists accelerators and prices",
    "info describe show get inspect metrics": "`cavvy status NAME` shows a job",
    "dashboard ui web gui": "`cavvy console` shows jobs, services and costs in a browser",
    "history event": "`cavvy events NAME` shows a job's history",
    "shell connect": "`cavvy ssh NAME` opens a shell on a job's node",
    "rsync scp copy": "`cavvy cp SOURCE TARGET` copies files to or from a node",
    "port-forward tunnel endpoints": "`cavvy forward NAME PORT` makes a port of a job's node "
    "reachable on this machine",
    "cost-report bill billing spend usage costs": "`cavvy cost` shows spending",
    "start": "`cavvy rerun NAME` runs a job again, `cavvy machines start NAME` starts a stopped "
    "machine",
    "restart resume relaunch": "`cavvy rerun NAME` runs a job again unchanged",
    "preempt": "`cavvy nodes drill preempt NAME` preempts a job",
    "secrets": "`cavvy secret list` lists secrets, `cavvy secret set NAME` sets a secret",
    "cron schedule": "`cavvy schedules` lists jobs that repeat",
    "api daemon": "`cavvy server status` shows the server",
    "fleet fleets cluster clusters node sinfo pbsnodes": "`cavvy nodes` lists nodes, "
    "`cavvy machines` lists named machines, `cavvy nodes join` adds a machine",
    "price prices optimize": "`cavvy plan TASK.YAML` ranks offers with their cost",
    "config configure": "`cavvy setup PROVIDER` sets up a provider, `cavvy check` shows all",
    "autostop idle extend": "`cavvy machines keep NAME 1h` sets how long a machine waits for work",
    "kubectl": "`cavvy run TASK.YAML` runs a task, `cavvy ps` lists jobs, `cavvy status NAME` "
    "shows one, `cavvy logs -f NAME` follows its log",
    "version": "`cavvy --version` prints the version",
    "help man": "`cavvy COMMAND --help` describes a command",
    "machine": "`cavvy machines` lists machines that are kept between jobs",
    "dev-environment ide notebook jupyter code": "`cavvy dev` gets a machine for interactive work",
    "dismiss": "`cavvy nodes joined dismiss NAME` dismisses a machine that joined",
    "service gateway": "`cavvy serve FILE` starts a service, `cavvy services` lists services",
    "storage volume volumes bucket": "name storage in a task's `inputs`, `outputs` or `volumes`",
}

# Unknown options -> what to use instead; a command may have only some of these options.
_OPTIONS = {
    "--infra": ("--provider", "--region"),
    "--cloud": ("--provider",),
    "--backend": ("--provider",),
    "--zone": ("--region",),
    "--gpus": ("--gpu",),
    "--accelerator": ("--gpu",),
    "--vram": ("--gpu 40GB.. (memory of one GPU)",),
    "--gpu-memory": ("--gpu 40GB.. (memory of one GPU)",),
    "--cpu": ("--cpus",),
    "--vcpus": ("--cpus",),
    "--mem": ("--memory",),
    "--ram": ("--memory",),
    "--price": ("--max-price",),
    "--disk-size": ("--disk",),
    "--instance-type": ("--instance",),
    "--json": ("-o json",),
    "--csv": ("-o csv",),
    "--format": ("-o json",),
    "--lines": ("--tail",),
    "-c": ("--machine",),
    "--cluster": ("--machine",),
    "-i": ("--keep",),
    "--idle-minutes-to-autostop": ("--keep",),
    "--max-duration": ("--deadline",),
    "--image-id": ("--image",),
    "--use-spot": ("--spot",),
    "--on-demand": ("--no-spot",),
    "--idle-duration": ("--keep",),
    "--detached": ("--detach",),
    "--background": ("--detach",),
    "--force": ("--yes",),
    "-f": ("--yes",),
    "-a": ("--all",),
    "-n": ("--name",),
    "-e": ("--env",),
}
# Unknown options of commands that take a task -> what to do instead.
_TASK_OPTIONS = {
    "--instance-type": "set `resources.instance` in a task file",
    "--cpus": "set `resources.cpu` in a task file",
    "--memory": "set `resources.memory` in a task file",
    "--disk-size": "set `resources.disk` in a task file",
    "--cpu": "set `resources.cpu` in a task file",
    "--disk": "set `resources.disk` in a task file",
    "--disk-tier": "set `resources.disk` in a task file",
    "--priority": "set `priority` in a task file",
    "--zone": "set `resources.options` in a task file",
    "--secret-file": "store each secret with `cavvy secret set NAME`",
    "--replicas": "set `service.replicas` in a task file",
    "--port": "set `service.port` in a task file",
    "--timeout": "set `limits.duration` in a task file",
    "--ports": "`cavvy forward NAME PORT` forwards a port to this machine",
    "--retry-until-up": "a job waits in the queue until a node is available",
    "--num-jobs": "repeat the command for each job, with --env SKYPILOT_JOB_RANK=N",
    "-f": "write the file without -f",
    "--profile": "the environment variable DSTACK_PROFILE names a profile of dstack",
    "--no-profile": "DSTACK_NO_PROFILE=1 ignores the profiles of dstack",
    "--down": "nodes are released when the work ends, unless --keep is given",
}


def find_advice(word: str) -> str:
    """Return the replacement for an unknown command, or "" if the word is not a known synonym."""
    found = (advice for words, advice in _ADVICE.items() if word in words.split())
    return next(found, "")


def find_option(option: str, known: Collection[str]) -> str:
    """Return what to use instead of an unknown option, or "" if no option of the command comes
    close. `known` contains the options of the command.
    """
    if "--env" in known and option in _TASK_OPTIONS:  # a command that takes a task
        return _TASK_OPTIONS[option]
    instead = [each for each in _OPTIONS.get(option, ()) if each.split()[0] in known]
    if instead:
        return "use " + " or ".join(instead)
    if close := _list_close(option, known):
        return f"did you mean {' or '.join(close)}?"
    return ""


def _list_close(option: str, known: Collection[str]) -> Sequence[str]:
    """Return at most two options of which the unknown one is a part or a misspelling. The leading
    dashes do not count, since all options share them.
    """
    word = option.strip("-")
    long = {each.strip("-"): each for each in sorted(known) if each.startswith("--")}
    if len(word) < 3:
        return []
    parts = [name for name in long if word in name.split("-") or name in word.split("-")]
    return [long[name] for name in (parts or get_close_matches(word, long, n=2, cutoff=0.65))[:2]]
