"""Context parallelism: each rank holds a part of every sequence, and gathers keys and values for attention.

Llama 3's way (Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2). PyTorch's own ``context_parallel`` (2.13) has
no rule for the attention kernels of CPUs, so that it could not be compared with one rank everywhere.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn.attention.bias import causal_lower_right
from typing_extensions import Self

from accelmark.spec.backports import zip_strict
from accelmark.spec.parallelism import Mesh


def causal_end(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return causal attention of the queries at the last positions of ``key``; a flash kernel can be chosen."""
    mask = causal_lower_right(query.shape[2], key.shape[2])
    mixed: Tensor = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return mixed


class SequencePart:
    """The part of each sequence that a rank has.

    Of n ranks, rank r has chunks r and 2n - 1 - r of 2n, so that causal attention costs all of them the same.
    """

    def __init__(self, ranks: DeviceMesh) -> None:
        self._ranks = ranks
        chunks = [(rank, 2 * ranks.size() - 1 - rank) for rank in range(ranks.size())]
        self._own = chunks[ranks.get_local_rank()]
        gathered = [number for pair in chunks for number in pair]
        self._order = sorted(range(len(gathered)), key=gathered.__getitem__)

    @classmethod
    def open(cls, device: torch.device, mesh: Mesh) -> Self:
        """Return this rank's part on a mesh; all ranks call it together."""
        sizes = dist.get_world_size() // (mesh.cp * mesh.tp), mesh.cp, mesh.tp
        return cls(init_device_mesh(device.type, sizes, mesh_dim_names=("others", "cp", "tp"))["cp"])

    def of(self, whole: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's part of a tensor with all positions along ``dim``."""
        chunks = whole.chunk(len(self._order), dim)
        return torch.cat([chunks[number] for number in self._own], dim)

    def whole(self, part: Tensor, dim: int = 1) -> Tensor:
        """Return the parts of all ranks in the order of positions; gradients are added up over the ranks."""
        gathered = DTensor.from_local(part, self._ranks, [Shard(dim)], run_check=False)
        chunks = gathered.full_tensor(grad_placements=[Partial()]).chunk(len(self._order), dim)
        return torch.cat([chunks[number] for number in self._order], dim)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention: Callable[[Tensor, Tensor, Tensor], Tensor] = causal_end,
    ) -> Tensor:
        """Return attention of this rank's queries to the keys of the whole sequence.

        All are of shape (batch, heads, own positions, width); ``attention`` is causal, up to the last query's position.
        """
        if torch.is_autocast_enabled(query.device.type):
            # Here, so that fewer bytes are exchanged, and because causal_lower_right calls kernels without autocast.
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        key, value = self.whole(torch.stack((key, value)), 3)
        length = query.shape[2] // 2
        ends = [length * (number + 1) for number in self._own]
        parts = zip_strict(query.chunk(2, 2), ends)
        return torch.cat([attention(part, key[:, :, :end], value[:, :, :end]) for part, end in parts], 2)

    def joined(self, output: Tensor) -> Tensor:
        """Return a mean over positions, or an output of shape (batch, positions, ...), for the whole sequences."""
        return self.whole(output) if output.ndim else self.whole(output.expand(2), 0).mean()
