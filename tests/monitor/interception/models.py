"""Models that several of these tests train."""

import pytest
import torch
from torch import nn


class SelfAttention(nn.Module):
    """`nn.MultiheadAttention` on one input."""

    def __init__(self, need_weights=False, **options):
        super().__init__()
        self.inner = nn.MultiheadAttention(64, 4, **options)
        self.need_weights = need_weights

    def forward(self, x):
        return self.inner(x, x, x, need_weights=self.need_weights)[0]


def llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train()


def language():
    ids = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}
