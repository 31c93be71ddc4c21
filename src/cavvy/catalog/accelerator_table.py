"""The rows behind `catalog/accelerators.py`: one line per product, figures from the vendor's
data sheet named last.
"""

from collections.abc import Mapping

from cavvy.catalog.accelerators import Accelerator, AcceleratorKind, MemorySize, Precision, Vendor

_GIB = 1024
_TERA = 1e12


def _rows(
    vendor: Vendor,
    kind: AcceleratorKind,
    source: str,
    *lines: tuple[str, int | None, str, str, str, int | None, str],
) -> tuple[Accelerator, ...]:
    """Lines are name[/family], year, "GiB[@GB/s] ...", "precision TFLOPS ...", link, watts,
    aliases.
    """
    return tuple(_row(vendor, kind, source, *line) for line in lines)


def _row(
    vendor: Vendor, kind: AcceleratorKind, source: str, names: str, year: int | None, memory: str, peak: str, link: str,
    watts: int | None, aliases: str,
) -> Accelerator:  # fmt: skip
    name, _, family = names.partition("/")
    return Accelerator(
        name=name,
        family=family or name,
        vendor=vendor,
        kind=kind,
        year=year,
        memory=tuple(_memory(text) for text in memory.split()),
        peak=_peak(peak.split()),
        interconnect=link or None,
        tdp_w=watts,
        aliases=tuple(aliases.split()),
        source=source.replace("%", name),
    )


def _memory(text: str) -> MemorySize:
    size, _, bandwidth = text.partition("@")
    return MemorySize(int(size) * _GIB, float(bandwidth) if bandwidth else None)


def _peak(words: list[str]) -> Mapping[Precision, float]:
    return {
        Precision(name): float(rate) * _TERA
        for name, rate in zip(words[::2], words[1::2], strict=True)
    }


_HOPPER = "fp64 67 fp32 67 tf32 494.7 bf16 989.4 fp16 989.4 fp8 1978.9 int8 1978.9"
_HOPPER_NVL = "fp64 60 fp32 60 tf32 417.5 bf16 835.5 fp16 835.5 fp8 1670.5 int8 1670.5"
_B200 = "fp32 75 tf32 1125 bf16 2250 fp16 2250 fp8 4500 int8 4500 fp4 9000"
_GB200 = "fp32 80 tf32 1250 bf16 2500 fp16 2500 fp8 5000 int8 5000 fp4 10000"
_CDNA3 = "fp64 163.4 fp32 163.4 tf32 653.7 bf16 1307.4 fp16 1307.4 fp8 2614.9 int8 2614.9"
_NVL5 = "NVLink 5, 1800 GB/s"
_NVL4 = "NVLink 4, 900 GB/s"

ROWS: tuple[Accelerator, ...] = (
    *_rows(
        Vendor.NVIDIA,
        AcceleratorKind.GPU,
        "NVIDIA % data sheet",
        ("GB300", 2025, "288@8000", "fp32 80 tf32 1250 bf16 2500 fp16 2500 fp8 5000 fp4 15000", _NVL5, 1400, ""),
        ("GB200", 2024, "186@8000", _GB200, _NVL5, 1200, ""),
        ("B300", 2025, "288@8000", "tf32 1125 bf16 2250 fp16 2250 fp8 4500", _NVL5, None, "B300-SXM B300-SXM6"),
        ("B200", 2024, "180@8000", _B200, _NVL5, 1000, "B200-SXM B200-SXM6"),
        ("GH200", 2023, "96@4000 144@4900", _HOPPER, "NVLink-C2C to the CPU, 900 GB/s", None, "GH200-480GB"),
        ("H200", 2023, "141@4800", _HOPPER, _NVL4, 700, "H200-SXM H200-SXM5 H200-NVLINK"),
        ("H200-NVL/H200", 2024, "141@4800", _HOPPER_NVL, "NVLink bridge, 900 GB/s", 600, "H200-PCIe"),
        ("H100", 2022, "80@3350", _HOPPER, _NVL4, 700, "H100-SXM H100-SXM5 H100-80GB-HBM3 "
                                                       "H100-MEGA H100-NVLINK"),
        ("H100-PCIe/H100", 2022, "80@2039",
         "fp64 51.2 fp32 51.2 tf32 378 bf16 756 fp16 756 fp8 1513 int8 1513", "NVLink bridge, 600 GB/s", 350, ""),
        ("H100-NVL/H100", 2023, "94@3938", _HOPPER_NVL, "NVLink bridge, 600 GB/s", 400, ""),
        ("H20", 2023, "96@4000", "bf16 148 fp16 148 fp8 296 int8 296", _NVL4, 400, ""),
        ("A100", 2020, "40@1555 80@2039", "fp64 19.5 fp32 19.5 tf32 156 bf16 312 fp16 312 int8 624",
         "NVLink 3, 600 GB/s (SXM)", 400, "A100-SXM A100-SXM4 A100-PCIe A100-PG509-200 A100X"),
        ("A800", 2022, "40@1555 80@2039", "fp64 19.5 fp32 19.5 tf32 156 bf16 312 fp16 312 int8 624",
         "NVLink 3, 400 GB/s", None, "A800-SXM A800-SXM4 A800-PCIe"),
        ("A30", 2021, "24@933", "fp64 10.3 fp32 10.3 tf32 82 bf16 165 fp16 165 int8 330",
         "NVLink bridge, 200 GB/s", 165, ""),
        ("A40", 2020, "48@696", "fp32 37.4 tf32 74.8 bf16 149.7 fp16 149.7 int8 299.3",
         "NVLink bridge, 112.5 GB/s", 300, ""),
        ("A10", 2021, "24@600", "fp32 31.2 tf32 62.5 bf16 125 fp16 125 int8 250", "PCIe 4.0 x16", 150, ""),
        ("A10G", 2021, "24@600", "fp32 31.5 tf32 35 bf16 70 fp16 70 int8 140", "PCIe 4.0 x16", 300, ""),
        ("A16", 2021, "16@200", "fp32 4.5 tf32 9 fp16 17.9 int8 35.9", "PCIe 4.0 x16, four GPUs a board", None, ""),
        ("A2", 2021, "16@200", "fp32 4.5 tf32 9 bf16 18 fp16 18 int8 36", "PCIe 4.0 x8", 60, ""),
        ("L40S", 2023, "48@864", "fp32 91.6 tf32 183 bf16 362 fp16 362 fp8 733 int8 733", "PCIe 4.0 x16", 350, ""),
        ("L40", 2022, "48@864", "fp32 90.5 tf32 90.5 bf16 181 fp16 181 fp8 362 int8 362", "PCIe 4.0 x16", 300, ""),
        ("L4", 2023, "24@300", "fp32 30.3 tf32 60 bf16 121 fp16 121 fp8 242.5 int8 242.5", "PCIe 4.0 x16", 72, ""),
        ("T4", 2018, "16@320", "fp32 8.1 fp16 65 int8 130", "PCIe 3.0 x16", 70, ""),
        ("T4G", 2021, "16", "", "", None, ""),
        ("V100", 2017, "16@900 32@900", "fp64 7.8 fp32 15.7 fp16 125", "NVLink 2, 300 GB/s (SXM2)", 300,
         "V100-SXM2 V100-SXM3 V100-PCIe V100S"),
        ("P100", 2016, "12@549 16@732", "fp64 4.7 fp32 9.3 fp16 18.7", "PCIe 3.0 x16", 250,
         "P100-PCIe P100-SXM2"),
        ("P40", 2016, "24@346", "fp32 12 int8 47", "PCIe 3.0 x16", 250, ""),
        ("P4", 2016, "8@192", "fp32 5.5 int8 22", "PCIe 3.0 x16", 75, ""),
        ("M60", 2015, "8@160", "", "PCIe 3.0 x16, two GPUs a board", None, ""),
        ("K80", 2014, "12@240", "fp64 1.45 fp32 4.37", "PCIe 3.0 x16, two GPUs a board", None, ""),
        ("K520", 2013, "4", "", "", None, "GRID-K520"),
        ("RTX-PRO-6000", 2025, "96", "", "PCIe 5.0 x16", 600,
         "RTXPRO6000 RTX-PRO-6000-Blackwell RTX-PRO-6000-96GB RTXPRO6000S RTXPRO6000WS "
         "RTX-PRO-SERVER-6000 "
         "RTX-PRO-6000-SE RTX-PRO-6000-WS"),
        ("RTX-PRO-4500", 2025, "32", "", "PCIe 5.0 x16", None, "RTXPRO4500 RTX-PRO-4500-Blackwell"),
        ("RTX6000-Ada", 2022, "48@960", "fp32 91.1 bf16 364.2 fp16 364.2 fp8 728.5 int8 728.5", "PCIe 4.0 x16", 300,
         "RTX-6000-Ada RTX6000Ada"),
        ("RTX5000-Ada", 2023, "32@576", "fp32 65.3", "PCIe 4.0 x16", 250, "RTX-5000-Ada RTX5000Ada"),
        ("RTX4000-Ada", 2023, "20@360", "fp32 26.7", "PCIe 4.0 x16", 130, "RTX-4000-Ada RTX-4000-SFF-Ada"),
        ("RTX2000-Ada", 2024, "16@224", "fp32 12", "PCIe 4.0 x8", 70, "RTX-2000-Ada"),
        ("A6000", 2020, "48@768", "fp32 38.7 tf32 77.4 bf16 154.8 fp16 154.8 int8 309.7",
         "NVLink bridge, 112.5 GB/s", 300, "RTXA6000 RTX-A6000"),
        ("A5000", 2021, "24@768", "fp32 27.8 fp16 111.1 bf16 111.1", "NVLink bridge, 112.5 GB/s", 230,
         "RTXA5000 RTX-A5000"),
        ("A4500", 2021, "20@640", "fp32 23.7", "NVLink bridge, 112.5 GB/s", 200, "RTXA4500 RTX-A4500"),
        ("A4000", 2021, "16@448", "fp32 19.2 fp16 76.7 bf16 76.7", "PCIe 4.0 x16", 140, "RTXA4000 RTX-A4000"),
        ("RTX8000", 2018, "48@672", "fp32 16.3 fp16 130.5", "NVLink bridge, 100 GB/s", 295, "Quadro-RTX-8000"),
        ("RTX6000", 2018, "24@672", "fp32 16.3 fp16 130.5", "NVLink bridge, 100 GB/s", 295, "Quadro-RTX-6000"),
        ("RTX5000", 2018, "16@448", "fp32 11.2 fp16 89.2", "NVLink bridge, 50 GB/s", 265, "Quadro-RTX-5000"),
        ("RTX4000", 2018, "8@416", "fp32 7.1 fp16 57", "PCIe 3.0 x16", 160, "Quadro-RTX-4000"),
        ("P6000", 2016, "24@432", "fp32 12", "PCIe 3.0 x16", 250, "Quadro-P6000"),
        ("P5000", 2016, "16@288", "fp32 8.9", "PCIe 3.0 x16", 180, "Quadro-P5000"),
        ("P4000", 2017, "8@243", "fp32 5.3", "PCIe 3.0 x16", 105, "Quadro-P4000"),
        ("M4000", 2015, "8@192", "fp32 2.6", "PCIe 3.0 x16", 120, "Quadro-M4000"),
    ),
    *_rows(
        Vendor.NVIDIA,
        AcceleratorKind.GPU,
        "NVIDIA GeForce specifications and architecture white paper (%)",
        ("RTX5090", 2025, "32@1792", "fp32 104.8 tf32 104.8 bf16 209.5 fp16 209.5 fp8 419 int8 838 "
                                     "fp4 1676",
         "PCIe 5.0 x16", 575, ""),
        ("RTX5080", 2025, "16@960", "fp32 56.3", "PCIe 5.0 x16", 360, ""),
        ("RTX5070Ti", 2025, "16@896", "fp32 43.9", "PCIe 5.0 x16", 300, ""),
        ("RTX5070", 2025, "12@672", "fp32 30.9", "PCIe 5.0 x16", 250, ""),
        ("RTX5060Ti", 2025, "8@448 16@448", "", "PCIe 5.0 x8", 180, ""),
        ("RTX5060", 2025, "8@448", "", "PCIe 5.0 x8", 145, ""),
        ("RTX4090", 2022, "24@1008", "fp32 82.6 tf32 82.6 bf16 165.2 fp16 165.2 fp8 330.3 int8 "
                                     "660.6",
         "PCIe 4.0 x16", 450, ""),
        ("RTX4080S", 2024, "16@736", "fp32 52.2", "PCIe 4.0 x16", 320, "RTX4080-Super"),
        ("RTX4080", 2022, "16@717", "fp32 48.7", "PCIe 4.0 x16", 320, ""),
        ("RTX4070TiS", 2024, "16@672", "fp32 44.1", "PCIe 4.0 x16", 285, "RTX4070S-Ti RTX4070Ti-Super"),
        ("RTX4070Ti", 2023, "12@504", "fp32 40.1", "PCIe 4.0 x16", 285, ""),
        ("RTX4070S", 2024, "12@504", "fp32 35.5", "PCIe 4.0 x16", 220, "RTX4070-Super"),
        ("RTX4070", 2023, "12@504", "fp32 29.1", "PCIe 4.0 x16", 200, ""),
        ("RTX4060Ti", 2023, "8@288 16@288", "fp32 22.1", "PCIe 4.0 x8", None, ""),
        ("RTX4060", 2023, "8@272", "fp32 15.1", "PCIe 4.0 x8", 115, ""),
        ("RTX3090Ti", 2022, "24@1008", "fp32 40 tf32 40 bf16 80 fp16 80 int8 320", "NVLink bridge, 112.5 GB/s",
         450, ""),
        ("RTX3090", 2020, "24@936", "fp32 35.6 tf32 35.6 bf16 71 fp16 71 int8 284", "NVLink bridge, 112.5 GB/s",
         350, ""),
        ("RTX3080Ti", 2021, "12@912", "fp32 34.1", "PCIe 4.0 x16", 350, ""),
        ("RTX3080", 2020, "10@760 12@912", "fp32 29.8", "PCIe 4.0 x16", 320, ""),
        ("RTX3070", 2020, "8@448", "fp32 20.3", "PCIe 4.0 x16", 220, ""),
        ("RTX3060Ti", 2020, "8@448", "fp32 16.2", "PCIe 4.0 x16", 200, ""),
        ("RTX3060", 2021, "12@360", "fp32 12.7", "PCIe 4.0 x16", 170, ""),
        ("RTX2080Ti", 2018, "11@616", "fp32 13.4", "NVLink bridge, 100 GB/s", 250, ""),
        ("GTX1660S", 2019, "6@336", "fp32 5", "PCIe 3.0 x16", 125, "GTX1660-Super"),
        ("GTX1080Ti", 2017, "11@484", "fp32 11.3", "PCIe 3.0 x16", 250, ""),
    ),
    *_rows(
        Vendor.AMD,
        AcceleratorKind.GPU,
        "AMD % data sheet",
        ("MI355X", 2025, "288@8000", "fp64 78.6 fp32 157.3 bf16 2500 fp16 2500 fp8 5000 int8 5000 "
                                     "fp4 10100",
         "Infinity Fabric, 1075 GB/s", 1400, ""),
        ("MI350X", 2025, "288@8000", "fp64 72.1 fp32 144.2 bf16 2300 fp16 2300 fp8 4600 int8 4600 "
                                     "fp4 9200",
         "Infinity Fabric, 1075 GB/s", 1000, ""),
        ("MI325X", 2024, "256@6000", _CDNA3, "Infinity Fabric, 896 GB/s", 1000, ""),
        ("MI300X", 2023, "192@5300", _CDNA3, "Infinity Fabric, 896 GB/s", 750, ""),
        ("MI300A", 2023, "128@5300",
         "fp64 122.6 fp32 122.6 tf32 490.3 bf16 980.6 fp16 980.6 fp8 1961.2 int8 1961.2",
         "Infinity Fabric", 550, ""),
        ("MI250X", 2021, "128@3277", "fp64 95.7 fp32 47.9 bf16 383 fp16 383 int8 383", "Infinity Fabric, 800 GB/s",
         560, ""),
        ("MI250", 2021, "128@3277", "fp64 90.5 fp32 45.3 bf16 362.1 fp16 362.1 int8 362.1",
         "Infinity Fabric, 800 GB/s", 560, ""),
        ("MI210", 2022, "64@1638", "fp64 45.3 fp32 22.6 bf16 181 fp16 181 int8 181",
         "Infinity Fabric bridge, 300 GB/s", 300, ""),
        ("MI100", 2020, "32@1229", "fp64 11.5 fp32 23.1 bf16 92.3 fp16 184.6 int8 184.6",
         "Infinity Fabric bridge, 276 GB/s", 300, ""),
        ("MI25", 2017, "16@484", "fp32 12.3 fp16 24.6", "PCIe 3.0 x16", 300, "Radeon-MI25"),
        ("V710", 2024, "28", "", "PCIe 4.0 x16", None, "Radeon-Pro-V710"),
        ("V520", 2020, "8", "", "PCIe 4.0 x16", None, "Radeon-Pro-V520"),
    ),
    *_rows(
        Vendor.INTEL,
        AcceleratorKind.ASIC,
        "Intel % white paper",
        ("Gaudi3", 2024, "128@3700", "bf16 1677 fp8 1677", "RoCE, 24 x 200 Gbit/s", 900, "HL-325L"),
        ("Gaudi2", 2022, "96@2450", "bf16 432 fp8 865", "RoCE, 24 x 100 Gbit/s", 600, "HL-225H HL-225"),
        ("Gaudi", 2019, "32@1000", "", "RoCE, 10 x 100 Gbit/s", 350, "Gaudi1 Gaudi-HL-205 HL-205"),
    ),
    *_rows(
        Vendor.INTEL,
        AcceleratorKind.GPU,
        "Intel % product brief",
        ("Max1550", 2022, "128@3277", "fp64 52.4 fp32 52.4", "Xe Link", 600, "Data-Center-Max-1550 PVC"),
        ("Max1100", 2022, "48@1229", "fp64 22.2 fp32 22.2", "Xe Link", 300, "Data-Center-Max-1100"),
        ("Flex170", 2022, "16@576", "", "PCIe 4.0 x16", 150, "Data-Center-Flex-170"),
    ),
    *_rows(
        Vendor.GOOGLE,
        AcceleratorKind.TPU,
        "Google Cloud documentation, % (per chip)",
        ("TPU-v7", 2025, "192@7370", "bf16 2307 fp8 4614", "ICI, 9600 Gbit/s", None, "TPU7x Ironwood TPU-v7x"),
        ("TPU-v6e", 2024, "32@1640", "bf16 918 int8 1836", "ICI, 3584 Gbit/s", None, "Trillium"),
        ("TPU-v5p", 2023, "95@2765", "bf16 459 int8 918", "ICI, 4800 Gbit/s", None, ""),
        ("TPU-v5e", 2023, "16@819", "bf16 197 int8 394", "ICI, 1600 Gbit/s", None, "TPU-v5litepod TPU-v5lite"),
        ("TPU-v4", 2021, "32@1228", "bf16 275 int8 275", "ICI, 2400 Gbit/s", None, ""),
        ("TPU-v3", 2018, "32@900", "bf16 123", "ICI", None, ""),
        ("TPU-v2", 2017, "16@700", "bf16 45", "ICI", None, ""),
    ),
    *_rows(
        Vendor.AWS,
        AcceleratorKind.ASIC,
        "AWS Neuron documentation, % (per chip)",
        ("Trainium3", 2025, "144@4900", "bf16 671 fp8 2517", "NeuronLink", None, "Trn3"),
        ("Trainium2", 2024, "96@2900", "fp32 181 bf16 667 fp16 667 fp8 1299", "NeuronLink", None, "Trn2"),
        ("Trainium", 2020, "32@820", "fp32 47.5 bf16 190 fp16 190 fp8 190 int8 380", "NeuronLink", None,
         "Trn1 Trainium1"),
        ("Inferentia2", 2022, "32@820", "fp32 47.5 bf16 190 fp16 190 fp8 190 int8 380", "NeuronLink", None, "Inf2"),
        ("Inferentia", 2018, "8", "bf16 64 fp16 64 int8 128", "NeuronLink", None, "Inf1 Inferentia1"),
    ),
    *_rows(
        Vendor.QUALCOMM,
        AcceleratorKind.ASIC,
        "Qualcomm Cloud AI 100 product brief",
        ("AI100", 2020, "16", "", "PCIe 4.0", None, "Qualcomm-AI100 Cloud-AI-100"),
    ),
    *_rows(
        Vendor.AMD,
        AcceleratorKind.FPGA,
        "AMD (Xilinx) % product page; AWS F1/F2 and Azure NP documentation for memory",
        ("VU47P", 2018, "16@460", "", "PCIe", None, "FPGA-VU47P Virtex-UltraScale-VU47P"),
        ("VU9P", 2016, "64", "", "PCIe 3.0 x16", None, "FPGA-VU9P Virtex-UltraScale-VU9P"),
        ("U250", 2018, "64@77", "", "PCIe 3.0 x16", 225, "Alveo-U250 FPGA-U250"),
        ("U30", 2020, "8", "", "PCIe 3.0", None, "Alveo-U30"),
    ),
)  # fmt: skip
