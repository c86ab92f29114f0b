"""kt.generate from what is known: rows out of a cache of one, and prompts from a prefix store."""

import pytest
import torch
import transformers

import kvrack
import kvrack_transformers as kt
from kvrack_transformers.versions import CACHE_ARGUMENT

PLENTY = 1 << 30
GREEDY = {"max_new_tokens": 6, "do_sample": False}


def ids(length: int, seed: int = 0, rows: int = 1) -> torch.Tensor:
    return torch.randint(2, 64, (rows, length), generator=torch.Generator().manual_seed(seed))


class Fed:
    """Counts the tokens that a model is fed."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        self.tokens = 0
        self._hook = model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module, arguments, keywords):
        given = arguments[0] if arguments else keywords["input_ids"]
        self.tokens += given.numel()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._hook.remove()


def filled(model, prompt: torch.Tensor) -> kt.TransformersCache:
    cache = kt.create_cache(model, "dynamic")
    with torch.no_grad():
        model(prompt, **{CACHE_ARGUMENT: cache})
    return cache


# --- rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}], ids=str)
def test_a_prefix_of_one_row_serves_beams_and_stays_as_it_is(llama, how):
    prompt = ids(9)
    cache = filled(llama, prompt[:, :-2])
    before = {name: tensor.clone() for name, tensor in cache.layers[0].storage().items()}
    got = kt.generate(llama, prompt, **{CACHE_ARGUMENT: cache}, **GREEDY, **how)
    assert torch.equal(got, llama.generate(prompt, use_cache=False, **GREEDY, **how))
    assert cache.get_seq_length() == 7
    for name, tensor in cache.layers[0].storage().items():
        assert torch.equal(tensor, before[name])


def test_a_prefix_of_one_row_serves_samples_and_batches(llama):
    prompt = ids(9)
    cache = filled(llama, prompt[:, :-2])
    sampling = {"do_sample": True, "max_new_tokens": 6, "num_return_sequences": 3}
    torch.manual_seed(5)
    got = kt.generate(llama, prompt, **{CACHE_ARGUMENT: cache}, **sampling)
    torch.manual_seed(5)
    assert torch.equal(got, llama.generate(prompt, use_cache=False, **sampling))
    batch = torch.cat([prompt[:, :-2].expand(2, -1), ids(2, 1, rows=2)], dim=1)
    got = kt.generate(llama, batch, **{CACHE_ARGUMENT: cache}, **GREEDY)
    assert torch.equal(got, llama.generate(batch, use_cache=False, **GREEDY))


def test_a_cache_of_enough_rows_is_gone_on_with(llama):
    prompt = ids(9)
    cache = filled(llama, prompt[:, :-2])
    output = kt.generate(llama, prompt, **{CACHE_ARGUMENT: cache}, **GREEDY, return_dict_in_generate=True)
    assert getattr(output, CACHE_ARGUMENT) is cache
    assert cache.get_seq_length() == 14


# --- the store ------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["dynamic", None])
def test_only_what_is_missing_is_computed(llama, backend):
    store, prefix = kvrack.PrefixStore(PLENTY), ids(40)
    for turn in range(3):
        prompt = torch.cat([prefix, ids(5, seed=10 + turn)], dim=1)
        with Fed(llama) as fed:
            got = kt.generate(llama, prompt, cache_implementation=backend, prefix_store=store, **GREEDY)
        assert torch.equal(got, llama.generate(prompt, use_cache=False, **GREEDY))
        assert fed.tokens == (45 if turn == 0 else 5) + 5
    assert (store.stats.hits, store.stats.misses, store.stats.tokens) == (2, 1, 80)
    # The conversation goes on: what was answered is known too.
    longer = torch.cat([got, ids(3, seed=20)], dim=1)
    with Fed(llama) as fed:
        again = kt.generate(llama, longer, prefix_store=store, **GREEDY)
    assert torch.equal(again, llama.generate(longer, use_cache=False, **GREEDY))
    assert fed.tokens == 1 + 3 + 5
    assert not kt.is_enabled()


def test_past_a_window_the_place_where_prompts_part_is_learnt(mistral):
    store, prefix, fed_tokens = kvrack.PrefixStore(PLENTY), ids(40), []
    for turn in range(4):
        prompt = torch.cat([prefix, ids(5, seed=10 + turn)], dim=1)
        with Fed(mistral) as fed:
            got = kt.generate(mistral, prompt, cache_implementation="dynamic", prefix_store=store, **GREEDY)
        assert torch.equal(got, mistral.generate(prompt, use_cache=False, **GREEDY))
        fed_tokens.append(fed.tokens)
    assert fed_tokens == [50, 50, 10, 10]


@pytest.mark.parametrize("how", [{"num_beams": 3}, {"rows": 2}], ids=str)
def test_several_sequences_compute_their_beginning_once(llama, how):
    store, prefix = kvrack.PrefixStore(PLENTY), ids(40)
    rows = how.pop("rows", 1)
    how = dict(how)
    for turn in range(2):
        prompt = torch.cat([prefix.expand(rows, -1), ids(2, seed=10 + turn, rows=rows)], dim=1)
        with Fed(llama) as fed:
            got = kt.generate(llama, prompt, prefix_store=store, **GREEDY, **how)
        assert torch.equal(got, llama.generate(prompt, use_cache=False, **GREEDY, **how))
        assert fed.tokens < 40 + 30 if turn == 0 else fed.tokens < 30


def test_backends_do_not_stand_for_each_other(llama):
    store, prompt = kvrack.PrefixStore(PLENTY), ids(20)
    for config in ({"growth": 1.5}, {"growth": 2.0}, {"growth": 1.5}):
        output = kt.generate(
            llama,
            prompt,
            cache_implementation="dynamic",
            cache_config=config,
            prefix_store=store,
            return_dict_in_generate=True,
            **GREEDY,
        )
        assert getattr(output, CACHE_ARGUMENT).rack.config.growth == config["growth"]
    assert (store.stats.hits, store.stats.misses) == (1, 2)


def test_what_its_tokens_do_not_say_all_about_goes_past_the_store(llama):
    store, prompt = kvrack.PrefixStore(PLENTY), ids(9)
    mask = torch.ones_like(prompt)
    mask[0, :3] = 0
    got = kt.generate(llama, prompt, attention_mask=mask, prefix_store=store, **GREEDY)
    assert torch.equal(got, llama.generate(prompt, attention_mask=mask, use_cache=False, **GREEDY))
    kt.generate(llama, prompt, prefix_store=store, use_cache=False, **GREEDY)
    assert len(store) == 0
