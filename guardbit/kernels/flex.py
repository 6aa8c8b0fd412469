"""FlexAttention with exact delta: its own kernels forward and backward, and a gradient of LSE.

The backward of FlexAttention takes a gradient of LSE: dS = P (dP - (delta - dL)). A switched head
gets its exact delta through dL = delta_used - delta. Nothing else of the call changes, compiled or
not.

PyTorch's autograd function of FlexAttention is replaced by a sibling that runs the same code, with
two functions of ours around the kernels. A call is watched if its kernel options hold `SITE`; all
other calls run as in PyTorch. Three ops are opaque to the compiler and look the attention module up
when they run, so a switch needs no recompilation.

Shapes: q `(B, H, N, D)`; k `(B, H_kv, M, D)`; v `(B, H_kv, M, E)`; out, d_out `(B, H, N, E)`; lse
`(B, H, N)`, FP32, a logarithm to base 2, as FlexAttention has it inside.
"""

from __future__ import annotations

import importlib
import inspect
import math
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from guardbit import guard
from guardbit.kernels import dispatch, flex_functions, reference
from guardbit.kernels.attention_call import AttentionCall
from guardbit.kernels.constants import device_constant
from guardbit.kernels.runtime import runtime
from guardbit.kernels.site_state import log
from guardbit.kernels.spec import AttentionSpec
from guardbit.records import STABILIZERS

#: The kernel option that holds the number of the call's attention module, a 0-d CPU tensor.
SITE = "guardbit_site"

#: What `SiteState.launches` calls FlexAttention's kernels.
KERNEL = "FLEX_ATTENTION"

_HOME = "torch._higher_order_ops.flex_attention"
_FUNCTION = "FlexAttentionAutogradOp"
_CALL = "guardbit_call"
_LN2 = math.log(2.0)
_UNRECORDED = (
    "the functions that flex_attention takes are not recorded, as in its debug mode, so delta"
    " cannot be computed again"
)

_library = torch.library.Library("guardbit", "FRAGMENT")
_SHARED = (
    "Tensor q, Tensor k, Tensor v, Tensor out, Tensor d_out, Tensor lse, Tensor site, Tensor names,"
    " Tensor[] tensors, SymInt[] numbers, int program, float scale"
)
for _schema in (
    "flex_begin(Tensor blocks, Tensor q, Tensor site, str obstacle, bool training)"
    " -> (Tensor blocks, Tensor names)",
    f"flex_lse_gradient({_SHARED}) -> Tensor",
    f"flex_observe(Tensor(a!) dq, Tensor d_lse, Tensor? given, {_SHARED}) -> ()",
):
    # A replayed CUDA graph would not look the site up again: the compiler is to leave the ops out.
    _library.define(_schema, tags=(torch.Tag.cudagraph_unsafe,))


# --- the ops -------------------------------------------------------------------------------------


class _Shared(NamedTuple):
    """The arguments of both ops of the backward, in the order of their schemas."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    d_out: Tensor
    lse: Tensor
    site: Tensor
    names: Tensor
    tensors: Sequence[Tensor]
    numbers: Sequence[int]
    program: int
    scale: float

    @property
    def stabilizers(self) -> tuple[str, ...]:
        """The stabilizer of each head, as the forward settled it."""
        return tuple(STABILIZERS[code] for code in self.names.tolist())

    @property
    def spec(self) -> AttentionSpec:
        """What the call asks for."""
        return flex_functions.specification(
            self.program, self.scale, len(self.q), self.tensors, self.numbers
        )

    def used(self, head_ids: tuple[int, ...]) -> Tensor:
        """Returns the delta `(B, C, N)` that FlexAttention's backward computes by itself, FP32."""
        index = device_constant(head_ids, torch.int64, self.q.device)
        d_out, out = (x.index_select(1, index).float() for x in (self.d_out, self.out))
        return (d_out * out).sum(-1)


@guard.again(runtime.tell_fault)
def _begin(
    blocks: Tensor, q: Tensor, site: Tensor, obstacle: str, training: bool
) -> tuple[Tensor, Tensor]:
    """Begins a call."""
    state = runtime.site(int(site))
    state.requested = ("none",) * q.size(1)
    state.native_dropout_p, state.is_masked = 0.0, False
    # Compiled forwards without gradients, such as a backward runs again, do not come here.
    state.begin_forward(is_first=state.ran_at < state.clock.now)
    names, why = _settled(state.running, obstacle)
    state.launches["forward", KERNEL] += 1
    if training:
        state.ran_at = state.clock.now
        state.note(names, why or (obstacle and f"nothing is measured of its calls: {obstacle}"))
    return blocks.clone(), torch.tensor(
        [STABILIZERS.index(name) for name in names], dtype=torch.int64
    )


def _settled(asked: tuple[str, ...], obstacle: str) -> tuple[tuple[str, ...], str]:
    """Returns what each head runs, and why that is not what was asked for, or ""."""
    settled = {name: _settled_one(name, obstacle) for name in dict.fromkeys(asked)}
    why = "; ".join(reason for _, reason in settled.values() if reason)
    return tuple(settled[name][0] for name in asked), why


def _settled_one(name: str, obstacle: str) -> tuple[str, str]:
    own = "flex_attention keeps its own kernels"
    if name == "none" or (name == "exact_delta" and not obstacle):
        return name, ""
    if obstacle:
        return "none", f"{name} is not possible: {obstacle}"
    if name == "compensated":
        return "exact_delta", f"exact_delta runs instead of compensated: {own}"
    return "none", f"{name} is not possible, {own}: exact_delta would work"


def _no_lse_gradient(*arguments: Any) -> Tensor:
    return torch.zeros_like(_Shared(*arguments).lse)


@guard.function(runtime.tell_fault, otherwise=_no_lse_gradient)
def _lse_gradient(*arguments: Any) -> Tensor:
    """Returns the gradient of LSE that gives the switched heads their exact delta."""
    call = _Shared(*arguments)
    found = torch.zeros_like(call.lse)
    head_ids = tuple(h for h, name in enumerate(call.stabilizers) if name == "exact_delta")
    if not head_ids:
        return found
    state = runtime.site(int(call.site))
    try:
        natural = call.lse * _LN2
        delta = dispatch.exact_delta(
            call.d_out, call.q, call.k, call.v, natural, spec=call.spec, head_ids=head_ids
        )
        index = device_constant(head_ids, torch.int64, call.q.device)
        found.index_copy_(1, index, reference.lse_gradient(call.used(head_ids), delta) * _LN2)
    except Exception as error:
        state.fall_back(error)
        return torch.zeros_like(call.lse)
    state.succeed()
    state.launches["backward", "exact_delta"] += 1
    return found


@guard.function(runtime.tell_fault)
def _observe(dq: Tensor, d_lse: Tensor, given: Tensor | None, *arguments: Any) -> None:
    """Reports a call to the observer of its attention module."""
    call = _Shared(*arguments)
    state = runtime.site(int(call.site))
    state.launches["backward", KERNEL] += 1
    if state.observer is None:
        return
    try:
        if given is not None:
            # A compiled graph passes zeros where nobody uses LSE. Another gradient makes a part of
            # dq that is not from d_out and would pass for an error. NaN, no data, then marks it,
            # without asking the device.
            dq = dq.where((given == 0).all(), torch.nan)
        seen = _seen(call, dq, d_lse)
    except Exception as error:
        log.warning(
            "attention module '%s': a call of flex_attention was not seen (%s)", state.name, error
        )
        return
    state.observer(seen)


def _seen(call: _Shared, dq: Tensor, d_lse: Tensor) -> AttentionCall:
    """Returns the record that observers get of a call."""
    names, carried = call.stabilizers, call.out
    head_ids = tuple(h for h, name in enumerate(names) if name == "exact_delta")
    if head_ids:
        index = device_constant(head_ids, torch.int64, call.q.device)
        delta = call.used(head_ids) - d_lse.index_select(1, index) / _LN2
        d_out = call.d_out.index_select(1, index)
        carried = call.out.float().index_copy(1, index, reference.float_carrier(d_out, delta))
    return AttentionCall(
        site=int(call.site),
        q=call.q,
        k=call.k,
        v=call.v,
        out=carried,
        residual=None,
        d_out=call.d_out,
        dq=dq,
        dk=None,
        dv=None,
        spec=call.spec,
        stabilizers=names,
        kernel=KERNEL,
    )


def _fake_begin(blocks: Tensor, q: Tensor, site: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(blocks), site.new_empty(q.size(1), dtype=torch.int64)


def _fake_lse_gradient(*arguments: Any) -> Tensor:
    return torch.empty_like(_Shared(*arguments).lse)


def _fake_observe(*arguments: Any) -> None:
    return None


for _name, _run, _fake in (
    ("flex_begin", _begin, _fake_begin),
    ("flex_lse_gradient", _lse_gradient, _fake_lse_gradient),
    ("flex_observe", _observe, _fake_observe),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"guardbit::{_name}", _fake, lib=_library)


# --- around PyTorch's kernels --------------------------------------------------------------------


class _Began(NamedTuple):
    """What the forward of a call hands its backward.

    Attributes:
        site: Number of the site, 0-d CPU tensor.
        names: What `_begin` returned.
        program: Number of its functions, see `flex_functions.register`; None if they are not known.
    """

    site: Tensor
    names: Tensor
    program: int | None


def is_supported() -> bool:
    """Whether this version of PyTorch computes FlexAttention as `install` needs it."""
    original = getattr(importlib.import_module(_HOME), _FUNCTION, None)
    if original is None:
        return False
    parameters = list(inspect.signature(original.forward).parameters)
    return (
        parameters[8:9] == ["kernel_options"]
        and "flex_attention" in original.forward.__code__.co_names
        and "flex_attention_backward" in original.backward.__code__.co_names
    )


def install() -> Callable[[], None]:
    """Replaces PyTorch's autograd function by the sibling; returns a function that undoes it."""
    home = importlib.import_module(_HOME)
    original = getattr(home, _FUNCTION)
    setattr(home, _FUNCTION, _sibling(home, original))
    return lambda: setattr(home, _FUNCTION, original)


def _sibling(home: types.ModuleType, original: Any) -> Any:
    forward_kernel = getattr(home, "flex_attention")  # noqa: B009 (typed as the module)
    backward_kernel = getattr(home, "flex_attention_backward")  # noqa: B009

    def run_forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        score_mod: Any,
        block_mask: tuple[Any, ...],
        scale: float,
        options: dict[str, Any],
        score_closed: tuple[Any, ...] = (),
        mask_closed: tuple[Any, ...] = (),
    ) -> Any:
        training = options.pop(_CALL, False)
        site = options.pop(SITE, None)
        kept = dict(options)
        if site is not None:
            try:
                program = flex_functions.register(
                    score_mod, block_mask[-1], score_closed, mask_closed
                )
            except Exception:  # a graph unlike any that we know
                program = None
            obstacle = _UNRECORDED if program is None else ""
            place = next(i for i, x in enumerate(block_mask) if isinstance(x, Tensor))
            blocks, names = torch.ops.guardbit.flex_begin(
                block_mask[place], q, site, obstacle, training
            )
            block_mask = (*block_mask[:place], blocks, *block_mask[place + 1 :])
            options[_CALL] = _Began(site, names, program)
        return forward_kernel(
            q, k, v, score_mod, block_mask, scale, kept, score_closed, mask_closed
        )  # fmt: skip

    def run_backward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        d_out: Tensor | None,
        d_lse: Tensor | None,
        score_mod: Any,
        joint: Any,
        block_mask: tuple[Any, ...],
        scale: float,
        options: dict[str, Any],
        score_closed: tuple[Any, ...] = (),
        mask_closed: tuple[Any, ...] = (),
    ) -> Any:
        kept = {name: value for name, value in options.items() if name != _CALL}
        rest = (score_mod, joint, block_mask, scale, kept, score_closed, mask_closed)
        began: _Began | None = options.get(_CALL)
        if began is None or began.program is None or d_out is None:
            return backward_kernel(q, k, v, out, lse, d_out, d_lse, *rest)
        closed = (*score_closed, *mask_closed)
        shared = _Shared(
            q, k, v, out, d_out, lse, began.site, began.names,
            [x for x in closed if isinstance(x, Tensor)],
            [x for x in closed if not isinstance(x, Tensor)],
            began.program, scale,
        )  # fmt: skip
        correction = torch.ops.guardbit.flex_lse_gradient(*shared)
        whole = correction if d_lse is None else d_lse + correction
        gradients = backward_kernel(q, k, v, out, lse, d_out, whole, *rest)
        torch.ops.guardbit.flex_observe(gradients[0], correction, d_lse, *shared)
        return gradients

    around = {"flex_attention": run_forward, "flex_attention_backward": run_backward}
    inner_forward = _copy(original.forward, {**vars(home), **around})

    def forward(ctx: Any, *arguments: Any) -> Any:
        options = dict(arguments[7])  # kept by the call, and looked into by its backward
        options[_CALL] = any(ctx.needs_input_grad)
        return inner_forward(ctx, *arguments[:7], options, *arguments[8:])

    backward = _copy(original.backward, {**vars(home), **around})
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(_FUNCTION, (torch.autograd.Function,), methods)


def _copy(function: types.FunctionType, namespace: dict[str, Any]) -> types.FunctionType:
    """Returns a copy of a function with other globals."""
    copied = types.FunctionType(
        function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied
