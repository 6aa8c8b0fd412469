"""The paper's recipe in miniature, on one rank and on two, and its rule."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from guardbit import read_run
from studies.paper import train
from tests.callbacks.several_ranks import launch
from tests.studies.conftest import TINY


def on_rank(arguments, ends):
    torch.set_num_threads(1)
    train.BATCH, train.CHECKPOINT_EVERY = 8, 2
    for end in ends:
        train.main([*arguments, f"--steps={end}"])
    torch.distributed.destroy_process_group()


def test_two_ranks_that_go_on_from_a_checkpoint_end_with_the_weights_of_one(tmp_path):
    tokens = np.random.default_rng(0).integers(TINY.vocabulary, size=5000).astype(np.uint16)
    np.save(tmp_path / "tokens.npy", tokens)
    (tmp_path / "tokens.json").write_text(json.dumps({"tokens": tokens.size}))
    sizes = [f"--{name}={getattr(TINY, name)}" for name in TINY.__dataclass_fields__]
    arguments = ["--arm=guarded", "--seed=3", "--device=cpu", f"--corpus={tmp_path}", *sizes]
    weights, losses = [], []
    for ranks, ends in ((1, [6]), (2, [4, 6])):
        run = tmp_path / str(ranks) / "guarded-seed3"
        launch(on_rank, ranks, [*arguments, f"--devices={ranks}", f"--folder={run.parent}"], ends)
        result = json.loads((run / "result.json").read_text())
        sums = result["sums_of_weights"]
        assert (result["steps"], len(sums), len(set(sums))) == (6, ranks, 1)
        assert {path.name for path in run.glob("*.ckpt")} == {"step=4.ckpt", "step=6.ckpt"}
        assert "max_logit" in set(read_run(run)["indicator"])
        losses.append(np.loadtxt(run / "losses.csv"))
        state = torch.load(run / "step=6.ckpt")["state_dict"]
        weights.append(torch.cat([state[name].flatten() for name in sorted(state)]))
    model = train.PaperModel(TINY, torch.zeros(0), 1e-3, 9, 3, compiled=False)
    begun = torch.cat([weight.flatten() for _, weight in sorted(model.state_dict().items())])
    # Both sum the same four gradients, in another order: 6e-8 of the largest. AdamW divides by the
    # sum's size, which makes more of that where gradients cancel; a factor of 100 is left for it.
    assert (weights[0] - weights[1]).norm() < 1e-5 * (weights[0] - begun).norm()
    np.testing.assert_allclose(*losses, rtol=1e-6)  # means of the same four FP32 numbers


def test_rates_and_decay_are_the_papers():
    model = train.PaperModel(TINY, torch.zeros(0), train.RATE, train.SCHEDULE, 3, compiled=False)
    made = model.configure_optimizers()
    share = made["lr_scheduler"]["scheduler"].lr_lambdas[0]
    rates = [1e-3 * share(step) for step in (999, 1999, 600_000)]
    assert rates == pytest.approx([5e-4, 1e-3, 1e-5])
    assert {group["weight_decay"] for group in made["optimizer"].param_groups} == {0.0}


def test_a_step_has_the_same_sequences_on_any_number_of_ranks(monkeypatch):
    tokens = torch.randint(300, (999,), generator=torch.Generator().manual_seed(0)).int()
    model = train.PaperModel(TINY, tokens, 1e-3, 9, 3, compiled=False)
    monkeypatch.setattr(model.net, "forward", lambda batch: batch)
    starts = torch.randint(999 - 17, (8,), generator=torch.Generator().manual_seed((3 << 20) + 5))
    expected = [tokens[start : start + 17].tolist() for start in starts.tolist()]
    for ranks in (1, 2, 4):
        parts, found = 4 // ranks, []
        for number in range(4):
            of_rank = {"world_size": ranks, "global_rank": number % ranks, "global_step": 5}
            model._trainer = SimpleNamespace(**of_rank, accumulate_grad_batches=parts)
            # Five steps have had their micro-batches.
            found += model.training_step(None, 5 * parts + number // ranks).tolist()
        assert found == expected


# Of 100 losses 49 that are 2.03 higher raise the mean by 0.995, and 50 by 1.015.
@pytest.mark.parametrize("rise, failed", [(2.03, 749), (0.99, None), (np.inf, 700), (np.nan, 700)])
def test_run_ends_500_steps_after_its_mean_loss_has_risen_by_a_nat(tmp_path, rise, failed):
    loss = np.r_[np.linspace(9, 3, 400), np.full(300, 3.0), np.full(700, 3 + rise)]
    assert train.failed_at(pd.Series(loss)) == failed
    progress = train.Progress(tmp_path)
    trainer = SimpleNamespace(
        is_global_zero=True, should_stop=False, accumulate_grad_batches=2,
        strategy=SimpleNamespace(reduce=lambda mean, reduce_op: mean), save_checkpoint=Path.touch,
    )  # fmt: skip
    for half in np.repeat(loss / 2, 2):
        if not trainer.should_stop:
            progress.on_train_batch_end(trainer, None, {"loss": torch.tensor(half)})
    assert len(progress.losses) == (len(loss) if failed is None else failed + 501)
