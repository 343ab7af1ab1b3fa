"""Text models of the transformers package, small and with random weights."""

from __future__ import annotations

from transformers import (
    AlbertConfig,
    AlbertModel,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertModel,
    DebertaV2Config,
    DebertaV2Model,
    DistilBertConfig,
    DistilBertModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
)

from tests.zoo.entry import BATCH, TOKENS, VOCABULARY, Entry, Made, make, small, text
from tests.zoo.steps import cached_step, decoder_step

SIZES = {"vocab_size": VOCABULARY, "max_position_embeddings": 64}
GROUPED = {**small(**SIZES), "num_key_value_heads": 2, "head_dim": 8}


def bert(attention: str) -> Made:
    return text(make(BertModel, BertConfig(**small(**SIZES)), attention))


def distilbert(attention: str) -> Made:
    config = DistilBertConfig(dim=32, n_layers=2, n_heads=4, hidden_dim=64, **SIZES)
    return text(make(DistilBertModel, config, attention))


def albert(attention: str) -> Made:
    config = AlbertConfig(**small(**SIZES, embedding_size=16))
    return text(make(AlbertModel, config, attention))


def deberta_v2(attention: str) -> Made:
    config = DebertaV2Config(
        **small(**SIZES),
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=8,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
    )
    return text(make(DebertaV2Model, config, attention))


def gpt2_config() -> GPT2Config:
    return GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=VOCABULARY, n_positions=64, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip


def gpt2(attention: str) -> Made:
    """As users hand it over: it returns its cache too."""
    return text(make(GPT2LMHeadModel, gpt2_config(), attention))


def gpt2_cached(attention: str) -> Made:
    return cached_step(make(GPT2LMHeadModel, gpt2_config(), attention), layers=2, heads=4, size=8)


def llama(attention: str) -> Made:
    return text(make(LlamaForCausalLM, LlamaConfig(**GROUPED), attention))


def llama_cached(attention: str) -> Made:
    model = make(LlamaForCausalLM, LlamaConfig(**GROUPED), attention)
    return cached_step(model, layers=2, heads=2, size=8)


def mistral(attention: str) -> Made:
    """A window that is shorter than the example."""
    config = MistralConfig(**GROUPED, sliding_window=4, use_cache=False)
    return text(make(MistralForCausalLM, config, attention))


def gemma2(attention: str) -> Made:
    """Softcap in each layer, and a window in every other one. SDPA has no softcap: eager alone."""
    config = Gemma2Config(**GROUPED, sliding_window=4, use_cache=False)
    return text(make(Gemma2ForCausalLM, config, attention))


def qwen2(attention: str) -> Made:
    return text(make(Qwen2ForCausalLM, Qwen2Config(**GROUPED, use_cache=False), attention))


def t5_config() -> T5Config:
    return T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=VOCABULARY,
        decoder_start_token_id=0,
    )  # fmt: skip


def t5_encoder(attention: str) -> Made:
    return text(make(T5EncoderModel, t5_config(), attention))


def t5_decoder(attention: str) -> Made:
    model = make(T5ForConditionalGeneration, t5_config(), attention)
    return decoder_step(model, model.decoder, layers=2, heads=4, size=8, width=32)


def bart_config() -> BartConfig:
    return BartConfig(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, **SIZES,
    )  # fmt: skip


def bart(attention: str) -> Made:
    """Encoder and decoder in one graph."""
    from tests.zoo.entry import tokens

    model = make(BartForConditionalGeneration, bart_config(), attention)
    spec = text(model, decoder_input_ids=tokens(6))
    spec.dynamic["decoder_input_ids"] = {0: BATCH, 1: type(TOKENS)("targets", 2, 48)}
    return spec


def bart_decoder(attention: str) -> Made:
    model = make(BartForConditionalGeneration, bart_config(), attention)
    return decoder_step(model, model.model.decoder, layers=2, heads=4, size=8, width=32)


TEXT = {
    "bert": Entry(bert, 2),
    "distilbert": Entry(distilbert, 2),
    "albert": Entry(albert, 2),
    "deberta-v2": Entry(deberta_v2, 2, attentions=("eager",)),
    "gpt2": Entry(gpt2, 2, "gpt2"),
    "gpt2-cached": Entry(gpt2_cached, 2, "gpt2"),
    "llama": Entry(llama, 2, "gpt_neox"),
    "llama-cached": Entry(llama_cached, 2, "gpt_neox"),
    "mistral": Entry(mistral, 2, "gpt_neox"),
    "gemma2": Entry(gemma2, 2, "gpt_neox", attentions=("eager",)),
    "qwen2": Entry(qwen2, 2, "gpt_neox"),
    "t5-encoder": Entry(t5_encoder, 2, "t5"),
    "t5-decoder": Entry(t5_decoder, 4, "t5"),
    "bart": Entry(bart, 6, "bart"),
    "bart-decoder": Entry(bart_decoder, 4, "bart"),
}
