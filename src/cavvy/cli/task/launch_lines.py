"""Adds what a launcher of processes must know of the other nodes to a command for several nodes.

Without it, `cavvy run --nodes 2 -- accelerate launch train.py` would train once on each node.
"""

import shlex
from collections.abc import Sequence

_PLACE = '"$MASTER_ADDR"', '"$MASTER_PORT"'
_EACH = '"$NPROC_PER_NODE"'
_TORCH = {
    "nnodes": '"$NNODES"',
    "node-rank": '"$NODE_RANK"',
    "nproc-per-node": _EACH,
    "master-addr": _PLACE[0],
    "master-port": _PLACE[1],
}
_LIGHTNING = {
    "num-nodes": '"$NNODES"',
    "node-rank": '"$NODE_RANK"',
    "devices": _EACH,
    "main-address": _PLACE[0],
    "main-port": _PLACE[1],
}
# the words of each launcher, and its options with their values; those of processes come last
_LAUNCHERS: tuple[tuple[tuple[str, ...], dict[str, str]], ...] = (
    (
        ("accelerate", "launch"),
        {
            "num_machines": '"$NNODES"',
            "machine_rank": '"$NODE_RANK"',
            "main_process_ip": _PLACE[0],
            "main_process_port": _PLACE[1],
            "num_processes": '"$((NNODES * NPROC_PER_NODE))"',
        },
    ),
    (("torchrun",), _TORCH),
    (("python", "-m", "torch.distributed.run"), _TORCH),
    (("python3", "-m", "torch.distributed.run"), _TORCH),
    (("lightning", "run", "model"), _LIGHTNING),
    (("fabric", "run"), _LIGHTNING),
)
_COUNTS = ("num_processes", "nproc-per-node", "devices")  # which the user may state alone
_OTHERS = ("rdzv-endpoint", "rdzv-backend", "standalone")


def add_other_nodes(words: Sequence[str]) -> tuple[str, str] | None:
    """Return a command line with what its launcher must know, and the launcher. Returns None if the
    command has no launcher, or says itself where the other nodes are.
    """
    for name, options in _LAUNCHERS:
        if tuple(words[: len(name)]) != name:
            continue
        given = {word.lstrip("-").partition("=")[0].replace("_", "-") for word in words}
        stated = {each for each in options if each.replace("_", "-") in given}
        if stated - set(_COUNTS) or given & set(_OTHERS):
            return None
        added = [f"--{key} {value}" for key, value in options.items() if key not in stated]
        line = " ".join((shlex.join(name), *added, shlex.join(words[len(name) :])))
        return line, " ".join(name)
    return None
