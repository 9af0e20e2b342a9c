"""Makes a llama.cpp target of the small Qwen3 model under tests/golden, which is data without a
tokenizer: the mapping from Hugging Face names in numpy, and a vocabulary of one text per id.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

Tensors = Mapping[str, npt.NDArray[Any]]

# The messages as they are: a chat of one user message is the plain prompt.
CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"

# Hugging Face to GGUF, within a layer of the Qwen3 family: targets and drafters alike.
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def token_text(token: int) -> str:
    """The text of an id; no text is the beginning of another."""
    return f"[{token}]"


def text_of(tokens: Iterable[int]) -> str:
    """A text that tokenizes to exactly these ids."""
    return "".join(map(token_text, tokens))


def tokens_of(text: str) -> list[int]:
    """The ids in a generated text; the reverse of `text_of`."""
    return [int(part) for part in text.replace("]", "").split("[") if part]


def add_vocabulary(writer: gguf.GGUFWriter, n_tokens: int) -> None:
    """Add a vocabulary of `n_tokens` texts in which no id is special or ends a generation.

    The model is "rwkv", llama.cpp's plain longest match: the only one that comes without a
    beginning-of-text, an end-of-text and a pre-tokenizer that would have to be switched off.
    """
    writer.add_tokenizer_model("rwkv")
    writer.add_token_list([token_text(i) for i in range(n_tokens)])
    writer.add_token_types([gguf.TokenType.NORMAL] * n_tokens)
    writer.add_unk_token_id(0)  # any other byte, so that every text can be tokenized
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def add_common(writer: gguf.GGUFWriter, config: Mapping[str, Any], name: str) -> None:
    """Add the sizes that every transformer has, from a Hugging Face config."""
    rope = config["rope_parameters"]
    writer.add_name(name)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])


def finish(writer: gguf.GGUFWriter, tensors: Tensors) -> None:
    """Write the tensors, as they are, and close the file."""
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def qwen3_tensors(weights: Tensors) -> dict[str, npt.NDArray[Any]]:
    """GGUF names for the tensors of a Hugging Face Qwen3 model; KeyError for an unknown one."""
    renamed: dict[str, npt.NDArray[Any]] = {}
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    for name, tensor in weights.items():
        if name in whole:
            renamed[whole[name]] = tensor
            continue
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        renamed[f"blk.{layer}.{LAYER_NAMES[rest.removesuffix('.weight')]}.weight"] = tensor
    return renamed


def write_qwen3_target(directory: Path, path: Path) -> Path:
    """Write the F32 GGUF of a Hugging Face Qwen3 directory without a tokenizer.

    Raises OSError where the directory lacks config.json or model.safetensors.
    """
    config = json.loads((directory / "config.json").read_text())
    weights = load_file(directory / "model.safetensors")
    writer = gguf.GGUFWriter(path, "qwen3")
    add_common(writer, config, directory.parent.name)
    add_vocabulary(writer, config["vocab_size"])
    finish(writer, qwen3_tensors(weights))
    return path
