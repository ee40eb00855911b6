"""Tiny random models, saved as Hugging Face checkpoints, with transformers' own as the reference."""

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

#: The byte-level tokenizer has one entry a byte, and this one.
END = "<|end|>"
TOKENIZER_SIZE = 257

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer of 257 entries: every text round-trips, and id 256 ends a generation."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    fast.chat_template = CHAT_TEMPLATE
    assert len(fast) == TOKENIZER_SIZE
    return fast


def tiny_llama(
    tmp_path: Path,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    hidden: int = 64,
    layers: int = 4,
    ffn: int = 128,
    vocab: int = 257,
    seed: int = 0,
    head_dim: int | None = None,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    tie: bool = False,
    rope_parameters: dict[str, object] | None = None,
    dtype: torch.dtype = torch.float32,
    max_len: int = 512,
    random_biases: bool = True,
) -> tuple[Path, LlamaForCausalLM]:
    """Save a random llama and its tokenizer in a new folder under `tmp_path`; return the folder and the model.

    Weights are large enough for logits to differ clearly; norms are random too. Biases are zero where
    `random_biases` is false. A vocabulary under 257 gets no tokenizer.
    """
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        max_position_embeddings=max_len,
        rope_parameters=rope_parameters,
        attention_bias=attention_bias,
        mlp_bias=mlp_bias,
        tie_word_embeddings=tie,
        bos_token_id=None,
        eos_token_id=TOKENIZER_SIZE - 1 if vocab >= TOKENIZER_SIZE else None,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).to(dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("bias"):
                parameter.copy_(noise * 0.2 if random_biases else torch.zeros_like(noise))
            else:
                parameter.copy_(1 + 0.1 * noise if parameter.ndim == 1 else noise * 0.2)
    path = _new_folder(tmp_path)
    model.save_pretrained(path)
    if vocab >= TOKENIZER_SIZE:
        tiny_tokenizer().save_pretrained(path)
    return path, model


def edit_json(path: Path, **changes: object) -> None:
    """Change top-level fields of a JSON file; `...` removes one."""
    table = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in table.items() if value is not ...}))


def _new_folder(tmp_path: Path) -> Path:
    path = tmp_path / f"tiny-llama-{sum(1 for _ in tmp_path.glob('tiny-llama-*'))}"
    path.mkdir()
    return path
