"""BuildContext: what a layer is built with besides its spec and config, and what the layers of a cache share."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from kvrack.buffer import PlainTokens
from kvrack.codec import Codec, Role
from kvrack.config import BackendConfig
from kvrack.errors import InvalidPlugin
from kvrack.events import Origin
from kvrack.fixed import PlainFixedTokens
from kvrack.placement import DEVICE, Placement
from kvrack.scratch import Scratch

Kind = TypeVar("Kind")


class Shared:
    """What the layers of one cache share besides scratch, by kind. A copy of a cache starts with none of it."""

    def __init__(self) -> None:
        self._kept: dict[type, Any] = {}

    def get(self, kind: type[Kind], make: Callable[[], Kind]) -> Kind:
        """Return the cache's one object of this kind, made by the first layer that asks."""
        if kind not in self._kept:
            self._kept[kind] = make()
        kept: Kind = self._kept[kind]
        return kept

    def __deepcopy__(self, memo: dict[int, Any]) -> Shared:
        return Shared()


@dataclass(frozen=True)
class BuildContext:
    """What a layer is built with besides its spec and config.

    Attributes:
        backend: name the layer was asked for by, for messages.
        placement: where buffers take their memory from.
        max_length: tokens the whole use will need (prompt and answer), None when unknown.
        codec: class that encodes what the layer keeps, None where it keeps plain tensors.
        scratch: memory that the cache's layers decode into, shared by them.
        shared: whatever else the cache's layers share.
        layer_index: position of the layer in its cache.
    """

    backend: str = ""
    placement: Placement = field(default=DEVICE)
    max_length: int | None = None
    codec: type[Codec] | None = None
    scratch: Scratch = field(default_factory=Scratch, repr=False, compare=False)
    shared: Shared = field(default_factory=Shared, repr=False, compare=False)
    layer_index: int = 0

    def buffer(self, growth: float = 1.25, rows: float = 1.0, capacity: int | None = None) -> PlainTokens:
        """Return a new, empty buffer for one tensor of tokens, growing by `growth`.

        Args:
            growth: factor by which its memory grows.
            rows: rows of the buffer that a token takes, below 1 where several share one.
            capacity: tokens to allocate for at once; None to grow.
        """
        most = self.max_length if capacity is None else capacity
        limit = None if most is None else math.ceil(most * rows)
        buffer = self.placement.buffer(growth, limit, is_whole=capacity is not None)
        buffer.origin = Origin(self.backend, self.layer_index, rows)
        return buffer

    def fixed_buffer(self, slots: int, is_ring: bool = False) -> PlainFixedTokens:
        """Return a new buffer with room for `slots` tokens, or for the newest `slots`; nothing is allocated."""
        buffer = self.placement.fixed_buffer(slots, is_ring)
        buffer.origin = self.origin
        return buffer

    @property
    def origin(self) -> Origin:
        """The layer that is built, as its events name it."""
        return Origin(self.backend, self.layer_index)

    def new_codec(self, config: BackendConfig, role: Role) -> Codec:
        """Return a codec for `role`. Raises InvalidPlugin when the context has none."""
        if self.codec is None:
            raise InvalidPlugin(
                self.backend, "its layer", "it encodes, but no codec was named; give Backend(codec=...)"
            )
        codec = self.codec(config, role)
        codec.scratch = self.scratch
        return codec

    def __deepcopy__(self, memo: dict[int, Any]) -> BuildContext:
        # Only these are state: a copied cache must not decode into the original's scratch.
        return replace(self, scratch=copy.deepcopy(self.scratch, memo), shared=copy.deepcopy(self.shared, memo))
