"""Make a tiny model of another family than Llama, or a LoRA adapter of the tiny Llama: random weights.

    python examples/tiny_models.py gemma3 DIR      sliding and full attention in turns
    python examples/tiny_models.py lora DIR        an adapter of what examples/tiny_llama.py makes
    python examples/tiny_models.py --help          the other families

The weights come from a fixed seed (`--seed`, another one for another adapter), the tokenizer is tiny_llama's.
Nothing is fetched.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny_llama import TINY, VOCABULARY, write_tokenizer

CONTEXT = 4096
WINDOW = 64  # tokens that a sliding layer sees
IMAGE, PATCH = 56, 14  # pixels a side
PATCHES = 8  # positions of the text that an image takes

# As tiny_llama's: wide weights, so that an error in the KV of one position shows in the text.
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "initializer_range": 0.06,
    "tie_word_embeddings": False,
}
TURNS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}


def _gemma3() -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(Gemma3TextConfig(**TEXT, **TURNS, query_pre_attn_scalar=32))


def _gpt_oss() -> Any:
    from transformers import GptOssConfig, GptOssForCausalLM

    return GptOssForCausalLM(GptOssConfig(**TEXT, **TURNS, num_local_experts=4, num_experts_per_tok=2))


def _llama4() -> Any:
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    shape = TEXT | {"intermediate_size": 64, "intermediate_size_mlp": 256}
    chunks = {"attention_chunk_size": WINDOW, "no_rope_layers": [1, 0, 1, 0], "num_local_experts": 4}
    return Llama4ForCausalLM(Llama4TextConfig(**shape, **chunks))


def _deepseek() -> Any:
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    heads = {"kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    shape = {k: v for k, v in TEXT.items() if k != "head_dim"} | {"num_key_value_heads": 4}
    moe = EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
    moe |= {"n_group": 1, "topk_group": 1}
    return DeepseekV2ForCausalLM(DeepseekV2Config(**shape, **heads, v_head_dim=128, **moe))


def _qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**TEXT, **EXPERTS, num_experts=4))


def _lfm2() -> Any:
    from transformers import Lfm2Config, Lfm2ForCausalLM

    layers = {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False}
    blocks = {"conv_dim": 128, "block_dim": 128, "block_multiple_of": 32, "block_ffn_dim_multiplier": 1.0}
    return Lfm2ForCausalLM(Lfm2Config(**TEXT, **layers, **blocks))


def _blip2() -> Any:
    from transformers import (
        Blip2Config,
        Blip2ForConditionalGeneration,
        Blip2QFormerConfig,
        Blip2VisionConfig,
        OPTConfig,
    )

    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    eyes = Blip2VisionConfig(**small, image_size=IMAGE, patch_size=PATCH, initializer_range=0.5)
    asks = Blip2QFormerConfig(**small, encoder_hidden_size=64, vocab_size=64, initializer_range=0.5)
    text = OPTConfig(
        vocab_size=VOCABULARY + 64,
        hidden_size=128,
        ffn_dim=256,
        word_embed_proj_dim=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        init_std=0.06,
        tie_word_embeddings=False,
    )
    return Blip2ForConditionalGeneration(
        Blip2Config(
            vision_config=eyes,
            qformer_config=asks,
            text_config=text,
            num_query_tokens=PATCHES,
            image_token_index=VOCABULARY,
            initializer_range=0.5,
        )
    )


def _write_processor(directory: Path) -> None:
    """An image processor for BLIP-2, and its tokenizer with a token that stands for a patch."""
    from transformers import AutoTokenizer, Blip2Processor, BlipImageProcessorPil

    tokenizer = AutoTokenizer.from_pretrained(directory)
    pixels = BlipImageProcessorPil(size={"height": IMAGE, "width": IMAGE})
    Blip2Processor(pixels, tokenizer, PATCHES).save_pretrained(directory)


FAMILIES: dict[str, Callable[[], Any]] = {
    "gemma3": _gemma3,
    "gpt-oss": _gpt_oss,
    "llama4": _llama4,
    "deepseek": _deepseek,
    "qwen3-moe": _qwen3_moe,
    "lfm2": _lfm2,
    "blip2": _blip2,
}


def write_model(family: str, directory: Path, seed: int) -> None:
    """Draw the weights and write them with the tokenizer."""
    import torch

    write_tokenizer(directory, CONTEXT)
    if family == "blip2":
        _write_processor(directory)
    torch.manual_seed(seed)
    FAMILIES[family]().to(torch.bfloat16).save_pretrained(directory)


def write_adapter(directory: Path, seed: int, rank: int = 4) -> None:
    """A LoRA adapter of the tiny Llama, in PEFT's format, strong enough to change its text."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    sizes = {"q_proj": TINY.heads * TINY.head_dim, "v_proj": TINY.kv_heads * TINY.head_dim}
    weights = {}
    for layer in range(TINY.layers):
        for module, out in sizes.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{name}.lora_A.weight"] = torch.randn(rank, TINY.hidden) * 0.2
            weights[f"{name}.lora_B.weight"] = torch.randn(out, rank) * 0.2
    save_file(weights, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(sizes)}
    config |= {"task_type": "CAUSAL_LM", "bias": "none", "base_model_name_or_path": "tiny-llama"}
    (directory / "adapter_config.json").write_text(json.dumps(config))


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a tiny random-weight model, or a LoRA adapter.")
    parser.add_argument("family", choices=[*FAMILIES, "lora"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.directory.mkdir(parents=True, exist_ok=True)
    if args.family == "lora":
        write_adapter(args.directory, args.seed)
    else:
        write_model(args.family, args.directory, args.seed)
    print(args.directory)


if __name__ == "__main__":
    main()
