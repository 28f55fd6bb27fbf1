"""Writes GGUF files as llama.cpp's converter does, from tensors under Hugging Face names; for tests of reading them."""

import gguf
import numpy as np
from tokenizers import pre_tokenizers

LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
NORMS = {"post_attention_layernorm": "ffn_norm"}
GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}

SPECIAL = ["<|end|>", "<|im_start|>", "<|im_end|>"]
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2", "12 3"]
BPE_TOKENS = [*SPECIAL, *BYTES, *(m.replace(" ", "") for m in MERGES)]
BPE = {  # metadata without "tokenizer.ggml."
    "model": "gpt2",
    "pre": "smollm",
    "tokens": BPE_TOKENS,
    "token_type": [3] * len(SPECIAL) + [1] * (len(BYTES) + len(MERGES)),
    "merges": MERGES,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "padding_token_id": 2,
    "add_bos_token": False,
}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def write_gguf(
    path, config, tensors, *, arch="llama", tokenizer=BPE, kinds=None, more=None, rope_freqs=None
):
    """config: a config.json; tensors: Hugging Face name -> array; kinds: name -> quantisation; more: extra metadata."""
    writer = gguf.GGUFWriter(path, arch)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config.get("max_position_embeddings", 256))
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    for key, value in {
        **{f"tokenizer.ggml.{k}": v for k, v in tokenizer.items()},
        **(more or {}),
    }.items():
        add(writer, key, value)
    writer.add_chat_template(TEMPLATE)
    is_gemma = arch.startswith("gemma")
    for name, array in tensors.items():
        array = np.asarray(array, np.float32)
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            n = heads if "q_proj" in name else kv_heads
            array = (
                array.reshape(n, 2, array.shape[0] // n // 2, -1)
                .swapaxes(1, 2)
                .reshape(array.shape)
            )
        if is_gemma and name.endswith("norm.weight"):
            array = array + 1
        kind = (kinds or {}).get(name, gguf.GGMLQuantizationType.F32)
        data = gguf.quantize(array, kind) if kind != gguf.GGMLQuantizationType.F32 else array
        writer.add_tensor(gguf_name(name, is_gemma), np.ascontiguousarray(data), raw_dtype=kind)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(rope_freqs, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer, key, value):
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def gguf_name(name, is_gemma):
    module, kind = name.rsplit(".", 1)
    if module in TOP:
        return f"{TOP[module]}.{kind}"
    _, _, number, rest = module.split(".", 3)
    return f"blk.{number}.{({**LAYER, **(GEMMA_NORMS if is_gemma else NORMS)})[rest]}.{kind}"


def llama3_factors(scaling, theta, head_dim):
    """rope_freqs.weight: by what each frequency is divided. Source: Llama 3.1's reference code."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    wave = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wave - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)
