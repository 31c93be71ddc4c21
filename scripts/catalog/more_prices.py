"""Prices that the price tables lack: commitments at AWS and Google, spot prices of Azure and of
AWS's Trainium, and IBM's H100 machine. Each table names its source and its date.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from decimal import Decimal

HOURS_PER_MONTH = 730  # with which Google's monthly prices are computed


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceTable:
    """Prices of one provider: rows of instance type, region or region/zone, and one price for each
    of the `columns`, in US dollars per hour. A column is `on-demand`, `spot`, or the months of a
    commitment. A missing price is "-".
    """

    provider: str
    source: str
    as_of: date
    columns: tuple[str, ...]
    rows: str

    def prices(self) -> Iterator[tuple[str, str, str, str]]:
        """Yield instance type, region or region/zone, column and price."""
        for name, place, *prices in map(str.split, self.rows.strip().splitlines()):
            for column, price in zip(self.columns, prices, strict=True):
                if price != "-":
                    yield name, place, column, price


_AWS_COMMITMENTS = """
    p4d.24xlarge us-east-1 13.921094
    p4d.24xlarge us-east-2 13.921092
    p4d.24xlarge us-west-2 13.921092
    p4d.24xlarge us-gov-west-1 16.706536
    p4d.24xlarge ca-central-1 16.009544
    p4d.24xlarge eu-west-1 15.08188
    p4d.24xlarge eu-central-1 17.392445
    p4d.24xlarge ap-northeast-1 19.579678
    p4d.24xlarge ap-northeast-2 19.280046
    p4d.24xlarge ap-south-1 17.02575
    p4d.24xlarge ap-southeast-1 16.705312
    p4d.24xlarge ap-southeast-2 18.097419
    p4d.24xlarge sa-east-1 22.684095
    p4de.24xlarge us-east-1 17.401365
    p4de.24xlarge us-west-2 17.401365
    p4de.24xlarge eu-central-1 21.740553
    p4de.24xlarge il-central-1 22.55349
    p4de.24xlarge ap-northeast-1 24.474597
    p4de.24xlarge ap-southeast-1 20.881639
    g4dn.2xlarge us-east-1 0.474
    g4dn.2xlarge us-east-2 0.474
    g4dn.2xlarge us-west-2 0.474
    g4dn.2xlarge eu-west-1 0.572
    g4dn.2xlarge eu-central-1 0.642
    g4dn.2xlarge ap-northeast-1 0.693
    g4dn.2xlarge ap-south-1 0.521
    g4dn.2xlarge sa-east-1 0.872
    g4dn.12xlarge us-east-1 2.465
    g4dn.12xlarge us-east-2 2.465
    g4dn.12xlarge us-west-2 2.465
    g4dn.12xlarge eu-west-1 2.977
    g4dn.12xlarge eu-central-1 3.337
    g4dn.12xlarge ap-northeast-1 3.604
    g4dn.12xlarge ap-south-1 2.713
    g4dn.12xlarge sa-east-1 4.538
    g4dn.16xlarge us-east-1 2.742
    g4dn.16xlarge us-east-2 2.742
    g4dn.16xlarge us-west-2 2.742
    g4dn.16xlarge eu-west-1 3.312
    g4dn.16xlarge eu-central-1 3.713
    g4dn.16xlarge ap-northeast-1 4.01
    g4dn.16xlarge ap-south-1 3.018
    g4dn.16xlarge sa-east-1 5.048
    g5.2xlarge us-east-1 0.76356
    g5.2xlarge us-east-2 0.76356
    g5.2xlarge us-west-2 0.76356
    g5.2xlarge eu-west-1 0.85236
    g5.2xlarge eu-central-1 0.95483
    g5.2xlarge ap-northeast-1 1.10739
    g5.4xlarge us-east-1 1.02312
    g5.4xlarge us-east-2 1.02312
    g5.4xlarge us-west-2 1.02312
    g5.4xlarge eu-west-1 1.14211
    g5.4xlarge eu-central-1 1.27941
    g5.4xlarge ap-northeast-1 1.48383
    g5.12xlarge us-east-1 3.57336
    g5.12xlarge us-east-2 3.57336
    g5.12xlarge us-west-2 3.57336
    g5.12xlarge ca-central-1 3.96764
    g5.12xlarge eu-west-1 3.98895
    g5.12xlarge eu-central-1 4.46848
    g5.12xlarge ap-northeast-1 5.18244
    g5.12xlarge ap-south-1 4.29087
    g5.16xlarge us-east-1 2.58048
    g5.16xlarge us-east-2 2.58048
    g5.16xlarge us-west-2 2.58048
    g5.16xlarge eu-west-1 2.8806
    g5.16xlarge eu-central-1 3.22688
    g5.16xlarge ap-northeast-1 3.74247
    g5.24xlarge us-east-1 5.13072
    g5.24xlarge us-east-2 5.13072
    g5.24xlarge us-west-2 5.13072
    g5.24xlarge eu-west-1 5.72743
    g5.24xlarge eu-central-1 6.41595
    g5.24xlarge ap-northeast-1 7.44107
    g5.48xlarge us-east-1 10.26144
    g5.48xlarge us-east-2 10.26144
    g5.48xlarge us-west-2 10.26144
    g5.48xlarge eu-west-1 11.45487
    g5.48xlarge eu-central-1 12.8319
    g5.48xlarge ap-northeast-1 14.88215
    g6.xlarge us-east-1 0.52392
    g6.xlarge us-east-2 0.52392
    g6.xlarge us-west-2 0.52392
    g6.xlarge ca-central-1 0.58173
    g6.xlarge eu-central-1 0.65517
    g6.xlarge eu-north-1 0.55569
    g6.xlarge eu-west-2 0.66506
    g6.xlarge ap-northeast-1 0.75985
    g6.xlarge ap-south-1 0.62913
    g6.xlarge sa-east-1 0.89057
    g6.2xlarge us-east-1 0.63642
    g6.2xlarge us-east-2 0.63642
    g6.2xlarge us-west-2 0.63642
    g6.2xlarge ca-central-1 0.70664
    g6.2xlarge eu-central-1 0.79584
    g6.2xlarge eu-north-1 0.67501
    g6.2xlarge eu-west-2 0.80786
    g6.2xlarge ap-northeast-1 0.923
    g6.2xlarge ap-south-1 0.76421
    g6.2xlarge sa-east-1 1.08178
    g6.4xlarge us-east-1 0.8614
    g6.4xlarge us-east-2 0.8614
    g6.4xlarge us-west-2 0.8614
    g6.4xlarge ca-central-1 0.95645
    g6.4xlarge eu-central-1 1.07718
    g6.4xlarge eu-north-1 0.91364
    g6.4xlarge eu-west-2 1.09345
    g6.4xlarge ap-northeast-1 1.24929
    g6.4xlarge ap-south-1 1.03437
    g6.4xlarge sa-east-1 1.46421
    g6.8xlarge us-east-1 1.31137
    g6.8xlarge us-east-2 1.31137
    g6.8xlarge us-west-2 1.31137
    g6.8xlarge ca-central-1 1.45607
    g6.8xlarge eu-central-1 1.63987
    g6.8xlarge eu-north-1 1.39089
    g6.8xlarge eu-west-2 1.66464
    g6.8xlarge ap-northeast-1 1.90188
    g6.8xlarge ap-south-1 1.57469
    g6.8xlarge sa-east-1 2.22908
    g6.12xlarge us-east-1 2.99564
    g6.12xlarge us-east-2 2.99564
    g6.12xlarge us-west-2 2.99564
    g6.12xlarge ca-central-1 3.32617
    g6.12xlarge eu-central-1 3.74604
    g6.12xlarge eu-north-1 3.17729
    g6.12xlarge eu-west-2 3.80262
    g6.12xlarge ap-northeast-1 4.34457
    g6.12xlarge ap-south-1 3.59715
    g6.12xlarge sa-east-1 5.092
    g6.16xlarge us-east-1 2.21132
    g6.16xlarge us-east-2 2.21132
    g6.16xlarge us-west-2 2.21132
    g6.16xlarge ca-central-1 2.45531
    g6.16xlarge eu-central-1 2.76525
    g6.16xlarge eu-north-1 2.3454
    g6.16xlarge eu-west-2 2.80701
    g6.16xlarge ap-northeast-1 3.20707
    g6.16xlarge ap-south-1 2.65534
    g6.16xlarge sa-east-1 3.7588
    g6.24xlarge us-east-1 4.34556
    g6.24xlarge us-east-2 4.34556
    g6.24xlarge us-west-2 4.34556
    g6.24xlarge ca-central-1 4.82503
    g6.24xlarge eu-central-1 5.4341
    g6.24xlarge eu-north-1 4.60905
    g6.24xlarge eu-west-2 5.51618
    g6.24xlarge ap-northeast-1 6.30235
    g6.24xlarge ap-south-1 5.21812
    g6.24xlarge sa-east-1 7.38658
    g6.48xlarge us-east-1 8.69111
    g6.48xlarge us-east-2 8.69111
    g6.48xlarge us-west-2 8.69111
    g6.48xlarge ca-central-1 9.65007
    g6.48xlarge eu-central-1 10.86821
    g6.48xlarge eu-north-1 9.21811
    g6.48xlarge eu-west-2 11.03235
    g6.48xlarge ap-northeast-1 12.6047
    g6.48xlarge ap-south-1 10.43624
    g6.48xlarge sa-east-1 14.77316
    gr6.4xlarge us-east-1 1.00202
    gr6.4xlarge us-east-2 1.00202
    gr6.4xlarge us-west-2 1.00202
    gr6.4xlarge ca-central-1 1.11256
    gr6.4xlarge eu-central-1 1.25304
    gr6.4xlarge eu-north-1 1.06282
    gr6.4xlarge eu-west-2 1.27199
    gr6.4xlarge ap-northeast-1 1.45323
    gr6.4xlarge ap-south-1 1.20324
    gr6.4xlarge sa-east-1 1.70328
    gr6.8xlarge us-east-1 1.59261
    gr6.8xlarge us-east-2 1.59261
    gr6.8xlarge us-west-2 1.59261
    gr6.8xlarge ca-central-1 1.7683
    gr6.8xlarge eu-central-1 1.99159
    gr6.8xlarge eu-north-1 1.68925
    gr6.8xlarge eu-west-2 2.0217
    gr6.8xlarge ap-northeast-1 2.30976
    gr6.8xlarge ap-south-1 1.91243
    gr6.8xlarge sa-east-1 2.70718
    g6e.xlarge us-east-1 1.17243
    g6e.xlarge us-east-2 1.17243
    g6e.xlarge us-west-2 1.17243
    g6e.xlarge eu-central-1 1.46601
    g6e.xlarge eu-north-1 1.24362
    g6e.xlarge ap-northeast-1 1.70037
    g6e.2xlarge us-east-1 1.41251
    g6e.2xlarge us-east-2 1.41251
    g6e.2xlarge us-west-2 1.41251
    g6e.2xlarge eu-central-1 1.76621
    g6e.2xlarge eu-north-1 1.49828
    g6e.2xlarge ap-northeast-1 2.04856
    g6e.4xlarge us-east-1 1.89267
    g6e.4xlarge us-east-2 1.89267
    g6e.4xlarge us-west-2 1.89267
    g6e.4xlarge eu-central-1 2.3666
    g6e.4xlarge eu-north-1 2.00759
    g6e.4xlarge ap-northeast-1 2.74493
    g6e.8xlarge us-east-1 2.85299
    g6e.8xlarge us-east-2 2.85299
    g6e.8xlarge us-west-2 2.85299
    g6e.8xlarge eu-central-1 3.56739
    g6e.8xlarge eu-north-1 3.02622
    g6e.8xlarge ap-northeast-1 4.13768
    g6e.12xlarge us-east-1 6.61036
    g6e.12xlarge us-east-2 6.61036
    g6e.12xlarge us-west-2 6.61036
    g6e.12xlarge eu-central-1 8.26562
    g6e.12xlarge eu-north-1 7.01174
    g6e.12xlarge ap-northeast-1 9.58698
    g6e.12xlarge ap-northeast-2 8.12709
    g6e.16xlarge us-east-1 4.77363
    g6e.16xlarge us-east-2 4.77363
    g6e.16xlarge us-west-2 4.77363
    g6e.16xlarge eu-central-1 5.96896
    g6e.16xlarge eu-north-1 5.06349
    g6e.16xlarge ap-northeast-1 6.92318
    g6e.24xlarge us-east-1 9.49132
    g6e.24xlarge us-east-2 9.49132
    g6e.24xlarge us-west-2 9.49132
    g6e.24xlarge eu-central-1 11.86798
    g6e.24xlarge eu-north-1 10.06764
    g6e.24xlarge ap-northeast-1 13.76522
    g6e.48xlarge us-east-1 18.98264
    g6e.48xlarge us-east-2 18.98264
    g6e.48xlarge us-west-2 18.98264
    g6e.48xlarge eu-central-1 23.73596
    g6e.48xlarge eu-north-1 20.13527
    g6e.48xlarge ap-northeast-1 27.53044
    inf2.xlarge us-east-1 0.47767
    inf2.xlarge us-east-2 0.47767
    inf2.xlarge us-west-2 0.47767
    inf2.xlarge eu-west-1 0.59708
    inf2.xlarge eu-central-1 0.7165
    inf2.xlarge eu-north-1 0.52543
    inf2.xlarge ap-northeast-1 0.7165
    inf2.xlarge ap-south-1 0.62097
    inf2.8xlarge us-east-1 1.23975
    inf2.8xlarge us-east-2 1.23975
    inf2.8xlarge us-west-2 1.23975
    inf2.8xlarge eu-west-1 1.54969
    inf2.8xlarge eu-central-1 1.85963
    inf2.8xlarge eu-north-1 1.36373
    inf2.8xlarge ap-northeast-1 1.85963
    inf2.8xlarge ap-south-1 1.61168
    inf2.24xlarge us-east-1 4.0891
    inf2.24xlarge us-east-2 4.0891
    inf2.24xlarge us-west-2 4.0891
    inf2.24xlarge eu-west-1 5.11137
    inf2.24xlarge eu-central-1 6.13365
    inf2.24xlarge eu-north-1 4.49801
    inf2.24xlarge ap-northeast-1 6.13365
    inf2.24xlarge ap-south-1 5.31583
    inf2.48xlarge us-east-1 8.1782
    inf2.48xlarge us-east-2 8.1782
    inf2.48xlarge us-west-2 8.1782
    inf2.48xlarge eu-west-1 10.22275
    inf2.48xlarge eu-central-1 12.2673
    inf2.48xlarge eu-north-1 8.99602
    inf2.48xlarge ap-northeast-1 12.2673
    inf2.48xlarge ap-south-1 10.63166
    trn1.2xlarge us-east-1 0.82681
    trn1.2xlarge us-east-2 0.82681
    trn1.2xlarge us-west-2 0.82681
    trn1.32xlarge us-east-1 13.22895
    trn1.32xlarge us-east-2 13.22895
    trn1.32xlarge us-west-2 13.22895
"""

# by zone; the source has no on-demand price of Trn2
_TRAINIUM_SPOT = """
    trn1.2xlarge us-east-1/use1-az5 0.2198
    trn1.2xlarge us-east-1/use1-az6 0.2482
    trn1.2xlarge us-east-2/use2-az3 0.154
    trn1.2xlarge us-west-2/usw2-az1 0.2564
    trn1.2xlarge us-west-2/usw2-az4 0.2298
    trn1.32xlarge us-east-1/use1-az4 6.1428
    trn1.32xlarge us-east-1/use1-az5 4.1506
    trn1.32xlarge us-east-1/use1-az6 2.4334
    trn1.32xlarge us-east-2/use2-az3 2.15
    trn1.32xlarge us-west-2/usw2-az1 3.7169
    trn1.32xlarge us-west-2/usw2-az4 3.677
    trn1n.32xlarge us-east-1/use1-az6 2.7033
    trn1n.32xlarge us-east-2/use2-az3 2.478
    trn1n.32xlarge us-west-2/usw2-az4 4.2537
    trn2.3xlarge ap-southeast-4/apse4-az3 2.7396
    trn2.48xlarge us-east-2/use2-az3 23.0631
"""

TABLES = (
    PriceTable(
        provider="aws",
        source="instances.vantage.sh, by tsaol/aws-gpu commits 18aebd1 and 299375b, standard "
        "reservation without upfront payment",
        as_of=date(2026, 8, 26),
        columns=("12",),
        rows=_AWS_COMMITMENTS,
    ),
    PriceTable(
        provider="aws",
        source="skypilot-catalog catalogs/v8/aws/vms.csv@00148f2",
        as_of=date(2026, 11, 20),
        columns=("spot",),
        rows=_TRAINIUM_SPOT,
    ),
    PriceTable(
        provider="azure",
        source="Azure Retail Prices API, read 2026-08-13",
        as_of=date(2026, 8, 13),
        columns=("spot",),
        rows="""
            Standard_NC96ads_A100_v4 swedencentral 5.858
            Standard_NC40ads_H100_v5 spaincentral 2.2376
            Standard_NC80adis_H100_v5 spaincentral 4.4753
            Standard_NC80adis_H100_v5 switzerlandnorth 5.418
            Standard_ND96isr_H100_v5 uksouth 22.7119
        """,
    ),
    PriceTable(
        provider="azure",
        source="Azure Retail Prices API, read 2026-09-16",
        as_of=date(2026, 9, 16),
        columns=("spot",),
        rows="Standard_ND96isr_H100_v5 eastus 18.169536",
    ),
    PriceTable(
        provider="azure",
        source="third party's notes of the Azure Retail Prices API, read 2026-10-02",
        as_of=date(2026, 10, 2),
        columns=("spot",),
        rows="""
            Standard_NV36ads_A10_v5 eastus2 0.59136
            Standard_NV36ads_A10_v5 centralus 0.59136
        """,
    ),
    PriceTable(
        provider="azure",
        source="Azure Retail Prices API, read in June 2026",
        as_of=date(2026, 6, 1),
        columns=("spot",),
        rows="""
            Standard_NC24ads_A100_v4 eastus2 0.948736
            Standard_NC96ads_A100_v4 eastus2 3.794944
        """,
    ),
    PriceTable(
        provider="ibm",
        source="IBM Cloud Global Catalog, read 2026-10-05",
        as_of=date(2026, 10, 5),
        columns=("on-demand",),
        rows="gx3d-160x1792x8h100 eu-de 99.60",
    ),
)

# US dollars per month for one GPU with its share of the machine, with commitments of one and three
# years. From Cyclenerd/google-cloud-pricing-cost-calculator, pricing.yml, commit 0166a59, which
# reads Google's Cloud Billing Catalog. Of A3 High, Google commits whole machines only.
_GOOGLE_COMMITMENTS = {
    "a2-highgpu": (
        (1, 2, 4, 8),
        """
        us-central1 1689.3711392 938.56707798
        us-east1 1689.3711392 938.56707798
        us-west1 1689.3711392 938.56707798
        us-west3 2003.09573261 1070.28738446
        europe-west4 1723.6728172 957.62681807
        me-west1 1858.308075 1032.424108
        asia-northeast1 1846.61330783 1038.71536699
        asia-northeast3 1846.61330783 1038.71536699
        asia-southeast1 1830.13370383 1029.5572739
        """,
    ),
    "a2-megagpu": (
        (16,),
        """
        us-central1 1602.1434392 890.10724854
        europe-west4 1627.6400032 904.27501481
        asia-southeast1 1722.51929383 969.77164046
        """,
    ),
    "a3-highgpu": (
        (8,),
        """
        us-central1 5601.26008308 3546.37477674
        us-west1 5601.26008308 3546.37477674
        us-east4 5605.04064372 3549.07518846
        us-east5 6303.92524038 3990.87205852
        us-west4 6307.70524038 3993.57205852
        europe-north1 6167.50598974 3904.88335112
        europe-west1 6163.72598974 3902.18335112
        europe-west3 6610.24304018 4185.2620695
        europe-west4 7123.99568024 4509.77509264
        europe-west9 6497.46186912 4113.79465628
        asia-east1 6479.73014466 4102.08452318
        asia-northeast1 8016.62232112 5075.11520222
        asia-south1 5831.35881502 3692.55018572
        asia-south2 6727.6322334 4259.52113846
        asia-southeast1 7234.27638896 4579.66359028
        australia-southeast1 7005.35553674 4435.66838588
        """,
    ),
}


# US dollars per month for g2-standard-24 (two L4) and g2-standard-32 (one L4), with commitments of
# one and three years, from the same file. Google adds up the prices of parts, and all machines of
# G2 have 4 GiB for each CPU, so that two machines give the prices of an L4 and of a CPU, and these
# the prices of all others.
_GOOGLE_L4 = """
    asia-northeast1 1181.69887048 844.07074024 1024.32889564 731.66358532
    asia-northeast3 1181.69887048 844.07074024 1024.32889564 731.66358532
    asia-south1 957.86747352 684.19088524 830.30574636 593.07534102
    asia-southeast1 1135.22958752 810.87827096 984.04805336 702.89147628
    europe-west1 1013.21349808 723.72373448 878.28119744 627.34350764
    europe-west2 1047.70744786 748.36245212 908.18145213 648.70106946
    europe-west3 1084.46908278 774.62080324 940.04742819 671.46253662
    europe-west4 967.1583266 690.82715902 838.3593093 598.82783811
    europe-west6 1287.24399328 919.45983752 1115.81832104 797.01292836
    me-central2 1472.29276784 1051.63762624 1276.22362712 911.58821832
    northamerica-northeast1 1013.21349808 723.72373448 878.28119744 627.34350764
    northamerica-northeast2 1013.21349808 723.72373448 878.28119744 627.34350764
    us-central1 920.18289084 657.2734507 797.63967862 569.74257075
    us-east1 920.18289084 657.2734507 797.63967862 569.74257075
    us-east4 917.16994432 655.12135376 795.02798536 567.87708568
    us-west1 920.18289084 657.2734507 797.63967862 569.74257075
"""
_L4_OF_G2 = {4: 1, 8: 1, 12: 1, 16: 1, 24: 2, 32: 1, 48: 4, 96: 8}  # by CPUs


def list_tables() -> Sequence[PriceTable]:
    return (*TABLES, _make_google_table())


def _make_google_table() -> PriceTable:
    rows = []
    for series, (counts, table) in _GOOGLE_COMMITMENTS.items():
        for region, *months in map(str.split, table.strip().splitlines()):
            for count in counts:
                rates = [count * Decimal(each) / HOURS_PER_MONTH for each in months]
                rows.append(" ".join([f"{series}-{count}g", region, *map(str, rates)]))
    for region, *months in map(str.split, _GOOGLE_L4.strip().splitlines()):
        parts = [
            _split_g2(*map(Decimal, pair)) for pair in zip(months[:2], months[2:], strict=True)
        ]
        for cpus, count in _L4_OF_G2.items():
            rates = [(count * l4 + cpus * cpu) / HOURS_PER_MONTH for l4, cpu in parts]
            rows.append(" ".join([f"g2-standard-{cpus}", region, *map(str, rates)]))
    return PriceTable(
        provider="gcp",
        source="Google Cloud Billing Catalog, by Cyclenerd/google-cloud-pricing-cost-calculator "
        "commit 0166a59",
        as_of=date(2025, 3, 6),
        columns=("12", "36"),
        rows="\n".join(rows),
    )


def _split_g2(small: Decimal, large: Decimal) -> tuple[Decimal, Decimal]:
    """The price of an L4 and of a CPU with its memory, from those of g2-standard-24 and -32."""
    cpu = (2 * large - small) / (2 * 32 - 24)
    return large - 32 * cpu, cpu
