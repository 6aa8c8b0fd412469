"""GuardBit inside Hugging Face models: GPT-2 and Llama from a config, nothing is downloaded.

Run it with `python examples/huggingface_models.py`.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import guardbit


def models() -> list[PreTrainedModel]:
    gpt2 = GPT2Config(
        vocab_size=128, n_positions=64, n_embd=64, n_layer=2, n_head=4,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    llama = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    return [GPT2LMHeadModel(gpt2), LlamaForCausalLM(llama)]


def train_step(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> float:
    tokens = torch.randint(128, (4, 32))
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def main() -> None:
    torch.manual_seed(0)
    for model in models():
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        inst = guardbit.instrument(model.train())
        train_step(model, optimizer)
        print(type(model).__name__)
        for name, site in inst.sites.items():
            norms = [torch.linalg.matrix_norm(w, 2).item() for w in site.query_weights()]
            print(f"  {name}: W_Q spectral norms {', '.join(f'{n:.3f}' for n in norms)}")
        first = next(iter(inst.sites))
        inst.switch(first, "compensated", heads=[1, 3])
        train_step(model, optimizer)
        print(f"  after a switch: {inst.stabilizers()[first]}, {inst.sites[first].launches}")
        inst.remove()


if __name__ == "__main__":
    main()
