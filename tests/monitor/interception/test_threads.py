"""What another thread computes is not the watched model's."""

import threading

import torch
import torch.nn.functional as F

import guardbit
from guardbit.kernels.runtime import runtime


def test_what_another_thread_computes_meanwhile_is_not_this_model_s(tiny, tokens, instrument):
    """A thread runs inside the instrumented model's own call, where its stack is full."""
    model, other, twin = tiny.GPT(), tiny.GPT(layers=1), tiny.GPT(layers=1)
    inst, twin_inst = instrument(model), instrument(twin)
    q = torch.randn(1, 3, 5, 16)
    expected = F.scaled_dot_product_attention(q, q, q), other(tokens), twin(tokens)
    errors, results = [], []

    def elsewhere():
        try:
            results.append(F.scaled_dot_product_attention(q, q, q))
            for run in (other, twin):
                results.append(run(tokens))
            guardbit.flash_attention(q, q, q)
        except BaseException as error:
            errors.append(error)

    def run_a_thread(*_):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    hook = model.h[1].attn.qkv.register_forward_hook(run_a_thread)
    tiny.step(model, tokens)
    inst.switch("*", "compensated")
    for name, site in inst.sites.items():
        assert torch.equal(
            site.query_weights().flatten(0, 1), model.get_submodule(name).qkv.weight[:64]
        )
    hook.remove()
    assert errors == []
    assert len(results) == 3, "once in the step; hooks of others do not run for W_Q"
    for i, result in enumerate(results):
        assert torch.equal(result, expected[i % 3])
    assert [(site.num_heads, site.refusal) for site in inst.sites.values()] == [(4, None)] * 2
    assert list(twin_inst.sites) == ["h.0.attn"], "it was seen before the thread ran"
    assert runtime.running == []
