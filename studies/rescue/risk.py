"""Kinds of models: how much an exact delta changes, and what the keys of their heads share.

    python -m studies.rescue.risk studies/rescue/{other_models,results} --figure risk.png

A run without a switch is compared with its twin, of the same kind, rate, seed and number, in which
all heads have an exact delta from the second step on. `README.md`, "Who is at risk", has the rule.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from scipy.stats import permutation_test

from guardbit.judgement import AT_RISK, HARDLY_AT_RISK
from guardbit.judgement.evidence import SATURATED
from studies.rescue.counterfactual import alarms
from studies.rescue.measures import series
from studies.rescue.packed import Run, again_of, kind_of, load, options_of

#: The number of the first pairs that were made for this, and those of GPT-2 that were there before.
FIRST = 30
EARLIER = {
    "stock-cudnn-lr1.5e-03-seed9-again5": "from_start-exact_delta-cudnn-lr1.5e-03-seed9-again7",
    "stock-cudnn-lr1.5e-03-seed10-again5": "from_start-exact_delta-cudnn-lr1.5e-03-seed10-again5",
}

#: The step up to which a pair is compared, the one it must reach, and that of the predictor.
STEP, REACHED, PREDICTED = 6000, 5000, 2000

#: Kinds tried after the test: told, and no part of it. Of their runs what `table` reads is kept.
LATER = ("mla", "encoder", "vit", "gpt2_muon", "mla_muon")

#: The number of the pairs that rules are judged on (`kinds.py`), no part of the test, and the step
#: up to which their audits predict.
UNSEEN, AUDITED = 80, 3000

#: Kinds that the test needs, and seeds of each.
KINDS, SEEDS = 7, 2


def pairs(runs: list[Run]) -> list[tuple[Run, Run]]:
    """Each run without a switch that has a twin, and its twin."""
    names = {run.name: run for run in runs}
    twins = {
        run.name: run.name.replace("stock-", "from_start-exact_delta-", 1)
        for run in runs
        if run.facts["arm"] == "stock" and (again_of(run.name) or 0) >= FIRST
    }
    found = {name: twin for name, twin in (twins | EARLIER).items() if {name, twin} <= names.keys()}
    return [(names[name], names[twin]) for name, twin in found.items()]


def table(runs: list[Run]) -> pd.DataFrame:
    """A row a pair that has come to step `REACHED`.

    Returns:
        Kind, rate and seed; `step`, the last that both have up to `STEP`; there the largest logit
        and W_Q norm of the run and of its twin, and the difference of their logarithms; how many
        heads were alarmed in each by then; the run's loss less its twin's in nats, over the 500
        steps before; the largest `key_common_mode` of any head of the run at `PREDICTED`, and the
        largest `audit` of a head that is not saturated by `AUDITED`.
    """
    rows = []
    for pair in pairs(runs):
        logits = [series(run.frame, "max_logit").loc[:STEP] for run in pair]
        step = int(min(logit.index.max() for logit in logits))
        if step < REACHED:
            continue
        norms = [series(run.frame, "w_q_spectral_norm") for run in pair]
        losses = [series(run.frame, "loss").loc[step - 500 : step] for run in pair]
        rows.append(
            {
                "kind": kind_of(pair[0]),
                "rate": pair[0].facts["learning_rate"],
                "seed": pair[0].facts["seed"],
                "step": step,
                "logit": logits[0].loc[step],
                "twin's": logits[1].loc[step],
                "log ratio": np.log(logits[0].loc[step] / logits[1].loc[step]),
                "W_Q": norms[0].loc[step],
                "W_Q twin's": norms[1].loc[step],
                "W_Q log ratio": np.log(norms[0].loc[step] / norms[1].loc[step]),
                "alarmed": len(alarms(pair[0], step)),
                "alarmed twin's": len(alarms(pair[1], step)),
                "loss less twin's": (losses[0] - losses[1]).mean(),
                "common mode": series(pair[0].frame, "key_common_mode").loc[PREDICTED],
                "audit": largest_audit(pair[0].frame),
                "is unseen": again_of(pair[0].name) == UNSEEN,
            }
        )
    return pd.DataFrame(rows)


def largest_audit(frame: pd.DataFrame) -> float:
    """The largest `dq_relative_error` by `AUDITED` of heads that were not saturated before."""
    frame = frame[frame["step"] <= AUDITED].sort_values("step")
    audits, entropies = (
        frame.loc[frame["indicator"] == name, ["step", "site", "head", "value"]]
        for name in ("dq_relative_error", "attention_entropy")
    )
    joined = pd.merge_asof(audits, entropies, on="step", by=["site", "head"])
    return float(joined.loc[joined["value_y"] >= SATURATED, "value_x"].max())


def test(found: pd.DataFrame, by: str = "common mode") -> tuple[float, float]:
    """Spearman's correlation of a predictor and log ratio over kinds, and its one-sided p.

    Args:
        found: Rows of `table`; a kind is the mean of its seeds.
        by: The predictor's column.
    """
    means = found.groupby("kind")[[by, "log ratio"]].mean().rank()
    predictor = means[by].to_numpy() - means[by].mean()
    scale = np.linalg.norm(predictor) * means["log ratio"].std(ddof=0) * len(means) ** 0.5
    result = permutation_test(
        (means["log ratio"].to_numpy(),),
        lambda outcome, axis: (outcome * predictor).sum(axis) / scale,
        permutation_type="pairings", alternative="greater", n_resamples=99_999,
        rng=np.random.default_rng(0),
    )  # fmt: skip
    return float(result.statistic), float(result.pvalue)


def draw(found: pd.DataFrame) -> plt.Figure:
    """A dot a pair: how many times as large the logits are as the twin's, by the common mode."""
    figure, axes = plt.subplots(figsize=(7.5, 4.2))
    axes.axvspan(HARDLY_AT_RISK, AT_RISK, color="0.93", zorder=0)
    axes.text((HARDLY_AT_RISK + AT_RISK) / 2, 6, "no kind lies here", ha="center", color="0.4")
    axes.axhline(1, color="0.7", linewidth=1)
    for (kind, pairs), marker in zip(found.groupby("kind"), "os^DvPX*<>p", strict=False):
        axes.plot(pairs["common mode"], np.exp(pairs["log ratio"]), marker, label=kind)
    axes.set(xlabel=f"largest key_common_mode of any head at step {PREDICTED:,}", yscale="log",
             ylabel="largest logit over the corrected twin's")  # fmt: skip
    axes.set_yticks([1, 2, 5, 10], ["1", "2", "5", "10"])
    axes.minorticks_off()
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    figure.tight_layout()
    return figure


def main(arguments: list[str] | None = None) -> None:
    options = options_of(__doc__, arguments, figure="where to draw the pairs", several=True)
    found = table([run for results in options.results for run in load(results)])
    if found.empty:
        raise SystemExit("no pair has come to the step that is compared")
    told = {"rate": "{:.2e}".format, "logit": "{:,.0f}".format, "twin's": "{:,.0f}".format}
    print(found.to_string(index=False, float_format="{:.3f}".format, formatters=told))
    of_test = found[~found["kind"].isin(LATER) & ~found["is unseen"]]
    if options.figure:
        draw(of_test).savefig(options.figure, dpi=120)
    seeds = of_test.groupby("kind")["seed"].nunique()
    complete = of_test[of_test["kind"].isin(seeds.index[seeds >= SEEDS])]
    kinds = complete["kind"].nunique()
    if kinds < KINDS:
        print(f"\n{kinds} of {KINDS} kinds have {SEEDS} seeds: the test is not made yet.")
        return
    correlation, p = test(complete)
    print(f"\nSpearman's correlation over {kinds} kinds: {correlation:.2f}, p {p:.3f} (one-sided)")
    for what, rows in (("these pairs", complete), ("unseen ones", found[found["is unseen"]])):
        by = {name: test(rows, name)[0] for name in ("common mode", "audit") if len(rows) > 1}
        print(f"Of {what}: " + ", ".join(f"{name} {value:.2f}" for name, value in by.items()))


if __name__ == "__main__":
    main()
