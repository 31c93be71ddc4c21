"""Trace the models of the measurements that `benchmarks/estimate.py` uses, and write their profiles
to benchmarks/estimate_profiles.jsonl.gz.

Needs torch, torchvision, timm (1.0.31), transformers, peft, diffusers and ../shared/data (or
CAVVY_DATA). No weights are loaded: every tensor is fake. Run: python scripts/estimate/measured.py
"""

import csv
import gzip
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["TIMM_FUSED_ATTN"] = "0"  # the measured version of timm had no fused attention

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.estimate_steps import MEASURED, UNSEEN, name_measured

from cavvy.capabilities.estimates.tracer.fake_device import fake_device
from cavvy.capabilities.estimates.tracer.trace import trace_step

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


class RmsNorm(nn.Module):
    """A root-mean-square norm as Llama's published code writes it, which runs as many kernels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


class LlamaBlock(nn.Module):
    """A layer of Llama, whose groups of query heads share a key head."""

    def __init__(self, width: int, inner: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.wide = width // heads
        self.first, self.second = RmsNorm(width), RmsNorm(width)
        self.q, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, key_heads * self.wide, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        q, k, v = (
            each(y).unflatten(-1, (-1, self.wide)).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """The Llama of h200_training_more.jsonl."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.embed, self.checkpointed = nn.Embedding(32000, 2048), checkpointed
        self.blocks = nn.ModuleList(LlamaBlock(2048, 5632, 32, 4) for _ in range(22))
        self.norm, self.head = RmsNorm(2048), nn.Linear(2048, 32000, bias=False)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.zeros(2048, 64))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x, more = self.embed(words), (self.cos, self.sin)
        for block in self.blocks:
            x = (
                checkpoint(block, x, *more, use_reentrant=False)
                if self.checkpointed
                else block(x, *more)
            )
        return self.head(self.norm(x)).float()


class Recurrent(nn.Module):
    """The LSTM of h200_training_more.jsonl."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(256, 1024, 2, batch_first=True)
        self.head = nn.Linear(1024, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x)[0][:, -1])


def trace_more() -> Iterator[dict[str, Any]]:
    """Trace the models of h200_training_more.jsonl for which `cavvy estimate` has no profile."""
    import torchvision

    words = torch.zeros(1, 2048, dtype=torch.long)
    image, series = (64, 3, 224, 224), (64, 256, 256)
    for name, make, size in (
        ("vgg16 torchvision", torchvision.models.vgg16, image),
        ("lstm_256", Recurrent, series),
        ("llama_1b_2048", lambda: Llama(False), ()),
        ("llama_1b_2048 checkpointed", lambda: Llama(True), ()),
    ):
        with fake_device():
            model = make().train()
            x = torch.randn(size) if size else words
            y = torch.randint(0, 1000, (64,)) if size else words.flatten()
            yield trace_step(
                model,
                lambda model=model, x=x, y=y: F.cross_entropy(model(x).flatten(0, -2), y),
                batch=len(x),
                precision="bf16",
                name=name,
            )


def trace_measured() -> Iterator[dict[str, Any]]:
    """Trace the models of benchmarks/estimate_measured.jsonl and benchmarks/estimate_unseen.jsonl
    with at most eight samples, or all of those whose samples are tiny.
    """
    from benchmarks.gpu import models

    seen = set()
    lines = [line for path in (MEASURED, UNSEEN) for line in path.read_text().splitlines()[1:]]
    for row in map(json.loads, lines):
        case = models.find_case(row)
        name = name_measured({"activation_checkpointing": False, **row})
        if name in seen:
            continue
        seen.add(name)
        models.allow_tf32(case)
        with fake_device():
            model = models.make(case).train()
            # The rows of a model in NCHW and in channels-last memory share a profile in NCHW.
            samples = case.batch if case.batch > 4096 else min(8, case.batch)
            x, y = models.make_batch(replace(case, batch=samples, channels_last=False))
            yield trace_step(
                model,
                lambda model=model, x=x, y=y: models.loss_of(model, x, y),
                batch=samples,
                precision="fp32" if case.precision == "tf32" else case.precision,
                name=name,
            )


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
    for trace in (trace_more, trace_measured, trace_vision, trace_mpt):
        for profile in trace():
            lines.append(json.dumps(profile, separators=(",", ":")))
            print(profile["name"], len(lines[-1]), file=sys.stderr, flush=True)
    with gzip.GzipFile(OUT, "wb", mtime=0) as packed:
        packed.write(("\n".join(lines) + "\n").encode())


if __name__ == "__main__":
    main()
