"""The layers of the fake backends."""

from __future__ import annotations

from kvrack import BackendConfig, BufferedLayer, BuildContext, Capabilities, LayerSpec


class FakeConfig(BackendConfig):
    """Config of the fake backends."""

    growth: float = 1.5


class Fake(BufferedLayer):
    """Core's buffers as they are, recording and compiling not promised."""

    def __init__(self, spec: LayerSpec, config: FakeConfig, context: BuildContext) -> None:
        super().__init__(spec, config, context, growth=config.growth)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            grows=True, slides=True, chunks=True, chunked_prefill=True, unequal_head_dim=True, crops=True,
            early_init=True, offloads=True, lossless=True,
        )  # fmt: skip

    def activate_past_recording(self) -> None:
        if self.spec.window is not None:
            raise self._refuse("activate_past_recording [records_past]", "Choose dynamic")


class CropsTooMuch(Fake):
    """Fault: crop removes one token too many."""

    def crop(self, tokens: int) -> None:
        super().crop(tokens - 1 if tokens < 0 else tokens)
