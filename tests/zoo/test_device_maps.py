"""KV sharing in models that accelerate dispatched: layers read what an earlier layer was given, wherever it ran."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import accelerate
import pytest
import torch
import transformers
from transformers import PreTrainedModel

import kvrack
import kvrack_transformers as kt
from kvrack_transformers.versions import CACHE_ARGUMENT

PLACES = {
    **{
        f"model.{part}": "cpu"
        for part in (
            "embed_tokens",
            "embed_tokens_per_layer",
            "per_layer_model_projection",
            "per_layer_projection_norm",
            "altup_projections",
            "altup_unembed_projections",
            "norm",
            "rotary_emb",
        )
    },
    # 0 to 2 keep keys and values, 3 to 5 read those of 1 and 2.
    **{f"model.layers.{layer}": "disk" if layer in (1, 2, 4) else "cpu" for layer in range(6)},
    "lm_head": "cpu",
}


@pytest.mark.skipif(
    not hasattr(transformers.cache_utils, "KVSharingDict"),
    reason="this transformers shares by a dict that accelerate copies: layers don't find what others wrote",
)
@pytest.mark.parametrize(
    ("name", "config"), [("dynamic", {}), ("static", {}), ("fp8", {}), ("hqq", {"nbits": 8, "residual_length": 0})]
)
def test_shared_layers_are_read_across_a_device_map(
    models: Callable[[str], PreTrainedModel], tmp_path: Path, name: str, config: dict[str, object]
) -> None:
    if name not in kvrack.backends():
        pytest.skip(f"{name} isn't installed")
    whole = models("gemma3n")
    model = accelerate.dispatch_model(
        copy.deepcopy(whole), PLACES, main_device="cpu", offload_dir=tmp_path, force_hooks=True
    )
    assert next(model.model.layers[2].parameters()).is_meta
    ids = torch.randint(5, whole.config.vocab_size, (2, 40), generator=torch.Generator().manual_seed(1))
    answers = []
    for each in (model, whole):
        cache = kt.create_cache(each, name, max_length=64, **config)
        answers.append(
            each.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=16,
                output_logits=True,
                return_dict_in_generate=True,
                **{CACHE_ARGUMENT: cache},
            )
        )
        assert [layer.get_seq_length() for layer in cache.layers[:3]] == [55] * 3
    assert torch.equal(answers[0].sequences, answers[1].sequences)
    torch.testing.assert_close(torch.stack(answers[0].logits), torch.stack(answers[1].logits))
