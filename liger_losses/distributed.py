"""Beyond one GPU, on torch's own engines: a head as a module for their hooks, vocabularies and sequences over ranks.

`docs/distributed.md` says which of these DDP, FSDP2, DeepSpeed ZeRO, tensor, sequence and context parallelism need.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ._checks import check_float_tensor, is_dtensor
from .chunked import Loss, ScoredTokens, fused_linear_loss, linear_logprobs
from .chunked.cluster import ClusterPlan, Rates, plan_cluster
from .chunked.loss import check_loss
from .chunked.placements import TENSOR_PARALLEL, check_rows_of_head, group_bounds, mesh_name, own_name, shard_bounds
from .chunked.tokens import check_ignore_index, check_integer, widened

__all__ = [
    "ClusterPlan",
    "FusedHead",
    "Rates",
    "plan_cluster",
    "scored_count",
    "shift_labels",
    "sum_over_ranks",
    "vocab_parallel",
]

# What a loss module calls the head's tensors.
_WEIGHTS = ("lin_weight", "student_weight", "weight")
_BIASES = ("bias", "student_bias")

# Local objects alone: whether one is found here sets off no collective, and may differ from rank to rank.
_meshes: dict[tuple[dist.ProcessGroup, str, str], DeviceMesh] = {}


class FusedHead(nn.Module):
    """A head that answers with a loss or with log-probabilities, and never builds its logits.

    It owns the head's parameters and is *called*, so that whatever a wrapper does around a module's forward and
    backward happens to them: FSDP2 and ZeRO-3 gather the weight before and free it after, in backward again; DDP sees
    its gradients. Use it as the last module of a model, in place of `torch.nn.Linear`.

    Args:
        linear: the head. Its parameters are taken over, not copied: a tied weight stays tied. They may be DTensors.
        loss: what to compute. A `Liger*` module (with its options), or a loss object of
            `liger_losses.fused_linear_loss`; None: `liger_losses.linear_logprobs`.
        options: keyword arguments of `linear_logprobs` or `fused_linear_loss`, for every call; a module has its own.

    Raises:
        TypeError: `linear` is no `torch.nn.Linear`, `loss` nothing of the kind, options beside a module, or options
            that those calls do not have.

    Example:
        >>> head = FusedHead(model.lm_head, LigerFusedLinearDPOLoss(beta=0.1))
        >>> loss, metrics = head(hidden, target, ref_chosen_logps=chosen, ref_rejected_logps=rejected)
    """

    def __init__(self, linear: nn.Linear, loss: nn.Module | Loss | None = None, **options: Any) -> None:
        super().__init__()
        if not isinstance(linear, nn.Linear):
            kind = type(linear)
            raise TypeError(
                f"linear: got a {kind.__module__}.{kind.__qualname__}, expected a torch.nn.Linear; an adapter on "
                "a head is for liger_losses.integrations.transformers.fuse_head(model)"
            )
        if isinstance(loss, nn.Module):
            names = tuple(inspect.signature(loss.forward).parameters)
            if not set(names) & set(_WEIGHTS):
                raise TypeError(f"loss: got {type(loss).__name__}, whose forward takes no weight, expected a Liger* "
                                "module over a linear head")  # fmt: skip
            if options:
                raise TypeError(f"options: got {', '.join(options)} beside a {type(loss).__name__}, which has its own")
        elif loss is not None:
            check_loss(loss)
        self._check_options(loss, options)
        self.weight = linear.weight
        self.bias: nn.Parameter | None
        self.register_parameter("bias", linear.bias)
        self.loss = loss
        self.options = options

    @staticmethod
    def _check_options(loss: nn.Module | Loss | None, options: dict[str, Any]) -> None:
        call = linear_logprobs if loss is None else fused_linear_loss
        parameters = inspect.signature(call).parameters.values()
        known = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
        unknown = [name for name in options if name not in known]
        if unknown:
            raise TypeError(f"options: got {', '.join(unknown)}, expected keyword arguments of {call.__name__}: "
                            f"{', '.join(known)}")  # fmt: skip

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """`(hidden, target, ...)` for log-probabilities and loss objects; for a module its own arguments, in its order,
        without weight and bias. Keywords work as well."""
        if isinstance(self.loss, nn.Module):
            names = tuple(inspect.signature(self.loss.forward).parameters)
            rest = [name for name in names if name not in (*_WEIGHTS, *_BIASES)]
            if len(args) > len(rest):
                raise TypeError(f"FusedHead: got {len(args)} positional arguments, expected at most {len(rest)}")
            head = {next(name for name in names if name in _WEIGHTS): self.weight}
            if self.bias is not None:
                head[next(name for name in names if name in _BIASES)] = self.bias
            return self.loss(**head, **dict(zip(rest, args, strict=False)), **kwargs)
        if len(args) > 2:
            raise TypeError(f"FusedHead: got {len(args)} positional arguments, expected hidden and target")
        given = dict(zip(("hidden", "target"), args, strict=False))
        options = {**self.options, **kwargs}
        if self.loss is None:
            return linear_logprobs(**given, weight=self.weight, bias=self.bias, **options)
        return fused_linear_loss(self.loss, **given, weight=self.weight, bias=self.bias, **options)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, bias={self.bias is not None}, {self.options or ''}"


def vocab_parallel(
    weight: Tensor,  # [rows here, H] (or a bias, [rows here])
    group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    dim: str = TENSOR_PARALLEL,
    first: int | None = None,
    vocab_size: int | None = None,
) -> Tensor:
    """Declare that each rank of a group holds some rows of a head's weight, and no rank all of them.

    Every loss and every statistic takes what this returns as its weight (and bias): each rank projects its own rows;
    targets are ids of the whole vocabulary; all ranks of the group are given the same tokens and get the same numbers,
    the whole hidden gradient and the gradient of their own rows. A DTensor with `Shard(0)` along a mesh dimension named
    "tp" says so of itself and needs no call.

    Args:
        weight: a plain tensor, this rank's rows; or a DTensor with `Shard(0)` along `dim` of its mesh, such as what
            this returned earlier, which it returns again.
        group: of the ranks; or a mesh whose dimension `dim` is that group. A DTensor has its own: None, or of the same
            ranks.
        dim: name of the mesh dimension.
        first: the first row here, to be checked; None: where the rank before ends. Shards may differ in size.
        vocab_size: rows of all ranks, to be checked.

    Returns:
        A DTensor of the whole shape over the same storage; gradients reach `weight`.

    Raises:
        TypeError, ValueError: no such mesh dimension, a replicated or otherwise sharded weight, neither `[rows, H]` nor
            `[rows]` of a floating dtype, shards that overlap, leave a gap, are empty or are not `vocab_size` in all,
            or that differ in `H`, dtype or number of dimensions. What the exchange shows raises on every rank.

    Note:
        Of a plain tensor, every call exchanges shape and dtype: a small collective that all ranks of the group must
        enter, and on an accelerator wait for. Call it once, outside of the loop: what it returns serves every step.
    """
    from torch.distributed.tensor import DTensor, Shard

    if not isinstance(weight, Tensor):
        raise TypeError(f"weight: got {type(weight).__name__}, expected a torch.Tensor")
    for name, number in (("first", first), ("vocab_size", vocab_size)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int)):
            raise TypeError(f"{name}: got {number!r} of type {type(number).__name__}, expected an int or None")
    if is_dtensor(weight):
        spread: Any = weight
        dimension = _dimension(spread.device_mesh, dim)
        if not spread.placements[dimension].is_shard(0):
            raise ValueError(f"weight: got {spread.placements[dimension]} along {dim!r}, expected Shard(0)")
        check_rows_of_head(tuple(weight.shape), weight.dtype)
        owner, bounds = spread.device_mesh.get_group(dimension), shard_bounds("weight", weight, dimension)
        if group is not None:
            _check_same_ranks(_group(group, dim), owner)
        _check_said(first, vocab_size, bounds, dist.get_rank(owner))
        if dim == TENSOR_PARALLEL:
            return weight
        if spread.device_mesh.ndim > 1:
            raise ValueError(f"weight: got a mesh of {spread.device_mesh.ndim} dimensions beside dim={dim!r}; expected "
                             f"one dimension, or the name {TENSOR_PARALLEL!r} for it")  # fmt: skip
        local = spread.to_local()
        _check_on_device(local)
    else:
        owner, local = _group(group, dim), weight
        _check_on_device(local)
        bounds = group_bounds(owner, local, first, vocab_size)
    device = local.device.type
    rows, key = bounds[-1], (owner, device, mesh_name(bounds))
    if key not in _meshes:
        _meshes[key] = DeviceMesh.from_group(owner, device, mesh_dim_names=key[2:])
    shape = torch.Size((rows, *local.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, _meshes[key], [Shard(0)], run_check=False, shape=shape, stride=stride)


def _check_on_device(local: Tensor) -> None:
    if local.is_meta:
        raise ValueError("weight: got device meta, expected that of hidden: it has no values yet")


def _check_said(first: int | None, vocab_size: int | None, bounds: tuple[int, ...], rank: int) -> None:
    """Raise unless a DTensor's shards are those that the caller says they are."""
    if first is not None and first != bounds[rank]:
        raise ValueError(f"first: got {first}, expected {bounds[rank]}, where the DTensor's rows on this rank begin")
    if vocab_size is not None and vocab_size != bounds[-1]:
        raise ValueError(f"vocab_size: got {vocab_size}, expected {bounds[-1]}, the rows of the DTensor")


def _check_same_ranks(group: dist.ProcessGroup, owner: dist.ProcessGroup) -> None:
    given, own = dist.get_process_group_ranks(group), dist.get_process_group_ranks(owner)
    if given != own:
        raise ValueError(f"group: got one of the ranks {given} beside a DTensor spread over {own}, expected None")


def _dimension(mesh: DeviceMesh, dim: str) -> int:
    known = mesh.mesh_dim_names or ()
    names = [own_name(name) for name in known]
    if dim not in names:
        raise ValueError(f"dim: got {dim!r}, expected a dimension of the mesh, {known or 'which has no names'}")
    return names.index(dim)


def _group(group: dist.ProcessGroup | DeviceMesh | None, dim: str) -> dist.ProcessGroup:
    if isinstance(group, DeviceMesh):
        dimension = _dimension(group, dim)
        if group.get_coordinate() is None:
            raise ValueError(f"group: got a mesh that rank {dist.get_rank()} is outside of, expected one of its ranks")
        return group.get_group(dimension)
    if group is None:
        raise TypeError(
            "group: got NoneType beside a weight that is no DTensor, expected a ProcessGroup or a DeviceMesh: a "
            "replicated head needs no vocab_parallel"
        )
    _check_member(group)
    return group


def _check_member(group: object) -> None:
    """Raise for what is no group, and for one of other ranks: torch hands those a number, and reduces nothing."""
    if group is None:
        return
    inside = isinstance(group, dist.ProcessGroup)
    if not inside and group is not dist.GroupMember.NON_GROUP_MEMBER:
        raise TypeError(f"group: got {type(group).__name__}, expected a ProcessGroup")
    if not inside:
        raise ValueError(f"group: got one that rank {dist.get_rank()} is outside of, expected a group of its own")


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        total = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        total = upstream.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


def sum_over_ranks(values: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The sum over a group's ranks, with the gradient of that sum: for units that span ranks (context parallelism).

    Per-token log-probabilities of a sequence whose tokens lie on several ranks are summed here, then over the ranks,
    and any loss of sequences or pairs follows on every rank alike:

        >>> logps = sum_over_ranks(head(hidden, target).sum(-1), mesh["cp"].get_group())  # [2 B]
        >>> loss = dpo_loss(*logps.chunk(2), ref_chosen, ref_rejected).mean()

    Every rank computes the same loss; its backward adds up the gradients that the ranks send. Where parameters'
    gradients are then averaged over these ranks, as DDP and FSDP2 do, they are exactly those of the loss.

    Floating-point tensors alone: whole numbers have no gradient, `torch.distributed.all_reduce` adds them up.
    """
    check_float_tensor("values", values)
    _check_member(group)
    total: Tensor = _SumOverRanks.apply(values, group)
    return total


def shift_labels(labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Labels `[..., T]` moved one to the left, `ignore_index` last: before the sequence is cut, not after.

    A rank's last token predicts the next rank's first: labels shifted on each rank would lose one token a cut.
    """
    check_integer("labels", labels)
    check_ignore_index(ignore_index)
    if labels.dim() == 0:
        raise ValueError("labels: got a tensor without dimensions, expected [..., T]")
    labels = widened(labels)
    shifted = torch.full_like(labels, ignore_index)
    shifted[..., :-1] = labels[..., 1:]
    return shifted


def scored_count(
    target: Tensor | ScoredTokens,
    group: dist.ProcessGroup | None = None,
    *,
    ignore_index: int = -100,
    gradients: str = "mean",
) -> Tensor:
    """What a token loss is to be divided by on each rank, so that the ranks' gradients make up those of the whole mean.

    Args:
        target: this rank's labels. group: the ranks among which the tokens are spread (data and context parallel).
        gradients: how the engine joins the ranks' gradients: `"mean"` (DDP, FSDP2, ZeRO), which divides once more, so
            that the count returned is per rank; or `"sum"`.

    Returns:
        A tensor without dimensions, to be handed on as `num_items_in_batch`; nothing is read on the host. It is fp64,
        in which every count is exact. The losses here take it in their own dtype; of your own fp32 loss it would make
        an fp64 one, two tensors without dimensions: `loss / count.to(loss.dtype)`. GRPO divides the count by its own
        `num_processes`: there it is `"sum"`, whatever the engine does.
    """
    if gradients not in ("mean", "sum"):
        raise ValueError(f"gradients: got {gradients!r}, expected 'mean' or 'sum'")
    check_ignore_index(ignore_index)
    if isinstance(target, ScoredTokens):
        target.check_ignored(ignore_index)
    labels = target.target if isinstance(target, ScoredTokens) else target
    check_integer("target", labels)
    _check_member(group)
    count = (widened(labels) != ignore_index).sum().to(torch.float64)
    dist.all_reduce(count, group=group)
    return (count / dist.get_world_size(group) if gradients == "mean" else count).clamp_min(1e-9)
