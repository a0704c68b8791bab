"""KTO, unpaired APO-zero and BCO: formulas, TRL's own code, loss objects."""

from __future__ import annotations

import dataclasses
import math
import pickle
import re
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_losses.losses import BCOLoss, KTOLoss, bco_loss, kto_loss, sequence_logprobs
from liger_losses.losses.unpaired import running_mean

from .batch import TOKENS, Batch, make_batch

ROWS = 10
LABELS = torch.tensor([True, False, False, True, True, False, True, False, True, False])
WEIGHTS = {"desirable_weight": 0.7, "undesirable_weight": 1.6}
ONE_KIND = {"desirable": torch.ones(ROWS, dtype=torch.bool), "undesirable": torch.zeros(ROWS, dtype=torch.bool)}


def evaluate(loss: KTOLoss | BCOLoss, batch: Batch, **more: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    inputs = {"labels": LABELS, **more}
    if not loss.reference_free and not {"ref_logps", "ref_logprobs"} & set(more):
        inputs["ref_logprobs"] = batch.ref_logprobs
    return loss(batch.statistics(), batch.mask, inputs, loss.totals(batch.mask, inputs))


def log_ratios(batch: Batch, *, average: bool = False) -> Tensor:
    return sequence_logprobs(batch.statistics()["logprob"] - batch.ref_logprobs, batch.mask, average=average)


# formulas -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kl", [None, torch.tensor(0.8), torch.tensor([0.8]), torch.linspace(0, 3, ROWS)], ids=str)
@pytest.mark.parametrize("integer", [False, True])
def test_kto_is_its_formula(kl: Tensor | None, integer: bool) -> None:
    u, ref = -10 * torch.rand(2, ROWS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    k = torch.zeros(ROWS) if kl is None else kl.expand(ROWS)
    labels = LABELS.long() if integer else LABELS
    got = kto_loss(u, labels, ref, kl=kl, beta=0.3, **WEIGHTS)
    for row in range(ROWS):
        z = 0.3 * (u[row] - ref[row] - k[row]).item()
        want = 0.7 * (1 - 1 / (1 + math.exp(-z))) if LABELS[row] else 1.6 * (1 - 1 / (1 + math.exp(z)))
        assert got[row].item() == pytest.approx(want, rel=1e-12)


def test_apo_zero_unpaired_is_its_formula() -> None:
    u = torch.linspace(-4, 4, ROWS, dtype=torch.float64)
    got = kto_loss(u, LABELS, beta=0.5, loss_type="apo_zero_unpaired", **WEIGHTS)
    want = torch.where(LABELS, 0.7 * (1 - (0.5 * u).sigmoid()), 1.6 * (0.5 * u).sigmoid())
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("shift", [0.0, -0.7, torch.tensor(1.3, dtype=torch.float64)], ids=str)
def test_bco_is_its_formula(shift: Tensor | float) -> None:
    u, ref = -10 * torch.rand(2, ROWS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    got = bco_loss(u, LABELS, ref, beta=0.3, shift=shift)
    for row in range(ROWS):
        z = 0.3 * (u[row] - ref[row]).item() - float(shift)
        assert got[row].item() == pytest.approx(math.log1p(math.exp(-z if LABELS[row] else z)), rel=1e-12)


@pytest.mark.parametrize("z", [-700.0, -50.0, 50.0, 700.0])
def test_far_out(z: float) -> None:
    """`1 - sigmoid` computed as written is 0 from 37 on; its relative error and the logarithm's do not grow here."""
    value = torch.tensor([z, z], dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([True, False])
    losses = kto_loss(value, labels, beta=1.0)
    assert losses.tolist() == pytest.approx([1 / (1 + math.exp(z)), 1 / (1 + math.exp(-z))], rel=1e-13)
    (gradient,) = torch.autograd.grad(losses.sum() + bco_loss(value, labels, beta=1.0).sum(), value)
    assert gradient.isfinite().all()
    assert bco_loss(value, labels, beta=1.0).tolist() == pytest.approx(
        [max(-z, 0) + math.log1p(math.exp(-abs(z))), max(z, 0) + math.log1p(math.exp(-abs(z)))], rel=1e-13
    )


def test_reference_kl_and_shift_are_constants() -> None:
    tensors = [torch.rand(ROWS, requires_grad=True) for _ in range(3)]
    shift = torch.rand((), requires_grad=True)
    total = kto_loss(tensors[0], LABELS, tensors[1], kl=tensors[2]).sum()
    (total + bco_loss(tensors[0], LABELS, tensors[1], shift=shift).sum()).backward()
    assert tensors[0].grad is not None
    assert tensors[1].grad is None
    assert tensors[2].grad is None
    assert shift.grad is None


def test_low_precision_is_computed_in_fp32() -> None:
    logps, ref = (-50 * torch.rand(2, ROWS)).to(torch.bfloat16)
    for function in (kto_loss, bco_loss):
        losses = function(logps, LABELS, ref)
        assert losses.dtype == torch.float32
        assert torch.equal(losses, function(logps.float(), LABELS, ref.float()))


def test_a_label_that_cannot_be_read_is_nan() -> None:
    """As on an accelerator, where reading the labels would wait; here, while tracing."""
    labels = torch.tensor([1, 0, 2, 1, 1, 0, 1, -1, 1, 0])
    losses = torch.compile(kto_loss, backend="eager")(torch.zeros(ROWS), labels)
    assert losses.isnan().nonzero().flatten().tolist() == [2, 7]


@pytest.mark.parametrize("added", [None, 3])
def test_running_mean(added: int | None) -> None:
    """Chan's update over batches of different sizes is the mean over all, and writes to nothing."""
    batches = [torch.tensor(values, dtype=torch.float64) for values in ([1e8, 2.0, -1.0], [5.0, 1.0, 3.0])]
    count, mean = torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.float64)
    zero = mean
    for values in batches:
        count, mean = running_mean(count, mean, values if added is None else values.sum(), added)
    assert count == 6
    assert mean.item() == pytest.approx(torch.cat(batches).mean().item(), rel=1e-15)
    assert zero == 0


# TRL ----------------------------------------------------------------------------------------------------------------


class _Model(torch.nn.Module):
    """Per-token statistics of the batch, or of the mismatched completions that TRL estimates the KL from."""

    is_gradient_checkpointing = False

    def __init__(self, batch: Batch, log_probs: Tensor, kl_log_probs: Tensor) -> None:
        super().__init__()
        self.outputs = SimpleNamespace(
            log_probs=log_probs,
            mean_logits=batch.statistics()["mean_logit"],
            entropy=torch.zeros_like(log_probs),
            aux_loss=None,
        )
        self.kl_outputs = SimpleNamespace(log_probs=kl_log_probs)

    def forward(self, input_ids: Tensor, **kwargs: object) -> SimpleNamespace:
        return self.kl_outputs if (input_ids == 1).all() else self.outputs


def trl_kto_loss(
    batch: Batch, labels: Tensor, kl_logps: tuple[Tensor, Tensor], **options: Any
) -> tuple[Tensor, dict[str, float]]:
    """TRL's own `KTOTrainer._compute_loss`; `kl_logps`: of policy and reference on mismatched completions, `[R, T]`."""
    module = pytest.importorskip("trl.trainer.kto_trainer", exc_type=ImportError)
    policy = _Model(batch, batch.statistics()["logprob"], kl_logps[0])
    loss_type = options.get("loss_type", "kto")
    trainer = SimpleNamespace(
        model=policy,
        ref_model=_Model(batch, batch.ref_logprobs, kl_logps[1]),
        accelerator=SimpleNamespace(device=torch.device("cpu"), gather_for_metrics=lambda x: x),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        aux_loss_enabled=False,
        precompute_ref_logps=False,
        calculate_KL=loss_type == "kto",
        loss_type=loss_type,
        beta=options.get("beta", 0.1),
        desirable_weight=options.get("desirable_weight", 1.0),
        undesirable_weight=options.get("undesirable_weight", 1.0),
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    trainer._compute_kl_logps = lambda model, batch: module.KTOTrainer._compute_kl_logps(trainer, model, batch)
    mask = torch.nn.functional.pad(batch.mask.long(), (1, 0))
    zero, one = torch.zeros_like(mask), torch.ones_like(mask)
    inputs = {"input_ids": zero, "attention_mask": one, "completion_mask": mask, "label": labels}
    inputs |= {"KL_input_ids": one, "KL_attention_mask": one, "KL_completion_mask": mask}
    loss = module.KTOTrainer._compute_loss(trainer, policy, inputs, False)
    return loss, {name: values[-1] for name, values in trainer._metrics["train"].items()}


@pytest.mark.parametrize("labels", [LABELS, *ONE_KIND.values()], ids=["both", *ONE_KIND])
@pytest.mark.parametrize(
    "options", [{}, {"beta": 0.7, **WEIGHTS}, {"loss_type": "apo_zero_unpaired", **WEIGHTS}], ids=str
)
@pytest.mark.parametrize("drift", [0.3, -0.3])
def test_kto_is_trls(options: dict, labels: Tensor, drift: float) -> None:
    """Value, gradient and metrics, with an empty row, and with a KL estimate that TRL clamps at 0."""
    ours, theirs = make_batch().leaf(), make_batch().leaf()
    for batch in (ours, theirs):
        batch.mask[4] = False
        batch.ref_logprobs[4] = 0
    kl_logps = (ours.ref_logprobs.detach() + drift, ours.ref_logprobs)
    expected, logged = trl_kto_loss(theirs, labels, kl_logps, **options)
    kl = (kl_logps[0] - kl_logps[1]).sum(1).mean().clamp_min(0)
    more = {} if "loss_type" in options else {"kl": kl}
    value, metrics = evaluate(KTOLoss(**options), ours, labels=labels, **more)
    torch.testing.assert_close(value, expected.to(value.dtype))
    torch.testing.assert_close(*(torch.autograd.grad(v, b.logits)[0] for v, b in ((value, ours), (expected, theirs))))
    for side, rows in (("chosen", labels), ("rejected", ~labels)):
        count, tokens = rows.sum().item(), ours.mask[rows].sum().item()
        assert (f"logps/{side}" in logged) == (count > 0)
        if count:
            assert metrics[f"{side}_logps_sum"].item() / count == pytest.approx(logged[f"logps/{side}"])
            assert metrics[f"{side}_rewards_sum"].item() / count == pytest.approx(logged[f"rewards/{side}"])
            assert metrics[f"{side}_mean_logits_sum"].item() / tokens == pytest.approx(logged[f"logits/{side}"])


def test_trl_hides_a_row_that_is_nan() -> None:
    """Its nanmean reports the mean of the other rows, while the gradients are NaN; ours is NaN in both."""
    ours, theirs = make_batch().leaf(), make_batch().leaf()
    row = int(ours.mask[2].nonzero()[0])
    for batch in (ours, theirs):
        batch.logits.data[2, row] = torch.nan
    expected, _ = trl_kto_loss(theirs, LABELS, (theirs.ref_logprobs, theirs.ref_logprobs))
    assert expected.isfinite()
    assert torch.autograd.grad(expected, theirs.logits)[0].isnan().any()
    assert evaluate(KTOLoss(), ours)[0].isnan()


# loss objects -------------------------------------------------------------------------------------------------------

CONFIGURATIONS: list[tuple[KTOLoss | BCOLoss, dict[str, Tensor]]] = [
    (KTOLoss(), {}),
    (KTOLoss(beta=0.6, **WEIGHTS), {"kl": torch.tensor(0.9)}),
    (KTOLoss(average_log_prob=True), {"kl": torch.linspace(0, 3, ROWS)}),
    (KTOLoss(loss_type="apo_zero_unpaired"), {"ref_logps": torch.linspace(-9, -1, ROWS)}),
    (KTOLoss(reference_free=True), {"labels": LABELS.int()}),
    (BCOLoss(), {"shift": torch.tensor(-0.4)}),
    (BCOLoss(average_log_prob=True), {}),
    (BCOLoss(shift_includes_batch=True), {"shift": torch.tensor(-0.4), "shift_count": torch.tensor(7)}),
    (BCOLoss(shift_includes_batch=True, reference_free=True), {}),
]
IDS = [f"{loss}+{'+'.join(more)}" for loss, more in CONFIGURATIONS]
configurations = pytest.mark.parametrize(("loss", "more"), CONFIGURATIONS, ids=IDS)


def test_separability() -> None:
    assert {loss.separability for loss, _ in CONFIGURATIONS[:7]} == {"sequence"}
    assert {loss.separability for loss, _ in CONFIGURATIONS[7:]} == {"batch"}


@pytest.mark.parametrize("average", [False, True])
def test_objects_are_the_means_of_the_functions(average: bool) -> None:
    batch = make_batch()
    u, kl = log_ratios(batch, average=average), torch.tensor(0.6)
    value, metrics = evaluate(KTOLoss(average_log_prob=average, beta=0.4), batch, kl=kl)
    torch.testing.assert_close(value, kto_loss(u, LABELS, kl=kl, beta=0.4).mean())
    torch.testing.assert_close(metrics["chosen_rewards_sum"], 0.4 * u[LABELS].sum())
    torch.testing.assert_close(metrics["rejected_rewards_sum"], 0.4 * u[~LABELS].sum())
    z = batch.logits.mean(-1)
    torch.testing.assert_close(metrics["chosen_mean_logits_sum"], z[LABELS][batch.mask[LABELS]].sum())
    torch.testing.assert_close(metrics["rejected_mean_logits_sum"], z[~LABELS][batch.mask[~LABELS]].sum())
    value, _ = evaluate(BCOLoss(average_log_prob=average, beta=0.4), batch, shift=kl)
    torch.testing.assert_close(value, bco_loss(u, LABELS, beta=0.4, shift=0.6).mean())


def test_bco_with_this_batch_in_the_shift() -> None:
    """TRL's former trainer updated its running mean before the loss, which then read it as a number."""
    batch = make_batch().leaf()
    loss = BCOLoss(beta=0.4, shift_includes_batch=True)
    value, _ = evaluate(loss, batch, shift=torch.tensor(0.9, dtype=torch.float64), shift_count=torch.tensor(6))
    u = log_ratios(batch)
    shift = ((6 * 0.9 + 0.4 * u.sum()) / 16).detach()
    expected = bco_loss(u, LABELS, beta=0.4, shift=shift).mean()
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(*(torch.autograd.grad(v, batch.logits)[0] for v in (value, expected)))
    first, _ = evaluate(loss, batch)
    torch.testing.assert_close(first, bco_loss(u, LABELS, beta=0.4, shift=(0.4 * u).mean()).mean())


@configurations
def test_empty_rows_and_nothing_scored(loss: KTOLoss | BCOLoss, more: dict[str, Tensor]) -> None:
    for rows in ([2], [2, 3], list(range(ROWS))):
        batch = make_batch().leaf()
        batch.mask[rows] = False
        value, metrics = evaluate(loss, batch, **more)
        assert value.isfinite()
        (gradient,) = torch.autograd.grad(value, batch.logits)
        assert gradient.isfinite().all()
        assert (gradient[rows] == 0).all()
    assert all((metrics[name] == 0).all() for name in metrics if "rewards" not in name)


# With this batch in it, the shift is a constant of the gradient by design.
@pytest.mark.parametrize(("loss", "more"), CONFIGURATIONS[:7], ids=IDS[:7])
def test_gradcheck(loss: KTOLoss | BCOLoss, more: dict[str, Tensor]) -> None:
    batch = make_batch()
    statistics = batch.statistics()
    inputs = {"labels": LABELS, **more}
    if not loss.reference_free and "ref_logps" not in more:
        inputs["ref_logprobs"] = batch.ref_logprobs
    totals = loss.totals(batch.mask, inputs)

    def function(logprob: Tensor) -> Tensor:
        return loss({**statistics, "logprob": logprob}, batch.mask, inputs, totals)[0]

    assert torch.autograd.gradcheck(function, statistics["logprob"].clone().requires_grad_())


def test_object() -> None:
    assert KTOLoss() == KTOLoss(beta=0.1)
    assert KTOLoss() != BCOLoss()
    assert hash(KTOLoss(**WEIGHTS)) == hash(pickle.loads(pickle.dumps(KTOLoss(**WEIGHTS))))
    assert KTOLoss().statistics == ("logprob", "mean_logit")
    with pytest.raises(dataclasses.FrozenInstanceError):
        KTOLoss().beta = 1.0


LOGPS = torch.zeros(3)
THREE = torch.tensor([True, False, True])


@pytest.mark.parametrize(
    ("function", "arguments", "options", "error", "message"),
    [
        (kto_loss, (LOGPS, THREE), {"beta": 0.0}, ValueError, "beta: got 0.0, expected a finite number > 0"),
        (kto_loss, (LOGPS, THREE), {"loss_type": "bco"}, ValueError, "loss_type: got 'bco', expected one of kto, apo_zero_unpaired"),
        (kto_loss, (LOGPS, THREE), {"desirable_weight": -1.0}, ValueError, "desirable_weight: got -1.0, expected a finite number >= 0"),
        (kto_loss, (LOGPS, THREE), {"undesirable_weight": "1"}, TypeError, "undesirable_weight: got '1' of type str"),
        (kto_loss, (LOGPS, THREE.float()), {}, TypeError, "labels: got torch.float32, expected a bool or integer tensor, True or 1 where desirable"),
        (kto_loss, (LOGPS, [1, 0, 1]), {}, TypeError, "labels: got list, expected a bool or integer tensor"),
        (kto_loss, (LOGPS, THREE[:2]), {}, ValueError, "labels: got shape [2], expected [3]"),
        (kto_loss, (LOGPS, THREE[:, None]), {}, ValueError, "labels: got shape [3, 1], expected [3]"),
        (kto_loss, (LOGPS, torch.tensor([1, -1, 1])), {}, ValueError, "labels: got the value -1, expected 1 (desirable) or 0 (undesirable)"),
        (bco_loss, (LOGPS, torch.tensor([1, 2, 1])), {}, ValueError, "labels: got the value 2"),
        (kto_loss, (LOGPS[:, None], THREE), {}, ValueError, "logps: got shape [3, 1], expected [rows]"),
        (kto_loss, (LOGPS.long(), THREE), {}, TypeError, "logps: got torch.int64, expected a floating-point tensor"),
        (kto_loss, (LOGPS, THREE, LOGPS[:2]), {}, ValueError, "ref_logps: got shape [2], expected [3]"),
        (kto_loss, (LOGPS, THREE), {"kl": torch.zeros(2)}, ValueError, "kl: got shape [2], expected [] or [1] or [3]"),
        (kto_loss, (LOGPS, THREE), {"kl": 0.5}, TypeError, "kl: got float, expected a floating-point tensor"),
        (kto_loss, (LOGPS, THREE), {"kl": torch.zeros(()), "loss_type": "apo_zero_unpaired"}, ValueError,
         "kl: got a tensor, expected None with loss_type 'apo_zero_unpaired', which has no KL"),
        (bco_loss, (LOGPS, THREE), {"shift": math.nan}, ValueError, "shift: got nan, expected a finite number"),
        (bco_loss, (LOGPS, THREE), {"shift": LOGPS}, ValueError, "shift: got shape [3], expected []"),
        (bco_loss, (LOGPS, THREE), {"beta": -1}, ValueError, "beta: got -1"),
    ],
)  # fmt: skip
def test_bad_arguments(function, arguments, options, error, message) -> None:
    with pytest.raises(error, match=re.escape(message)):
        function(*arguments, **options)


MASK = torch.ones(3, TOKENS, dtype=torch.bool)
REFERENCE = {"ref_logps": LOGPS}


@pytest.mark.parametrize(
    ("loss", "inputs", "error", "message"),
    [
        (KTOLoss(), REFERENCE, ValueError, "inputs: got no labels, expected labels [3]"),
        (KTOLoss(), {"labels": THREE}, ValueError, "inputs: got no reference, expected one of ref_logprobs, ref_logps"),
        (KTOLoss(), {"labels": THREE, **REFERENCE, "ref_logprobs": LOGPS}, ValueError,
         "inputs: got ref_logprobs and ref_logps, expected one of"),
        (KTOLoss(reference_free=True), {"labels": THREE, **REFERENCE}, ValueError,
         "inputs: got ref_logps, expected none with reference_free=True"),
        (KTOLoss(), {"labels": THREE, **REFERENCE, "shift": LOGPS}, ValueError,
         "inputs: got shift, expected names out of labels, ref_logprobs, ref_logps, kl"),
        (KTOLoss(), {"labels": THREE[:2], **REFERENCE}, ValueError, "labels: got shape [2], expected [3]"),
        (KTOLoss(), {"labels": THREE, "ref_logprobs": LOGPS}, ValueError, "ref_logprobs: got shape [3], expected [3, 7]"),
        (KTOLoss(), {"labels": THREE, **REFERENCE, "kl": LOGPS[:2]}, ValueError, "kl: got shape [2]"),
        (BCOLoss(), {"labels": THREE, **REFERENCE, "shift": LOGPS}, ValueError, "shift: got shape [3], expected []"),
        (BCOLoss(), {"labels": THREE, **REFERENCE, "shift": THREE}, TypeError, "shift: got torch.bool"),
        (BCOLoss(), {"labels": THREE, **REFERENCE, "shift_count": torch.tensor(3)}, ValueError, "inputs: got shift_count"),
    ],
)  # fmt: skip
def test_bad_inputs(loss, inputs, error, message) -> None:
    with pytest.raises(error, match=re.escape(message)):
        loss.totals(MASK, inputs)


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (KTOLoss, {"loss_type": "dpo"}, ValueError, "loss_type: got 'dpo'"),
        (KTOLoss, {"average_log_prob": 1}, TypeError, "average_log_prob: got 1 of type int"),
        (BCOLoss, {"reference_free": None}, TypeError, "reference_free: got None"),
        (BCOLoss, {"shift_includes_batch": 0}, TypeError, "shift_includes_batch: got 0"),
        (BCOLoss, {"beta": math.inf}, ValueError, "beta: got inf"),
    ],
)
def test_bad_options(make, options, error, message) -> None:
    with pytest.raises(error, match=re.escape(message)):
        make(**options)
