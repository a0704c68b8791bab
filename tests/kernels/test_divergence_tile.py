"""`divergence_tile` and `divergence_gradient` against the formulas and autograd in fp64."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_losses.kernels import (
    Columns,
    Divergence,
    DivergenceState,
    TeacherTile,
    divergence_gradient,
    divergence_sums,
    divergence_tile,
    implementation,
    tile_statistics,
    visit_bytes,
)
from liger_losses.kernels.dispatch import use_triton
from liger_losses.testing.oracle import rounding_of

from ..chunked.test_cost import Allocations
from ..distillation_oracle import KINDS, NAMES, label_of, unfused_distillation
from ..oracle import check_close, largest, transformed
from .conftest import INTERPRETED
from .test_tile_statistics import BF16, F16, F32, ROWS, VOCABS, as_transform, make_tile, options_of, rows_of

TEACHER = {"plain": {}, "all": {"softcap": 7.0, "logit_scale": 0.8}, "rows": {"logit_scale": 0.5}}
AKL = Divergence(kind="akl")


def teacher_of(tile: Tensor, vocab: int, *, aligned: bool, spread: float = 1.0) -> Tensor:
    """A teacher near the student, with as many columns as it is told."""
    generator = torch.Generator().manual_seed(vocab + 1)
    logits = rows_of(len(tile), vocab, tile.dtype, str(tile.device), aligned=aligned)
    logits.copy_(spread * torch.randn(len(tile), vocab, generator=generator))
    both = min(vocab, tile.shape[1])
    logits[:, :both] += tile[:, :both]
    return logits


def visit(
    tile: Tensor, bias: Tensor | None, target: Tensor, teacher: TeacherTile, options: Divergence,
    transform: dict[str, Any], out: Tensor | None = None, names: tuple[str, ...] = NAMES,
) -> DivergenceState:  # fmt: skip
    kind = torch.float64 if tile.dtype == torch.float64 else F32
    state = DivergenceState(len(tile), names, options, device=tile.device, dtype=kind)
    columns = Columns.of(tile.shape[1], teacher.logits.shape[1], options.vocabulary)
    divergence_tile(tile, bias, target, teacher, state, as_transform(transform), columns, out=out)
    return state


def size_of_gradient(exact: dict[str, Tensor], options: Divergence, slope: float) -> float:
    """What a relative rounding of every logit moves an entry of `d distillation / d tile` by, in roundings.

    An entry of `dD/dz` is `s (f(x) - sum s f)`, `x = log s - log t`. Logits of size L leave either logarithm off by L
    roundings, and so the entry by L times itself (it is proportional to s) and L times `s |f'(x)|`: t for forward KL, s
    for reverse KL, at most `s + t` for their sums and mixtures, `t^alpha s^(1 - alpha)` for alpha. Of the label's
    `p - 1` it is p.
    """
    inverse_student, inverse_teacher = options.inverse_temperatures
    z_s, z_t = exact["student"] * inverse_student, exact["teacher"] * inverse_teacher
    size, s, t = largest(z_s) + largest(z_t), z_s.softmax(-1), z_t.softmax(-1)
    if options.kind == "alpha":
        steepest = largest(t**options.alpha * s ** (1 - options.alpha))
    elif options.kind == "cosine":  # (cos a / |a| - b / |b|) / |a|
        norms = [float(z.norm(dim=-1).min()) for z in (z_s, z_t)]
        steepest = 2 / (norms[0] * min(norms))
    else:
        steepest = 2 / s.shape[-1] if options.kind == "mse" else largest(s + t)
    soft = options.weight * inverse_student * size * steepest
    hard = options.hard_weight * largest(exact["student"]) * largest(exact["student"].softmax(-1))
    return slope * (soft + hard) + size * largest(exact["out"])


def least(temperature: float | Tensor) -> float:
    return float(torch.as_tensor(temperature).min())


def is_refused(tile: Tensor, options: Divergence) -> bool:
    """Whether the kind has no Triton form where that is what runs: then it says so."""
    if options.form != "akl" or not use_triton(tile):
        return False
    target = torch.zeros(len(tile), dtype=torch.int64, device=tile.device)
    with pytest.raises(RuntimeError, match="requested for kind 'akl', which only the torch form computes"):
        visit(tile, None, target, TeacherTile(tile), options, {})
    return True


@pytest.mark.parametrize(
    ("dtype", "written"), [(F32, F32), (F32, BF16), (BF16, BF16)][INTERPRETED : 3 - INTERPRETED], ids=str
)
@pytest.mark.parametrize("options", KINDS, ids=label_of)
def test_every_kind(device: str, options: Divergence, dtype: torch.dtype, written: torch.dtype) -> None:
    cases = list(zip(TEACHER, (VOCABS[device][-1], 257, 64), (True, False, True), strict=True))
    if INTERPRETED:  # every kind and every case, though not every pair of them
        cases = [cases[KINDS.index(options) % 3]]
    for transform, vocab, aligned in cases:
        chosen = options_of(transform, device)
        tile, bias, target = make_tile(vocab, dtype, device, aligned=aligned, bias=aligned)
        if is_refused(tile, options):
            return
        logits = teacher_of(tile, vocab, aligned=aligned)
        shift = torch.linspace(-1, 1, vocab, device=device) if aligned else None
        teacher = TeacherTile(logits, shift, as_transform(TEACHER[transform]))
        factor = torch.tensor([1.0, -2.0, 0.5, 0.0, 1.0], device=device)
        exact: dict[str, Tensor] = {}
        naive: dict[str, Tensor] = {}
        for kind, result in ((torch.float64, exact), (F32, naive)):
            raw = tile.detach().to(kind).requires_grad_()
            student = transformed(raw if bias is None else raw + bias.to(kind), **chosen)
            other = transformed(logits.to(kind) + (0 if shift is None else shift.to(kind)), **TEACHER[transform])
            result |= unfused_distillation(student, other, target, options)
            result["out"] = torch.autograd.grad(result["distillation"].sum(), raw)[0]
            result |= {"student": student.detach(), "teacher": other}
        out = rows_of(ROWS, vocab, written, device, aligned=aligned, fill=math.nan)
        state = visit(tile, bias, target, teacher, options, chosen, out)
        got = state.statistics(vocab)
        assert tuple(got) == NAMES
        size = (largest(exact["student"]) + largest(exact["teacher"])) ** (2 if options.kind == "mse" else 1)
        size *= 1 + options.weight + largest(exact["divergence"])
        for name, value in got.items():
            check_close(value, exact[name].detach(), naive[name].detach(), F32, terms=vocab, scale=size, what=name)
        size = size_of_gradient(exact, options, chosen.get("logit_scale", 1.0) / least(chosen.get("temperature", 1.0)))
        # From fp32 logits in fp32, then rounded once.
        size = largest(exact["out"]) + size * rounding_of(F32, 8) / rounding_of(written, 8)
        check_close(out, exact["out"], naive["out"], written, terms=8, scale=size, what="gradient")

        # The same from blocks of columns, with what the visit left.
        kept = DivergenceState.of_kept(state.lse, options)
        blocks = rows_of(ROWS, vocab, written, device, aligned=aligned, fill=math.nan)
        step = 152 if aligned else 150
        for start in range(0, vocab, step):
            block = slice(start, min(start + step, vocab))
            part = TeacherTile(logits[:, block], None if shift is None else shift[block], teacher.transform)
            divergence_gradient(
                tile[:, block], None if bias is None else bias[block], target, part, kept, as_transform(chosen),
                Columns.of(vocab, vocab, "shared").block(block.start, block.stop), factor=factor, out=blocks[:, block],
                first_column=start,
            )  # fmt: skip
        want, other = (result["out"] * factor.unsqueeze(-1).to(result["out"].dtype) for result in (exact, naive))
        check_close(blocks, want, other, written, terms=8, scale=2 * size, what="gradient of blocks")


@pytest.mark.parametrize("written", [False, True])
def test_a_cosine_without_direction(device: str, written: bool) -> None:
    """0, or 1 with its like, and without gradient; the one that is no number stays none."""
    tile, teacher = torch.randn(2, 5, 40, generator=torch.Generator().manual_seed(3)).to(device)
    tile[0], teacher[1], tile[2], teacher[2], tile[4, 0] = 0, 0, 0, 0, float("nan")
    out, options = torch.full_like(tile, float("nan")), Divergence(kind="cosine")
    state = visit(tile, None, torch.zeros(5, dtype=torch.int64, device=device), TeacherTile(teacher), options, {},
                  out if written else None, ("divergence",))  # fmt: skip
    expected = 1 - torch.nn.functional.cosine_similarity(tile, teacher, dim=-1)
    expected[2] = 0
    torch.testing.assert_close(state.value, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert not written or (out[:3] == 0).all()
    assert not written or (out[3] != 0).all()


_SOFTMAXES = [options for options in KINDS if options.form not in ("cosine", "mse", "akl")]  # not of whole rows


@pytest.mark.parametrize("options", _SOFTMAXES[2::4] if INTERPRETED else _SOFTMAXES, ids=label_of)
def test_sums_of_blocks_of_columns(device: str, options: Divergence) -> None:
    vocab, cut, aligned = 264, (136, 96)[KINDS.index(options) % 2], KINDS.index(options) % 2 == 0
    chosen = options_of("all" if aligned else "plain", device)
    tile, bias, target = make_tile(vocab, F32, device, aligned=True, bias=aligned)
    logits = teacher_of(tile, vocab, aligned=True)
    whole = visit(tile, bias, target, TeacherTile(logits), options, chosen, names=("distillation",))
    # S in the forms of a whole row that need no sum is known up to rounding: in fp64 all of it is.
    with implementation("torch"):
        exact = visit(
            tile.cpu().double(), None if bias is None else bias.cpu().double(), target.cpu(),
            TeacherTile(logits.cpu().double()), options, options_of("all" if aligned else "plain", "cpu"),
        ) if not INTERPRETED else whole  # fmt: skip
    found = torch.zeros(2, ROWS, device=device)
    for block in (slice(0, cut), slice(cut, vocab)):
        part = DivergenceState(ROWS, (), options, device=tile.device, dtype=F32)
        part.lse.copy_(whole.lse)
        part.sums.fill_(math.nan)
        divergence_sums(
            tile[:, block], None if bias is None else bias[block], TeacherTile(logits[:, block]), part,
            as_transform(chosen),
        )  # fmt: skip
        found += torch.stack([part.value, part.total])
    expected = torch.stack([exact.value, exact.total]).to(found)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("vocabulary", ["shared", "padded"])
@pytest.mark.parametrize(("columns", "teacher_columns"), [(150, 201), (201, 150)])
def test_vocabularies_of_two_sizes(device: str, columns: int, teacher_columns: int, vocabulary: str) -> None:
    for kind in (
        ("forward_kl", "reverse_kl", "cosine") if INTERPRETED else ("forward_kl", "reverse_kl", "jsd", "tvd", "cosine")
    ):
        if kind == "cosine" and vocabulary == "padded":
            continue  # refused
        options = Divergence(kind=kind, vocabulary=vocabulary, hard_weight=0.5)
        tile, bias, target = make_tile(columns, F32, device)
        logits = teacher_of(tile, teacher_columns, aligned=True)
        out = rows_of(ROWS, columns, F32, device, aligned=True, fill=math.nan)
        got = visit(tile, bias, target, TeacherTile(logits), options, {}, out).statistics(columns)
        infinite = vocabulary == "padded" and kind == ("forward_kl" if columns < teacher_columns else "reverse_kl")
        raw = tile.double().requires_grad_()
        assert bias is not None
        exact = unfused_distillation(raw + bias.double(), logits.double(), target, options)
        torch.testing.assert_close(got["divergence"].double(), exact["divergence"].detach(), rtol=1e-5, atol=1e-6)
        assert got["divergence"].isinf().all().item() == infinite
        if not (infinite or vocabulary == "padded"):
            want = torch.autograd.grad(exact["distillation"].sum(), raw)[0]
            torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=2e-6)
        assert out.isfinite().all()


@pytest.mark.parametrize("options", [*KINDS[:12], AKL], ids=label_of)
def test_zero_probabilities(device: str, options: Divergence) -> None:
    """Columns that one side, or both, give probability 0: the formula's limits, never NaN."""
    vocab, ninf = 40, -math.inf
    tile, _, target = make_tile(vocab, F32, device, bias=False)
    if is_refused(tile, options):
        return
    logits = teacher_of(tile, vocab, aligned=True)
    target[:] = 5
    tile[:, 7] = logits[:, 7] = ninf  # both
    tile[1, 9] = tile[4, 11] = ninf  # the student's
    logits[2, 3] = logits[4, 4] = ninf  # the teacher's
    out = torch.full_like(tile, math.nan)
    got = visit(tile, None, target, TeacherTile(logits), options, {}, out).statistics(vocab)
    assert not any(value.isnan().any() for value in got.values())
    assert out.isfinite().all()
    exact = unfused_distillation(tile.double(), logits.double(), target, options)
    value = exact["divergence"]
    if options.kind in ("jeffreys", "akl"):
        value = torch.tensor([1.0, math.inf, math.inf, 1.0, math.inf], dtype=torch.float64, device=device) * value
    if not value.isnan().any():
        torch.testing.assert_close(got["divergence"].double(), value, rtol=1e-5, atol=1e-6)
    form = {"forward_kl": (1, 4), "reverse_kl": (2, 4), "jeffreys": (1, 2, 4), "akl": (1, 2, 4)}.get(options.form, ())
    if options.form != "alpha":
        assert got["divergence"].isinf().nonzero().flatten().tolist() == list(form)


@pytest.mark.parametrize("options", [*KINDS[: 14 : 3 if INTERPRETED else 1], AKL], ids=label_of)
def test_equal_models_and_nearly_equal_ones(device: str, options: Divergence) -> None:
    if options.teacher_temperature is not None:
        options = Divergence(kind=options.kind)
    pure = {"kind": options.kind, "temperature": options.temperature}
    own = {name: getattr(options, name) for name in ("beta", "skew", "alpha", "mu")}
    options = Divergence(**pure, **own)
    vocab = VOCABS[device][-1]
    tile, _, target = make_tile(vocab, F32, device, bias=False)
    if is_refused(tile, options):
        return
    out = torch.full_like(tile, math.nan)
    got = visit(tile, None, target, TeacherTile(tile.clone()), options, {}, out).statistics(vocab)
    assert torch.equal(got["divergence"], torch.zeros_like(got["divergence"]))
    assert largest(out) <= 1e-6
    for spread in (1e-1, 1e-3, 1e-5)[: 2 if INTERPRETED else 3]:
        logits = teacher_of(tile, vocab, aligned=True, spread=spread)
        value = visit(tile, None, target, TeacherTile(logits), options, {}).statistics(vocab)["divergence"]
        assert (value >= 0).all()
        exact = unfused_distillation(tile.double(), logits.double(), target, options)["divergence"]
        # A log-ratio of size `spread` is the difference of two rounded logits.
        rounding = 2.0**-23 * largest(tile) / options.temperature
        bound = (1e-5 + 8 * rounding / spread) * exact + rounding**2 if options.kind != "tvd" else 1e-6
        assert ((value.double() - exact).abs() <= bound).all(), spread


def test_teacher_forms_agree(device: str) -> None:
    """Logits, log-probabilities and probabilities of one teacher, under a temperature."""
    options = Divergence(kind="jsd", temperature=2.0)
    tile, bias, target = make_tile(64, F32, device)
    logits = teacher_of(tile, 64, aligned=True)
    forms = (
        TeacherTile(logits),
        TeacherTile(logits.log_softmax(-1)),
        TeacherTile(logits.softmax(-1), probabilities=True),
    )
    first, *others = (visit(tile, bias, target, form, options, {}).statistics(64) for form in forms)
    for other in others:
        for name in NAMES:
            torch.testing.assert_close(other[name], first[name], rtol=2e-5, atol=2e-6)


def test_large_logits_and_a_peak_after_the_first_block(device: str) -> None:
    options = Divergence(kind="jsd", hard_weight=0.5)
    tile, _, target = make_tile(300, F32, device, bias=False)
    logits = teacher_of(tile, 300, aligned=True)
    tile[:, 250] += 200
    logits[:, 240] += 300
    out = torch.full_like(tile, math.nan)
    raw = tile.double().requires_grad_()
    exact = unfused_distillation(raw, logits.double(), target, options)
    got = visit(tile, None, target, TeacherTile(logits), options, {}, out).statistics(300)
    torch.testing.assert_close(got["divergence"].double(), exact["divergence"].detach(), rtol=1e-5, atol=1e-6)
    want = torch.autograd.grad(exact["distillation"].sum(), raw)[0]
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)


def test_a_target_out_of_range_is_nan(device: str) -> None:
    tile, _, target = make_tile(64, F32, device, bias=False)
    target[1], target[2] = 64, -5
    logits = teacher_of(tile, 64, aligned=True)
    got = visit(tile, None, target, TeacherTile(logits), Divergence(hard_weight=1.0), {}).statistics(64)
    assert got["distillation"].isnan().tolist() == [False, True, True, False, False]
    assert not got["divergence"].isnan().any()


def test_what_a_visit_takes_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted on the CPU, in tensors of a slice."""
    options, rows = AKL, 4
    promised = visit_bytes(options, torch.device("cuda"))
    assert visit_bytes(options, torch.device("cpu")) == visit_bytes(Divergence(), torch.device("cuda")) == 0
    monkeypatch.setattr(tile_statistics, "TWIN_ELEMENTS", rows * 512)
    tile, _, target = make_tile(512, F32, "cpu", bias=False, rows=rows)
    teacher, out = TeacherTile(teacher_of(tile, 512, aligned=True)), torch.empty_like(tile)
    state = DivergenceState(rows, NAMES, options, device=tile.device, dtype=F32)
    with Allocations(tile, teacher.logits, out, target) as seen:
        divergence_tile(tile, None, target, teacher, state, as_transform({}), Columns.of(512, 512, "shared"), out=out)
    tensors = promised / (8 * 4 * (1 << 19))
    assert tensors - 2 <= seen.peak / tile.nbytes <= tensors


def test_the_bound_sees_a_gradient_without_its_total(device: str) -> None:
    options, vocab = Divergence(kind="reverse_kl"), 64
    tile, _, target = make_tile(vocab, F32, device, bias=False)
    teacher = TeacherTile(teacher_of(tile, vocab, aligned=True))
    raw = tile.double().requires_grad_()
    exact = unfused_distillation(raw, teacher.logits.double(), target, options)
    exact["out"] = torch.autograd.grad(exact["distillation"].sum(), raw)[0]
    exact |= {"student": tile.double(), "teacher": teacher.logits.double()}
    kept = DivergenceState.of_kept(visit(tile, None, target, teacher, options, {}).lse, options)
    for factor in (1.0, 1.001, 0.0):
        wrong, out = DivergenceState.of_kept(kept.lse, options), torch.empty_like(tile)
        wrong.total *= factor
        divergence_gradient(
            tile, None, target, teacher, wrong, as_transform({}), Columns.of(vocab, vocab, "shared"),
            factor=torch.ones(ROWS, device=device), out=out,
        )  # fmt: skip
        size = size_of_gradient(exact, options, 1.0)
        with pytest.raises(AssertionError, match="gradient: error") if factor != 1 else contextlib.nullcontext():
            check_close(out, exact["out"], exact["out"], F32, terms=8, scale=size, what="gradient")


def test_fp16_and_in_place(device: str) -> None:
    tile, bias, target = make_tile(257, F16, device)
    logits = teacher_of(tile, 257, aligned=True)
    apart = torch.empty_like(tile)
    options = Divergence(kind="jsd")
    visit(tile, bias, target, TeacherTile(logits), options, {}, apart)
    visit(tile, bias, target, TeacherTile(logits), options, {}, tile)
    assert torch.equal(tile, apart)
    assert apart.isfinite().all()


@pytest.mark.parametrize("peak", [None, 12.0, 100.0])
@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_jsd_whatever_the_first_block_says_of_the_rest(device: str, beta: float, peak: float | None) -> None:
    """JSD's `S` is summed about the ratio of the normalisers in the first block and at the target: near it by a series,
    else once more. The target may hold all of either's mass, or none."""
    block = 128 if INTERPRETED else 2048
    vocab, options = 2 * block + 40, Divergence(kind="jsd", beta=beta)
    generator = torch.Generator().manual_seed(7)
    tile, logits = (torch.randn(9, vocab, generator=generator).to(device) for _ in range(2))
    apart = torch.tensor([0.0, 1e-3, 0.1, -0.1, 0.2, -0.3, 0.6, 4.0, -30.0], device=device)
    logits[:, block:] += apart.unsqueeze(-1)
    tile[0, :block], logits[1, :block] = -math.inf, -math.inf  # no ratio at all
    out = torch.full_like(tile, math.nan)
    target = torch.zeros(9, dtype=torch.int64, device=device)
    if peak is not None:
        target[:] = torch.tensor([block + 3, 5, -100, vocab - 1, vocab - 2, block, vocab + 7, 9, block + 70])
        tile[1:, block + 3], logits[:-1, vocab - 1] = peak, peak
        tile[4:7, vocab - 2], logits[4:8, vocab - 2] = peak, 1.5 * peak
    state = visit(tile, None, target, TeacherTile(logits), options, {}, out)
    raw = tile.double().requires_grad_()
    s, t = raw.log_softmax(-1), logits.double().log_softmax(-1)
    m = torch.logaddexp(s + math.log1p(-beta), t + math.log(beta))
    exact = unfused_distillation(raw, logits.double(), target.clamp(0, vocab - 1), options)["divergence"]
    want = torch.autograd.grad(exact.sum(), raw)[0]
    total = (1 - beta) * torch.where(s > -math.inf, s.exp() * (s - m), 0).sum(-1)
    torch.testing.assert_close(state.total.double(), total.detach(), rtol=0, atol=3e-6)
    torch.testing.assert_close(state.value.double(), exact.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=3e-6)
