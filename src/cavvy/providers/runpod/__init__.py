"""Runpod: each node is one pod, on which the server starts the agent by SSH."""

from cavvy.providers.base import Feature
from cavvy.providers.settings import project_flag, project_number, project_text
from cavvy.providers.vm.abilities import make_manifest
from cavvy.providers.vm.keys import ApiKeySource

KEYS = ApiKeySource(
    provider="runpod",
    variables=("RUNPOD_API_KEY",),
    files=("~/.runpod/config.toml",),
    names=("apikey", "api_key"),
    made_at="https://console.runpod.io/user/settings",
)
_DOCS = "https://docs.runpod.io"
_CREATE = f"{_DOCS}/api-reference-v2/pods/create-a-pod"
_STORAGE = f"{_DOCS}/pods/storage/types"
_CONTAINER = (
    "a pod is a container, and Runpod lets no pod start further containers "
    f"({_DOCS}/references/faq#can-i-run-my-own-docker-daemon-on-runpod)"
)

MANIFEST = make_manifest(
    "runpod",
    "Runpod",
    cloud="cavvy.providers.runpod.cloud:RunpodCloud",
    machine="a pod",
    deletion=_STORAGE,
    rights="an API key that may read and write pods",
    unsupported={
        Feature.SPOT: f"version 2 of Runpod's API starts on-demand pods only ({_CREATE})",
        Feature.IMAGE: f"{_CONTAINER}; the setting `image` selects the image of all pods",
        Feature.BUILD: _CONTAINER,
        Feature.LOGIN: f"{_CONTAINER}; the setting `registry` selects the registry "
        "credentials with which Runpod pulls the image of pods",
        Feature.CAPACITY: "Runpod reports whether a data center has a kind of GPU, but not how "
        f"many GPUs are free ({_DOCS}/api-reference-v2/catalog/list-gpu-types)",
        Feature.SELF_END: "Runpod bills a pod until the API terminates the pod "
        f"({_DOCS}/pods/manage-pods), and pods get no API key; the server terminates pods that "
        "have exited",
        Feature.VOLUMES: _STORAGE,
        Feature.MOUNTS: "a pod is a container without access to folders of its host or to NFS "
        f"({_CREATE})",
        Feature.TUNNEL: "a pod is a container without the permission to create "
        f"a WireGuard interface ({_CREATE})",
        Feature.NETWORK: _CREATE,
        Feature.DISK: "the setting `disk_gib` selects the size of the disk for all pods; a size "
        f"for one task is not supported yet ({_CREATE})",
        Feature.NOTICE: "version 2 of Runpod's API creates only on-demand pods, which Runpod does "
        f"not reclaim ({_CREATE})",
    },
    settings=(
        KEYS.setting(),
        project_text(
            "regions",
            "The data centers to use, separated by commas, such as `EU-RO-1, US-KS-2`; "
            "`community` selects the community cloud. The default is all data centers, and "
            "the community cloud only if `community` is set.",
        ),
        project_flag(
            "community",
            "Also use the community cloud: cheaper pods on computers of other people, who can "
            "read the data and programs of pods.",
        ),
        project_text(
            "image",
            "The image of pods. The image must start an SSH server that accepts the key in the "
            "environment variable PUBLIC_KEY, as Runpod's own images do.",
            "runpod/pytorch:1.0.2-cu1281-torch280-ubuntu2404",
        ),
        project_text(
            "cuda",
            'The lowest CUDA version that the host of a pod must support, such as "12.8", the '
            "version that the default `image` needs. If this is empty, pods run on any host.",
            "12.8",
        ),
        project_text(
            "registry", "The id of the account's registry credentials, for a private `image`."
        ),
        project_number(
            "disk_gib", "The size of a pod's disk.", unit="GB", default=50, minimum=1, whole=True
        ),
        project_number(
            "gpu_vcpus",
            "Pods start only on hosts with at least this number of vCPUs per GPU. Offers "
            "state this number.",
            unit="vCPUs",
            default=4,
            minimum=1,
            whole=True,
        ),
        project_number(
            "gpu_memory_gib",
            "Pods start only on hosts with at least this memory per GPU. Offers state this memory.",
            unit="GB",
            default=16,
            minimum=1,
            whole=True,
        ),
    ),
    endpoint="https://api.runpod.io/v2",
)
