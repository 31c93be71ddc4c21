"""The options of sbatch that a task may set, of https://slurm.schedmd.com/sbatch.html. Those that
name files, other clusters or users, and those that Cavvy needs itself, are not among them.
"""

# those that say how large a job is, by what they say
SIZES = {
    "cpus": (
        *("ntasks", "ntasks-per-node", "ntasks-per-core", "ntasks-per-socket", "ntasks-per-gpu"),
        *("cpus-per-task", "cpus-per-gpu", "mincpus"),
    ),
    "memory": ("mem", "mem-per-cpu", "mem-per-gpu"),
    "gpus": ("gres", "gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket"),
}
TAKEN_OPTIONS = (
    *(option for options in SIZES.values() for option in options),
    *("account", "qos", "partition", "constraint", "prefer", "reservation", "nodelist", "exclude"),
    *("licenses", "exclusive", "oversubscribe", "overcommit", "contiguous", "spread-job", "tmp"),
    *("gpu-bind", "gpu-freq", "gres-flags", "hint", "distribution", "cores-per-socket"),
    *("sockets-per-node", "threads-per-core", "extra-node-info", "core-spec", "thread-spec"),
    *("switches", "segment", "network", "dependency", "kill-on-invalid-dep", "begin", "deadline"),
    *("delay-boot", "time-min", "nice", "priority", "wckey", "mail-type", "mail-user", "profile"),
)
