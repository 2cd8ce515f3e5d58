"""A small character transformer in plain torch, and its training on a text that ships with Python.

The caller passes the attention function, so that the same weights run with torch's attention, which
has gradients, and over a KV cache: `examples/03_generate.py`.
"""

import time
from pydoc_data.topics import topics  # Python's own help texts, half a million characters

import torch
from torch import Tensor, nn
from torch.nn import functional

TEXT = "".join(topics.values())
ALPHABET = sorted(set(TEXT))
LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM = 3, 4, 2, 32
WIDTH = Q_HEADS * HEAD_DIM
WINDOW = 96  # a token sees itself and the 95 before it
POSITIONS = 2048

_angles = torch.arange(POSITIONS)[:, None] * 500.0 ** -(torch.arange(HEAD_DIM // 2) / HEAD_DIM * 2)
COS, SIN = _angles.cos(), _angles.sin()  # [POSITIONS, HEAD_DIM / 2]


def encode(text: str) -> Tensor:
    """Characters as int64 [len(text)]."""
    return torch.tensor([ALPHABET.index(c) for c in text])


def decode(tokens: Tensor | list[int]) -> str:
    """The text of some tokens."""
    return "".join(ALPHABET[t] for t in tokens)


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a norm and beside a residual path."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.feed = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, layer: int, attend) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = heads.split((Q_HEADS, KV_HEADS, KV_HEADS), dim=-2)
        x = x + self.out(attend(layer, q, k, v).flatten(-2))
        return x + self.feed(self.norms[1](x))


class Decoder(nn.Module):
    """tokens [...] to logits [..., len(ALPHABET)].

    attend: (layer, q [..., Q_HEADS, HEAD_DIM], k and v [..., KV_HEADS, HEAD_DIM]) -> as q. It
    applies RoPE and the mask; q and k are not rotated yet.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(ALPHABET), WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, len(ALPHABET)))

    def forward(self, tokens: Tensor, attend) -> Tensor:
        x = self.embed(tokens)
        for layer, block in enumerate(self.blocks):
            x = block(x, layer, attend)
        return self.head(x)


def rotate(x: Tensor) -> Tensor:
    """RoPE of whole sequences [..., tokens, heads, HEAD_DIM] that begin at position 0."""
    cos, sin = (t[: x.shape[-3], None] for t in (COS, SIN))
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def torch_attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention over whole sequences [..., tokens, heads, HEAD_DIM], without a cache."""
    at = torch.arange(q.shape[-3])
    distance = at[:, None] - at
    q, k, v = (x.transpose(-3, -2) for x in (rotate(q), rotate(k), v))
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=(distance >= 0) & (distance < WINDOW), enable_gqa=True
    ).transpose(-3, -2)


def recompute(model: Decoder, prompt: Tensor, count: int) -> list[int]:
    """`count` greedy tokens after a prompt, without a cache: all tokens again for each new one."""
    tokens = prompt
    for _ in range(count):
        tokens = torch.cat([tokens, model(tokens, torch_attend)[-1:].argmax(-1)])
    return tokens.tolist()


def train(limit_s: float = 55.0, steps: int = 500, length: int = 128, batch: int = 8) -> Decoder:
    """A decoder trained for `steps` steps, or until the time is up; prints the loss."""
    model, text = Decoder(), encode(TEXT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=steps)
    begin = time.perf_counter()
    for step in range(1, steps + 1):
        starts = torch.randint(len(text) - length, (batch, 1))
        rows = text[starts + torch.arange(length + 1)]
        logits = model(rows[:, :-1], torch_attend)
        loss = functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        spent_s = time.perf_counter() - begin
        if step % 100 == 0 or step == steps or spent_s > limit_s:
            print(f"step {step}: {loss / 0.6931:.2f} bits a character, {spent_s:.0f} s", flush=True)
        if spent_s > limit_s:
            break
    return model.eval().requires_grad_(False)
