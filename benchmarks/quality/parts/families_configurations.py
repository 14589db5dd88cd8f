"""Tiny configurations of every decoder family that transformers has, and of what varies within one.

Names are model types, or model types with what is special: llama, llama/yarn, gemma3/multimodal.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import CONFIG_MAPPING

from benchmarks.quality.parts.families_models import (
    BASE,
    IMAGE,
    IMAGE_START,
    OTHERS,
    VIDEO,
    VOCABULARY,
    Configuration,
)

MLA: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "head_dim": 8,
}  # fmt: skip
INDEXED = MLA | {"index_n_heads": 16}  # of 2 both are often 0, and which of such tokens is chosen is open
WINDOW = 12


def names(text: str) -> list[str]:
    return text.split()


def layers(*kinds: str, **more: Any) -> dict[str, Any]:
    """layer_types, each twice in turn."""
    return {"num_hidden_layers": 2 * len(kinds), "layer_types": [*kinds] * 2} | more


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0} | more}


SLIDING = layers("sliding_attention", "full_attention", sliding_window=WINDOW)
LINEAR = layers("linear_attention", "full_attention")
PAIR = ("sliding_attention", "full_attention")


def _llama_like() -> Iterator[Configuration]:
    plain = """llama arcee apertus bitnet cohere cwm diffllama doge ernie4_5 gemma glm glm4 granite helium
        hunyuan_v1_dense hyperclovax internlm3 iquestcoder jais2 nanochat nemotron olmo olmo2 persimmon phi phi3
        qwen2 qwen3 seed_oss smollm3 solar_open stablelm starcoder2 gpt_neox"""
    for kind in names(plain):
        yield Configuration(kind, kind)
    long = list(torch.linspace(1.0, 4.0, 8).tolist())
    for name, fields in {
        "linear": rope("linear", factor=2.0),
        "dynamic": rope("dynamic", factor=2.0),
        "dynamic/beyond": rope("dynamic", factor=2.0) | {"max_position_embeddings": 32},
        "yarn": rope("yarn", factor=4.0, original_max_position_embeddings=64),
        "longrope": rope("longrope", factor=4.0, original_max_position_embeddings=128, short_factor=[1.0] * 8,
                         long_factor=long),
        "longrope/beyond": rope("longrope", factor=4.0, original_max_position_embeddings=32, short_factor=[1.0] * 8,
                                long_factor=long),
        "llama3": rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                       original_max_position_embeddings=64),
        "attention_bias": {"attention_bias": True, "mlp_bias": True},
        "one_kv_head": {"num_key_value_heads": 1},
        "every_kv_head": {"num_key_value_heads": 4},
        "head_dim_8": {"head_dim": 8},
        "head_dim_24": {"head_dim": 24},
    }.items():  # fmt: skip
        yield Configuration(f"llama/{name}", "llama", fields, grows=name.endswith("/beyond"))
    for kind in names("phi phi3 glm glm4 stablelm nemotron persimmon gpt_neox"):
        part = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
        yield Configuration(f"{kind}/quarter", kind, {"rope_parameters": part})
    whole = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    yield Configuration("glm/whole", "glm", {"rope_parameters": whole})
    yield Configuration("phi3/longrope", "phi3", rope(
        "longrope", factor=4.0, original_max_position_embeddings=32, short_factor=[1.0] * 8, long_factor=long),
        grows=True)  # fmt: skip
    yield Configuration("phi/norm", "phi", {"qk_layernorm": True})
    yield Configuration("stablelm/norm", "stablelm", {"qk_layernorm": True, "use_parallel_residual": True})
    yield Configuration("cohere/norm", "cohere", {"use_qk_norm": True})
    yield Configuration("gpt_neox/sequential", "gpt_neox", {"use_parallel_residual": False})
    yield Configuration("glm4_moe/norm", "glm4_moe", {"use_qk_norm": True})
    yield Configuration("olmo/clip", "olmo", {"clip_qkv": 0.5})
    yield Configuration("hunyuan_v1_dense/dynamic", "hunyuan_v1_dense", rope("dynamic", factor=2.0, alpha=1000.0))
    yield Configuration("smollm3/no_rope", "smollm3", {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0]})


def _sliding() -> Iterator[Configuration]:
    for kind in names("mistral mixtral phi3 phimoe starcoder2 minimax"):  # on all layers
        yield Configuration(f"{kind}/sliding", kind, {"sliding_window": WINDOW})
    some = {"use_sliding_window": True, "sliding_window": WINDOW, "num_hidden_layers": 4, "max_window_layers": 2}
    for kind in names("qwen2 qwen3 qwen2_moe qwen3_moe"):
        yield Configuration(f"{kind}/sliding", kind, some)
    yield Configuration("qwen2/sliding_all", "qwen2", some | {"max_window_layers": 0})
    for (
        kind
    ) in names("""afmoe beam cohere2 cohere2_moe cwm exaone4 exaone_moe flint gemma2 gemma3_text gpt_oss granite_swa
                   granitemoe_swa kolibri1 laguna mellum mimo_v2_flash ministral olmo3 smollm3 vaultgemma
                   modernbert-decoder"""):
        yield Configuration(f"{kind}/sliding", kind, SLIDING)
    for kind in names("mistral ministral3 gemma2 gemma3_text gpt_oss vaultgemma"):
        yield Configuration(kind, kind, {"sliding_window": 256})
    yield Configuration("gemma2/softcap", "gemma2", SLIDING | {
        "attn_logit_softcapping": 0.5, "final_logit_softcapping": 5.0})  # fmt: skip
    yield Configuration("ministral3/yarn", "ministral3", rope(
        "yarn", factor=4.0, original_max_position_embeddings=16, llama_4_scaling_beta=0.1))  # fmt: skip
    yield Configuration("gemma3_text/bidirectional", "gemma3_text", SLIDING | {"use_bidirectional_attention": True})
    for kind in names("exaone4 smollm3"):
        yield Configuration(f"{kind}/full", kind, {"layer_types": ["full_attention"] * 2, "sliding_window": None})
    yield Configuration("gpt_oss/yarn", "gpt_oss", SLIDING | rope(
        "yarn", factor=4.0, original_max_position_embeddings=64))  # fmt: skip
    yield Configuration("gemma3_text/linear", "gemma3_text", SLIDING | {"rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0}}})  # fmt: skip
    sections = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
    yield Configuration("cohere_compass_text/sliding", "cohere_compass_text", SLIDING | {
        "rope_parameters": {"sliding_attention": sections, "full_attention": sections}})  # fmt: skip
    yield Configuration("moshi", "moshi", {"head_dim": 16, "ffn_dim": 128, "sliding_window": 256})


def _shared() -> Iterator[Configuration]:
    """Layers that read another layer's keys."""
    embeddings = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8}
    shared = layers(*PAIR, sliding_window=WINDOW, num_kv_shared_layers=2) | embeddings
    yield Configuration("gemma3n_text/shared", "gemma3n_text", shared | {
        "laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 4, "intermediate_size": [96] * 4})  # fmt: skip
    yield Configuration("gemma4_text", "gemma4_text", SLIDING | embeddings)
    yield Configuration("gemma4_text/shared", "gemma4_text", shared | {"global_head_dim": 32})
    yield Configuration("gemma4_text/k_eq_v", "gemma4_text", SLIDING | embeddings | {"attention_k_eq_v": True})
    yield Configuration("gemma4_text/moe", "gemma4_text", SLIDING | embeddings | {
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32})  # fmt: skip
    yield Configuration("gemma4_unified_text", "gemma4_unified_text", SLIDING)
    yield Configuration("gemma4_unified_text/shared", "gemma4_unified_text", shared)


def _experts() -> Iterator[Configuration]:
    for (
        kind
    ) in names("""aria_text dots1 ernie4_5_moe flex_olmo glm4_moe granitemoe granitemoeshared hunyuan_v1_moe hy_v3
                   jetmoe minimax_m2 mixtral olmoe phimoe qwen2_moe qwen3_moe"""):
        yield Configuration(kind, kind)
    yield Configuration("dbrx", "dbrx", {
        "n_heads": 4, "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
        "d_model": 64})  # fmt: skip
    chunked = layers("chunked_attention", "full_attention", attention_chunk_size=16, intermediate_size_mlp=96)
    yield Configuration("llama4_text", "llama4_text", {"intermediate_size_mlp": 96})
    yield Configuration("llama4_text/chunked", "llama4_text", chunked | {
        "no_rope_layers": [1, 0, 1, 0], "floor_scale": 8})  # fmt: skip
    yield Configuration("doge/moe", "doge", {"is_moe": True, "num_experts": 16, "num_experts_per_tok": 2})


def _latent() -> Iterator[Configuration]:
    """Multi-head latent attention, and what chooses keys by an indexer."""
    for kind in names("deepseek_v2 deepseek_v3 axk1 glm4_moe_lite youtu minicpm3"):
        yield Configuration(kind, kind, MLA | {"first_k_dense_replace": 1})
    yield Configuration("deepseek_v3/half_split", "deepseek_v3", MLA | {"rope_interleave": False})
    yield Configuration("deepseek_v3/yarn", "deepseek_v3", MLA | rope(
        "yarn", factor=4.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=1.0))  # fmt: skip
    yield Configuration("deepseek_v2/no_q_lora", "deepseek_v2", MLA | {"q_lora_rank": None})
    yield Configuration("deepseek_v3/no_q_lora", "deepseek_v3", MLA | {"q_lora_rank": None})
    yield Configuration("longcat_flash", "longcat_flash", MLA | {
        "num_layers": 2, "ffn_hidden_size": 96, "moe_topk": 2, "zero_expert_num": 2,
        "expert_ffn_hidden_size": 32})  # fmt: skip
    for kind in names("axk2 deepseek_v32 glm_moe_dsa hy_v4"):
        yield Configuration(kind, kind, INDEXED | {"first_k_dense_replace": 1})
    yield Configuration("deepseek_v4", "deepseek_v4", {"q_lora_rank": 24, "o_groups": 2, "o_lora_rank": 16})
    yield Configuration("dots3_note_text", "dots3_note_text", INDEXED)
    yield Configuration("minimax_m3_vl_text", "minimax_m3_vl_text")
    yield Configuration("minimax_m3_vl_text/sparse", "minimax_m3_vl_text", {
        "layer_types": ["full_attention", "minimax_m3_sparse"], "index_block_size": 4, "index_topk_blocks": 2,
        "rotary_dim": 8})  # fmt: skip


def _recurrent() -> Iterator[Configuration]:
    """Recurrent or convolutional layers beside attention."""
    half = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    for kind in names("qwen3_next qwen3_5_text qwen3_5_moe_text olmo_hybrid minimax"):
        yield Configuration(kind, kind, LINEAR)
    for kind in names("lfm2 lfm2_moe"):
        yield Configuration(kind, kind, layers("conv", "full_attention", num_dense_layers=1))
    yield Configuration("lfm3", "lfm3", layers("conv", "full_attention", "sliding_attention", sliding_window=WINDOW))
    yield Configuration("falcon_h1", "falcon_h1", {"mamba_d_ssm": 64, "mamba_d_head": 16})
    yield Configuration("bamba", "bamba", {"attn_layer_indices": [1], "rope_parameters": half})
    yield Configuration("jamba", "jamba", {
        "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4,
        "use_mamba_kernels": False})  # fmt: skip
    yield Configuration("granitemoehybrid", "granitemoehybrid", LINEAR)
    yield Configuration("granitemoehybrid/rope", "granitemoehybrid", LINEAR | {"position_embedding_type": "rope"})
    yield Configuration("nemotron_h", "nemotron_h", {
        "layers_block_type": ["linear_attention", "full_attention", "moe", "full_attention"], "mamba_num_heads": 4,
        "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 16,
        "moe_shared_expert_intermediate_size": 32, "use_mamba_kernels": False})  # fmt: skip
    yield Configuration("zamba", "zamba", {
        "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4, "attention_hidden_size": 128,
        "attention_head_dim": 32, "num_key_value_heads": 4, "use_mamba_kernels": False,
        "layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4})  # fmt: skip
    zamba2 = {
        "layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4, "num_key_value_heads": 4,
        "n_mamba_heads": 4, "mamba_headdim": 32, "mamba_ngroups": 1, "chunk_size": 16, "adapter_rank": 8,
        "use_mamba_kernels": False}  # fmt: skip
    yield Configuration("zamba2", "zamba2", zamba2)
    yield Configuration("zamba2/rope", "zamba2", zamba2 | {"use_mem_rope": True, "num_mem_blocks": 2})
    yield Configuration("recurrent_gemma", "recurrent_gemma", {
        "num_hidden_layers": 3, "lru_width": 64, "attention_window_size": WINDOW,
        "num_key_value_heads": 1})  # fmt: skip
    yield Configuration("kimi_linear", "kimi_linear", MLA | LINEAR | {
        "q_lora_rank": None, "mlp_layer_types": ["dense", *["sparse"] * 3]})  # fmt: skip
    yield Configuration("bailing_hybrid", "bailing_hybrid", MLA | LINEAR | {
        "mlp_layer_types": ["dense", *["sparse"] * 3], "q_lora_rank": None})  # fmt: skip
    for kind in names("inkling_text inkling2_text"):
        yield Configuration(kind, kind, layers("hybrid_sliding", "hybrid", sliding_window_size=WINDOW, swa_head_dim=16,
                                               swa_num_attention_heads=4, swa_num_key_value_heads=2, d_rel=4,
                                               rel_extent=64, unpadded_vocab_size=VOCABULARY))  # fmt: skip
    yield Configuration("qwen4_exp_text", "qwen4_exp_text", layers(
        "linear_attention", "indexed_attention", indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=16,
        indexer_budget=16, indexer_compress_ratio=4, hc_lowrank=8, ple_embed_dim=64, ngram_vocab_size_base=128,
        make_ngram_vocab_size_divisible_by=1, split_ngram_parts=1))  # fmt: skip
    yield Configuration("zaya", "zaya", {"num_experts_per_tok": 1, "router_hidden_size": 16})
    for kind in names("mamba falcon_mamba rwkv"):  # no attention at all
        yield Configuration(kind, kind)
    yield Configuration("mamba2", "mamba2", {
        "num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 16})  # fmt: skip
    yield Configuration("xlstm", "xlstm", {"num_heads": 4, "num_blocks": 2, "qk_dim_factor": 1.0})


def _positions() -> Iterator[Configuration]:
    """Learned positions, biases, and the older models with attention code of their own."""
    yield Configuration("gpt2", "gpt2")
    yield Configuration("gpt2/layer_scaled", "gpt2", {"scale_attn_by_inverse_layer_idx": True})
    yield Configuration("gpt-sw3", "gpt-sw3")
    yield Configuration("openai-gpt", "openai-gpt")
    yield Configuration("gpt_bigcode", "gpt_bigcode")
    yield Configuration("gpt_bigcode/every_kv_head", "gpt_bigcode", {"multi_query": False})
    yield Configuration("gpt_neo", "gpt_neo", {
        "num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": WINDOW})  # fmt: skip
    yield Configuration("gptj", "gptj", {"rotary_dim": 8})
    yield Configuration("codegen", "codegen", {"rotary_dim": 8})
    yield Configuration("gpt_neox_japanese", "gpt_neox_japanese")
    yield Configuration("opt", "opt", {"ffn_dim": 96, "word_embed_proj_dim": 64})
    yield Configuration("biogpt", "biogpt")
    for name, heads in {"xglm": 4, "xglm/one_head": 1}.items():
        yield Configuration(name, "xglm", {"d_model": 64, "ffn_dim": 96, "num_layers": 2, "num_attention_heads": heads})
    yield Configuration("bloom", "bloom")
    yield Configuration("bloom/six_heads", "bloom", {"num_attention_heads": 6, "hidden_size": 96})
    for alibi in (True, False):
        yield Configuration(f"mpt/{'alibi' if alibi else 'learned'}", "mpt", {
            "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 512, "use_cache": True,
            "attn_config": {"alibi": alibi}})  # fmt: skip
    falcon = {"num_kv_heads": 2, "ffn_hidden_size": 96}
    yield Configuration("falcon", "falcon", falcon)
    yield Configuration("falcon/every_kv_head", "falcon", falcon | {"multi_query": False, "num_kv_heads": 4})
    yield Configuration("falcon/sequential", "falcon", falcon | {"parallel_attn": False})
    yield Configuration("falcon/alibi", "falcon", falcon | {"alibi": True})
    for name, more in {"eager": {}, "alibi_eager": {"alibi": True}}.items():
        yield Configuration(f"falcon/{name}", "falcon", falcon | more, implementation="eager")
    yield Configuration("falcon/new", "falcon", falcon | {"new_decoder_architecture": True})
    yield Configuration("ctrl", "ctrl", {"n_embd": 64, "n_layer": 2, "n_head": 4, "dff": 96, "n_positions": 512})
    yield Configuration("cpmant", "cpmant", {"dim_head": 16, "dim_ff": 96, "prompt_length": 4})
    yield Configuration("bert/decoder", "bert", {"is_decoder": True})
    yield Configuration("bart/decoder", "bart", {"d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4,
                                                 "decoder_ffn_dim": 96, "is_decoder": True})  # fmt: skip
    yield Configuration("trocr", "trocr", {
        "d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96})  # fmt: skip
    yield Configuration(
        "hrm_text", "hrm_text", {"num_layers_per_stack": 1, "H_cycles": 1, "L_cycles": 2, "num_hidden_layers": 3}
    )


def _encoders() -> Iterator[Configuration]:
    """Decoders that attend to an encoder besides."""
    half = {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96, "encoder_ffn_dim": 96}
    for kind in names("""bart bigbird_pegasus blenderbot blenderbot-small led m2m_100 mbart mvp nllb-moe
                         pegasus pegasus_x plbart"""):
        yield Configuration(f"{kind}/encoder" if kind == "bart" else kind, kind, half, encoder=True)
    yield Configuration("marian", "marian", half | {"decoder_vocab_size": VOCABULARY}, encoder=True)
    for kind in names("longt5 mt5 switch_transformers t5 umt5"):
        yield Configuration(kind, kind, {"d_kv": 16, "d_ff": 96}, encoder=True)
    text = BASE | {"sliding_window": WINDOW}
    yield Configuration("t5gemma", "t5gemma", {"encoder": text, "decoder": text}, encoder=True)
    yield Configuration("t5gemma2", "t5gemma2", {
        "encoder": {"text_config": text, "vision_config": OTHERS}, "decoder": text}, encoder=True)  # fmt: skip
    yield Configuration("whisper", "whisper", half | {
        "num_mel_bins": 16, "max_source_positions": 8, "max_target_positions": 512}, encoder=True)  # fmt: skip
    yield Configuration("speech_to_text", "speech_to_text", half | {
        "input_feat_per_channel": 16, "max_target_positions": 512}, encoder=True)  # fmt: skip
    yield Configuration("moonshine", "moonshine", {
        "decoder_num_hidden_layers": 2, "decoder_num_attention_heads": 4}, encoder=True)  # fmt: skip


def _multimodal() -> Iterator[Configuration]:
    """What people load with AutoModelForImageTextToText, given text alone. Where the text part is a family of its own
    (llama in llava), the configuration shows that the decoder is found inside."""
    for (
        kind
    ) in names("""aria deepseek_vl fuyu got_ocr2 granite_docling hyperclovax_vision_v2 idefics2 idefics3 internvl janus
                   kosmos-2.5 lighton_ocr llava llava_next llava_onevision minimax_m3_vl mllama ovis2 paligemma
                   qianfan_ocr smolvlm video_llama_3 vipllava"""):
        yield Configuration(f"{kind}/multimodal", kind, text={})
    for kind in names("aya_vision cohere2_vision exaone4_5 gemma3 gemma4_unified muse_glimmer"):
        yield Configuration(f"{kind}/multimodal", kind, text=SLIDING)
    for kind in names("qwen3_5 qwen3_5_moe minicpmv4_6"):
        yield Configuration(f"{kind}/multimodal", kind, text=LINEAR)
    sections = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    few, mixed = {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}, {"mrope_interleaved": True}
    for kinds, more in (
        ("cosmos3_edge glm_ocr hunyuan_vl paddleocr_vl qwen2_vl qwen2_5_vl", {}),
        ("qwen3_vl qwen3_vl_moe", mixed),
        ("glm4v glm4v_moe glm46v glmga", few),
    ):
        for kind in kinds.split():
            yield Configuration(f"{kind}/multimodal", kind, text={"rope_parameters": sections | more})
    patches = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_heads": 2}
    seen = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": IMAGE_START}
    for kind, vision in {
        "qwen2_vl": {"hidden_size": 64, "mlp_ratio": 1},
        "qwen2_5_vl": {"window_size": 16, "fullatt_block_indexes": [0], "tokens_per_second": 2},
        "qwen3_vl": {"depth": 2, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64},
    }.items():
        rope = sections | (mixed if kind == "qwen3_vl" else {})
        yield Configuration(f"{kind}/images", kind, seen, text={"rope_parameters": rope}, vision=patches | vision,
                            images=True)  # fmt: skip
    for kind, more in {"qwen2_5_omni_thinker": {}, "qwen3_omni_moe_thinker": mixed}.items():
        yield Configuration(f"{kind}/multimodal", kind, {"vision_start_token_id": 2}, text={
            "rope_parameters": sections | more})  # fmt: skip
    per_type = {kind: sections for kind in ("sliding_attention", "full_attention")}
    for kind, text in {
        "cohere_compass": SLIDING | {"rope_parameters": per_type},
        "ernie4_5_vl_moe": {"moe_intermediate_size": [32, 32], "moe_k": 2, "moe_num_experts": 4,
                            "mlp_layer_types": ["dense", "sparse"],
                            "rope_parameters": sections | {"mrope_section": [3, 3, 2]}},
        "gemma4": SLIDING | {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8},
        "kimi_k25": MLA, "mistral_large4": INDEXED,
        "glm5_next": layers("linear_attention", "indexed_attention") | MLA | {
            "qk_rope_head_dim": 0, "head_dim": 0, "indexer_types": ["full"] * 4,
            "mlp_layer_types": ["dense", *["sparse"] * 3]},
        "lfm2_vl": layers("conv", "full_attention"),
        "lfm3_vl": layers("conv", "full_attention", "sliding_attention", sliding_window=WINDOW),
        "llama4": {"intermediate_size_mlp": 96}, "mistral3": {"sliding_window": None},
        "step3p7": SLIDING | {"num_sliding_attention_heads": 4, "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}},
    }.items():  # fmt: skip
        yield Configuration(f"{kind}/multimodal", kind, text=text)
    for kind in names("chameleon emu3"):
        yield Configuration(f"{kind}/multimodal", kind, {"vocabulary_map": {"<image>": 9}}, text={})
    yield Configuration("molmo2/multimodal", "molmo2", {"adapter_config": {
        "vision_feature_layer": [0], "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2,
        "head_dim": 16, "intermediate_size": 32, "text_hidden_size": 64}}, text={},
        vision={"image_size": [28, 28]})  # fmt: skip
    yield Configuration("unlimited_ocr/multimodal", "unlimited_ocr", text={
        "sliding_window": WINDOW, "num_key_value_heads": 4})  # fmt: skip
    yield Configuration("mistral4", "mistral4", MLA | {"first_k_dense_replace": 1})
    yield Configuration("muse_spark/multimodal", "muse_spark", {
        "audio_config": {"hidden_sizes": [8] * 4, "out_hidden_size": 64}}, text=SLIDING)  # fmt: skip
    yield Configuration("phi4_multimodal", "phi4_multimodal", {
        "vision_config": OTHERS, "audio_config": {
            "hidden_size": 32, "num_blocks": 1, "num_attention_heads": 2}})  # fmt: skip


def _implementations() -> Iterator[Configuration]:
    yield Configuration("llama/eager", "llama", implementation="eager")
    for kind in names("gemma2 gemma3_text gpt_oss"):
        yield Configuration(f"{kind}/eager", kind, SLIDING, implementation="eager")
    yield Configuration("mistral/eager", "mistral", {"sliding_window": WINDOW}, implementation="eager")


def _new() -> Iterator[Configuration]:
    """What transformers has from 5.24 on."""
    for kind in names("apertus1p5_text dory exaone inkling2_loop_text lara_mini"):
        yield Configuration(kind, kind)
    experts = {"num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
               "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}  # fmt: skip
    yield Configuration("sarvam_moe", "sarvam_moe", experts)
    yield Configuration("sarvam_mla", "sarvam_mla", MLA | experts)


CONFIGURATIONS: dict[str, Configuration] = {
    c.name: c
    for group in (
        _llama_like, _sliding, _shared, _experts, _latent, _recurrent, _positions, _encoders, _multimodal,
        _implementations, _new,
    )
    for c in group()
    if group is not _new or c.kind in CONFIG_MAPPING
}  # fmt: skip

QUICK = names("""llama llama/eager llama/yarn llama/longrope llama/dynamic/beyond llama/head_dim_24 llama/one_kv_head
    mistral/sliding
    qwen2/sliding qwen3 phi3 phi/quarter glm gpt_neox cohere/norm stablelm/norm nemotron hunyuan_v1_dense nanochat
    smollm3/no_rope gemma2/softcap gemma3_text/sliding gpt_oss/sliding cohere2/sliding ministral3/yarn
    gemma3n_text/shared gemma4_text/shared mixtral qwen3_moe dbrx llama4_text/chunked deepseek_v2 deepseek_v3/yarn
    deepseek_v32 qwen3_next falcon_h1 lfm2 jamba zamba2/rope mamba gpt2 opt gptj bloom falcon diffllama
    unlimited_ocr/multimodal qwen2_5_vl/multimodal qwen3_vl/multimodal gemma3/multimodal""")
LEFT_OUT = {  # families of MODEL_FOR_CAUSAL_LM_MAPPING_NAMES that no configuration here is of, and why
    kind: why
    for kinds, why in (
        ("bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta "
         "roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod",
         "an encoder like bert, which is here with is_decoder"),
        ("prophetnet", "attends by code of its own, and to an encoder"),
        ("musicgen musicgen_melody", "speaks audio codes, several at a time"),
        ("moss_transcribe_diarize", "listens to audio"),
        ("blt", "patches of bytes: four models in one"),
        ("gemma4_assistant gemma4_unified_assistant", "drafts for another model, whose keys it reads"),
        ("gemma3n", "needs timm; its text part is here as gemma3n_text"),
        ("git", "needs pictures: its positions count them"),
        ("reformer xlm xlnet", "has no key-value cache"),
        ("dots3_note qwen4_exp", "its text part is here"),
    )
    for kind in kinds.split()
}  # fmt: skip
