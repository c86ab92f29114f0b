"""How far a cache's answers are from a dense one's: mean KL divergence over teacher-forced steps on real text."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
from transformers import DynamicCache, PreTrainedModel, QuantizedCache
from transformers.cache_utils import Cache

import kvrack_transformers as kt
from kvrack_transformers.models import LoadedModel, find_model, load_model
from kvrack_transformers.versions import CACHE_ARGUMENT


def smollm2() -> LoadedModel:
    """Return SmolLM2-135M-Instruct in float32."""
    return load_model(find_model("smollm2"), "cpu", lambda _: contextlib.nullcontext())


def english(loaded: LoadedModel, tokens: int) -> torch.Tensor:
    """Return so many tokens ``[1, tokens]`` of the Python reference, which comes with every Python."""
    text = "\n".join(topics[name] for name in sorted(topics))
    ids = loaded.tokenizer(text[: 8 * tokens], return_tensors="pt").input_ids[:, :tokens]
    assert ids.shape[1] == tokens, "the text is too short"
    return ids


@dataclass(frozen=True)
class Reference:
    """A prompt's keys and values, and what a dense cache answers to the tokens after it.

    Attributes:
        model: the model that computed them.
        states: keys and values of each layer, ``[1, heads, tokens, head_dim]``.
        following: the tokens after the prompt, ``[1, steps]``.
        logits: the answers, ``[steps, vocabulary]``.
    """

    model: PreTrainedModel
    states: list[tuple[torch.Tensor, torch.Tensor]]
    following: torch.Tensor
    logits: torch.Tensor

    def filled(self, cache: Cache) -> Cache:
        """Return the cache after the prompt: what attention sees in a prefill is exact in every cache."""
        for index, (keys, values) in enumerate(self.states):
            cache.update(keys, values, index)
        return cache

    def divergence(self, cache: Cache, at_once: int = 1) -> float:
        """Return the mean of KL(dense || cache) over the steps, in nats, `at_once` tokens a step of the cache's."""
        exact = self.logits.log_softmax(-1)
        seen = answers(self.model, self.filled(cache), self.following, at_once).log_softmax(-1)
        return float((exact.exp() * (exact - seen)).sum(-1).mean())


@torch.no_grad()
def answers(model: PreTrainedModel, cache: Cache, tokens: torch.Tensor, at_once: int = 1) -> torch.Tensor:
    """Return the logits ``[tokens, vocabulary]`` after each of the tokens, given `at_once` at a time."""
    steps = [
        model(few, use_cache=True, **{CACHE_ARGUMENT: cache}).logits[0].float() for few in tokens.split(at_once, 1)
    ]
    return torch.cat(steps)


@torch.no_grad()
def reference(loaded: LoadedModel, prompt: int, steps: int) -> Reference:
    """Return the reference for a prompt and the steps after it, from `english`."""
    ids = english(loaded, prompt + steps)
    dense = DynamicCache(config=loaded.model.config)
    loaded.model(ids[:, :prompt], use_cache=True, **{CACHE_ARGUMENT: dense})
    states = [(layer.keys.clone(), layer.values.clone()) for layer in dense.layers]
    following = ids[:, prompt:]
    return Reference(loaded.model, states, following, answers(loaded.model, dense, following))


OURS: dict[str, tuple[str, dict[str, object]]] = {
    "fp8": ("fp8", {}),
    "hqq 8": ("hqq", {"nbits": 8}),
    "hqq 4": ("hqq", {}),
    "hqq 3": ("hqq", {"nbits": 3}),
    "hqq 2": ("hqq", {"nbits": 2}),
    "hqq 2, no sinks": ("hqq", {"nbits": 2, "sink_tokens": 0}),
    "hqq 1": ("hqq", {"nbits": 1}),
    "hqq keys 8, values 4": ("hqq", {"nbits_key": 8}),
    "hqq 4, axes as in transformers": ("hqq", {"axis_key": 1, "axis_value": 1}),
    "quanto 4": ("quanto", {}),
    "quanto 2": ("quanto", {"nbits": 2}),
}
THEIRS: dict[str, tuple[str, dict[str, object]]] = {
    "fp8": ("fp8", {}),
    "hqq 4": ("hqq", {"nbits": 4, "axis_key": 1, "axis_value": 1}),
    "hqq 2": ("hqq", {"nbits": 2, "axis_key": 1, "axis_value": 1}),
    "hqq 4, axis 0": ("hqq", {"nbits": 4}),
    "hqq 2, axis 0": ("hqq", {"nbits": 2}),
    "quanto 4": ("quanto", {"nbits": 4}),
    "quanto 2": ("quanto", {"nbits": 2}),
}


def caches(model: PreTrainedModel) -> Iterator[tuple[str, Callable[[], Cache]]]:
    """Yield each cache to compare, by a name that says whose it is."""
    for name, (backend, config) in OURS.items():
        yield f"kvrack {name}", lambda backend=backend, config=config: kt.create_cache(model, backend, **config)
    for name, (backend, config) in THEIRS.items():
        yield (
            f"transformers {name}",
            lambda backend=backend, config=config: QuantizedCache(backend, model.config, **config),
        )
