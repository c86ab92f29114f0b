"""EncodedLayer: the attention layer of a backend that brings a codec instead of a layer."""

from __future__ import annotations

from kvrack.backend import Capabilities
from kvrack.buffered import BufferedLayer
from kvrack.codec import Codec, EncodedBuffer
from kvrack.config import BackendConfig
from kvrack.layer import BuildContext
from kvrack.model import LayerSpec


class EncodedLayer(BufferedLayer):
    """Keys and values in two EncodedBuffers, each with an instance of the context's codec.

    What a full, sliding or chunked layer does with tokens is BufferedLayer's; the bytes are the
    codec's. The tensors that `update` returns lie in the cache's scratch, or in the layer's own
    where other layers read them.

    Raises InvalidPlugin when the context has no codec.
    """

    def __init__(self, spec: LayerSpec, config: BackendConfig, context: BuildContext) -> None:
        super().__init__(spec, config, context)
        self._codecs = (context.new_codec(config, "keys"), context.new_codec(config, "values"))
        self._keys, self._values = (self._buffer(codec) for codec in self._codecs)

    def _buffer(self, codec: Codec) -> EncodedBuffer:
        context = self.context
        slot = context.scratch.own_slot(codec.role) if self.spec.read_by_others else codec.role
        return EncodedBuffer(codec, lambda rows: context.buffer(rows=rows), context.scratch, slot, context.backend)

    @property
    def capabilities(self) -> Capabilities:
        error = max(codec.relative_error for codec in self._codecs)
        return Capabilities(
            grows=True,
            slides=True,
            chunks=True,
            chunked_prefill=True,
            unequal_head_dim=True,
            crops=True,
            records_past=True,
            early_init=True,
            offloads=True,
            lossless=error == 0.0,
            relative_error=error,
        )
