"""PyTorch's code that looks at hooks, as for a fast path, does what it does unwatched."""

import pytest
import torch
from torch import nn

import guardbit
from tests.toys import Attention, instrumented

WIDTH, TOKENS = 32, 8


def encoder():
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 64, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


def batch():
    return torch.randn(3, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))


def outputs(model, run):
    """What a model gives in evaluation, frozen in training, and with padding."""
    x = batch()
    model.eval()
    with torch.no_grad():
        padding = torch.arange(TOKENS) > torch.tensor([[3], [5], [7]])
        # Rows of padding that see no key: the fast path makes NaN of them.
        window = ~torch.ones(TOKENS, TOKENS).tril().triu(-1).bool()
        options = {}, {"src_key_padding_mask": padding}
        options += ({"mask": window, "src_key_padding_mask": padding},)
        found = [run(x, **each) for each in options]
    model.requires_grad_(False)
    found.append(run(x))
    model.requires_grad_(True)
    return found


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
@pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_evaluation_keeps_its_bits(backend):
    def evaluated(watch):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = encoder()
        inst = guardbit.instrument(model) if watch else None
        run = model if backend is None else torch.compile(model, backend=backend)
        found = outputs(model, run)
        if inst is not None:
            model.train()
            torch._dynamo.reset()  # PyTorch 2.11 would run the frozen model's graph, unwatched too
            run(batch()).sum().backward()
            assert inst.sites, "in training it is watched"
            inst.remove()
        return found

    plain, watched = evaluated(False), evaluated(True)
    for expected, found in zip(plain, watched, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_modules_that_others_have_hooked_are_not_graphed():
    """Graphing looks at buffers after it has looked at hooks, and needs no device so far."""
    model = Attention()
    model.register_buffer("trained", torch.ones(1, requires_grad=True))

    def refusal():
        with pytest.raises(AssertionError) as refused:
            torch.cuda.make_graphed_callables(model, (batch(),))
        return str(refused.value)

    with instrumented(model):
        assert "buffers must have" in refusal()
        model.register_forward_hook(lambda *_: None)
        assert "must not have hooks" in refusal()


def test_everything_is_given_back():
    looking = nn.TransformerEncoderLayer.forward, torch.cuda.make_graphed_callables
    codes = [f.__code__ for f in looking]
    before = dict(vars(nn.Module))
    with instrumented(encoder()), instrumented(encoder()):
        assert nn.TransformerEncoderLayer.forward.__code__ is not codes[0]
    assert [f.__code__ for f in looking] == codes
    assert dict(vars(nn.Module)) == before
