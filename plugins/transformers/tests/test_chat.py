"""kt.Chat: what is said over several turns is what the whole conversation at once would say, and only news is fed."""

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import kvrack
import kvrack_transformers as kt

KEEPING = (
    "{% for m in messages %}<s>{{ m.role[0] }}:{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>a:{% endif %}"
)
"""A template that writes everything as it was said."""

STRIPPING = KEEPING.replace("{{ m.content }}", "{{ m.content[2:] if m.role == 'assistant' else m.content }}")
"""One that leaves the beginning of answers out, as thinking is left out."""

TURNS = ["Hello there", "And then?", "Why"]
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module")
def chat_model() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=261, **SIZES)).eval()


@pytest.fixture(scope="module")
def sliding_model() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.MistralConfig(vocab_size=261, sliding_window=6, **SIZES)
    return transformers.MistralForCausalLM(config).eval()


def tokenizer_with(template: str | None) -> transformers.PreTrainedTokenizerBase:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = ["<unk>", "<s>", "</s>", *letters]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<unk>"
    )
    wrapped.chat_template = template
    return wrapped


def at_once(model, tokenizer, messages: list[dict[str, str]]) -> str:
    """Return the answer of the whole conversation, without a cache."""
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    whole = model.generate(**ids, max_new_tokens=8, do_sample=False, use_cache=False)
    return tokenizer.decode(whole[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


def talk(chat: kt.Chat, model, tokenizer, turns: list[str]) -> list[kt.Turn]:
    """Say the turns and check each answer; return what each took."""
    took = []
    for text in turns:
        before = list(chat.messages)
        said = chat.send(text, do_sample=False)
        assert said == at_once(model, tokenizer, [*before, {"role": "user", "content": text}])
        assert chat.messages == [*before, {"role": "user", "content": text}, {"role": "assistant", "content": said}]
        took.append(chat.turn)
    return took


@pytest.mark.parametrize("template", [KEEPING, STRIPPING], ids=["keeping", "stripping"])
@pytest.mark.parametrize("kind", ["chat_model", "sliding_model"])
def test_turns_say_what_the_whole_conversation_says(request, kind, template):
    model, tokenizer = request.getfixturevalue(kind), tokenizer_with(template)
    chat = kt.Chat(model, tokenizer, system="Be brief", max_new_tokens=8)
    took = talk(chat, model, tokenizer, TURNS)
    assert (took[0].known, took[0].rolled_back, took[0].new) == (0, 0, 8)
    for turn, text in zip(took[1:], TURNS[1:], strict=True):
        assert turn.known + turn.fed > turn.fed
        if template == KEEPING and all(m["content"].isascii() for m in chat.messages):
            # The last token of the answer and its end, the question in its frame, and the prompt for the answer.
            assert turn.fed <= 1 + 1 + len(f"<u:{text}<") + len("<a:") + 8
    if template == STRIPPING:
        assert all(turn.rolled_back for turn in took[1:])
        assert all(turn.known for turn in took[1:]), "the beginning is known all the same"


def test_a_turn_that_was_taken_back_was_never_there(chat_model):
    tokenizer = tokenizer_with(KEEPING)
    chat = kt.Chat(chat_model, tokenizer, max_new_tokens=8)
    talk(chat, chat_model, tokenizer, TURNS[:2])
    before = list(chat.messages)
    talk(chat, chat_model, tokenizer, ["Nonsense"])
    assert chat.undo()
    assert chat.messages == before
    written = tokenizer.apply_chat_template(before, return_dict=True)["input_ids"]
    assert chat.token_ids == written[: chat.cache.get_seq_length()]
    talk(chat, chat_model, tokenizer, TURNS[2:])
    for _ in range(3):
        assert chat.undo()
    assert not chat.undo()
    assert (chat.messages, chat.token_ids, chat.cache.get_seq_length()) == ([], [], 0)
    talk(chat, chat_model, tokenizer, TURNS)


def test_a_conversation_is_saved_and_gone_on_with(chat_model, sliding_model, tmp_path):
    tokenizer, path = tokenizer_with(KEEPING), tmp_path / "chat.safetensors"
    chat = kt.Chat(chat_model, tokenizer, "dynamic", {"growth": 1.5}, max_new_tokens=8)
    talk(chat, chat_model, tokenizer, TURNS[:2])
    chat.save(path)
    again = kt.Chat(chat_model, tokenizer, max_new_tokens=8)
    again.load(path)
    assert again.messages == chat.messages
    assert again.cache.rack.config.growth == 1.5
    (turn,) = talk(again, chat_model, tokenizer, TURNS[2:])
    assert turn.known > 0
    other = kt.Chat(sliding_model, tokenizer, max_new_tokens=8)
    talk(other, sliding_model, tokenizer, TURNS[:1])
    with pytest.raises(kvrack.SnapshotError, match="belongs to another model"):
        other.load(path)
    talk(other, sliding_model, tokenizer, TURNS[1:])
    chat.cache.save(path, kt.fingerprint(chat_model, tokenizer))
    with pytest.raises(kvrack.SnapshotError, match="a cache without a conversation"):
        again.load(path)


def test_a_turn_that_fails_leaves_the_conversation_as_it_was(chat_model):
    tokenizer = tokenizer_with(KEEPING)
    chat = kt.Chat(chat_model, tokenizer, max_new_tokens=8)
    talk(chat, chat_model, tokenizer, TURNS[:1])
    before = list(chat.messages)

    class Impatient(transformers.TextStreamer):
        def put(self, value):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        chat.send("never answered", streamer=Impatient(tokenizer), do_sample=False)
    assert chat.messages == before
    with pytest.raises(kvrack.KvrackError, match="tokens long, the model takes 512"):
        chat.send("x" * 600)
    assert chat.messages == before
    talk(chat, chat_model, tokenizer, TURNS[1:])


def test_an_answer_ends_where_the_model_or_the_cache_does(chat_model):
    tokenizer = tokenizer_with(KEEPING)
    chat = kt.Chat(chat_model, tokenizer, max_new_tokens=2000)
    chat.send("Go on", do_sample=False)
    assert chat.cache.get_seq_length() == 511
    with pytest.raises(kvrack.KvrackError, match="the model takes 512"):
        chat.send("More")
    assert chat.undo()
    assert chat.send("Go on", do_sample=False, max_new_tokens=3)


def test_what_cannot_be_talked_with_is_refused(chat_model):
    with pytest.raises(ValueError, match="no chat template"):
        kt.Chat(chat_model, tokenizer_with(None))
    with pytest.raises(kvrack.UnknownBackend):
        kt.Chat(chat_model, tokenizer_with(KEEPING), "banana")


def test_models_and_tokenizers_are_told_apart(chat_model):
    seen = {kt.fingerprint(chat_model), kt.fingerprint(chat_model, tokenizer_with(KEEPING))}
    seen.add(kt.fingerprint(chat_model, tokenizer_with(STRIPPING)))
    weight = chat_model.lm_head.weight
    with torch.no_grad():
        first = weight[0, 0].clone()
        weight[0, 0] += 1
        seen.add(kt.fingerprint(chat_model))
        weight[0, 0] = first
    assert len(seen) == 4
    assert kt.fingerprint(chat_model) in seen
