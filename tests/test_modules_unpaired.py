"""The KTO and BCO modules equal their loss objects on whole logits, and liger-kernel's KTO where it is right."""

from __future__ import annotations

import copy
import inspect
import re
from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch import Tensor

from liger_losses.chunked import ScoredTokens
from liger_losses.functional import liger_fused_linear_bco, liger_fused_linear_kto
from liger_losses.losses import BCOLoss, KTOLoss
from liger_losses.losses.unpaired import UnpairedLoss
from liger_losses.modules import LigerFusedLinearBCOLoss, LigerFusedLinearKTOLoss

ROWS, TOKENS, HIDDEN, REF_HIDDEN, VOCAB = 6, 6, 8, 5, 13
KL = torch.linspace(0, 3, ROWS, dtype=torch.float64)
NAMES = tuple(f"{side}_{name}_sum" for name in ("logps", "logits", "rewards") for side in ("chosen", "rejected"))


@dataclass
class Case:
    hidden: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor
    labels: Tensor
    ref_hidden: Tensor
    ref_weight: Tensor
    ref_bias: Tensor

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        """In the order of `forward`, without kl."""
        return tuple(getattr(self, field.name) for field in fields(self))

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.hidden, self.weight, self.bias


def make_case(
    dtype: torch.dtype = torch.float64, ignore_index: int = -100, *, padded: bool = True, seed: int = 3
) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    target = torch.randint(0, VOCAB, (ROWS, TOKENS), generator=generator)
    if padded:
        lengths = torch.tensor([6, 3, 5, 2, 4, 1])
        target[torch.arange(TOKENS) >= lengths.unsqueeze(1)] = ignore_index
        target[1, 0] = ignore_index
    case = Case(
        normal(ROWS, TOKENS, HIDDEN), normal(VOCAB, HIDDEN), target, normal(VOCAB),
        torch.tensor([True, False, False, True, False, True]),
        normal(ROWS, TOKENS, REF_HIDDEN), normal(VOCAB, REF_HIDDEN), normal(VOCAB),
    )  # fmt: skip
    for leaf in case.leaves:
        leaf.requires_grad_()
    return case


def logits(hidden: Tensor, weight: Tensor, bias: Tensor, options: dict) -> Tensor:
    z, cap = options["logit_scale"] * (hidden @ weight.T + bias), options["softcap"]
    return (z if cap is None else cap * torch.tanh(z / cap)) / options["temperature"]


def naive(
    module: LigerFusedLinearKTOLoss | LigerFusedLinearBCOLoss,
    case: Case,
    loss: UnpairedLoss | None = None,
    **more: Tensor,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The loss object on statistics of whole logits."""
    loss = loss or module.loss
    policy, reference = module.options.policy(), module.options.reference()
    mask = case.target != policy["ignore_index"]
    index = case.target.masked_fill(~mask, 0).unsqueeze(-1)
    z = logits(case.hidden, case.weight, case.bias, policy)
    statistics = {
        "logprob": z.log_softmax(-1).gather(-1, index).squeeze(-1) * mask,
        "mean_logit": z.mean(-1) * mask,
    }
    inputs = {"labels": case.labels, **more}
    if not loss.reference_free:
        ref = logits(case.ref_hidden, case.ref_weight, case.ref_bias, reference).log_softmax(-1)
        inputs["ref_logprobs"] = ref.gather(-1, index).squeeze(-1) * mask
    value, metrics = loss(statistics, mask, inputs, loss.totals(mask, inputs))
    for side in ("chosen", "rejected"):
        metrics[f"{side}_logits_sum"] = VOCAB * metrics[f"{side}_mean_logits_sum"]
    return value, tuple(metrics[name] for name in NAMES)


def same(
    got: tuple[Tensor, tuple[Tensor, ...]], want: tuple[Tensor, tuple[Tensor, ...]], leaves: tuple[Tensor, ...]
) -> None:
    torch.testing.assert_close(got, want)
    assert not any(output.requires_grad for output in got[1])
    found, wanted = (torch.autograd.grad(1.7 * value, leaves, retain_graph=True) for value, _ in (got, want))
    torch.testing.assert_close(found, wanted)


OPTIONS = [
    {},
    {"average_log_prob": True, "beta": 0.5},
    {"temperature": 0.7, "softcap": 5.0, "logit_scale": 1.3},
    {"softcap": 5.0, "ref_softcap": 3.0, "ref_logit_scale": 0.5},
    {"memory_budget": 1 << 20, "compiled": False},
]
options_and_strategies = [
    pytest.mark.parametrize("options", OPTIONS, ids=str),
    pytest.mark.parametrize("strategy", ["auto", "cached", "recompute"]),
]


def everywhere(function):  # type: ignore[no-untyped-def]
    for mark in options_and_strategies:
        function = mark(function)
    return function


# KTO ----------------------------------------------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("kl", [None, KL], ids=["none", "rows"])
def test_kto(options: dict, strategy: str, kl: Tensor | None) -> None:
    case = make_case()
    module = LigerFusedLinearKTOLoss(use_ref_model=True, desirable_weight=0.6, **options, strategy=strategy)
    more = {} if kl is None else {"kl": kl}
    same(module(*case.arguments, **more), naive(module, case, **more), case.leaves)


@pytest.mark.parametrize("options", [{"loss_type": "apo_zero_unpaired"}, {"undesirable_weight": 0.0}], ids=str)
def test_kto_variants(options: dict) -> None:
    case = make_case()
    module = LigerFusedLinearKTOLoss(use_ref_model=True, **options)
    same(module(*case.arguments), naive(module, case), case.leaves)


@pytest.mark.parametrize(
    "kl", [torch.tensor(0.8), torch.tensor([0.8]), torch.full((ROWS,), 0.8)], ids=["[]", "[1]", "[R]"]
)
def test_one_kl_in_three_shapes(kl: Tensor) -> None:
    case = make_case()
    module = LigerFusedLinearKTOLoss(use_ref_model=True)
    same(module(*case.arguments, kl), naive(module, case, kl=torch.tensor(0.8)), case.leaves)


@pytest.mark.parametrize("kl", [None, KL], ids=["none", "rows"])
@pytest.mark.parametrize("chunk_size", [1, 2, 3, 4, 100])
def test_b14_x01_chunk_size_changes_nothing(chunk_size: int, kl: Tensor | None) -> None:
    """The loss, all six metrics and every gradient, with one kl a row."""
    case = make_case()
    module = LigerFusedLinearKTOLoss(use_ref_model=True, chunk_size=chunk_size, strategy="immediate")
    assert module.options.max_units == (None if chunk_size == 1 else chunk_size)
    more = {} if kl is None else {"kl": kl}
    same(module(*case.arguments, **more), naive(module, case, **more), case.leaves)


def test_x01_the_smallest_input() -> None:
    """Four rows of equal log-probability, labels T F T F, kl 0 to 3, beta 0.1: 0.5000 at every chunk size."""
    weight, hidden = torch.zeros(5, 3), torch.zeros(4, 2, 3)
    target, labels, kl = torch.zeros(4, 2, dtype=torch.int64), torch.tensor([True, False] * 2), torch.arange(4.0)
    u = -2 * torch.tensor(5.0).log()
    want = torch.where(labels, torch.sigmoid(-0.1 * (u - kl)), torch.sigmoid(0.1 * (u - kl))).mean()
    for chunk_size in (1, 2, 3, 4):
        loss, _ = LigerFusedLinearKTOLoss(chunk_size=chunk_size)(hidden, weight, target, None, labels, kl=kl)
        torch.testing.assert_close(loss, want)


def test_integer_labels() -> None:
    case = make_case()
    module = LigerFusedLinearKTOLoss(use_ref_model=True)
    for labels in (case.labels.int(), case.labels.to(torch.uint8), case.labels.long()):
        got = module(*case.arguments[:4], labels, *case.arguments[5:])
        torch.testing.assert_close(got, module(*case.arguments), rtol=0, atol=0)


def test_b15_a_reference_is_used_or_refused() -> None:
    """The class default of liger-kernel is reference-free: there a reference that is given is dropped in silence."""
    case = make_case()
    free = LigerFusedLinearKTOLoss()
    same(free(*case.arguments[:5]), naive(free, case), case.leaves)
    used = LigerFusedLinearKTOLoss(use_ref_model=True)
    assert not torch.isclose(used(*case.arguments)[0], free(*case.arguments[:5])[0])
    for given in ({"ref_input": case.ref_hidden}, {"ref_bias": case.ref_bias}, {"ref_logps": KL}):
        message = f"{next(iter(given))}: got a tensor with use_ref_model=False; construct LigerFusedLinearKTOLoss with use_ref_model=True"
        with pytest.raises(ValueError, match=message):
            free(*case.arguments[:5], **given)
    with pytest.raises(ValueError, match="use_ref_model=True: got no reference, expected either ref_input and"):
        used(*case.arguments[:5])


@pytest.mark.parametrize("module_type", [LigerFusedLinearKTOLoss, LigerFusedLinearBCOLoss])
@pytest.mark.parametrize("average", [False, True])
def test_b53_reference_known_in_advance(module_type: type, average: bool) -> None:
    case = make_case()
    mask = case.target != -100
    ref = logits(
        case.ref_hidden, case.ref_weight, case.ref_bias, {"logit_scale": 1.0, "softcap": None, "temperature": 1.0}
    )
    known = (
        ref.log_softmax(-1).gather(-1, case.target.clamp_min(0).unsqueeze(-1)).squeeze(-1).masked_fill(~mask, 0).sum(1)
    )
    if average:
        known = known / mask.sum(1)
    modules = [module_type(use_ref_model=True, average_log_prob=average) for _ in range(2)]
    want, got = modules[0](*case.arguments), modules[1](*case.arguments[:5], ref_logps=known)
    same(got, want, case.leaves)


@pytest.mark.parametrize("module_type", [LigerFusedLinearKTOLoss, LigerFusedLinearBCOLoss])
def test_b13_an_empty_row(module_type: type) -> None:
    case = make_case()
    case.target[2] = -100
    module = module_type(use_ref_model=True, average_log_prob=True)
    loss, outputs = module(*case.arguments)
    assert all(output.isfinite() for output in outputs)
    hidden, weight, _ = torch.autograd.grad(loss, case.leaves)
    assert weight.isfinite().all()
    assert (hidden[2] == 0).all()
    case.target[:] = -100
    loss, outputs = module.eval()(*case.arguments)
    assert loss.isfinite()
    assert all((gradient == 0).all() for gradient in torch.autograd.grad(loss, case.leaves))
    assert all((output == 0).all() for output in outputs)


def test_b27_logits_are_summed_over_scored_positions() -> None:
    case = make_case()
    z, mask = case.hidden @ case.weight.T + case.bias, case.target != -100
    _, outputs = LigerFusedLinearKTOLoss()(*case.arguments[:5])
    for output, rows in zip(outputs[2:4], (case.labels, ~case.labels), strict=True):
        torch.testing.assert_close(output, z[rows][mask[rows]].sum().detach())


@pytest.mark.parametrize("ignore_index", [-100, -1, 7])
def test_ignore_index(ignore_index: int) -> None:
    case, module = make_case(ignore_index=ignore_index), LigerFusedLinearKTOLoss(ignore_index=ignore_index)
    same(module(*case.arguments[:5]), naive(module, case), case.leaves)


@pytest.mark.parametrize("module_type", [LigerFusedLinearKTOLoss, LigerFusedLinearBCOLoss])
def test_nothing_of_the_callers_is_written_and_references_get_no_gradient(module_type: type) -> None:
    case = make_case()
    arguments = (*case.arguments, *([KL.clone()] if module_type is LigerFusedLinearKTOLoss else []))
    for tensor in arguments[5:8]:  # the reference's head
        tensor.requires_grad_()
    copies = [argument.detach().clone() for argument in arguments]
    module_type(use_ref_model=True)(*arguments)[0].backward()
    assert all(torch.equal(argument, copied) for argument, copied in zip(arguments, copies, strict=True))
    assert all(tensor.grad is None for tensor in arguments[5:])
    assert all(leaf.grad is not None for leaf in case.leaves)


@pytest.mark.parametrize("module_type", [LigerFusedLinearKTOLoss, LigerFusedLinearBCOLoss])
def test_compiles_into_one_graph(module_type: type) -> None:
    case = make_case()
    plain, compiled = (module_type(use_ref_model=True) for _ in range(2))
    got = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        same(got(*case.arguments), plain(*case.arguments), case.leaves)
    assert dict(plain.named_buffers()).keys() == dict(compiled.named_buffers()).keys()
    for ours, theirs in zip(plain.buffers(), compiled.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("module_type", [LigerFusedLinearKTOLoss, LigerFusedLinearBCOLoss])
def test_counts_read_ahead(module_type: type) -> None:
    case, module = make_case(), module_type(use_ref_model=True).eval()
    arguments = (*case.arguments[:2], ScoredTokens(case.target), *case.arguments[3:])
    torch.testing.assert_close(module(*arguments), module(*case.arguments))


@pytest.mark.parametrize(
    ("module_type", "function"),
    [(LigerFusedLinearKTOLoss, liger_fused_linear_kto), (LigerFusedLinearBCOLoss, liger_fused_linear_bco)],
)
def test_functional_is_the_module(module_type: type, function) -> None:
    case = make_case()
    expected = module_type(use_ref_model=True, beta=0.4, softcap=4.0)(*case.arguments)
    hidden, weight, target, bias, labels, *reference = case.arguments
    got = function(hidden, weight, target, labels, bias, *reference, beta=0.4, softcap=4.0)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    with pytest.raises(TypeError, match="soft_cap"):
        function(hidden, weight, target, labels, bias, *reference, soft_cap=4.0)


@pytest.mark.parametrize("module_type", [LigerFusedLinearKTOLoss, LigerFusedLinearBCOLoss])
def test_bfloat16_is_no_worse_than_naive_bfloat16(module_type: type) -> None:
    low = make_case(torch.bfloat16)
    exact = Case(*(a.detach().double() if a.is_floating_point() else a for a in low.arguments))
    for leaf in exact.leaves:
        leaf.requires_grad_()
    module = module_type(use_ref_model=True)
    truth, _ = naive(module, exact)
    loss, _ = module(*low.arguments)
    assert loss.dtype == torch.float32
    rough, _ = naive(module, low)
    assert abs(loss.double() - truth) <= 2 * abs(rough.double() - truth) + 1e-5 * truth.abs()
    gradients, truths, roughs = (
        torch.autograd.grad(value, case.leaves) for value, case in ((loss, low), (truth, exact), (rough, low))
    )
    for got, want, other in zip(gradients, truths, roughs, strict=True):
        assert got.dtype == torch.bfloat16
        error, naive_error = ((tensor.double() - want).abs().max() for tensor in (got, other))
        assert error <= 2 * naive_error + 2**-8 * want.abs().max()


# BCO ----------------------------------------------------------------------------------------------------------------


def rewards_mean(module: LigerFusedLinearBCOLoss, *cases: Case) -> float:
    """Mean reward over all rows of `cases`, from whole logits."""
    sums = [naive(module, case, BCOLoss(beta=module.loss.beta))[1][4:] for case in cases]
    return sum(chosen.item() + rejected.item() for chosen, rejected in sums) / (ROWS * len(cases))


@everywhere
@pytest.mark.parametrize("includes", [False, True])
def test_bco(options: dict, strategy: str, includes: bool) -> None:
    """Two steps: the second sees the first one's rewards."""
    module = LigerFusedLinearBCOLoss(shift_includes_batch=includes, **options, strategy=strategy)
    for step, seed in enumerate((3, 4)):
        case = make_case(seed=seed)
        more = {"shift": module.running_mean}
        if includes:
            more["shift_count"] = module.running_count
        want = naive(module, case, **more)
        same(module(*case.arguments), want, case.leaves)
        assert module.running_count == ROWS * (step + 1)


def test_bco_forgets_no_good_batch_over_a_bad_one() -> None:
    """fp16 that overflowed gives NaN for that batch alone: a gradient scaler skips its step, and no buffer skips back."""
    module = LigerFusedLinearBCOLoss(use_ref_model=False)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(4, 6, 8, generator=generator), torch.randn(11, 8, generator=generator)
    target, labels = torch.randint(0, 11, (4, 6), generator=generator), torch.tensor([True, False, True, False])
    module(hidden, weight, target, None, labels)
    kept = module.running_mean.clone(), module.running_count.clone()
    assert module(hidden * float("nan"), weight, target, None, labels)[0].isnan()
    assert torch.equal(module.running_mean, kept[0])
    assert torch.equal(module.running_count, kept[1])
    assert module(hidden, weight, target, None, labels)[0].isfinite()


def test_bco_buffers_can_be_made_without_memory() -> None:
    module = LigerFusedLinearBCOLoss().to("meta").to_empty(device="cpu")
    module.reset_parameters()
    assert module.running_mean == 0
    assert module.running_count == 0


def test_bco_running_mean() -> None:
    first, second = make_case(seed=3), make_case(seed=4)
    module = LigerFusedLinearBCOLoss(beta=0.3)
    module(*first.arguments)
    assert module.running_mean.item() == pytest.approx(rewards_mean(module, first), rel=1e-12)
    module(*second.arguments)
    assert module.running_mean.item() == pytest.approx(rewards_mean(module, first, second), rel=1e-12)
    with torch.no_grad():
        module(*second.arguments)  # training mode counts, gradients or not
    assert module.running_count == 3 * ROWS
    kept = copy.deepcopy(module.state_dict())
    module.eval()
    loss, _ = module(*first.arguments)
    assert torch.equal(loss, module(*first.arguments)[0])
    assert module.state_dict() == kept
    torch.testing.assert_close(loss, naive(module, first, BCOLoss(beta=0.3), shift=module.running_mean)[0])


def test_bco_shift_of_the_first_batch() -> None:
    case = make_case()
    before, after = LigerFusedLinearBCOLoss(shift_includes_batch=False), LigerFusedLinearBCOLoss()
    torch.testing.assert_close(before(*case.arguments)[0], naive(before, case, BCOLoss())[0])
    mean = torch.tensor(rewards_mean(after, case))
    torch.testing.assert_close(after(*case.arguments)[0], naive(after, case, BCOLoss(), shift=mean)[0])


def test_bco_backward_twice_after_two_forwards() -> None:
    """The second forward moves the running mean; the first one's graph keeps its own."""
    first, second = make_case(seed=3), make_case(seed=4)
    module = LigerFusedLinearBCOLoss()
    loss, _ = module(*first.arguments)
    early = torch.autograd.grad(loss, first.leaves, retain_graph=True)
    held, value = module.state_dict()["running_mean"], module.running_mean.item()
    module(*second.arguments)[0].backward()
    torch.testing.assert_close(torch.autograd.grad(loss, first.leaves), early, rtol=0, atol=0)
    assert held.item() == value != module.running_mean.item()


@pytest.mark.parametrize("includes", [False, True])
def test_bco_shift_given(includes: bool) -> None:
    case, shift = make_case(), torch.tensor(0.7)
    module = LigerFusedLinearBCOLoss(shift_includes_batch=includes)
    same(module(*case.arguments, shift=shift), naive(module, case, BCOLoss(), shift=shift), case.leaves)
    assert module.running_count == 0


@pytest.mark.parametrize("chunk_size", [2, 4, 100])
def test_bco_chunk_size(chunk_size: int) -> None:
    case = make_case()
    module = LigerFusedLinearBCOLoss(shift_includes_batch=False, chunk_size=chunk_size, strategy="immediate")
    module(*make_case(seed=5).arguments)
    want = naive(module, case, shift=module.running_mean)
    same(module(*case.arguments), want, case.leaves)


def test_bco_buffers_travel_and_stay_fp64() -> None:
    module = LigerFusedLinearBCOLoss()
    module(*make_case().arguments)
    mean = module.running_mean
    torch.nn.Sequential(module).to(torch.bfloat16)
    assert module.running_mean.dtype == torch.float64
    assert torch.equal(module.running_mean, mean)
    other = LigerFusedLinearBCOLoss()
    other.load_state_dict(module.state_dict())
    assert torch.equal(other.running_mean, mean)
    assert other.running_count == ROWS
    assert module.to("meta").running_mean.device.type == "meta"


# liger-kernel -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def liger() -> type:
    return pytest.importorskip("liger_kernel.chunked_loss.kto_loss", exc_type=ImportError).LigerFusedLinearKTOLoss


def test_interface_of_liger_kernel(liger: type) -> None:
    for function in ("__init__", "forward"):
        theirs = inspect.signature(getattr(liger, function)).parameters
        ours = inspect.signature(getattr(LigerFusedLinearKTOLoss, function)).parameters
        assert list(ours)[: len(theirs)] == list(theirs)
        assert {name: ours[name].default for name in theirs} == {name: p.default for name, p in theirs.items()}
        assert all(p.kind is p.KEYWORD_ONLY for p in list(ours.values())[len(theirs) :])


def test_argument_order_of_liger_kernels_function(liger: type) -> None:
    """Ours names a default for the labels, as the class does; without them both refuse."""
    from liger_kernel.chunked_loss.kto_loss import LigerFusedLinearKTOFunction

    theirs = list(inspect.signature(LigerFusedLinearKTOFunction.forward).parameters.values())[1:]  # without ctx
    ours = list(inspect.signature(liger_fused_linear_kto).parameters.values())
    for our, their in zip(ours, theirs, strict=False):
        assert our.name == their.name
        assert our.default == their.default or our.name == "preference_labels"
    assert all(p.kind is p.KEYWORD_ONLY for p in ours[len(theirs) :])


@pytest.mark.parametrize("average_log_prob", [False, True])
@pytest.mark.parametrize("use_ref_model", [False, True])
@pytest.mark.parametrize(
    ("kl", "chunk_size"), [(None, 1), (None, 3), (torch.tensor(0.6), 2), (KL.float(), ROWS)], ids=str
)
def test_equals_liger_kernel(
    liger: type, kl: Tensor | None, chunk_size: int, use_ref_model: bool, average_log_prob: bool
) -> None:
    """In fp32, which is what it computes in; a kl a row only with all rows in one chunk. Its logit sums count padding."""
    options = {"average_log_prob": average_log_prob, "use_ref_model": use_ref_model, "beta": 0.2, "compiled": False}
    for padded in (False, True):
        ours, theirs = (make_case(torch.float32, padded=padded) for _ in range(2))
        count = 8 if use_ref_model else 5
        loss, outputs = LigerFusedLinearKTOLoss(**options)(*ours.arguments[:count], kl=kl)
        expected, expected_outputs = liger(**options, chunk_size=chunk_size)(*theirs.arguments[:count], kl=kl)
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
        for index, (got, want) in enumerate(zip(outputs, expected_outputs, strict=True)):
            if not (padded and index in (2, 3)):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        loss.backward()
        expected.backward()
        for got, want in zip(ours.leaves, theirs.leaves, strict=True):
            torch.testing.assert_close(got.grad, want.grad, rtol=1e-3, atol=1e-5)


def test_where_liger_kernel_is_wrong(liger: type) -> None:
    case = make_case(torch.float32)
    plain = case.arguments[:5]
    ours = LigerFusedLinearKTOLoss(use_ref_model=True)

    # X01: a kl a row is subtracted whole from every chunk.
    want = naive(ours, case, kl=KL.float())[0]
    one, _ = liger(compiled=False, use_ref_model=True, chunk_size=1)(*case.arguments, KL.float())
    assert one > 3 * want
    with pytest.raises(RuntimeError, match="must match the size"):
        liger(compiled=False, use_ref_model=True, chunk_size=2)(*case.arguments, KL.float())
    # B15: with its class's default, a reference is dropped.
    assert torch.equal(liger(compiled=False)(*case.arguments)[0], liger(compiled=False)(*plain)[0])
    # B27: its sums of logits count prompts and padding.
    z = (case.hidden @ case.weight.T + case.bias).detach()
    torch.testing.assert_close(liger(compiled=False)(*plain)[1][2], z[case.labels].sum())
    # Labels fewer than rows: the last rows are left out of the loss, still divided by all.
    short, _ = liger(compiled=False)(*plain[:4], case.labels[:3])
    assert short < 0.8 * liger(compiled=False)(*plain)[0]
    # Labels of 0 and 1 that are integers.
    with pytest.raises(RuntimeError, match="boolean tensor"):
        liger(compiled=False)(*plain[:4], case.labels.long())
    # B13: a mean over no token.
    case.target[2] = -100
    assert liger(compiled=False, average_log_prob=True)(*plain)[0].isnan()
    # fp64 comes out as fp32.
    wide = make_case()
    assert liger(compiled=False)(*wide.arguments[:5])[0].dtype == torch.float32


# refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module_type", "options", "error", "message"),
    [
        (LigerFusedLinearKTOLoss, {"loss_type": "bco"}, ValueError, "loss_type: got 'bco', expected one of kto, apo_zero_unpaired"),
        (LigerFusedLinearKTOLoss, {"beta": 0.0}, ValueError, "beta: got 0.0"),
        (LigerFusedLinearKTOLoss, {"desirable_weight": -1}, ValueError, "desirable_weight: got -1"),
        (LigerFusedLinearKTOLoss, {"use_ref_model": 1}, TypeError, "use_ref_model: got 1"),
        (LigerFusedLinearKTOLoss, {"compiled": None}, TypeError, "compiled: got None"),
        (LigerFusedLinearKTOLoss, {"chunk_size": 0}, ValueError, "chunk_size: got 0"),
        (LigerFusedLinearKTOLoss, {"ref_softcap": 3.0}, ValueError, "ref_softcap: got 3.0 with use_ref_model=False"),
        (LigerFusedLinearKTOLoss, {"chunk_size": 2, "strategy": "cached"}, ValueError, "chunk_size: got 2 with strategy='cached'"),
        (LigerFusedLinearBCOLoss, {"chunk_size": 2}, ValueError, "chunk_size: got 2, expected 1 for shift_includes_batch=True"),
        (LigerFusedLinearBCOLoss, {"strategy": "immediate"}, ValueError, "strategy: got 'immediate' with shift_includes_batch=True"),
        (LigerFusedLinearBCOLoss, {"shift_includes_batch": 1}, TypeError, "shift_includes_batch: got 1"),
        (LigerFusedLinearBCOLoss, {"temperature": 0.0}, ValueError, "temperature: got 0.0"),
    ],
)  # fmt: skip
def test_bad_options(module_type, options, error, message) -> None:
    with pytest.raises(error, match=re.escape(message)):
        module_type(**options)


def test_bad_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is refused before the reference's head is projected, and before the running mean moves."""

    def unreachable(*args: object, **kwargs: object) -> None:
        raise AssertionError("work was done before the arguments were checked")

    monkeypatch.setattr("liger_losses.modules.base.linear_logprobs", unreachable)
    case = make_case()
    kto, bco = LigerFusedLinearKTOLoss(use_ref_model=True), LigerFusedLinearBCOLoss()

    def refused(
        error: type[Exception], message: str, module: torch.nn.Module = kto, *, kl=None, shift=None, **changed
    ) -> None:
        extra = {name: value for name, value in (("kl", kl), ("shift", shift)) if value is not None}
        with pytest.raises(error, match=re.escape(message)):
            module(*replace(case, **changed).arguments, **extra)

    for module in (kto, bco):
        refused(TypeError, "preference_labels: got None, expected a bool or integer tensor [6]", module, labels=None)
        refused(TypeError, "preference_labels: got torch.float64, expected a bool or", module, labels=KL)
        refused(ValueError, "preference_labels: got shape [5], expected [6]", module, labels=case.labels[:5])
        refused(ValueError, "preference_labels: got shape [6, 1], expected [6]", module, labels=case.labels[:, None])
        refused(ValueError, "preference_labels: got the value 2, expected 1", module, labels=2 * case.labels.long())
        refused(ValueError, "target: got shape [6], expected [rows, tokens]", module, target=case.target[:, 0])
        refused(TypeError, "target: got list", module, target=case.target.tolist())
        refused(ValueError, "ref_weight: got None", module, ref_weight=None)
        refused(
            ValueError,
            "target: got 13 at row 0",
            module,
            target=case.target.masked_fill(case.target == case.target[0, 0], VOCAB),
        )
        refused(ValueError, "lin_weight: got shape", module, weight=case.hidden)
    refused(ValueError, "kl: got shape [2], expected [] or [1] or [6]", kl=KL[:2])
    refused(TypeError, "kl: got torch.int64, expected a floating-point tensor", kl=KL.long())
    refused(ValueError, "shift: got shape [6], expected []", bco, shift=KL)
    refused(ValueError, "kl: got a tensor, expected None with loss_type 'apo_zero_unpaired'",
            LigerFusedLinearKTOLoss(use_ref_model=True, loss_type="apo_zero_unpaired"), kl=KL)  # fmt: skip
    with pytest.raises(ValueError, match=r"ref_logps: got shape \[5\], expected \[6\]"):
        kto(*case.arguments[:5], ref_logps=KL[:5])
    assert bco.running_count == 0


def test_the_loss_objects_are_public() -> None:
    assert LigerFusedLinearKTOLoss().loss == KTOLoss(reference_free=True)
    assert LigerFusedLinearBCOLoss().loss == BCOLoss(shift_includes_batch=True)
    assert "KTOLoss(beta=0.1" in repr(LigerFusedLinearKTOLoss())
