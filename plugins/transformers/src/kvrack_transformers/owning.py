"""OwnsRack: what every class of transformers' caches asks of the kvrack cache that it owns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

import kvrack
from kvrack.cache import MemoryRow


class OwnsRack:
    """Mixed in before a class of transformers, so that these answers come before its own.

    Attributes:
        rack: the kvrack cache.
    """

    rack: kvrack.Cache

    # transformers' Cache sets these in its constructor, which is not called.
    layer_class_to_replicate = None
    offloading = False

    # --- what generate does with it -------------------------------------------------------------

    def get_max_cache_shape(self, layer_idx: int | None = None) -> int:
        """The name of `get_max_length` in releases before 5.13."""
        return self.rack.get_max_length(layer_idx)

    @property
    def max_cache_len(self) -> int:
        return self.rack.get_max_length()

    @property
    def max_batch_size(self) -> int:
        return self.rack.batch_size

    @property
    def batch_size(self) -> int:
        return self.rack.batch_size

    @property
    def is_croppable(self) -> bool:
        return self.rack.is_croppable

    @property
    def is_initialized(self) -> bool:
        return self.rack.is_initialized

    def early_initialization(
        self,
        batch_size: int,
        num_heads: int | Sequence[int],
        head_dim: int | Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.rack.early_initialization(batch_size, num_heads, head_dim, dtype, device)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.rack.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.rack.batch_select_indices(indices)

    # --- what a user asks -----------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of memory really held; see `kvrack.Cache.nbytes`."""
        return self.rack.nbytes

    def memory(self) -> list[MemoryRow]:
        """Bytes by layer, role and device; see `kvrack.Cache.memory`. Cross-attention comes after a decoder's own."""
        return self.rack.memory()

    def save(
        self,
        path: str | Path,
        fingerprint: str | None = None,
        token_ids: Sequence[int] | None = None,
        notes: Mapping[str, str] | None = None,
    ) -> None:
        """Write the cache to one file, for ``kvrack_transformers.wrap(kvrack.load(path))``; see `kvrack.Cache.save`."""
        self.rack.save(path, fingerprint, token_ids, notes)
