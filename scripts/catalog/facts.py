"""Facts about instance types that the price tables lack or guess, from the providers' own
documentation.

Only what the documentation states is here; what is not, stays unknown in the snapshot.
"""

import re

# --- Google Cloud: memory per vCPU in GiB, by machine family (docs: "Machine families resource
# guide") ---
_GCP_PER_VCPU = {
    "e2": {"standard": 4, "highmem": 8, "highcpu": 1},
    "n1": {"standard": 3.75, "highmem": 6.5, "highcpu": 0.9},
    "n2": {"standard": 4, "highmem": 8, "highcpu": 1},
    "n2d": {"standard": 4, "highmem": 8, "highcpu": 1},
    "n4": {"standard": 4, "highmem": 8, "highcpu": 2},
    "c2": {"standard": 4},
    "c2d": {"standard": 4, "highmem": 8, "highcpu": 2},
    "c3": {"standard": 4, "highmem": 8, "highcpu": 2},
    "c3d": {"standard": 4, "highmem": 8},
    "c4a": {"standard": 4, "highmem": 8, "highcpu": 2},
    "t2d": {"standard": 4},
    "t2a": {"standard": 4},
    "h3": {"standard": 4},
}
_GCP_EXACT = {
    "e2-micro": 1, "e2-small": 2, "e2-medium": 4, "n2-highmem-128": 864,
    "m1-ultramem-40": 961, "m1-ultramem-80": 1922, "m1-ultramem-160": 3844, "m1-megamem-96": 1433.6,
    "m2-ultramem-208": 5888, "m2-ultramem-416": 11776, "m2-megamem-416": 5888, "m2-hypermem-416": 8832,
    "m3-ultramem-32": 976, "m3-ultramem-64": 1952, "m3-ultramem-128": 3904, "m3-megamem-64": 976,
    "m3-megamem-128": 1952,
    "a2-highgpu-1g": 85, "a2-highgpu-2g": 170, "a2-highgpu-4g": 340, "a2-highgpu-8g": 680, "a2-megagpu-16g": 1360,
    "a2-ultragpu-1g": 170, "a2-ultragpu-2g": 340, "a2-ultragpu-4g": 680, "a2-ultragpu-8g": 1360,
    "a3-highgpu-1g": 234, "a3-highgpu-2g": 468, "a3-highgpu-4g": 936, "a3-highgpu-8g": 1872, "a3-megagpu-8g": 1872,
    "g2-standard-4": 16, "g2-standard-8": 32, "g2-standard-12": 48, "g2-standard-16": 64, "g2-standard-24": 96,
    "g2-standard-32": 128, "g2-standard-48": 192, "g2-standard-96": 384,
    "g4-standard-48": 180, "g4-standard-96": 360, "g4-standard-192": 720, "g4-standard-384": 1440,
}  # fmt: skip


def gcp_memory_gib(instance_type: str, vcpus: float) -> float:
    """Memory of a machine type; 0 where the documentation's rule for its family is not known
    here.
    """
    if instance_type in _GCP_EXACT:
        return _GCP_EXACT[instance_type]
    match = re.fullmatch(
        r"([a-z0-9]+)-(standard|highmem|highcpu)-\d+(-lssd)?(-metal)?", instance_type
    )
    return _GCP_PER_VCPU.get(match[1], {}).get(match[2], 0) * vcpus if match else 0


# --- Network of one machine in Gbit/s, of all its interfaces, as documented by its provider ---
NETWORK_GBITS = {
    "aws": {
        "p3.8xlarge": 10, "p3.16xlarge": 25, "p3dn.24xlarge": 100, "p4d.24xlarge": 400, "p4de.24xlarge": 400,
        "p5.48xlarge": 3200, "p5e.48xlarge": 3200, "p5en.48xlarge": 3200, "p6-b200.48xlarge": 3200,
        "p6-b300.48xlarge": 6400, "g4dn.8xlarge": 50, "g4dn.12xlarge": 50, "g4dn.16xlarge": 50, "g4dn.metal": 100,
        "g5.8xlarge": 25, "g5.12xlarge": 40, "g5.16xlarge": 25, "g5.24xlarge": 50, "g5.48xlarge": 100,
        "g6.8xlarge": 25, "g6.12xlarge": 40, "g6.16xlarge": 25, "g6.24xlarge": 50, "g6.48xlarge": 100,
        "g6e.12xlarge": 100, "g6e.24xlarge": 200, "g6e.48xlarge": 400, "trn1.32xlarge": 800, "dl1.24xlarge": 400,
        "inf1.24xlarge": 100, "inf2.48xlarge": 100,
    },
    "gcp": {
        "a2-highgpu-1g": 24, "a2-highgpu-2g": 32, "a2-highgpu-4g": 50, "a2-highgpu-8g": 100, "a2-megagpu-16g": 100,
        "a2-ultragpu-1g": 24, "a2-ultragpu-2g": 32, "a2-ultragpu-4g": 50, "a2-ultragpu-8g": 100,
        "a3-highgpu-8g": 1000, "a3-megagpu-8g": 1800, "g2-standard-4": 10, "g2-standard-8": 16, "g2-standard-12": 16,
        "g2-standard-16": 32, "g2-standard-24": 32, "g2-standard-32": 32, "g2-standard-48": 50,
        "g2-standard-96": 100,
    },
    "azure": {
        "Standard_ND96asr_v4": 1600, "Standard_ND96amsr_A100_v4": 1600, "Standard_ND96isr_H100_v5": 3200,
        "Standard_ND96isr_H200_v5": 3200, "Standard_ND96isr_MI300X_v5": 3200,
    },
}  # fmt: skip

# --- Disks that come with the machine and cannot be chosen, in GiB (Lambda's list of instance
# types) ---
DISK_GIB = {
    "lambda": {
        "gpu_1x_h100_pcie": 1024, "gpu_8x_h100_sxm5": 22528, "gpu_4x_h100_sxm5": 11264, "gpu_2x_h100_sxm5": 5632,
        "gpu_1x_h100_sxm5": 2816, "gpu_8x_a100_80gb_sxm4": 19968, "gpu_1x_gh200": 4096,
    },
}  # fmt: skip
