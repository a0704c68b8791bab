"""The command line: what it prints is what the library and the committed results say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import liger_losses
from benchmarks.cases import CASES
from liger_losses.cli import doctor, estimate, models
from liger_losses.cli.__main__ import main
from liger_losses.cli.extras import CommandError
from liger_losses.cli.gpus import gpus
from liger_losses.cli.options import parse_bytes
from liger_losses.cli.workloads import WORKLOADS
from liger_losses.distributed import Rates

ROOT = Path(__file__).resolve().parent.parent
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("nvidia-h200-*.json"))
PEERS = {"full logits, eager": estimate.full_logits, "TRL fused head": estimate.trl_head}


def _measured() -> list[tuple[str, dict[str, Any], estimate.Step, str | None]]:
    """Rows of the H200's results that the model speaks of: (name, row, its step, strategy or None for auto)."""
    found = []
    for path in RESULTS:
        for report in json.loads(path.read_text()).get("cases", []):
            case = CASES.get(report["case"])
            if case is None or case.workload not in WORKLOADS:
                continue
            for row in report["rows"]:
                name = row["implementation"]
                if "ms" not in row or (name not in _OURS and name not in PEERS):
                    continue
                if name == "TRL fused head" and case.distills:
                    continue
                workload = WORKLOADS[case.workload]
                step = estimate.Step(
                    workload,
                    models.Head(case.head.name, case.head.hidden, case.head.vocab, tied=False),
                    examples=case.rows // workload.rows,
                    length=case.length,
                    prompt=case.prompt,
                    trainable_head=not case.frozen,
                    teacher_hidden_size=case.teacher.hidden if case.teacher else None,
                    logits_dtype="input" if "bf16" in name else "float32",
                    memory_budget=row["memory_budget"],
                )
                found.append((f"{report['case']}: {name}", row, step, _OURS.get(name)))
    return found


_OURS = {
    "ours (fp32 logits)": None,
    "ours (bf16 logits)": None,
    "ours (cached, fp32)": "cached",
    "ours (cached, bf16)": "cached",
    "ours (min memory, fp32)": "recompute",
    "ours (min memory, bf16)": "recompute",
}


def test_the_model_of_time_and_memory_holds_for_the_measured_rows() -> None:
    rows, gpu = _measured(), gpus()["h200"]
    assert len(rows) > 100
    off, errors = [], []
    for name, row, step, strategy in rows:
        peer = PEERS.get(row["implementation"])
        if peer is not None:
            found = peer(step, gpu)
        else:
            ways = estimate.ours(step, gpu)
            found = next(one for one in ways if (one.chosen if strategy is None else one.way == strategy))
        assert found.workspace is not None
        time, memory = found.milliseconds / row["ms"] - 1, found.workspace / row["extra_bytes"] - 1
        errors.append(abs(time))
        if abs(time) > 0.09 or abs(memory) > 0.05:
            off.append(f"{name}: time {time:+.1%}, memory {memory:+.1%}")
    assert not off, "\n".join(off)
    assert sorted(errors)[len(errors) // 2] < 0.03


def test_the_gpu_of_the_results_is_marked_as_measured() -> None:
    devices = {json.loads(path.read_text())["environment"]["device"] for path in RESULTS}
    assert {gpu.name for gpu in gpus().values() if gpu.measured} <= devices


def test_the_measured_rates_are_those_of_the_results_and_of_the_cluster() -> None:
    """Nine in ten products of the results, and every device copy, are at least as fast, and not by much."""
    h200, rates = gpus()["h200"], Rates()
    assert (1e12 * h200.tflops, 1e12 * h200.tb_s) == (rates.products, rates.memory)
    products, copies = [], []
    for path in RESULTS:
        record = json.loads(path.read_text())
        copies += [layer["copy_tb_s"] for layer in record.get("layers", [])]
        for report in record.get("cases", []):
            case = CASES.get(report["case"])
            for name, ms in report["floor"]["products_ms"].items() if case else ():
                if case.teacher is None or not name.startswith("reference"):
                    tokens = case.rows * (case.length - int(case.prompt * case.length))
                    products.append(2e-9 * tokens * case.head.hidden * case.head.vocab / ms)
    assert len(products) > 50
    assert h200.tflops <= sorted(products)[len(products) // 10] < 1.05 * h200.tflops
    assert h200.tb_s <= min(copies) < 1.05 * h200.tb_s


def test_other_gpus_are_the_measured_ones_share_of_a_data_sheet() -> None:
    h200 = gpus()["h200"]
    for gpu in gpus().values():
        assert gpu.tflops_share == pytest.approx(h200.tflops_share, rel=2e-3)
        assert gpu.tb_s_share == pytest.approx(h200.tb_s_share, rel=1e-2)
        assert gpu.measured == (gpu.name == h200.name) == ("not measured" not in gpu.basis)


def test_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "llama-3.1-8b", "--batch", "4", "--length", "2048", "--memory", "16GiB", "--json"]
    assert main(arguments) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["model"]["hidden_size"], record["model"]["vocab_size"]) == (4096, 128256)
    assert record["scored"] == 8 * 1536
    ways = {way["way"]: way for way in record["ways"]}
    assert list(ways) == ["full logits, eager", "TRL 1.16 fused head", "immediate", "cached", "recompute"]
    planned = liger_losses.plan(
        tokens=8 * 2048, scored=[1536] * 8, hidden_size=4096, vocab_size=128256, separability="pair"
    )
    assert [name for name, way in ways.items() if way["chosen"]] == [planned.strategy]
    assert ways[planned.strategy]["workspace"] == planned.workspace
    assert ways["full logits, eager"]["largest_batch"] < ways["immediate"]["largest_batch"]


@pytest.mark.parametrize("way", ["full logits, eager", "TRL 1.16 fused head", "immediate", "recompute"])
def test_the_largest_batch_fits_and_one_more_does_not(way: str) -> None:
    head = models.find_head("qwen2.5-0.5b")
    step = estimate.Step(WORKLOADS["dpo"], head, examples=2, length=512, prompt=0.25)
    memory = 3 << 30
    batch, length = estimate.largest(step, way, memory)
    peers = {"full logits, eager": estimate.full_logits, "TRL 1.16 fused head": estimate.trl_head}

    def fits(**change: int) -> bool:
        changed = replace(step, **change)
        room = memory - changed.hidden_bytes
        if way in peers:
            return (peers[way](changed, gpus()["h200"]).workspace or 0) <= room
        try:
            made = estimate.plan_of(replace(changed, memory_budget=room), way)
        except ValueError:
            return False
        return made.workspace <= room

    assert batch > 0
    assert fits(examples=batch)
    assert not fits(examples=batch + 1)
    assert fits(length=length)
    assert not fits(length=length + 1)


def test_plan_as_table_and_chart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    chart = tmp_path / "chart.png"
    arguments = ["plan", "qwen3-8b", "--loss", "jsd", "--teacher", "qwen3-32b", "--batch", "1", "--chart", str(chart)]
    assert main(arguments) == 0
    seen = capsys.readouterr().out
    assert "Qwen/Qwen3-8B: jsd" in seen
    assert "recompute" in seen
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_marks_survive_a_pipe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither bold nor colour carries what a reader needs, and no number is cut short at 80 columns."""
    pytest.importorskip("rich")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    base = ["plan", "qwen2.5-7b", "--batch", "256", "--length", "8192"]
    assert main([*base, "--memory", "500MB"]) == 0
    seen = capsys.readouterr().out
    assert "\x1b" not in seen
    assert "…" not in seen
    assert [line.split()[:2] for line in seen.splitlines() if " * " in line] == [["immediate", "*"]]
    assert "7,269,360" in seen
    assert "does not fit the 141 GiB of this GPU: full logits, eager, cached." in seen
    assert "none: not even one example" in seen
    assert main([*base, "--memory-budget", "64GiB"]) == 0
    seen = capsys.readouterr().out
    (cached,) = (line.split() for line in seen.splitlines() if line.startswith(" cached"))
    assert cached[-2] == "raises"
    assert "raises: cached cannot do with a memory_budget of 64GiB, and the call raises." in seen
    assert main([*base, "--memory-budget", "1MiB"]) == 0
    seen = capsys.readouterr().out
    assert "and so does strategy='auto'" in seen
    assert " * " not in seen
    assert main([*base, "--memory-budget", "1MiB", "--json"]) == 0
    ways = json.loads(capsys.readouterr().out)["ways"]
    assert [way["fits_the_budget"] for way in ways] == [True, True, False, False, False]


def test_a_chart_names_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    chart = tmp_path / "not" / "yet" / "chart.svg"
    arguments = ["plan", "qwen3-8b", "--memory-budget", "1GiB", "--json", "--chart", str(chart)]
    for more in (", in a new folder", ""):
        assert main(arguments) == 0
        seen = capsys.readouterr()
        assert json.loads(seen.out)["ways"]
        assert seen.err == f"chart: {chart}{more}\n"
    assert chart.read_text().startswith("<?xml")
    # What a long title says is in the picture: its text is wrapped, not cut.
    from liger_losses.cli import figures

    figure = figures.pyplot().figure(figsize=(11, 3))
    figures.save(figure, tmp_path / "title.png", "meta-llama/Llama-3.1-8B: dpo, 4 x 4,096 tokens, " * 5)
    (title,) = figure.texts
    assert title.get_window_extent().x1 < 160 * figure.get_figwidth()  # as it was saved, at 160 dots an inch
    blocked = str(chart / "chart.png")
    assert main(["plan", "qwen3-8b", "--json", "--chart", blocked]) == 2
    assert f"--chart: got {str(chart)!r}, expected a folder to write to" in capsys.readouterr().err


def _write(folder: Path, **config: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_heads_of_configurations(tmp_path: Path) -> None:
    gemma = {"hidden_size": 2560, "vocab_size": 262208, "tie_word_embeddings": True, "final_logit_softcapping": None}
    folder = Path(_write(tmp_path, model_type="gemma3", text_config=gemma))
    for path in (folder, folder / "config.json"):
        head = models.find_head(str(path))
        assert (head.hidden_size, head.vocab_size, head.softcap, head.defaults) == (2560, 262208, None, ())
    gpt2 = models.from_config("gpt2", {"n_embd": 768, "vocab_size": 50257, "tie_word_embeddings": True})
    assert gpt2.hidden_size == 768
    assert models.find_head("GEMMA-2-2B").softcap == 30.0
    assert len(models.known_models()) > 30


def test_what_a_configuration_omits_is_its_class_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    gemma = _write(tmp_path / "a", model_type="gemma2", hidden_size=64, vocab_size=500)
    head = models.find_head(gemma)
    assert (head.tied, head.softcap) == (True, 30.0)
    assert head.defaults == ("final_logit_softcapping", "tie_word_embeddings")
    said = {"tie_word_embeddings": False, "final_logit_softcapping": None}
    head = models.find_head(_write(tmp_path / "b", model_type="gemma2", hidden_size=64, vocab_size=500, **said))
    assert (head.tied, head.softcap, head.defaults) == (False, None, ())
    head = models.find_head(_write(tmp_path / "c", model_type="llama", vocab_size=500))
    assert (head.hidden_size, head.vocab_size, head.tied) == (4096, 500, False)
    head = models.find_head(_write(tmp_path / "d", model_type="qwen2_vl", text_config={"hidden_size": 1536}))
    assert (head.hidden_size, head.vocab_size, head.tied) == (1536, 152064, False)
    head = models.find_head(_write(tmp_path / "e", model_type="no such", hidden_size=64, vocab_size=500))
    assert (head.tied, head.unsaid) == (None, ("tie_word_embeddings",))
    pytest.importorskip("rich")
    assert main(["plan", gemma]) == 0
    assert "hence its class's default: final_logit_softcapping, tie_word_embeddings" in capsys.readouterr().out


def test_without_transformers_what_is_omitted_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    head = models.find_head(_write(tmp_path, model_type="gemma2", hidden_size=64, vocab_size=500))
    assert (head.tied, head.softcap) == (None, None)
    assert head.unsaid == ("final_logit_softcapping", "tie_word_embeddings")
    with pytest.raises(CommandError, match="no hidden_size in its configuration .* transformers, .* is not installed"):
        models.find_head(_write(tmp_path, model_type="gemma2", vocab_size=500))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "no such"},
            "no hidden_size in its configuration (looked for hidden_size, n_embd, d_model, dim)",
        ),
        (
            {"hidden_size": 64},
            "no vocab_size in its configuration (looked for vocab_size, padded_vocab_size); no model_type",
        ),
        ({"hidden_size": 0, "vocab_size": 9}, "got hidden_size 0 in its configuration, expected an integer from 1 to"),
        ({"hidden_size": 8, "vocab_size": 10**12}, "got vocab_size 1000000000000 in its configuration, expected an"),
        (
            {"hidden_size": 8, "vocab_size": 9, "final_logit_softcapping": 0},
            "got final_logit_softcapping 0 in its configuration, expected null or a finite number above 0",
        ),
        ({"hidden_size": True, "vocab_size": 9}, "got hidden_size True in its configuration"),
        ({"hidden_size": 8, "vocab_size": 9, "tie_word_embeddings": "no"}, "got tie_word_embeddings 'no' in its"),
        (
            {"model_type": "llama", "hidden_size": "64", "vocab_size": 9},
            "transformers refuses it for model_type 'llama'",
        ),
    ],
)
def test_configurations_that_say_too_little(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(CommandError) as caught:
        models.find_head(_write(tmp_path, **config))
    assert str(caught.value).startswith(str(tmp_path / "config.json"))
    assert message in str(caught.value)


def test_folders_that_are_no_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def message(model: str) -> str:
        with pytest.raises(CommandError) as caught:
            models.find_head(model)
        return str(caught.value)

    assert message(str(tmp_path)) == f"{tmp_path}: a folder without a config.json (it has nothing)"
    (tmp_path / "model.safetensors").touch()
    assert "(it has model.safetensors)" in message(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-8B"}')
    assert message(str(tmp_path)).endswith("its base model's: plan Qwen/Qwen3-8B")
    for path in (str(tmp_path / "missing"), "./missing", "a/b/c", "config.jso/x.json"):
        assert message(path) == f"{path}: no such file or folder"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3-8b").mkdir()
    assert models.find_head("qwen3-8b").name == "Qwen/Qwen3-8B"  # an id, whatever lies here under its name


# Models of the table whose sizes are the defaults of their class.
_DEFAULT_SIZES = {
    "qwen3": "Qwen/Qwen3-8B",
    "qwen3_moe": "Qwen/Qwen3-30B-A3B",
    "gemma2": "google/gemma-2-2b",
    "gpt_oss": "openai/gpt-oss-120b",
    "deepseek_v3": "deepseek-ai/DeepSeek-V3",
}
# By family: whether models are tied, and the softcap, where the class says it for all of them.
_FAMILIES = {
    "google/gemma-2": "gemma2", "google/gemma-3": "gemma3", "mistralai/": "mistral", "openai/gpt-oss": "gpt_oss",
    "deepseek-ai/": "deepseek_v3", "meta-llama/Llama-3.1": "llama", "meta-llama/Llama-3.3": "llama",
}  # fmt: skip


def test_the_table_of_models_is_what_transformers_has() -> None:
    transformers = pytest.importorskip("transformers")

    def default(kind: str) -> Any:
        return transformers.CONFIG_MAPPING[kind]().get_text_config()

    known = models.known_models()
    for kind, name in _DEFAULT_SIZES.items():
        built = default(kind)
        assert (known[name].hidden_size, known[name].vocab_size) == (built.hidden_size, built.vocab_size), name
    for prefix, kind in _FAMILIES.items():
        built = default(kind)
        members = [head for name, head in known.items() if name.startswith(prefix)]
        assert members
        for head in members:
            softcap = getattr(built, "final_logit_softcapping", None)
            assert (head.tied, head.softcap) == (built.tie_word_embeddings, softcap), head.name
    assert known["google/gemma-3-4b-pt"].vocab_size == default("gemma3").vocab_size
    for case in CASES.values():
        named = [head for name, head in known.items() if name.lower().endswith(case.head.name)]
        assert all((head.hidden_size, head.vocab_size) == (case.head.hidden, case.head.vocab) for head in named)


def test_what_the_documentation_shows_is_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    command, _, rest = page.partition("$ liger-losses plan ")[2].partition("\n")
    shown = rest.partition("```")[0].splitlines()
    assert len(shown) > 5
    assert main(["plan", *command.split()]) == 0
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()][: len(shown)] == shown
    for key, gpu in gpus().items():
        basis = "measured" if gpu.measured else "data sheet"
        row = (f"`{key}`", gpu.name, f"{gpu.gib} GiB", f"{gpu.tflops:,.0f} TFLOP/s", f"{gpu.tb_s:.2f} TB/s", basis)
        assert f"| {' | '.join(row)} |" in page
    assert main(["plan", "--list-gpus"]) == 0
    assert capsys.readouterr().out.count("not measured") == len(gpus()) - 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan"], "plan: which model?"),
        (["plan", "no/such-model"], "no/such-model: no such file"),
        (["plan", ""], "plan: which model?"),
        (
            ["plan", "llama-3.1-8b", "--loss", "jsd"],
            "--teacher: is missing; --loss jsd distils a teacher, so name its model",
        ),
        (["plan", "llama-3.1-8b", "--loss", "jsd", "--teacher", "qwen3-8b"], "--teacher: its vocabulary has 151,936"),
        (
            ["plan", "llama-3.1-8b", "--chart", "plan.exe"],
            "--chart: got 'plan.exe', expected a file that ends in .png, .svg, .pdf",
        ),
        (["plan", "llama-3.1-8b", "--chart", "plan"], "--chart: got 'plan', expected a file that ends in"),
        (["plan", "llama-3.1-8b", "--chart", "."], "--chart: got '.', a folder, expected a file that ends in"),
        (["doctor", "--device", "nowhere"], "--device: got 'nowhere'"),
        (["doctor", "--device", "meta"], "--device: got 'meta', expected a device that is here"),
        (
            ["bench", "--quick", "--device", "cpu", "--out", __file__],
            f"--out: got {__file__!r}, expected a folder to write to",
        ),
    ],
)
def test_what_cannot_run_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "option", "values", "expected"),
    [
        ("plan", "--batch", ("0", "-3", "x", "1.5", "1000000000"), "an integer from 1 to 4,096"),
        ("plan", "--length", ("0", "1e9", "10000000000", ""), "an integer from 1 to 4,194,304"),
        ("plan", "--prompt", ("1", "-0.1", "nan", "half"), "a share in [0, 1), such as 0.25"),
        ("plan", "--memory", ("-1GiB", "100TiB", "much", "0", "inf", "", "1.5.5GiB", "1PiB"), "at most 141GiB"),
        ("plan", "--memory-budget", ("-5", "142GiB", "1e9"), "bytes such as 500MiB or 16GiB, more than 0"),
        ("bench", "--repeats", ("0", "-1", "x"), "an integer from 1 to 1,000"),
        ("demo", "--steps", ("0", "-1", "x"), "an integer from 1 to 1,000,000"),
        ("demo", "--warm-up", ("-1", "x"), "an integer from 0 to 1,000,000"),
        ("demo", "--seed", ("-1", "x"), "an integer from 0 to 4,294,967,295"),
    ],
)
def test_numbers_that_are_none(
    command: str, option: str, values: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The option, what was seen, and the form and range that are accepted; whatever begins with a minus is a value."""
    for value in values:
        assert main([command, *["llama-3.1-8b"] * (command == "plan"), option, value]) == 2
        seen = capsys.readouterr().err
        assert seen.startswith(f"liger-losses: {option}: got {value!r}, expected ")
        assert expected in seen


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = f"{sys.executable} -u -m liger_losses.cli.__main__ plan --list-models | head -1"
    run = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.startswith("meta-llama/Llama-3.2-1B")
    assert run.stderr == ""


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main(["plan", "llama-3.1-8b"]) == 2
    assert "pip install 'liger-losses[cli]'" in capsys.readouterr().err
    assert main(["plan", "llama-3.1-8b", "--json"]) == 0


def test_parse_bytes() -> None:
    assert parse_bytes("1.5 GiB") == 3 << 29
    assert parse_bytes("2kb") == 2000
    assert parse_bytes("1TiB") == 1 << 40
    assert [parse_bytes(text) for text in ("-1GiB", "GiB", "1e3", "1 PiB", "")] == [None] * 5


def test_doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["doctor", "--device", "cpu", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["environment"]["packages"]["torch"] == torch.__version__
    assert {row["kernel"] for row in record["checks"]} == {"torch"}
    assert len(record["checks"]) == 2 * len(doctor.CHECKS)

    # Of two kernels one is off by a percent and one raises: both are findings, and the exit status says so.
    real = doctor.rms_norm
    monkeypatch.setattr(doctor, "rms_norm", lambda x, w: 1.05 * real(x, w))
    monkeypatch.delattr(doctor, "rotary")
    assert main(["doctor", "--device", "cpu"]) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")]
    assert [line.split()[1] for line in failed] == ["RMSNorm", "RMSNorm", "rotary", "rotary"]
    assert "NameError" in failed[-1]


def test_bench_without_a_clone_says_where_the_suite_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(liger_losses, "__file__", str(tmp_path / "liger_losses" / "__init__.py"))
    assert main(["bench"]) == 2
    assert "liger-losses bench --quick" in capsys.readouterr().err


def test_quick_bench_gates_before_it_times(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    from liger_losses.cli import bench

    monkeypatch.setattr(bench, "size_on", lambda device: bench.Size(2, 12, 16, 257, torch.float32))
    assert main(["bench", "--quick", "--device", "cpu", "--repeats", "1", "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "results.json").read_text())
    assert list(record["results"]) == list(bench.LOSSES)
    for rows in record["results"].values():
        assert list(rows) == ["full logits", "ours, auto", "ours, immediate", "ours, cached", "ours, recompute"]
        assert all(row["ms"] > 0 and row["extra_bytes"] > 0 for row in rows.values())
    assert "![dpo: time and memory](dpo.png)" in (tmp_path / "report.md").read_text()

    real = bench.fused
    monkeypatch.setattr(bench, "fused", lambda *arguments: 1.01 * real(*arguments))
    monkeypatch.setattr(bench, "LOSSES", ("ce",))
    assert main(["bench", "--quick", "--device", "cpu", "--repeats", "1", "--out", str(tmp_path)]) == 1
    rows = json.loads((tmp_path / "results.json").read_text())["results"]["ce"]
    assert all("ms" not in row and "allowed" in row["failure"] for way, row in rows.items() if way != "full logits")
    capsys.readouterr()


@pytest.mark.slow
def test_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    assert main(["demo", "--steps", "2", "--warm-up", "2", "--out", str(tmp_path)]) == 0
    assert "constructed from text" in capsys.readouterr().out
    assert (tmp_path / "dpo.png").read_bytes().startswith(b"\x89PNG")


def test_help_needs_neither_torch_nor_an_extra() -> None:
    code = "import sys; from liger_losses.cli.__main__ import parser; parser(); print({'torch', 'rich'} & set(sys.modules))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
