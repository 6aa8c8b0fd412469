"""A model whose attention is routed through GuardBit, and the switch of its heads."""

from __future__ import annotations

import fnmatch
import functools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import nn

from guardbit.guard import undo_all
from guardbit.kernels.attention import check_stabilizers
from guardbit.kernels.runtime import AttentionCall, Clock, runtime
from guardbit.monitor.interception import errors, frames, hooks, installation
from guardbit.monitor.sites.site import Site
from guardbit.monitor.unseen import UnseenAttentionError, refuse_unseen
from guardbit.records import nearest

T = TypeVar("T")

# Where wrappers of `torch.compile`, of activation checkpointing as FSDP applies it, and of Fabric
# keep the module they wrap: a site goes by the same name with them and without.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_forward_module")

# The modules of torch.nn that call attention themselves; its others never do.
_ATTENTION_OF_TORCH = (
    nn.MultiheadAttention,
    nn.Transformer,
    nn.TransformerDecoder,
    nn.TransformerDecoderLayer,
    nn.TransformerEncoder,
    nn.TransformerEncoderLayer,
)

# Wrappers around the module that matters, as Fabric's, which hand on the attributes they are given;
# and what runs outside Python.
_NEVER_CALL = (torch._dynamo.eval_frame.OptimizedModule, torch.jit.ScriptModule)


def is_of_fabric(module: nn.Module) -> bool:
    owner = type(module).__module__
    return type(module).__name__ == "_FabricModule" and owner.endswith("fabric.wrappers")


def candidates_of(model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """Yields names and modules of a model that may call attention, in its order."""
    for name, module in model.named_modules():
        if type(module).__module__.startswith("torch.nn.modules."):
            if not isinstance(module, _ATTENTION_OF_TORCH):
                continue
        elif isinstance(module, _NEVER_CALL) or is_of_fabric(module):
            continue
        parts = [part for part in name.split(".") if part not in _WRAPPERS]
        yield ".".join(parts) or type(module).__name__, module


def around(name: str, model: nn.Module) -> Iterator[str]:
    """Names of the modules around the one called `name`, innermost first, as in `candidates_of`."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name
    yield type(getattr(model, "_orig_mod", model)).__name__


class Instrumentation:
    """A model whose attention calls are routed through GuardBit; made by `instrument`.

    Attributes:
        is_selection: Whether only the modules that `sites` named are considered.
    """

    def __init__(
        self, model: nn.Module, candidates: Mapping[str, nn.Module], is_selection: bool
    ) -> None:
        self._model, self.is_selection = model, is_selection
        self._sites: dict[str, Site] = {}
        self._at_rest: tuple[bool, frozenset[str]] = (False, frozenset())
        self._clock = Clock()
        self._switched: list[Site] = []
        self._user = object()
        self._has_sampled = False
        # Undone in reverse order; what fails is tried again by the next `remove`.
        self._installed: list[Callable[[], None]] = []
        try:
            if candidates:
                uninstall = functools.partial(installation.uninstall, self._user)
                forget = functools.partial(runtime.rest, self._user, None)
                self._installed += [installation.restore, uninstall, forget]
                installation.install(self._user)
                runtime.rest(self._user, False)
            for name, module in candidates.items():
                self._attach(name, module)
        except BaseException:
            self.remove()
            raise

    @classmethod
    def of_nothing(cls) -> Instrumentation:
        """Makes one without a model, which has no sites."""
        return cls(nn.Module(), {}, is_selection=False)

    def _attach(self, name: str, module: nn.Module) -> None:
        outer = [self._sites[o] for o in around(name, self._model) if o in self._sites]
        number = runtime.add_site(name, self._clock)
        self._sites[name] = Site(name, module, number, outer)
        self._installed.append(functools.partial(runtime.remove_site, number))
        self._installed.append(functools.partial(hooks.detach, module, number))
        hooks.attach(module, number)

    @property
    def sites(self) -> dict[str, Site]:
        """The sites that have called attention, by name, in the order of the model."""
        return {name: site for name, site in self._present().items() if site.was_called}

    @property
    def candidates(self) -> dict[str, Site]:
        """All modules that could call attention, whether or not they did."""
        return dict(self._sites)

    @property
    def switched(self) -> list[Site]:
        """The sites with a stabilizer asked for, whether or not it is in use."""
        return list(self._switched)

    def lost(self) -> list[Site]:
        """The called sites whose module was replaced or removed from the model."""
        present = self._present()
        return [s for name, s in self._sites.items() if name not in present and s.was_called]

    def alike(self, names: Iterable[str]) -> list[str]:
        """Names of all modules of the same types as those of some sites, in the model's order."""
        types = {type(self._sites[name].module) for name in names}
        return [name for name, site in self._sites.items() if type(site.module) in types]

    def check_switch(
        self, site: str, stabilizer: str | Sequence[str], heads: Iterable[int] | None = None
    ) -> dict[int, tuple[str, ...]]:
        """Returns what `switch` would set, by number of the site, or raises what it would raise."""
        if not isinstance(site, str):
            raise TypeError(f"site is {site!r}; it must be a name or a pattern")
        matching = select(self.sites, [site], "attention site").values()
        # Heads can be switched back whatever the state of the site.
        refused = [t for t in matching if t.refusal is not None and stabilizer != "none"]
        if refused and (not is_pattern(site) or len(refused) == len(matching)):
            raise ValueError(f"site '{refused[0].name}' cannot be switched: {refused[0].refusal}")
        return with_switched(stabilizer, heads, [t for t in matching if t not in refused])

    def ask(self, site: str, stabilizer: str, heads: Iterable[int]) -> None:
        """Switches heads of one site, from its next call that can be switched, see `switch`."""
        self._ask(with_switched(stabilizer, heads, [self._sites[site]]))

    def switch(
        self, site: str, stabilizer: str | Sequence[str], heads: Iterable[int] | None = None
    ) -> None:
        """Switches heads to a stabilizer, from the site's next call on.

        A compiled model that a session watches takes the switch at its next step.

        A forward that activation checkpointing recomputes runs as the original forward did.

        Args:
            site: Name of a site, or a pattern (`*`, `?`); `"*"` is all that can be switched.
            stabilizer: One name of `guardbit.STABILIZERS`, or one for each of `heads`. "none"
                gives heads back to PyTorch's own kernel, wherever they are.
            heads: The heads to switch; None for all.

        Raises:
            ValueError: If the site, the stabilizer, or the switch itself is impossible.
            IndexError: If a head is out of range.
            TypeError: If the site is no text.
        """
        self._ask(self.check_switch(site, stabilizer, heads))

    def give_back(self, site: Site) -> None:
        """Forgets what is asked for at a site, whatever its state."""
        self._ask({site.number: None})

    def stabilizers(self) -> dict[str, list[str]]:
        """Returns the stabilizer in use: name of the site -> one name a head.

        If a head's latest call could not run what was asked for, because of a mask for example,
        this is what ran instead, or "none"; `asked` returns what was asked for.
        """
        in_use = {name: site.stabilizers for name, site in self._present().items()}
        return {name: names for name, names in in_use.items() if names}

    def asked(self) -> dict[str, list[str]]:
        """Returns the stabilizer asked for, also one that does not fit the latest calls."""
        asked = {n: list(site.outgrown or site.asked) for n, site in self._present().items()}
        return {name: names for name, names in asked.items() if names}

    def load_stabilizers(self, stabilizers: Mapping[str, Sequence[str]]) -> None:
        """Asks for what `asked()` returned earlier, before or after the first forward.

        Raises:
            ValueError: If the model has no such module, or a name or the number of heads is wrong.
        """
        checked: dict[int, tuple[str, ...]] = {}
        for name, names in stabilizers.items():
            if name not in self._sites:
                why = f"the model has no module '{name}' to switch: the state is of another model"
                if self.is_selection and name in dict(self._model.named_modules()):
                    why = (
                        f"the state has switched heads in '{name}', which `sites` leaves out: name"
                        " it too"
                    )
                raise ValueError(why)
            site = self._sites[name]
            checked[site.number] = check_stabilizers(names, site.num_heads or len(names))
        self._ask(checked)

    def _ask(self, stabilizers: Mapping[int, tuple[str, ...] | None]) -> None:
        for number, names in stabilizers.items():
            runtime.site(number).switch(names)
        asked = ((s, s.state.stabilizers) for s in self._sites.values())
        self._switched = [site for site, names in asked if set(names or ()) - {"none"}]

    def _present(self) -> dict[str, Site]:
        """The sites whose module is still in the model."""
        modules = set(self._model.modules())
        return {name: site for name, site in self._sites.items() if site.module in modules}

    def begin_step(self) -> None:
        """Begins a training step. Without it, each call of the model counts as a step."""
        self._clock.tell()

    def end_step(self) -> None:
        self._clock.end_told()

    @property
    def latest_step(self) -> int:
        """Number of the step that was over last, as `StepCalls` counts."""
        return self._clock.done

    def observe(
        self,
        observer: Callable[[AttentionCall], None] | None,
        only: Collection[str] | None = None,
    ) -> None:
        """Has an observer called in every attention backward from now on; None ends that."""
        for name, site in self._sites.items():
            if only is None or name in only:
                site.state.observer = observer

    def rest(self, at_rest: bool, but: Collection[str] = ()) -> None:
        """Says whether calls need not be seen from now on, but those of some sites."""
        wanted = at_rest, frozenset(but)
        if wanted != self._at_rest:  # said twice a step, to hundreds of modules
            self._at_rest = wanted
            for name, site in self._sites.items():
                site.state.at_rest = at_rest and name not in but
        # Once there is a graph with the op, so that a switch need not wait for the compiler. Here,
        # between two steps, and not at a switch: a checkpoint must find the graph of its forward.
        self._has_sampled = self._has_sampled or not at_rest
        if self._installed:
            is_unused = at_rest and not but and not self._switched
            runtime.rest(self._user, is_unused and self._has_sampled)

    def remove(self) -> None:
        """Takes everything out of the model again; calling it twice is harmless.

        What cannot be taken out is left for the next call. The error is raised after everything
        else was taken out.
        """
        try:
            undo_all(self._installed)
        finally:
            if self._installed and installation.restore not in self._installed:
                self._installed.insert(0, installation.restore)  # it waits for what failed
            self._sites.clear()
            self._switched.clear()

    @property
    def is_installed(self) -> bool:
        """Whether anything is left in the model or in this process."""
        return bool(self._installed)

    def keep_residuals(self, is_wanted: bool) -> None:
        """Says whether compiled calls may be asked for "compensated", until `remove`."""
        asker = object()
        self._installed.append(functools.partial(runtime.keep_residuals, asker, None))
        runtime.keep_residuals(asker, is_wanted)

    def listen(self, listener: Callable[[Exception], None]) -> None:
        """Reports errors of GuardBit inside a forward to a listener, until `remove`."""
        self._installed.append(functools.partial(errors.unlisten, listener))
        errors.listeners.append(listener)


def instrument(model: nn.Module, sites: Sequence[str] | None = None) -> Instrumentation:
    """Routes a model's attention calls through GuardBit, without changing what they compute.

    >>> import torch
    >>> model = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    >>> inst = instrument(model)
    >>> model(torch.ones(2, 4, 32)).square().mean().backward()
    >>> inst.sites
    {'self_attn': Site('self_attn', num_heads=2)}
    >>> inst.switch("self_attn", "exact_delta", heads=[1])
    >>> inst.asked()
    {'self_attn': ['none', 'exact_delta']}
    >>> inst.remove()

    Args:
        model: Any model; call it before the first forward, before or after `torch.compile`.
        sites: Names or patterns of the modules to consider; None for all.

    Raises:
        ValueError: If no module of the model could call attention that GuardBit sees, a name
            matches no module, or the model is instrumented already.
        TypeError: If the model is no `nn.Module`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model is a {type(model).__name__}; expected an nn.Module")
    if is_of_fabric(model):
        model = model.get_submodule("_original_module")
    for name, module in model.named_modules():
        if frames.is_attached(module):
            raise ValueError(
                f"the model is instrumented already (module '{name}'): one monitor is enough;"
                " take out the other one, or close or remove it first; after Ctrl-C within a step,"
                " call its session's abandon_step() and then close()"
            )
        if isinstance(module, nn.DataParallel):
            raise ValueError(
                f"module '{name}' is an nn.DataParallel, whose threads run one module at the same"
                " time, so calls cannot be told apart; use DistributedDataParallel"
            )
    candidates = dict(candidates_of(model))
    if sites is None:
        refuse_unseen(candidates)
    else:
        candidates = select(candidates, sites, "module that could call attention")
    if not candidates:
        raise UnseenAttentionError(
            f"{type(model).__name__} has no module that could call attention; GuardBit watches"
            " calls of F.scaled_dot_product_attention inside a model's own modules"
        )
    return Instrumentation(model, candidates, is_selection=sites is not None)


def select(named: Mapping[str, T], patterns: Sequence[str], kind: str) -> dict[str, T]:
    """Returns what goes by some names or patterns; each has to match something."""
    selected: dict[str, T] = {}
    for pattern in patterns:
        matches = fnmatch.filter(named, pattern) if is_pattern(pattern) else [pattern]
        matches = [name for name in matches if name in named]
        if not matches:
            known = ", ".join(list(named)[:8]) or "none: no call of attention has been seen so far"
            raise ValueError(
                f"no {kind} is called '{pattern}'; there are {known}{nearest(pattern, named)}"
            )
        selected.update({name: named[name] for name in matches})
    return selected


def is_pattern(name: str) -> bool:
    return any(character in name for character in "*?[")


def with_switched(
    stabilizer: str | Sequence[str], heads: Iterable[int] | None, targets: Iterable[Site]
) -> dict[int, tuple[str, ...]]:
    """Returns what is asked for at some sites, by number, after a switch of their heads."""
    switched: dict[int, tuple[str, ...]] = {}
    listed = None if heads is None else checked_heads(heads)
    for target in targets:
        number, names = target.num_heads, target.asked
        chosen = list(range(number)) if listed is None else listed
        for head in chosen:
            if not 0 <= head < number:
                raise IndexError(
                    f"head {head} is out of range; site '{target.name}' has heads 0 to {number - 1}"
                )
        if target.mixed_heads is not None and len(set(chosen)) < number:
            raise ValueError(
                f"heads of site '{target.name}' cannot be switched one by one: {target.mixed_heads}"
            )
        given = check_stabilizers(stabilizer, len(chosen))
        for head, name in zip(chosen, given, strict=True):
            names[head] = name
        switched[target.number] = tuple(names)
    return switched


def checked_heads(heads: Iterable[int]) -> list[int]:
    """Returns numbers of heads as a list of their own."""
    try:
        return [operator.index(head) for head in heads]
    except TypeError:
        raise ValueError(f"heads is {heads!r}; expected a list of whole numbers") from None
