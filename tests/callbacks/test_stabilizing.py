"""`AutoStabilizer` in real, small Lightning runs: switching, undoing, refusing, resuming."""

from collections import Counter

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from pandas.testing import assert_frame_equal

from guardbit import AttentionMonitor, AutoStabilizer, read_events, read_run
from guardbit.catalog import LOGGED_KEYS
from guardbit.monitor.detectors import DEFAULT_RULES, GradientError, LossDeparture
from tests.toys import Fires, recorded

SITE = "net.h.1.attn"


RULES = (Fires(SITE, sample=2), *DEFAULT_RULES)


class Stabilizers(Callback):
    """Writes down what each head of the site uses when a batch has been trained on."""

    def __init__(self, monitor):
        self.monitor = monitor
        self.used = {}

    def on_train_batch_start(self, trainer, *_):
        self.step = trainer.global_step
        self.launches = self._launches()

    def on_train_batch_end(self, *_):
        self.used[self.step] = {kernel for _, kernel in self._launches() - self.launches}

    def _launches(self):
        site = self.monitor.session.instrumentation.sites.get(SITE)
        return Counter(site.launches if site else {})


def steps_with(used, kernel):
    return [step for step, kernels in used.items() if kernel in kernels]


def events_of(path, kind):
    return recorded(path, kind, "step", "site", "heads", "stabilizer")


@pytest.mark.parametrize(
    ("settings", "stabilizer", "heads"),
    [
        ({"stabilizer": "compensated", "scope": "head"}, "compensated", (1,)),
        ({}, "exact_delta", (0, 1)),  # by default of the layer, and it keeps its kernel
    ],
)
@pytest.mark.parametrize("monitor_first", [True, False])
def test_an_alarm_switches_from_the_next_step_on(
    trains, tmp_path, monitor_first, settings, stabilizer, heads
):
    monitor = AttentionMonitor(3, rules=RULES, dirpath=tmp_path / "run", strict=True)
    switching, watching = AutoStabilizer(**settings), Stabilizers(monitor)
    order = [monitor, switching] if monitor_first else [switching, monitor]
    trains.fit(*order, watching, precision="bf16-mixed", max_steps=8)
    # The second sample is step 3's.
    assert steps_with(watching.used, stabilizer) == [4, 5, 6, 7]
    # In steps 1 and 2 nobody asks, and PyTorch's own function runs.
    assert steps_with(watching.used, "FLASH_ATTENTION") == [0, 3, 4, 5, 6, 7]
    assert events_of(tmp_path / "run", "alarm") == [(3, SITE, (1,), "")]
    assert events_of(tmp_path / "run", "switch") == [(3, SITE, heads, stabilizer)]
    assert "fires" in read_events(tmp_path / "run").iloc[1].why


def test_a_site_that_cannot_be_switched_is_recorded_with_the_reason(trains, tmp_path):
    class Double(trains.TinyGPT):
        def __init__(self):
            super().__init__()
            attention = self.net.h[1].attn
            attend = attention.attend
            attention.attend = lambda *x: attend(*(y.double() for y in x)).float()

    rules = (Fires(SITE, sample=2, indicator="w_q_spectral_norm"),)
    monitor = AttentionMonitor(3, rules=rules, dirpath=tmp_path / "run", strict=True)
    settings = {"model": Double(), "precision": "bf16-mixed"}
    trains.fit(monitor, AutoStabilizer("compensated", scope="head"), **settings)
    assert events_of(tmp_path / "run", "switch") == []
    assert events_of(tmp_path / "run", "refusal") == [(3, SITE, (1,), "compensated")]
    why = read_events(tmp_path / "run").query("kind == 'refusal'").why.item()
    refused = "not switched to compensated: it computes in torch.float64"
    assert why == f"{refused} (alarmed by fires)"
    frame = read_run(tmp_path / "run")
    # What needs no capture is measured all the same.
    assert set(frame[frame.site == SITE].indicator) >= {"w_q_spectral_norm", "qk_spectral_norm"}
    assert set(frame[frame.indicator == "max_logit"].site) == {"net.h.0.attn"}


def test_it_needs_a_monitor(trains):
    with pytest.raises(ValueError, match="one AttentionMonitor, and has 1 and 0"):
        trains.fit(AutoStabilizer("compensated", scope="head"))
    with pytest.raises(ValueError, match="one AttentionMonitor, and has 2 and 1"):
        trains.fit(
            AttentionMonitor(),
            AutoStabilizer("compensated", scope="head"),
            AutoStabilizer("row_max", scope="head"),
        )


def resumable(trains):
    """Data and dropout depend on the step only: Lightning itself does not restore them."""

    class Resumable(trains.TinyGPT):
        def training_step(self, batch, batch_idx):
            torch.manual_seed(1000 * self.trainer.global_step + batch_idx % 2)
            return super().training_step(torch.randint(48, batch.shape), batch_idx)

    return Resumable()


def trained(trains, folder, stabilizer, max_steps, ckpt_path=None, **settings):
    # Sampled are 0, 3, 6, ...; the second sample fires, so the switch is from step 4 on. The rule
    # for the audit's errors remembers every sample, that for the loss the last eight.
    rules = (Fires(SITE, sample=2), GradientError(), LossDeparture())
    monitor = AttentionMonitor(3, rules=rules, dirpath=folder / "run", strict=True)
    checkpoint = ModelCheckpoint(
        folder / f"until-{max_steps}", "{step}", every_n_train_steps=8, save_top_k=-1
    )
    model, _ = trains.fit(
        AutoStabilizer(stabilizer, quiet_steps=6, scope="head"),
        monitor,
        checkpoint,
        model=resumable(trains),
        max_steps=max_steps,
        ckpt_path=ckpt_path,
        enable_checkpointing=True,
        precision="bf16-mixed",
        **settings,
    )
    return model, monitor.state_dict()


@pytest.mark.parametrize(
    "stabilizer, accumulate",
    [
        ("compensated", 1),
        ("row_max", 2),
        ("exact_delta", 2),
        pytest.param("centered_keys", 2, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_is_the_run_never_stopped_bit_for_bit(
    trains, tmp_path, same_weights, stabilizer, accumulate
):
    settings = {"accumulate_grad_batches": accumulate}
    whole, whole_state = trained(trains, tmp_path / "whole", stabilizer, 14, **settings)
    trained(trains, tmp_path / "parts", stabilizer, 10, **settings)
    # Stopped at step 10, gone back to the checkpoint of step 8, whose loss of step 7 is pending.
    path = tmp_path / "parts" / "until-10" / "step=8.ckpt"
    resumed, state = trained(trains, tmp_path / "parts", stabilizer, 14, path, **settings)
    assert same_weights(whole, resumed)
    for one in (whole_state, state):
        # A resumed run forgets the past that tells which head is the worst.
        one["logged"] = {key: one["logged"][key] for key in LOGGED_KEYS if key in one["logged"]}
    assert state == whole_state
    assert_frame_equal(read_run(tmp_path / "whole" / "run"), read_run(tmp_path / "parts" / "run"))
    assert_frame_equal(
        read_events(tmp_path / "whole" / "run"), read_events(tmp_path / "parts" / "run")
    )
    switches = events_of(tmp_path / "parts" / "run", "switch")
    assert switches == [(3, SITE, (1,), stabilizer), (9, SITE, (1,), "none")]
    unswitched, _ = trains.fit(
        model=resumable(trains), max_steps=14, precision="bf16-mixed", **settings
    )
    assert not same_weights(unswitched, resumed), "the switch must have had an effect"


def test_the_state_is_plain_and_loads_with_weights_only(trains, tmp_path):
    trained(trains, tmp_path, "compensated", 8)
    saved = torch.load(tmp_path / "until-8" / "step=8.ckpt", weights_only=True)
    state = saved["callbacks"]["AttentionMonitor"]
    assert state["stabilizers"] == {SITE: ["none", "compensated"]}
    assert state["last_step"] == 7 and [
        step for name, step, _, _ in state["all"][0]["measurement"]["scalars"] if name == "loss"
    ] == [7]

    def check(value):
        if isinstance(value, dict):
            assert all(isinstance(key, str) for key in value)
            value = list(value.values())
        if isinstance(value, list | tuple):
            for item in value:
                check(item)
        else:
            assert value is None or isinstance(value, bool | int | float | str), type(value)

    check(state)


def test_a_resumed_run_that_dies_before_its_first_step_keeps_its_state(trains, tmp_path):
    class Dying(Callback):
        def on_train_start(self, *_):
            raise ArithmeticError("on purpose")

    trained(trains, tmp_path, "compensated", 8)
    path = tmp_path / "until-8" / "step=8.ckpt"
    monitor = AttentionMonitor(
        3, rules=(Fires(SITE, sample=2), GradientError(), LossDeparture()), dirpath=tmp_path / "run"
    )
    model = resumable(trains)
    settings = {"ckpt_path": path, "max_steps": 12}
    with pytest.raises(ArithmeticError, match="on purpose"):
        trains.fit(
            Dying(), AutoStabilizer("compensated", scope="head"), monitor, model=model, **settings
        )
    assert (
        monitor.state_dict() == torch.load(path, weights_only=True)["callbacks"]["AttentionMonitor"]
    )
