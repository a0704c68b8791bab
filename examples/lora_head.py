"""LoRA on the output head in a plain loop: `fuse_model`, and `model(..., labels=labels).loss` without logits.

    python examples/lora_head.py                               # a minute on two CPU cores
    python examples/lora_head.py --model Qwen/Qwen2.5-0.5B --dataset stanfordnlp/imdb --text-column text

The adapter on `lm_head` is part of the fused loss: its gradients are compared with those of the model's own loss.
"""

from __future__ import annotations

from typing import Any

import torch
from _trainer import MIB, material, parse
from peft import LoraConfig, get_peft_model
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM

from liger_losses.cli.measuring import median_ms, peak_bytes
from liger_losses.integrations.transformers import fuse_model


def batches(texts: list[str], tokenizer: Any, size: int, device: str) -> list[dict[str, torch.Tensor]]:
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    made = []
    for start in range(0, len(texts) - size + 1, size):
        batch = tokenizer(
            texts[start : start + size], return_tensors="pt", padding=True, truncation=True, max_length=128
        )
        mask = batch["attention_mask"]
        labels = batch["input_ids"].masked_fill(mask == 0, -100)
        made.append({"input_ids": batch["input_ids"], "attention_mask": mask, "labels": labels})
    return [{name: value.to(device) for name, value in batch.items()} for batch in made]


def main() -> None:
    args = parse(__doc__, steps=60, rank={"type": int, "default": 8}, text_column={"default": "text"})
    model, tokenizer, training, held_out = material(args, lambda texts: [{args.text_column: text} for text in texts])
    if isinstance(model, str):
        model = AutoModelForCausalLM.from_pretrained(model).to(args.device)
    targets = ["q_proj", "v_proj", "lm_head"]
    model = get_peft_model(model, LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules=targets))
    data = [
        batches(list(part[args.text_column]), tokenizer, args.batch_size, args.device) for part in (training, held_out)
    ]
    trained = [p for p in model.parameters() if p.requires_grad]

    def gradients() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(model(**data[0][0]).loss, trained)

    own, ways = gradients(), {"own loss": (peak_bytes(gradients, args.device), median_ms(gradients, args.device))}
    print(fuse_model(model))
    ways["fused"] = peak_bytes(gradients, args.device), median_ms(gradients, args.device)
    worst = max(float((a - b).norm() / a.norm().clamp(min=1e-12)) for a, b in zip(own, gradients(), strict=True))
    print(f"gradients of {len(trained)} adapter matrices: at most {worst:.1e} from those of the model's own loss")

    def held_out_loss() -> float:
        with torch.no_grad():
            return sum(model(**batch).loss.item() for batch in data[1]) / len(data[1])

    before = held_out_loss()
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    bar = tqdm(range(args.steps), desc="LoRA")
    for step in bar:
        loss = model(**data[0][step % len(data[0])]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.2f}")
    print(f"held-out loss: {before:.3f} before, {held_out_loss():.3f} after")
    for name, (memory, milliseconds) in ways.items():
        print(f"  {name:10s}{memory / MIB:10.1f} MiB {milliseconds:8.0f} ms, forward and backward of the whole model")


if __name__ == "__main__":
    main()
