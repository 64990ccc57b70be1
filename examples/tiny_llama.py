"""Make a tiny Llama with random weights and a real tokenizer, to try `tokenfleet serve` without a download.

    python examples/tiny_llama.py DIR          4 layers, hidden 256: 2 KB of KV per token in bfloat16
    python examples/tiny_llama.py DIR --fat    8 layers, hidden 512: 32 KB per token, to measure migration

The weights come from a fixed seed; its text is noise, its speed and memory are what a test needs. The
tokenizer is byte-level BPE trained on the Python standard library of the running interpreter, so any text
encodes and decodes back exactly; it has a chat template. Nothing is fetched.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

VOCABULARY = 2048
TRAINING_FILES = 60  # standard library modules the tokenizer learns from
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Shape:
    """The model's size; `hidden` is heads · head_dim for the tiny one."""

    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int


TINY = Shape(layers=4, hidden=256, mlp=704, heads=8, kv_heads=2, head_dim=32, context=16384)
FAT = Shape(layers=8, hidden=512, mlp=1024, heads=8, kv_heads=8, head_dim=128, context=16384)


def write_tokenizer(directory: Path, context: int) -> None:
    """Train the tokenizer and write it with its chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:TRAINING_FILES]
    tokenizer.train([str(path) for path in sources], trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=context,
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(directory)


def write_model(directory: Path, shape: Shape, seed: int) -> None:
    """Draw the weights and write them as bfloat16 safetensors."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.context,
        bos_token_id=0,
        eos_token_id=1,
        # Wide weights: with narrow ones every position predicts nearly the same token, and an error in
        # the KV of one position would not show in the text.
        initializer_range=0.06,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a tiny random-weight Llama with a real tokenizer.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--fat", action="store_true", help="32 KB of KV per token instead of 2 KB")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    shape = FAT if args.fat else TINY
    args.directory.mkdir(parents=True, exist_ok=True)
    print("training a tokenizer", file=sys.stderr, flush=True)
    write_tokenizer(args.directory, shape.context)
    print("drawing the weights", file=sys.stderr, flush=True)
    write_model(args.directory, shape, args.seed)
    print(args.directory)


if __name__ == "__main__":
    main()
