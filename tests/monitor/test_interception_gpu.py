"""CUDA graphs: those of the compiler leave attention out, those captured by hand are refused."""

import pytest
import torch

from tests.toys import instrumented

pytestmark = [
    pytest.mark.gpu,
    # PyTorch's own, of graphs between two calls of attention, in which nothing is left to capture.
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
]


@pytest.fixture
def model(tiny):
    torch.manual_seed(0)
    return tiny.GPT().cuda().bfloat16()


def test_a_switch_reaches_a_model_compiled_to_cuda_graphs(model, tiny, tokens):
    tokens = tokens.cuda()
    with instrumented(model) as inst:
        compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
        for _ in range(4):  # compiled, warmed up, captured, replayed
            before = tiny.step(model, tokens, run=compiled)
        inst.switch("h.1.attn", "compensated")
        switched = tiny.step(model, tokens, run=compiled)
        assert inst.sites["h.1.attn"].launches["backward", "compensated"] == 1
        assert not tiny.equal(switched, before)
        inst.switch("*", "none")
        assert tiny.equal(tiny.step(model, tokens, run=compiled), before)


def test_calls_captured_by_hand_are_refused(model, tiny, tokens):
    tokens = tokens.cuda()
    with instrumented(model) as inst:
        tiny.step(model, tokens)
        assert inst.sites["h.1.attn"].calls.refusal is None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(tokens)
        graph.replay()
        assert "captured in a CUDA graph" in inst.sites["h.1.attn"].calls.refusal
