"""What the bridge knows of transformers' releases is what the installed one says."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict

import pytest
import torch
from packaging.version import Version
from transformers import __version__, cache_utils, masking_utils
from transformers.generation import utils as generation
from transformers.models.llama import modeling_llama
from transformers.models.mamba import modeling_mamba

import kvrack_transformers as kt
from kvrack_transformers import versions

MODULES = (generation, masking_utils, cache_utils, modeling_llama, modeling_mamba)
NOTE = re.compile(r"""deprecate_kwarg\(\s*["'](\w+)["'],\s*(?:version=)?["']v?([\d.]+)["'],\s*new_name=["'](\w+)["']""")
KNOWN = {each.old: each for each in versions.DEPRECATIONS}
RELEASE = Version(__version__)


def announced() -> dict[tuple[str, str], set[str]]:
    """Return the keywords that the installed transformers replaces: old and new, and the releases it names."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for module in MODULES:
        for old, release, new in NOTE.findall(inspect.getsource(module)):
            found[old, new].add(release)
    return found


def test_every_keyword_of_the_cache_that_transformers_replaces_is_listed_with_its_end():
    about_caches = {(old, new): ends for (old, new), ends in announced().items() if re.search("cache|past", old + new)}
    assert bool(about_caches) == (versions.CACHE_ARGUMENT == "cache")
    for (old, new), ends in about_caches.items():
        assert KNOWN[old].new == new
        assert ends <= set(KNOWN[old].removed_in), f"{old} ends in {ends}"


@pytest.mark.parametrize("each", versions.DEPRECATIONS, ids=lambda each: each.old)
def test_what_is_listed_is_decided_by_release(each):
    parts = {
        "past_key_values": versions.CACHE_ARGUMENT == "cache",
        "cache_params": versions.CACHE_ARGUMENT == "cache",
        "crop(max_length)": not versions.CROP_TAKES_LENGTH,
        "get_max_cache_shape": hasattr(cache_utils.Cache, "get_max_length"),
    }
    has_new, since = parts[each.old], Version(each.since)
    # Which release it was is known to within one.
    if RELEASE.minor != since.minor:
        assert has_new == (since < RELEASE)
    assert all(Version(end) >= since for end in each.removed_in)


def test_masks_ask_for_sizes_as_the_cache_answers():
    ours = inspect.signature(kt.TransformersCache.get_mask_sizes).parameters
    theirs = inspect.signature(cache_utils.Cache.get_mask_sizes).parameters
    assert list(ours) == list(theirs) == ["self", "query_length", "layer_idx"]


def test_a_cache_is_found_under_any_of_its_keywords():
    assert versions.given_caches({"cache": None, "input_ids": 1}) == []
    for name in versions.CACHE_ARGUMENTS:
        assert versions.given_caches({name: object(), "cache_config": {}}) == [name]


@pytest.mark.parametrize("takes_length", [False, True])
def test_crop_by_either_sign(llama, monkeypatch, takes_length):
    monkeypatch.setattr(versions, "CROP_TAKES_LENGTH", takes_length)
    cache = kt.create_cache(llama, "dynamic")
    for index in range(2):
        cache.update(torch.ones(1, 2, 9, 16), torch.ones(1, 2, 9, 16), index)
    cache.crop(-2)
    assert cache.get_seq_length() == 7
    if takes_length:
        cache.crop(4)
        assert cache.get_seq_length() == 4
        cache.crop(6)
        assert cache.get_seq_length() == 4
    else:
        with pytest.raises(ValueError, match=r"crop\(4\): expected 0 or a negative number.*Call crop\(-4\)"):
            cache.crop(4)


def test_states_that_models_hide_are_not_cropped(monkeypatch):
    monkeypatch.setattr(versions, "RECORDS_STATES", False)
    assert versions.states_are_hidden(-3) == "crop(-3) of states in transformers before 5.21"
    monkeypatch.setattr(versions, "RECORDS_STATES", True)
    assert versions.states_are_hidden(-3) is None


def test_the_older_name_for_the_capacity_answers_too(llama):
    cache = kt.create_cache(llama, "dynamic")
    assert cache.get_max_cache_shape() == cache.get_max_length() == -1
