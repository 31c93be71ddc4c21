"""Maps command and option names of other tools, and synonyms, to the matching command or option of
Cavvy.
"""

from collections.abc import Collection

# Unknown commands -> the replacement that the error message suggests.
_ADVICE = {
    "launch apply submit create": "`cavvy run TASK.YAML` runs a task; with --machine NAME, the "
    "machine is kept for later jobs",
    "jobs runs list ls": "`cavvy ps` lists jobs",
    "attach tail": "`cavvy logs -f NAME` follows a job, `cavvy ssh NAME` logs in to its node",
    "kill cancel terminate abort": "`cavvy stop NAME` stops a job",
    "delete remove prune": "`cavvy rm NAME` removes a job that has ended; to stop a job first, "
    "use `cavvy stop NAME`",
    "show-gpus gpus offer instances": "`cavvy offers --accelerators` lists accelerators and prices",
    "info describe show get inspect metrics top": "`cavvy status NAME` shows a job",
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
    "preempt": "`cavvy drill preempt NAME` preempts a job",
    "secrets": "`cavvy secret list` lists secrets, `cavvy secret set NAME` sets a secret",
    "cron schedule": "`cavvy schedules` lists jobs that repeat",
    "api daemon": "`cavvy server status` shows the server",
    "fleet fleets cluster clusters node": "`cavvy nodes` lists nodes, `cavvy machines` lists "
    "named machines, `cavvy join` adds a machine",
    "price prices optimize": "`cavvy plan TASK.YAML` ranks offers with their cost",
    "config setup": "`cavvy check` shows which providers are configured",
    "autostop idle extend": "`cavvy machines keep NAME 1h` sets how long a machine waits for work",
    "machine": "`cavvy machines` lists machines that are kept between jobs",
    "dev-environment ide notebook jupyter code": "`cavvy dev` gets a machine for interactive work",
    "dismiss": "`cavvy joined dismiss NAME` dismisses a machine that joined",
    "service gateway": "`cavvy serve FILE` starts a service, `cavvy services` lists services",
    "pool pools": "pools of workers do not exist yet",
    "storage volume volumes bucket": "name storage in a task's `inputs`, `outputs` or `volumes`",
}

# Unknown options -> the options to use instead. A command may have only some of the replacements.
_OPTIONS = {
    "--infra": ("--provider", "--region"),
    "--cloud": ("--provider",),
    "--backend": ("--provider",),
    "--gpus": ("--gpu",),
    "-c": ("--machine",),
    "--cluster": ("--machine",),
    "-i": ("--keep",),
    "--idle-minutes-to-autostop": ("--keep",),
    "--max-duration": ("--deadline",),
    "--image-id": ("--image",),
    "--use-spot": ("--spot",),
    "--on-demand": ("--no-spot",),
    "--idle-duration": ("--keep",),
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
    """Return the replacement for an unknown option, or "" if the option is not a known synonym.
    `known` contains the options of the command.
    """
    instead = [each for each in _OPTIONS.get(option, ()) if each in known]
    if instead:
        return "use " + " or ".join(instead)
    return _TASK_OPTIONS.get(option, "") if "--gpu" in known else ""
