"""DPO in a plain loop: hidden states in, one fused loss out. Text and (constructed) pairs: `liger_losses.cli.text`."""

from __future__ import annotations

import argparse
import copy

import torch
from _text import PAIRS_ARE, paragraphs, preference_pairs, train_tokenizer, warm_model
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm

from liger_losses import LigerFusedLinearDPOLoss


def collate(pairs: list[dict[str, str]], tokenizer, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and labels, both [2B, T]: chosen rows first, -100 on prompt and padding."""
    ids, labels = [], []
    for side in ("chosen", "rejected"):
        for pair in pairs:
            prompt, answer = tokenizer(pair["prompt"]).input_ids, tokenizer(pair[side] + tokenizer.eos_token).input_ids
            ids.append(torch.tensor(prompt + answer))
            labels.append(torch.tensor([-100] * len(prompt) + answer))
    pad = {"batch_first": True}
    return (
        pad_sequence(ids, padding_value=tokenizer.pad_token_id, **pad).to(device),
        pad_sequence(labels, padding_value=-100, **pad).to(device),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warm-up", type=int, default=120)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    training, held_out = paragraphs()
    tokenizer = train_tokenizer(training)
    print(f"pairs: {PAIRS_ARE}")
    policy = warm_model(tokenizer, training, steps=args.warm_up, seed=args.seed, device=device)
    reference = copy.deepcopy(policy).requires_grad_(False)
    dpo = LigerFusedLinearDPOLoss(beta=0.1)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-4)

    def loss_and_rewards(pairs: list[dict[str, str]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ids, labels = collate(pairs, tokenizer, device)
        hidden = policy.model(ids).last_hidden_state[:, :-1]
        with torch.no_grad():
            reference_hidden = reference.model(ids).last_hidden_state[:, :-1]
        weights = policy.lm_head.weight, reference.lm_head.weight
        loss, metrics = dpo(weights[0], hidden, labels[:, 1:], ref_input=reference_hidden, ref_weight=weights[1])
        return loss, metrics[-2], metrics[-1]

    pairs = preference_pairs(training, args.seed)
    bar = tqdm(range(args.steps), desc="DPO")
    for step in bar:
        start = step * args.batch_size % (len(pairs) - args.batch_size)
        loss, chosen, rejected = loss_and_rewards(pairs[start : start + args.batch_size])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.3f}", margin=f"{(chosen - rejected).mean().item():.2f}")
    with torch.no_grad():
        _, chosen, rejected = loss_and_rewards(preference_pairs(held_out, args.seed)[:32])
    margin, accuracy = (chosen - rejected).mean().item(), (chosen > rejected).float().mean().item()
    print(f"held-out pairs: reward margin {margin:.3f}, reward accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
