"""A tokenizer made from the text of `liger_losses.cli.text`, and a small Llama that is warm to it."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm.auto import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast, set_seed

from liger_losses import linear_logprobs
from liger_losses.cli.text import PAIRS_ARE, paragraphs, preference_pairs

__all__ = [
    "PAIRS_ARE",
    "paragraphs",
    "preference_pairs",
    "small_llama",
    "token_stream",
    "train_tokenizer",
    "warm_model",
    "windows",
]


def train_tokenizer(texts: list[str], vocab_size: int = 4096) -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on `texts`."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<pad>", "<eos>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="<eos>")


def small_llama(
    tokenizer: PreTrainedTokenizerFast, *, hidden_size: int = 128, layers: int = 3, seed: int, device: str
) -> LlamaForCausalLM:
    """An untrained Llama over the tokenizer's vocabulary."""
    set_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).to(device)


def token_stream(tokenizer: PreTrainedTokenizerBase, texts: list[str], device: str) -> torch.Tensor:
    """The texts end to end, `[tokens]`."""
    return torch.tensor(tokenizer(tokenizer.eos_token.join(texts))["input_ids"], device=device)


def windows(stream: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    """Stretches of the stream from random places, `[rows, length]`."""
    starts = torch.randint(len(stream) - length, (rows,)).to(stream.device)
    return stream[starts[:, None] + torch.arange(length, device=stream.device)]


def warm_model(
    tokenizer: PreTrainedTokenizerFast,
    texts: list[str],
    *,
    steps: int,
    seed: int,
    device: str,
    length: int = 128,
    label: str = "warm-up on the text",
    **size: int,
) -> LlamaForCausalLM:
    """A small Llama after `steps` of next-token training on `texts`, by the library's own per-token log-probs."""
    model = small_llama(tokenizer, seed=seed, device=device, **size)
    stream = token_stream(tokenizer, texts, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=max(steps, 1), pct_start=0.1)
    bar = tqdm(range(steps), desc=label)
    for _ in bar:
        ids = windows(stream, 12, length)
        hidden = model.model(ids[:, :-1]).last_hidden_state
        loss = -linear_logprobs(hidden, model.lm_head.weight, ids[:, 1:]).mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        bar.set_postfix(nll=f"{loss.item():.2f}")
    return model
