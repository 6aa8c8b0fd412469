"""Tells, after the first step that called attention, what GuardBit did not see of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from guardbit.monitor import interception
from guardbit.monitor.sites import Instrumentation, Site
from guardbit.monitor.unseen import looks_like_attention, unseen_implementation

#: So many modules are named, of each kind.
_NAMED = 3


class Coverage:
    """Compares the modules that ran, and look like attention, with those that called it.

    Args:
        instrumentation: The instrumented model.

    Attributes:
        unseen: Names of the modules that look like attention and were not seen to call it.
    """

    def __init__(self, instrumentation: Instrumentation) -> None:
        self._instrumentation = instrumentation
        self._is_noting = True
        self.unseen: list[str] = []
        interception.entries.start()

    def check(self) -> Iterator[str]:
        """Yields a sentence for each thing that is not watched, once: at the first attention."""
        called = self._instrumentation.sites if self._is_noting else {}
        if not called:
            return
        unseen = _unseen(self._instrumentation.candidates, called)
        self.close()
        self.unseen = [site.name for site in unseen]
        if unseen:
            yield (
                f"{_counted(unseen, 'module')} that {_looks(unseen)} like attention ran and"
                f" {'was' if len(unseen) == 1 else 'were'} not seen to call it, so nothing of"
                f" {'it' if len(unseen) == 1 else 'them'} is watched or switched: {_kinds(unseen)};"
                " GuardBit sees calls of F.scaled_dot_product_attention (Hugging Face:"
                " attn_implementation='sdpa'), of torch.nn.attention.varlen and of flash_attn"
            )
        sharded = [site for site in called.values() if site.sharded]
        if sharded:
            yield (
                f"nothing is measured of the heads of {_counted(sharded, 'attention site')}, and"
                f" none of them can be switched: {_kinds(sharded)}: {sharded[0].sharded}"
            )

    def close(self) -> None:
        """Stops noting which modules run."""
        if self._is_noting:
            self._is_noting = False
            interception.entries.stop()


def _unseen(candidates: Mapping[str, Site], called: Mapping[str, Site]) -> list[Site]:
    """The innermost modules that ran and look like attention, and called none."""
    # What holds a module that called attention, or is a part of an attention module that did.
    seen = {part for s in called.values() if _is_attention(s) for part in s.module.modules()}
    callers = {site.module for site in called.values()}
    found = [
        site
        for site in candidates.values()
        if _is_attention(site)
        and site.module not in seen
        and callers.isdisjoint(site.module.modules())
        and interception.ran(site.number, site.module)
    ]
    modules = {site.module for site in found}
    return [site for site in found if modules.isdisjoint(list(site.module.modules())[1:])]


def _is_attention(site: Site) -> bool:
    return looks_like_attention(site.module)


def _kinds(sites: Sequence[Site]) -> str:
    """The first names of each class, how many more there are, and how they compute attention."""
    kinds: dict[tuple[str, str | None], list[str]] = {}
    for site in sites:
        kind = (type(site.module).__name__, unseen_implementation(site.module))
        kinds.setdefault(kind, []).append(site.name)
    texts = []
    for (kind, implementation), names in kinds.items():
        more = [f"{len(names) - _NAMED} more"] if len(names) > _NAMED else []
        how = f", attn_implementation='{implementation}'" if implementation else ""
        texts.append(f"{', '.join([*names[:_NAMED], *more])} ({kind}{how})")
    return "; ".join(texts)


def _counted(sites: Sequence[Site], noun: str) -> str:
    return f"{len(sites)} {noun}{'' if len(sites) == 1 else 's'}"


def _looks(sites: Sequence[Site]) -> str:
    return "looks" if len(sites) == 1 else "look"
