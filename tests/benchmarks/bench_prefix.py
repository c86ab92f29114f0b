"""Time to the first token of questions about one long text, with a prefix store and without.

    python tests/benchmarks/bench_prefix.py [--tokens 4096] [--questions 8] [--backend dynamic]

SmolLM2-135M-Instruct reads a text of so many tokens and then a question, different each time. The
text is put in the store beforehand, by a first prompt whose time is told apart. Both ways answer the
same questions in turn, so that drift of the machine hits both; medians are printed, the first tokens
are compared, and the bytes that the entries take together.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time

import torch

import kvrack
import kvrack_transformers as kt
from kvrack_transformers.models import DEFAULT_MODEL, find_model, load_model

SENTENCE = "The tenant shall pay the landlord the sum agreed upon in clause {n} of this contract, without deduction. "


def first_token(model: torch.nn.Module, ids: torch.Tensor, settings: dict) -> tuple[int, float]:
    """Return the first token of the answer, and the seconds it took."""
    start = time.perf_counter()
    output = kt.generate(model, ids, max_new_tokens=1, do_sample=False, pad_token_id=0, **settings)
    return int(output[0, -1]), time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--backend", default="dynamic")
    arguments = parser.parse_args()
    loaded = load_model(find_model(DEFAULT_MODEL), "cpu", lambda label: contextlib.nullcontext())
    model, tokenizer = loaded.model, loaded.tokenizer
    text = "".join(SENTENCE.format(n=n) for n in range(arguments.tokens // 10))
    prefix = tokenizer(text, return_tensors="pt")["input_ids"][:, : arguments.tokens]
    assert prefix.shape[1] == arguments.tokens, "the text is too short"
    questions = [
        torch.cat([prefix, tokenizer(f" What does clause {n} say?", return_tensors="pt")["input_ids"]], dim=1)
        for n in range(arguments.questions)
    ]
    config = {"max_cache_len": arguments.tokens + 64} if "static" in arguments.backend else {}
    settings = {"cache_implementation": arguments.backend, "cache_config": config}
    store = kvrack.PrefixStore(max_bytes=4 << 30)
    _, filling = first_token(model, prefix, {**settings, "prefix_store": store})
    pairs = []
    for ids in questions:
        stored, known = first_token(model, ids, {**settings, "prefix_store": store})
        plain, anew = first_token(model, ids, settings)
        assert stored == plain, "the store changed an answer"
        pairs.append((known, anew))
    known, anew = (statistics.median(column) for column in zip(*pairs, strict=True))
    stats = store.stats
    held = store.get(prefix[0].tolist())[0]
    print(
        f"{arguments.questions} questions about {arguments.tokens} tokens, {arguments.backend}, the first token after:"
    )
    print(f"  {anew * 1e3:8.0f} ms without a store (median); {filling * 1e3:.0f} ms for the prompt that filled it")
    print(f"  {known * 1e3:8.0f} ms with it, {anew / known:.1f}x sooner")
    print(
        f"  {stats.hits} hits, {stats.misses} misses, {stats.entries} entries of {stats.nbytes / 1e6:.0f} MB together"
    )
    if held is not None:
        print(f"  one cache of the text is {held.nbytes / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
