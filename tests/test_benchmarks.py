"""The benchmark harness, at shapes that a CPU runs in a moment."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import active, distributed, layers, measure, results, stand_ins, trainers
from benchmarks.__main__ import main
from benchmarks.cases import CASES, WORKLOADS, Case, Head, Inputs, make_inputs
from benchmarks.distillation import whole_logits
from benchmarks.implementations import NAIVE, PEERS, Implementation, Step, from_logprobs, full_logprobs
from benchmarks.oracle import errors, relative_error, truth
from benchmarks.ours import OURS, minimum_budget

CPU = torch.device("cpu")
TINY = [case for case in CASES.values() if case.head.name == "tiny"]
EACH_TINY = [pytest.param(case, id=case.name) for case in TINY]


@pytest.mark.parametrize("case", EACH_TINY)
def test_the_oracle_is_what_autograd_says_of_unfused_logits(case: Case) -> None:
    inputs = make_inputs(case, CPU, dtype=torch.float64)
    true = truth(case, inputs, chunk=7)

    def logprobs(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        logits = torch.log_softmax(hidden @ weight.T, -1)
        found = logits.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return found.where(target >= 0, 0.0)

    plain = whole_logits(case, inputs, torch.float64) if case.distills else from_logprobs(logprobs)(case, inputs, None)
    loss = measure.train(plain, inputs)
    found = errors(loss.item(), inputs, true)
    assert found.keys() == ({"loss", "hidden"} if case.frozen else {"loss", "hidden", "weight"})
    assert max(found.values()) < 1e-6  # the gradients of the truth are kept in fp32
    scored = inputs.target >= 0
    assert scored.sum() == case.scored
    torch.testing.assert_close(logprobs(inputs.hidden, inputs.weight, inputs.target)[scored].detach(), true.logprobs)


def test_relative_error() -> None:
    ref = torch.randn(30, 4)
    assert relative_error(ref * 1.5, ref, rows=7) == pytest.approx(0.5)
    assert relative_error(None, ref) != relative_error(None, ref)  # NaN


@pytest.mark.parametrize("case", EACH_TINY)
def test_peers_are_measured(case: Case) -> None:
    report = measure.run_case(case, PEERS, CPU, repeats=2)
    rows = {row["implementation"]: row for row in report["rows"]}
    products = 3 + WORKLOADS[case.workload].reference - case.frozen
    assert len(report["floor"]["products_ms"]) == products
    assert rows[NAIVE.name]["status"] == "ok"
    assert len(rows[NAIVE.name]["times_ms"]) == 2
    assert rows[NAIVE.name]["floor_ratio"] == rows[NAIVE.name]["ms"] / report["floor"]["ms"]
    assert rows[NAIVE.name]["extra_bytes"] is None  # no such count on a CPU
    for row in rows.values():
        ran = row["status"] in ("ok", "outside the error bound")  # liger-kernel's distillation is
        assert ran == ("ms" in row)
        assert ran or row["status"].startswith(("missing: ", "needs a CUDA device"))
    assert ("liger-kernel, compiled" in rows) == (case.workload != "ce")
    assert ("TRL chunked divergence" if case.distills else "TRL fused head") in rows
    assert not measure.failed(report)  # peers fail nobody's run
    assert all(f"| {name}" in "\n".join(results.table(report)) for name in rows)


@pytest.mark.parametrize("case", EACH_TINY)
def test_ours_pass_the_gate(case: Case) -> None:
    pytest.importorskip("liger_losses.losses")
    report = measure.run_case(case, OURS, CPU, repeats=1)
    assert [row["status"] for row in report["rows"]] == ["ok"] * sum(one.applies(case) for one in OURS)
    assert all("ms" in row and row["predicted_bytes"] > 0 for row in report["rows"])


def _scaled(factor: float) -> Implementation:
    """Full logits whose gradients, but not whose loss, are off by a factor."""

    def build(case: Case, inputs: Inputs, memory_budget: int | None) -> Step:
        step = NAIVE.build(case, inputs, memory_budget)

        def scaled() -> Tensor:
            loss = step()
            return loss.detach() + factor * (loss - loss.detach())

        return scaled

    return Implementation("scaled", build, ours=True)


def test_a_wrong_gradient_of_ours_is_not_timed_and_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.__main__.IMPLEMENTATIONS", (NAIVE, _scaled(1.02)))
    assert main(["--case", "ce-96/tiny", "--repeats", "1", "--out", str(tmp_path)]) == 1
    (path,) = tmp_path.iterdir()
    for report in json.loads(path.read_text())["cases"]:
        naive, wrong = report["rows"]
        assert "ms" in naive
        assert "ms" not in wrong
        assert wrong["status"] == "outside the error bound"
        assert wrong["errors"]["hidden"] == pytest.approx(0.02, rel=0.2)


def test_a_wrong_peer_is_timed_and_flagged() -> None:
    case = CASES["ce-96/tiny"]
    report = measure.run_case(case, [replace(_scaled(1.02), ours=False)], CPU, repeats=1)
    (row,) = report["rows"]
    assert row["status"] == "outside the error bound"
    assert row["ms"] > 0
    assert not measure.failed(report)


def test_a_failure_is_a_row_and_the_others_are_still_measured() -> None:
    def build(case: Case, inputs: Inputs, memory_budget: int | None) -> Step:
        raise RuntimeError("out of everything\nand more")

    missing = Implementation("missing", from_logprobs(full_logprobs), module="no_such_module_anywhere")
    rows = [Implementation("broken", build, ours=True), missing, NAIVE]
    report = measure.run_case(CASES["ce-96/tiny"], rows, CPU, repeats=1)
    assert report["rows"][0]["status"] == "failed: RuntimeError: out of everything"
    assert report["rows"][1]["status"].startswith("missing: No module named")
    assert report["rows"][2]["ms"] > 0
    assert measure.failed(report) == ["ce-96/tiny: broken"]


def test_minimum_memory_is_a_share_of_what_trl_needed() -> None:
    assert minimum_budget({"TRL fused head": 6 << 20, "liger-kernel": 1}) == 1 << 20
    assert minimum_budget({}) == 400 << 20


def test_a_run_becomes_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.__main__.IMPLEMENTATIONS", (NAIVE,))
    out = tmp_path / "out"
    assert main(["run", "--case", "tiny", "--repeats", "1", "--out", str(out), "--commit", "abc"]) == 0
    (path,) = out.iterdir()
    record = json.loads(path.read_text())
    assert record["command"] == "python -m benchmarks run --case tiny --repeats 1"
    assert record["environment"]["commit"] == "abc"
    assert record["environment"]["packages"]["torch"] == torch.__version__
    page = tmp_path / "docs" / "benchmarks.md"
    assert main(["report", str(path), "--page", str(page)]) == 0
    text = page.read_text()
    assert "\n## Losses, CPU" in text
    for case in TINY:
        name, _, rest = case.title.partition(": ")
        assert f"\n### {name}\n\n{rest}.\n" in text
    assert str(tmp_path) not in text + path.read_text()


def test_newest_takes_one_record_a_device_and_kind_and_no_profile(tmp_path: Path) -> None:
    def write(device: str, date: str, key: str) -> None:
        results.save(
            {"environment": {"device": device, "date": date}, key: date}, tmp_path, "" if key == "cases" else "-p"
        )

    for device, date in (("B", "2026-01-02"), ("B", "2026-01-10"), ("A", "2026-01-03")):
        write(device, date, "cases")
    write("A", "2026-02-01", "profile")
    assert [record["cases"] for record in results.newest(tmp_path)] == ["2026-01-03", "2026-01-10"]


@pytest.mark.parametrize(
    "arguments",
    [["--case", "nothing"], ["--device", "cpu"], ["profile", "--device", "cpu"], ["profile", "--impl", "no"]],
)
def test_what_cannot_run_is_refused(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_layers_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layers", "--device", "cpu", "--repeats", "2", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    record = json.loads(path.read_text())
    assert [report["case"] for report in record["layers"]] == [case.name for case in layers.TINY]
    for report in record["layers"]:
        ours = report["rows"][-1]
        assert ours["implementation"] == "ours"
        assert len(ours["times_ms"]) == 2
        assert ours["floor_ratio"] == ours["ms"] / report["floor_ms"]
    assert "% of the floor" in capsys.readouterr().out
    page = tmp_path / "page.md"
    assert main(["report", str(path), "--page", str(page)]) == 0
    text = page.read_text()
    assert all(f"### {case.name}" in text for case in layers.TINY)
    assert "| ours |" in text
    assert main(["layers", "--device", "cpu", "--case", "nothing", "--out", str(tmp_path)]) == 2


def test_the_active_vocabulary_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["active", "--device", "cpu", "--repeats", "1", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    record = json.loads(path.read_text())
    assert [report["case"] for report in record["cases"]] == [case.name for case in active.SMALL]
    for report in record["cases"]:
        exact, *rest = (row for row in report["rows"] if row["ours"])
        peers = [row for row in report["rows"] if not row["ours"]]
        assert bool(peers) == (report["case"].endswith("peaked") and not re.search("grpo|frozen", report["case"]))
        assert "active" not in exact
        assert len(rest) == (2 if report["case"].endswith("peaked") else 1)
        assert all(row["active"]["dropped_mean"] <= row["active"]["dropped_max"] for row in rest)
        assert all(row["active"]["share"] > 0 for row in rest)
    assert "x exact" in capsys.readouterr().out
    page = tmp_path / "page.md"
    assert main(["report", str(path), "--page", str(page)]) == 0
    assert "of the columns" in page.read_text()
    assert main(["active", "--device", "cpu", "--case", "nothing", "--out", str(tmp_path)]) == 2


def test_the_crossover_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["active", "--crossover", "--device", "cpu", "--repeats", "1", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    assert [row["share"] for row in json.loads(path.read_text())["crossover"]] == list(active.SHARES)
    assert "of the columns" in capsys.readouterr().out


def test_peaked_logits_are_peaked() -> None:
    case = Case("ce", Head("wide", 1024, 3001), 1, 40, peaked=True)
    inputs = make_inputs(case, CPU, dtype=torch.float32)
    p = torch.softmax(inputs.hidden @ inputs.weight.T, -1)
    assert p.topk(16, -1).values.sum(-1).mean() > 0.9
    assert p.gather(-1, inputs.target.unsqueeze(-1)).log().mean() > -5
    again = make_inputs(case, CPU, dtype=torch.float32)
    assert torch.equal(inputs.hidden, again.hidden)


def test_a_wrong_layer_of_ours_is_not_timed() -> None:
    wrong = layers.Implementation(
        "wrong", {"swiglu": lambda: lambda gate, up: 1.02 * layers._hf_swiglu(gate, up)}, ours=True
    )
    (row,) = layers.run_case(layers.TINY[1], [wrong], CPU, repeats=1)["rows"]
    assert row["status"] == "outside the error bound"
    assert "ms" not in row


@torch.no_grad()
def test_fused_layers_in_bf16_are_as_near_to_fp32_as_the_models_own() -> None:
    """Why losses of one case differ between its rows: both are a rounding away from fp32, and from each other."""
    from liger_losses.integrations.layers import fuse_layers, unfuse_layers

    config = {**trainers.TINY, "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 8,
              "max_position_embeddings": 512}  # fmt: skip
    (model,) = trainers.make_models(config, 1, CPU, torch.bfloat16)
    ids = torch.randint(3, 2048, (2, 384), generator=torch.Generator().manual_seed(0))

    def logprobs() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=model.dtype == torch.bfloat16):
            hidden = model.model(ids, use_cache=False).last_hidden_state
        return full_logprobs(hidden.float()[:, :-1], model.lm_head.weight.float(), ids[:, 1:])

    plain = logprobs()
    assert fuse_layers(model).replaced.total() == 33
    fused = logprobs()
    unfuse_layers(model)
    model.float()
    true = logprobs()
    own, ours, apart = (float((a - b).std()) for a, b in ((plain, true), (fused, true), (fused, plain)))
    assert ours < 1.1 * own
    assert 0.5 * own < apart < 1.5 * own
    assert max(float((a - true).mean().abs()) for a in (plain, fused)) < 0.2 * own


def test_trainers_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("trl")
    assert main(["trainers", "--device", "cpu", "--repeats", "1", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    record = json.loads(path.read_text())
    assert [report["case"] for report in record["trainers"]] == [case.name for case in trainers.QUICK]
    for report in record["trainers"]:
        own = next(row for row in report["rows"] if row["implementation"] == "TRL")
        for row in report["rows"]:
            assert row["status"] == "ok"
            assert row["loss"] == pytest.approx(own["loss"], rel=1e-4)
            assert row["grad_norm"] == pytest.approx(own["grad_norm"], rel=1e-4)
            assert row["tokens_per_second"] == pytest.approx(4 * 24 * 1000 / row["ms"])
    assert "ours passed every gate" in capsys.readouterr().out
    page = tmp_path / "page.md"
    assert main(["report", str(path), "--page", str(page)]) == 0
    text = page.read_text()
    assert all(f"### {case.title}" in text for case in trainers.QUICK)
    assert main(["trainers", "--device", "cpu", "--case", "nothing", "--out", str(tmp_path)]) == 2


def test_a_wrong_trainer_of_ours_is_flagged() -> None:
    own = {"implementation": "TRL", "loss": 1.0, "grad_norm": 2.0}
    assert trainers._near({"loss": 1.02, "grad_norm": 2.0}, own)
    assert not trainers._near({"loss": 1.0, "grad_norm": 2.2}, own)
    rows = [{**own, "status": "ok"}, {"implementation": "fuse_trainer", "status": "out of memory"}]
    assert trainers.failed({"case": "dpo", "rows": rows}) == ["dpo: fuse_trainer"]


def test_stand_ins() -> None:
    rows = stand_ins.Rows.from_list([{"a": 1}, {"a": 5}])
    more = rows.map(lambda row, by: {"b": row["a"] * by}, fn_kwargs={"by": 2}, num_proc=4)
    assert more.column_names == ["a", "b"]
    assert list(more.filter(lambda row: row["b"] > 2, desc="some")) == [{"a": 5, "b": 10}]
    with pytest.raises(ModuleNotFoundError, match=r"pandas\.DataFrame is a stand-in"):
        stand_ins._StandIn("pandas").DataFrame()
    if not stand_ins._missing("datasets") and not stand_ins._missing("pyarrow") and not stand_ins._missing("pandas"):
        assert stand_ins.install() == []


def test_suites() -> None:
    names = [case.name for case in CASES.values() if case.suite in ("quick", "default")]
    assert len(names) == 28
    assert CASES["dpo-1x8192/llama3-8b"].scored == CASES["dpo-4x2048/qwen2.5-7b/frozen"].scored == 12288
    assert [case.name for case in CASES.values() if case.suite == "quick"] == [
        "ce-8192/llama3-8b",
        "ce-8192/llama3-8b/frozen",
        "dpo-4x2048/llama3-8b",
        "dpo-4x2048/llama3-8b/frozen",
    ]


@pytest.mark.slow
def test_two_ranks_on_the_cpu(tmp_path: Path) -> None:
    assert main(["distributed", "--device", "cpu", "--repeats", "1", "--out", str(tmp_path)]) == 0
    record = json.loads(next(tmp_path.glob("*-distributed.json")).read_text())
    assert [report["case"] for report in record["distributed"]] == [
        *distributed.SPREAD_TINY, "fsdp2-dpo", "fsdp2-trl-dpo"
    ]  # fmt: skip
    for report in record["distributed"][:-2]:
        over_two = report["rows"][-1]
        assert max(over_two["errors"].values()) < 1e-2
        assert report["profile"]["collectives"]["all_reduce"] >= 1
        assert report["profile"]["largest_elements"] == report["profile"]["hidden_elements"]
    page = results.page([record])
    assert "ours, vocabulary over 2 GPUs" in page
    assert "Collectives of a step" in page


def test_a_rank_that_differs_is_a_failure() -> None:
    rows = [{"implementation": "full logits, 1 GPU", "status": "out of memory"},
            {"implementation": "ours, vocabulary over 2 GPUs", "status": "differs", "errors": {"loss": 0.5}}]  # fmt: skip
    report = {"case": "ce", "title": "ce", "rows": rows}
    assert distributed.failed(report) == ["ce: ours, vocabulary over 2 GPUs: differs"]
    assert "loss 5.0e-01  differs" in distributed.summary(report)
    assert "| ours, vocabulary over 2 GPUs: differs | - | - | - | - | - | loss 5.0e-01 |" in distributed.table(report)
