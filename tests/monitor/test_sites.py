"""Sites, their weights, and the switch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import guardbit
from guardbit.kernels.runtime import runtime
from tests import toys


@pytest.fixture
def inst(model, tiny, tokens, instrument):
    made = instrument(model)
    tiny.step(model, tokens)
    return made


def test_sites_are_named_after_their_modules(model, inst):
    assert list(inst.sites) == ["h.0.attn", "h.1.attn"]
    site = inst.sites["h.1.attn"]
    assert site.module is model.h[1].attn
    assert site.num_heads == 4
    assert site.calls.refusal is None
    assert repr(site) == "Site('h.1.attn', num_heads=4)"


def test_nothing_is_known_before_the_first_call(model, instrument):
    inst = instrument(model)
    assert inst.sites == {}
    assert inst.stabilizers() == {}
    with pytest.raises(ValueError, match=r"'\*'; there are none: no call of attention"):
        inst.switch("*", "compensated")


def test_chosen_sites_only(model, tiny, tokens):
    with toys.instrumented(model, sites=["h.1.*"]) as inst:
        tiny.step(model, tokens)
        assert list(inst.sites) == ["h.1.attn"]
    with pytest.raises(
        ValueError,
        match=r"no module that could call attention is called 'h.9.attn'; there are GPT, h.0",
    ):
        guardbit.instrument(model, sites=["h.9.attn"])


def test_what_cannot_be_instrumented(model, inst):
    with pytest.raises(ValueError, match=r"instrumented already \(module 'GPT'\)"):
        guardbit.instrument(model)
    with pytest.raises(ValueError, match=r"instrumented already \(module '0'\)"):
        guardbit.instrument(nn.Sequential(model.h[0]), sites=["0.attn"])
    stock = F.scaled_dot_product_attention
    for nothing in (None, [model], type(model)):
        with pytest.raises(TypeError, match=r"model is a \w+; it must be an nn.Module"):
            guardbit.instrument(nothing)
    with pytest.raises(ValueError, match="Linear has no module that could call attention"):
        guardbit.instrument(nn.Linear(2, 2))
    assert F.scaled_dot_product_attention is stock
    # Threads that share modules.
    inst.remove()
    with pytest.raises(ValueError, match=r"'0' is an nn.DataParallel, .*DistributedDataParallel"):
        guardbit.instrument(nn.Sequential(nn.DataParallel(model)))


def test_scripted_parts_are_passed_over(tiny):
    class Half(nn.Module):
        def forward(self, x):
            return x / 2

    model = nn.Sequential(torch.jit.script(Half()), tiny.Attention())
    with toys.instrumented(model) as inst:
        tiny.step(model, torch.randn(2, 5, 64))
        assert list(inst.sites) == ["1"]
    with pytest.raises(ValueError, match="has no module that could call attention"):
        guardbit.instrument(torch.jit.script(Half()))


def test_hugging_face_attention_that_nobody_sees_is_refused_if_nothing_else_may_call_it():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=32, num_attention_heads=2, intermediate_size=16, num_hidden_layers=1,
        vocab_size=8,
    )  # fmt: skip
    model = transformers.BertModel(config)
    model.config._attn_implementation = "hub/kernel"
    for outer in (model, toys.Model(model)):
        with pytest.raises(ValueError, match=r"BertModel .*'hub/kernel', which GuardBit does"):
            guardbit.instrument(outer)
        guardbit.instrument(outer, sites=["*"]).remove()  # explicit beats clever
    guardbit.instrument(toys.Model(model, toys.Attention())).remove()


def test_sites_are_named_as_without_checkpoint_wrappers(model, tiny, tokens, instrument):
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapper

    before = tiny.step(model, tokens)
    wrapper.apply_activation_checkpointing(
        model, check_fn=lambda module: isinstance(module, tiny.Block)
    )
    inst = instrument(model)
    calls = []
    inst.observe(calls.append)
    after = tiny.step(model, tokens)
    assert list(inst.sites) == ["h.0.attn", "h.1.attn"]
    assert [call.site for call in calls] == [site.number for site in inst.sites.values()][::-1]
    same = zip(before.values(), after.values(), strict=True)
    assert all(torch.equal(one, other) for one, other in same)


def test_calls_of_our_own_function_are_sites(tiny):
    class Ours(toys.Attention):
        def attend(self, q, k, v):
            return guardbit.flash_attention(q, k, v, causal=True, stabilizer="row_max")

    model = nn.Sequential(Ours(4, 2, width=64, is_fused=False))
    x = torch.randn(2, 7, 64)
    with tiny.watched(model, x) as (inst, _):
        assert inst.stabilizers() == {"0": ["row_max"] * 4}
        assert torch.equal(inst.sites["0"].query_weight(1), model[0].q_proj.weight[16:32])
        assert torch.equal(inst.sites["0"].key_weights(), model[0].k_proj.weight.view(2, 16, 64))
        inst.switch("0", "compensated", heads=[2])
        tiny.step(model, x)
        assert inst.stabilizers() == {"0": ["row_max", "row_max", "compensated", "row_max"]}
        assert inst.sites["0"].launches["backward", "compensated"] == 1
    assert not runtime.running


@pytest.mark.parametrize("how", ["plain", "frozen", "autocast", "half"])
def test_rows_after_one_step(how, model, tiny, tokens, instrument):
    if how == "half":
        model.bfloat16()
    if how == "frozen":
        model.h[1].attn.requires_grad_(False)
    inst = instrument(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        tiny.step(model, tokens)
    site = inst.sites["h.1.attn"]
    weight = model.h[1].attn.qkv.weight
    for head in range(4):
        found = site.query_weight(head)
        assert found.dtype == torch.float32
        assert torch.equal(found, weight[16 * head : 16 * head + 16].float())
    assert torch.equal(site.key_weights(), weight[64:128].float().view(4, 16, 64))
    with torch.no_grad():
        weight.mul_(2)
    assert torch.equal(site.query_weights(), weight[:64].float().view(4, 16, 64))
    for head in (-1, 4):
        with pytest.raises(IndexError, match=r"it must be 0 to 3"):
            site.query_weight(head)
    for head in (1.5, None, "1"):
        with pytest.raises(ValueError, match="it must be a list of whole numbers"):
            site.query_weight(head)


def test_rows_that_cannot_be_known(tiny, instrument):
    class Fixed(nn.Module):
        def forward(self, x):
            q = x.unflatten(-1, (4, 16)).transpose(1, 2)
            return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)

    model = nn.Sequential(nn.Linear(64, 64), Fixed())
    inst = instrument(model, sites=["1"])
    with pytest.raises(ValueError, match="no call of attention has been seen"):
        inst.switch("1", "none")
    tiny.step(model, torch.randn(2, 5, 64))
    with pytest.raises(guardbit.LayoutUnavailable, match="W_Q of site '1' is unavailable: the "):
        inst.sites["1"].query_weight(0)


class Marked(torch.Tensor):
    """A tensor of a class of its own, as some libraries have them; PyTorch's answers for it."""


def test_a_class_of_tensors_does_not_make_two_calls_of_one(site_of):
    class Model(toys.Attention):
        def forward(self, x):
            return super().forward(x.as_subclass(Marked)).as_subclass(torch.Tensor)

    site = site_of(Model(4, width=64))
    assert torch.equal(site.query_weights(), site.module.qkv.weight[:64].view(4, 16, 64))


def test_joint_attention_of_two_streams_is_not_called_low_rank_alone(site_of):
    class Joint(nn.Module):
        """As in Flux: text and image have projections of their own, and attend together."""

        def __init__(self):
            super().__init__()
            self.image, self.text = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            y = torch.cat([self.text(x[:, :2]), self.image(x[:, 2:])], dim=1)
            q = y.unflatten(-1, (4, 16)).transpose(1, 2)
            return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)

    with pytest.raises(guardbit.LayoutUnavailable, match="or in joint attention of text"):
        site_of(Joint()).query_weight(0)


class TwoShapes(nn.Module):
    """Calls attention twice: no one matrix is W_Q."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        for projection, heads in ((self.a, 4), (self.b, 2)):
            q = projection(x).unflatten(-1, (heads, -1)).transpose(1, 2)
            x = x + F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)
        return x


def test_calls_of_different_shapes_are_refused_and_say_so(tiny, instrument):
    model = nn.Sequential(TwoShapes())
    inst = instrument(model)
    tiny.step(model, torch.randn(2, 5, 64))
    with pytest.raises(ValueError, match="with 4 heads of 16 and with 2 heads of 32"):
        inst.switch("0", "compensated")
    launches = inst.sites["0"].launches
    with pytest.raises(guardbit.LayoutUnavailable, match="2 times in one forward, with queries of"):
        inst.sites["0"].query_weight(0)
    assert inst.sites["0"].launches == launches, "probing is no call of the model"


def test_switch_by_name_by_pattern_and_by_head(inst):
    inst.switch("h.1.attn", "compensated", heads=[3, 1])
    inst.switch("h.*.attn", ["row_max", "exact_delta"], heads=[2, 3])
    assert inst.stabilizers() == {
        "h.0.attn": ["none", "none", "row_max", "exact_delta"],
        "h.1.attn": ["none", "compensated", "row_max", "exact_delta"],
    }
    inst.switch("h.0.attn", ["none", "row_max", "exact_delta", "compensated"])
    assert inst.stabilizers()["h.0.attn"] == ["none", "row_max", "exact_delta", "compensated"]
    inst.switch("*", "none")
    assert inst.stabilizers() == {"h.0.attn": ["none"] * 4, "h.1.attn": ["none"] * 4}
    inst.switch("*", "row_max", heads=iter([0]))
    assert {tuple(names) for names in inst.stabilizers().values()} == {("row_max", *["none"] * 3)}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("h.2.attn", "none"), ValueError, "no attention site is called 'h.2.attn'; there are h.0"),
        ((None, "none"), TypeError, "site is None; it must be a name or a pattern"),
        (("h.0", "none"), ValueError, "no attention site is called 'h.0'"),
        (("h.0.attn", "none", 3), ValueError, "heads is 3; it must be a list of whole numbers"),
        (("h.0.attn", None), ValueError, "stabilizer is None; it must be a name, or one per head"),
        (("*", "rowmax"), ValueError, "stabilizer 'rowmax' is unknown; allowed are none, exact"),
        (("*", "none", [0, 4]), IndexError, "head 4 is out of range; site 'h.0.attn' has heads 0"),
        (("*", ["none"] * 2, [1]), ValueError, "stabilizer has 2 names; there are 1 heads"),
        (("*", ["none"] * 3), ValueError, "stabilizer has 3 names; there are 4 heads"),
    ],
)
def test_bad_switches_are_named_and_change_nothing(arguments, error, message, inst):
    inst.switch("*", "row_max", heads=[0])
    before = inst.stabilizers()
    with pytest.raises(error, match=message):
        inst.switch(*arguments)
    assert inst.stabilizers() == before


class OfType(toys.Attention):
    """Attention that computes in FP64, which no stabilizer takes, or in another type."""

    def __init__(self, dtype=torch.float64):
        super().__init__(4, width=64, is_residual=False)
        self.dtype = dtype

    def attend(self, q, k, v):
        return super().attend(*(y.to(self.dtype) for y in (q, k, v))).float()


def test_a_pattern_passes_over_what_cannot_be_switched(tiny, tokens, instrument):
    model = tiny.GPT()
    model.h[0].attn = OfType()
    before = tiny.step(model, tokens)
    inst = instrument(model)
    assert tiny.equal(tiny.step(model, tokens), before)
    inst.switch("*", "compensated")
    assert inst.stabilizers() == {"h.0.attn": ["none"] * 4, "h.1.attn": ["compensated"] * 4}
    for pattern in ("h.0.attn", "h.0.*"):
        with pytest.raises(ValueError, match=r"'h.0.attn' cannot be switched: .*float64"):
            inst.switch(pattern, "compensated")


def test_a_name_that_looks_like_a_pattern_is_a_name(instrument):
    model = nn.ModuleDict({"layer[0]": toys.Attention(4, width=64)})
    inst = instrument(model, sites=["layer[0]"])
    model["layer[0]"](torch.ones(1, 3, 64))
    inst.switch("layer[0]", "exact_delta", heads=[2])
    assert inst.asked() == {"layer[0]": ["none", "none", "exact_delta", "none"]}


def test_heads_go_back_at_a_site_that_can_no_longer_be_switched(tiny, tokens, instrument):
    model = tiny.GPT()
    model.h[0].attn = OfType(torch.float32)
    inst = instrument(model)
    tiny.step(model, tokens)
    inst.switch("*", "compensated")
    model.h[0].attn.dtype = torch.float64
    tiny.step(model, tokens)
    with pytest.raises(ValueError, match=r"'h.0.attn' cannot be switched: .*float64"):
        inst.switch("h.0.attn", "row_max")
    inst.switch("h.0.attn", "none", heads=[1, 2])
    assert inst.asked()["h.0.attn"] == ["compensated", "none", "none", "compensated"]
    assert inst.stabilizers()["h.0.attn"] == ["none"] * 4, "the mask keeps PyTorch's kernel"
    inst.switch("*", "none")
    assert {name for names in inst.asked().values() for name in names} == {"none"}


def test_a_switch_takes_effect_at_the_next_call(model, inst, tiny, tokens):
    before = tiny.step(model, tokens)
    inst.switch("h.1.attn", "compensated", heads=[1])
    tiny.step(model, tokens)
    both = ("forward", "backward")
    assert inst.sites["h.0.attn"].launches == {(way, "FLASH_ATTENTION"): 3 for way in both}
    assert inst.sites["h.1.attn"].launches == {
        **{(way, "FLASH_ATTENTION"): 3 for way in both},
        **{(way, "compensated"): 1 for way in both},
    }
    inst.switch("h.1.attn", "none", heads=[1])
    assert tiny.equal(tiny.step(model, tokens), before)
    assert inst.sites["h.1.attn"].launches["forward", "compensated"] == 1


def test_switched_gradients_are_those_of_our_kernels(tiny, tokens, instrument):
    class Ours(tiny.Attention):
        def attend(self, q, k, v):
            return guardbit.flash_attention(q, k, v, causal="top-left", stabilizer="compensated")

    ours, model = tiny.GPT(attention=Ours), tiny.GPT()
    model.load_state_dict(ours.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        expected = tiny.step(ours, tokens)
        stock = tiny.step(model, tokens)
        inst = instrument(model)
        tiny.step(model, tokens)
        inst.switch("*", "compensated")
        assert tiny.equal(tiny.step(model, tokens), expected)
    assert not tiny.equal(stock, expected)


def test_stabilizers_are_saved_and_loaded(model, inst, tiny, tokens, instrument):
    inst.switch("h.1.attn", "row_max", heads=[2])
    saved = inst.stabilizers()
    other = tiny.GPT()
    twin = instrument(other)
    twin.load_stabilizers(saved)
    assert twin.stabilizers() == saved  # a run may be saved again before its first step
    tiny.step(other, tokens)
    assert twin.stabilizers() == saved
    assert twin.sites["h.1.attn"].launches["forward", "row_max"] == 1
    with pytest.raises(ValueError, match=r"heads in 'h.7.attn', which is not watched"):
        twin.load_stabilizers({"h.7.attn": ["none"] * 4})
    with pytest.raises(ValueError, match="stabilizer 'x' is unknown"):
        twin.load_stabilizers({"h.0.attn": ["row_max"] * 4, "h.1.attn": ["x"] * 4})
    with pytest.raises(ValueError, match="stabilizer has 3 names; there are 4 heads"):
        twin.load_stabilizers({"h.0.attn": ["row_max"] * 3})
    assert twin.stabilizers() == saved


def test_accumulated_and_repeated_backwards(model, inst, tiny, tokens):
    single = tiny.step(model, tokens)
    inst.switch("*", "compensated")
    model.zero_grad(set_to_none=True)
    loss = model(tokens)
    inst.switch("*", "none")  # the backward is that of what ran
    loss.backward(retain_graph=True)
    once = {name: p.grad.clone() for name, p in model.named_parameters()}
    loss.backward()
    assert all(torch.equal(p.grad, 2 * once[name]) for name, p in model.named_parameters())
    launches = inst.sites["h.0.attn"].launches
    assert launches["forward", "compensated"] == 1
    assert launches["backward", "compensated"] == 2
    torch.testing.assert_close(
        once["embed.weight"], single["embed.weight"], rtol=1e-4, atol=1e-6
    )  # FP32: another kernel, the same gradient


def test_weights_are_found_in_inference_mode_and_after_a_move(tiny, tokens, instrument):
    with torch.device("meta"):
        model = tiny.GPT()
    inst = instrument(model)
    model(tokens.to("meta"))  # what the first call looks like is remembered
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    with torch.inference_mode():
        model(tokens)
        found = inst.sites["h.1.attn"].query_weights()
    assert torch.equal(found, model.h[1].attn.qkv.weight[:64].view(4, 16, 64))
