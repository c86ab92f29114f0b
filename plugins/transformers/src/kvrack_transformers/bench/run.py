"""A whole benchmark: what is measured, context after context, and what is known when it ends or is stopped."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvrack import KvrackError
from kvrack_transformers.bench import theirs
from kvrack_transformers.bench.entries import Asked, Entry, entry_of, one_line
from kvrack_transformers.bench.machine import describe_machine
from kvrack_transformers.bench.measure import Advance, ContextRun, Plan
from kvrack_transformers.bench.results import Bench, Context, Request
from kvrack_transformers.reading import longest_sequence

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Work:
    """What is to be measured.

    Attributes:
        model_name: as given to --model.
        asked: kvrack's caches.
        contexts: tokens of each prompt.
        new_tokens: tokens that each repeat decodes.
        repeats: timed repeats.
        batch: rows.
        against: whether transformers' caches of the same kinds are measured too.
        text_name: what the text is called.
        left_out: caches that aren't tried, with the reason.
        attention: the attention implementation that kvrack's caches are read by; None for the model's own.
    """

    model_name: str
    asked: Sequence[Asked]
    contexts: Sequence[int]
    new_tokens: int
    repeats: int
    batch: int
    against: bool
    text_name: str
    left_out: Mapping[str, str]
    attention: str | None = None

    @property
    def plans(self) -> list[Plan]:
        return [Plan(context, self.new_tokens, self.repeats, self.attention) for context in self.contexts]


def entries_of(work: Work, device: torch.device) -> tuple[list[Entry], dict[str, str]]:
    """Return the caches in the order measured, pairs side by side, the dense reference first; and what has no pair."""
    entries = {(each.side, each.cache): each for each in [theirs.reference()]}
    alone: dict[str, str] = {}
    for asked in work.asked:
        entry = entry_of(asked)
        entries.setdefault((entry.side, entry.cache), entry)
        if work.against:
            try:
                other = theirs.counterpart(asked, device)
                entries.setdefault((other.side, other.cache), other)
            except theirs.NoCounterpart as error:
                alone[f"transformers {asked.text}"] = str(error)
    return list(entries.values()), alone


def check_room(model: PreTrainedModel, plans: Sequence[Plan]) -> None:
    """Raise KvrackError where the model has too few positions for one of `plans`."""
    longest = longest_sequence(model.config.get_text_config())
    for plan in plans:
        if longest is not None and plan.held > longest:
            raise KvrackError(
                f"--context {plan.context} and the {plan.decoded} tokens decoded after it are {plan.held} tokens, and "
                f"the model takes {longest}. Give a shorter --context, or fewer --new-tokens or --repeats"
            )


def run_all(model: PreTrainedModel, tokens: torch.Tensor, work: Work, advance: Advance) -> Bench:
    """Measure everything and return what was found; after Ctrl-C, what was found until then.

    Args:
        model: on its device, in evaluation mode.
        tokens: ``[rows, tokens]`` of the text, as many as the longest plan needs.
        work: what is measured.
        advance: told what was done.
    """
    entries, alone = entries_of(work, model.device)
    created = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    weight_bytes = _bytes_read(model)
    contexts: list[Context] = []
    failed: dict[str, str] = {}
    interrupted = False
    for plan in work.plans:
        measuring = ContextRun(model, tokens[:, : plan.length], entries, plan, weight_bytes, advance)
        try:
            measuring.run()
        except KeyboardInterrupt:
            interrupted = True
        except (KvrackError, RuntimeError, MemoryError) as error:
            failed[f"context {plan.context:,}"] = one_line(error)
        contexts.append(measuring.context())
        if interrupted:
            break
    return Bench(
        created=created,
        machine=describe_machine(model.device, {each.name for each in work.asked}),
        request=Request(
            model=work.model_name,
            parameters=sum(each.numel() for each in model.parameters()),
            weight_bytes=weight_bytes,
            dtype=str(model.dtype).removeprefix("torch."),
            attention=str(model.config.get_text_config()._attn_implementation),
            kvrack_attention=work.attention or str(model.config.get_text_config()._attn_implementation),
            caches=tuple(each.text for each in work.asked),
            contexts=tuple(work.contexts),
            new_tokens=work.new_tokens,
            repeats=work.repeats,
            batch=work.batch,
            against="transformers" if work.against else None,
            text=work.text_name,
        ),
        contexts=tuple(each for each in contexts if each.measurements),
        left_out={**work.left_out, **alone, **failed},
        interrupted=interrupted,
    )


def _bytes_read(model: PreTrainedModel) -> int:
    """Return the bytes of weights that a decode step reads: all but the table of embeddings, of which it reads a
    row, unless the answers are computed from the same table."""
    weights = {each.data_ptr(): each.nbytes for each in model.parameters()}
    table: Any = model.get_input_embeddings().weight
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if head is not None and head.weight is not table:
        weights.pop(table.data_ptr(), None)
    return sum(weights.values())
