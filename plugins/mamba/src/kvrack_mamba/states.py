"""FixedStateLayer: states of a layer, each in memory of its own that is written in place."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvrack import BuildContext, Capabilities, LayerSpec, ShapeMismatch, StateLayer
from kvrack.layer import refuse_positive
from kvrack_mamba.buffer import StateBuffer
from kvrack_mamba.config import MambaConfig
from kvrack_mamba.past import Past


class FixedStateLayer(StateLayer):
    """Convolution and recurrent states, `spec.states` of each, in place from the first update to `reset`.

    A convolution state holds the newest `conv_kernel_size` columns (Gu and Dao 2023, "Mamba"), zeros
    to their left while there are fewer. A recurrent state holds whatever the model makes of its
    tokens, and can't be taken back; `crop` puts back a copy where `activate_past_recording` made one.
    """

    def __init__(self, spec: LayerSpec, config: MambaConfig, context: BuildContext) -> None:
        super().__init__(spec, config, context)
        self.record_past = False
        self._conv = [StateBuffer(context.placement) for _ in range(spec.states)]
        self._recurrent = [StateBuffer(context.placement) for _ in range(spec.states)]
        self._past = [Past(config.recorded_states, context.placement) for _ in range(spec.states)]

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            grows=True,
            slides=True,
            chunks=True,
            chunked_prefill=True,
            unequal_head_dim=True,
            records_past=True,
            offloads=True,
            compiles=True,
            stable_address=True,
            lossless=True,
        )

    # --- what a model asks ----------------------------------------------------------------------

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> torch.Tensor:
        index = self._index(state_idx)
        buffer = self._conv[index]
        held = buffer.view()
        self._check_columns(conv_states, held)
        if held is None:
            width = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
            # Tokens before the first are zeros, as the convolution itself takes them.
            everything = F.pad(conv_states, (width, 0))
            missing = max(0, width - conv_states.shape[-1])
            returned = F.pad(conv_states, (missing, 0)) if missing else conv_states
        else:
            width = held.shape[-1]
            everything = returned = torch.cat([held, conv_states], dim=-1)
        kept = everything.shape[-1] - width
        if self.record_past:
            self._past[index].before_forward(buffer, self._recurrent[index])
        buffer.write(everything[..., kept:])
        if self.record_past:
            self._past[index].after_update(buffer, everything[..., :kept].detach())
        return returned

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0) -> torch.Tensor:
        buffer = self._recurrent[self._index(state_idx)]
        buffer.check(recurrent_states, "recurrent state")
        held = buffer.write(recurrent_states)
        return recurrent_states if recurrent_states.requires_grad and torch.is_grad_enabled() else held

    def get_conv_state(self, state_idx: int = 0) -> torch.Tensor | None:
        return self._conv[self._index(state_idx)].writable()

    def get_recurrent_state(self, state_idx: int = 0) -> torch.Tensor | None:
        return self._recurrent[self._index(state_idx)].writable()

    def has_previous_state(self, state_idx: int | None = None) -> bool:
        indices = range(self.spec.states) if state_idx is None else (self._index(state_idx),)
        return all(self._conv[i].view() is not None or self._recurrent[i].view() is not None for i in indices)

    # --- going back -----------------------------------------------------------------------------

    def activate_past_recording(self) -> None:
        self.record_past = True

    def check_crop(self, tokens: int) -> None:
        refuse_positive(tokens)
        if tokens == 0:
            return
        for index, past in enumerate(self._past):
            if past.reaches(-tokens, self._conv[index], self._recurrent[index]):
                continue
            operation = f"crop({tokens}) of states [crops, records_past]"
            if not past.tokens:
                raise self._refuse(operation, "Call activate_past_recording() before the updates that may be cropped")
            if -tokens <= past.tokens and self._recurrent[index].view() is not None:
                counts = ", ".join(f"-{count}" for count in past.boundaries) or "nowhere"
                raise self._refuse(
                    operation,
                    "A recurrent state goes back to where a forward began and a copy is held, now by "
                    f"{counts}: feed fewer tokens at once, set recorded_states higher, or reset() and feed again",
                )
            raise self._refuse(
                operation, f"Only {past.tokens} tokens are recorded: call reset() and feed what is to stay"
            )

    def crop(self, tokens: int) -> None:
        self.check_crop(tokens)
        for index, past in enumerate(self._past):
            if tokens:
                past.go_back(-tokens, self._conv[index], self._recurrent[index])
            past.clear()

    def reset(self) -> None:
        for buffer in (*self._conv, *self._recurrent):
            buffer.clear()
        for past in self._past:
            past.clear()
        self._home = None

    # --- what is held ---------------------------------------------------------------------------

    def storage(self) -> dict[str, torch.Tensor]:
        held: dict[str, torch.Tensor] = {}
        for index, past in enumerate(self._past):
            for kind, buffers in (("conv", self._conv), ("recurrent", self._recurrent)):
                state = buffers[index].view()
                if state is not None:
                    held[f"states.{kind}.{index}"] = state
            held.update(past.storage(index))
        return held

    def metadata(self) -> dict[str, int]:
        integers = {"states.record_past": int(self.record_past)}
        for index, past in enumerate(self._past):
            integers.update(past.metadata(index))
        return integers

    def restore(self, storage: dict[str, torch.Tensor], metadata: dict[str, int]) -> None:
        self.record_past = bool(metadata["states.record_past"])
        for index, past in enumerate(self._past):
            for kind, buffers in (("conv", self._conv), ("recurrent", self._recurrent)):
                state = storage.get(f"states.{kind}.{index}")
                if state is None:
                    buffers[index].clear()
                else:
                    buffers[index].restore(state)
            past.restore(storage, metadata, index, self._conv[index])

    # --- checks ---------------------------------------------------------------------------------

    def _index(self, state_idx: int) -> int:
        if not 0 <= state_idx < self.spec.states:
            raise IndexError(f"state {state_idx}: the layer has {self.spec.states}, as its spec says")
        return state_idx

    def _check_columns(self, conv_states: torch.Tensor, held: torch.Tensor | None) -> None:
        if conv_states.dim() != 3:
            raise ShapeMismatch(f"conv states: expected [batch, channels, tokens], got {tuple(conv_states.shape)}")
        if held is not None and (conv_states.shape[:2] != held.shape[:2] or conv_states.dtype != held.dtype):
            raise ShapeMismatch(
                f"conv states: the cache holds batch {held.shape[0]}, {held.shape[1]} channels in {held.dtype}, got "
                f"batch {conv_states.shape[0]}, {conv_states.shape[1]} channels in {conv_states.dtype}. Call "
                "batch_repeat_interleave or batch_select_indices first, or reset() to start anew"
            )
