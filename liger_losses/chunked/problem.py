"""The shapes of one call, the bytes and products that follow from them, and what a plan says of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .active import CROSSOVER, PANEL

MIB = 1 << 20


def padded_columns(vocab_size: int) -> int:
    """Row stride of tiles: a multiple of 8 elements keeps odd vocabularies on the aligned product path."""
    return -(-vocab_size // 8) * 8


def rows_summed(hidden_size: int) -> int:
    """Rows of a hidden gradient that ranks add up at a time: 128 MiB in fp32, which is what a collective is fast at."""
    return max(1, (1 << 25) // hidden_size)


@dataclass(frozen=True)
class Problem:
    """The shapes of one call."""

    tokens: int  # scored
    positions: int  # all, R * T
    hidden_size: int
    vocab_size: int
    compute_bytes: int = 2
    logits_bytes: int = 4
    statistics_bytes: int = 4
    hidden_itemsize: int = 2  # of the caller's tensors, hence of the returned gradients
    weight_itemsize: int = 2
    hidden_grad: bool = True
    weight_grad: bool = True
    bias_grad: bool = False
    only_logprob_grad: bool = True
    immediate_allowed: bool = False
    cast_weight: bool = False  # a copy of the weight in the compute dtype is made
    wide_weight_sum: bool = False  # "cached" passes through an fp32 [V, H] (fp16, or a dtype other than the weight's)
    separability: str = "token"
    row_counts: tuple[int, ...] = ()
    max_units: int | None = None
    unit_rows: int = 1  # rows of one unit
    spread: bool = False  # over ranks, which add up their parts of the hidden gradient, in the statistics' dtype
    active: bool = False  # gradient products over the active columns alone
    two_heads: bool = False  # a second model's logits lie beside each tile: what it adds, in bytes
    teacher_row_bytes: int = 0  # a row projected at a time: its logits, and a copy of what they are made of
    teacher_column_bytes: int = 0  # a token and column of a vocabulary block
    teacher_compact_bytes: int = 0  # copies of all scored tokens' hidden states
    teacher_fixed_bytes: int = 0  # a copy of the weight
    teacher_gemms: float = 0.0  # of its projection
    visit_bytes: int = 0  # temporaries of a tile that torch operations visit on an accelerator

    @property
    def any_grad(self) -> bool:
        return self.hidden_grad or self.weight_grad or self.bias_grad

    @property
    def padded_vocab(self) -> int:
        return padded_columns(self.vocab_size)

    @property
    def in_place(self) -> bool:
        """Whether "recompute" writes a block's gradient over its logits."""
        return self.logits_bytes == self.compute_bytes

    @property
    def returned_bytes(self) -> int:
        return self.returned_hidden + self.returned_weight

    @property
    def returned_hidden(self) -> int:
        return self.hidden_grad * self.positions * self.hidden_size * self.hidden_itemsize

    @property
    def returned_weight(self) -> int:
        return self.weight_grad * self.vocab_size * self.hidden_size * self.weight_itemsize

    def compaction_bytes(self, rows: int) -> int:
        """What an active vocabulary adds to tiles of so many rows, at most: the columns of one, what they are
        multiplied with, a product in fp32, the sums that chose them, the hidden rows of the tile that is projected
        meanwhile and of the one before, whose products were left for later, and the profiles of all tails, with what
        becomes of them before their product with the weight."""
        if not self.active:
            return 0
        panel = min(PANEL, self.vocab_size) * self.hidden_size * (self.compute_bytes + self.statistics_bytes)
        product = rows * self.hidden_size * (self.statistics_bytes + 2 * self.compute_bytes)
        cuts = 2 * self.vocab_size.bit_length() + 8
        profiles = -(-self.tokens // max(rows, 1)) * self.vocab_size * 3 * self.statistics_bytes
        return self.active_bytes(rows, CROSSOVER) + panel + product + cuts * self.vocab_size * 5 + profiles

    def active_bytes(self, rows: int, share: float) -> int:
        """`G` of the active columns of `rows` tokens, where they are `share` of the vocabulary."""
        return rows * int(share * self.vocab_size + 64) * self.compute_bytes

    @property
    def hidden_bytes(self) -> int:
        """`G W` of every position."""
        itemsize = self.statistics_bytes if self.spread else self.compute_bytes
        return self.positions * self.hidden_size * itemsize

    @property
    def summed_bytes(self) -> int:
        """This rank's part of the hidden gradient, as much of it as is summed over ranks at a time."""
        rows = min(self.positions, rows_summed(self.hidden_size))
        return self.spread * self.hidden_grad * rows * self.hidden_size * self.statistics_bytes

    def beside_logits(self, columns: int, itemsize: int) -> Problem:
        """With a second model's logits that exist: read where they lie, or gathered."""
        scattered = self.tokens < self.positions
        return replace(
            self,
            two_heads=True,
            teacher_row_bytes=columns * itemsize * scattered,
            teacher_column_bytes=itemsize * scattered,
        )

    def beside_head(
        self, columns: int, hidden_size: int, hidden_itemsize: int, *, vocab_size: int, cast_weight: bool = False
    ) -> Problem:
        """With a second model's head, of which `columns` are projected: each of the buffers of `walk.teacher_rows`."""
        scattered, cast = self.tokens < self.positions, hidden_itemsize != self.compute_bytes
        own = self.compute_bytes * (scattered or cast) + hidden_itemsize * (scattered and cast)
        return replace(
            self,
            two_heads=True,
            teacher_row_bytes=padded_columns(columns) * self.logits_bytes + hidden_size * own,
            teacher_column_bytes=self.logits_bytes,
            teacher_compact_bytes=self.tokens * hidden_size * own,
            teacher_fixed_bytes=vocab_size * hidden_size * self.compute_bytes * cast_weight,
            teacher_gemms=columns * hidden_size / (self.vocab_size * self.hidden_size),
        )


@dataclass(frozen=True)
class Plan:
    """What a call will do. `gemms` counts products of `2 N H V` FLOPs over the scored tokens."""

    problem: Problem
    strategy: str
    tile_rows: int  # rows of the gradient tile
    logit_rows: int  # rows projected at a time
    vocab_block: int  # columns a block, for "recompute"
    gemms: float
    workspace: int  # bytes: the predicted peak beyond inputs and returned gradients
    budget: int  # bytes
    groups: int = 1
    forward_columns: int = 0  # columns a tile of a walk without gradients; 0 or all of them: whole rows
    cache_bytes: int = 0  # of tiles' active columns, at most, that are kept until the row factor is known
    whole_cache: bool = False  # with an active vocabulary: whether there is room to keep all of `G`

    def explain(self) -> str:
        """The decision in words, for people and bug reports."""
        p = self.problem
        what = {
            "immediate": f"gradients formed while each of {self.groups} tile(s) is resident; fp32 [V, H] accumulator",
            "cached": "the gradient of the logits is kept from forward to backward; no accumulator",
            "recompute": f"logits recomputed in backward, {self.vocab_block} vocabulary columns at a time",
            "frozen": "the head needs no gradient: the hidden gradient is formed in forward and scaled in backward",
        }[self.strategy]
        grads = [n for n, on in (("hidden", p.hidden_grad), ("weight", p.weight_grad), ("bias", p.bias_grad)) if on]
        lines = [
            f"strategy      {self.strategy}: {what}",
            f"scored tokens {p.tokens:,} of {p.positions:,}; H {p.hidden_size:,}; V {p.vocab_size:,}; "
            f"loss separable by {p.separability}{'; two heads' if p.two_heads else ''}",
            f"gradients     {', '.join(grads) or 'none'}",
            f"tile          {self.tile_rows:,} rows, {self.logit_rows:,} projected at a time "
            f"({p.logits_bytes * 8}-bit logits, {p.compute_bytes * 8}-bit products)",
            f"products      {self.gemms:.2f} of 2 N H V = {2e-12 * p.tokens * p.hidden_size * p.vocab_size:,.3f} TFLOP",
            f"workspace     {self.workspace / MIB:,.1f} MiB predicted, {self.budget / MIB:,.1f} MiB allowed",
        ]
        if p.active:
            lines.append(
                "active vocab  gradient products over the active columns: products and workspace are upper bounds"
            )
        return "\n".join(lines)
