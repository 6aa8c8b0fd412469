"""GuardBit in Hugging Face's Trainer: a Llama from a config learns to repeat; no download.

Run it with `python examples/huggingface_trainer.py`, then `guardbit report runs/trainer/guardbit`.
"""

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from guardbit import HuggingFaceMonitor, Policy


class Repetitions(Dataset):
    """Sixteen tokens, twice."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(64, (16,), generator=generator).repeat(2)
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir="runs/trainer", max_steps=40, per_device_train_batch_size=8, bf16=True,
        use_cpu=True, logging_steps=10, report_to="none", disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    monitor = HuggingFaceMonitor(every_n_train_steps=10, policy=Policy("compensated"))
    model = LlamaForCausalLM(config)
    Trainer(model, arguments, train_dataset=Repetitions(), callbacks=[monitor]).train()


if __name__ == "__main__":
    main()
