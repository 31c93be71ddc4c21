"""What of a batch script counts only on a Slurm cluster: the options that a job there gets as they
are, beside those that Cavvy reads and sets itself."""

import json
from collections.abc import Mapping

from cavvy.capabilities.importers.script_lines import ScriptOption
from cavvy.domain.slurm_options import TAKEN_OPTIONS
from cavvy.domain.tasks import ProviderOptions

PROVIDER = "slurm"


def make_options(found: Mapping[str, ScriptOption]) -> tuple[ProviderOptions, ...]:
    """Return the options of the provider for Slurm, with which `sbatch` gets those of a script."""
    words = [
        f"--{name}={option.value}" if option.value else f"--{name}"
        for name, option in found.items()
        if name in TAKEN_OPTIONS
    ]
    return (ProviderOptions(provider=PROVIDER, values=json.dumps({"sbatch": words})),)
