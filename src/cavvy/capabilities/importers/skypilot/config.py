"""Translates SkyPilot's `config`. Some settings in `config` affect the work; all other settings
concern only SkyPilot itself.
"""

import json
import re
from collections.abc import Collection

from cavvy.capabilities.importers.readers import as_text, child, entries, items
from cavvy.domain.tasks import ProviderOptions
from cavvy.spec.kept_keys import TranslationNotes
from cavvy.spec.tree import MapNode, Node, ScalarNode, to_value

# Clouds that have a section in `config`.
_CLOUDS = ("aws", "gcp", "azure", "kubernetes", "ssh", "slurm", "vast")

# Keys that change how SkyPilot obtains a node, but not the node itself.
_NOTED = frozenset(
    [
        *("active_workspace", "allowed_clouds", "api_server", "daemons", "db", "jobs", "logs"),
        *("provision", "rbac", "serve", "nvidia_gpus", "gcp.enable_gpu_direct"),
        *("gcp.enable_gvnic", "gcp.managed_instance_group"),
        *("gcp.placement_policy", "gcp.prioritize_reservations", "aws.prioritize_reservations"),
        *(
            f"kubernetes.{key}"
            for key in (
                *("allowed_contexts", "autoscaler", "custom_metadata", "fuse", "high_availability"),
                *("dws", "kueue", "quota"),
                *("networking", "ports", "provision_timeout", "set_pod_resource_limits"),
            )
        ),
        *("slurm.provision_timeout", "ssh.provision_timeout", "vast.datacenter_only"),
    ]
)


# Advice for some refused settings: what to write instead.
_INSTEAD = {
    "hooks": "; write the commands as a `trap` in `run`",
    "kubernetes.remote_identity": "; write `pod_config: {spec: {serviceAccountName: NAME}}`",
    "slurm": "; `sbatch_options` of `[providers.slurm]` apply to all jobs",
    "docker": "; a job's container can use the GPUs, the network and the shared memory of its node",
}
_OPTIONS = ("pod_config", "enable_docker")


def read_options(config: Node | None) -> tuple[ProviderOptions, ...]:
    """Return the settings that become the task's options for Kubernetes: fields of pods, and a
    container engine.
    """
    pod, docker = (
        None if node is None else to_value(node)
        for node in (child(child(config, "kubernetes"), name) for name in _OPTIONS)
    )
    if not isinstance(docker, dict):
        docker = {"mode": "all" if docker is True else docker}
    mode, cache = docker.get("mode"), docker.get("cache_volume")
    options: dict[str, object] = {} if pod is None else {"pod": pod}
    if mode:
        mode = str(mode).lower()
        options["docker"] = {"mode": mode, "cache": cache} if cache else mode
    if not options:
        return ()
    return (ProviderOptions(provider="kubernetes", values=json.dumps(options, default=str)),)


def _are_met(options: Node) -> bool:
    """Return whether these options of the container engine request only GPUs and the node's shared
    memory, which every job's container already has.
    """
    texts = [each for each in (options, *items(options)) if isinstance(each, ScalarNode)]
    known = r"(--(shm-size|gpus|ipc)([= ]\S+)?\s*)+"
    return all(re.fullmatch(known, as_text(each).strip()) for each in texts)


def keep_config(
    config: Node | None, clouds: Collection[str], is_image: bool, kept_keys: TranslationNotes
) -> None:
    """Refuse each untranslated setting that the work may need, and add a note for each other
    untranslated setting. Whether the work may need a setting depends on two facts: on which
    `clouds` the job may run (empty means any cloud), and whether the job runs in an image.
    """
    for key, section in entries(config):
        keys = entries(section) if isinstance(section, MapNode) else [(key, section)]
        for inner, value in keys:
            path = key.text if inner is key else f"{key.text}.{inner.text}"
            where = f"config.{path}"
            if (key.text == "kubernetes" and inner.text in _OPTIONS) or (
                isinstance(value, MapNode) and not value.entries
            ):
                continue
            if path in _NOTED or key.text in _NOTED:
                kept_keys.note(inner.mark, where, "the setting only concerns SkyPilot itself")
            elif key.text in _CLOUDS and key.text not in clouds:
                reason = f"the setting is not passed on if the job runs on {key.text}"
                if clouds:
                    reason = f"the job does not run on {key.text}"
                kept_keys.note(inner.mark, where, reason)
            elif path == "docker.run_options" and _are_met(value):
                kept_keys.note(
                    inner.mark, where, "a job's container can use all of these without the options"
                )
            elif key.text == "docker" and not is_image:
                kept_keys.note(inner.mark, where, "the job does not run in a container")
            else:
                advice = _INSTEAD.get(path) or _INSTEAD.get(key.text, "")
                reason = f"this SkyPilot setting has no effect in Cavvy{advice}"
                kept_keys.refuse(inner.mark, where, reason)
