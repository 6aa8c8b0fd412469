"""QK clip: scales a head's W_Q and W_K so that its largest logit comes back to a bound.

The rule is MuonClip's (arXiv 2507.20534): after an optimizer step a head whose largest logit S is
above the bound has its logits scaled by bound / S, by the square root of that in W_Q and in W_K.
Unlike a stabilizer it changes the weights, and so the run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from guardbit.monitor.sites import Site


def check_bound(bound: object) -> None:
    """Checks the bound of logits.

    Raises:
        ValueError: If it is not a finite number above 0.
    """
    is_number = isinstance(bound, int | float) and not isinstance(bound, bool)
    if not is_number or not 0 < bound < float("inf"):
        raise ValueError(f"qk_clip must be a finite number above 0, or None, got {bound!r}")


def clip(site: Site, max_logits: Sequence[float], bound: float) -> dict[int, float]:
    """Scales the heads of an attention module that are above the bound, in place.

    Where query heads share a key head, the key is scaled for the one that needs it most; the
    queries of the others make up for that, so that their logits stay.

    Args:
        site: The module; between optimizer steps.
        max_logits: The largest logit of each query head, after softmax's scale; NaN where it is
            unknown.
        bound: The largest logit that is left alone.

    Returns:
        Head -> by how much its logits were scaled; empty if no head is above the bound.

    Raises:
        LayoutUnavailable: If the module's weights cannot be scaled, with the reason; nothing is
            changed then.
    """
    scales = [bound / s if bound < s < float("inf") else 1.0 for s in max_logits]
    clipped = {head: scale for head, scale in enumerate(scales) if scale < 1}
    if clipped:
        site.scale_logits(torch.tensor(scales, dtype=torch.float64))
    return clipped
