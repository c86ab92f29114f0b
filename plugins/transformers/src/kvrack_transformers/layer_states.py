"""State layers as models of earlier transformers releases read them: by attributes of the layer."""

from __future__ import annotations

from typing import Any

import torch

from kvrack import StateLayer
from kvrack_transformers.versions import STATES_HAVE_INDICES

States = torch.Tensor | dict[int, torch.Tensor | None] | None


class LayerStates:
    """A kvrack state layer with the attributes `conv_states` and `recurrent_states`; all else is the layer's own.

    Args:
        layer: the layer; its states are returned themselves, for models write to them.
    """

    def __init__(self, layer: StateLayer) -> None:
        self.layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)

    @property
    def conv_states(self) -> States:
        """The convolution states: a dict by index, or in the earliest releases the one there is."""
        return self._read(self.layer.get_conv_state)

    @property
    def recurrent_states(self) -> States:
        """The recurrent states, likewise."""
        return self._read(self.layer.get_recurrent_state)

    @property
    def device(self) -> torch.device | None:
        """Where the states are, None before any is held."""
        return next((tensor.device for tensor in self.layer.storage().values()), None)

    def _read(self, state: Any) -> States:
        if not STATES_HAVE_INDICES:
            held: torch.Tensor | None = state(0)
            return held
        return {index: state(index) for index in range(self.layer.spec.states)}
