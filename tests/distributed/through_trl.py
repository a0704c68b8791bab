"""What is made fused of TRL's, transformers' and PEFT's, over two ranks: one step equals that of one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from .harness import DOUBLE, WORLD, H, V, check, close, mesh_of, tokens, whole

CPU = torch.device("cpu")


@check
def fsdp2_dpo_through_trl() -> None:
    from benchmarks import trainers, trainers_fsdp
    from benchmarks.trainer_states import FUSED
    from benchmarks.trainers import Case

    trainers.prepare_imports()
    every, own = Case("dpo", 2 * WORLD, 16), Case("dpo", 2, 16)
    batch = trainers.make_batch(every, trainers.TINY["vocab_size"], CPU)

    def step(case: Case, batch: Any, **arguments: Any) -> tuple[Tensor, dict[str, Any]]:
        with trainers_fsdp.built(case, FUSED, DOUBLE, CPU, **arguments) as (trainer, model):
            for _ in range(2):  # the second time, what the first one left behind would show
                model.zero_grad()
                loss = trainer.training_step(model, dict(batch), None)
            return loss, {name: p.grad for name, p in model.named_parameters()}

    expected_loss, expected = step(every, batch)
    with trainers_fsdp.launched():
        loss, gradients = step(own, trainers_fsdp.share(batch, dist.get_rank(), WORLD), **trainers_fsdp.fsdp2())
    dist.all_reduce(loss)
    close(loss / WORLD, expected_loss)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert gradient.placements[0].is_shard(), name
        torch.testing.assert_close(whole(gradient), expected[name], rtol=1e-9, atol=1e-12)


@check
def an_answer_is_not_rounded_by_fsdp2() -> None:
    """accelerate's policy of mixed precision casts what a model returns; log-probabilities and their gradient stay."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from liger_losses.integrations.transformers import FusedHeadOutput, fuse_head

    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(dist.get_rank()))
    answers = []
    for output_dtype in (None, torch.bfloat16):
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                             num_attention_heads=2)  # fmt: skip
        model = LlamaForCausalLM(config)
        fuse_head(model, outputs=("log_probs", "entropy"))
        outer: Any = nn.Sequential(model)  # as a PeftModel stands around the model that is fused
        outer.forward = lambda *args, _model=model, **kwargs: _model(*args, **kwargs)
        fully_shard(outer, mp_policy=MixedPrecisionPolicy(output_dtype=output_dtype))
        answer = outer(input_ids=ids, labels=ids, fused_lm_head=True)
        assert isinstance(answer, FusedHeadOutput)
        (answer.log_probs.square().sum() + answer.entropy.sum()).backward()
        gradients = {name: whole(p.grad) for name, p in model.named_parameters()}
        answers.append(({name: answer[name] for name in ("loss", "log_probs", "entropy")}, gradients))
    for one, other in zip(*answers, strict=True):
        assert all(other[name].dtype == value.dtype and other[name].equal(value) for name, value in one.items())


@check
def adapters_on_a_spread_head() -> None:
    """LoRA and DoRA: A on every rank, B and the magnitudes in rows as the weight is."""
    import peft
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    from liger_losses import linear_logprobs
    from liger_losses.integrations._adapters import widen

    hidden, _weight, _bias, target = tokens()
    mesh = mesh_of()
    for options in ({"use_dora": True}, {"lora_bias": True}):
        found = []
        for spread in (False, True):
            torch.manual_seed(1)
            adapter = peft.LoraConfig(r=3, target_modules=["head"], init_lora_weights=False, **options)
            model: Any = peft.get_peft_model(nn.ModuleDict({"head": nn.Linear(H, V, dtype=DOUBLE)}), adapter).double()
            layer = model.base_model.model["head"]
            inputs = hidden.clone().requires_grad_()
            if spread:
                parallelize_module(layer.base_layer, mesh, ColwiseParallel())
                try:
                    widen(layer, inputs, layer.base_layer.weight, layer.base_layer.bias)
                except ValueError as error:
                    assert "lora_B: got a tensor that is no DTensor beside a vocabulary-parallel weight" in str(error)
                else:
                    raise AssertionError("accepted")
                parallelize_module(layer.lora_B["default"], mesh, ColwiseParallel())
                for part in layer.lora_magnitude_vector.values():
                    part.weight = nn.Parameter(distribute_tensor(part.weight.detach(), mesh, [Shard(0)]))
            x, w, b = widen(layer, inputs, layer.base_layer.weight, layer.base_layer.bias)
            linear_logprobs(x, w, target, b).square().sum().backward()
            gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.requires_grad}
            found.append({**gradients, "hidden": inputs.grad})
        assert len(found[0]) >= 4
        for name, expected in found[0].items():
            close(found[1][name], expected)
