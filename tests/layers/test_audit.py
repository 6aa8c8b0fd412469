"""The audit of one call: its numbers against FP64 and hand computations, and what it leaves out."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from guardbit.layers import audit
from guardbit.layers import call as calls
from guardbit.layers.audit import ERROR, GAIN, REPEATED, RESIDUAL, SLOPE, compared, limit_of
from guardbit.layers.call import Call, NotMeasured, autocast_now, kind_of
from guardbit.monitor.modules import MOST_CALLS
from tests.layers.nets import Own, audits

BF16 = torch.bfloat16
ROWS, WIDTH = 96, 32

# PyTorch warns of reentrant checkpoints.
pytestmark = pytest.mark.filterwarnings("ignore")


def numbers(module, *inputs, autocast=True, gradient=None):
    """Runs a module and returns its call and the audit's numbers."""
    with torch.autocast("cpu", BF16, enabled=autocast):
        call = Call(module, inputs, {}, autocast_now())
        made = call.take_outputs(module(*inputs))
    given = gradient if gradient is not None else torch.randn_like(made[0])
    call.take_gradients([given.to(made[0].dtype), *[None] * (len(made) - 1)])
    return call, {key: float(value) for key, value in audit.audit(call).items()}


def random(*shape):
    return torch.randn(*shape).requires_grad_()


class Scaled(torch.autograd.Function):
    """The identity; its gradient is multiplied."""

    @staticmethod
    def forward(ctx, x, by):
        ctx.by = by
        return x.clone()

    @staticmethod
    def backward(ctx, d):
        return d * ctx.by, None


class OnBits(torch.autograd.Function):
    """Rounds to BF16 on bits: to the nearest, or by cutting off."""

    @staticmethod
    def forward(ctx, x, is_cut):
        bits = x.view(torch.int32) + (0 if is_cut else 0x8000)
        return (bits & -0x10000).view(torch.float32)

    @staticmethod
    def backward(ctx, d):
        return d, None


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_a_gain_has_the_sign_of_the_error_along_the_reference(factor):
    high = torch.tensor([3.0, -4.0, 12.0])
    found = compared(high * factor, high)
    # |high| = 13, |e * high|^2 = 0.01 (81 + 256 + 20736); FP32 products of 0.9 are off by 1e-7.
    assert float(found.gain) == pytest.approx(factor - 1, rel=1e-5)
    assert float(found.error) == pytest.approx(0.1, rel=1e-5)
    by_hand = audit.CHANCE * 0.1 * math.sqrt(81 + 256 + 20736) / 169
    assert float(found.chance) == pytest.approx(by_hand, rel=1e-5)


def test_an_error_across_the_reference_is_no_gain():
    found = compared(torch.tensor([1.0, 0.5]), torch.tensor([1.0, 0.0]))
    assert (float(found.gain), float(found.error)) == (0.0, 0.5)


def test_what_is_not_finite_in_the_reference_says_nothing():
    finite, infinite = torch.ones(3), torch.tensor([1.0, math.inf, 1.0])
    assert float(compared(infinite, finite).error) == math.inf
    assert math.isnan(float(compared(infinite, infinite).error))
    assert float(compared(finite * 0, finite * 0).error) == 0


def test_a_linear_layer_under_autocast_is_compared_as_fp64_has_it():
    torch.manual_seed(0)
    module, x, d = nn.Linear(WIDTH, WIDTH), random(ROWS, WIDTH), torch.randn(ROWS, WIDTH).to(BF16)
    _, found = numbers(module, x, gradient=d)
    low_weight, exact = module.weight.to(BF16), F.linear(x.double(), module.weight.double())
    low = F.linear(x.to(BF16), low_weight, module.bias.to(BF16)).double()
    exact = exact + module.bias
    # The rest is rounding of FP32 sums, 1e-7 of an error of 2e-3.
    error = float((low - exact).norm() / exact.norm())
    assert found["output", ERROR] == pytest.approx(error, rel=1e-3)
    exact, low = d.double() @ module.weight.double(), (d @ low_weight).double()
    assert found["input", ERROR] == pytest.approx(
        float((low - exact).norm() / exact.norm()), rel=1e-3
    )
    exact, low = d.double().T @ x.double(), (d.T @ x.to(BF16)).double()
    assert found["weight", ERROR] == pytest.approx(
        float((low - exact).norm() / exact.norm()), rel=1e-3
    )
    along = float(((low - exact) * exact).sum() / exact.square().sum())
    assert found["weight", GAIN] == pytest.approx(along, rel=1e-2, abs=1e-6)


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.25])
@pytest.mark.parametrize("takes_fp64", [True, False])
def test_a_slope_is_how_much_steeper_the_backward_is(factor, takes_fp64):
    def function(x):
        if not takes_fp64 and x.dtype == torch.float64:
            raise RuntimeError("no kernel")
        return Scaled.apply(x.tanh(), factor)

    torch.manual_seed(0)
    _, found = numbers(Own(function), random(ROWS, WIDTH))
    # The gradient is of FP32. Differences in FP32 have its rounding over their step: 1e-7 / 1e-3.
    assert found["input", SLOPE] == pytest.approx(factor - 1, abs=1e-6 if takes_fp64 else 1e-3)


def test_zeros_that_came_as_gradients_are_no_slope():
    _, found = numbers(Own(torch.tanh), random(ROWS, WIDTH), gradient=torch.zeros(ROWS, WIDTH))
    assert found["input", SLOPE] == 0


def test_rows_of_a_linear_layer_are_taken_all_over(monkeypatch):
    monkeypatch.setattr(calls, "MOST_NUMBERS", 64 * WIDTH)
    x = random(4, 48, WIDTH)
    call, _ = numbers(nn.Linear(WIDTH, WIDTH), x)
    torch.testing.assert_close(call.inputs[0][0], x.detach().reshape(-1, WIDTH)[::3][:64])


def test_of_other_modules_the_first_items_are_taken(monkeypatch):
    def function(x, scale):
        return torch.cat([x[:3] * scale, x[3:].to(BF16).to(x.dtype)])

    monkeypatch.setattr(calls, "MOST_NUMBERS", 3 * WIDTH * 8)
    x, scale = random(5, 8, WIDTH), random(8, 1)
    call, found = numbers(Own(function), x, scale)
    torch.testing.assert_close(call.inputs[0][0], x.detach()[:3])
    torch.testing.assert_close(call.inputs[0][1], scale.detach())
    assert found["output", ERROR] == 0  # the items that are rounded are not among the first
    monkeypatch.setattr(calls, "MOST_NUMBERS", 5 * WIDTH * 8)
    assert numbers(Own(function), x, scale)[1]["output", ERROR] > 1e-4


def test_inputs_are_kept_as_they_were_before_the_forward():
    x = random(ROWS, WIDTH) * 1.0
    before = x.detach().clone()
    call, found = numbers(nn.ReLU(inplace=True), x)
    torch.testing.assert_close(call.inputs[0][0], before)
    assert found["output", ERROR] == found["output", REPEATED] == 0


def test_what_a_block_adds_is_compared_with_its_rounding():
    big, small = torch.full((8, 64), 1000.0), torch.full((8, 64), 1.0)
    block = nn.Sequential(Own(lambda x: (x + small[: len(x)].to(x.dtype)).to(BF16)))
    _, found = numbers(block, big.to(BF16).requires_grad_(), autocast=False)
    assert found["output", RESIDUAL] == 1  # steps of BF16 are 4 at 1000, so that all is lost
    assert found["output", ERROR] == pytest.approx(1 / 1001, rel=1e-6)


@pytest.mark.parametrize("is_cut", [True, False])
def test_casts_on_bits_and_by_autocast_are_left_out_of_the_reference(is_cut):
    torch.manual_seed(0)
    x = random(64, 256)
    _, found = numbers(Own(lambda x: OnBits.apply(x, is_cut)), x, autocast=False)
    exact, low = x.detach().double(), OnBits.apply(x.detach(), is_cut).double()
    along = float(((low - exact) * exact).sum() / exact.square().sum())
    assert found["output", GAIN] == pytest.approx(along, rel=1e-6)
    assert (found["output", GAIN] < -2e-3) is is_cut

    def inside(x):
        with torch.autocast("cpu", BF16):
            return x @ x.mT

    _, found = numbers(Own(inside), x, autocast=False)
    low, exact = (x.to(BF16) @ x.to(BF16).mT).double(), x.double() @ x.double().mT
    error = float((low - exact).norm() / exact.norm())
    assert found["output", ERROR] == pytest.approx(error, rel=1e-2)


def test_a_derived_class_is_compared_with_pytorchs_if_it_does_the_same():
    class Cut(nn.Linear):
        """Cuts off by powers of two, which FP32 does as well."""

        def forward(self, x):
            y = super().forward(x)
            step = 2 ** (y.detach().abs().clamp_min(1e-30).log2().floor() - 7)
            return y + ((y / step).trunc() * step - y).detach()

    class Other(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    torch.manual_seed(0)
    _, found = numbers(Cut(WIDTH, WIDTH), random(ROWS, WIDTH), autocast=False)
    # Cutting off 8 bits takes between 0 and 2^-7, on average about 2^-9 of a number or more.
    assert -(2**-7) < found["output", GAIN] < -(2**-9)
    _, found = numbers(Other(WIDTH, WIDTH), random(ROWS, WIDTH), autocast=False)
    assert abs(found["output", GAIN]) < 1e-6


def test_choices_are_those_of_the_run():
    class Router(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, WIDTH) / 50)

        def forward(self, x):
            return F.linear(x, self.weight).float().softmax(-1).topk(2, -1)

    torch.manual_seed(0)
    module, x = Router(), random(512, WIDTH)
    with torch.autocast("cpu", BF16):
        chosen = module(x)[1]
    assert (module(x)[1] != chosen).any()  # rounding turns some
    _, found = numbers(module, x)
    assert found["input", ERROR] < 0.01


def test_masks_take_no_gradient_and_weights_inside_blocks_are_theirs():
    mask = torch.zeros(8, 8).masked_fill(torch.ones(8, 8).triu(1) > 0, -math.inf)
    attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
    x = random(2, 8, WIDTH)
    _, found = numbers(Own(lambda x, mask: (x @ x.mT + mask).softmax(-1) @ x), x, mask)
    assert ("input 1", ERROR) not in found
    assert all(map(math.isfinite, found.values()))
    _, found = numbers(attention, x, x, x)
    assert ("in_proj_weight", ERROR) in found
    assert ("out_proj.weight", ERROR) not in found


def test_kinds_and_their_limits():
    kinds = {
        "linear": nn.Conv2d(3, 3, 1), "norm": nn.RMSNorm(4), "activation": nn.GELU(),
        "embedding": nn.Embedding(4, 4), "loss": nn.MSELoss(), "block": Own(torch.tanh),
    }  # fmt: skip
    assert {kind_of(module): module for module in kinds.values()} == kinds
    limits = audit.LIMITS["block"]
    assert limit_of("block", "output 1", GAIN) == limits["output"].gain
    assert limit_of("block", "input 2", ERROR) == limits["input"].error
    assert limit_of("block", "in_proj_weight", ERROR) == limits["weight"].error


class Net(nn.Module):
    """One layer, used several times, whose weight is the head's too."""

    def __init__(self, uses=1, reentrant=None, dropout=0.0):
        super().__init__()
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.layer.weight
        self.body = nn.Sequential(self.layer, nn.GELU(), nn.Dropout(dropout))
        self.loss, self.uses, self.reentrant = nn.MSELoss(), uses, reentrant

    def forward(self, x):
        for _ in range(self.uses):
            if self.reentrant is None:
                x = self.body(x)
            else:
                x = checkpoint(self.body, x, use_reentrant=self.reentrant)
        return self.head(x)

    def step(self):
        x = torch.randn(ROWS, WIDTH).requires_grad_()
        return self.loss(self(x).float(), torch.zeros(ROWS, WIDTH))


@pytest.mark.parametrize("uses", [1, 3])
def test_each_call_is_compared_with_its_own_gradients(monkeypatch, uses):
    audited = []
    exact = audit.audit

    def kept(call, *more):
        audited.append(call.module)
        return exact(call, *more)

    monkeypatch.setattr(audit, "audit", kept)
    model = Net(uses)
    events, watch = audits(model)
    assert audited.count(model.layer) == 2 * min(uses, MOST_CALLS)
    found = {row.module: row for row in watch.findings.rows if row.statistic == ERROR}
    # The weight's gradient in the run is the sum over calls; each call's own is off by rounding.
    assert found["head"].value < 0.01
    assert found["layer"].value < 0.01
    assert not events


def test_a_loss_that_a_backward_begins_with_is_audited():
    model = Net()
    model.loss = Own(lambda x, y: Scaled.apply(F.mse_loss(x, y), 0.8))
    events, _ = audits(model)
    assert [event.site for event in events] == ["loss"]
    assert "-20.0%" in events[0].why


def test_dropout_is_not_measured_and_keeps_its_random_numbers():
    after = []
    for is_watched in (False, True):
        torch.manual_seed(0)
        model = Net(dropout=0.2)
        if is_watched:
            events, watch = audits(model)
        else:
            for _ in range(3):
                model.step()
        after.append(torch.rand(1))
    assert after[0] == after[1]
    assert "dropout" in watch.findings.unmeasured["body"]
    assert "dropout" in watch.findings.unmeasured[""]
    assert {row.module for row in watch.findings.rows} >= {"layer", "head", "loss"}
    assert not events


@pytest.mark.parametrize("reentrant", [True, False])
def test_modules_in_checkpoints_are_audited_as_others_are(reentrant):
    torch.manual_seed(0)
    events, watch = audits(Net(reentrant=reentrant))
    assert not events
    assert {row.module for row in watch.findings.rows} >= {"head", "loss"}
    assert ("layer" in {row.module for row in watch.findings.rows}) is not reentrant


def test_weights_that_are_shared_stay_shared():
    model, x = Net(), random(ROWS, WIDTH)
    weights, before = [*model.parameters()], model.layer.weight.detach().clone()
    numbers(model, x)
    assert model.head.weight is model.body[0].weight is weights[0]
    assert all(a is b for a, b in zip(model.parameters(), weights, strict=True))
    torch.testing.assert_close(weights[0].detach(), before, rtol=0, atol=0)


def test_sums_in_bf16_of_norms_on_cpus_are_not_compared():
    for low in (torch.float32, BF16):
        x = torch.randn(ROWS, WIDTH).to(low).requires_grad_()
        _, found = numbers(nn.LayerNorm(WIDTH).to(low), x, autocast=False)
        assert (("weight", ERROR) in found) is (low == torch.float32)
        assert ("weights", SLOPE) in found


def test_weights_whose_memory_was_given_back_are_not_read():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    call = Call(model[0], (torch.randn(3, 4),), {}, {})
    call.take_outputs(model[0](torch.randn(3, 4)))
    call.take_gradients([torch.ones(3, 4)])
    model[0].weight.untyped_storage().resize_(0)  # as FSDP does after a forward
    with pytest.raises(NotMeasured, match="sharded"):
        audit.audit(call)


def test_token_ids_count_as_what_an_embedding_makes_of_them(monkeypatch):
    monkeypatch.setattr(calls, "MOST_NUMBERS", 2 * 16 * WIDTH)
    model = nn.Sequential(nn.Embedding(9, WIDTH), nn.Linear(WIDTH, 3))
    assert Call(model, (torch.randint(9, (100, 16)),), {}, {}).inputs[0][0].shape == (2, 16)


def test_what_keeps_too_much_for_its_backward_is_not_run_to_its_end(monkeypatch):
    x = random(64, WIDTH)
    block = nn.Sequential(*[nn.Tanh() for _ in range(8)])  # each keeps its output
    _, found = numbers(block, x, autocast=False)
    assert ("output", GAIN) in found
    monkeypatch.setattr(calls, "MOST_BYTES", 6 * 64 * WIDTH * 4)
    with pytest.raises(NotMeasured, match="to run it again takes over 0 MiB"):
        numbers(block, x, autocast=False)


def test_where_equal_numbers_meet_no_slope_is_told():
    x = torch.zeros(4, 2, 8, 8, requires_grad=True)
    _, found = numbers(nn.MaxPool2d(2), x, autocast=False)
    assert math.isnan(found["input", SLOPE])
    _, found = numbers(nn.MaxPool2d(2), random(4, 2, 8, 8), autocast=False)
    assert abs(found["input", SLOPE]) < 1e-6
    # As after ReLU: a part of the windows holds nothing but 0.
    x = random(4, 2, 24, 24).detach().sub(0.5).relu().requires_grad_()
    _, found = numbers(nn.MaxPool2d(2), x, autocast=False)
    assert math.isnan(found["input", SLOPE])


def test_the_gradient_of_a_single_number_is_not_compared():
    class Scale(nn.Module):
        def __init__(self, *shape):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(shape))

        def forward(self, x):
            return x * self.scale

    _, found = numbers(Scale(), random(8, WIDTH))
    assert ("output", GAIN) in found and ("scale", GAIN) not in found
    _, found = numbers(Scale(WIDTH), random(8, WIDTH))
    assert ("scale", GAIN) in found
