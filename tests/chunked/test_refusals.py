"""Bad input raises before any work, and says which argument, what was seen, what is expected."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from liger_losses import LigerFusedLinearCrossEntropyLoss
from liger_losses.chunked import (
    ScoredTokens,
    api,
    fused_linear_loss,
    linear_logprobs,
    linear_topk_logprobs,
    logit_statistics,
    plan,
)
from liger_losses.chunked.walk import TileWalk

from ..oracle import ToyLoss, make_case

CASE = make_case(4, 5, 6, 20, torch.float32)
HIDDEN, WEIGHT, TARGET, BIAS = CASE.hidden, CASE.weight, CASE.target, CASE.bias
META = torch.device("meta")
NAN = float("nan")


def several(separability: str = "pair") -> ToyLoss:
    return ToyLoss(separability, ("logprob", "entropy"))


@pytest.fixture(autouse=True)
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: object, **kwargs: object) -> None:
        raise AssertionError("work was done before the arguments were checked")

    monkeypatch.setattr(TileWalk, "project", unreachable)


# Refused by both calls, in the same words.
COMMON: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"hidden": HIDDEN.tolist()}, TypeError, "hidden: got list, expected a torch.Tensor"),
    ({"hidden": None}, TypeError, "hidden: got NoneType, expected a torch.Tensor"),
    ({"weight": None}, TypeError, "weight: got NoneType, expected a torch.Tensor"),
    ({"bias": 1.0}, TypeError, "bias: got float, expected a torch.Tensor"),
    ({"target": TARGET.tolist()}, TypeError, "target: got list, expected a torch.Tensor"),
    ({"hidden": HIDDEN.long()}, TypeError, "hidden: got dtype torch.int64, expected one of torch.float16"),
    ({"weight": WEIGHT.to(torch.complex64)}, TypeError, "weight: got dtype torch.complex64"),
    ({"bias": BIAS.int()}, TypeError, "bias: got dtype torch.int32"),
    ({"target": TARGET.float()}, TypeError, "target: got dtype torch.float32, expected an integer dtype (int64)"),
    ({"target": TARGET == 1}, TypeError, "target: got dtype torch.bool"),
    ({"weight": WEIGHT[:, :5]}, ValueError, "hidden: got shape (4, 5, 6), expected last dimension 5 as in weight"),
    ({"weight": WEIGHT[0]}, ValueError, "weight: got shape (6,), expected [V, H]"),
    ({"weight": WEIGHT[:0]}, ValueError, "weight: got shape (0, 6), expected V >= 1 and H >= 1"),
    ({"target": TARGET[:, :4]}, ValueError, "target: got shape (4, 4), expected (4, 5), that of hidden"),
    ({"bias": BIAS[:19]}, ValueError, "bias: got shape (19,), expected (20,)"),
    ({"bias": BIAS[:, None]}, ValueError, "bias: got shape (20, 1), expected (20,)"),
    ({"hidden": HIDDEN.to(META)}, ValueError, "hidden: got a tensor on meta, which holds no values; expected one"),
    ({"weight": WEIGHT.to(META)}, ValueError, "weight: got a tensor on meta, which holds no values; expected one"),
    ({"bias": BIAS.to(META)}, ValueError, "bias: got a tensor on meta, which holds no values; expected one"),
    ({"target": TARGET.clamp_min(0) + 17}, ValueError, "expected a class in [0, 20) or ignore_index=-100"),
    ({"target": TARGET.masked_fill(TARGET < 0, -1)}, ValueError, "target: got -1 at row 1, position 0"),
    ({"target": ScoredTokens(TARGET, -1)}, ValueError, "ignore_index: got -100, but target was read with -1"),
    ({"ignore_index": -100.0}, TypeError, "ignore_index: got -100.0, expected an int"),
    ({"ignore_index": True}, TypeError, "ignore_index: got True, expected an int"),
    ({"ignore_index": None}, TypeError, "ignore_index: got None, expected an int"),
    ({"ignore_index": 1 << 70}, ValueError, "expected a number that fits 64 bits"),
    ({"memory_budget": 10**30}, ValueError, "expected bytes > 0 that fit 64 bits"),
    ({"weight": WEIGHT.to_sparse()}, TypeError, "weight: got layout torch.sparse_coo, expected a dense tensor"),
    ({"temperature": "2"}, TypeError, "temperature: got '2', expected a number"),
    ({"temperature": None}, TypeError, "temperature: got None, expected a number"),
    ({"softcap": [1.0]}, TypeError, "softcap: got [1.0], expected a number"),
    ({"logit_scale": True}, TypeError, "logit_scale: got True, expected a number"),
    ({"temperature": 0.0}, ValueError, "temperature: got 0.0, expected a finite number > 0"),
    ({"temperature": -1.0}, ValueError, "temperature: got -1.0"),
    ({"temperature": NAN}, ValueError, "temperature: got nan"),
    ({"temperature": float("inf")}, ValueError, "temperature: got inf"),
    ({"temperature": torch.ones(4)}, ValueError, "temperature: got shape [4], expected [4, 5]"),
    ({"temperature": torch.ones(4, 5).long()}, TypeError, "temperature: got torch.int64, expected a floating-point"),
    ({"temperature": torch.zeros(4, 5)}, ValueError, "temperature: got 0.0, expected finite numbers > 0"),
    ({"temperature": torch.ones(4, 5).requires_grad_()}, ValueError, "temperature: got a tensor that requires a grad"),
    ({"column_weights": torch.ones(20)}, ValueError, "column_weights: got a tensor, expected None: mean_logprob is not"),
    ({"column_weights": torch.ones(19)}, ValueError, "column_weights: got shape [19], expected [20]"),
    ({"column_weights": [1.0]}, TypeError, "column_weights: got list, expected a floating-point tensor"),
    ({"positives": [[1]]}, TypeError, "positives: got list, expected a torch.Tensor"),
    ({"positives": torch.ones(4, 5, 2)}, TypeError, "positives: got dtype torch.float32, expected an integer dtype"),
    ({"positives": TARGET}, ValueError, "positives: got shape (4, 5), expected (4, 5, 'labels a token')"),
    ({"positives": torch.full((4, 5, 2), 20)}, ValueError, "positives: got 20, expected labels in [0, 20) or ignore_"),
    ({"softcap": 0.0}, ValueError, "softcap: got 0.0, expected a finite number > 0"),
    ({"softcap": -3.0}, ValueError, "softcap: got -3.0"),
    ({"logit_scale": NAN}, ValueError, "logit_scale: got nan, expected a finite number"),
    ({"active_vocab": "on"}, ValueError, "active_vocab: got 'on', expected None, 'auto' or a number in [0, 1)"),
    ({"active_vocab": 1.0}, ValueError, "active_vocab: got 1.0, expected None, 'auto' or a number in [0, 1)"),
    ({"active_vocab": -1e-3}, ValueError, "active_vocab: got -0.001, expected None, 'auto' or a number in [0, 1)"),
    ({"active_vocab": NAN}, ValueError, "active_vocab: got nan, expected None, 'auto' or a number in [0, 1)"),
    ({"active_vocab": True}, TypeError, "active_vocab: got True, expected None, 'auto' or a number in [0, 1)"),
    ({"active_vocab": "auto", "strategy": "recompute"}, ValueError, "strategy: got 'recompute' with active_vocab"),
    ({"logits_dtype": "bfloat16"}, ValueError, "logits_dtype: got 'bfloat16', expected 'float32' or 'input'"),
    ({"strategy": "fast"}, ValueError, "strategy: got 'fast', expected 'auto' or one of"),
    ({"strategy": "frozen"}, ValueError, "strategy: got 'frozen', but weight or bias requires a gradient"),
    ({"memory_budget": 0}, ValueError, "memory_budget: got 0, expected bytes > 0"),
    ({"memory_budget": -5}, ValueError, "memory_budget: got -5, expected bytes > 0"),
    ({"memory_budget": 1e9}, TypeError, "memory_budget: got 1000000000.0, expected a number of bytes as an int"),
    ({"memory_budget": True}, TypeError, "memory_budget: got True"),
    ({"memory_budget": 1000}, ValueError, "memory_budget: got 1,000 bytes, too small for one row block; strategy"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), COMMON, ids=[f"{next(iter(c))}: {m}" for c, _, m in COMMON])
@pytest.mark.parametrize("call", [linear_logprobs, fused_linear_loss], ids=lambda call: call.__name__)
def test_refused_by_both(call: Callable[..., Any], change: dict, error: type[Exception], message: str) -> None:
    arguments = {"hidden": HIDDEN, "weight": WEIGHT, "target": TARGET, "bias": BIAS} | change
    if call is fused_linear_loss:
        arguments["loss"] = ToyLoss()
    with pytest.raises(error, match=re.escape(message)):
        call(**arguments)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"statistics": ("logprob", "perplexity")},
            ValueError,
            "statistics: got unknown ['perplexity'], expected names",
        ),
        ({"statistics": ()}, TypeError, "statistics: got (), expected a non-empty tuple of names"),
        ({"statistics": "logprob"}, TypeError, "statistics: got 'logprob', expected a non-empty tuple of names"),
        ({"statistics": ("logprob",), "differentiable": ("entropy",)}, ValueError, "differentiable: got ['entropy']"),
        ({"statistics": ("is_top1",), "differentiable": ("is_top1",)}, ValueError, "differentiable: got unknown"),
        (
            {"statistics": ("lse",), "positives": torch.ones(4, 5, 2).long()},
            ValueError,
            "positives: got a tensor, but lab",
        ),
        ({"strategy": "immediate"}, ValueError, "strategy: got 'immediate', which is for fused_linear_loss"),
        ({"statistics": ("entropy",), "strategy": "cached"}, ValueError, "strategy: got 'cached' for a loss that"),
    ],
)
def test_refused_by_linear_logprobs(options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        linear_logprobs(*CASE.head, **options)


class Calls:
    """A loss in all but the attributes it lacks or has wrong."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def totals(self, mask: Any, inputs: Any) -> dict:
        return {}

    def __call__(self, *args: Any) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        ("dpo", TypeError, "loss: got str without separability, statistics, totals"),
        (SimpleNamespace(separability="pair", statistics=("logprob",), totals=dict), TypeError, "without __call__"),
        (Calls(separability="pair"), TypeError, "loss: got Calls without statistics"),
        (Calls(separability="word", statistics=("logprob",)), ValueError, "loss.separability: got 'word', expected"),
        (Calls(separability="pair", statistics=("logp",)), ValueError, "loss.statistics: got unknown ['logp']"),
        (Calls(separability="pair", statistics=()), TypeError, "loss.statistics: got (), expected a non-empty tuple"),
        (Calls(separability="pair", statistics=("logprob",), differentiable=("is_top1",)), ValueError,
         "loss.differentiable: got unknown ['is_top1']"),
    ],
)  # fmt: skip
def test_not_a_loss(loss: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        fused_linear_loss(loss, *CASE.head)


ROW, PAIR = torch.ones(4), torch.ones(2)


@pytest.mark.parametrize(
    ("loss", "options", "error", "message"),
    [
        (ToyLoss(), {"inputs": {"weight": [1.0]}}, TypeError, "inputs['weight']: got list, expected a torch.Tensor"),
        (ToyLoss(), {"inputs": {"weight": torch.ones(3)}},
         ValueError, "inputs['weight']: got shape (3,), expected a first dimension of 4 or 2"),
        (ToyLoss("sequence"), {"inputs": {"weight": PAIR}},
         ValueError, "inputs['weight']: got shape (2,), expected a first dimension of 4"),
        (ToyLoss("token"), {"inputs": {"weight": ROW}},
         ValueError, "inputs['weight']: got shape (4,), expected [4, 5, ...]"),
        (ToyLoss(), {"inputs": {"weight": ROW.clone().requires_grad_()}, "strategy": "immediate"},
         ValueError, "strategy: got 'immediate' while one of inputs requires a gradient"),
        (ToyLoss("batch"), {"strategy": "immediate"},
         ValueError, "strategy: got 'immediate' for a loss separable only by 'batch'"),
        (several(), {"strategy": "cached"}, ValueError, "strategy: got 'cached' for a loss that differentiates"),
        (ToyLoss(), {"max_units": 2, "strategy": "cached"}, ValueError, "max_units: got 2 with strategy 'cached'"),
        (ToyLoss(), {"max_units": 0}, ValueError, "max_units: got 0, expected >= 1"),
        (ToyLoss(), {"max_units": 1.5}, TypeError, "max_units: got 1.5, expected an int"),
        (ToyLoss(), {"hidden": HIDDEN[0], "target": TARGET[0]},
         ValueError, "hidden: got shape (5, 6), expected [R, T, H]"),
    ],
)  # fmt: skip
def test_refused_by_fused_linear_loss(loss: Any, options: dict, error: type[Exception], message: str) -> None:
    arguments = {"hidden": HIDDEN, "weight": WEIGHT, "target": TARGET, "bias": BIAS} | options
    with pytest.raises(error, match=re.escape(message)):
        fused_linear_loss(loss, **arguments)


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        ("argmax", TypeError, "token_statistics: got 'argmax', expected a non-empty tuple of names"),
        (("perplexity",), ValueError, "token_statistics: got unknown ['perplexity'], expected names"),
    ],
)
def test_refused_token_statistics(names: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        fused_linear_loss(ToyLoss(), *CASE.head, token_statistics=names)


def test_x03_an_odd_number_of_rows_for_pairs() -> None:
    with pytest.raises(ValueError, match=r"hidden: got 3 rows for a loss over units of 2, expected a multiple of 2"):
        fused_linear_loss(ToyLoss(), HIDDEN[:3], WEIGHT, TARGET[:3], BIAS)


def test_a_target_out_of_range_is_named_with_its_place() -> None:
    target = TARGET.clone()
    target[2, 3] = 20
    for call in (linear_logprobs, lambda *a: fused_linear_loss(ToyLoss(), *a)):
        with pytest.raises(
            ValueError, match=re.escape("target: got 20 at row 2, position 3; expected a class in [0, 20)")
        ):
            call(HIDDEN, WEIGHT, target, BIAS)


def test_every_option_of_the_two_calls_is_tested_here() -> None:
    """A new option comes with its refusals, or is named here."""
    import inspect

    tested = {name for change, _, _ in COMMON for name in change}
    tested |= {"loss", "inputs", "max_units", "statistics", "differentiable", "ignore_index", "token_statistics"}
    for call in (api.linear_logprobs, api.fused_linear_loss):
        assert set(inspect.signature(call).parameters) <= tested


@pytest.mark.parametrize("names", [{"statistics": ("logprob", "logprob")}, {"differentiable": ("logprob", "logprob")}])
def test_a_name_twice_is_refused(names: dict) -> None:
    with pytest.raises(ValueError, match="expected each name once"):
        linear_logprobs(*CASE.head, **{"statistics": ("logprob",), **names})


@pytest.mark.parametrize("trainable", [True, False])
def test_forward_mode_is_refused(trainable: bool) -> None:
    """A walk without a forward-mode derivative would answer with a tangent of zero."""
    hidden, weight = HIDDEN.detach(), WEIGHT.detach().requires_grad_(trainable)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda h: linear_logprobs(h, weight, TARGET), (hidden,), (torch.ones_like(hidden),))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        linear_logprobs(forward_ad.make_dual(hidden, torch.ones_like(hidden)), weight, TARGET)


@pytest.mark.parametrize("name", ["linear_logprobs", "linear_topk_logprobs", "cross entropy", "logit_statistics"])
def test_functorch_transforms_are_refused(name: str) -> None:
    weight = WEIGHT.detach()

    def call(hidden: torch.Tensor) -> torch.Tensor:
        if name == "linear_logprobs":
            return linear_logprobs(hidden, weight, TARGET).sum()
        if name == "linear_topk_logprobs":
            return linear_topk_logprobs(hidden, weight, TARGET.unsqueeze(-1)).sum()
        if name == "cross entropy":
            return LigerFusedLinearCrossEntropyLoss()(weight, hidden, TARGET)
        return logit_statistics(hidden @ weight.T, TARGET)["logprob"].sum()

    hidden = HIDDEN.detach()
    for transform, x in (
        (torch.func.grad, hidden),
        (torch.func.jacrev, hidden),
        (torch.vmap, hidden.expand(2, 4, 5, 6)),
    ):
        with pytest.raises(NotImplementedError, match=r"torch\.func's transforms .* are not supported"):
            transform(call)(x)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(call, (hidden,), (hidden,))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"hidden_size": 2.5}, TypeError, "hidden_size: got 2.5, expected an int"),
        ({"tokens": True}, TypeError, "tokens: got True, expected an int"),
        ({"dtype": torch.int64}, TypeError, "dtype: got torch.int64"),
        ({"dtype": "bf16"}, TypeError, "dtype: got 'bf16'"),
        ({"trainable_head": "no"}, TypeError, "trainable_head: got 'no' of type str, expected True or False"),
        ({"strategy": "immediate", "separability": "batch"}, ValueError, "separable only by 'batch'"),
        ({"scored": 2.5}, TypeError, "scored: got 2.5, expected an int, or one for each row"),
        ({"scored": "64"}, TypeError, "scored: got '64', expected an int, or one for each row"),
        ({"scored": True}, TypeError, "scored: got True, expected an int, or one for each row"),
        ({"scored": (32, 1.5)}, TypeError, "scored: got 1.5, expected an int, or one for each row"),
    ],
)
def test_refused_by_plan(options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        plan(**{"tokens": 64, "hidden_size": 8, "vocab_size": 100, **options})


def test_a_single_number_of_scored_tokens_is_one_pair() -> None:
    assert plan(tokens=65, hidden_size=8, vocab_size=100, separability="pair").problem.row_counts == (33, 32)
