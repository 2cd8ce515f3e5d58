"""Row hooks of the library: rotations, norms, scaled queries, gates.

Expected values come from the published formulas applied to whole tensors before (or after) a plain
attention written here.
"""

from __future__ import annotations

import math

import pytest
import torch

import flashattn_jit.variants.library as lib
from flashattn_jit.errors import InputError, ParamError, VariantError
from flashattn_jit.variants.params import Dims
from flashattn_jit.variants.reference import attention_reference, varlen_reference
from flashattn_jit.variants.variant import Variant
from tests.variants.library.library_tools import bound, normal


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return torch.softmax(q @ k.mT * scale, -1) @ v


def inputs(
    head_dim: int = 16, q_len: int = 9, kv_len: int = 21, head_dim_v: int = 12
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = normal(1, 2, 4, q_len, head_dim)
    return q, normal(2, 2, 2, kv_len, head_dim), normal(3, 2, 2, kv_len, head_dim_v)


def run(variant: Variant, *qkv: torch.Tensor, q_offset: object = 0, **params: object):
    """The reference's output; the variant is also traced."""
    q, k, v = qkv
    variant.bind(
        Dims(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3]),
        params,
    )
    return attention_reference(*qkv, variant, q_offset=q_offset, params=params)[0]  # type: ignore[arg-type]


# --- RoPE -----------------------------------------------------------------------------------------


def hf_neox(x: torch.Tensor, freq: torch.Tensor, offset: int, factor: float = 1.0) -> torch.Tensor:
    """apply_rotary_pos_emb with rotate_half, as transformers' Llama writes it."""
    angles = (torch.arange(x.shape[-2], dtype=torch.float64) + offset)[:, None] * freq
    emb = torch.cat((angles, angles), -1)
    cos, sin = emb.cos() * factor, emb.sin() * factor
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * cos + rotated * sin


def complex_interleaved(x: torch.Tensor, freq: torch.Tensor, offset: int) -> torch.Tensor:
    """Llama's own apply_rotary_emb: pairs as complex numbers."""
    angles = (torch.arange(x.shape[-2], dtype=torch.float64) + offset)[:, None] * freq
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    turned = turned * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(-2)


def freqs(dim: int, theta: float = 10000.0) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)


ROPE_TOLERANCE = {"rtol": 1e-5, "atol": 2e-6}  # tables are float32


@pytest.mark.parametrize("tables", [True, False])
@pytest.mark.parametrize("head_dim", [2, 16, 64, 80])
def test_rope_neox(head_dim: int, tables: bool) -> None:
    q, k, v = inputs(head_dim)
    for theta, offset in ((10000.0, 0), (500000.0, 12)):
        f = freqs(head_dim, theta)
        expected = attention(hf_neox(q, f, offset), hf_neox(k, f, 0), v)
        got = run(lib.RoPE(theta, tables=tables), q, k, v, q_offset=offset)
        torch.testing.assert_close(got, expected, **ROPE_TOLERANCE)


@pytest.mark.parametrize("tables", [True, False])
def test_rope_interleaved(tables: bool) -> None:
    q, k, v = inputs()
    f = freqs(16)
    expected = attention(complex_interleaved(q, f, 12), complex_interleaved(k, f, 0), v)
    got = run(lib.RoPE(interleaved=True, tables=tables), q, k, v, q_offset="end")
    torch.testing.assert_close(got, expected, **ROPE_TOLERANCE)


@pytest.mark.parametrize("partial, start", [(0.25, 0), (0.5, 0), (0.5, 4), (0.5, 8), (0.75, 0)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_partial_rope_leaves_the_rest(partial: float, start: int, interleaved: bool) -> None:
    q, k, v = inputs()
    dim = int(16 * partial)
    form = complex_interleaved if interleaved else hf_neox

    def turned(x: torch.Tensor, offset: int) -> torch.Tensor:
        x = x.clone()
        x[..., start : start + dim] = form(x[..., start : start + dim], freqs(dim), offset)
        return x

    expected = attention(turned(q, 12), turned(k, 0), v)
    variant = lib.RoPE(partial=partial, start=start, interleaved=interleaved)
    got = run(variant, q, k, v, q_offset="end")
    torch.testing.assert_close(got, expected, **ROPE_TOLERANCE)


SCALINGS: list[lib.RopeScaling] = [
    lib.LinearScaling(4.0),
    lib.DynamicNTKScaling(4.0, 8),
    lib.DynamicNTKScaling(4.0, 100),
    lib.Llama3Scaling(original_max_position=16),
    lib.YarnScaling(4.0, 32),
    lib.YarnScaling(40.0, 32, mscale=0.707, mscale_all_dim=1.0, truncate=False),
    lib.LongRopeScaling((1.0,) * 8, tuple(range(1, 9)), 20, factor=32.0),
    lib.LongRopeScaling((1.0,) * 8, tuple(range(1, 9)), 21, factor=32.0),
]


@pytest.mark.parametrize("tables", [True, False, None])
@pytest.mark.parametrize("scaling", SCALINGS, ids=repr)
def test_scaled_rope_takes_the_length_of_the_call(
    scaling: lib.RopeScaling, tables: bool | None
) -> None:
    q, k, v = inputs()
    f = torch.from_numpy(scaling.inv_freq(16, 10000.0, 21))
    factor = scaling.attention_factor
    expected = attention(hf_neox(q, f, 12, factor), hf_neox(k, f, 0, factor), v)
    got = run(lib.RoPE(scaling=scaling, tables=tables), q, k, v, q_offset="end")
    torch.testing.assert_close(got, expected, **ROPE_TOLERANCE)


def test_computed_angles_are_exact_at_far_positions() -> None:
    q, k, v = inputs()
    f = freqs(16)
    offset = 3_000_000
    expected = attention(hf_neox(q, f, offset), hf_neox(k, f, 0), v)
    got = run(lib.RoPE(tables=False), q, k, v, q_offset=offset)
    torch.testing.assert_close(got, expected, **ROPE_TOLERANCE)


def test_positions_past_the_tables_are_an_error_or_nan_but_never_wrong() -> None:
    q, k, v = inputs()
    with pytest.raises(InputError, match=r"max_position=20, got q_len=9, kv_len=21"):
        run(lib.RoPE(max_position=20), q, k, v)
    fine = run(lib.RoPE(max_position=21), q, k, v, q_offset="end")
    torch.testing.assert_close(fine, run(lib.RoPE(), q, k, v, q_offset="end"))
    past = run(lib.RoPE(max_position=21), q, k, v, q_offset=15)
    assert past[:, :, :6].isfinite().all() and past[:, :, 6:].isnan().all()


def test_tables_grow_in_powers_of_two() -> None:
    def rows(kv_len: int) -> int:
        tables = bound(lib.RoPE(), q_len=1, kv_len=kv_len).tensors
        return tables[0].shape[0] - 1

    assert [rows(n) for n in (0, 1, 4096, 4097, 8192, 8193)] == [4096] * 3 + [8192] * 2 + [16384]
    first = bound(lib.RoPE(), q_len=1, kv_len=100).tensors[0]
    assert bound(lib.RoPE(), q_len=1, kv_len=101).tensors[0] is first


def test_rope_of_another_length_or_config_has_the_same_structure() -> None:
    one = bound(lib.RoPE(), kv_len=100)
    assert one.ir == bound(lib.RoPE(5e5, scaling=lib.YarnScaling(4.0, 64)), kv_len=9000).ir
    assert one.ir != bound(lib.RoPE(interleaved=True), kv_len=100).ir
    assert lib.RoPE().bind(Dims(1, 1, 1, 1, 9, 16, 16)).structure == one.structure


def test_a_call_may_bring_its_own_tables() -> None:
    q, k, v = inputs()
    cos, sin = lib.rope_tables(16, 40, 777.0)
    expected = run(lib.RoPE(777.0), q, k, v, q_offset="end")
    got = run(lib.RoPE(), q, k, v, q_offset="end", cos=cos, sin=sin)
    torch.testing.assert_close(got, expected)
    with pytest.raises(ParamError):
        run(lib.RoPE(), q, k, v, cos=cos, sin=sin[:-1])


@pytest.mark.parametrize(
    "arguments", [{"theta": 1.0}, {"partial": 0.0}, {"partial": 1.5}, {"start": -1}]
)
def test_rope_refuses_what_is_no_rotation(arguments: dict[str, float]) -> None:
    with pytest.raises(VariantError, match="theta"):
        lib.RoPE(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("head_dim, partial", [(17, 1.0), (16, 0.2), (4, 0.25)])
def test_rope_refuses_an_odd_number_of_elements(head_dim: int, partial: float) -> None:
    with pytest.raises(VariantError, match="even number of elements"):
        bound(lib.RoPE(partial=partial), head_dim=head_dim)


# --- norms ----------------------------------------------------------------------------------------


def test_qk_norm_rms() -> None:
    q, k, v = inputs()
    q_weight, k_weight = normal(5, 16), normal(6, 16)

    def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight

    expected = attention(rms(q, q_weight, 1e-6), rms(k, k_weight, 1e-6), v)
    got = run(lib.QKNorm(), q, k, v, q_weight=q_weight, k_weight=k_weight)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-8)
    ones = torch.ones(16, dtype=torch.float64)
    expected = attention(rms(q, ones, 0.25), rms(k, ones, 0.25), v)
    torch.testing.assert_close(run(lib.QKNorm(eps=0.25), q, k, v), expected, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(run(lib.QKNorm(), q, k, v, eps=0.25), expected, rtol=1e-6, atol=1e-8)


def test_qk_norm_l2() -> None:
    q, k, v = inputs()
    q[0, 0, 0] = 0.0  # a zero row stays zero

    def l2(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize(x, dim=-1)

    got = run(lib.QKNorm("l2"), q, k, v)
    torch.testing.assert_close(got, attention(l2(q), l2(k), v), rtol=1e-6, atol=1e-8)
    with pytest.raises(VariantError, match="'rms' or 'l2', got 'layer'"):
        lib.QKNorm("layer")


def test_norm_comes_before_rope_when_left_of_it() -> None:
    q, k, v = inputs()
    w = normal(5, 16)

    def rms(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w

    f = freqs(16)
    expected = attention(hf_neox(rms(q), f, 0), hf_neox(rms(k), f, 0), v)
    got = run(lib.QKNorm() & lib.RoPE(), q, k, v, q_weight=w, k_weight=w)
    torch.testing.assert_close(got, expected, **ROPE_TOLERANCE)


@pytest.mark.parametrize("params", [{"q_weight": torch.ones(15)}, {"k_weight": torch.ones(1, 16)}])
def test_wrong_norm_weights_are_errors(params: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ParamError):
        bound(lib.QKNorm(), **params)


# --- scaled queries -------------------------------------------------------------------------------


def test_temperature_tuning() -> None:
    q, k, v = inputs()
    for shift, offset in ((1, 0), (1, 8191 - 4), (0, 8192 * 3 - 4)):
        positions = torch.arange(9, dtype=torch.float64) + offset
        factor = 1 + 0.1 * torch.log(1 + torch.floor((positions + shift) / 8192))
        expected = attention(q * factor[:, None], k, v)
        got = run(lib.TemperatureTuning(), q, k, v, q_offset=offset, shift=shift)
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)
    factor = 1 + 0.5 * torch.log(1 + torch.floor(torch.arange(1, 10) / 3.0))
    got = run(lib.TemperatureTuning(attn_scale=0.5, floor_scale=3.0), q, k, v)
    torch.testing.assert_close(got, attention(q * factor[:, None], k, v), rtol=1e-6, atol=1e-7)


def test_log_n() -> None:
    q, k, v = inputs()
    for train_len, offset in ((4, 0), (2048, 0), (2048, 5000)):
        # Qwen: log(i, seq_length) if i > seq_length else 1, for i = 1, 2, ...
        counts = [i + 1 + offset for i in range(9)]
        factor = [math.log(n, train_len) if n > train_len else 1.0 for n in counts]
        expected = attention(q * torch.tensor(factor)[:, None], k, v)
        got = run(lib.LogN(train_len), q, k, v, q_offset=offset)
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)
    assert bound(lib.LogN(4)).ir == bound(lib.LogN(2048)).ir


# --- gates ----------------------------------------------------------------------------------------


def test_gated_output_in_every_layout() -> None:
    q, k, v = inputs()
    gate = normal(7, 2, 4, 9, 12)
    plain = attention(q, k, v)
    expected = plain * torch.sigmoid(gate)
    for offset in (0, "end"):
        dense = run(lib.GatedOutput(), q, k, v, q_offset=offset, gate=gate)
        torch.testing.assert_close(dense, expected)
        packed = gate.transpose(1, 2).reshape(18, 4, 12)
        got = run(lib.GatedOutput("packed"), q, k, v, q_offset=offset, gate=packed)
        torch.testing.assert_close(got, expected)
    heads = normal(8, 18, 4)
    factor = torch.sigmoid(heads).view(2, 9, 4).transpose(1, 2)[..., None]
    got = run(lib.GatedOutput("head"), q, k, v, gate=heads)
    torch.testing.assert_close(got, plain * factor)
    with pytest.raises(VariantError, match="'dense', 'packed' or 'head', got 'row'"):
        lib.GatedOutput("row")


def test_packed_gates_follow_the_rows_of_a_ragged_batch() -> None:
    q_lens, kv_lens = [3, 0, 5], [7, 4, 6]
    q_indptr, kv_indptr = (torch.tensor([0, *n]).cumsum(0) for n in (q_lens, kv_lens))
    q, k, v = normal(1, 8, 4, 16), normal(2, 17, 2, 16), normal(3, 17, 2, 12)
    gate = normal(4, 8, 4, 12)
    got, _ = varlen_reference(
        q, k, v, q_indptr, kv_indptr, lib.GatedOutput("packed"), params={"gate": gate}
    )
    plain, _ = varlen_reference(q, k, v, q_indptr, kv_indptr)
    torch.testing.assert_close(got, plain * torch.sigmoid(gate))


@pytest.mark.parametrize(
    "layout, shape", [("dense", (1, 2, 16, 15)), ("dense", (16, 2, 16)), ("packed", (16, 3, 16))]
)
def test_gates_of_a_wrong_shape_are_errors(layout: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ParamError):
        bound(lib.GatedOutput(layout), gate=torch.zeros(shape))
