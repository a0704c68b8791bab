"""What the demo and the examples train on: real text, and preference pairs constructed from it.

The text is the language reference in the standard library (`pydoc_data.topics`), so nothing is downloaded. The pairs
are **constructed, not judged by anyone**: `chosen` is how a paragraph really goes on, `rejected` the same words with
every run of three in another order.
"""

from __future__ import annotations

import random
from pydoc_data.topics import topics

PAIRS_ARE = "constructed from text: chosen = the real continuation, rejected = the same, every three words reordered"


def paragraphs() -> tuple[list[str], list[str]]:
    """Prose paragraphs of the language reference for training, and those of every fifth topic held out."""
    training: list[str] = []
    held_out: list[str] = []
    seen: set[str] = set()
    for number, name in enumerate(sorted(topics)):
        for block in topics[name].split("\n\n"):
            text = " ".join(block.split())
            prose = text[:1].isupper() and text.endswith(".") and "::=" not in text and ">>>" not in text
            # A paragraph may stand under several topics: the first one has it, so none is on both sides.
            if prose and len(text.split()) >= 16 and text not in seen:
                seen.add(text)
                (held_out if number % 5 == 4 else training).append(text)
    return training, held_out


def preference_pairs(texts: list[str], seed: int) -> list[dict[str, str]]:
    """One pair a paragraph: the first third is the prompt."""
    rng = random.Random(seed)
    pairs = []
    for text in texts:
        words = text.split()[:60]
        cut = len(words) // 3
        prompt, chosen = words[:cut], words[cut:]
        runs = [chosen[i : i + 3] for i in range(0, len(chosen), 3)]
        rejected = [word for run in runs for word in rng.sample(run, len(run))]
        pairs.append(
            {"prompt": " ".join(prompt), "chosen": " " + " ".join(chosen), "rejected": " " + " ".join(rejected)}
        )
    rng.shuffle(pairs)
    return pairs
