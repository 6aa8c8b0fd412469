"""Every example runs as it is, and a YAML file can set what the callbacks take."""

import os
import re
import runpy
import sys
from pathlib import Path

import pytest
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

from guardbit import AttentionMonitor, AutoStabilizer, read_events, read_run
from guardbit.monitor.detectors import HeadGrowth, LossDeparture

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
ARGUMENTS = {"lightning_cli": ["fit", "--config", str(EXAMPLES[0].parent / "lightning_cli.yaml")]}
#: Folder of the telemetry, where it is another; and what those print that keep none.
TELEMETRY = {"huggingface_trainer": "runs/trainer/guardbit"}
PRINTED = {
    "huggingface_models": r"W_Q spectral norms (0\.\d+, ){3}",
    "lightning_metrics": r"attention/max_logit: [1-9]\.\d+\n.*\nattention/w_q_spectral_norm: 0\.\d",
}

# Users do not turn warnings into errors, and the frameworks give some.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs_and_its_heads_are_measured(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # Seeding by Lightning leaves these behind.
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")
    monkeypatch.setattr(sys, "argv", [str(path), *ARGUMENTS.get(path.stem, [])])
    runpy.run_path(str(path), run_name="__main__")
    if path.stem in PRINTED:
        assert re.search(PRINTED[path.stem], capsys.readouterr().out)
        return
    folder = TELEMETRY.get(path.stem, f"runs/{path.stem}")
    frame = read_run(tmp_path / folder)
    norms = frame[frame["indicator"] == "w_q_spectral_norm"]
    assert len(norms) > 0
    assert norms["value"].between(0.1, 10).all()
    assert frame[frame["indicator"] == "loss"]["value"].gt(0).all()
    assert "monitor_error" not in set(read_events(tmp_path / folder)["kind"])


CONFIGURATION = """
trainer:
  accelerator: cpu
  logger: false
  enable_checkpointing: false
  callbacks:
    - class_path: guardbit.AttentionMonitor
      init_args:
        every_n_train_steps: 7
        sites: [net.*.attn, net.head]
        indicators: [max_logit, loss]
        num_rows: 16
        num_audited_heads: 3
        dirpath: runs/mine
        strict: true
        rules:
          - class_path: guardbit.monitor.detectors.HeadGrowth
            init_args: {name: growth_of_mine, norm: 0.25, logit: 5}
          - class_path: guardbit.monitor.detectors.LossDeparture
    - class_path: guardbit.AutoStabilizer
      init_args: {stabilizer: row_max, quiet_steps: null, dry_run: true}
"""


def made_by(*arguments):
    """The callbacks that a LightningCLI makes."""
    cli = LightningCLI(BoringModel, run=False, args=list(arguments), save_config_callback=None)
    kinds = (AttentionMonitor, AutoStabilizer)
    return [c for kind in kinds for c in cli.trainer.callbacks if isinstance(c, kind)]


def callbacks_of(tmp_path, text):
    """What a LightningCLI makes of a YAML file."""
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return made_by("--config", str(path))


def test_a_yaml_file_sets_both_callbacks_and_the_rules(tmp_path):
    monitor, stabilizer = callbacks_of(tmp_path, CONFIGURATION)
    settings = monitor.settings
    assert settings.every_n_train_steps == 7
    assert list(settings.sites) == ["net.*.attn", "net.head"]
    assert list(settings.indicators) == ["max_logit", "loss"]
    assert (settings.num_rows, settings.num_audited_heads, settings.strict) == (16, 3, True)
    assert settings.dirpath == os.path.abspath("runs/mine")
    assert settings.rules == (HeadGrowth("growth_of_mine", norm=0.25, logit=5), LossDeparture())
    policy = stabilizer.policy
    assert (policy.stabilizer, policy.quiet_steps) == ("row_max", None)
    assert stabilizer.dry_run


def test_a_command_line_sets_both_callbacks():
    monitor, stabilizer = made_by(
        "--trainer.callbacks=AttentionMonitor",
        "--trainer.callbacks.every_n_train_steps=7",
        "--trainer.callbacks.log_layers=true",
        "--trainer.callbacks+=AutoStabilizer",
        "--trainer.callbacks.scope=model",
    )
    assert (monitor.settings.every_n_train_steps, monitor.log_layers) == (7, True)
    assert stabilizer.policy.scope == "model"


def test_a_misspelt_setting_is_refused_by_name(tmp_path, capsys):
    with pytest.raises(SystemExit):
        callbacks_of(tmp_path, CONFIGURATION.replace("num_rows", "num_row"))
    assert "num_row" in capsys.readouterr().err
