"""Attention layers of transformers models over the pages of an `fa.kv.Cache`.

A cache's ``update`` keeps the new keys and values and returns `PagedRows`, handles that have the
shape of all keys and no memory. The layer gives them to this integration's attention function,
which writes the new rows into the pages and attends over them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from flashattn_jit.errors import InputError
from flashattn_jit.integrations._lazy_mask import LazyMask
from flashattn_jit.kv import Cache
from flashattn_jit.ops.batch import BatchAttention
from flashattn_jit.ops.batch_base import BatchBase
from flashattn_jit.ops.cascade import CascadeAttention
from flashattn_jit.ops.keys.storage import Ragged
from flashattn_jit.ops.plan import Plan
from flashattn_jit.variants.variant import Variant, as_variant, tensor

if TYPE_CHECKING:
    from flashattn_jit.kv import Group, Step


class KeysInPagesError(InputError, AttributeError):
    """A model computes with its cached keys or values as if they were tensors."""


class PagedRows:
    """Keys or values of a layer that lie in pages: the shape of a tensor, without values.

    rows: the new ones [batch, num_kv_heads, q_len, dim]. shape: [batch, num_kv_heads, kv_len, dim],
    of all. owner: the cache, whose ``attend`` the attention function calls. Everything but shape,
    dtype and device raises InputError.
    """

    def __init__(self, rows: Tensor, kv_len: int, layer: int, owner: Any) -> None:
        batch, heads, _, dim = rows.shape
        self.rows, self.layer, self.owner = rows, layer, owner
        self.shape = torch.Size((batch, heads, kv_len, dim))
        self.dtype, self.device, self.ndim = rows.dtype, rows.device, 4

    def dim(self) -> int:
        """4, as of a tensor."""
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        """The shape, or one of its entries."""
        return self.shape if dim is None else self.shape[dim]

    def _refuse(self, what: str) -> NoReturn:
        raise KeysInPagesError(
            f"this model computes {what} with its cached keys or values, which lie in pages; use "
            "attn_implementation='attn_jit' with it, or another cache"
        )

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse(name)

    def __getitem__(self, _: object) -> NoReturn:
        self._refuse("an index")

    def _operator(self, _: object) -> NoReturn:
        self._refuse("an operator")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = _operator
    __truediv__ = __rtruediv__ = __rmatmul__ = _operator

    @classmethod
    def __torch_function__(
        cls, function: object, types: object, args: tuple[Any, ...] = (), kwargs: object = None
    ) -> NoReturn:
        raise KeysInPagesError(
            f"this model gives its cached keys or values to "
            f"{getattr(function, '__name__', function)}, and they lie in pages; use "
            "attn_implementation='attn_jit' with it, or another cache"
        )

    def __repr__(self) -> str:
        return f"PagedRows(layer={self.layer})"

    def __reduce_ex__(self, _: Any) -> NoReturn:
        raise InputError("keys and values in pages cannot be copied or pickled")


class KeyBias(Variant):
    """A bias of each head and key: ``score + bias[b, h, first[b] + kv_idx]``.

    bias: ``[batch, num_q_heads, positions]``. first: int32 ``[batch]``, the position of a request's
    first key.
    """

    bias: Tensor = tensor("batch", "num_q_heads", "positions")
    first: Tensor = tensor("batch", dtype=torch.int32)

    def score_mod(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
        """The biased score."""
        return score + self.bias[b, h, self.first[b] + kv_idx]


class LayerCall(NamedTuple):
    """How a layer attends.

    mask: the model's, or None. extend, parts: make the layer's variant of its group's, and tell it
    from others. params: of what `extend` adds, with ``bias`` [batch or 1, num_q_heads or 1, 1,
    positions] as the model gives it. expanded: keys and values of each head that are attended to
    in place of the latents of all keys, which come with this call.
    """

    mask: LazyMask | None
    scaling: float | None
    extend: Callable[[Variant], Variant]
    parts: tuple[object, ...]
    params: Mapping[str, Any]
    expanded: tuple[Tensor, Tensor] | None = None

    def with_expanded(self, pack: Callable[[Tensor], Tensor]) -> LayerCall:
        """With expanded keys and values packed as others are."""
        if self.expanded is None:
            return self
        key, value = self.expanded
        return self._replace(expanded=(pack(key), pack(value)))

    def with_bias(self, batch: int, heads: int, first: Tensor) -> LayerCall:
        """With the bias as `KeyBias` takes it. first: int32 [batch].

        Raises InputError for a bias that depends on the query, as T5's.
        """
        if "bias" not in self.params:
            return self
        if self.params["bias"].shape[2] != 1:
            raise InputError(
                f"the model adds a bias of shape {list(self.params['bias'].shape)}: one that "
                "depends on the query is not served over pages; use a cache of transformers"
            )
        bias = self.params["bias"][:, :, 0].expand(batch, heads, -1)
        return self._replace(params={**self.params, "bias": bias, "first": first.to(bias.device)})


class PagedLayers:
    """What the attention layers of a model share over the steps of one `fa.kv.Cache`.

    cache: its groups have the masks of the model's layers. plans: the last plan of each kind of
    layer.
    """

    def __init__(self, cache: Cache) -> None:
        if not isinstance(cache, Cache):
            raise InputError(f"cache must be an fa.kv.Cache, got {type(cache).__name__}")
        for number, group in enumerate(cache.spec.groups):
            _check_group(number, group)
        self.cache = cache
        self.plans: dict[tuple[Any, ...], Plan] = {}
        self._attentions: dict[tuple[Any, ...], BatchBase] = {}
        self._step: Step | None = None
        self._appended: set[int] = set()
        self._planned: set[tuple[Any, ...]] = set()

    def begin(self, step: Step) -> None:
        """The layers of a forward follow, over this step."""
        self._step, self._appended, self._planned = step, set(), set()

    def attend(
        self,
        layer: int,
        call: LayerCall,
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        """Attention of a layer over packed rows, whose keys and values are appended first.

        query: [num_tokens, num_q_heads, head_dim]; key, value: [num_tokens, num_kv_heads, ...],
        latents and k_rope of latent attention; `call.expanded` likewise.
        Returns [num_tokens, num_q_heads, head_dim_v].
        """
        step, cache = self._step, self.cache
        assert step is not None
        group = cache.group_of(layer)
        if layer not in self._appended:
            step.append(layer, key, value)
            self._appended.add(layer)
        kind = (group, call.parts, query.shape[1], query.dtype, call.expanded is not None)
        attention = self._attentions.get(kind)
        if attention is None:
            attention = self._attentions[kind] = self._made(group, call, query)
        if kind not in self._planned:
            if call.expanded is None:
                self.plans[kind] = step.plan(attention, group)
            else:
                assert isinstance(attention, BatchAttention)
                self.plans[kind] = attention.plan(step.q_indptr, Ragged(step.q_indptr))
            self._planned.add(kind)
        if call.expanded is not None:
            keys: tuple[Any, ...] = call.expanded
        elif cache.spec.groups[group].v_in_k:
            keys = (cache.latents(layer),)
        else:
            keys = step.tensors(layer, attention)
        out = attention.run(query, *keys, scale=call.scaling, **call.params)
        assert isinstance(out, Tensor)
        return out

    def _made(self, group: int, call: LayerCall, query: Tensor) -> BatchBase:
        """What attends in layers of a group."""
        spec, (_, num_q_heads, _) = self.cache.spec.groups[group], query.shape
        variant = call.extend(as_variant(spec.variant))
        if call.expanded is not None:
            key, value = call.expanded
            return BatchAttention(
                variant, num_q_heads=num_q_heads, num_kv_heads=key.shape[1],
                head_dim=key.shape[2], head_dim_v=value.shape[2], q_dtype=query.dtype,
                kv_dtype=key.dtype, device=self.cache.device,
            )  # fmt: skip
        # Of a group with a tail the plans of steps say the formats of levels.
        formats = (None, None) if spec.has_tail else spec.formats
        dtype = self.cache.spec.dtype
        kv_format = formats[0] if spec.v_in_k else formats
        if spec.has_latent_rows(dtype):
            kv_format, dtype = None, torch.uint8
        return CascadeAttention(
            variant, num_q_heads=num_q_heads, num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim, head_dim_v=spec.head_dim_v, v_in_k=spec.v_in_k,
            q_dtype=query.dtype, device=self.cache.device, kv_format=kv_format,
            kv_dtype=None if all(formats) else dtype,
        )  # fmt: skip

    @property
    def has_mask_params(self) -> bool:
        """Whether a group has params of its mask, which plans over pages alone are given."""
        return any(group.mask_params for group in self.cache.spec.groups)

    def new_prompts(self) -> int:
        """Tokens of the longest sequence of the step, if all begin in it, else 0."""
        step = self._step
        assert step is not None
        if any(seq.kv_len for seq in step.sequences):
            return 0
        return max((b - a for a, b in itertools.pairwise(step.q_indptr.tolist())), default=0)

    @property
    def is_complete(self) -> bool:
        """Whether all layers have appended their rows to the step."""
        return len(self._appended) == self.cache.spec.num_layers

    def has(self, layer: int) -> bool:
        """Whether a layer has appended its rows to the step."""
        return layer in self._appended


def _check_group(number: int, group: Group) -> None:
    """Raises InputError for a group that does in pages what layers of a model do themselves."""
    if group.transform is not None:
        raise InputError(
            f"group {number} of the cache transforms keys as they are appended, and so does the "
            "model; make the group without transform="
        )
    more = sorted(set(as_variant(group.variant).hooks()) - {"mask_mod"})
    if more:
        raise InputError(
            f"{as_variant(group.variant).name} of the cache's group {number} has "
            f"{', '.join(more)}; give the group the mask alone: layers of the model bring the rest"
        )


def check_decoder(config: Any) -> None:
    """Raises InputError unless each layer of a model with this config has keys of its own."""
    if getattr(config, "is_encoder_decoder", False):
        raise InputError("only decoders are served over pages; this model has an encoder")
    if getattr(config, "cross_attention_layers", None):
        raise InputError("cross attention is not served over pages; use a cache of transformers")
    if getattr(config, "num_kv_shared_layers", 0):
        raise InputError("layers that share keys and values of others are not served over pages")


def _check_layers(cache: Cache, config: Any) -> None:
    """Raises InputError where the cache has more or fewer layers than a model with this config."""
    check_decoder(config)
    text = config.get_text_config(decoder=True)
    count = getattr(text, "decoder_layers", None) or text.num_hidden_layers
    if count != cache.spec.num_layers:
        raise InputError(
            f"the model has {count} layers, and the cache's spec {cache.spec.num_layers}; make it "
            "with fa.kv.Spec.from_config(model.config)"
        )


def check_mask(
    cache: Cache, layer: int, mask: LazyMask, firsts: dict[int, int], new: range
) -> None:
    """Raises InputError where a layer's mask is not that of its group, by 512 pairs of positions
    and pairs of each new token, or the model has another number of layers.

    firsts: for some entries of the batch the position of its first real token, from which the cache
    counts. new: the positions of the tokens of this forward pass.
    """
    if mask.config is not None:
        _check_layers(cache, mask.config)
    group = cache.spec.groups[cache.group_of(layer)]
    hook = as_variant(group.variant).hooks().get("mask_mod")
    rows, queries, keys = _pairs(cache.max_kv_len, firsts, new)
    zero = torch.zeros(1, dtype=torch.int64, device="cpu")
    first = torch.zeros(max(firsts) + 1, dtype=torch.int64, device="cpu")
    first[list(firsts)] = torch.tensor(list(firsts.values()), device="cpu")
    first = first[rows]
    try:
        wanted = mask.mask_function(rows, zero, queries + first, keys + first)
    except IndexError as error:
        raise InputError(
            f"layer {layer}: the model's mask reads a tensor of this forward pass, which is "
            "not served over pages; use a cache of transformers"
        ) from error
    own = torch.ones_like(queries, dtype=torch.bool)
    if hook is not None:
        own = torch.as_tensor(hook(zero, zero, queries, keys), device="cpu").expand(queries.shape)
    wanted = torch.as_tensor(wanted, device="cpu").expand(queries.shape)
    wrong = torch.nonzero(wanted.bool() != own.bool())
    if len(wrong):
        at = int(wrong[0])
        raise InputError(
            f"layer {layer}: the model's mask {'keeps' if wanted[at] else 'hides'} key "
            f"{int(keys[at])} of query {int(queries[at])}, and {as_variant(group.variant).name} of "
            "the cache's group does not; give the group the mask of its layers"
        )


def _pairs(max_kv_len: int, firsts: dict[int, int], new: range) -> tuple[Tensor, Tensor, Tensor]:
    """Entries of the batch, with positions of queries and keys that count from `firsts`.

    512 pairs of the first entry, half of them near each other; of each new token of each entry the
    tokens around it and the first one, as a mask may depend on the tokens of one entry.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    queries = torch.randint(0, max_kv_len, (512,), generator=generator, device="cpu")
    far = torch.randint(-2, 64, (512,), generator=generator, device="cpu")
    keys = torch.randint(0, max_kv_len, (512,), generator=generator, device="cpu")
    spread = 2.0 ** (torch.rand(512, generator=generator, device="cpu") * 16)
    near = torch.where(far < 32, far, spread.long())
    keys[::2] = (queries - near)[::2].clamp(0, max_kv_len - 1)
    found = [(torch.full_like(queries, next(iter(firsts))), queries, keys)]
    for row, first in firsts.items():
        own = torch.arange(max(new.start - first, 0), new.stop - first, device="cpu")
        around = (own - 1, own, own + 1, torch.zeros_like(own))
        own, others = own.repeat(len(around)), torch.cat(around)
        there = (others >= 0) & (others < new.stop - first)
        found.append((torch.full_like(own, row)[there], own[there], others[there]))
    rows, queries, keys = (torch.cat(parts) for parts in zip(*found, strict=True))
    return rows, queries, keys
