"""DTensors among a call's tensors: a vocabulary-parallel head stays local, everything else is gathered once."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._checks import FLOATING, is_dtensor
from .head import NAMES
from .parallel import VocabularyShard
from .teacher import Teacher

# The mesh dimension along which a vocabulary is spread: torchtitan, transformers and accelerate give it this name.
TENSOR_PARALLEL = "tp"


def gathered(parameter: Tensor) -> Tensor:
    """The whole of a sharded parameter, gathered once for all tiles.

    Its gradient goes back as the mean over ranks. Left to itself DTensor takes every rank's gradient for the same one
    and keeps of each rank only its shard, which is right under tensor parallelism alone; the mean is right there too.
    """
    if not is_dtensor(parameter):
        return parameter
    from torch.distributed.tensor import Partial

    sharded: Any = parameter
    return sharded.full_tensor(grad_placements=[Partial("avg")] * sharded.device_mesh.ndim)


def tensor_parallel_dimension(tensor: Tensor) -> int | None:
    """The mesh dimension named "tp" along which the rows of a DTensor are spread, if there is one."""
    if not is_dtensor(tensor):
        return None
    spread: Any = tensor
    names = spread.device_mesh.mesh_dim_names or ()
    found = [index for index, name in enumerate(names) if own_name(name) == TENSOR_PARALLEL]
    return found[0] if found and spread.placements[found[0]].is_shard(0) else None


def vocabulary_ranks(weight: Tensor) -> int:
    """Ranks over which the rows of a head's weight are spread; 1 for any other."""
    dimension = tensor_parallel_dimension(weight)
    spread: Any = weight
    return 1 if dimension is None else int(spread.device_mesh.size(dimension))


def mesh_name(bounds: tuple[int, ...]) -> str:
    """The mesh dimension's name for shards of these bounds.

    DTensor itself knows torch.chunk's sizes alone. Others are part of the name: meshes are compared by it, and it goes
    where the DTensor goes.
    """
    return TENSOR_PARALLEL if bounds == chunked_bounds(len(bounds) - 1, bounds[-1]) else f"{TENSOR_PARALLEL}{[*bounds]}"


def own_name(name: str) -> str:
    """Of a mesh dimension, without the bounds that `mesh_name` may have made part of it."""
    return TENSOR_PARALLEL if name.startswith(f"{TENSOR_PARALLEL}[") else name


def check_bounds(bounds: tuple[int, ...], vocab_size: int, name: str = "weight") -> None:
    """Raise unless they are the starts of non-empty consecutive shards of the whole vocabulary."""
    starts = bounds[:-1]
    if bounds[0] != 0 or bounds[-1] != vocab_size or any(a >= b for a, b in pairwise(bounds)):
        raise ValueError(
            f"{name}: got shards that begin at {list(starts)} and end at {bounds[-1]}, expected consecutive ones of at "
            f"least one row that cover [0, {vocab_size})"
        )


def chunked_bounds(ranks: int, vocab_size: int) -> tuple[int, ...]:
    step = -(-vocab_size // ranks)
    return tuple(min(rank * step, vocab_size) for rank in range(ranks + 1))


def shard_bounds(name: str, weight: Any, dimension: int) -> tuple[int, ...]:
    """Where the shards of a DTensor spread along a mesh dimension begin, and where the last ends."""
    known = weight.device_mesh.mesh_dim_names[dimension]
    bounds = chunked_bounds(weight.device_mesh.size(dimension), weight.shape[0])
    if known != own_name(known):
        bounds = tuple(map(int, known[len(TENSOR_PARALLEL) + 1 : -1].split(",")))
    check_bounds(bounds, weight.shape[0], name)
    return bounds


def _shard_of(weight: Any, dimension: int, name: str = "weight") -> VocabularyShard:
    return VocabularyShard(weight.device_mesh.get_group(dimension).group_name, shard_bounds(name, weight, dimension))


def _check_spread(name: str, tensor: Tensor) -> int:
    """The mesh dimension along which the rows of a tensor beside a vocabulary-parallel weight are spread."""
    dimension = tensor_parallel_dimension(tensor)
    if dimension is None:
        raise ValueError(f"{name}: got {_placed(tensor)} beside a vocabulary-parallel weight, expected a DTensor with "
                         f"Shard(0) along {TENSOR_PARALLEL!r}")  # fmt: skip
    return dimension


def _local_rows(name: str, tensor: Any, shard: VocabularyShard) -> Tensor:
    """This rank's rows; what is sharded along other dimensions of the mesh, too, is gathered along those."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    dimension = _check_spread(name, tensor)
    others = [index for index in range(tensor.device_mesh.ndim) if index != dimension]
    local: Tensor
    if others:
        wanted = [Shard(0) if i == dimension else Replicate() for i in range(tensor.device_mesh.ndim)]
        back = [Shard(0) if i == dimension else Partial("avg") for i in range(tensor.device_mesh.ndim)]
        local = tensor.redistribute(placements=wanted).to_local(grad_placements=back)
    else:
        local = tensor.to_local()
    rank = shard.rank
    if local.shape[0] != shard.bounds[rank + 1] - shard.bounds[rank] or tensor.shape[0] != shard.vocab_size:
        raise ValueError(
            f"{name}: got {local.shape[0]} of {tensor.shape[0]} rows on rank {rank} of the group, expected those of "
            f"[{shard.bounds[rank]}, {shard.bounds[rank + 1]}) of {shard.vocab_size}"
        )
    return local


def spread_rows(name: str, tensor: Tensor, weight: Tensor) -> Tensor:
    """This rank's rows of what is placed as a vocabulary-parallel `weight`."""
    dimension = tensor_parallel_dimension(weight)
    assert dimension is not None
    return _local_rows(name, tensor, _shard_of(weight, dimension))


def spread_as(weight: Any, rows: Tensor) -> Tensor:
    """The DTensor of which each rank has `rows`, placed as a vocabulary-parallel `weight`."""
    from torch.distributed.tensor import DTensor, Shard

    dimension, mesh = tensor_parallel_dimension(weight), weight.device_mesh
    mesh = mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[dimension]]
    shape = torch.Size((weight.shape[0], *rows.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def _placed(tensor: Any) -> str:
    if not is_dtensor(tensor):
        return "a tensor that is no DTensor"
    names = tensor.device_mesh.mesh_dim_names or tuple(range(tensor.device_mesh.ndim))
    return "a DTensor with " + ", ".join(f"{p} along {n!r}" for n, p in zip(names, tensor.placements, strict=True))


def _check_hidden(name: str, hidden: Any) -> None:
    """Raise for hidden states that are not whole rows of tokens."""
    names = hidden.device_mesh.mesh_dim_names or ("",) * hidden.device_mesh.ndim
    wrong = [
        n for n, p in zip(names, hidden.placements, strict=True)
        if not p.is_replicate() and (n != TENSOR_PARALLEL or p.is_partial() or p.is_shard(hidden.dim() - 1))
    ]  # fmt: skip
    if wrong:
        raise ValueError(f"{name}: got {_placed(hidden)}, expected this rank's tokens: Replicate(), or along "
                         f"{TENSOR_PARALLEL!r} a Shard of another dimension than the last")  # fmt: skip


def _whole_hidden(name: str, hidden: Any) -> Tensor:
    """Hidden states of every token, where those may be spread over the tensor-parallel ranks (sequence parallel).

    Their gradient comes back whole on every rank, summed before it was rounded.
    """
    from torch.distributed.tensor import Replicate

    _check_hidden(name, hidden)
    replicated = [Replicate()] * hidden.device_mesh.ndim
    return hidden.redistribute(placements=replicated).to_local(grad_placements=replicated)


def check_placed(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    names: tuple[str, str, str] = NAMES,  # that the caller knows them by
) -> None:
    """Raise for a head whose tensors are placed differently; nothing is communicated."""
    if torch.compiler.is_compiling() or not any(map(is_dtensor, (hidden, weight, bias))):
        return  # local_head refuses DTensors while tracing
    if is_dtensor(hidden):
        _check_hidden(names[0], hidden)
    dimension = tensor_parallel_dimension(weight)
    if dimension is not None:
        shard_bounds(names[1], weight, dimension)
    if bias is None:
        return
    if dimension is not None:
        _check_spread(names[2], bias)
    elif tensor_parallel_dimension(bias) is not None:
        raise ValueError(f"{names[2]}: got {_placed(bias)} beside a weight that is not, expected one placed as "
                         f"{names[1]} is")  # fmt: skip


def local_head(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, names: tuple[str, str, str] = NAMES
) -> tuple[Tensor, Tensor, Tensor | None, VocabularyShard | None]:
    """What this rank multiplies, and its place in the vocabulary where that is spread over ranks."""
    if not any(map(is_dtensor, (hidden, weight, bias))):
        return hidden, weight, bias, None
    if torch.compiler.is_compiling():
        raise NotImplementedError("hidden, weight, bias: got a DTensor under torch.compile, expected an eager call")
    check_placed(hidden, weight, bias, names)
    dimension = tensor_parallel_dimension(weight)
    if dimension is None:
        if is_dtensor(hidden):
            hidden = _whole_hidden(names[0], hidden)
        return hidden, gathered(weight), None if bias is None else gathered(bias), None
    shard = _shard_of(weight, dimension, names[1])
    if is_dtensor(hidden):
        hidden = _whole_hidden(names[0], hidden)
    bias = None if bias is None else _local_rows(names[2], bias, shard)
    return hidden, _local_rows(names[1], weight, shard), bias, shard


def local_teacher(teacher: Teacher, shard: VocabularyShard | None) -> Teacher:
    """The teacher's columns of this rank: of a DTensor its shard, of whole tensors a view."""
    hidden, weight, bias, logits = teacher.tensors
    if is_dtensor(hidden):
        hidden = _whole_hidden("teacher_hidden", hidden)
    if shard is None:
        for name, tensor in (("teacher_weight", weight), ("teacher_bias", bias)):
            dimension = None if tensor is None else tensor_parallel_dimension(tensor)
            if dimension is None:
                continue
            bounds = shard_bounds(name, tensor, dimension)
            if bounds != chunked_bounds(len(bounds) - 1, bounds[-1]):  # DTensor could not put them together
                raise ValueError(f"{name}: got a DTensor in unequal shards, {list(bounds)}, beside a student's head "
                                 "that is whole; expected a whole tensor, or a student spread alike")  # fmt: skip
        weight, bias, logits = (None if t is None else gathered(t) for t in (weight, bias, logits))
        return replace(teacher, hidden=hidden, weight=weight, bias=bias, logits=logits)
    if teacher.probabilities:
        raise ValueError("teacher_probs: got a tensor beside a vocabulary-parallel student, expected their logarithms, "
                         "as teacher_logits of linear_divergence or fused_linear_distillation")  # fmt: skip
    weight = None if weight is None else _own_rows("teacher_weight", weight, shard)
    bias = None if bias is None else _own_rows("teacher_bias", bias, shard)
    if isinstance(logits, Tensor):
        if logits.shape[-1] != shard.vocab_size:
            raise ValueError(f"teacher_logits: got {logits.shape[-1]} columns beside a vocabulary-parallel student, "
                             f"expected its {shard.vocab_size}")  # fmt: skip
        given: Any = logits
        logits = given.to_local() if is_dtensor(logits) else logits[..., shard.columns]
        if logits.shape[-1] != shard.columns.stop - shard.columns.start:
            raise ValueError(f"teacher_logits: got {_placed(given)}, expected its columns spread as the student's")
    return replace(teacher, hidden=hidden, weight=weight, bias=bias, logits=logits)


def _own_rows(name: str, tensor: Tensor, shard: VocabularyShard) -> Tensor:
    if not isinstance(tensor, Tensor):
        return tensor  # refused by the checks that follow, with a message of its own
    if is_dtensor(tensor) and tensor_parallel_dimension(tensor) is not None:
        return _local_rows(name, tensor.detach(), shard)
    if tensor.shape[0] != shard.vocab_size:
        raise ValueError(
            f"{name}: got {tensor.shape[0]} rows beside a vocabulary-parallel student, expected its {shard.vocab_size}"
        )
    return gathered(tensor.detach())[shard.columns]


def check_rows_of_head(shape: tuple[int, ...], dtype: torch.dtype, where: str = "") -> None:
    """Raise for what is neither some rows of a head's weight nor some entries of its bias."""
    if dtype not in FLOATING:
        raise TypeError(f"weight: got dtype {dtype}{where}, expected one of {', '.join(map(str, FLOATING))}")
    if len(shape) not in (1, 2) or 0 in shape[1:]:
        raise ValueError(f"weight: got shape {shape}{where}, expected [rows, H] with H >= 1, or of a bias [rows]")


def group_bounds(group: dist.ProcessGroup, local: Tensor, first: int | None, vocab_size: int | None) -> tuple[int, ...]:
    """The bounds of all ranks' shards, from what each says of its own; a collective of objects.

    Whatever is wrong with one of them raises on every rank.
    """
    said: list[Any] = [None] * group.size()
    dist.all_gather_object(said, (tuple(local.shape), local.dtype, first, vocab_size), group=group)
    one_shape, one_dtype = said[0][:2]
    bounds, total = [0], 0
    for rank, (shape, dtype, own_first, _size) in enumerate(said):
        check_rows_of_head(shape, dtype, f" on rank {rank} of the group")
        if dtype != one_dtype:
            raise TypeError(f"weight: got dtype {dtype} on rank {rank} of the group, expected {one_dtype} as on rank 0")
        if shape[1:] != one_shape[1:]:
            raise ValueError(f"weight: got shape {shape} on rank {rank} of the group, expected "
                             f"{('rows', *one_shape[1:])} as on rank 0")  # fmt: skip
        own_rows, begin = shape[0], total if own_first is None else own_first
        if begin != total:
            what = "overlap" if begin < total else "leave a gap"
            raise ValueError(f"weight: got shards that {what}: rank {rank} of the group begins at {begin}, expected "
                             f"{total}, where the rank before it ends")  # fmt: skip
        total += own_rows
        bounds.append(total)
    sizes = {size for *_rest, size in said if size is not None}
    if sizes - {total}:
        raise ValueError(f"weight: got shards of {total} rows in all, expected vocab_size={min(sizes - {total})}")
    found = tuple(bounds)
    check_bounds(found, total)
    return found
