"""Models that call varlen_attn and the functions of flash_attn, which they hold.

The libraries are stood in for by `tests.flash_stand_in`, which rounds as they do.
"""

import inspect

import torch
from torch import nn
from torch.nn.attention.varlen import varlen_attn

from guardbit.monitor.interception.entry_points import ENTRY_POINTS
from guardbit.monitor.interception.entry_points.libraries import LibraryEntryPoint
from tests import flash_stand_in
from tests.oracle import packed

#: A function of another library has a test and a model of its own.
LIBRARY = [
    entry
    for entry in ENTRY_POINTS
    if isinstance(entry, LibraryEntryPoint) and flash_stand_in.is_of(entry.engine)
]
NAMES = {entry.name for entry in LIBRARY}
HEADS, WIDTH = 4, 16

# PyTorch 2.11 takes grouped keys without being told.
_GROUPS = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def install(monkeypatch):
    """Puts the stand-ins in place; returns what takes the kernels back."""
    take_back = flash_stand_in.install(monkeypatch)
    for entry in ENTRY_POINTS:
        if entry.home.startswith(("flash_attn", "transformer_engine")) or "kernels/" in entry.name:
            monkeypatch.setattr(entry, "original", None)
    for entry in LIBRARY:
        monkeypatch.setattr(entry, "_others", {})
    assert all([entry.find() for entry in LIBRARY])
    return take_back


def by_name(name):
    return next(entry for entry in LIBRARY if entry.name == name)


class Attention(nn.Module):
    """Calls one of the functions, which it holds, with grouped keys."""

    def __init__(self, entry, documents=None, kv_heads=2, **options):
        super().__init__()
        self.kv_heads = HEADS if "qkv" in entry.name else kv_heads
        self.qkv = nn.Linear(64, WIDTH * (HEADS + 2 * self.kv_heads))
        self.name, self.documents, self.options = entry.name, documents, options
        self.function = entry.function

    def forward(self, x):
        heads = (HEADS, self.kv_heads, self.kv_heads)
        q, k, v = self.qkv(x).unflatten(-1, (-1, WIDTH)).split(heads, -2)
        packed = []
        if "varlen" in self.name:
            q, k, v = (y.flatten(0, 1) for y in (q, k, v))
            packed = [*self.documents[:2], *self.documents[2:]]
        if "qkvpacked" in self.name:
            q, k, v = [torch.stack([q, k, v], -3)], [], []
            packed = packed[::2]
        elif "kvpacked" in self.name:
            q, k, v = [q], [torch.stack([k, v], -3)], []
        else:
            q, k, v = [q], [k], [v]
        options = self.options
        if self.name.startswith("torch"):
            options = {"window_size": (-1, 0), **_GROUPS, **options}
        else:
            options = {"causal": True, **options}
        if self.name.startswith(("flash_attn.cute", "kernels/flash_attn_4")) and packed:
            starts = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
            options, packed = {**options, **dict(zip(starts, packed, strict=True))}, []
        out = self.function(*q, *k, *v, *packed, **options)
        out = out[0] if isinstance(out, tuple) else out
        return out.reshape(*x.shape[:2], -1)


LENGTHS = [7, 1, 12, 4]


def build(entry, **options):
    torch.manual_seed(0)
    documents = packed(LENGTHS, LENGTHS, "cpu")
    model = nn.Sequential(Attention(entry, documents, **options)).bfloat16()
    with torch.no_grad():
        model[0].qkv.weight.mul_(3)  # rounding O then shows in dQ
    return model, torch.randn(2, sum(LENGTHS) // 2, 64).bfloat16()
