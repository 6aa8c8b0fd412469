"""Kinds of sound models, which no audit may find fault with."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.layers.nets import audits

transformers = pytest.importorskip("transformers")

#: Of each model; three seeds of twenty audits take ten minutes.
SEEDS, AUDITS = (0,), 6

SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "num_key_value_heads": 2, "vocab_size": 96, "bos_token_id": 0, "eos_token_id": 0,
    "pad_token_id": 0,
}  # fmt: skip


def without_dropout(config):
    for name in vars(config):
        if "drop" in name:
            setattr(config, name, 0.0)
    config.decoder_start_token_id = 0
    return config


def language_model(kind, head="ForCausalLM", factor=1.0):
    config = without_dropout(getattr(transformers, f"{kind}Config")(**SIZES))
    model = getattr(transformers, kind + head)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(factor)

    def step():
        tokens = torch.randint(1, 96, (4, 32))
        return model(input_ids=tokens, labels=tokens).loss

    model.step = step
    return model


def vit():
    config = transformers.ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        image_size=32, patch_size=8, num_labels=5,
    )  # fmt: skip
    model = transformers.ViTForImageClassification(without_dropout(config))

    def step():
        pixels = torch.randn(8, 3, 32, 32).to(model.classifier.weight.dtype)
        return model(pixel_values=pixels, labels=torch.randint(5, (8,))).loss

    model.step = step
    return model


def whisper():
    config = transformers.WhisperConfig(
        vocab_size=96, num_mel_bins=16, encoder_layers=2, decoder_layers=2, d_model=64,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128,
        decoder_ffn_dim=128, max_source_positions=50, max_target_positions=40, pad_token_id=0,
        bos_token_id=0, eos_token_id=0, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(without_dropout(config))

    def step():
        features = torch.randn(4, 16, 100).to(model.proj_out.weight.dtype)
        return model(input_features=features, labels=torch.randint(1, 96, (4, 20))).loss

    model.step = step
    return model


class DiffusionBlock(nn.Module):
    """A transformer block whose norms are scaled and shifted by the time."""

    def __init__(self, width):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )
        self.time = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x, time):
        scale, shift, gate, scale_2, shift_2, gate_2 = self.time(time)[:, None].chunk(6, -1)
        h = self.norms[0](x) * (1 + scale) + shift
        q, k, v = self.qkv(h).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + gate * self.out(attended)
        return x + gate_2 * self.mlp(self.norms[1](x) * (1 + scale_2) + shift_2)


class DiffusionTransformer(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.patch, self.out = nn.Linear(12, width), nn.Linear(width, 12)
        self.time = nn.Sequential(nn.Linear(16, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(DiffusionBlock(width) for _ in range(2))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)

    def forward(self, patches, time):
        x, time = self.patch(patches), self.time(time)
        for block in self.blocks:
            x = block(x, time)
        return self.out(self.norm(x))

    def step(self):
        inputs = (torch.randn(8, *size).to(self.out.weight.dtype) for size in ((16, 12), (16,)))
        return F.mse_loss(self(*inputs).float(), torch.randn(8, 16, 12))


class Residual(nn.Module):
    def __init__(self, inner, outer):
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(8, width) for width in (inner, outer))
        self.first = nn.Conv2d(inner, outer, 3, padding=1)
        self.second = nn.Conv2d(outer, outer, 3, padding=1)
        self.skip = nn.Conv2d(inner, outer, 1)

    def forward(self, x):
        h = self.first(F.silu(self.norms[0](x)))
        return self.skip(x) + self.second(F.silu(self.norms[1](h)))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)
        self.down, self.middle, self.rise = Residual(16, 32), Residual(32, 32), Residual(64, 16)
        self.pool, self.up = nn.AvgPool2d(2), nn.ConvTranspose2d(32, 32, 2, stride=2)
        self.loss = nn.MSELoss()

    def forward(self, x):
        kept = self.down(self.first(x))
        risen = self.up(self.middle(self.pool(kept)))
        return self.last(self.rise(torch.cat([kept, risen], 1)))

    def step(self):
        images = torch.randn(4, 3, 16, 16).to(self.last.weight.dtype)
        return self.loss(self(images).float(), torch.randn(4, 3, 16, 16))


class Normed(nn.Module):
    """Two convolutions of a ResNet, with batch norms."""

    def __init__(self, inner, outer, stride):
        super().__init__()
        self.first, self.second = nn.Conv2d(inner, outer, 3, stride, 1), nn.Conv2d(outer, outer, 3)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outer) for _ in range(2))
        self.skip = nn.Conv2d(inner, outer, 3, stride)

    def forward(self, x):
        h = self.norms[1](self.second(F.relu(self.norms[0](self.first(x)))))
        return F.relu(h + F.interpolate(self.skip(x), h.shape[-2:]))


class ResNet(nn.Sequential):
    """Pools after ReLU, where many numbers are 0."""

    def __init__(self):
        stem = nn.Conv2d(3, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)
        body = [Normed(inner, outer, 1) for inner, outer in ((16, 16), (16, 32), (32, 32))]
        super().__init__(*stem, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5))

    def step(self):
        images = torch.randn(16, 3, 32, 32).to(self[0].weight.dtype)
        return F.cross_entropy(self(images).float(), torch.randint(5, (16,)))


KINDS = {
    "GPT-2": lambda: language_model("GPT2", "LMHeadModel"),
    "Llama": lambda: language_model("Llama"),
    "Mixtral": lambda: language_model("Mixtral"),
    "T5": lambda: language_model("T5", "ForConditionalGeneration"),
    "BERT": lambda: language_model("Bert", "LMHeadModel"),
    "ViT": vit,
    "Whisper": whisper,
    "diffusion transformer": DiffusionTransformer,
    "U-Net": UNet,
    "GPT-2 from large weights": lambda: language_model("GPT2", "LMHeadModel", 8.0),
    # Limits were not set with these.
    "Gemma 2": lambda: language_model("Gemma2"),
    "Qwen3": lambda: language_model("Qwen3"),
    "ResNet": ResNet,
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("is_pure", [False, True], ids=["autocast", "pure"])
@pytest.mark.parametrize("kind", KINDS)
def test_sound_models_have_no_alarm(kind, is_pure, seed):
    torch.manual_seed(seed)
    model = KINDS[kind]()
    if is_pure:
        model = model.to(torch.bfloat16)
    events, watch = audits(model, AUDITS, None if is_pure else torch.bfloat16)
    # What rounding takes of updates of BF16 weights is so.
    assert [event.why for event in events if not event.why.startswith("rounding to")] == []
    assert len({row.module for row in watch.findings.rows}) >= 20
