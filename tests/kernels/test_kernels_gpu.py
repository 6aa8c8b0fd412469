"""The Triton kernels on a GPU, over the whole grid of shapes, against FP64 and PyTorch's flash."""

import math

import pytest
import torch

from guardbit.kernels import backward, forward
from guardbit.numerics import coherent_error, split
from guardbit.records import STABILIZERS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned_memory"),
    # PyTorch's own kernels, which serve as references, say that they may not repeat their bits.
    pytest.mark.filterwarnings("ignore:.*deterministic.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
]

SPACING = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
LENGTHS = (1, 17, 127, 128, 129, 1000, 1024, 4096)


def inputs(shape, dtype=torch.bfloat16, seed=0):
    """q, k, v, d_out with heads adjacent in memory; every third key repeats the first."""
    batch, heads, kv_heads, rows, keys, width = shape
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(heads, length):
        x = torch.randn(batch, length, heads, width, generator=generator, device="cuda")
        return x.to(dtype).transpose(1, 2)

    q, d_out = normal(heads, rows), normal(heads, rows)
    k, v = normal(kv_heads, keys), normal(kv_heads, keys)
    k[:, :, 1::3] = k[:, :, :1]
    return q, k, v, d_out


def exact(q, k, v, d_out, causal, scale):
    """Output and gradients in FP64, from whole matrices; rows without a key give 0."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    rows, keys = q.shape[2], k.shape[2]
    wide_k, wide_v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    hidden = torch.zeros(rows, keys, dtype=torch.bool, device="cuda")
    if causal is not False:
        hidden = torch.ones_like(hidden).triu(1 + (keys - rows if causal is True else 0))
    dead = hidden.all(-1)[:, None]
    scores = (q @ wide_k.mT * scale).masked_fill(hidden, -math.inf).masked_fill(dead, 0.0)
    out = torch.softmax(scores, -1).masked_fill(dead, 0.0) @ wide_v
    return out.detach(), *torch.autograd.grad(out, (q, k, v), d_out.double())


def flash(q, k, v, d_out, causal, scale):
    """PyTorch's FlashAttention-2; its causal mask is aligned to the bottom right."""
    keys = k.shape[2]
    if causal == "top-left":
        k, v = k[:, :, : q.shape[2]], v[:, :, : q.shape[2]]
    q, k, v = (x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v))
    out, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal is not False, False, scale=scale
    )
    gradients = torch.autograd.grad(out, (q, k, v), d_out.transpose(1, 2))
    dq, dk, dv = (x.transpose(1, 2) for x in gradients)
    if causal == "top-left":
        unseen = (0, 0, 0, keys - dk.shape[2])
        dk, dv = (torch.nn.functional.pad(x, unseen) for x in (dk, dv))
    return out.detach().transpose(1, 2), dq, dk, dv


def run(q, k, v, d_out, names, **options):
    common = {"causal": options.pop("causal"), "scale": options.pop("scale"), "stabilizers": names}
    result = forward.forward(q, k, v, **common, **options)
    return result, backward.backward(d_out, q, k, v, *result, **common)


@pytest.mark.parametrize("causal", [False, True, "top-left"])
@pytest.mark.parametrize("width", [16, 32, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error_is_at_most_twice_that_of_flash(dtype, width, causal):
    scale = width**-0.5
    for rows in LENGTHS:
        # More keys than rows; fewer, so that rows see none; grouped.
        lengths = {rows, rows + 70} if causal == "top-left" else {rows, rows + 70, (rows + 1) // 2}
        for draw, keys in [(draw, keys) for draw in range(3) for keys in lengths]:
            if rows == 4096 and (draw or keys != rows):
                continue
            q, k, v, d_out = inputs((1, 4, 2, rows, keys, width), dtype, seed=draw)
            truth = exact(q, k, v, d_out, causal, scale)
            theirs = flash(q, k, v, d_out, causal, scale)
            # One stabilizer in all four heads, and so in both heads of a group, at a time.
            for stabilizer in STABILIZERS:
                result, gradients = run(
                    q, k, v, d_out, [stabilizer] * 4, causal=causal, scale=scale, seed=draw
                )
                ours = (result.out, *gradients[:3])
                for name, mine, other, right in zip(
                    ("O", "dQ", "dK", "dV"), ours, theirs, truth, strict=True
                ):
                    error = (mine.double() - right).abs().max().item()
                    # Both change O on purpose, by a whole step or by P-bar against l, and O
                    # reaches dQ through delta. At some short lengths they exceed the bar of 2,
                    # by a third at worst seen; stochastic does so in the oracle too.
                    wider = stabilizer in ("stochastic", "row_max") and name == "dQ"
                    bar = (4 if wider else 2) * (other.double() - right).abs().max().item()
                    # Half a step at the largest magnitude, where flash may have been lucky.
                    steps = 1.0 if (stabilizer, name) == ("stochastic", "O") else 0.5
                    bar += steps * SPACING[dtype] * right.abs().max().item() + 1e-6
                    assert error <= bar, (
                        f"{stabilizer} {name}, {rows} rows, {keys} keys: {error:.3g} > {bar:.3g}"
                    )


@pytest.mark.parametrize("width", [64, 128])
def test_mixes_equal_separate_launches_and_repeat_bit_for_bit(width):
    tensors = inputs((2, 8, 4, 1000, 1000, width))
    options = {"causal": True, "scale": width**-0.5, "seed": 7}
    names = STABILIZERS * 2
    mix, mix_gradients = run(*tensors, names, **options)
    again, again_gradients = run(*tensors, names, **options)
    for first, second in zip((*mix, *mix_gradients), (*again, *again_gradients), strict=True):
        assert torch.equal(first.nan_to_num(), second.nan_to_num())
    for name in STABILIZERS:
        alone, gradients = run(*tensors, [name] * 8, **options)
        heads = [head for head in range(8) if names[head] == name]
        assert torch.equal(alone.out[:, heads], mix.out[:, heads])
        assert torch.equal(alone.lse[:, heads], mix.lse[:, heads])
        assert torch.equal(gradients.dq[:, heads], mix_gradients.dq[:, heads])
        chosen = forward.forward(*tensors[:3], stabilizers=[name] * 2, heads=heads, **options)
        assert torch.equal(chosen.out, mix.out[:, heads])


def test_more_heads_than_a_grid_axis_holds():
    # 65,535 programs is the limit of the second and third grid axis.
    q, k, v, d_out = inputs((1, 70_000, 70_000, 33, 33, 16))
    result, gradients = run(q, k, v, d_out, ["none"] * 70_000, causal=True, scale=0.25)
    for start in (0, 69_900):
        heads = slice(start, start + 100)
        part = [x[:, heads] for x in (q, k, v, d_out)]
        few, few_gradients = run(*part, ["none"] * 100, causal=True, scale=0.25)
        assert torch.equal(few.out, result.out[:, heads])
        for whole, piece in zip(gradients[:3], few_gradients[:3], strict=True):
            assert torch.equal(whole[:, heads], piece)


def test_tensors_beyond_two_to_the_31_elements():
    # q has 2.2e9 elements; the last head lies past 2^31.
    q = torch.randn(1, 130, 131_072, 128, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(1, 1, 64, 128, device="cuda", dtype=torch.bfloat16)
    options = {"causal": False, "scale": 0.1, "seed": 3}
    whole = forward.forward(q, k, k, stabilizers=["stochastic"] * 130, **options)
    offset = 129 * 131_072 * 128
    last = forward.forward(q[:, 129:], k, k, stabilizers=["stochastic"], offset=offset, **options)
    assert torch.equal(whole.out[:, 129:], last.out)


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("size", [10.0, 100.0])
def test_large_scores(size, scale):
    q, k, v, d_out = inputs((1, 4, 4, 1000, 1000, 64))
    q, k = q * size, k * size
    result, gradients = run(q, k, v, d_out, STABILIZERS, causal=True, scale=scale)
    truth = exact(q, k, v, d_out, True, scale)
    theirs = flash(q, k, v, d_out, True, scale)
    for mine, other, right in zip((result.out, *gradients), theirs, truth, strict=False):
        assert mine.isfinite().all()
        bar = 2 * (other.double() - right).abs().max() + 2.0**-7 * right.abs().max()
        assert (mine.double() - right).abs().max() <= bar


def sink(maxima, rows=4096, width=64):
    """Rows whose first `maxima` scores equal 6 (1 + 0.2 u), values of one sign; eight seeds."""
    parts = 2 if maxima > 1 else 1
    q, k, v = [], [], []
    for seed in range(100, 108):
        generator = torch.Generator().manual_seed(seed)
        wide = {"generator": generator, "dtype": torch.float64}
        row_max = 6 * (1 + 0.2 * torch.rand(rows, 1, **wide))
        distances = (torch.randn(rows, 64 - maxima, **wide) - 2 - row_max).clamp_max(0)
        columns = torch.cat([*split(row_max, torch.bfloat16, parts), distances.bfloat16()], -1)
        keys = torch.zeros(64, width)
        keys[:, :parts] = 1
        keys[maxima:, parts : parts + 64 - maxima] = torch.eye(64 - maxima)
        q.append(torch.nn.functional.pad(columns, (0, width - columns.shape[1])))
        k.append(keys.bfloat16())
        v.append((-2 - torch.rand(64, width, **wide)).float().bfloat16())
    return [torch.stack(x)[:, None].cuda() for x in (q, k, v)]


@pytest.mark.parametrize("maxima", [1, 2, 3, 4])
def test_coherent_error_of_o(maxima):
    q, k, v = sink(maxima)
    probabilities = torch.softmax(q.double() @ k.double().mT, -1)
    truth = probabilities @ v.double()
    result = forward.forward(
        q.expand(-1, 4, -1, -1), k, v, causal=False, scale=1.0, stabilizers=STABILIZERS, seed=1
    )
    out = result.out.double()
    out[:, 1] += result.residual[:, 1]
    errors = coherent_error(out, truth.expand_as(out), -2)
    none, compensated, stochastic, row_max = errors.unbind(1)
    size = none.abs().mean()
    # Rounding the exact output makes an error of this size and sign.
    predicted = coherent_error(truth.bfloat16(), truth, -2)[:, 0]
    assert (none * predicted).sum() >= 0.9 * predicted.square().sum()
    assert compensated.abs().mean() <= 1e-3 * size
    assert stochastic.abs().mean() <= 0.05 * size
    if maxima > 1:
        assert row_max.abs().mean() <= 0.25 * size
    else:
        assert torch.equal(row_max, none)
