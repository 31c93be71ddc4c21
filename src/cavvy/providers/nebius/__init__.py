"""Nebius AI Cloud: each node is one virtual machine that starts the agent on boot."""

import json
import re

from cavvy.providers.base import Feature, KeyFileRefused, ProviderSetting, SettingKind
from cavvy.providers.settings import disk_setting, project_flag, project_number, project_text
from cavvy.providers.vm.abilities import make_manifest, reach_setting

_DOCS = "https://docs.nebius.com/compute"

MANIFEST = make_manifest(
    "nebius",
    "Nebius AI Cloud",
    machine="a machine",
    deletion=f"{_DOCS}/virtual-machines/delete",
    rights="a service account in a group with the role `editor` for the project, or a user who "
    "may list the project's platforms, images, subnets, instances and disks, create and delete "
    "instances, and delete disks",
    endpoint="api.nebius.cloud:443",
    endpoint_consequence="The base address of the gRPC API. If the address starts with `http://`, "
    "Cavvy calls all services of the API without TLS.",
    unsupported={
        Feature.CAPACITY: "Cavvy does not read Nebius's capacity advice; if a region has no free "
        "machine, Cavvy tries the next best offer "
        "(https://docs.nebius.com/compute/virtual-machines/types)",
        Feature.VOLUMES: f"{_DOCS}/storage/types",
        Feature.NOTICE: "a preemptible machine gets the signal to shut down 60 seconds before "
        "Nebius stops the machine, and no earlier notice "
        f"({_DOCS}/virtual-machines/preemptible)",
    },
    settings=(
        ProviderSetting(
            name="key_file",
            kind=SettingKind.KEY_FILE,
            consequence="The file with an IAM token, or with the credentials of a service account "
            "as `nebius iam auth-public-key generate` writes them. The default is "
            "`$NEBIUS_IAM_TOKEN`, then `~/.nebius/credentials.json`.",
        ).for_projects(),
        project_text(
            "projects",
            "The ids of the projects to use, separated by commas. Each project belongs to one "
            "region; use one project for each region.",
        ).for_setup(),
        project_text(
            "subnet",
            "The subnet of machines: its id, or its name in each project. The default is the "
            "project's only subnet, or the subnet whose name starts with `default-subnet`.",
        ),
        project_flag(
            "public_address",
            "If `true`, machines get a public address. If `false`, the subnet needs another route "
            "to the server, and `reach_by_ssh` needs a route to private addresses.",
            default=True,
        ),
        project_text(
            "image_family",
            "The family of the boot image. The default is Nebius's newest Ubuntu with CUDA for "
            "GPUs, and its newest Ubuntu without drivers for other machines.",
        ),
        disk_setting(
            "The size of a machine's boot disk, unless the task requests another size.",
            100,
            minimum=50,
        ),
        project_number(
            "disk_usd_gib_month",
            "The price of one GiB of a boot disk of the type `network_ssd` for a month, from the "
            "list prices in Nebius's console. Without this price, bills do not contain the disks, "
            "which Nebius bills until they are deleted.",
            unit="USD",
        ),
        project_text(
            "gpu_clusters",
            "The ids of GPU clusters, at most one for each project, separated by commas. "
            "Machines with eight GPUs are created in the cluster of their project, which connects "
            "them by InfiniBand. Without a cluster, tasks with `network: {fabric: rdma}` are "
            "refused.",
        ),
        reach_setting(),
    ),
    cloud="cavvy.providers.nebius.cloud:NebiusCloud",
    layer="cavvy.providers.vm.provider:make_provider",
    zoned=True,
    project_key="cavvy.providers.nebius",
    options={"image_family": "the family of the boot image"},
)


# the forms of the fields of a service account's key, and of a token
_FORM = re.compile(r"[A-Za-z0-9._-]{1,200}")
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]+")
_PEM = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----[A-Za-z0-9+/=\s]+-----END [^-]+-----\s*")


def clean_key(text: str) -> str:
    """Return an IAM token, or a service account's key, reduced to the fields that are needed.
    Raises KeyFileRefused, whose text contains nothing from the key.
    """
    if _TOKEN.fullmatch(text.strip()):
        return text.strip()
    try:
        told = json.loads(text)["subject-credentials"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise KeyFileRefused(
            "the key is neither an IAM token nor JSON with `subject-credentials`"
        ) from None
    names = {"alg": "RS256", "type": "JWT"}
    if not isinstance(told, dict) or any(told.get(name) != is_ for name, is_ in names.items()):
        raise KeyFileRefused("`subject-credentials` must have the type JWT and the alg RS256")
    for name, form in {"kid": _FORM, "iss": _FORM, "sub": _FORM, "private-key": _PEM}.items():
        if not isinstance(told.get(name), str) or not form.fullmatch(told[name]):
            raise KeyFileRefused(f"`{name}` is missing, or is not valid for Nebius")
        names[name] = told[name]
    return json.dumps({"subject-credentials": names})
