"""Norms under frameworks that the tests do not install, against slices written by hand.

`python tests/monitor/support/clients.py`, where torchtitan or torchao is installed, trains small
models of theirs, once unwatched and once in a `MonitorSession`. It prints which sites have the
norms of their slices and whether the weights end the same; `docs/support.md` has what came out.

All runs on the CPU: FlexAttention uncompiled, as it has a backward then, and FP8 products emulated.
"""

import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib import metadata
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import guardbit

STEPS = 2

#: Of FP32 norms; the references are FP64.
TOLERANCE = 1e-5

#: A module with weights of attention -> `(heads, d_head, d_in)`.
Slices = Callable[[Any], Tensor]


class Client(NamedTuple):
    """A model of a framework."""

    name: str
    build: Callable[[], nn.Module]
    loss: Callable[[Any], Tensor]
    holders: tuple[str, ...]  # names of the modules that hold the weights of attention
    query: Slices  # each head's rows of W_Q
    key: Slices | None  # the same of W_K; None where no single matrix has them


# -- torchtitan ------------------------------------------------------------------------------------


def rows(path: str, size: int) -> Slices:
    """One head after the other."""
    return lambda attention: attention.get_parameter(path).unflatten(0, (-1, size))


def fused(size: int, first: int, last: int) -> Slices:
    """For each key head: its query heads, the key, the value (FusedQKVLinear)."""

    def slices(attention: Any) -> Tensor:
        linear = attention.qkv_linear
        groups = linear.wqkv.weight.unflatten(0, (-1, linear.heads_per_kv + 2, size))
        return groups[:, first:last].flatten(0, 1)

    return slices


def titan(
    model: str,
    flavor: str,
    query: Slices,
    key: Slices | None,
    is_float8: bool = False,
    **options: Any,
) -> Client:
    family = vars(importlib.import_module(f"torchtitan.models.{model}"))
    configs = next(value for name, value in family.items() if name.endswith("_configs"))
    config = configs[flavor](attn_backend="flex", **options)
    config.layers = config.layers[: 1 if options else 2]  # those of DeepSeek without experts
    if is_float8:
        from torchtitan.components.quantization.float8 import Float8LinearConverter

        config = Float8LinearConverter(Float8LinearConverter.Config(emulate=True)).convert(config)
    # After 0.3.0 a batch is one row of tokens.
    shape = (256,) if hasattr(type(config), "max_context_length") else (2, 128)

    def build() -> nn.Module:
        made = config.build()
        made.init_states(buffer_device=torch.device("cpu"))
        return made

    def loss(model: Any) -> Tensor:
        tokens = torch.randint(2048, shape, generator=torch.Generator().manual_seed(1))
        positions = torch.arange(128).repeat(2).view(shape)
        logits = model(tokens, positions, model.get_attention_masks(positions))
        return F.cross_entropy(logits.flatten(0, -2), tokens.roll(-1, -1).flatten())

    holders = tuple(f"layers.{layer}.attention" for layer in range(len(config.layers)))
    name = f"{model} {flavor}{', float8' * is_float8}"
    return Client(name, build, loss, holders, query, key)


def torchtitan() -> Iterator[Client]:
    from torch.nn.attention import flex_attention as home
    from torchtitan.models.common import attention

    home._validate_device = lambda *_: None
    attention.FlexAttention._compiled_flex_attn = staticmethod(home.flex_attention)
    yield titan("llama3", "debugmodel", fused(16, 0, -2), fused(16, -2, -1))
    if importlib.util.find_spec("torchao"):
        yield titan("llama3", "debugmodel", fused(16, 0, -2), fused(16, -2, -1), is_float8=True)
    yield titan("qwen3", "debugmodel", fused(128, 0, -2), fused(128, -2, -1))
    query, key = (rows(f"qkv_linear.{name}.weight", 128) for name in ("wq", "wk"))
    yield titan("qwen3", "debugmodel_non_fused_qkv", query, key)
    query = rows("wq.weight", 192)
    yield titan("deepseek_v3", "debugmodel", query, None, moe_comm_backend="standard")


# -- torchao ---------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, *heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(64, 16 * sum(heads)), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(x).unflatten(-1, (-1, 16)).transpose(1, 2).split(self.heads, dim=1)
        y = F.scaled_dot_product_attention(*split, is_causal=True, enable_gqa=True)
        return x + self.proj(y.transpose(1, 2).flatten(2))


def part(place: int) -> Slices:
    return lambda block: block.qkv.weight.unflatten(0, (-1, 16)).split(block.heads)[place]


def torchao() -> Iterator[Client]:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def build(recipe: str) -> nn.Module:
        config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
        model = nn.Sequential(Block(4, 4, 4), Block(4, 2, 2))
        return convert_to_float8_training(model, config=config)

    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(1))
        return model(x).square().mean()

    for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        yield Client(f"float8 {recipe}", partial(build, recipe), loss, ("0", "1"), part(0), part(1))


# -- the comparison --------------------------------------------------------------------------------

#: (step, name of the module, side) -> each head's norm.
Norms = dict[tuple[int, str, str], Tensor]


def train(client: Client, folder: str | None) -> tuple[nn.Module, Norms]:
    """Trains, watched if there is a folder; returns the model and the norms of its slices."""
    torch.manual_seed(0)
    model = client.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = folder and guardbit.MonitorSession(model, every_n_train_steps=1, dirpath=folder)
    norms: Norms = {}
    for step in range(STEPS):
        for name in client.holders:
            for side, slices in (("q", client.query), ("k", client.key)):
                if slices is not None:
                    weights = slices(model.get_submodule(name)).detach().double()
                    norms[step, name, side] = torch.linalg.matrix_norm(weights, 2)
        optimizer.zero_grad()
        with session.step(step) if session else nullcontext():
            client.loss(model).backward()
        optimizer.step()
    if session:
        session.close()
    return model, norms


def compare(client: Client) -> str:
    """Says what the norms of a run are, beside those of the slices."""
    with tempfile.TemporaryDirectory() as folder:
        watched, norms = train(client, folder)
        samples = guardbit.read_run(folder)
    unwatched, _ = train(client, None)
    is_equal = all(map(torch.equal, watched.state_dict().values(), unwatched.state_dict().values()))
    told = ["same weights" if is_equal else "OTHER WEIGHTS"]
    for side in "qk":
        recorded = samples[samples.indicator == f"w_{side}_spectral_norm"]
        verdicts = [
            {judged(recorded, step, name, norms.get((step, name, side))) for step in range(STEPS)}
            for name in client.holders
        ]
        told += [
            f"W_{side.upper()} of {name}: {' '.join(verdict)}"
            for name, verdict in zip(client.holders, verdicts, strict=True)
        ]
    return f"{client.name}: {'; '.join(told)}"


def judged(recorded: Any, step: int, name: str, expected: Tensor | None) -> str:
    of_site = recorded[(recorded.step == step) & (recorded.site + ".").str.startswith(f"{name}.")]
    values = torch.tensor(of_site.sort_values("head").value.to_numpy(), dtype=torch.float64)
    if expected is None or not len(values):
        return "WRONG" if len(values) else "none"
    # Heads that share a key head have its norm.
    expected = expected.repeat_interleave(max(1, len(values) // len(expected)))
    is_right = values.shape == expected.shape and torch.allclose(
        values, expected, rtol=TOLERANCE, atol=0.0
    )
    return "right" if is_right else "WRONG"


if __name__ == "__main__":
    torch.set_num_threads(1)
    for package, clients in (("torchtitan", torchtitan), ("torchao", torchao)):
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            print(f"{package} is not installed")
            continue
        print(f"{package} {version}, torch {torch.__version__}, guardbit {guardbit.__version__}")
        for client in clients():
            print(" ", compare(client), flush=True)
