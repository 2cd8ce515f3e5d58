"""Latent attention: absorbed equals expanded, on models' own weights; rows appended to pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashattn_jit as fa
from flashattn_jit.errors import InputError
from flashattn_jit.variants.reference import attention_reference
from tests.ops.cases import normal

transformers = pytest.importorskip("transformers")

RANK, NOPE, ROPE, V_DIM, HEADS = 48, 16, 8, 24, 4
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "mscale": 0.9, "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
MODELS = {
    "v2": ("DeepseekV2", {"q_lora_rank": None}),
    "v2 q_lora": ("DeepseekV2", {"q_lora_rank": 20}),
    "v3": ("DeepseekV3", {"q_lora_rank": None, "rope_interleave": False}),
    "v3 q_lora interleaved": ("DeepseekV3", {"q_lora_rank": 20, "rope_interleave": True}),
    "v3 yarn": ("DeepseekV3", {"q_lora_rank": 20, "rope_parameters": YARN}),
}


def model_of(name: str) -> Any:
    family, given = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16,
        num_hidden_layers=2, num_attention_heads=HEADS, num_key_value_heads=HEADS,
        first_k_dense_replace=2, n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2,
        kv_lora_rank=RANK, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=V_DIM,
        max_position_embeddings=128, attn_implementation="eager", **given,
    )  # fmt: skip
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for parameter in model.parameters():  # larger than initial weights, so that scores differ
        torch.nn.init.normal_(parameter, std=0.3 if parameter.dim() > 1 else 1.0)
    return model


def seen(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the first layer's attention gets and gives for 20 tokens, in fp64."""
    model = model_of(name).double()
    attention = model.model.layers[0].self_attn
    found: dict[str, Any] = {"weight": attention.kv_b_proj.weight.detach()}
    expand = attention.expand_kv

    def recording(latent: Tensor, k_rope: Tensor) -> Any:
        found.update(latent=latent.detach(), k_rope=k_rope.detach())
        return expand(latent, k_rope)

    def interface(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **given: Any) -> Any:
        variant = fa.Causal()
        out, _ = attention_reference(q, k, v, variant, scale=given["scaling"])
        if module is attention:
            found.update(q=q.detach(), k=k, v=v, out=out.detach(), scale=given["scaling"])
        return out.transpose(1, 2), None

    monkeypatch.setattr(attention, "expand_kv", recording)
    transformers.AttentionInterface.register("recording", interface)
    model.set_attn_implementation("recording")
    with torch.no_grad():
        model(torch.arange(20)[None] * 3 % 64)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_absorbed_equals_expanded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.no_grad():
        x = seen(name, monkeypatch)
    w = fa.absorb_mla(x["weight"], HEADS, NOPE, V_DIM)
    latent, k_rope = x["latent"][:, 0], x["k_rope"][:, 0]
    k, v = w.expand(latent, k_rope)
    torch.testing.assert_close(k.transpose(1, 2), x["k"], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(v.transpose(1, 2), x["v"], rtol=1e-12, atol=1e-12)

    q = x["q"].transpose(1, 2)
    rows = torch.cat([latent, k_rope], -1)
    queries = w.query(q[..., :NOPE], q[..., NOPE:])
    out, _ = attention_reference(
        queries.transpose(1, 2), rows[:, None], latent[:, None], fa.Causal(), scale=x["scale"]
    )
    heads = w.output(out.transpose(1, 2)).transpose(1, 2)
    torch.testing.assert_close(heads, x["out"], rtol=1e-11, atol=1e-11)

    batch = fa.BatchAttention(
        fa.Causal(), num_q_heads=HEADS, num_kv_heads=1, head_dim=RANK + ROPE, head_dim_v=RANK,
        v_in_k=True, q_dtype=torch.float32,
    )  # fmt: skip
    indptr = torch.tensor([0, 20], dtype=torch.int32)
    batch.plan(indptr, fa.Ragged(indptr))
    out = batch.run(queries[0].float(), rows[0][:, None].float(), scale=float(x["scale"]))
    heads = w.output(out.double()).transpose(0, 1)
    torch.testing.assert_close(heads, x["out"][0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("target", [None, "emulated:sm_80"])
@pytest.mark.parametrize("group", [None, 8])
def test_rows_are_appended_to_pages(target: str | None, group: int | None) -> None:
    latent, k_rope = normal(0, 11, 48).half(), normal(1, 11, 16).half()
    form = None if group is None else fa.kv.Format("int8", group=group)
    pages: Any = torch.zeros(4, 8, 1, 64, dtype=torch.float16)
    pages = form.quantize(pages) if form else pages
    indptr = torch.tensor([0, 11], dtype=torch.int32)
    ints = [torch.tensor(x, dtype=torch.int32) for x in ([0, 2], [2, 1], [3])]
    fa.append_paged_latent(
        latent, k_rope, pages, indptr, fa.Paged(*ints, page_size=8), target=target
    )
    rows = torch.cat([latent, k_rope], -1)[:, None]
    if form:
        expected = form.quantize(rows).dequantize()
        found = pages.dequantize()
    else:
        expected, found = rows, pages
    assert torch.equal(found[2], expected[:8]) and torch.equal(found[1, :3], expected[8:])
    assert not found[0].any() and not found[1, 3:].any()


def test_fewer_multiplications() -> None:
    """DeepSeek-V3: 128 heads of 128 + 64, rank 512."""
    w = fa.absorb_mla(torch.zeros(2 * 256, 512), 2, 128, 128)
    assert w.prefers_absorbed(1, 4096, 64) and not w.prefers_absorbed(1, 1, 64)
    assert not w.prefers_absorbed(4096, 4096, 64)
    break_even = max(n for n in range(1, 1000) if w.prefers_absorbed(n, 10**6, 64))
    assert break_even == 170


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (Tensor.half, r"is torch.float16, but kv_b_weight is torch.float32; pass \w+.to\(torch.fl"),
        (Tensor.double, "is torch.float64, but kv_b_weight is torch.float32"),
        (Tensor.int, "is torch.int32, but "),
        (lambda x: x.to(torch.float8_e5m2), "is torch.float8_e5m2, but "),
        (Tensor.to_sparse, r"has layout torch.sparse_coo; pass .* its to_dense\(\)"),
        (Tensor.numpy, "must be a torch.Tensor, got ndarray"),
        (lambda x: x.to("meta"), r"is on meta, but \w+ on cpu; move it with .to\('cpu'\)"),
    ],
)
def test_tensors_that_do_not_go_with_the_weight(change: Any, words: str) -> None:
    w = fa.absorb_mla(torch.randn(HEADS * (NOPE + V_DIM), RANK), HEADS, NOPE, V_DIM)
    nope, rope, out = (torch.randn(3, HEADS, n) for n in (NOPE, ROPE, RANK))
    latent, k_rope = out[:, 0], rope[:, 0]
    with pytest.raises(InputError, match=f"q_nope {words}"):
        w.query(change(nope), rope)
    with pytest.raises(InputError, match=f"out {words}"):
        w.output(change(out))
    with pytest.raises(InputError, match=f"latent {words}"):
        w.expand(change(latent), k_rope)
    if change not in (Tensor.half, Tensor.double):  # these promote, as in torch
        with pytest.raises(InputError, match=f"q_rope {words}"):
            w.query(nope, change(rope))
        with pytest.raises(InputError, match=f"k_rope {words}"):
            w.expand(latent, change(k_rope))


def test_autocast_converts_to_one_dtype() -> None:
    w = fa.absorb_mla(torch.randn(HEADS * (NOPE + V_DIM), RANK).bfloat16(), HEADS, NOPE, V_DIM)
    out = torch.randn(3, HEADS, RANK)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(w.output(out), w.output(out.bfloat16()))
        with pytest.raises(InputError, match=r"out is torch\.float64"):
            w.output(out.double())


def test_errors() -> None:
    weight = torch.zeros(HEADS * (NOPE + V_DIM), RANK)
    with pytest.raises(InputError, match=r"\[num_q_heads \* \(nope_dim \+ v_dim\), rank\] = \[164"):
        fa.absorb_mla(weight, HEADS, NOPE + 1, V_DIM)
    w = fa.absorb_mla(weight, HEADS, NOPE, V_DIM)
    q = torch.zeros(3, HEADS, NOPE)
    with pytest.raises(InputError, match=r"q_nope must be \[..., 4, 16\]"):
        w.query(q[..., 1:], q[..., :ROPE])
    with pytest.raises(InputError, match="differ before their last dim"):
        w.query(q, q[:2, :, :ROPE])
    with pytest.raises(InputError, match=r"out must be \[..., 4, 48\]"):
        w.output(q)
    with pytest.raises(InputError, match=r"latent must be \[..., 48\]"):
        w.expand(q, q)
    with pytest.raises(InputError, match=r"kv_b_weight has layout torch.sparse_coo; .* to_dense"):
        fa.absorb_mla(weight.to_sparse(), HEADS, NOPE, V_DIM)
    with pytest.raises(InputError, match=r"torch\.float8_e4m3fn, in which torch does not multiply"):
        fa.absorb_mla(weight.to(torch.float8_e4m3fn), HEADS, NOPE, V_DIM)
    for counts in ((1.0, 2, 3), (1, "2", 3), (1, 2, torch.tensor(3)), (1, -2, 3)):
        with pytest.raises(InputError, match=r"(q_len|kv_len|rope_dim)( must be|=-2)"):
            w.prefers_absorbed(*counts)  # type: ignore[arg-type]
    indptr = torch.tensor([0, 1], dtype=torch.int32)
    paged = fa.Paged(indptr, torch.zeros(1).int(), torch.ones(1).int(), page_size=8)
    row, pages = torch.zeros(1, 48), torch.zeros(1, 8, 1, 64)
    with pytest.raises(InputError, match="as latent has 48 columns and k_rope 15"):
        fa.append_paged_latent(row, row[:, :15], pages, indptr, paged)
    for given, message in (
        (fa.kv.Format("int8"), "one scale for a whole row"),
        (fa.kv.Format("int8", group=32), "group=32 does not divide both 0 and 48"),
        (fa.kv.Format("int4", group=16), "codes of 4 bits"),
    ):
        with pytest.raises(InputError, match=message):
            fa.append_paged_latent(row, row[:, :16], given.quantize(pages), indptr, paged)
