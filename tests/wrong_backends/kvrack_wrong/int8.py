"""`good-int8`: 8-bit integers, a scale per token and head, and the newest tokens exact."""

from __future__ import annotations

import torch

from kvrack import AttentionLayer, BackendConfig, BuildContext, Capabilities, LayerSpec
from kvrack.buffered import check_pair
from kvrack.layer import refuse_positive
from kvrack_wrong.good import check_states

ROLES = ("keys", "values")


class Int8Config(BackendConfig):
    """Config of `good-int8`."""

    residual_length: int = 8


class Int8Layer(AttentionLayer):
    """Codes of old tokens, and a tail of at least `residual_length` exact ones that is encoded when twice as long."""

    def __init__(self, spec: LayerSpec, config: Int8Config, context: BuildContext) -> None:
        super().__init__(spec, config, context)
        self.residual = config.residual_length
        self._seen = 0
        self._held: dict[str, torch.Tensor] = {}

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            grows=True, slides=True, chunks=True, chunked_prefill=True, unequal_head_dim=True, crops=True,
            offloads=True, relative_error=0.006,
        )  # fmt: skip

    # --- the codec ------------------------------------------------------------------------------

    def scale_of(self, states: torch.Tensor, role: str) -> torch.Tensor:
        """Return the scale ``[batch, heads, tokens, 1]`` that these tokens are encoded with."""
        return states.float().abs().amax(-1, keepdim=True).clamp_min(1e-37) / 127

    def encode(self, states: torch.Tensor, role: str) -> dict[str, torch.Tensor]:
        scale = self.scale_of(states, role)
        codes = (states.float() / scale).round().clamp(-127, 127).to(torch.int8)
        return {f"{role}.codes": codes, f"{role}.scale": scale}

    def decoded(self, role: str) -> torch.Tensor:
        held = self._held
        past = (held[f"{role}.codes"].float() * held[f"{role}.scale"]).to(held[f"{role}.tail"].dtype)
        return torch.cat([past, held[f"{role}.tail"]], dim=2)

    def flush(self) -> None:
        """Encode the oldest of the tail, all but `residual` tokens, where it is twice as long."""
        for role in ROLES:
            tail = self._held[f"{role}.tail"]
            ready = tail.shape[2] - self.residual
            if ready <= self.residual:
                return
            for name, tensor in self.encode(tail[:, :, :ready], role).items():
                self._held[name] = torch.cat([self._held[name], tensor], dim=2)
            self._held[f"{role}.tail"] = tail[:, :, ready:].clone()

    # --- the layer ------------------------------------------------------------------------------

    def _allocate(self, role: str, states: torch.Tensor) -> None:
        empty = states.detach()[:, :, :0]
        for name, tensor in self.encode(empty, role).items():
            self._held[name] = tensor
        self._held[f"{role}.tail"] = empty.clone()

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        given = dict(zip(ROLES, (key_states, value_states), strict=True))
        for role, states in given.items():
            check_states(states, self._held.get(f"{role}.tail"), role)
        check_pair(key_states, value_states)
        for role, states in given.items():
            if f"{role}.tail" not in self._held:
                self._allocate(role, states)
            self._held[f"{role}.tail"] = torch.cat([self._held[f"{role}.tail"], states.detach()], dim=2)
        self._seen += key_states.shape[2]
        returned = [self.decoded(role) for role in ROLES]
        if self.spec.window is not None:
            self._keep(self.spec.window - 1)
        self.flush()
        return returned[0], returned[1]

    def _keep(self, count: int) -> None:
        for role in ROLES:
            names = [name for name in self._held if name.startswith(f"{role}.") and not name.endswith(".tail")]
            tail = f"{role}.tail"
            drop = max(0, self._held[names[0]].shape[2] + self._held[tail].shape[2] - count)
            encoded = min(drop, self._held[names[0]].shape[2])
            for name in names:
                self._held[name] = self._held[name][:, :, encoded:]
            self._held[tail] = self._held[tail][:, :, drop - encoded :]

    def _length(self) -> int:
        return self._held["keys.codes"].shape[2] + self._held["keys.tail"].shape[2] if self._held else 0

    def early_initialization(
        self,
        batch_size: int,
        kv_heads: int,
        key_head_dim: int,
        value_head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        raise self._refuse("early_initialization [early_init]", "Leave it out: the first update allocates")

    def get_seq_length(self) -> int:
        return self._seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        past = self._seen if self.spec.window is None else min(self._seen, self.spec.window - 1)
        return past + query_length, self._seen - past

    def activate_past_recording(self) -> None:
        if self.spec.window is not None:
            raise self._refuse("activate_past_recording [records_past]", "Choose dynamic")

    @property
    def is_croppable(self) -> bool:
        return self._seen <= self._length()

    def check_crop(self, tokens: int) -> None:
        refuse_positive(tokens)
        if self.spec.window is not None and -tokens < self._seen:
            needed = min(self._seen + tokens, self.spec.window - 1)
            if self._length() + tokens < needed:
                raise self._refuse(f"crop({tokens}) past the window [records_past]", "Choose dynamic")

    def crop(self, tokens: int) -> None:
        self.check_crop(tokens)
        if not self._held or not tokens:
            return
        for role in ROLES:
            tail = f"{role}.tail"
            count = -tokens
            cut = min(count, self._held[tail].shape[2])
            self._held[tail] = self._held[tail][:, :, : self._held[tail].shape[2] - cut]
            for name in [each for each in self._held if each.startswith(f"{role}.") and each != tail]:
                left = max(0, self._held[name].shape[2] - (count - cut))
                self._held[name] = self._held[name][:, :, :left]
        self._seen = max(0, self._seen + tokens)

    def reset(self) -> None:
        self._held = {}
        self._seen = 0
        self._home = None

    def storage(self) -> dict[str, torch.Tensor]:
        return dict(self._held)

    def metadata(self) -> dict[str, int]:
        return {"seen": self._seen}

    def restore(self, storage: dict[str, torch.Tensor], metadata: dict[str, int]) -> None:
        self._held = {name: tensor.detach().clone() for name, tensor in storage.items()}
        self._seen = metadata["seen"]

    @property
    def keys(self) -> torch.Tensor | None:
        return self.decoded("keys") if self._held else None

    @property
    def values(self) -> torch.Tensor | None:
        return self.decoded("values") if self._held else None
