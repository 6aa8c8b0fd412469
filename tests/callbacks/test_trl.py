"""`HuggingFaceMonitor` in TRL's SFTTrainer: padded batches, packed ones, and batches in one row."""

import random

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from guardbit import HuggingFaceMonitor, read_run

trl = pytest.importorskip("trl")

# Accelerate and the Trainer warn of what a machine without a GPU lacks, TRL of the kernels.
pytestmark = pytest.mark.filterwarnings("ignore")

BATCHES = {
    "padded": {"max_length": 24},
    "packed": {"max_length": 24, "packing": True},
    "one row": {"max_length": None, "padding_free": True},
}
SITE = "model.layers.0.self_attn"


class KeepsWeights(TrainerCallback):
    """W_Q after each step, which is when norms are taken."""

    def __init__(self):
        self.weights = []

    def on_step_end(self, args, state, control, model, **_):
        self.weights.append(model.get_submodule(SITE).q_proj.weight.detach().clone())


def characters():
    names = ["<pad>", "<eos>", "<unk>", *"abcdefgh "]
    vocabulary = {name: place for place, name in enumerate(names)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def train(folder, batches, *callbacks):
    from datasets import Dataset  # a dependency of TRL

    choose = random.Random(0)
    texts = ["".join(choose.choices("abcdefgh ", k=choose.randint(4, 20))) for _ in range(64)]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    arguments = trl.SFTConfig(
        output_dir=str(folder), max_steps=6, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, bf16=True, use_cpu=True, logging_steps=1, report_to="none",
        disable_tqdm=True, save_strategy="no", learning_rate=1e-2, dataset_num_proc=None,
        **BATCHES[batches],
    )  # fmt: skip
    data = Dataset.from_dict({"text": texts})
    trainer = trl.SFTTrainer(
        model=model, args=arguments, train_dataset=data, processing_class=characters(),
        callbacks=list(callbacks),
    )  # fmt: skip
    trainer.train()
    return model


def bits(model):
    return torch.cat([x.detach().flatten() for x in model.parameters()])


@pytest.mark.parametrize("batches", BATCHES)
def test_a_watched_run_has_the_bits_of_an_unwatched_one_and_right_norms(batches, tmp_path):
    plain = train(tmp_path / "plain", batches)
    monitor = HuggingFaceMonitor(every_n_train_steps=3, strict=True)
    kept = KeepsWeights()
    watched = train(tmp_path / "watched", batches, monitor, kept)
    assert torch.equal(bits(plain), bits(watched))
    frame = read_run(tmp_path / "watched" / "guardbit")
    assert set(frame["site"]) == {"", SITE, "model.layers.1.self_attn"}
    for indicator in ("max_logit", "delta_bias"):
        assert set(frame[frame["indicator"] == indicator]["step"]) == {0, 3}
    # An audit projects on the direction of W_Q that the sample before has found.
    assert set(frame[frame["indicator"] == "dq_relative_error"]["step"]) == {3}
    norms = frame[(frame["indicator"] == "w_q_spectral_norm") & (frame["site"] == SITE)]
    for step in (0, 3):
        slices = kept.weights[step].view(2, 16, 32)
        by_hand = [torch.linalg.matrix_norm(x.double(), 2).item() for x in slices]
        found = norms[norms["step"] == step].sort_values("head")["value"].tolist()
        # The root of an eigenvalue of a Gram matrix in FP32.
        assert found == pytest.approx(by_hand, rel=1e-5)
    assert (frame["indicator"] == "loss").sum() == 6
