"""Facts about instance types that the price tables lack or guess, from the providers' own
documentation.

This file contains only documented facts. All other facts are unknown in the snapshot.
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
    """The memory of a machine type in GiB; 0 if the family is not in `_GCP_PER_VCPU`."""
    if instance_type in _GCP_EXACT:
        return _GCP_EXACT[instance_type]
    match = re.fullmatch(
        r"([a-z0-9]+)-(standard|highmem|highcpu)-\d+(-lssd)?(-metal)?", instance_type
    )
    return _GCP_PER_VCPU.get(match[1], {}).get(match[2], 0) * vcpus if match else 0


# --- The network bandwidth of one machine in Gbit/s, over all its interfaces, as documented by its
# provider. A burst ("up to 25 Gbit/s") does not count: the value is the bandwidth that the machine
# always has. For a machine with an RDMA network, the value is the bandwidth of that network.
#   aws: EC2's `BaselineBandwidthInGbps`, as aws/karpenter-provider-aws lists it (commit 01a436f0)
#   azure: Microsoft's size pages (nva10v5, nc-a100-v4, ncads-h100-v5, nct4-v3, np, nd-gb200-v6)
#   gcp: "GPU machine types" and "Network bandwidth" of Compute Engine's documentation
#   oci: "Compute shapes" (docs.oracle.com/en-us/iaas/Content/Compute/References/computeshapes.htm;
#   MI355X.8 and GB300.4 read in a stored copy on 2026-11-24, which lists no B300.8 and RTXPRO.8)
#   nebius, coreweave: the pages on their instance types
#   ibm: "Instance profiles" (github.com/ibm-cloud-docs/vpc), "bandwidth cap", read 2026-11-23 ---
NETWORK_GBITS: dict[str, dict[str, float]] = {
    "aws": {
        "p3.2xlarge": 2.5, "p3.8xlarge": 10, "p3.16xlarge": 25, "p3dn.24xlarge": 100, "p4d.24xlarge": 400,
        "p4de.24xlarge": 400, "p5.4xlarge": 100, "p5.48xlarge": 3200, "p5e.48xlarge": 3200, "p5en.48xlarge": 3200,
        "p6-b200.48xlarge": 3200, "p6-b300.48xlarge": 6400, "p6e-gb200.36xlarge": 3200,
        "g4ad.xlarge": 2, "g4ad.2xlarge": 4.167, "g4ad.4xlarge": 8.333, "g4ad.8xlarge": 15, "g4ad.16xlarge": 25,
        "g4dn.xlarge": 5, "g4dn.2xlarge": 10, "g4dn.4xlarge": 20, "g4dn.8xlarge": 50, "g4dn.12xlarge": 50,
        "g4dn.16xlarge": 50, "g4dn.metal": 100,
        "g5.xlarge": 2.5, "g5.2xlarge": 5, "g5.4xlarge": 10, "g5.8xlarge": 25, "g5.12xlarge": 40, "g5.16xlarge": 25,
        "g5.24xlarge": 50, "g5.48xlarge": 100,
        "g5g.xlarge": 1.25, "g5g.2xlarge": 2.5, "g5g.4xlarge": 5, "g5g.8xlarge": 12, "g5g.16xlarge": 25,
        "g5g.metal": 25,
        "g6.xlarge": 2.5, "g6.2xlarge": 5, "g6.4xlarge": 10, "g6.8xlarge": 25, "g6.12xlarge": 40, "g6.16xlarge": 25,
        "g6.24xlarge": 50, "g6.48xlarge": 100, "gr6.4xlarge": 10, "gr6.8xlarge": 25,
        "g6e.xlarge": 2.5, "g6e.2xlarge": 5, "g6e.4xlarge": 20, "g6e.8xlarge": 25, "g6e.12xlarge": 100,
        "g6e.16xlarge": 35, "g6e.24xlarge": 200, "g6e.48xlarge": 400,
        "g7.2xlarge": 40, "g7.4xlarge": 80, "g7.8xlarge": 100, "g7.12xlarge": 175, "g7.24xlarge": 350,
        "g7.48xlarge": 700, "g7e.2xlarge": 50, "g7e.4xlarge": 50, "g7e.8xlarge": 100, "g7e.12xlarge": 400,
        "g7e.24xlarge": 800, "g7e.48xlarge": 1600, "g6f.2xlarge": 5, "g6f.4xlarge": 10, "gr6f.4xlarge": 10,
        "trn1.2xlarge": 3.125, "trn1.32xlarge": 800, "trn1n.32xlarge": 1600, "trn2.3xlarge": 200,
        "trn2.48xlarge": 3200, "trn2u.48xlarge": 3200, "dl1.24xlarge": 400, "dl2q.24xlarge": 100,
        "inf1.xlarge": 5, "inf1.2xlarge": 5, "inf1.6xlarge": 25, "inf1.24xlarge": 100,
        "inf2.xlarge": 2.083, "inf2.8xlarge": 16.667, "inf2.24xlarge": 50, "inf2.48xlarge": 100,
        "f2.6xlarge": 12.5, "f2.12xlarge": 25, "f2.48xlarge": 100,
        "vt1.3xlarge": 3.12, "vt1.6xlarge": 6.25, "vt1.24xlarge": 25,
    },
    "gcp": {
        "a2-highgpu-1g": 24, "a2-highgpu-2g": 32, "a2-highgpu-4g": 50, "a2-highgpu-8g": 100, "a2-megagpu-16g": 100,
        "a2-ultragpu-1g": 24, "a2-ultragpu-2g": 32, "a2-ultragpu-4g": 50, "a2-ultragpu-8g": 100,
        "a3-highgpu-1g": 25, "a3-highgpu-2g": 50, "a3-highgpu-4g": 100,
        "a3-highgpu-8g": 1000, "a3-megagpu-8g": 1800, "g2-standard-4": 10, "g2-standard-8": 16, "g2-standard-12": 16,
        "g2-standard-16": 32, "g2-standard-24": 32, "g2-standard-32": 32, "g2-standard-48": 50,
        "g2-standard-96": 100, "g4-standard-48": 50, "g4-standard-96": 100, "g4-standard-192": 200,
        "g4-standard-384": 400,
    },
    "azure": {
        "Standard_ND96asr_v4": 1600, "Standard_ND96amsr_A100_v4": 1600, "Standard_ND96isr_H100_v5": 3200,
        "Standard_ND96isr_H200_v5": 3200, "Standard_ND96isr_MI300X_v5": 3200, "Standard_ND96is_MI300X_v5": 80,
        "Standard_ND128isr_NDR_GB200_v6": 1600,
        "Standard_NC4as_T4_v3": 8, "Standard_NC8as_T4_v3": 8, "Standard_NC16as_T4_v3": 8,
        "Standard_NC64as_T4_v3": 32, "Standard_NC24ads_A100_v4": 20, "Standard_NC48ads_A100_v4": 40,
        "Standard_NC96ads_A100_v4": 80, "Standard_NC40ads_H100_v5": 40, "Standard_NC80adis_H100_v5": 80,
        "Standard_NCC40ads_H100_v5": 40, "Standard_NV6ads_A10_v5": 5, "Standard_NV12ads_A10_v5": 10,
        "Standard_NV18ads_A10_v5": 20, "Standard_NV36ads_A10_v5": 40, "Standard_NV36adms_A10_v5": 80,
        "Standard_NV72ads_A10_v5": 80, "Standard_NP10s": 7.5, "Standard_NP20s": 15, "Standard_NP40s": 30,
    },
    "oci": {
        "VM.GPU2.1": 8, "VM.GPU3.1": 4, "VM.GPU3.2": 8, "VM.GPU3.4": 24.6, "VM.GPU.A10.1": 24, "VM.GPU.A10.2": 48,
        "BM.GPU2.2": 50, "BM.GPU3.8": 100, "BM.GPU.A10.4": 100, "BM.GPU4.8": 1600, "BM.GPU.A100-v2.8": 1600,
        "BM.GPU.H100.8": 3200, "BM.GPU.H200.8": 3200, "BM.GPU.B200.8": 3200, "BM.GPU.MI300X.8": 3200,
        "BM.GPU.MI355X.8": 3200, "BM.GPU.L40S.4": 800, "BM.GPU.GB200.4": 1600, "BM.GPU.GB300.4": 3200,
    },
    "ibm": {
        "gx3d-160x1792x8h100": 200,
        "gx2-8x64x1v100": 16, "gx2-16x128x1v100": 32, "gx2-16x128x2v100": 32, "gx2-32x256x2v100": 64,
    },
    "nebius": {
        "gpu-h100-sxm_8gpu-128vcpu-1600gb": 3200, "gpu-h200-sxm_8gpu-128vcpu-1600gb": 3200,
        "gpu-b200-sxm_8gpu-160vcpu-1792gb": 3200,
    },
    "coreweave": {
        "hgx-h100-8-gpu": 3200, "hgx-h200-8-gpu": 3200, "hgx-b200-8-gpu": 3200, "gb200-nvl72-4-gpu": 1600,
    },
}  # fmt: skip

# One chip's share of the data center network of its pod: 6.4 Tbit/s for 256 chips of v5e,
# 25.6 Tbit/s for 256 chips of v6e; for v5p, "DCN bandwidth per chip"
# (docs.cloud.google.com/tpu/docs/v5e, v6e and v5p, the last read 2026-11-23).
_TPU_GBITS = {"tpu-v5litepod": 25, "tpu-v5p": 50, "tpu-v6e": 100}


def find_network_gbits(
    provider: str, instance_type: str, accelerators: int, vcpus: float
) -> float | None:
    """The bandwidth of a machine; None if unknown."""
    family = instance_type.rpartition("-")[0]
    if family in _TPU_GBITS:
        return _TPU_GBITS[family] * accelerators
    # "Network bandwidth": N1 machines have 2 Gbit/s for each vCPU, at most 32.
    if provider == "gcp" and accelerators and instance_type.startswith("n1-"):
        return min(2 * vcpus, 32)
    return NETWORK_GBITS.get(provider, {}).get(instance_type)


# --- Machines with a fraction of one accelerator, for which the price tables state 0 accelerators.
# aws: computed from the memory (2,861 MiB or multiples) and the 22,888 MiB of a whole L4 ---
PARTS = {
    "aws": {
        "g6f.large": 1 / 8, "g6f.xlarge": 1 / 8, "g6f.2xlarge": 1 / 4, "g6f.4xlarge": 1 / 2, "gr6f.4xlarge": 1 / 2,
    },
}  # fmt: skip

# --- Commercial regions (docs.oracle.com, "Regions and Availability Domains"). OCI's prices are the
# same in all of them (oracle.com/cloud/price-list) ---
OCI_REGIONS = (
    "af-casablanca-1", "af-johannesburg-1", "ap-batam-1", "ap-chuncheon-1", "ap-delhi-1",
    "ap-hyderabad-1", "ap-kulai-2", "ap-melbourne-1", "ap-mumbai-1", "ap-osaka-1", "ap-seoul-1",
    "ap-singapore-1", "ap-singapore-2", "ap-sydney-1", "ap-tokyo-1", "ca-montreal-1",
    "ca-toronto-1", "eu-amsterdam-1", "eu-frankfurt-1", "eu-madrid-1", "eu-madrid-3",
    "eu-marseille-1", "eu-milan-1", "eu-paris-1", "eu-stockholm-1", "eu-turin-1", "eu-zurich-1",
    "il-jerusalem-1", "me-abudhabi-1", "me-dubai-1", "me-jeddah-1", "me-riyadh-1",
    "mx-monterrey-1", "mx-queretaro-1", "sa-bogota-1", "sa-santiago-1", "sa-saopaulo-1",
    "sa-valparaiso-1", "sa-vinhedo-1", "uk-cardiff-1", "uk-london-1", "us-ashburn-1",
    "us-chicago-1", "us-phoenix-1", "us-saltlake-2", "us-sanjose-1",
)  # fmt: skip

# --- The sizes in GiB of disks that belong to the machine and cannot be chosen (Lambda's list of
# instance types) ---
DISK_GIB = {
    "lambda": {
        "gpu_1x_h100_pcie": 1024, "gpu_8x_h100_sxm5": 22528, "gpu_4x_h100_sxm5": 11264, "gpu_2x_h100_sxm5": 5632,
        "gpu_1x_h100_sxm5": 2816, "gpu_8x_a100_80gb_sxm4": 19968, "gpu_1x_gh200": 4096,
    },
}  # fmt: skip
