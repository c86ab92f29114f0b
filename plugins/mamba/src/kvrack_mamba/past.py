"""Past: what must be kept of a layer's tokens so that its states can go back."""

from __future__ import annotations

import torch

from kvrack import TokenBuffer
from kvrack.placement import Placement
from kvrack_mamba.buffer import StateBuffer


class Past:
    """The recorded past of one convolution state and of the recurrent state beside it.

    Of convolution inputs every column that left the state is kept, so the state can go back by any
    number of tokens. A recurrent state can only be kept as it was: a copy before each forward, the
    newest `most` of them.

    Args:
        most: copies of the recurrent state to hold.
        placement: where the memory lives.

    Attributes:
        tokens: how many were recorded.
        is_whole: whether the first one recorded was the first of the sequence.
    """

    def __init__(self, most: int, placement: Placement) -> None:
        self.most = most
        self.placement = placement
        self.tokens = 0
        self.is_whole = False
        self._columns = TokenBuffer(placement=placement)
        self._copies: dict[int, StateBuffer] = {}
        self._version: int | None = None

    def before_forward(self, conv: StateBuffer, recurrent: StateBuffer) -> None:
        """Record what the forward that now gives its convolution inputs is going to change."""
        if _version(conv) != self._version and self._version is not None:
            # A model wrote to the state itself, so tokens went by that were not recorded.
            self.clear()
        if self.tokens == 0:
            self.is_whole = conv.view() is None
        state = recurrent.view()
        if state is None or self.most == 0:
            return
        spare = StateBuffer(self.placement)
        if len(self._copies) == self.most:
            spare = self._copies.pop(min(self._copies))
        spare.restore(state)
        self._copies[self.tokens] = spare

    def after_update(self, conv: StateBuffer, dropped: torch.Tensor) -> None:
        """Record the columns that left the state, ``[batch, channels, new_tokens]``, as many as came in."""
        self._columns.append(dropped.transpose(1, 2).unsqueeze(1))
        self.tokens += dropped.shape[-1]
        self._version = _version(conv)

    def reaches(self, tokens: int, conv: StateBuffer, recurrent: StateBuffer) -> bool:
        """Return whether the states can go back by `tokens`, 1 or more."""
        if conv.view() is None:
            # Nothing says how many tokens a recurrent state alone has seen.
            return recurrent.view() is None
        if self.tokens == 0 or _version(conv) != self._version:
            return False
        if self.is_whole and tokens >= self.tokens:
            return True
        return tokens <= self.tokens and (recurrent.view() is None or self.tokens - tokens in self._copies)

    def go_back(self, tokens: int, conv: StateBuffer, recurrent: StateBuffer) -> None:
        """Put both states back by `tokens`, as `reaches` said they can."""
        state = conv.view()
        if state is None:
            return
        if self.is_whole and tokens >= self.tokens:
            conv.clear()
            recurrent.clear()
            return
        columns = self._columns.view()
        assert columns is not None
        everything = torch.cat([columns.squeeze(1).transpose(1, 2), state], dim=-1)
        stop = everything.shape[-1] - tokens
        conv.write(everything[..., stop - state.shape[-1] : stop])
        if recurrent.view() is not None:
            copied = self._copies[self.tokens - tokens].view()
            assert copied is not None
            recurrent.write(copied)

    @property
    def boundaries(self) -> list[int]:
        """By how many tokens a recurrent state can go back, fewest first."""
        whole = [self.tokens] if self.is_whole and self.tokens else []
        return sorted({self.tokens - position for position in self._copies if position < self.tokens} | set(whole))

    def clear(self) -> None:
        """Forget the past and free its memory."""
        self.tokens = 0
        self.is_whole = False
        self._columns.clear()
        self._copies = {}
        self._version = None

    def storage(self, index: int) -> dict[str, torch.Tensor]:
        """Return every tensor held, by its name in the layer."""
        columns = self._columns.view()
        held = {} if columns is None else {f"states.conv.{index}.past": columns}
        for position, copied in self._copies.items():
            state = copied.view()
            assert state is not None
            held[f"states.recurrent.{index}.at.{position}"] = state
        return held

    def metadata(self, index: int) -> dict[str, int]:
        """Return the integers that, with `storage()`, are the whole past, by their names in the layer."""
        return {f"states.{index}.recorded": self.tokens, f"states.{index}.is_whole": int(self.is_whole)}

    def restore(
        self, storage: dict[str, torch.Tensor], metadata: dict[str, int], index: int, conv: StateBuffer
    ) -> None:
        """Take on what `storage()` and `metadata()` returned, beside the restored state `conv`."""
        self.tokens = metadata[f"states.{index}.recorded"]
        self.is_whole = bool(metadata[f"states.{index}.is_whole"])
        columns = storage.get(f"states.conv.{index}.past")
        if columns is None:
            self._columns.clear()
        else:
            self._columns.restore(columns)
        prefix = f"states.recurrent.{index}.at."
        former, self._copies = self._copies, {}
        for name, state in storage.items():
            if name.startswith(prefix):
                position = int(name.removeprefix(prefix))
                self._copies[position] = former.get(position) or StateBuffer(self.placement)
                self._copies[position].restore(state)
        self._version = _version(conv) if self.tokens else None


def _version(buffer: StateBuffer) -> int | None:
    """Return how often the state was written to, by whomever; None when none is held."""
    state = buffer.view()
    return None if state is None else state._version
