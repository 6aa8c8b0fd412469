"""The indicators of attention heads as torchmetrics, for use without a session.

In a notebook, an evaluation, the test of a kernel, or with Lightning's `self.log`. A metric adds up
what the monitor's own functions (`guardbit.monitor.measure`) make of a call, over calls and over
ranks. Values are FP64, one per head, and NaN where nothing was measured.

Shapes: q, out, d_out, dq `(B, H, N, D)`; k, v `(B, H_kv, M, D)`, H a multiple of H_kv; the heads'
rows of W_Q `(H, D, d_model)` and of W_K `(H_kv, D, d_model)`; `mask` as of
`F.scaled_dot_product_attention`. All in the format in which the kernel gets them. "Paper" is
arXiv 2510.04212.

All metrics take:

- `num_heads`: the number of query heads H.
- `kind`: what the class measures, if it is more than one thing; None for the first.
- `heads`: "all" for values `(H,)`, "largest" for the one of largest size, `()`, as loggers need it.
- `causal`, `scale`: as `guardbit.flash_attention` (not `SpectralNorm`).
- the options of `torchmetrics.Metric`, whose `compute`, `reset` and `plot` they have.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from guardbit.catalog import SUMS, of_probe
from guardbit.kernels.reference.common import float32_products
from guardbit.kernels.runtime import NO_SITE, AttentionCall
from guardbit.kernels.spec import AttentionSpec, Causal
from guardbit.monitor.measure import probes
from guardbit.monitor.measure.weights import gram_matrices, spectral_norms

Heads = Literal["all", "largest"]


class _HeadMetric(Metric):
    is_differentiable = False
    higher_is_better = None
    full_state_update = False
    plot_legend_name = "Head"
    kinds: ClassVar[Mapping[str, str]]  # kind -> its indicator, or its name in `attention_metrics`

    def __init__(
        self, num_heads: int, kind: str | None = None, *, heads: Heads = "all", **options: Any
    ) -> None:
        super().__init__(**options)
        self.num_heads, self.heads = num_heads, heads
        self.kind = next(iter(self.kinds)) if kind is None else kind
        for name, value, allowed in (
            ("kind", self.kind, (*self.kinds,)),
            ("heads", heads, ("all", "largest")),
        ):
            if value not in allowed:
                raise ValueError(f"{name} is {value!r}; allowed are {', '.join(allowed)}")
        self.indicator = self.kinds[self.kind]
        for names, start in zip(self._state_names(), (0.0, -torch.inf), strict=True):
            for name in names:
                default = torch.full((num_heads,), start, dtype=torch.float64, device="cpu")
                self.add_state(name, default, dist_reduce_fx="max" if start else "sum")

    def _state_names(self) -> tuple[Sequence[str], Sequence[str]]:
        """What is added up, and of what the largest is taken."""
        raise NotImplementedError

    def _take(self, values: Sequence[Tensor]) -> None:
        sums, maxima = self._state_names()
        for name, value in zip((*sums, *maxima), values, strict=True):
            if len(value) != self.num_heads:
                raise ValueError(f"there are {len(value)} heads; num_heads is {self.num_heads}")
            before = getattr(self, name)
            setattr(self, name, before + value if name in sums else before.maximum(value))

    def _of_heads(self) -> Tensor:
        raise NotImplementedError

    def compute(self) -> Tensor:
        values = self._of_heads()
        if self.heads == "all":
            return values
        return values[values.abs().nan_to_num(-1.0, posinf=torch.inf).argmax()]

    def plot(self, val: Tensor | Sequence[Tensor] | None = None, ax: Any = None) -> Any:
        """Plots values, by default what `compute` returns; returns figure and axes."""
        return self._plot(val, ax)


class SpectralNorm(_HeadMetric):
    """Largest singular value of each head's rows of W_Q, of W_K, or of W_Q^T W_K.

    A head that rounding drives grows along one direction of W_Q, long before the loss departs
    (paper, section 3.2 and figure 3). No unit; over several updates the largest counts.

    Kinds: "w_q", "w_k" (of the key head that a query head uses), "qk".

    Examples:
        >>> w_q = torch.tensor([[[3.0, 0.0], [0.0, 1.0]], [[0.0, 2.0], [0.0, 0.0]]])
        >>> SpectralNorm(2)(w_q).tolist()
        [3.0, 2.0]
        >>> SpectralNorm(2, "qk")(w_q, w_k=w_q[:1]).tolist()
        [9.0, 6.0]
    """

    kinds: ClassVar = {name: f"{name}_spectral_norm" for name in ("w_q", "w_k", "qk")}

    def _state_names(self) -> tuple[Sequence[str], Sequence[str]]:
        return (), (self.indicator,)

    @float32_products()
    def update(self, w_q: Tensor | None = None, w_k: Tensor | None = None) -> None:
        """Takes the weights that the kind needs."""
        grams: list[Tensor] = []
        for name, weights in (("k", w_k), ("q", w_q)):
            if name not in self.kind.removeprefix("w_"):
                continue
            if weights is None:
                raise ValueError(f"w_{name} is None; {self.indicator} needs it")
            copies = self.num_heads // len(weights) if name == "k" else 1
            if copies * len(weights) != self.num_heads:
                raise ValueError(f"w_{name} has {len(weights)} heads, not {self.num_heads}")
            grams.append(gram_matrices(weights).repeat_interleave(copies, 0))
        self._take([spectral_norms(*grams)[0]])

    def _of_heads(self) -> Tensor:
        values = getattr(self, self.indicator)
        return values.where(values != -torch.inf, torch.nan)


class _CallMetric(_HeadMetric):
    """An indicator of attention calls, which a probe of the monitor measures."""

    probe: ClassVar[probes.CallProbe]

    def __init__(
        self,
        num_heads: int,
        kind: str | None = None,
        *,
        causal: Causal = False,
        scale: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(num_heads, kind, **options)
        self.causal: Causal = causal
        self.scale = scale

    def _state_names(self) -> tuple[Sequence[str], Sequence[str]]:
        return self.probe.sums, self.probe.maxima

    @float32_products()
    def _measure(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **others: Any) -> None:
        known = {name: others.pop(name, None) for name in ("out", "d_out", "dq")}
        spec = AttentionSpec(
            q.size(3) ** -0.5 if self.scale is None else self.scale, self.causal, mask
        )
        call = AttentionCall(
            NO_SITE, q, k, v, **known, residual=None, spec=spec,
            stabilizers=("none",) * q.size(1),
        )  # fmt: skip
        self._take(self.probe.update(probes.CallView(call, **others)))

    def _of_heads(self) -> Tensor:
        state = {name: getattr(self, name) for names in self._state_names() for name in names}
        return self.probe.compute(state, 1.0)[SUMS.get(self.indicator, self.indicator)]


class _RowMetric(_CallMetric):
    """A statistic of the rows of P; each has the states of all, which a collection shares."""

    probe = probes.RowProbe(of_probe("rows"))

    def update(self, q: Tensor, k: Tensor, mask: Tensor | None = None) -> None:
        """Takes a call, whose values do not matter."""
        self._measure(q, k, k, mask)


class MultipleMaxima(_RowMetric):
    """Share of the rows that have several scores within 0.001 of their maximum.

    Several entries of exp(S - m) are then 1, and their products with V are rounded to one side
    (paper, section 3.3.2 and figure 13). A share from 0 to 1 of the rows that see a key.

    Kinds: "fp32" counts scores in FP32, "bf16" scores rounded to BF16 first.

    Examples:
        >>> q, k = torch.ones(1, 1, 2, 1), torch.tensor([[[[3.0], [3.002], [1.0]]]])
        >>> MultipleMaxima(1)(q, k).item(), MultipleMaxima(1, "bf16")(q, k).item()
        (0.0, 1.0)
    """

    kinds: ClassVar = {"fp32": "multiple_maxima", "bf16": "multiple_maxima_bf16"}


class MaxLogit(_RowMetric):
    """Largest scale * q.k in size, of keys that count for their row.

    What masks and position biases add is no logit. Logits that grow are a learning rate that is too
    large (arXiv 2309.14322), or a head that rounding drives. No unit.

    Examples:
        >>> MaxLogit(1, causal=True)(torch.ones(1, 1, 2, 4), -torch.ones(1, 1, 2, 4)).item()
        2.0
    """

    kinds: ClassVar = {"size": "max_logit"}


class AttentionEntropy(_RowMetric):
    """Entropy of a row's probabilities, mean over the rows that see a key, in nats.

    It falls where a head attends to single keys (arXiv 2303.06296).

    Examples:
        >>> entropy = AttentionEntropy(1)(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 8, 4))
        >>> f"{entropy.exp().item():.3f}"  # eight keys, all alike
        '8.000'
    """

    kinds: ClassVar = {"mean": "attention_entropy"}


class DeltaBias(_CallMetric):
    """What rounding adds to delta = rowsum(dO * O): delta_lp - delta_hp.

    delta_lp takes the `out` that a kernel returned, delta_hp one recomputed in FP32. A bias of one
    sign adds up over rows and steps, and moves W_Q (paper, equation 3, section 3.3.2, figure 5).
    In units of the loss; `d_out` must not be scaled.

    Kinds: "mean" of a row, "sizes" (the sum of the sizes), "cumulative" (the sum with sign, over
    all updates).

    Examples:
        >>> q = k = v = d_out = torch.ones(1, 1, 2, 4)
        >>> DeltaBias(1)(q, k, v, out=v + 0.25, d_out=d_out).item()  # four times 0.25
        1.0
        >>> DeltaBias(1, "cumulative")(q, k, v, out=v + 0.25, d_out=d_out).item()
        2.0
    """

    kinds: ClassVar = {
        "mean": "delta_bias_mean",
        "sizes": "delta_bias_abs",
        "cumulative": "delta_bias_cumulative",
    }
    probe = probes.DeltaProbe(of_probe("delta"))
    delta_bias: Tensor
    delta_rows: Tensor

    def update(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        d_out: Tensor,
        mask: Tensor | None = None,
    ) -> None:
        """Takes a call, what a kernel returned, and its gradient."""
        self._measure(q, k, v, mask, out=out, d_out=d_out)

    def _of_heads(self) -> Tensor:
        if self.kind == "mean":
            return self.delta_bias / self.delta_rows
        return super()._of_heads()


class QueryGradientError(_CallMetric):
    """Error of the `dq` that a kernel returned, against one recomputed in FP32.

    Any defect of a kernel shows, whatever its cause. The coherent error is what adds up over rows
    along the largest direction of W_Q, with its sign, and moves its norm (paper, equation 1).

    Kinds: "relative" (norm of the error over that of dQ), "coherent" (NaN without `w_q`).

    Examples:
        >>> q, k, v, d_out = torch.randn(4, 1, 1, 8, 16)
        >>> q = q.detach().requires_grad_()
        >>> torch.nn.functional.scaled_dot_product_attention(q, k, v).backward(d_out)
        >>> f"{QueryGradientError(1)(q, k, v, d_out, dq=1.25 * q.grad).item():.4f}"
        '0.2500'
    """

    kinds: ClassVar = {"relative": "dq_relative_error", "coherent": "dq_coherent_error"}
    probe = probes.GradientAudit(of_probe("gradient_audit"))

    def update(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        d_out: Tensor,
        dq: Tensor,
        w_q: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> None:
        """Takes a call, and a backward's `d_out` and `dq`."""
        directions = q.new_zeros((q.size(1), q.size(3)), dtype=torch.float32)
        if w_q is not None:
            directions = spectral_norms(gram_matrices(w_q))[1]
        audited = range(q.size(1))
        self._measure(q, k, v, mask, d_out=d_out, dq=dq, audited=audited, directions=directions)


_CLASSES = SpectralNorm, MultipleMaxima, MaxLogit, AttentionEntropy, DeltaBias, QueryGradientError
_BY_NAME = {name: (one, kind) for one in _CLASSES for kind, name in one.kinds.items()}


def attention_metrics(
    num_heads: int,
    *,
    causal: Causal = False,
    scale: float | None = None,
    heads: Heads = "all",
    indicators: Collection[str] = tuple(_BY_NAME),
    prefix: str | None = None,
) -> MetricCollection:
    """Returns all metrics, or some, as a collection that computes once what several share.

    Its `update` takes by name what its metrics take.

    Examples:
        >>> metrics = attention_metrics(2, indicators=["max_logit", "attention_entropy"])
        >>> metrics.update(q=torch.ones(1, 2, 1, 4), k=torch.ones(1, 2, 1, 4))
        >>> [(name, values.tolist()) for name, values in metrics.compute().items()]
        [('attention_entropy', [0.0, 0.0]), ('max_logit', [2.0, 2.0])]

    Args:
        num_heads: Number of query heads H.
        causal: As of `guardbit.flash_attention`.
        scale: As of `guardbit.flash_attention`.
        heads: "all" or "largest", see above.
        indicators: Names of the telemetry, and `delta_bias_mean`.
        prefix: What is put before the names.
    """
    metrics: dict[str, Metric | MetricCollection] = {}
    groups: dict[str, list[str]] = {}
    for name in indicators:
        if name not in _BY_NAME:
            raise ValueError(f"indicator {name!r} is unknown; allowed are {', '.join(_BY_NAME)}")
        one, kind = _BY_NAME[name]
        options: dict[str, Any] = {"heads": heads}
        group = name
        if issubclass(one, _CallMetric):
            options |= {"causal": causal, "scale": scale}
            group = one.probe.name
        metrics[name] = one(num_heads, kind, **options)
        groups.setdefault(group, []).append(name)
    return MetricCollection(metrics, prefix=prefix, compute_groups=[*groups.values()])
