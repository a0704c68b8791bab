"""The command line: what it prints is what the library and the committed results say."""

from __future__ import annotations

import json
import os
import re
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
    marked = [line.split()[:2] for line in seen.splitlines() if line.startswith(" ") and " * " in line]
    assert marked == [["immediate", "*"]] * 2
    assert "7,269,360" in seen
    assert "does not fit the 141 GiB of this GPU: full logits, eager, cached." in seen
    assert "none: not even one example" in seen
    assert main([*base, "--memory-budget", "64GiB"]) == 0
    seen = capsys.readouterr().out
    cached = [cell for line in seen.splitlines() if line.startswith(" cached") for cell in line.split()[1:]]
    assert cached[1:3] == ["-", "raises"]
    assert "raises: cached cannot do with a memory_budget of 64GiB, and the call raises." in seen
    assert main([*base, "--memory-budget", "1MiB"]) == 1
    seen = capsys.readouterr().out
    assert "and so does strategy='auto'" in seen
    assert " * " not in seen
    assert main([*base, "--memory-budget", "1MiB", "--json"]) == 1
    ways = json.loads(capsys.readouterr().out)["ways"]
    assert [way["fits_the_budget"] for way in ways] == [True, True, False, False, False]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--memory-budget", "10MiB"], "--memory-budget 10MiB: the least of a strategy is 576MiB"),
        (["--memory", "16KiB"], "--memory 16KiB: not one example at this length, nor one token at this batch"),
        (["--gpu", "rtx-4090", "--batch", "4096"], "NVIDIA RTX 4090 has 24GiB: the least of a strategy is "),
    ],
)
def test_a_plan_in_which_nothing_fits_fails(more: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The numbers are printed, the last line says what is too small, and a script sees it."""
    assert main(["plan", "llama-3.1-8b", "--json", *more]) == 1
    seen = capsys.readouterr()
    assert json.loads(seen.out)["ways"]
    assert seen.err.startswith(f"liger-losses: nothing fits: {why}")
    assert main(["plan", "llama-3.1-8b", "--json", "--memory-budget", "576MiB", "--memory", "4GiB"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("columns", [40, 60, 72, 80, 120])
def test_the_table_fits_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No line is wider, each number is there once, and each of the tables names its rows."""
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")  # for rich a terminal
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert main(["plan", "llama-3.1-8b", "--batch", "4", "--memory", "16GiB"]) == 0
    lines = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()
    assert max(len(line.rstrip()) for line in lines) <= columns
    rows = [line.split()[2:] for line in lines if line.startswith(" immediate *")]
    assert len(rows) == {40: 3, 60: 2}.get(columns, 1)
    assert [number for row in rows for number in row] == ["4.00", "87.9", "2,389", "2,132", "112", "57,520"]
    assert [sum(line.startswith(f" {way}") for line in lines) for way in ("full logits", "recompute")] == [
        len(rows)
    ] * 2


def test_the_budget_of_a_faster_strategy_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    base = ["plan", "llama-3.1-8b", "--batch", "4"]

    def note(*more: str, status: int = 0) -> list[str]:
        assert main([*base, *more]) == status
        return [line for line in capsys.readouterr().out.splitlines() if "less than *" in line]

    assert note() == [
        "cached would take 83.4 ms, less than *, but needs more than the default memory_budget: strategy='auto' takes it "
        "with memory_budget=3198 << 20 (here --memory-budget 3198MiB)."
    ]
    (within,) = note("--memory-budget", "3GiB")
    assert "needs more than 3GiB: " in within
    assert note("--memory-budget", "3198MiB") == []  # it is *
    assert note("--frozen") == []  # frozen is the fastest there is
    assert note("--gpu", "rtx-4090", "--batch", "40") == []  # it does not fit the GPU
    assert note("--memory-budget", "1MiB", status=1) == []  # auto raises


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


def test_what_the_documentation_shows_is_what_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    command, _, rest = page.partition("$ liger-losses plan ")[2].partition("\n")
    shown = rest.partition("```")[0].splitlines()
    assert len(shown) > 5
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["plan", *command.split()]) == 0
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()][: len(shown)] == shown
    rows = []
    for key, gpu in gpus().items():
        rates = (f"{gpu.gib} GiB", f"{gpu.tflops:,.0f} TFLOP/s", f"{gpu.tb_s:.2f} TB/s")
        rows.append(re.compile(rf"{key} +{' +'.join(rates)} +{gpu.source}"))
        assert f"| {' | '.join((f'`{key}`', gpu.name, *rates, gpu.source))} |" in page
    assert main(["plan", "--list-gpus"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(row.fullmatch(line) for row, line in zip(rows, lines, strict=False))
    assert lines[len(rows)].startswith("data sheet: not measured, but 66% of")
    assert max(map(len, lines)) <= 60


def test_both_lists_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for options in (["--list-models"], ["--list-gpus"], ["--list-gpus", "--list-models"]):
        assert main(["plan", *options]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[2] == "\n".join(printed[:2])
    assert len(printed[0].splitlines()) == 1 + len(models.known_models())
    assert max(map(len, printed[0].splitlines())) <= 60


def test_names_are_known_in_any_case(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "Llama-3.1-8B", "--gpu", "h100", "--loss", "ce", "--logits-dtype", "input", "--json"]
    assert main(arguments) == 0
    lower = capsys.readouterr().out
    assert main(["plan", *(a if a.startswith("--") else a.upper() for a in arguments[1:])]) == 0
    assert capsys.readouterr().out == lower


def test_torch_is_not_heard_about_a_missing_numpy() -> None:
    """It warns while it is imported; the library alone leaves that as it is."""
    program = """if True:
        import sys
        sys.modules["numpy"] = None
        if sys.argv[1] == "library":
            import torch
        else:
            from liger_losses.cli.__main__ import main
            sys.exit(main(["plan", "llama-3.1-8b", "--json"]))
    """
    heard = {}
    for who in ("library", "command"):
        command = [sys.executable, "-c", program, who]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        heard[who] = run.stderr
    assert heard["command"] == ""
    assert "Failed to initialize NumPy" in heard["library"]  # or there would be nothing to leave out


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
        (
            ["plan", "llama-3.1-8b", "--memory", "16"],
            "--memory: got '16', expected a unit beside so small a number, which would be 16 bytes: 16GiB, perhaps",
        ),
        (["plan", "llama-3.1-8b", "--memory-budget", "1048575"], "--memory-budget: got '1048575', expected a unit"),
        (["doctor", "--device", "nowhere"], "--device: got 'nowhere'"),
        (["bench", "--device", "nowhere"], "--device: got 'nowhere', expected a device that is here"),
        (["bench", "--quick", "--device", "nowhere"], "--device: got 'nowhere', expected a device that is here"),
        (["bench", "--quick", "--case", "tiny"], "--case: got 'tiny' with --quick"),
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
    assert run.stdout.split() == ["model", "H", "V"]
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


def test_bench_hands_the_cases_to_the_suite(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the suite advises on a CPU, `--case tiny`, can be given here, too."""
    from benchmarks.__main__ import _parser
    from liger_losses.cli import bench

    commands = []
    done = subprocess.CompletedProcess([], 0)
    monkeypatch.setattr(bench.subprocess, "run", lambda command, **_: commands.append(command) or done)
    arguments = ["--case", "ce-96/tiny", "--case", "jsd", "--device", "cpu", "--out", str(tmp_path), "--repeats", "1"]
    assert main(["bench", *arguments]) == 0
    ((*_, module, suite), given) = commands[0][:3] + commands[0][3:4], commands[0][3:]
    assert (module, suite) == ("benchmarks", "run")
    read = _parser().parse_args(given)
    assert (read.case, read.device, read.out, read.repeats) == (["ce-96/tiny", "jsd"], "cpu", tmp_path, 1)


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
