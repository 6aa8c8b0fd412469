"""Trains models with another function in the place of PyTorch's, watched and not.

Usage: python -m tests.monitor.replaced_run {before import, after import}

Prints, as JSON, for each model whether the watched run's weights are the unwatched one's, and
whether the function makes a difference to them at all; after the import also of runs in which the
function comes in at the third step.
"""

import gc
import json
import sys

import torch
import torch.nn.functional as F

TORCHS = F.scaled_dot_product_attention
MODELS = (
    "GPT-2", "GPT-NeoX", "Llama, padded batch", "Mistral, window shorter", "Qwen3", "Gemma",
    "OLMo 2", "Phi-3", "Falcon, one key head a query head", "T5", "BERT", "ViT",
)  # fmt: skip


def in_fp32(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, **others):
    """Attention in FP32, as people replace PyTorch's function in BF16 runs."""
    if attn_mask is not None and attn_mask.is_floating_point():
        attn_mask = attn_mask.float()
    q, k, v, dtype = q.float(), k.float(), v.float(), v.dtype
    with torch.autocast(q.device.type, enabled=False):
        out = TORCHS(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, **others)
    return out.to(dtype)


if __name__ == "__main__" and sys.argv[1] == "before import":
    F.scaled_dot_product_attention = in_fp32

import guardbit  # noqa: E402
from tests.monitor.support.test_architectures import ZOO, randomize  # noqa: E402


def trained(name, replaced_at, is_watched):
    """Weights after three steps; from which step another function is in place, None for never."""
    architecture = ZOO[name]
    torch.manual_seed(0)
    model, batch = randomize(architecture.build(None)).train(), architecture.batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    F.scaled_dot_product_attention = in_fp32 if replaced_at == 0 else TORCHS
    session = guardbit.MonitorSession(model, every_n_train_steps=1) if is_watched else None
    for step in range(3):
        if step == replaced_at != 0:
            F.scaled_dot_product_attention = in_fp32
        if session is not None:
            session.begin_batch(step)
        with torch.autocast("cpu", torch.bfloat16):
            found = model(**batch)
        loss = getattr(found, "loss", None)
        (found[0].float().square().mean() if loss is None else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        if session is not None:
            session.end_step()
    if session is not None:
        assert not session.stages_off, session.stages_off
        session.close()
    return [parameter.detach().clone() for parameter in model.parameters()]


def main(when):
    """Prints the answers."""
    gc.freeze()  # as in `conftest`: sessions need not look through it
    results = {}
    for name in MODELS:
        stock = trained(name, None, is_watched=False)
        for replaced_at in (0,) if when == "before import" else (0, 2):
            plain, watched = (
                trained(name, replaced_at, is_watched) for is_watched in (False, True)
            )
            results[f"{name}, {replaced_at}"] = [
                all(map(torch.equal, plain, watched)), not all(map(torch.equal, plain, stock))
            ]  # fmt: skip
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
