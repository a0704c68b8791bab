"""A training step of TRL's trainers, whole model, forward and backward: as TRL ships them and on fused heads.

The model has the shape of Llama 3.2 1B, with random weights; batches exist before, and `training_step` is the
trainer's own. No optimiser is run. An implementation is one state of the same trainer: TRL's own head, full logits in
its place where there is a choice, `fuse_trainer`, and `fuse_trainer` with `fuse_layers`.
"""

from __future__ import annotations

import os
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from . import stand_ins
from .measure import free, milliseconds
from .trainer_states import FUSED, LAYERED, SHIPPED, WHOLE, Implementation

Batch = dict[str, Any]
Steps = Callable[[], Tensor]
REPEATS = 3
LLAMA_1B = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": True,
}
TINY = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Case:
    """`rows` sequences of `length` tokens (a pair is two), the first quarter of each being prompt."""

    trainer: str
    rows: int
    length: int
    checkpointing: bool = False
    layers: bool = False  # also with full logits, and with fuse_layers

    @property
    def name(self) -> str:
        return f"{self.trainer}-{self.rows}x{self.length}" + "-checkpointing" * self.checkpointing

    @property
    def title(self) -> str:
        what = f"{self.trainer.upper()}, {self.rows} sequences of {self.length} tokens"
        return what + (", gradient checkpointing" if self.checkpointing else "")


CASES = (
    Case("dpo", 4, 2048, layers=True),
    Case("dpo", 4, 2048, checkpointing=True, layers=True),
    Case("dpo", 2, 8192, layers=True),
    Case("dpo", 2, 8192, checkpointing=True, layers=True),
    Case("orpo", 4, 2048),
    Case("gkd", 4, 2048),
    Case("grpo", 4, 2048),
)
QUICK = tuple(Case(name, 4, 24, layers=name == "dpo") for name in ("dpo", "orpo", "gkd", "grpo"))
MODELS = {"dpo": 2, "orpo": 1, "gkd": 2, "grpo": 1}  # policy; reference or teacher


def make_models(config: dict[str, Any], count: int, device: torch.device, dtype: torch.dtype) -> list[Any]:
    """Llamas of random weights, made on the device, each from its own seed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    models = []
    for seed in range(count):
        torch.manual_seed(seed)
        with torch.device(device):
            settings = LlamaConfig(**config, pad_token_id=1, eos_token_id=2, bos_token_id=None)
            settings._attn_implementation = "sdpa"
            model = LlamaForCausalLM(settings).to(dtype)
        models.append(model)
    return models


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0, "<pad>": 1, "<eos>": 2, "word": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>")


def make_trainer(case: Case, models: list[Any], folder: str, device: torch.device, **more: Any) -> Any:
    """The trainer of TRL's, built as its documentation does, on rows that are not used; `more` are its arguments."""
    import datasets
    import trl
    from trl.experimental import gkd, orpo

    settings: dict[str, Any] = {
        "output_dir": folder,
        "per_device_train_batch_size": case.rows,
        "gradient_checkpointing": case.checkpointing,
        "bf16": device.type == "cuda",
        "use_cpu": device.type == "cpu",
        "report_to": "none",
        "remove_unused_columns": False,
        **more,
    }
    pair = {"prompt": "word word", "chosen": " word word word", "rejected": " word"}
    chat = {"messages": [{"role": "user", "content": "word"}, {"role": "assistant", "content": "word"}]}
    rows = {"gkd": chat, "grpo": {"prompt": "word"}}.get(case.trainer, pair)
    common = {"train_dataset": datasets.Dataset.from_list([rows] * 8), "processing_class": _tokenizer()}
    policy, *other = models
    match case.trainer:
        case "dpo":
            return trl.DPOTrainer(policy, ref_model=other[0], args=trl.DPOConfig(**settings), **common)
        case "orpo":
            return orpo.ORPOTrainer(policy, args=orpo.ORPOConfig(**settings), **common)
        case "gkd":
            args = gkd.GKDConfig(**settings, lmbda=0.0)
            return gkd.GKDTrainer(policy, teacher_model=other[0], args=args, **common)
        case "grpo":
            args = trl.GRPOConfig(**settings, num_generations=case.rows)
            return trl.GRPOTrainer(policy, reward_funcs=lambda completions, **_: [0.0] * len(completions),
                                   args=args, **common)  # fmt: skip
    raise ValueError(f"no such trainer: {case.trainer}")


def by_hand(trainer: Any, steps: int = 1) -> None:
    """Let `training_step` be called without `train()`: batches are there, and `steps` of them make up one."""
    trainer._prepare_inputs = lambda given: given
    trainer.current_gradient_accumulation_steps = steps


def make_batch(case: Case, vocabulary: int, device: torch.device) -> Batch:
    """What the trainer's collator would hand over."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, vocabulary, (case.rows, case.length), generator=generator).to(device)
    prompt = case.length // 4
    mask, completion = torch.ones_like(ids), torch.ones_like(ids)
    completion[:, :prompt] = 0
    labels = ids.masked_fill(completion == 0, -100)
    half = case.rows // 2
    match case.trainer:
        case "dpo":
            return {"input_ids": ids, "attention_mask": mask, "completion_mask": completion}
        case "orpo":
            ids[half:, :prompt] = ids[:half, :prompt]
            return {
                f"{side}_{name}": value[rows]
                for side, rows in (("chosen", slice(half)), ("rejected", slice(half, None)))
                for name, value in (("input_ids", ids), ("attention_mask", mask), ("labels", labels))
            } | {"prompt_input_ids": ids[:half, :prompt], "prompt_attention_mask": mask[:half, :prompt]}
        case "gkd":
            return {"input_ids": ids, "attention_mask": mask, "labels": labels, "prompts": ids[:, :prompt],
                    "prompt_attention_mask": mask[:, :prompt]}  # fmt: skip
        case "grpo":
            advantages = torch.randn(case.rows, generator=generator).to(device)
            return {"prompt_ids": ids[:, :prompt], "prompt_mask": mask[:, :prompt], "completion_ids": ids[:, prompt:],
                    "completion_mask": mask[:, prompt:], "advantages": advantages,
                    "num_items_in_batch": completion.sum()}  # fmt: skip
    raise ValueError(f"no such trainer: {case.trainer}")


def implementations(case: Case) -> list[Implementation]:
    whole = [WHOLE] if case.layers else []
    return [*whole, SHIPPED, FUSED, *([LAYERED] if case.layers else [])]


def _step(trainer: Any, model: Any, batch: Batch) -> Tensor:
    """Forward and backward of one batch by the trainer, onto gradients that do not exist yet."""
    model.zero_grad(set_to_none=True)
    return trainer.training_step(model, dict(batch), None)


def gradient_norm(model: Any) -> float:
    norm: Any = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def measure_steps(trainer: Any, model: Any, batch: Batch, device: torch.device, repeats: int) -> dict[str, Any]:
    """One step's loss and gradient, another one's peak, and the times of some more."""
    found: dict[str, Any] = {"loss": float(_step(trainer, model, batch)), "peak_bytes": None}
    found["grad_norm"] = gradient_norm(model)
    if device.type == "cuda":
        model.zero_grad(set_to_none=True)
        free(device)
        torch.cuda.reset_peak_memory_stats(device)
        _step(trainer, model, batch)
        torch.cuda.synchronize(device)
        found["peak_bytes"] = torch.cuda.max_memory_allocated(device)
    found["times_ms"] = [milliseconds(lambda: _step(trainer, model, batch), device) for _ in range(repeats)]
    found["ms"] = median(found["times_ms"])
    return found


def run_case(case: Case, models: list[Any], device: torch.device, repeats: int = REPEATS) -> dict[str, Any]:
    """All implementations of one case, ready for JSON. One that runs out of memory is a row that says so."""
    started = time.perf_counter()
    rows: list[dict[str, Any]] = []
    batch = make_batch(case, models[0].config.vocab_size, device)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make_trainer(case, models, folder, device)
        by_hand(trainer)
        if case.checkpointing:
            trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
        model = trainer.accelerator.prepare_model(trainer.model)
        for name, state in implementations(case):
            row: dict[str, Any] = {"implementation": name, "status": "ok"}
            rows.append(row)
            try:
                with state(trainer):
                    row |= measure_steps(trainer, model, batch, device, repeats)
            except torch.OutOfMemoryError:
                row["status"] = "out of memory"
            model.zero_grad(set_to_none=True)
            if "loss" in row:
                row["tokens_per_second"] = 1000 * case.rows * case.length / row["ms"]
        models[0].gradient_checkpointing_disable()
        trainer.accelerator.free_memory()
        for one in models:
            for attribute in ("forward", "_original_forward", "_is_accelerate_prepared"):
                vars(one).pop(attribute, None)
    measured = {row["implementation"]: row for row in rows if "loss" in row}
    own = measured.get(SHIPPED[0])
    for row in measured.values():
        if own is not None and not _near(row, own):
            row["status"] = f"not the loss and gradient of {own['implementation']}"
    return {"case": case.name, "title": case.title, "rows": rows, "seconds": time.perf_counter() - started}


def _near(row: dict[str, Any], own: dict[str, Any]) -> bool:
    """Equal to what bf16 logits and sums leave of it."""
    return all(abs(row[key] - own[key]) <= 0.03 * abs(own[key]) + 1e-3 for key in ("loss", "grad_norm"))


def prepare_imports() -> None:
    """Call before TRL is imported."""
    for name in ("TRL_EXPERIMENTAL_SILENCE", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"):
        os.environ.setdefault(name, "1")
    if missing := stand_ins.install():
        print(f"stand-ins for {', '.join(missing)}, which are not installed")


def run(
    cases: tuple[Case, ...], device: torch.device, repeats: int, save: Callable[[dict[str, Any]], None]
) -> list[str]:
    """Run the cases, `save` each report as it is there; names of ours that did not pass."""
    prepare_imports()
    config, dtype = (LLAMA_1B, torch.bfloat16) if device.type == "cuda" else (TINY, torch.float32)
    models = make_models(config, 2, device, dtype)
    failures = []
    for case in cases:
        report = run_case(case, models[: MODELS[case.trainer]], device, repeats)
        save(report)
        print(summary(report), flush=True)
        failures += failed(report)
    return failures


def failed(report: dict[str, Any]) -> list[str]:
    """Ours that did not pass."""
    ours = [row for row in report["rows"] if row["implementation"].startswith("fuse_trainer")]
    return [f"{report['case']}: {row['implementation']}" for row in ours if row["status"] != "ok"]


def _gib(value: int | None) -> str:
    return "-" if value is None else f"{value / 2**30:.1f}"


def summary(report: dict[str, Any]) -> str:
    lines = [f"\n{report['title']} ({report['seconds']:.0f} s)"]
    for row in report["rows"]:
        measured = "-"
        if "ms" in row:
            measured = (
                f"{row['ms']:9.1f} ms {row['tokens_per_second']:10,.0f} tokens/s {_gib(row['peak_bytes']):>7} GiB"
                f"  loss {row['loss']:.5f}  gradient {row['grad_norm']:.4g}"
            )
        lines.append(f"  {row['implementation']:<28}{measured}{'' if row['status'] == 'ok' else '  ' + row['status']}")
    return "\n".join(lines)


COLUMNS = ("implementation", "ms", "tokens/s", "x TRL", "peak GiB", "loss", "gradient's norm")
HEADER = (f"| {' | '.join(COLUMNS)} |", "|---" + "|--:" * (len(COLUMNS) - 1) + "|")
LEGEND = """\
A training step of TRL's trainers without the optimiser's: whole model (the shape of Llama 3.2 1B, random weights, bf16
under bf16 autocast, sdpa), forward and backward by the trainer's own `training_step` on one batch. Times are medians of
{repeats} repeats of three steps in a row.

- *TRL*: the trainer as it ships; *TRL's loss on whole logits*: the same with logits of every position in the place of
  its fused head, as models give them.
- *x TRL*: how many times as fast as *TRL*. *peak GiB*: all memory allocated at once, both models' weights included.
- *loss*: DPO sums the rounding of thousands of tokens. With these layers at this width (vocabulary 8,192, 512 tokens,
  on a CPU) a log-probability of the bf16 model is 0.025 nats off that of the same weights in fp32 as it ships, and
  0.024 with `fuse_layers` (standard deviations); the two are 0.028 apart. Were that independent from token to token,
  it would come to 0.2 in the margin of a pair of 2,048 tokens (2 x 1,536 scored, two models, `beta` 0.1) and to 0.4
  in one of 8,192; the rows differ by that order or less. The runs below were not themselves compared with fp32; their
  gradients' norms agree.
"""


def table(report: dict[str, Any]) -> list[str]:
    """One case as a Markdown table."""
    own = next((row.get("ms") for row in report["rows"] if row["implementation"] == SHIPPED[0]), None)
    lines = list(HEADER)
    for row in report["rows"]:
        name = row["implementation"] + ("" if row["status"] == "ok" else f": {row['status']}")
        cells = ["-"] * 6
        if "ms" in row:
            cells = [f"{row['ms']:.1f}", f"{row['tokens_per_second']:,.0f}", f"{own / row['ms']:.2f}" if own else "-",
                     _gib(row["peak_bytes"]), f"{row['loss']:.5f}", f"{row['grad_norm']:.4g}"]  # fmt: skip
        lines.append(f"| {' | '.join([name, *cells])} |")
    return lines
