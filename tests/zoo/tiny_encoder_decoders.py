"""Tiny encoder-decoder models: relative positions (T5), learned ones (BART), sound (Whisper), sinusoids (Marian),
windows in the decoder (T5Gemma)."""

from __future__ import annotations

import transformers
from transformers import PreTrainedModel

VOCAB = 64
TOKENS = {
    "vocab_size": VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "decoder_start_token_id": 1,
}
BART = {
    **TOKENS,
    "d_model": 32,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
}
GEMMA = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 6,
    "query_pre_attn_scalar": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def t5() -> PreTrainedModel:
    config = transformers.T5Config(
        **TOKENS, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_decoder_layers=3, num_heads=4
    )
    return transformers.T5ForConditionalGeneration(config)


def bart() -> PreTrainedModel:
    config = transformers.BartConfig(**BART, encoder_layers=2, forced_eos_token_id=None, max_position_embeddings=64)
    return transformers.BartForConditionalGeneration(config)


def marian() -> PreTrainedModel:
    config = transformers.MarianConfig(**BART, encoder_layers=2, forced_eos_token_id=None, max_position_embeddings=64)
    return transformers.MarianMTModel(config)


def whisper() -> PreTrainedModel:
    config = transformers.WhisperConfig(
        **BART,
        encoder_layers=1,
        num_mel_bins=8,
        max_source_positions=20,
        max_target_positions=64,
        begin_suppress_tokens=None,
        suppress_tokens=None,
    )
    return transformers.WhisperForConditionalGeneration(config)


def t5gemma() -> PreTrainedModel:
    config = transformers.T5GemmaConfig(
        encoder=GEMMA, decoder=GEMMA, vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=None
    )
    return transformers.T5GemmaForConditionalGeneration(config)


ENCODER_DECODERS = {build.__name__: build for build in (t5, bart, marian, whisper, t5gemma)}
