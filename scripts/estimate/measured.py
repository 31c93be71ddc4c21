"""Trace the models of the published measurements that `benchmarks/estimate.py` uses, and write
their profiles to benchmarks/estimate_profiles.jsonl.gz.

Needs torch, timm (1.0.31) and ../shared/data (or CAVVY_DATA). No weights are loaded: every tensor
is fake. Run: python scripts/estimate/measured.py
"""

import csv
import gzip
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["TIMM_FUSED_ATTN"] = "0"  # the measured version of timm had no fused attention

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from cavvy.tracer.fake_device import fake_device
from cavvy.tracer.trace import trace_step

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "benchmarks" / "estimate_profiles.jsonl.gz"
VISION = ROOT / "benchmarks" / "estimate_vision.csv"
DATA = Path(os.environ.get("CAVVY_DATA", ROOT.parent / "shared" / "data")) / "performance"
# MPT: width, layers, heads (llm-foundry, scripts/train/yamls/pretrain)
MPT = {
    "125m": (768, 12, 12),
    "350m": (1024, 24, 16),
    "760m": (1536, 24, 12),
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 20),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
}
WORDS = 50368


class HalfNorm(nn.LayerNorm):
    """A layer norm in bfloat16, as MPT uses it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            half = self.weight.to(torch.bfloat16)
            return F.layer_norm(x.to(torch.bfloat16), self.normalized_shape, half, None, self.eps)


class Block(nn.Module):
    """A layer of MPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = HalfNorm(width, bias=False), HalfNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = (x.shape[0], x.shape[1], self.heads, -1)
        q, k, v = (
            each.view(split).transpose(1, 2) for each in self.qkv(self.first(x)).chunk(3, -1)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Mpt(nn.Module):
    """MPT without its position bias, which its attention kernel computes itself."""

    def __init__(self, width: int, layers: int, heads: int, checkpointed: bool) -> None:
        super().__init__()
        self.embed, self.checkpointed = nn.Embedding(WORDS, width), checkpointed
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = HalfNorm(width, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words).to(torch.bfloat16)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return F.linear(self.norm(x), self.embed.weight)


def trace_vision() -> Iterator[dict[str, Any]]:
    import timm

    with VISION.open() as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    for row in rows:
        name, batch, side = row["model"], int(row["batch"]), int(row["side"])
        with fake_device():
            model = timm.create_model(name).train()
            images, labels = torch.randn(batch, 3, side, side), torch.randint(0, 1000, (batch,))
            yield trace_step(
                model,
                lambda model=model, x=images, y=labels: F.cross_entropy(model(x), y),
                batch=batch,
                precision="fp16",
                optimizer="momentum",
                name=name,
            )


def trace_mpt() -> Iterator[dict[str, Any]]:
    seen = set()
    for row in csv.DictReader((DATA / "llm_foundry_mpt_training.csv").open()):
        size, length = row["Model"], int(row["SeqLen (T)"])
        checkpointed = row["Activation Checkpointing"] == "True"
        name = f"mpt-{size} {length}{' checkpointed' if checkpointed else ''}"
        if size not in MPT or int(row["# GPUs"]) > 8 or name in seen:
            continue
        seen.add(name)
        with fake_device():
            model = Mpt(*MPT[size], checkpointed)
            words = torch.zeros(1, length, dtype=torch.long)
            yield trace_step(
                model,
                lambda model=model, x=words: F.cross_entropy(model(x).flatten(0, 1), x.flatten()),
                batch=1,
                precision="bf16",
                name=name,
            )


def main() -> None:
    lines = []
    for trace in (trace_vision, trace_mpt):
        for profile in trace():
            lines.append(json.dumps(profile, separators=(",", ":")))
            print(profile["name"], len(lines[-1]), file=sys.stderr, flush=True)
    with gzip.GzipFile(OUT, "wb", mtime=0) as packed:
        packed.write(("\n".join(lines) + "\n").encode())


if __name__ == "__main__":
    main()
