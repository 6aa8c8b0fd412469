"""What each engine's rounding adds to every head's sigma, at every step of a stretch of one run.

    python -m studies.rescue.push runs/rescue/RUN/step=6000.ckpt --csv push-seed10.csv.gz

sigma is a head's largest singular value of W_Q, u and v its singular vectors. The run goes on from
the checkpoint with PyTorch's cuDNN attention. At each step the queries, keys, values and output
gradients of every layer are given to the other engines too, so that all have the same inputs. Their
dQ less an FP32-accurate one, times the layer's input, is their error of W_Q's gradient, dW_err.

AdamW divides a gradient entry by d, the root of its own running mean square, and without weight
decay adds -rate of that to the weight. So in first order an error adds to sigma, at this step and,
through the momentum, in all later ones together,

    -rate * clip * sum over entries of u_d v_c dW_err_dc / d_dc,

and it is this, over sigma, that `growth` holds for each engine: e-folds of sigma by its rounding.
`growth_all` is the same with the whole gradient as the run had it, `change` what log sigma did. The
rest of the change is of second order: steps in all directions lengthen a matrix too. (d is the
run's own, with cuDNN's errors in it; a run that is corrected from here on would come to another.)

    python -m studies.rescue.growth studies/rescue/results/push-*.csv.gz

prints and draws what came out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import guardbit
from guardbit.kernels import dispatch
from guardbit.kernels.runtime import AttentionCall
from guardbit.monitor.measure.weights import gram_matrices, spectral_norms
from studies.rescue.model import Attention, LanguageModel, Size

#: Steps that a row of the file is of.
STEPS = 10

#: dQ of a call's inputs by some engine.
Engine = Callable[[AttentionCall], Tensor]

#: Makes what an engine runs in.
Context = Callable[[], AbstractContextManager[Any]]


class Core(nn.Module):
    """PyTorch's attention alone, so that `guardbit.instrument` can switch it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, H, N, D) each to (B, H, N, D)."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def of_function(function: Callable[..., Tensor], context: Context) -> Engine:
    """An engine that is a function of q, k and v."""

    def engine(call: AttentionCall) -> Tensor:
        leaves = [x.detach().requires_grad_() for x in (call.q, call.k, call.v)]
        with context():
            out = function(*leaves)
            return torch.autograd.grad(out, leaves[0], call.d_out)[0]

    return engine


def of_stabilizer(name: str, example: AttentionCall, context: Context) -> Engine:
    """PyTorch's kernel with all heads switched."""
    model = nn.Sequential(Core())
    model.forward = model[0].__call__
    engine = of_function(model, context)
    instrumentation = guardbit.instrument(model)
    engine(example)  # makes the site known
    (site,) = instrumentation.sites
    instrumentation.switch(site, name)
    engine(example)
    ran = set(instrumentation.stabilizers()[site])
    if ran != {name}:
        raise RuntimeError(f"heads were to be switched to {name}, and run {', '.join(sorted(ran))}")
    return engine


def centred(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention with keys less their mean over the sequence."""
    return F.scaled_dot_product_attention(q, k - k.mean(2, keepdim=True), v, is_causal=True)


def engines_for(example: AttentionCall) -> dict[str, Engine]:
    """The engines to compare, by name; on a CPU PyTorch's own one takes the place of cuDNN's."""
    on_gpu = example.q.is_cuda
    cudnn = (lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION)) if on_gpu else nullcontext
    engines = {
        "guardbit": of_function(
            lambda q, k, v: guardbit.flash_attention(q, k, v, causal=True), nullcontext
        ),
        "centred": of_function(centred, cudnn),
        "compensated": of_stabilizer("compensated", example, cudnn),
        "exact_delta": of_stabilizer("exact_delta", example, cudnn),
    }
    if on_gpu:
        engines["flash"] = of_function(Core(), lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION))
    return engines


class Layer(NamedTuple):
    """One layer at one step, before the optimizer's.

    Attributes:
        weight: The fused projection, `(3 C, C)`; its first C rows are W_Q.
        sigmas: FP64 `(H,)`.
        lefts: FP64 `(H, D)`, u.
        rights: FP64 `(H, C)`, v.
        errors: Engine -> FP32 `(H, D, C)`, dW_err.
    """

    weight: nn.Parameter
    sigmas: Tensor
    lefts: Tensor
    rights: Tensor
    errors: dict[str, Tensor]


def look_at(weight: nn.Parameter, heads: int) -> Layer:
    """One layer's largest singular values and their vectors, with no errors yet."""
    rows = query_rows(weight.detach(), heads).float()
    norms, directions = spectral_norms(gram_matrices(rows))
    rights = torch.einsum("hd,hdc->hc", directions.double(), rows.double())
    sigmas = norms.double()
    return Layer(weight, sigmas, directions.double(), rights / sigmas[:, None], {})


def add_errors(errors: dict[str, Tensor], x: Tensor, call: AttentionCall, engines: dict) -> None:
    """Adds every engine's error of one layer's dW_Q, that of a batch or of a part of it.

    Args:
        errors: See `Layer`.
        x: `(B, N, C)`, what the projection was given.
        call: The layer's attention call.
        engines: Those of `engines_for`.
    """
    heads = call.q.size(1)
    exact = dispatch.exact_query_gradient(
        call.d_out, call.q, call.k, call.v, spec=call.spec, head_ids=range(heads), dropout=None
    )
    gradients = {"run": call.dq} | {name: engine(call) for name, engine in engines.items()}
    for name, dq in gradients.items():
        error = torch.einsum("bhnd,bnc->hdc", dq.float() - exact, x.float())
        errors[name] = errors[name] + error if name in errors else error


def query_rows(tensor: Tensor, heads: int) -> Tensor:
    """W_Q's rows of a fused projection or what belongs to it, `(H, D, C)`."""
    return tensor[: tensor.size(1)].unflatten(0, (heads, -1))


def rows_of(
    layers: list[Layer], optimizer: torch.optim.Optimizer, rate: float, clip: float, step: int
) -> Iterator[dict[str, Any]]:
    """One row a head, after the optimizer's step."""
    beta = optimizer.param_groups[0]["betas"][1]
    for number, layer in enumerate(layers):
        state = optimizer.state[layer.weight]
        heads = len(layer.sigmas)
        unbiased = state["exp_avg_sq"] / (1 - beta ** state["step"])
        divisors = query_rows(unbiased.sqrt() + optimizer.param_groups[0]["eps"], heads).double()
        along = torch.einsum("hd,hc->hdc", layer.lefts, layer.rights) / divisors
        along *= -rate / layer.sigmas[:, None, None]

        def growth(gradient: Tensor, along: Tensor = along) -> list[float]:
            return (along * gradient).sum((1, 2)).tolist()

        errors = {name: clip * error for name, error in layer.errors.items()}
        gradient = query_rows(layer.weight.grad, heads)
        after = query_rows(layer.weight.detach(), heads).double()
        # Of a Gram matrix in FP64: singular values themselves take a second a step on a GPU.
        moved = torch.linalg.eigvalsh(after @ after.mT)[:, -1].sqrt()
        columns = {
            "sigma": layer.sigmas.tolist(),
            "change": (moved / layer.sigmas).log().tolist(),
            "growth_all": growth(gradient),
            **{f"growth_{name}": growth(error) for name, error in errors.items()},
        }
        for head in range(heads):
            cells = {name: values[head] for name, values in columns.items()}
            yield {"step": step, "layer": number, "head": head, **cells}


def go_on(
    checkpoint: dict[str, Any],
    model: LanguageModel,
    device: str,
    steps: int,
    minutes: float,
    parts: int = 0,
) -> Iterator[dict[str, Any]]:
    """Trains on, eagerly; yields rows of every step, with `parts` of that many batches."""
    model.load_state_dict(checkpoint["state_dict"])
    made = model.to(device).configure_optimizers()
    optimizer, schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    schedule.load_state_dict(checkpoint["lr_schedulers"][0])
    attentions = [part for part in model.modules() if isinstance(part, Attention)]
    projections = [attention.c_attn for attention in attentions]
    inputs: dict[nn.Module, Tensor] = {}
    for projection in projections:
        projection.register_forward_pre_hook(
            lambda module, given: inputs.__setitem__(module, given[0].detach().bfloat16())
        )
    instrumentation = guardbit.instrument(model.net)
    calls: list[AttentionCall] = []
    cudnn = (lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION)) if device == "cuda" else nullcontext
    engines: dict[str, Engine] = {}
    first, end = checkpoint["global_step"], time.monotonic() + 60 * minutes
    batches = max(1, parts)
    for step in range(first, first + steps):
        layers = [look_at(attention.c_attn.weight, attention.heads) for attention in attentions]
        for number in range(batches):
            instrumentation.observe(calls.append)
            with torch.autocast(device, torch.bfloat16), cudnn():
                loss = model.net(model.batch(first + (step - first) * batches + number))
            (loss / batches).backward()
            instrumentation.observe(None)
            if not parts:
                engines = engines or engines_for(calls[0])
            for layer, projection, call in zip(layers, projections, reversed(calls), strict=True):
                add_errors(layer.errors, inputs[projection], call, engines)
            calls.clear()
        norm = nn.utils.clip_grad_norm_(model.net.parameters(), 1.0)
        rate = schedule.get_last_lr()[0]
        optimizer.step()
        schedule.step()
        yield from rows_of(layers, optimizer, rate, min(1.0, 1.0 / norm.item()), step)
        optimizer.zero_grad()
        if (step - first) % 20 == 0:
            print(step, f"{loss.item():.4f}", flush=True)
        if time.monotonic() > end:
            return


def thinned(frame: pd.DataFrame, steps: int = STEPS) -> pd.DataFrame:
    """Sums over so many steps at a time, with the first of these and its sigma."""
    beginning = frame["step"].min()
    windows = (frame["step"] - beginning) // steps * steps + beginning
    sums = {name: "sum" for name in frame if name.startswith(("change", "growth_"))}
    grouped = frame.assign(step=windows).groupby(["step", "layer", "head"])
    return grouped.agg({"sigma": "first", **sums}).reset_index()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--minutes", type=float, default=60.0, help="go on no longer")
    parser.add_argument("--parts", type=int, default=0, help="batches a step; keeps every step")
    parser.add_argument("--csv", type=Path, required=True, help="where to write the rows")
    parser.add_argument("--corpus", type=Path, default=Path("runs/corpus"))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args(arguments)
    if options.device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
    about = json.loads((options.checkpoint.parent / "about.json").read_text())
    tokens = np.load(options.corpus / "tokens.npy")
    if hashlib.sha256(tokens.tobytes()).hexdigest() != about["corpus"]["sha256"]:
        raise SystemExit(f"{options.corpus} is not the corpus of the run")
    checkpoint = torch.load(options.checkpoint, map_location=options.device, weights_only=False)
    model = LanguageModel(
        Size(**about["size"]), torch.from_numpy(tokens.astype(np.int16)), about["learning_rate"],
        1000, about["seed"], compiled=False,
    )  # fmt: skip
    rows = go_on(
        checkpoint, model, options.device, options.steps, options.minutes, options.parts
    )  # fmt: skip
    frame = thinned(pd.DataFrame(rows), 1 if options.parts else STEPS)
    frame.to_csv(options.csv, index=False, float_format="%.4g")


if __name__ == "__main__":
    main()
