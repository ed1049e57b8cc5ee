"""The reference policy in Hugging Face format: the same parameters under the names of OPT.

The decoder of ``jobs/model.py`` (pre-norm LayerNorm, learned positions, ReLU, no linear biases,
untied head) is OPT with ``enable_bias`` off, so no parameter is approximated: the trainer trains
its own tensors, and an engine that reads this format computes the same function. Two layouts
differ: OPT keeps q, k and v apart, and its position table begins with two rows that nothing reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from shiftbook.jobs import tokenizer
from shiftbook.jobs.errors import ModelError
from shiftbook.jobs.hf_tokenizer import save_tokenizer
from shiftbook.jobs.model import ModelConfig, check_params, parameter_shapes

POSITION_OFFSET = 2
"""Rows at the start of OPT's position table that no position reads."""
_PARTS = ("q_proj", "k_proj", "v_proj")
_IN_LAYER = {
    "norm1.weight": "self_attn_layer_norm.weight",
    "norm1.bias": "self_attn_layer_norm.bias",
    "attention.out.weight": "self_attn.out_proj.weight",
    "norm2.weight": "final_layer_norm.weight",
    "norm2.bias": "final_layer_norm.bias",
    "feedforward.up.weight": "fc1.weight",
    "feedforward.down.weight": "fc2.weight",
}
_OUTSIDE = {
    "embedding.weight": "model.decoder.embed_tokens.weight",
    "norm.weight": "model.decoder.final_layer_norm.weight",
    "norm.bias": "model.decoder.final_layer_norm.bias",
    "head.weight": "lm_head.weight",
}
_POSITIONS = "model.decoder.embed_positions.weight"


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """``config.json`` of the policy."""
    return {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "vocab_size": config.vocabulary,
        "hidden_size": config.width,
        "word_embed_proj_dim": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "ffn_dim": 4 * config.width,
        "max_position_embeddings": config.context,
        "activation_function": "relu",
        "do_layer_norm_before": True,
        "enable_bias": False,
        "layer_norm_elementwise_affine": True,
        "tie_word_embeddings": False,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "pad_token_id": tokenizer.PAD,
        "bos_token_id": tokenizer.BOS,
        "eos_token_id": tokenizer.END,
        "dtype": "float32",
        "torch_dtype": "float32",
    }


def to_hf(params: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The parameters (names and order as declared) by their Hugging Face names, dtype kept.

    Raises ``ModelError`` where they are not the parameters of ``config``.
    """
    check_params(config, params)
    found: dict[str, Tensor] = {}
    for name, tensor in params.items():
        if name == "position.weight":
            pad = torch.zeros(POSITION_OFFSET, config.width, dtype=tensor.dtype)
            found[_POSITIONS] = torch.cat([pad, tensor])
        elif name in _OUTSIDE:
            found[_OUTSIDE[name]] = tensor
        else:
            layer, part = _layer_and_part(name)
            prefix = f"model.decoder.layers.{layer}."
            if part == "attention.qkv.weight":
                for piece, rows in zip(_PARTS, tensor.chunk(3), strict=True):
                    found[f"{prefix}self_attn.{piece}.weight"] = rows.contiguous()
            else:
                found[prefix + _IN_LAYER[part]] = tensor
    return found


def from_hf(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The inverse of ``to_hf``; raises ``ModelError`` for missing and unknown names and shapes."""
    left = dict(tensors)
    params: dict[str, Tensor] = {}
    missing: list[str] = []

    def take(name: str) -> Tensor | None:
        if name not in left:
            missing.append(name)
        return left.pop(name, None)

    for name in parameter_shapes(config):
        if name == "position.weight":
            table = take(_POSITIONS)
            value = None if table is None else table[POSITION_OFFSET:]
        elif name in _OUTSIDE:
            value = take(_OUTSIDE[name])
        else:
            layer, part = _layer_and_part(name)
            prefix = f"model.decoder.layers.{layer}."
            if part == "attention.qkv.weight":
                pieces = [take(f"{prefix}self_attn.{piece}.weight") for piece in _PARTS]
                whole = [piece for piece in pieces if piece is not None]
                value = torch.cat(whole) if len(whole) == len(pieces) else None
            else:
                value = take(prefix + _IN_LAYER[part])
        if value is not None:
            params[name] = value
    if missing or left:
        raise ModelError(
            f"expected the tensors of an OPT policy of {config.layers} layers, found "
            f"{len(tensors)} (missing {missing[:3]}, unknown {sorted(left)[:3]}); "
            "make the folder with save_hf"
        )
    check_params(config, params)
    return params


def save_hf(folder: Path, params: Mapping[str, Tensor], config: ModelConfig) -> Path:
    """Write ``config.json``, ``model.safetensors`` (float32) and the tokenizer's files into
    ``folder``; returns it. No package of Hugging Face beside safetensors is needed for it.

    Raises ``ModelError`` where the policy has no row for each of the tokenizer's ids.
    """
    if config.vocabulary < tokenizer.VOCABULARY_SIZE:
        raise ModelError(
            f"expected a vocabulary of at least the tokenizer's {tokenizer.VOCABULARY_SIZE} ids, "
            f"found {config.vocabulary}; make the policy with as many rows"
        )
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(hf_config(config), indent=2, sort_keys=True)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    tensors = {name: t.float().contiguous().clone() for name, t in to_hf(params, config).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    save_tokenizer(folder, config.context)
    return folder


def _layer_and_part(name: str) -> tuple[int, str]:
    _, layer, part = name.split(".", 2)
    return int(layer), part
