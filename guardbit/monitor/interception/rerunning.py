"""Re-running a module to see where its queries come from."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from guardbit.kernels import switchboard
from guardbit.kernels.attention import calling, own_site_stack, site_stack
from guardbit.monitor.interception.frames import Frame, frame_stack
from guardbit.monitor.interception.inputs import ModuleInputs, make_up
from guardbit.monitor.layouts import LayoutUnavailable


class _CalledAgain(BaseException):
    """Ends the re-run of a module that calls attention more than once at one site."""


@dataclass
class Probe:
    """The re-run that is going on.

    Attributes:
        site: Number of the site whose calls are collected; None while nothing is re-run.
        calls: q and k of the calls that the module made at that site.
    """

    site: int | None = None
    calls: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def note_call(self, number: int, query: Tensor, key: Tensor) -> bool:
        """Collects the calls of the probed site; returns whether anything is being probed."""
        if number == self.site:
            self.calls.append((query, key))
            if len(self.calls) > 1:
                raise _CalledAgain
        return self.site is not None


probe = Probe()


def rerun(
    number: int,
    module: nn.Module,
    inputs: ModuleInputs,
    parameters: dict[str, Tensor],
    generator_seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """Runs a module on made-up inputs, with other parameters, to see its attention call.

    Everything is FP32, the batch is cut to one, the global random state and the module's buffers
    are left as they are, and no gradient reaches the model.

    Args:
        number: Number of the site.
        module: The module to run, eagerly.
        inputs: What its inputs look like.
        parameters: Tensors to use for its parameters, by name.
        generator_seed: Seed of the made-up inputs.

    Returns:
        q `(1, H, N, D)` and k `(1, H_kv, M, D)` with their history.

    Raises:
        RuntimeError: If the module does not reach the attention call.
        LayoutUnavailable: If it reaches it twice: then q may have more than one origin.
    """
    device = next(module.parameters()).device
    generator = torch.Generator(device).manual_seed(generator_seed)
    args, kwargs = make_up(inputs, generator)
    buffers = {
        name: x.detach().clone().float() if x.is_floating_point() else x.detach().clone()
        for name, x in module.named_buffers()
    }
    depth, num_frames = len(site_stack), len(frame_stack)
    state = switchboard.site_state(number)
    launches, requested = state.launches.copy(), state.requested
    owner = own_site_stack(calling(sys._getframe()))
    probe.site = number
    probe.calls.clear()
    site_stack.append(torch.tensor(number))
    frame_stack.append(Frame(module, (), {}))
    try:
        with (
            torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
            torch.autocast(device.type, enabled=False),
            torch.compiler.set_stance("force_eager"),
            torch.nn.utils.stateless._reparametrize_module(module, {**parameters, **buffers}),
            torch.enable_grad(),
        ):
            module.forward(*args, **kwargs)
    except _CalledAgain:
        raise LayoutUnavailable(
            f"{type(module).__name__} calls attention more than once at this site, so its queries"
            " may come from several weights"
        ) from None
    except Exception:
        if not probe.calls:
            raise
        # What follows the attention call does not matter, and may not bear made-up inputs.
    finally:
        probe.site = None
        state.launches, state.requested = launches, requested
        del site_stack[depth:]
        del frame_stack[num_frames:]
        own_site_stack(owner)
    if not probe.calls:
        raise RuntimeError("the module did not call attention when it was run again")
    return probe.calls.pop()
