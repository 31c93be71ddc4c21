"""Measures whole training steps on this machine's GPU, of models that were not used to write the
formulas of `cavvy estimate`, and prints one line of JSON for each. Needs torch, and for some of the
models torchvision, timm, transformers, peft or diffusers; no weights are loaded.

    python benchmarks/gpu/models.py [--seconds 150] [--operations FILE] [--estimate]
    python benchmarks/gpu/models.py --smoke    # tiny batches, to try the script on a CPU

With --estimate, each line also has the estimate of `cavvy estimate` for the step, which needs
Cavvy. benchmarks/estimate_measured.jsonl has the lines of an H200 and an H100, and
benchmarks/estimate_unseen.jsonl those of the models of libraries on an H200.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WARM, STEPS, MODEL_S = 5, 30, 2.5


@dataclass(frozen=True)
class Case:
    """One model with the settings of its step."""

    model: str
    batch: int
    precision: str = "bf16"
    activation_checkpointing: bool = False
    optimizer: str = "adamw"
    channels_last: bool = False
    fused: bool = False
    compiled: bool = False
    profiled: bool = False  # whether the operations of a step are listed


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, key_heads: int, causal: bool, bias: bool) -> None:
        super().__init__()
        self.heads, self.key_heads, self.causal = heads, key_heads, causal
        size = width // heads
        self.q = nn.Linear(width, width, bias=bias)
        self.k, self.v = (nn.Linear(width, key_heads * size, bias=bias) for _ in range(2))
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x: torch.Tensor, turn: Any) -> Any:
        """`turn` is None, a bias of the scores, or the cosines and sines of the positions."""
        rows, length = x.shape[:2]
        q = self.q(x).view(rows, length, self.heads, -1).transpose(1, 2)
        k = self.k(x).view(rows, length, self.key_heads, -1).transpose(1, 2)
        v = self.v(x).view(rows, length, self.key_heads, -1).transpose(1, 2)
        if isinstance(turn, tuple):
            q, k = rotate(q, *turn), rotate(k, *turn)
        if self.heads != self.key_heads:
            k, v = (each.repeat_interleave(self.heads // self.key_heads, dim=1) for each in (k, v))
        if isinstance(turn, torch.Tensor):
            seen = (q @ k.transpose(-1, -2) + turn).softmax(-1).to(v.dtype) @ v
        else:
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(seen.transpose(1, 2).reshape(x.shape))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding (Su et al. 2021), as transformers computes it."""
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


class Block(nn.Module):
    """A layer of a transformer: a decoder as in GPT-2 or Llama, or an encoder as in BERT."""

    def __init__(self, kind: str, width: int, heads: int, key_heads: int, inner: int) -> None:
        super().__init__()
        self.kind = kind
        gated, bias = kind == "llama", kind in ("bert", "gpt")
        norm = nn.LayerNorm if bias else nn.RMSNorm
        self.first, self.second = norm(width), norm(width)
        self.attention = Attention(width, heads, key_heads, kind in ("gpt", "llama"), bias)
        self.up, self.down = nn.Linear(width, inner, bias), nn.Linear(inner, width, bias)
        self.gate = nn.Linear(width, inner, bias) if gated else None
        self.drop = nn.Dropout(0.0 if gated else 0.1)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        if self.gate is None:
            return self.down(F.gelu(self.up(x), approximate="tanh"))
        return self.down(F.silu(self.gate(x)) * self.up(x))

    def forward(self, x: torch.Tensor, turn: Any) -> torch.Tensor:
        if self.kind == "bert":
            x = self.first(x + self.drop(self.attention(x, turn)))
            return self.second(x + self.drop(self.inner(x)))
        x = x + self.drop(self.attention(self.first(x), turn))
        return x + self.drop(self.inner(self.second(x)))


class Text(nn.Module):
    """A language model."""

    def __init__(
        self,
        kind: str,
        words: int,
        length: int,
        width: int,
        layers: int,
        heads: int,
        key_heads: int,
        inner: int,
    ) -> None:
        super().__init__()
        self.kind, self.checkpointed, self.size = kind, False, width // heads
        self.embed = nn.Embedding(words, width)
        self.places = nn.Embedding(length, width) if kind in ("bert", "gpt") else None
        self.bias = nn.Embedding(32, heads) if kind == "t5" else None
        self.blocks = nn.ModuleList(
            Block(kind, width, heads, key_heads, inner) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width) if kind == "llama" else nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        if kind != "llama":
            self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x, turn = self.embed(words), None
        place = torch.arange(words.shape[1], device=words.device)
        if self.places is not None:
            x = x + self.places(place)
        elif self.bias is not None:
            far = (place[:, None] - place).abs().clamp(max=31)
            turn = self.bias(far).permute(2, 0, 1)
        else:
            angles = place[:, None] / 10000 ** (
                torch.arange(0, self.size, 2, device=words.device) / self.size
            )
            angles = torch.cat((angles, angles), -1)
            turn = angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)
        for block in self.blocks:
            if self.checkpointed:
                x = checkpoint(block, x, turn, use_reentrant=False)
            else:
                x = block(x, turn)
        return self.head(self.norm(x))


# kind, words, length, width, layers, heads, heads of keys, inner width
TEXT: dict[str, tuple[str, int, int, int, int, int, int, int]] = {
    "bert_base_512": ("bert", 30522, 512, 768, 12, 12, 12, 3072),
    "bert_large_256": ("bert", 30522, 256, 1024, 24, 16, 16, 4096),
    "distilbert_128": ("bert", 30522, 128, 768, 6, 12, 12, 3072),
    "gpt2_medium_1024": ("gpt", 50257, 1024, 1024, 24, 16, 16, 4096),
    "gpt2_large_1024": ("gpt", 50257, 1024, 1280, 36, 20, 20, 5120),
    "gpt_tiny_256": ("gpt", 65, 256, 384, 6, 6, 6, 1536),
    "gpt2_1024": ("gpt", 50257, 1024, 768, 12, 12, 12, 3072),
    "gpt_1.3b_1024": ("gpt", 50257, 1024, 2048, 24, 32, 32, 8192),
    "t5_base_512": ("t5", 32128, 512, 768, 12, 12, 12, 3072),
    "llama_300m_2048": ("llama", 32000, 2048, 1024, 22, 16, 16, 2816),
    "llama_1b_2048": ("llama", 32000, 2048, 2048, 22, 32, 4, 5632),
    "llama_3b_2048": ("llama", 32000, 2048, 3072, 26, 24, 8, 8192),
    "llama_1b_8192": ("llama", 32000, 8192, 2048, 16, 16, 8, 8192),
    "qwen_1.5b_2048": ("llama", 151936, 2048, 1536, 28, 12, 2, 8960),
    "qwen_0.5b_1024": ("llama", 151936, 1024, 896, 24, 14, 2, 4864),
}


class Recurrent(nn.Module):
    """A language model of recurrent layers."""

    def __init__(self, kind: str, words: int, width: int, layers: int, both: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        made = nn.LSTM if kind == "lstm" else nn.GRU
        self.cells = made(width, width, layers, batch_first=True, bidirectional=both, dropout=0.1)
        self.head = nn.Linear(width * (2 if both else 1), words)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.cells(self.embed(words))[0])


# kind, words, width, layers, both directions; length
RECURRENT: dict[str, tuple[tuple[str, int, int, int, bool], int]] = {
    "lstm_650_128": (("lstm", 10000, 650, 2, False), 128),
    "lstm_1024_512": (("lstm", 10000, 1024, 2, False), 512),
    "bilstm_256_256": (("lstm", 10000, 256, 2, True), 256),
    "gru_512_256": (("gru", 10000, 512, 3, False), 256),
}


def double(inputs: int, outputs: int) -> nn.Module:
    layers: list[nn.Module] = []
    for low in (inputs, outputs):
        layers += [nn.Conv2d(low, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)]
        layers += [nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """The U-Net of Ronneberger et al. 2015, with normalisation and padding."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        sizes = [width * 2**each for each in range(5)]
        self.down = nn.ModuleList(
            double(low, high) for low, high in zip([3, *sizes], sizes, strict=False)
        )
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(2 * each, each, 2, stride=2) for each in reversed(sizes[:-1])
        )
        self.join = nn.ModuleList(double(2 * each, each) for each in reversed(sizes[:-1]))
        self.head = nn.Conv2d(width, 21, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for index, layer in enumerate(self.down):
            x = layer(F.max_pool2d(x, 2) if index else x)
            kept.append(x)
        for up, join, other in zip(self.up, self.join, reversed(kept[:-1]), strict=True):
            x = join(torch.cat((up(x), other), 1))
        return self.head(x)


class Residual(nn.Module):
    """A layer of the U-Net of a diffusion model, with group normalisation."""

    def __init__(self, inputs: int, outputs: int, attention: bool) -> None:
        super().__init__()
        self.first, self.second = nn.GroupNorm(32, inputs), nn.GroupNorm(32, outputs)
        self.one = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.two = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()
        self.attention = (
            Attention(outputs, outputs // 64, outputs // 64, False, True) if attention else None
        )
        self.norm = nn.GroupNorm(32, outputs) if attention else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.two(F.silu(self.second(self.one(F.silu(self.first(x))))))
        x = self.skip(x) + y
        if self.attention is not None and self.norm is not None:
            flat = self.norm(x).flatten(2).transpose(1, 2)
            x = x + self.attention(flat, None).transpose(1, 2).reshape(x.shape)
        return x


class Diffusion(nn.Module):
    """A U-Net with attention at its lower levels, as diffusion models use it (Ho et al. 2020)."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        sizes = [width, 2 * width, 2 * width, 4 * width]
        self.start = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(
            Residual(low, high, index > 1)
            for index, (low, high) in enumerate(zip([width, *sizes], sizes, strict=False))
        )
        back = sizes[::-1]
        self.up = nn.ModuleList(
            Residual(low + high, high, index < 2)
            for index, (low, high) in enumerate(zip([back[0], *back], back, strict=False))
        )
        self.head = nn.Conv2d(back[-1], 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, kept = self.start(x), []
        for index, layer in enumerate(self.down):
            x = layer(F.avg_pool2d(x, 2) if index else x)
            kept.append(x)
        for index, layer in enumerate(self.up):
            x = F.interpolate(x, scale_factor=2.0) if index else x
            x = layer(torch.cat((x, kept.pop()), 1))
        return self.head(x)


def make_mlp() -> nn.Module:
    layers: list[nn.Module] = []
    for low, high in ((512, 2048), (2048, 2048), (2048, 2048), (2048, 1000)):
        layers += [nn.Linear(low, high), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Clicks(nn.Module):
    """A recommender: look-ups in tables, and their products (Naumov et al. 2019, DLRM)."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(100_000, 64, mode="sum") for _ in range(26))
        self.low = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, 64), nn.ReLU())
        self.high = nn.Sequential(nn.Linear(415, 512), nn.ReLU(), nn.Linear(512, 2))

    def forward(self, numbers: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        low = self.low(numbers)
        found = [each(words[:, at]) for at, each in enumerate(self.tables)]
        x = torch.stack([low, *found], 1)
        rows, columns = torch.tril_indices(27, 27, -1, device=x.device)
        return self.high(torch.cat((low, (x @ x.transpose(1, 2))[:, rows, columns]), 1))


class Waves(nn.Module):
    """Dilated convolutions over a series (Bai et al. 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Conv1d(16, 256, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(256, 256, 3, padding=2**at, dilation=2**at), nn.ReLU(), nn.Dropout(0.1)
            )
            for at in range(8)
        )
        self.head = nn.Conv1d(256, 100, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Translator(nn.Module):
    """The base model of Vaswani et al. 2017, by PyTorch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32000, 512)
        self.body = nn.Transformer(batch_first=True)
        self.head = nn.Linear(512, 32000)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        x = self.body(self.embed(source), self.embed(target), tgt_mask=mask, tgt_is_causal=True)
        return self.head(x)


# models of transformers: configuration, class, settings
HUGGING_FACE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "hf_whisper_small": (
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {
            **{"d_model": 768, "encoder_layers": 12, "decoder_layers": 12},
            **{"encoder_attention_heads": 12, "decoder_attention_heads": 12},
            **{"encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072},
        },
    ),
    "hf_t5_base": (
        "T5Config",
        "T5ForConditionalGeneration",
        {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
    ),
    "hf_mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {
            **{"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8},
            **{"num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32000},
        },
    ),
    "hf_lora_llama_1b": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            **{"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22},
            **{"num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000},
        },
    ),
    "hf_deberta_v3_base": (
        "DebertaV2Config",
        "DebertaV2ForSequenceClassification",
        {
            **{"vocab_size": 128100, "relative_attention": True, "position_buckets": 256},
            **{"pos_att_type": ["p2c", "c2p"], "norm_rel_ebd": "layer_norm"},
            **{"share_att_key": True, "type_vocab_size": 0, "num_labels": 3},
        },
    ),
    "hf_qwen3_0.6b": (
        "Qwen3Config",
        "Qwen3ForCausalLM",
        {
            **{"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
            **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
            **{"vocab_size": 151936, "tie_word_embeddings": True},
        },
    ),
    "hf_pythia_410m": (
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        {
            **{"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24},
            **{"num_attention_heads": 16, "vocab_size": 50304, "max_position_embeddings": 2048},
        },
    ),
    "hf_segformer_b2": (
        "SegformerConfig",
        "SegformerForSemanticSegmentation",
        {
            **{"depths": [3, 4, 6, 3], "hidden_sizes": [64, 128, 320, 512]},
            **{"decoder_hidden_size": 768, "num_labels": 150},
        },
    ),
    "hf_wav2vec2_base": ("Wav2Vec2Config", "Wav2Vec2ForCTC", {"apply_spec_augment": False}),
    "hf_clip_b32": ("CLIPConfig", "CLIPModel", {}),
}
# lengths of the inputs of models that are not images of 224 pixels
LENGTHS = {
    **{"hf_mixtral": 1024, "hf_lora_llama_1b": 1024, "hf_deberta_v3_base": 256},
    **{"hf_qwen3_0.6b": 1024, "hf_pythia_410m": 1024},
}


class Logits(nn.Module):
    """A model of a library of which only the scores are used."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **given: torch.Tensor) -> Any:
        out = self.inner(**given)
        if isinstance(out, torch.Tensor):
            return out
        for name in ("logits", "logits_per_image", "sample", "out"):
            if name in out:
                return out[name]
        raise KeyError(f"no scores in {list(out)}")


def make_library(name: str) -> nn.Module:
    """A model of transformers, diffusers, timm or torchvision, with random weights."""
    if name.startswith("timm_"):
        import timm

        return timm.create_model(name.removeprefix("timm_"), num_classes=1000)
    if name == "sd_unet":
        import diffusers

        return Logits(
            diffusers.UNet2DConditionModel(
                sample_size=64,
                cross_attention_dim=768,
            )
        )
    if name.startswith("video_"):
        import torchvision

        return getattr(torchvision.models.video, name.removeprefix("video_"))()  # type: ignore[no-any-return]
    if name == "deeplabv3_resnet50":
        import torchvision

        return torchvision.models.segmentation.deeplabv3_resnet50(
            weights_backbone=None, num_classes=21
        )
    import transformers

    config, model, settings = HUGGING_FACE[name]
    made = getattr(transformers, model)(getattr(transformers, config)(**settings))
    if name == "hf_lora_llama_1b":
        import peft

        chosen = ["q_proj", "k_proj", "v_proj", "o_proj"]
        made = peft.get_peft_model(
            made.to(torch.bfloat16), peft.LoraConfig(r=16, target_modules=chosen)
        )
    return Logits(made)


def make_library_batch(name: str, batch: int, small: bool) -> tuple[Any, torch.Tensor]:
    """The arguments and the target of a step of `make_library`'s model."""
    if name.startswith("timm_"):
        side = {"timm_vit_small_patch14_dinov2": 518, "timm_mobilevit_s": 256}.get(name, 224)
        return torch.randn(batch, 3, side, side), torch.randint(0, 1000, (batch,))
    if name.startswith("video_"):
        side = 224 if name == "video_mvit_v2_s" else 112
        return torch.randn(batch, 3, 16, side, side), torch.randint(0, 400, (batch,))
    if name == "deeplabv3_resnet50":
        return torch.randn(batch, 3, 512, 512), torch.randint(0, 21, (batch, 512, 512))
    if name == "sd_unet":
        side = 16 if small else 64
        shape = (batch, 4, side, side)
        given = {"sample": torch.randn(shape), "encoder_hidden_states": torch.randn(batch, 77, 768)}
        return {**given, "timestep": torch.randint(0, 1000, (batch,))}, torch.randn(shape)
    if name == "hf_segformer_b2":
        return {"pixel_values": torch.randn(batch, 3, 512, 512)}, torch.randint(
            0, 150, (batch, 128, 128)
        )
    if name == "hf_wav2vec2_base":
        return {"input_values": torch.randn(batch, 160_000)}, torch.randint(0, 32, (batch * 499,))
    if name == "hf_clip_b32":
        given = {"pixel_values": torch.randn(batch, 3, 224, 224)}
        return {**given, "input_ids": torch.randint(0, 49000, (batch, 77))}, torch.arange(batch)
    if name == "hf_whisper_small":
        words = torch.randint(0, 51865, (batch, 128))
        given = {"input_features": torch.randn(batch, 80, 3000), "decoder_input_ids": words}
        return given, words.flatten()
    if name == "hf_t5_base":
        words = torch.randint(0, 32128, (batch, 128))
        given = {"input_ids": torch.randint(0, 32128, (batch, 512)), "decoder_input_ids": words}
        return given, words.flatten()
    words = torch.randint(0, 32000, (batch, 32 if small else LENGTHS[name]))
    target = torch.randint(0, 3, (batch,)) if name == "hf_deberta_v3_base" else words.flatten()
    return {"input_ids": words}, target


LIBRARY = ("hf_", "timm_", "video_", "sd_unet", "deeplabv3")
OWN: dict[str, Callable[[], nn.Module]] = {
    "dlrm": Clicks,
    "tcn": Waves,
    "transformer_base": Translator,
}

# side of the images of each model that torchvision does not define
IMAGES = {"unet_64": 256, "diffusion_128": 64}

CASES = (
    Case("mobilenet_v3_large", 128),
    Case("llama_300m_2048", 4, profiled=True),
    Case("bert_base_512", 16, profiled=True),
    Case("efficientnet_b0", 128, profiled=True),
    Case("lstm_650_128", 64, profiled=True),
    Case("unet_64", 8, profiled=True),
    Case("swin_t", 64, profiled=True),
    Case("qwen_0.5b_1024", 8, profiled=True),
    Case("convnext_tiny", 64, profiled=True),
    Case("gpt2_medium_1024", 4, profiled=True),
    Case("mobilenet_v3_large", 512, channels_last=True, profiled=True),
    Case("llama_1b_2048", 2),
    Case("resnext50_32x4d", 64, profiled=True),
    Case("gru_512_256", 128, profiled=True),
    Case("diffusion_128", 16, profiled=True),
    Case("vit_l_16", 32),
    Case("mlp", 8192, profiled=True),
    Case("densenet121", 64),
    Case("llama_1b_2048", 6, activation_checkpointing=True),
    Case("efficientnet_b0", 256, channels_last=True),
    Case("gpt_tiny_256", 64),
    Case("convnext_tiny", 128, channels_last=True, profiled=True),
    Case("lstm_1024_512", 128),
    Case("bert_large_256", 32, fused=True),
    Case("unet_64", 16, channels_last=True, optimizer="momentum"),
    Case("llama_300m_2048", 16, fused=True),
    Case("regnet_y_1_6gf", 128, channels_last=True, optimizer="momentum"),
    Case("gpt2_large_1024", 4),
    Case("resnet34", 256, channels_last=True, optimizer="sgd"),
    Case("distilbert_128", 128),
    Case("bilstm_256_256", 64),
    Case("swin_t", 128, activation_checkpointing=False, precision="tf32"),
    Case("bert_base_512", 8, precision="tf32"),
    Case("mobilenet_v3_large", 128, precision="tf32"),
    Case("llama_300m_2048", 4, precision="tf32"),
    Case("gpt2_medium_1024", 16, activation_checkpointing=True),
    Case("qwen_1.5b_2048", 2),
    Case("llama_1b_8192", 1, fused=True),
    Case("diffusion_128", 32, channels_last=True),
    Case("mobilenet_v2", 256, precision="fp16", channels_last=True),
    Case("resnext50_32x4d", 128, channels_last=True),
    Case("gru_512_256", 512),
    Case("wide_resnet50_2", 64),
    Case("inception_v3", 64),
    Case("llama_3b_2048", 2),
    Case("efficientnet_v2_s", 64),
    Case("unet_64", 8, precision="fp32"),
    Case("mlp", 1024, optimizer="sgd"),
    Case("resnet18", 64),
    Case("resnet50", 64, profiled=True),
    Case("t5_base_512", 16, profiled=True),
    Case("regnet_y_1_6gf", 128, profiled=True),
    Case("shufflenet_v2_x1_0", 256, profiled=True),
    Case("mobilenet_v2", 128),
    Case("gpt_1.3b_1024", 4, profiled=True),
    Case("gpt2_1024", 8),
    Case("vit_b_16", 64),
    Case("gpt2_1024", 8, compiled=True),
    Case("vit_b_16", 64, compiled=True),
    # models of libraries, after the formulas were written
    Case("sd_unet", 8),
    Case("hf_whisper_small", 16),
    Case("hf_lora_llama_1b", 4),
    Case("timm_vit_small_patch14_dinov2", 32),
    Case("hf_mixtral", 8),
    Case("swin_v2_t", 64),
    Case("hf_t5_base", 16),
    Case("deeplabv3_resnet50", 16),
    Case("densenet121", 64),
    Case("hf_deberta_v3_base", 32),
    Case("timm_maxvit_tiny_tf_224", 64),
    Case("dlrm", 16384),
    Case("video_r3d_18", 16),
    Case("timm_convnextv2_tiny", 128, channels_last=True),
    Case("hf_qwen3_0.6b", 4),
    Case("hf_segformer_b2", 16),
    Case("tcn", 64),
    Case("hf_wav2vec2_base", 16),
    Case("mobilenet_v3_small", 32),
    Case("timm_eva02_base_patch14_224", 64),
    Case("hf_clip_b32", 256),
    Case("transformer_base", 64),
    Case("hf_pythia_410m", 8, fused=True),
    Case("timm_mixer_b16_224", 64),
    Case("video_mvit_v2_s", 8),
    Case("timm_mobilevit_s", 128),
    Case("efficientnet_b0", 16),
    Case("timm_hrnet_w18", 32),
    Case("densenet201", 64, channels_last=True),
    Case("swin_v2_t", 16, precision="tf32"),
    Case("timm_xcit_small_12_p16_224", 64),
    Case("maxvit_t", 64, optimizer="momentum"),
)


def estimate(case: Case, name: str, small: bool) -> dict[str, Any]:
    """The estimated milliseconds of a step, and the estimated and the needed memory."""
    from cavvy.capabilities.estimates.tracer.fake_device import fake_device
    from cavvy.capabilities.estimates.tracer.trace import trace_step
    from cavvy.cli.task.profiles import measured_devices
    from cavvy.planner.device_rates import device_of
    from cavvy.planner.estimate.profile import StepSettings, read_profile
    from cavvy.planner.estimate.table import estimate_on

    device = device_of(name)
    if device is None:
        raise SystemExit(f"no figures are known for {name}")
    allow_tf32(case)
    with fake_device():
        model = make(case).train()
        data, target = make_batch(case, small)
        traced = trace_step(
            model,
            lambda: loss_of(model, data, target),
            batch=2 if small else case.batch,
            precision="fp32" if case.precision == "tf32" else case.precision,
            name=case.model,
        )
    run = StepSettings(
        precision=case.precision,
        optimizer=case.optimizer,
        compile=case.compiled,
        channels_last=case.channels_last,
    )
    found = estimate_on(read_profile(traced), device, run, measured_devices())
    return {
        "estimated_ms": round(found.step.total * 1e3, 3),
        "estimated_gib": round(found.memory.peak / 1024, 3),
        "needed_gib": round(found.memory.needed / 1024, 3),
    }


def find_case(row: dict[str, Any]) -> Case:
    """The case of a printed line."""
    return Case(**{name: row[name] for name in Case.__dataclass_fields__ if name in row})


def make(case: Case) -> nn.Module:
    """The model of a case, on the default device."""
    if case.model in TEXT:
        text = Text(*TEXT[case.model])
        text.checkpointed = case.activation_checkpointing
        return text
    if case.model in RECURRENT:
        return Recurrent(*RECURRENT[case.model][0])
    if case.model in OWN:
        return OWN[case.model]()
    if case.model.startswith(LIBRARY):
        return make_library(case.model)
    if case.model == "mlp":
        return make_mlp()
    if case.model in IMAGES:
        return UNet() if case.model == "unet_64" else Diffusion()
    import torchvision

    more = {"aux_logits": False, "init_weights": False} if case.model == "inception_v3" else {}
    found: nn.Module = getattr(torchvision.models, case.model)(**more)
    return found


def make_batch(case: Case, small: bool = False) -> tuple[Any, torch.Tensor]:
    """The input and target of a step, on the default device."""
    batch = 2 if small else case.batch
    if case.model.startswith(LIBRARY):
        data, target = make_library_batch(case.model, batch, small)
        if case.channels_last and isinstance(data, torch.Tensor):
            data = data.contiguous(memory_format=torch.channels_last)
        return data, target
    if case.model == "dlrm":
        numbers = torch.randn(batch, 13)
        words = torch.randint(0, 100_000, (batch, 26, 4))
        return {"numbers": numbers, "words": words}, torch.randint(0, 2, (batch,))
    if case.model == "tcn":
        return torch.randn(batch, 16, 1024), torch.randint(0, 100, (batch, 1024))
    if case.model == "transformer_base":
        words = torch.randint(0, 32000, (batch, 128))
        return {"source": words, "target": words}, words.flatten()
    if case.model in TEXT or case.model in RECURRENT:
        words, length = (
            TEXT[case.model][1:3]
            if case.model in TEXT
            else (RECURRENT[case.model][0][1], RECURRENT[case.model][1])
        )
        data = torch.randint(0, words, (batch, 16 if small else length))
        return data, data.flatten()
    if case.model == "mlp":
        return torch.randn(batch, 512), torch.randint(0, 1000, (batch,))
    side = IMAGES.get(case.model, 299 if case.model == "inception_v3" else 224)
    images = torch.randn(batch, 3, side, side)
    if case.channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
    if case.model == "unet_64":
        return images, torch.randint(0, 21, (batch, side, side))
    if case.model == "diffusion_128":
        return images, torch.randn_like(images)
    return images, torch.randint(0, 1000, (batch,))


def loss_of(model: Any, data: Any, target: torch.Tensor) -> torch.Tensor:
    out = model(**data) if isinstance(data, dict) else model(data)
    if isinstance(out, dict):
        out = out["out"]
    if target.is_floating_point():
        return F.mse_loss(out, target)
    if out.dim() == 3 and target.dim() == 1:
        out = out.flatten(0, 1)
    return F.cross_entropy(out, target)


def make_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    if case.optimizer in ("sgd", "momentum"):
        momentum = 0.9 if case.optimizer == "momentum" else 0.0
        return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=momentum)
    return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=case.fused or None)


def allow_tf32(case: Case) -> None:
    allowed = case.precision != "fp32"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed


def make_step(case: Case, device: str, small: bool) -> tuple[nn.Module, Callable[[], None]]:
    allow_tf32(case)
    with torch.device(device):
        model = make(case).train()
        data, target = make_batch(case, small)
    if case.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub lacks it
    optimizer = make_optimizer(case, model)
    used: Any = torch.compile(model) if case.compiled else model
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(case.precision)

    def step() -> None:
        with torch.autocast(device, narrow or torch.bfloat16, enabled=narrow is not None):
            loss = loss_of(used, data, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def measure(case: Case, device: str, small: bool = False) -> dict[str, Any]:
    """One line of the result."""
    begin = perf_counter()
    model, step = make_step(case, device, small)
    row = asdict(case)
    del row["profiled"]
    row |= {"params": sum(each.numel() for each in model.parameters())}
    if device != "cuda":
        step()
        return {**row, "step_ms": round((perf_counter() - begin) * 1e3, 3), "steps": 1}
    for _ in range(WARM):
        step()
    torch.cuda.synchronize()
    row["warmup_s"] = round(perf_counter() - begin, 2)
    host = []
    for _ in range(2):
        begin = perf_counter()
        step()
        host.append(perf_counter() - begin)
        torch.cuda.synchronize()
        whole = perf_counter() - begin
    steps = max(6, min(STEPS, int(MODEL_S / whole)))
    torch.cuda.reset_peak_memory_stats()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    marks[0].record()
    for index in range(steps):
        step()
        marks[index + 1].record()
    torch.cuda.synchronize()
    times = [low.elapsed_time(high) for low, high in pairwise(marks)]
    median = statistics.median(times)
    return {
        **row,
        "step_ms": round(median, 3),
        "spread": round((sorted(times)[-2] - min(times)) / median, 3),
        "host_ms": round(min(host) * 1e3, 3),
        "steps": steps,
        "peak_allocated_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3),
        "peak_reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 3),
        "examples_per_s": round(case.batch / median * 1e3, 1),
    }


def list_operations(case: Case, device: str, small: bool = False) -> dict[str, Any]:
    """The microseconds of each operation of one step on the GPU, by shapes of the operands."""
    from torch.profiler import ProfilerActivity, profile

    _, step = make_step(case, device, small)
    for _ in range(3):
        step()
    activities = [ProfilerActivity.CPU]
    if device == "cuda":
        torch.cuda.synchronize()
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, record_shapes=True) as seen:
        step()
        if device == "cuda":
            torch.cuda.synchronize()
    operations, kernels = [], []
    for each in seen.key_averages(group_by_input_shape=True):
        us = each.self_device_time_total if device == "cuda" else each.self_cpu_time_total
        if us <= 0:
            continue
        if each.input_shapes:
            shapes = [shape for shape in each.input_shapes if shape]
            operations.append([each.key, shapes, each.count, round(us, 1)])
        else:
            kernels.append([each.key[:120], each.count, round(us, 1)])
    return {**asdict(case), "operations": operations, "kernels": kernels}


def run(chosen: argparse.Namespace, device: str, name: str) -> Iterator[str]:
    begin = perf_counter()
    cases = [each for each in CASES if not chosen.only or each.model in chosen.only.split(",")]
    for case in cases:
        if perf_counter() - begin > chosen.seconds:
            break
        line = attempt(measure, case, device, chosen.smoke)
        more = estimate(case, name, chosen.smoke) if chosen.estimate and "error" not in line else {}
        yield json.dumps(line | more)
    if not chosen.operations:
        return
    with open(chosen.operations, "w") as file:
        for case in cases:
            if case.profiled and perf_counter() - begin < chosen.seconds + chosen.more:
                line = attempt(list_operations, case, device, chosen.smoke)
                print(json.dumps(line), file=file, flush=True)


def attempt(
    what: Callable[..., dict[str, Any]], case: Case, device: str, small: bool
) -> dict[str, Any]:
    """A line of the result. A model that does not run must not end the measurement."""
    try:
        found = what(case, device, small)
    except (ImportError, RuntimeError, ValueError) as error:  # includes a full memory
        found = {**asdict(case), "error": str(error)[:300]}
    if device == "cuda":
        torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--more", type=float, default=40, help="seconds for the operations")
    parser.add_argument("--operations", metavar="FILE", help="where to list the operations")
    parser.add_argument("--only", metavar="MODELS", help="names, separated by commas")
    parser.add_argument("--estimate", action="store_true", help="compare with cavvy estimate")
    parser.add_argument("--smoke", action="store_true", help="tiny batches, to try it on a CPU")
    chosen = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not chosen.smoke:
        raise SystemExit("PyTorch sees no CUDA GPU here; --smoke tries the script on a CPU")
    # On a CPU, neither the steps nor the estimates for an H200 say anything of the other.
    name = torch.cuda.get_device_name() if device == "cuda" else "H200"
    about = {
        "device": name if device == "cuda" else "cpu",
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
    }
    print(json.dumps(about), flush=True)
    for line in run(chosen, device, name):
        print(line, flush=True)


if __name__ == "__main__":
    main()
