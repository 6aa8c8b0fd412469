"""Ways to run a model: nothing changes before a switch, a switch recompiles nothing, runs resume.

The reference is always the same model, uninstrumented, eager, without checkpointing.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import guardbit
from tests.monitor.support.conftest import sampled
from tests.toys import instrumented

SITES = ("h.0.attn", "h.1.attn")
CUDA_GRAPHS = '`torch.compile(mode="reduce-overhead")`, by its graph only'
DATA_PARALLEL = "`nn.DataParallel`"
# What counts as run, besides what calls say of themselves; centred keys launch nothing of ours.
LAUNCHED = {
    "compensated": ("backward", "compensated"),
    "exact_delta": ("backward", "exact_delta"),
    "centered_keys": None,
}
LEAVE_THE_KERNEL = ["exact_delta", "centered_keys"]


class Mode(NamedTuple):
    """One row of the table."""

    compiled: str = ""  # "whole", "blocks" or ""
    # What is recomputed in the backward: "outer", the blocks; "inner", attention alone, inside its
    # own forward; or "".
    checkpointed: str = ""
    options: Mapping[str, object] = MappingProxyType({})  # further arguments of `checkpoint`
    autocast: torch.dtype | None = None
    weights: torch.dtype = torch.float32
    between: Callable[[Loop], None] | None = None  # what happens before every step
    growth: int = 0  # by how many tokens sequences grow with every step


class Loop:
    """A training loop in one of the modes; the data depend on step and micro-batch only."""

    def __init__(self, tiny, mode: Mode, watched: bool = True, counter=None):
        self.tiny, self.mode, self.watched = tiny, mode, watched
        torch.manual_seed(0)
        self.model = tiny.GPT(attention=attention_of(tiny, mode if watched else Mode()))
        self.model.to(mode.weights)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler("cpu", enabled=mode.autocast == torch.float16)
        self.queries = {name: [] for name in SITES}
        self.calls, self.others = [], []
        self.run = self.model
        if not watched:
            for name in SITES:
                self.model.get_submodule(name).qkv.register_forward_hook(self.keep(name))
            return
        self.inst = guardbit.instrument(self.model)
        self.inst.observe(self.calls.append)
        self.counter = counter or CompileCounterWithBackend("aot_eager")
        # The compiler leaves its graph where a checkpoint is reentrant.
        how = {"backend": self.counter, "fullgraph": not mode.options.get("use_reentrant", False)}
        if mode.compiled == "whole":
            self.run = torch.compile(self.model, **how)
        elif mode.compiled == "blocks":
            for block in self.model.h:
                block.compile(**how)

    def keep(self, name):
        return lambda _, args, output: self.queries[name].append(output.detach()[..., :64])

    def wrap(self, block, x):
        return checkpoint(block, x, **self.mode.options)

    def step(self, step, micro_batches):
        """Returns the loss, gradients and new weights."""
        if self.watched and self.mode.between is not None:
            self.mode.between(self)
        self.calls.clear()
        self.optimizer.zero_grad(set_to_none=True)
        outer = self.watched and self.mode.checkpointed == "outer"
        for part in range(micro_batches):
            generator = torch.Generator().manual_seed(10 * step + part)
            shape = (2, 12 + self.mode.growth * step)
            tokens = torch.randint(self.tiny.VOCABULARY, shape, generator=generator)
            dtype = self.mode.autocast
            with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                loss = self.run(tokens, wrap=self.wrap if outer else None) / micro_batches
            self.scaler.scale(loss).backward()
        found = {name: p.grad.clone() for name, p in self.model.named_parameters()}
        self.scaler.step(self.optimizer)
        self.scaler.update()
        weights = {f"new {n}": p.detach().clone() for n, p in self.model.named_parameters()}
        return {"loss": loss.detach(), **found, **weights}

    def state(self):
        parts = (self.model, self.optimizer, self.scaler)
        return [part.state_dict() for part in parts], self.inst.stabilizers()

    def load(self, state):
        parts, stabilizers = state
        for part, values in zip((self.model, self.optimizer, self.scaler), parts, strict=True):
            part.load_state_dict(values)
        self.inst.load_stabilizers(stabilizers)

    def close(self):
        self.inst.remove()
        for other in self.others:
            other.close()


def attention_of(tiny, mode: Mode) -> type[nn.Module]:
    if mode.checkpointed != "inner":
        return tiny.Attention

    class Inside(tiny.Attention):
        def forward(self, x):
            return checkpoint(super().forward, x, **mode.options)

    return Inside


def evaluate(loop: Loop) -> None:
    loop.model.eval()
    with torch.no_grad():
        loop.run(torch.zeros(2, 12, dtype=torch.int64))
    loop.model.train()


def train_another(loop: Loop) -> None:
    """Another model of the same class, all of whose heads are switched."""
    if not loop.others:
        loop.others.append(Loop(loop.tiny, loop.mode._replace(between=None), counter=loop.counter))
        loop.others[0].step(0, 1)
        loop.others[0].inst.switch("*", "row_max")
    loop.others[0].step(7, 1)


def saves_products(context, op, *args, **kwargs) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    saved = op in products
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def saves_attention(context, op, *args, **kwargs) -> CheckpointPolicy:
    saved = op == torch.ops.guardbit.attention.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def selective(policy) -> dict:
    return {
        "use_reentrant": False,
        "context_fn": lambda: create_selective_checkpoint_contexts(policy),
    }


COMPILED = {"": "eager", "whole": "compiled whole", "blocks": "compiled by block"}
CHECKPOINTED = {"": "", "outer": ", blocks checkpointed", "inner": ", attention checkpointed"}
REENTRANT = {False: "", True: ", reentrant"}

MODES: dict[str, Mode] = {
    **{
        COMPILED[compiled] + CHECKPOINTED[checkpointed] + REENTRANT[reentrant]: Mode(
            compiled, checkpointed, {"use_reentrant": reentrant} if checkpointed else {}
        )
        for compiled in COMPILED
        for checkpointed in CHECKPOINTED
        for reentrant in ((False, True) if checkpointed else (False,))
    },
    "compiled whole, lengths that vary": Mode("whole", growth=4),
    "compiled by block, lengths that vary": Mode("blocks", growth=4),
    "eager, checkpointed by a policy": Mode("", "outer", selective(saves_products)),
    "eager, checkpointed, attention saved": Mode("", "outer", selective(saves_attention)),
    "compiled whole, checkpointed by a policy": Mode("whole", "outer", selective(saves_products)),
    "BF16 autocast": Mode(autocast=torch.bfloat16),
    "BF16 autocast, compiled whole": Mode("whole", autocast=torch.bfloat16),
    "FP16 autocast with a scaler": Mode(autocast=torch.float16),
    "BF16 throughout": Mode(weights=torch.bfloat16),
    "evaluation in between": Mode(between=evaluate),
    "evaluation in between, compiled whole": Mode("whole", between=evaluate),
    "two models": Mode(between=train_another),
    "two models, compiled by block": Mode("blocks", between=train_another),
}


def check_calls(loop, reference, micro_batches):
    """Every call once, recomputed or not, at the site whose queries it saw."""
    names = {loop.inst.sites[name].number: name for name in SITES}
    seen = Counter(names[call.site] for call in loop.calls)
    assert seen == dict.fromkeys(SITES, micro_batches)
    for name in SITES:
        calls = [call for call in loop.calls if names[call.site] == name]
        expected = reference.queries[name][-micro_batches:]
        for call, queries in zip(calls, expected, strict=True):
            assert torch.equal(call.q.transpose(1, 2).flatten(2), queries)


def check_execution(tiny, mode: Mode, stabilizers: Sequence[str]) -> None:
    """Nothing changes, two heads are switched without a recompilation, and the run is resumed."""
    reference = Loop(tiny, mode, watched=False)
    loop = Loop(tiny, mode)
    try:
        for step, micro_batches in enumerate((1, 2)):
            expected = reference.step(step, micro_batches)
            assert tiny.equal(loop.step(step, micro_batches), expected)
            check_calls(loop, reference, micro_batches)
        graphs = loop.counter.frame_count
        assert (graphs > 0) == bool(mode.compiled)
        weight = loop.model.h[1].attn.qkv.weight
        query = loop.inst.sites["h.1.attn"].query_weight(2)
        assert torch.equal(query, weight[32:48].float())

        before, expected = copy.deepcopy(loop.state()), reference.step(2, 2)
        resumed = Loop(tiny, mode, counter=loop.counter)
        loop.others.append(resumed)
        for stabilizer in stabilizers:
            loop.load(copy.deepcopy(before))
            check_switch(tiny, mode, stabilizer, loop, expected)
            state = copy.deepcopy(loop.state())
            continued = loop.step(3, 1)
            resumed.load(state)
            assert tiny.equal(resumed.step(3, 1), continued)
            site = resumed.inst.sites["h.1.attn"]
            assert site.stabilizers == [stabilizer, "none", "none", stabilizer]
            if LAUNCHED[stabilizer] is not None:
                assert site.launches[LAUNCHED[stabilizer]] == 1
    finally:
        loop.close()


def check_switch(tiny, mode: Mode, stabilizer: str, loop: Loop, expected) -> None:
    """Step 2 with two heads switched, against the step of the reference."""
    graphs = loop.counter.frame_count
    loop.inst.switch("h.1.attn", stabilizer, heads=[0, 3])
    switched = loop.step(2, 2)
    assert loop.counter.frame_count == graphs, "a switch must recompile nothing"
    assert [call.stabilizers[0] for call in loop.calls].count(stabilizer) == 2
    other, site = (loop.inst.sites[name] for name in SITES)
    assert other.stabilizers == ["none"] * 4
    assert site.stabilizers == [stabilizer, "none", "none", stabilizer]
    assert not {launch for launch in other.launches if launch[1] == stabilizer}
    if LAUNCHED[stabilizer] is not None:
        assert site.launches[LAUNCHED[stabilizer]] == 2
    changed = [name for name in switched if not torch.equal(switched[name], expected[name])]
    assert "h.1.attn.qkv.weight" in changed
    if stabilizer == "exact_delta":
        assert "loss" not in changed, "the forward keeps its bits"
    half = mode.autocast is not None or mode.weights != torch.float32
    # Relative to the largest gradient: FP32 sums in another order; BF16 roundings, 2^-8 each.
    for parameter in dict(loop.model.named_parameters()):
        difference = (switched[parameter] - expected[parameter]).abs().max()
        assert difference <= (0.03 if half else 1e-5) * expected[parameter].abs().max()


#: The compiled modes that `make test` takes: each way to compile, with and without a checkpoint.
QUICK = {
    "compiled whole",
    "compiled whole, blocks checkpointed",
    "compiled by block",
    "compiled by block, attention checkpointed",
    "compiled by block, lengths that vary",
    "BF16 autocast, compiled whole",
}


@pytest.mark.parametrize(
    "name", sampled(MODES, {name for name in MODES if "compiled" in name} - QUICK)
)
def test_execution(name, tiny, report):
    mode = MODES[name]
    every = mode.autocast == torch.bfloat16
    check_execution(tiny, mode, ["compensated", *LEAVE_THE_KERNEL] if every else ["compensated"])
    report("Execution", name, "yes", "yes", "yes")


COMPILED_AND_CHECKPOINTED = [
    "compiled whole, attention checkpointed",
    "compiled by block, blocks checkpointed, reentrant",
]


@pytest.mark.parametrize(
    "name",
    [
        "eager, blocks checkpointed",
        "eager, blocks checkpointed, reentrant",
        *sampled(COMPILED_AND_CHECKPOINTED, COMPILED_AND_CHECKPOINTED),
    ],
)
def test_stabilizers_that_leave_the_kernel_alone(name, tiny):
    # In BF16, where what they change is more than the last bits.
    check_execution(tiny, MODES[name]._replace(autocast=torch.bfloat16), LEAVE_THE_KERNEL)


def test_cuda_graphs(tiny, tokens, report):
    """In a replayed CUDA graph the op would not run again to see what is switched."""
    nodes = []

    def keep(graph, inputs):
        nodes.extend(graph.graph.nodes)
        return make_boxed_func(graph.forward)

    model = tiny.GPT()
    with instrumented(model):
        tiny.step(model, tokens, run=torch.compile(model, backend=aot_autograd(fw_compiler=keep)))
    ours = [node.target for node in nodes if str(node.target).startswith("guardbit.")]
    assert len(ours) == 4, "two layers, forward and backward"
    left_out = all(torch.Tag.cudagraph_unsafe in op.tags for op in ours)
    cell = "yes: the compiler leaves the op out of CUDA graphs" if left_out else "no"
    report("Execution", CUDA_GRAPHS, cell, cell, cell)


def test_data_parallel(tiny, report):
    with pytest.raises(ValueError, match="DataParallel") as refused:
        guardbit.instrument(nn.Sequential(nn.DataParallel(tiny.GPT())))
    report("Execution", DATA_PARALLEL, f"refused at setup: {refused.value}", "no", "no")


def test_the_table_has_a_row_for_each(committed):
    rows = [entry for entry, _ in committed["Execution"]]
    assert sorted(rows) == sorted([*MODES, CUDA_GRAPHS, DATA_PARALLEL])
