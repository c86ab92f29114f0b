"""What a model and its tokenizer are told by, so that a cache is not used with another."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import torch

from kvrack_transformers.dispatched import weights
from kvrack_transformers.sharding import shard_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SAMPLES = 16
"""Elements that are read of each weight."""


def fingerprint(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> str:
    """Return a short text that another model's, fine-tune's, dtype's or tokenizer's differs from.

    Reads a few elements of every weight and not all, so that it takes milliseconds (of weights that
    accelerate offloaded to disk, as long as reading them takes); of a tokenizer the vocabulary and the
    chat template. Where the weights are doesn't matter. Of a model that is split over ranks each rank's
    part has its own. To give to `kvrack.load`, `Cache.save` and `PrefixStore`.

    Raises ValueError for a weight that is nowhere: on the meta device, and no hook of accelerate's has it.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{type(model).__name__} {shard_of(model) or 'whole'}".encode())
    with torch.no_grad():
        for name, weight in weights(model):
            if weight.is_meta and weight.numel():
                raise ValueError(
                    f"fingerprint: expected the model's weights, {name} is on the meta device and has no data. "
                    "Load the model first"
                )
            digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
            flat = weight.detach().flatten()
            if flat.numel():
                places = torch.linspace(0, flat.numel() - 1, SAMPLES, dtype=torch.float64, device=flat.device).long()
                digest.update(flat[places].cpu().view(torch.uint8).numpy().tobytes())
    if tokenizer is not None:
        vocabulary = sorted(tokenizer.get_vocab().items())
        digest.update(json.dumps([vocabulary, getattr(tokenizer, "chat_template", None)]).encode())
    return digest.hexdigest()
