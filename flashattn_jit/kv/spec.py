"""What a cache stores: groups of layers whose keys and values have one shape and one mask."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

import torch

from ..codegen.spec import KV_DTYPES, MAX_HEAD_DIM, Q_DTYPES
from ..errors import FlashAttnJitError, InputError, ParamError
from ..formats import CHANNEL_BLOCK, Format, Formats, KvFormat, kv_bytes, read_formats
from ..ops.append import check_applied_once, check_transform
from ..ops.arguments.checks import check_heads, check_int, shown
from ..ops.planning.batch_params import stand_ins
from ..variants.binding import Bound, bind_outside_modes
from ..variants.ir.dtypes import CODES4, DTYPE_NAMES, per_element
from ..variants.ir.ir import variant_to_json
from ..variants.library import Causal, Chunked, SlidingWindow
from ..variants.params import Dims, declared_params, parts_of
from ..variants.variant import Variant
from .capacity.families import CHUNK, FULL, WINDOW, Layer, read_layers

Reclaim = Literal["holes", "compact", "never"]
_RECLAIMS = ("holes", "compact", "never")
_MAX_LAYERS = 1 << 16
_MAX_DIM = 1 << 16
_ALIGNED = 16


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Layers that share page tables: the same shape of keys and values, and the same mask.

    Args:
        layers: numbers of the layers.
        num_kv_heads, head_dim: of a layer's keys; head_dim_v of its values, head_dim by default.
        num_q_heads: query heads, num_kv_heads by default. Masks that depend on the head need it.
        variant: the layers' variant. Its mask decides which pages can never be read again; without
            one every key stays. `Step.plan` takes no attention with another mask.
        mask_params: values of the params that the mask reads and that have no default. They hold
            for all sequences and at any time, and are the defaults of `Step.plan`.
        reclaim: what becomes of the pages that the mask can never read again. "holes": they leave
            the table, and the positions of the other keys stay as they are. "compact": the keys
            behind them move up, so that positions count the keys that are left, as in StreamingLLM
            (Xiao et al. 2023, arXiv 2309.17453), section 3.2; hooks see these positions.
            "never": they stay.
        transform: a variant whose key_mod and value_mod change new rows on their way into the
            pages, as for `fa.plan_append`: keys are then rotated or normed once, not whenever they
            are read. `variant` is without these hooks. Not with "compact", which gives keys new
            positions. Head dims are then 1 to 576.
        kv_format: an `fa.kv.Format` with scales of each token and head or of channels, or a pair of
            one for keys and one for values, either of which may be None: appends quantise, after
            the transform, and `Cache.tensors` has `fa.kv.Stored`. With scales of channels the
            group has a tail (KIVI, Liu et al. 2024, arXiv 2402.02750): keys and values of a page
            are quantised when it is full, and until then they are kept as they are, in pages of
            the tail; not with "compact" or v_in_k. With v_in_k, of the latents; a
            pair is of the latents and of the rotary part, which attention reads where both are one
            format of 8 bits, in groups of channels that divide both. It also reads latents of
            ``fa.kv.Format("e4m3", group=128)`` where widths are 512 and 64 and the cache's dtype is
            bfloat16: FlashMLA's fp8 cache, of 656 bytes a token.
        v_in_k: latent attention (MLA; DeepSeek-V2, arXiv 2405.04434, section 2.1): a token has one
            row of head_dim for all query heads, the latent of head_dim_v columns, which are its
            values, and then the rotary part of its keys. A row is stored once. num_kv_heads is 1.
            Without a transform.

    Raises InputError for sizes and names that are out of range, and for a variant that would apply
    hooks of the transform again; VariantError for a transform of other head dims.

    Example:
        >>> fa.kv.Group(layers=(0, 2), num_kv_heads=8, head_dim=128, variant=fa.SlidingWindow(4096))
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    head_dim_v: int | None = None
    num_q_heads: int | None = None
    variant: Variant | None = None
    mask_params: Mapping[str, object] = field(default_factory=dict)
    reclaim: Reclaim = "holes"
    transform: Variant | None = None
    kv_format: KvFormat | None = None
    v_in_k: bool = False

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        if isinstance(self.layers, str) or not isinstance(self.layers, Sequence | range):
            raise InputError(f"layers must be a sequence of ints, got {shown(self.layers)}")
        layers = [check_int(f"layers[{i}]", x, 0, _MAX_LAYERS) for i, x in enumerate(self.layers)]
        if not layers or len(set(layers)) < len(layers):
            raise InputError(f"layers={layers} must name at least one layer, and none twice")
        put("layers", tuple(layers))
        for name in ("num_kv_heads", "head_dim"):
            put(name, check_int(name, getattr(self, name), 1, _MAX_DIM))
        dim_v = self.head_dim if self.head_dim_v is None else self.head_dim_v
        put("head_dim_v", check_int("head_dim_v", dim_v, 1, _MAX_DIM))
        self._check_latent(dim_v)
        heads = self.num_kv_heads if self.num_q_heads is None else self.num_q_heads
        put("num_q_heads", check_int("num_q_heads", heads, 1, _MAX_DIM))
        check_heads(heads, self.num_kv_heads, self.num_kv_heads)
        if self.variant is not None and not isinstance(self.variant, Variant):
            raise InputError(
                f"variant must be an fa.Variant or None, got {type(self.variant).__name__}; wrap "
                "a function as fa.variant(mask_mod=...)"
            )
        if not isinstance(self.mask_params, Mapping):
            raise InputError(f"mask_params must be a mapping, got {shown(self.mask_params)}")
        put("mask_params", MappingProxyType(dict(self.mask_params)))
        if self.reclaim not in _RECLAIMS:
            raise InputError(f"reclaim={shown(self.reclaim)} must be one of {', '.join(_RECLAIMS)}")
        for f, name, dim in zip(self.formats, self._part_names, self.part_dims, strict=True):
            if f is not None:
                f.check_head_dim(name, dim)
            if f is not None and f.scale not in ("token_head", "channel"):
                raise InputError(
                    f"kv_format has scale={f.scale!r}, but a cache stores scales of each token and "
                    "head, or of channels of 64 tokens: one that more tokens share would have to "
                    'be known before; pass scale="token_head" or "channel"'
                )
        if self.has_tail and (self.v_in_k or self.reclaim == "compact"):
            what = "v_in_k=True" if self.v_in_k else 'reclaim="compact", which moves keys,'
            raise InputError(
                f"{what} does not go with scale='channel', whose newest tokens wait in pages of "
                'their own; pass scale="token_head"'
            )
        if self.transform is not None:
            self._check_transform(self.transform)

    @property
    def formats(self) -> Formats:
        """The formats of keys and of values; with v_in_k of latents and of the rotary part."""
        latents, rest = read_formats(self.kv_format)
        return latents, None if self.v_in_k and not isinstance(self.kv_format, tuple) else rest

    @property
    def has_tail(self) -> bool:
        """Whether rows wait for their page to be full before they are quantised."""
        return any(f is not None and f.scale == "channel" for f in self.formats)

    @property
    def part_dims(self) -> tuple[int, int]:
        """Head dims of the two parts that are stored: keys and values; with v_in_k the latent and
        the rotary part.
        """
        assert self.head_dim_v is not None
        if self.v_in_k:
            return self.head_dim_v, self.head_dim - self.head_dim_v
        return self.head_dim, self.head_dim_v

    @property
    def is_one_row(self) -> bool:
        """Whether the two parts of a latent row lie side by side: neither has a format, or both
        have one of 8 bits in groups of channels.
        """
        form, rest = self.formats
        grouped = form is None or (
            form.group is not None and form.dtype.itemsize == 1 and not form.rotate
            and form.dtype is not CODES4
        )  # fmt: skip
        return self.v_in_k and form == rest and grouped

    def has_latent_rows(self, dtype: torch.dtype) -> bool:
        """Whether both parts are one row of uint8, as `fa.kv.latent_parts` takes it.

        dtype: of parts that are not quantised.
        """
        own = self.v_in_k and self.part_dims == (512, 64) and dtype is torch.bfloat16
        return own and self.formats == (Format("e4m3", group=128), None)

    @property
    def _part_names(self) -> tuple[str, str]:
        if self.v_in_k:
            return "head_dim_v", "head_dim - head_dim_v"
        return "head_dim", "head_dim_v"

    def row_bytes(self, dtype: torch.dtype) -> tuple[int, int]:
        """Bytes that a token has in one layer, with scales: of the two parts of `part_dims`.

        dtype: of those that are not quantised.
        """
        return kv_bytes(self.formats, (dtype, dtype), self.num_kv_heads, *self.part_dims)

    def part_bytes(self, page_size: int, dtype: torch.dtype) -> tuple[list[int], list[int]]:
        """Bytes of the two parts of a page in one layer without scales: used, and held.

        Of two dtypes each part begins at a multiple of 16 bytes, where any dtype may.
        """
        dtypes = [dtype if f is None else f.dtype for f in self.formats]
        used = [
            page_size * self.num_kv_heads * (dim // per_element(own)) * own.itemsize
            for dim, own in zip(self.part_dims, dtypes, strict=True)
        ]
        mixed = dtypes[0] != dtypes[1]
        return used, [-(-n // _ALIGNED) * _ALIGNED if mixed else n for n in used]

    def numbers_shape(self, form: Format, head_dim: int, page_size: int) -> tuple[int, ...]:
        """The shape of the scales of a page of rows of `head_dim` in one layer."""
        slots = page_size // CHANNEL_BLOCK if form.scale == "channel" else page_size
        groups = () if form.channels is None else (head_dim // form.channels,)
        return (slots, self.num_kv_heads, *groups)

    def _check_latent(self, dim_v: int) -> None:
        if not isinstance(self.v_in_k, bool):
            raise InputError(f"v_in_k={shown(self.v_in_k)} must be True or False")
        if not self.v_in_k:
            return
        if dim_v >= self.head_dim:
            raise InputError(
                f"v_in_k=True needs head_dim_v, the columns of the latent, below head_dim="
                f"{self.head_dim}, which counts the rotary part too; got head_dim_v={dim_v}"
            )
        if self.num_kv_heads != 1:
            raise InputError(
                f"v_in_k=True is of one latent row for all query heads: num_kv_heads="
                f"{self.num_kv_heads} must be 1, and num_q_heads counts the heads"
            )
        if self.transform is not None:
            raise InputError(
                "v_in_k=True is without a transform: rotate the rotary part before it is appended"
            )

    def _check_transform(self, transform: Variant) -> None:
        check_transform(transform)
        assert self.head_dim_v is not None
        for name, dim in (("head_dim", self.head_dim), ("head_dim_v", self.head_dim_v)):
            if dim > MAX_HEAD_DIM:
                raise InputError(
                    f"{name}={dim}, but a transform changes rows of 1 to {MAX_HEAD_DIM}"
                )
        if self.variant is not None:
            check_applied_once(transform, self.variant, "variant")
        _bind_transform(self)
        if self.reclaim == "compact":
            raise InputError(
                'reclaim="compact" gives keys new positions, but transform stores them as they are '
                "at the old ones; let the variant's key_mod change them when they are read"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Spec:
    """What a cache stores for each token.

    Args:
        groups: groups of layers; together they have the layers 0 to num_layers - 1, each once.
        page_size: tokens of a page, the same in all groups; a multiple of 64 where a group has
            scales of channels.
        dtype: of keys and values that are not quantised.

    stores: what has pages of its own: the groups, and behind them, as further groups, the tails of
    those that have one. tails: the number, in stores, of each group's tail, or None.

    Raises InputError for layers that are missing or named twice, and for values out of range.

    Example:
        >>> spec = fa.kv.Spec((fa.kv.Group(range(32), num_kv_heads=8, head_dim=128),), page_size=16)
    """

    groups: tuple[Group, ...]
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    stores: tuple[Group, ...] = field(init=False, repr=False)
    tails: tuple[int | None, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        groups = (self.groups,) if isinstance(self.groups, Group) else self.groups
        if not isinstance(groups, Sequence) or not all(isinstance(g, Group) for g in groups):
            raise InputError("groups must be a sequence of fa.kv.Group")
        object.__setattr__(self, "groups", tuple(groups))
        object.__setattr__(self, "page_size", check_int("page_size", self.page_size, 1, 1 << 16))
        if not isinstance(self.dtype, torch.dtype) or DTYPE_NAMES.get(self.dtype) not in KV_DTYPES:
            raise InputError(
                f"dtype={shown(self.dtype)} is not supported; supported: {', '.join(KV_DTYPES)}"
            )
        changed = any(g.transform or any(g.formats) for g in groups)
        if changed and DTYPE_NAMES[self.dtype] not in Q_DTYPES:
            raise InputError(
                f"dtype={self.dtype}, but a group has a transform or a format, for rows of "
                f"{', '.join(Q_DTYPES)}"
            )
        layers = sorted(x for g in groups for x in g.layers)
        if layers != list(range(len(layers))) or not layers:
            missing = sorted(set(range(max(layers, default=0) + 1)) - set(layers))
            twice = sorted({x for x in layers if layers.count(x) > 1})
            raise InputError(
                "the groups must have the layers from 0 on, each once; missing: "
                f"{missing or 'none'}, named twice: {twice or 'none'}"
            )
        with_tail = [g for g in groups if g.has_tail]
        if with_tail and self.page_size % CHANNEL_BLOCK:
            raise InputError(
                f"page_size={self.page_size}, but a group has scales of channels, one for "
                f"{CHANNEL_BLOCK} tokens: pass page_size={CHANNEL_BLOCK} or a multiple of it"
            )
        # The rows of a tail are read until their page is full, as those of a chunk by a mask.
        stores = [
            replace(
                g, variant=Chunked(self.page_size), mask_params={}, reclaim="holes", transform=None,
                kv_format=None,
            )
            for g in with_tail
        ]  # fmt: skip
        object.__setattr__(self, "stores", (*groups, *stores))
        numbers = iter(range(len(groups), len(self.stores)))
        tails = tuple(next(numbers) if g.has_tail else None for g in groups)
        object.__setattr__(self, "tails", tails)

    @property
    def num_layers(self) -> int:
        """Layers of all groups."""
        return sum(len(g.layers) for g in self.groups)

    def store_name(self, number: int) -> str:
        """One of `stores` in words."""
        if number < len(self.groups):
            return f"group {number}"
        return f"the tail of group {self.tails.index(number)}"

    def page_bytes(self, group: int) -> int:
        """Bytes of one page of a group, or of another one of `stores`: keys and values of page_size
        tokens in all its layers.

        Raises InputError for a number that none has.
        """
        g = self.stores[check_int("group", group, 0, len(self.stores) - 1)]
        num_bytes = sum(g.part_bytes(self.page_size, self.dtype)[1])
        for form, dim in zip(g.formats, g.part_dims, strict=True):
            if form is not None:
                numbers = math.prod(g.numbers_shape(form, dim, self.page_size))
                num_bytes += numbers * (2 if form.zero else 1) * form.scale_dtype.itemsize
        return len(g.layers) * num_bytes

    @property
    def fingerprint(self) -> bytes:
        """A digest of shapes, layers, page size, dtype, formats and transforms, with the values
        that these hold: caches with another one share nothing.

        It is the same in every process. What appends give as params is no part of it.
        """
        groups = [
            [g.layers, g.num_kv_heads, g.head_dim, g.head_dim_v, g.v_in_k, _transform_document(g),
             [f and [f.code, f.scale, DTYPE_NAMES[f.scale_dtype], f.group, f.zero, f.rotate]
              for f in g.formats]]
            for g in self.groups
        ]  # fmt: skip
        document = ["fajit-kv/5", self.page_size, DTYPE_NAMES[self.dtype], groups]
        return hashlib.sha256(json.dumps(document).encode()).digest()

    @classmethod
    def from_config(
        cls,
        config: Any,
        *,
        page_size: int = 16,
        dtype: torch.dtype = torch.bfloat16,
        kv_format: KvFormat | None = None,
        cross: bool = False,
    ) -> Spec:
        """The spec of a decoder that a Hugging Face config describes.

        Layers of one kind and shape make one group: full causal, sliding window and chunked layers
        as ``config.layer_types`` names them; without it all layers are of one kind, but the first
        max_window_layers, where a config has that, see all keys, as in transformers' Qwen2. Latent
        attention has `Group.v_in_k`. Layers that reuse the keys of others, which are the last ones
        (Gemma 3n), store nothing: the spec has the layers before them.

        Args:
            config: a transformers config of a family in `capacity.families.FAMILIES`; or any object
                without a model_type that has its attributes: num_hidden_layers,
                num_attention_heads, and where a model has them num_key_value_heads, head_dim,
                hidden_size, layer_types, sliding_window, use_sliding_window, max_window_layers,
                attention_chunk_size, num_kv_shared_layers; of latent attention kv_lora_rank,
                qk_nope_head_dim, qk_rope_head_dim, v_head_dim.
            page_size, dtype: as for `Spec`.
            kv_format: as for `Group`, of all layers.
            cross: for a model with an encoder, what its decoder layers store of the encoder's
                tokens, in a cache of its own, rather than of their own tokens.

        Raises:
            InputError: the family is unknown, the message lists those that are known; the config
                lacks a size, or has layers of a kind that is not attention over cached keys.

        Example:
            >>> spec = fa.kv.Spec.from_config(AutoConfig.from_pretrained(name))
        """
        layers = read_layers(config, cross)
        groups = tuple(
            Group(
                tuple(i for i, own in enumerate(layers) if own == layer), layer.num_kv_heads,
                layer.head_dim, layer.head_dim_v, layer.num_q_heads, v_in_k=layer.v_in_k,
                variant=None if cross else _variant(layer),
                kv_format=kv_format,
            )
            for layer in dict.fromkeys(layers)
        )  # fmt: skip
        return cls(groups, page_size, dtype)


def _variant(layer: Layer) -> Variant:
    if layer.kind == FULL:
        return Causal()
    kinds: Mapping[str, Any] = {WINDOW: SlidingWindow, CHUNK: Chunked}
    made: Variant = kinds[layer.kind](layer.length)
    return made


# --- transforms before there is a batch ---------------------------------------------------------


def _bind_transform(group: Group) -> Bound | None:
    """A group's transform, bound to one token and zeros for the params that appends give.

    None where it cannot be bound before an append: its tensors have the sizes of a batch, lie on a
    device, or its hooks depend on sizes of the params. Raises VariantError, TraceError for hooks
    that do not fit the head dims.
    """
    transform = check_transform(group.transform)
    assert transform is not None and group.head_dim_v is not None
    heads = group.num_kv_heads
    dims = Dims(1, heads, heads, 1, 1, group.head_dim, group.head_dim_v, torch.device("cpu"))
    given = {
        name: torch.zeros_like(value, device="cpu") if isinstance(value, torch.Tensor) else value
        for name, value in stand_ins(transform, dims).items()
    }
    try:
        return bind_outside_modes(transform, dims, given)
    except FlashAttnJitError as error:
        if given or isinstance(error, ParamError):
            return None
        raise


def _transform_document(group: Group) -> object:
    """What tells a group's transform from others, for JSON: its hooks, and the values they read."""
    if group.transform is None:
        return None
    transform = check_transform(group.transform)
    assert transform is not None
    bound = _bind_transform(group)
    made = _made_by(transform)
    if bound is None:
        values = [d.owner.__dict__.get(d.param.name) for d in declared_params(transform)]
        return [transform.name, made, [_value(x) for x in values]]
    # Default tables of the library follow from what made it; machines may round them differently.
    derived = {d.name for d in declared_params(transform) if _is_derived(d.owner, d.param.name)}
    tensors = [
        None if p.name in derived else _value(t)
        for p, t in zip(bound.ir.tensors, bound.tensors, strict=True)
    ]
    scalars = [_value(x) for x in bound.scalars]
    return [transform.name, made, variant_to_json(bound.ir), tensors, scalars]


def _is_derived(owner: Variant, name: str) -> bool:
    return "__fajit_made_by__" in type(owner).__dict__ and name not in owner.__dict__


def _made_by(variant: Variant) -> list[str]:
    """The arguments that the library made the classes of a variant's parts with."""
    made = [repr(x) for x in type(variant).__dict__.get("__fajit_made_by__", ())[1:]]
    return made + [text for part in parts_of(variant) for text in _made_by(part)]


def _value(x: object) -> str | None:
    if not isinstance(x, torch.Tensor):
        return None if x is None else repr(x)
    entries = x.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy()
    return f"{x.dtype} {list(x.shape)} {hashlib.sha256(entries.tobytes()).hexdigest()}"
