"""What every call does with tensors that are not what it wants: on no device, in fp8, made in inference mode, none."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_losses as ll
from liger_losses import losses
from liger_losses.chunked import ScoredTokens

from .test_constants import CASES, LABELS, TARGET, tensors_of

ROWS, TOKENS, WIDTH, VOCAB = 6, 4, 3, 7
_GENERATOR = torch.Generator().manual_seed(0)


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=_GENERATOR)


HIDDEN, WEIGHT = _normal(ROWS, TOKENS, WIDTH), _normal(VOCAB, WIDTH)
IDS = torch.randint(VOCAB, (ROWS, TOKENS), generator=_GENERATOR)
REFERENCE = {"ref_input": _normal(ROWS, TOKENS, WIDTH), "ref_weight": _normal(VOCAB, WIDTH)}
ADVANTAGES = _normal(ROWS)
DESIRABLE = torch.tensor([True, False] * (ROWS // 2))
ROWS_OF = _normal(ROWS * TOKENS, VOCAB)
SECOND = ROWS_OF.roll(1, 0)


def _flat(*extra: Any) -> Callable[..., Any]:
    return lambda module, h, w: module(h.flatten(0, 1), w, *extra)


def _pairs(**extra: Any) -> Callable[..., Any]:
    return lambda module, h, w: module(w, h, IDS, **extra)


def _logits(h: Tensor, w: Tensor) -> Tensor:
    return (h @ w.T).flatten(0, 1)


_TEACHER = _flat(REFERENCE["ref_input"].flatten(0, 1), REFERENCE["ref_weight"], IDS.flatten())
# Class, options, call of the module with hidden states and a weight.
MODULES: dict[str, tuple[dict[str, Any], Callable[..., Any]]] = {
    "LigerCrossEntropyLoss": ({}, lambda m, h, w: m(_logits(h, w), IDS.flatten())),
    "LigerJSD": ({}, lambda m, h, w: m(_logits(h, w).log_softmax(-1), SECOND.log_softmax(-1), IDS.flatten())),
    "LigerKLDIVLoss": ({}, lambda m, h, w: m(_logits(h, w).log_softmax(-1), SECOND.softmax(-1))),
    "LigerTVDLoss": ({}, lambda m, h, w: m(_logits(h, w).softmax(-1), SECOND.softmax(-1), IDS.flatten())),
    "LigerFusedLinearCrossEntropyLoss": (
        {"label_smoothing": 0.1, "selection": losses.TokenSelection(), "return_token_accuracy": True}, _pairs()
    ),
    "LigerFusedLinearBCELoss": ({}, lambda m, h, w: m(w, h.flatten(0, 1), IDS.view(-1, 1))),
    "LigerFusedLinearDPOLoss": ({"use_weighting": True, "ld_alpha": 0.5}, _pairs(**REFERENCE)),
    "LigerFusedLinearCPOLoss": ({}, _pairs()),
    "LigerFusedLinearORPOLoss": ({}, _pairs(response_mask=IDS > 1)),
    "LigerFusedLinearSimPOLoss": ({}, _pairs()),
    "LigerFusedLinearAlphaPOLoss": ({}, _pairs()),
    "LigerFusedLinearTPOLoss": ({}, _pairs()),
    "LigerFusedLinearKTOLoss": (
        {"use_ref_model": True}, lambda m, h, w: m(h, w, IDS, preference_labels=DESIRABLE, **REFERENCE)
    ),
    "LigerFusedLinearBCOLoss": ({}, lambda m, h, w: m(h, w, IDS, preference_labels=DESIRABLE, **REFERENCE)),
    "LigerFusedLinearGRPOLoss": (
        {"entropy_coef": 0.1, "top_entropy_quantile": 0.5},
        lambda m, h, w: m(h, w, IDS, IDS > 0, ADVANTAGES, num_items_in_batch=9, **REFERENCE),
    ),
    "LigerFusedLinearJSD": ({}, _TEACHER),
    "LigerFusedLinearJSDLoss": ({}, _TEACHER),
    "LigerFusedLinearCosineSimilarityLoss": ({}, _TEACHER),
    "LigerFusedLinearKLDivLoss": ({}, _flat(SECOND.softmax(-1))),
}  # fmt: skip


def test_every_loss_module_is_in_the_table() -> None:
    found = {n for n in ll.__all__ if n.startswith("Liger") and n.endswith(("Loss", "JSD"))}
    assert found == set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_a_default_device_is_not_read(name: str) -> None:
    options, call = MODULES[name]
    module = getattr(ll, name)(**options)

    def run() -> list[Tensor]:
        hidden, weight = HIDDEN.clone().requires_grad_(), WEIGHT.clone().requires_grad_()
        result = call(module, hidden, weight)
        loss = result if isinstance(result, Tensor) else result[0]
        return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]

    module.eval()
    expected = run()
    with torch.device("meta"):
        found = run()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


REFERENCE_OPTIONS = (
    (ll.LigerFusedLinearDPOLoss, {}), (ll.LigerFusedLinearKTOLoss, {"use_ref_model": True}),
    (ll.LigerFusedLinearBCOLoss, {}), (ll.LigerFusedLinearGRPOLoss, {}),
)  # fmt: skip


@pytest.mark.parametrize(("module", "options"), REFERENCE_OPTIONS)
def test_an_option_of_the_reference_is_named(module: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^ref_softcap: got -1\.0, expected a finite number > 0"):
        module(**options, ref_softcap=-1.0)
    with pytest.raises(TypeError, match="^ref_logit_scale: got 'x', expected a number"):
        module(**options, ref_logit_scale="x")
    with pytest.raises(ValueError, match=r"^softcap: got -1\.0, expected a finite number > 0"):
        module(**options, softcap=-1.0, ref_logit_scale=2.0)


@pytest.mark.parametrize("loss_type", ["dapo", "dr_grpo"])
def test_a_completion_length_is_checked_whoever_reads_it(loss_type: str) -> None:
    with pytest.raises(TypeError, match="^max_completion_length: got 'x', expected an int$"):
        ll.LigerFusedLinearGRPOLoss(loss_type=loss_type, max_completion_length="x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="^max_completion_length: got 0, expected >= 1$"):
        ll.LigerFusedLinearGRPOLoss(loss_type=loss_type, max_completion_length=0)


def test_orpo_with_a_mask_names_hidden_states_that_are_none() -> None:
    with pytest.raises(TypeError, match=r"^_input: got list, expected a torch\.Tensor$"):
        ll.LigerFusedLinearORPOLoss()(WEIGHT, [1], IDS, response_mask=IDS > 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CASES)
def test_a_constant_that_has_no_numbers_here(case: str) -> None:
    call, given = CASES[case]
    for name, value in given.items():
        known = {"labels": "(preference_)?labels"}.get(name, name)
        on_meta = rf"^(inputs\[')?{known}('\])?: got a tensor on meta, which holds no values; expected one on a device"
        with pytest.raises(ValueError, match=on_meta):
            call(**{**given, name: value.to("meta")})
        if not value.is_floating_point():
            continue
        with pytest.raises(TypeError, match=rf"^{known}: got torch\.float8_e4m3fn, expected one of torch\.float16, "):
            call(**{**given, name: value.to(torch.float8_e4m3fn)})


def _inference(value: Any) -> Any:
    with torch.inference_mode():
        return value.clone() if isinstance(value, Tensor) else value


def _differentiable(result: Any) -> Tensor:
    values = [result] if isinstance(result, Tensor) else list(result.values() if isinstance(result, dict) else result)
    return next(value for value in values if isinstance(value, Tensor) and value.requires_grad).sum()


@pytest.mark.parametrize("case", CASES)
def test_a_constant_made_in_inference_mode(case: str) -> None:
    call, given = CASES[case]
    expected = _differentiable(call(**given))
    found = _differentiable(call(**{name: _inference(value) for name, value in given.items()}))
    found.backward()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


TARGETS: dict[str, Callable[..., Any]] = {
    **{
        strategy: lambda h, w, t, s=strategy: ll.LigerFusedLinearCrossEntropyLoss(strategy=s)(w, h, t)
        for strategy in ("auto", "immediate", "cached", "recompute")
    },
    "reduction none": lambda h, w, t: ll.LigerFusedLinearCrossEntropyLoss(reduction="none")(w, h, t),
    "active": lambda h, w, t: ll.linear_logprobs(h, w, t, active_vocab=1e-30),
    "DPO, WPO": lambda h, w, t: ll.LigerFusedLinearDPOLoss(use_weighting=True, use_ref_model=False)(w, h, t),
    "GRPO": lambda h, w, t: ll.LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False)(h, w, t, t > 0, h[:, 0, 0].detach()),
    "ids": lambda h, w, t: ll.linear_topk_logprobs(h, w, t.unsqueeze(-1)),
    "logits": lambda h, w, t: ll.logit_statistics(h @ w.T, t),
    "teacher": lambda h, w, t: ll.fused_linear_distillation(
        h, w, t, teacher_hidden=_inference(h), teacher_weight=_inference(w), strategy="recompute"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TARGETS)
def test_targets_made_in_inference_mode(name: str) -> None:
    gradients = []
    for target in (IDS, _inference(IDS)):
        hidden, weight = HIDDEN.clone().requires_grad_(), WEIGHT.clone().requires_grad_()
        gradients.append(torch.autograd.grad(_differentiable(TARGETS[name](hidden, weight, target)), (hidden, weight)))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("vocab", [200, 256])  # -100 is 156 in uint8, and 256 is 0
@pytest.mark.parametrize("name", TARGETS)
def test_targets_of_few_bits(name: str, vocab: int) -> None:
    ids = IDS.clone()
    ids[:, 1] = 156
    generator, found = torch.Generator().manual_seed(2), []
    rows = torch.randn(vocab, WIDTH, generator=generator)
    for target in (ids, ids.to(torch.uint8)):
        hidden, weight = HIDDEN.clone().requires_grad_(), rows.clone().requires_grad_()
        value = _differentiable(TARGETS[name](hidden, weight, target))
        found.append([value.detach(), *torch.autograd.grad(value, (hidden, weight))])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_scored_tokens_first_read_in_inference_mode() -> None:
    weight = WEIGHT.clone().requires_grad_()
    with torch.inference_mode():
        scored = ScoredTokens(TARGET.clamp(max=VOCAB - 1))
        known = ll.linear_logprobs(_normal(*TARGET.shape, WIDTH), weight, scored).sum(1)
    loss, _ = ll.LigerFusedLinearKTOLoss(use_ref_model=True)(
        _normal(*TARGET.shape, WIDTH), weight, scored, preference_labels=LABELS, ref_logps=known
    )
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.abs().sum() > 0


# -- the pure functions

TOKEN, ROW, MASK = -_normal(ROWS, TOKENS).abs(), -_normal(ROWS).abs(), IDS > 1
WHOLE = torch.arange(1, ROWS + 1)
FUNCTIONS: dict[str, list[tuple[dict[str, Any], dict[str, Tensor]]]] = {
    "alignment_weights": [({}, {"logprobs": TOKEN, "log_sum_sq_probs": TOKEN, "mask": MASK})],
    "bco_loss": [({}, {"logps": ROW, "labels": DESIRABLE, "ref_logps": ROW, "shift": ROW[0]})],
    "cross_entropy_loss": [
        (
            {"label_smoothing": 0.1, "lse_square_scale": 0.1},
            {
                "logprobs": TOKEN, "mask": MASK, "mean_logprobs": TOKEN, "lse": TOKEN, "token_weights": -TOKEN,
                "class_weights": -TOKEN, "num_items_in_batch": torch.tensor(5),
            },
        ),
        ({"selection": losses.TokenSelection(by="entropy")}, {"logprobs": TOKEN, "mask": MASK, "entropy": -TOKEN}),
    ],
    "divergence": [({}, {"student_logits": ROWS_OF, "teacher_logits": SECOND, "mask": MASK.flatten()})],
    "dpo_loss": [
        (
            {"loss_type": ("ipo", "sft")},
            {
                "chosen_logps": ROW, "rejected_logps": ROW, "ref_chosen_logps": ROW, "ref_rejected_logps": ROW,
                "chosen_lengths": WHOLE, "rejected_lengths": WHOLE, "chosen_nll": -ROW, "pair_weights": -ROW,
            },
        )
    ],
    "f_divergence_score": [({"name": "js_divergence"}, {"log_ratio": ROW})],
    "grpo_loss": [
        (
            {"beta": 0.1, "entropy_coef": 0.1, "loss_type": "ppo", "vf_coef": 0.5, "value_clip": 0.2},
            {
                "logprobs": TOKEN, "mask": MASK, "advantages": ROW, "old_logprobs": TOKEN, "ref_logprobs": TOKEN,
                "sampling_ratio": -TOKEN, "entropy": -TOKEN, "values": TOKEN, "returns": TOKEN, "old_values": TOKEN,
                "num_items_in_batch": torch.tensor(5),
            },
        ),
        (
            {"sampler_mode": "token_mask"},
            {"logprobs": TOKEN, "mask": MASK, "advantages": ROW, "old_logprobs": TOKEN, "sampling_logprobs": TOKEN},
        ),
    ],
    "kto_loss": [({}, {"logps": ROW, "labels": DESIRABLE, "ref_logps": ROW, "kl": ROW})],
    "length_desensitized_logprobs": [({"ld_alpha": 0.5}, {"logprobs": TOKEN, "mask": MASK})],
    "log_odds": [({}, {"logps": ROW})],
    "logprob_divergence": [
        ({"kind": "jsd"}, {"student_logprobs": ROWS_OF, "teacher_logprobs": SECOND, "mask": MASK.flatten()})
    ],
    "reference_free_loss": [({}, {"chosen_logps": ROW, "rejected_logps": ROW})],
    "sampled_kl": [({}, {"student_logprobs": TOKEN, "teacher_logprobs": TOKEN, "mask": MASK})],
    "sequence_lengths": [({}, {"mask": MASK})],
    "sequence_logprobs": [({"average": True}, {"logprobs": TOKEN, "mask": MASK})],
    "topk_divergence": [
        (
            {},
            {
                "student_logprobs": ROWS_OF.log_softmax(-1), "teacher_logprobs": SECOND.log_softmax(-1),
                "mask": MASK.flatten(),
            },
        )
    ],
}  # fmt: skip
# Arguments that are whole numbers, or may be.
_WHOLE = ("labels", "num_items_in_batch", "chosen_lengths", "rejected_lengths")
_CALLS = [(name, *call) for name, calls in FUNCTIONS.items() for call in calls]


def test_every_pure_function_is_in_the_table() -> None:
    functions = {n: f for n in losses.__all__ if inspect.isfunction(f := getattr(losses, n))}
    assert set(functions) == set(FUNCTIONS)
    for name, function in functions.items():
        tensors = {p.name for p in inspect.signature(function).parameters.values() if "Tensor" in str(p.annotation)}
        assert tensors == {argument for _, given in FUNCTIONS[name] for argument in given}


def _wrong(name: str, value: Tensor) -> Iterator[Any]:
    yield from ([1, 2], "x", value.to(torch.complex64), value.to("meta"))
    if value.dim():
        yield value.to_sparse()
    if name not in _WHOLE:
        yield value.to(torch.int64)
    if value.is_floating_point():
        yield from (value.to(torch.float8_e4m3fn), value > 0)


@pytest.mark.parametrize(("name", "options", "given"), _CALLS, ids=[name for name, *_ in _CALLS])
def test_a_pure_function_names_what_is_no_tensor_of_its_kind(
    name: str, options: dict[str, Any], given: dict[str, Tensor]
) -> None:
    function = getattr(losses, name)
    function(**given, **options)
    for argument, value in given.items():
        for wrong in _wrong(argument, value):
            with pytest.raises((TypeError, ValueError), match=f"^{argument}: got "):
                function(**{**given, argument: wrong}, **options)


_LEARNT = ("logprobs", "logps", "chosen_logps", "rejected_logps", "student_logits", "student_logprobs", "log_ratio")


_WITH_GRADIENT = [call for call in _CALLS if call[0] not in ("alignment_weights", "sequence_lengths")]


@pytest.mark.parametrize(("name", "options", "given"), _WITH_GRADIENT, ids=[name for name, *_ in _WITH_GRADIENT])
def test_a_pure_function_takes_constants_made_in_inference_mode(
    name: str, options: dict[str, Any], given: dict[str, Tensor]
) -> None:
    leaves = {n: value.clone().requires_grad_() for n, value in given.items() if n in _LEARNT}
    gradients = []
    for constants in (given, {n: _inference(value) for n, value in given.items()}):
        result = getattr(losses, name)(**{**constants, **leaves}, **options)
        gradients.append(torch.autograd.grad(_differentiable(result), tuple(leaves.values())))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "options", "tensors"), _CALLS)
def test_16_bit_numbers_are_computed_with_in_fp32(
    name: str, options: dict[str, Any], tensors: dict[str, Tensor], dtype: torch.dtype
) -> None:
    function = getattr(losses, name)
    narrow = {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}
    wide = {n: t.float() if t.is_floating_point() else t for n, t in narrow.items()}
    found, expected = tensors_of(function(**narrow, **options)), tensors_of(function(**wide, **options))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.to(other.dtype), other, rtol=1e-6, atol=1e-6)
        assert one.dtype == other.dtype
