"""`PagedCache`: a cache of transformers with keys and values in the pages of an `fa.kv.Cache`.

`PackedCache` is that of `generate_batch`, whose requests lie one after another in one row.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import transformers
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from flashattn_jit import kv
from flashattn_jit.errors import InputError
from flashattn_jit.integrations._latent import prepare_family
from flashattn_jit.integrations._lazy_mask import LazyMask
from flashattn_jit.integrations._paged_rows import (
    LayerCall,
    PagedLayers,
    PagedRows,
    check_decoder,
    check_mask,
)
from flashattn_jit.ops.arguments.checks import check_int, check_readable, shown
from flashattn_jit.torch_modes import need_values


class PagesLayer(CacheLayerMixin):  # type: ignore[misc]
    """A layer of a cache over pages, which asks the cache."""

    is_sliding = False
    supports_early_init = False

    def __init__(self, owner: OverPages, layer: int) -> None:
        super().__init__()
        self.owner, self.layer = owner, layer
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the pages exist."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Handles of all keys and values; see `PagedRows`."""
        return self.owner.rows(key_states, value_states, self.layer)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(kv_len, 0): windows are masks here, and hide no key by an offset."""
        return self.owner.length + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens of the longest row, padding counted."""
        return self.owner.length

    def get_max_length(self) -> int:
        """Tokens of a row, at most."""
        return self.owner.pages.max_kv_len


class OverPages(transformers.Cache):  # type: ignore[misc]
    """What caches of transformers over an `fa.kv.Cache` have in common.

    pages: the cache. length: tokens of the longest row, as the model counts them.
    """

    needs_use_cache = True
    """``generate(use_cache=False)`` would give it all tokens again in each forward pass."""

    def __init__(self, cache: kv.Cache) -> None:
        self.paged = PagedLayers(cache)
        self.pages = cache
        self.length = 0
        super().__init__(layers=[PagesLayer(self, i) for i in range(cache.spec.num_layers)])

    def rows(self, key: Tensor, value: Tensor, layer: int) -> tuple[PagedRows, PagedRows]:
        """Handles of a layer's keys and values, the new ones included."""
        kv_len = self.length + key.shape[2]
        return PagedRows(key, kv_len, layer, self), PagedRows(value, kv_len, layer, self)

    def attend(self, query: Tensor, key: PagedRows, value: PagedRows, call: LayerCall) -> Tensor:
        """[batch, q_len, num_q_heads, head_dim_v]: the attention function's work on handles."""
        raise NotImplementedError

    def new_prompts(self, q_len: int) -> int:
        """Tokens of the longest sequence of the forward pass, where all begin in it and no group
        has params of its mask; else 0. q_len: tokens of a row of the pass."""
        return 0 if self.paged.has_mask_params else self.paged.new_prompts()

    def __reduce_ex__(self, _: Any) -> NoReturn:
        raise InputError(f"a {type(self).__name__} cannot be copied or pickled; make another one")


@dataclass(slots=True)
class _Row:
    """A row of the batch. first: its first real token, of those that the model counts."""

    seq: kv.Sequence
    first: int | None = None


class PagedCache(OverPages):
    """A cache for ``generate()`` of a model with ``attn_implementation="attn_jit"``.

    Keys and values lie in pages of an `fa.kv.Cache`: rows of a batch with padding on the left have
    no pages for it, beams share the pages of what they have in common, and layers with windows give
    pages back. The cache serves one batch at a time; `reset` ends it, and frees the pages.

    Args:
        cache: an `fa.kv.Cache` whose groups have the masks of the model's layers, as
            `fa.kv.Spec.from_config` makes them; it may serve others as well. `for_model` makes one.

    Raises:
        InputError: a group has a ``transform``, or a variant with more than a mask. In a forward
            pass: padding between tokens, a mask that is not the group's, or that changes what was
            padding, or another batch size; or the model has other layers than the cache, or cross
            attention. Of `crop`: tokens that a window gave up would be read again, which
            the cache's ``lookback`` keeps.
        OutOfPages: in a forward pass, when the pages do not suffice. The cache is as before then.

    Example:
        >>> cache = PagedCache.for_model(model, num_tokens=4096)
        >>> model.generate(**inputs, past_key_values=cache, max_new_tokens=64)
    """

    def __init__(self, cache: kv.Cache) -> None:
        super().__init__(cache)
        self._batch: list[_Row] = []
        self._open: tuple[kv.Step, Tensor] | None = None
        self._checked: set[int] = set()

    @classmethod
    def for_model(
        cls, model: Any, num_tokens: int, *, page_size: int = 16, lookback: int = 0
    ) -> PagedCache:
        """A cache of its own for a model.

        Args:
            model: a decoder of transformers, on the device and in the dtype that it runs in.
            num_tokens: of all rows of a batch together, without padding. The last page of a row
                may be partly empty.
            page_size: tokens of a page.
            lookback: tokens that `crop` may take back from layers with windows.
        """
        return cls(cache_for(model, num_tokens, page_size=page_size, lookback=lookback))

    # --- forward passes ---------------------------------------------------------------------------

    def attend(self, query: Tensor, key: PagedRows, value: PagedRows, call: LayerCall) -> Tensor:
        """See `OverPages.attend`."""
        try:
            return self._attend(query, key, value, call)
        except BaseException:
            self._abort()
            raise

    def _attend(self, query: Tensor, key: PagedRows, value: PagedRows, call: LayerCall) -> Tensor:
        mask = call.mask
        if mask is None:
            raise InputError(f"layer {key.layer} has no mask, which a PagedCache needs")
        layer, (batch, q_len) = key.layer, (query.shape[0], query.shape[2])
        if self._open is None or self.paged.has(layer):  # a forward pass before this one failed
            self._open = self._begin(batch, q_len, mask)
        _, real = self._open
        if q_len > 1 or layer not in self._checked:
            # A model's mask may count from a row's first token: it is checked once there is one.
            firsts = {i: x.first for i, x in enumerate(self._batch) if x.first is not None}
            if firsts:
                new = range(self.length, self.length + q_len)
                check_mask(self.pages, layer, mask, firsts, new)
                self._checked.add(layer)
        everything = bool(real.all())
        pack = functools.partial(_packed, real=None if everything else real)
        packed = [pack(x) for x in (query, key.rows, value.rows)]
        call = call.with_expanded(pack)
        first = torch.tensor([x.first or 0 for x in self._batch], dtype=torch.int32, device="cpu")
        out = self.paged.attend(layer, call.with_bias(batch, query.shape[1], first), *packed)
        result: Tensor = out.new_zeros(batch, q_len, *out.shape[1:])
        if everything:
            result = out.view(result.shape)
        else:
            result[real] = out
        if self.paged.is_complete:
            self._end(q_len)
        return result

    def _begin(self, batch: int, q_len: int, mask: LazyMask) -> tuple[kv.Step, Tensor]:
        """Open a step for the new tokens of all rows: it, and which tokens are no padding."""
        self._abort()
        if not self._batch:
            self._checked = set()
            for _ in range(batch):
                self._batch.append(_Row(self.pages.open([], publish=False)))
        if len(self._batch) != batch:
            raise InputError(
                f"the batch has {batch} rows, but the cache holds {len(self._batch)}; reset() it "
                "before another batch"
            )
        if mask.positions is not None and mask.positions < self.length + q_len:
            raise InputError(
                f"attention_mask has {mask.positions} positions for {self.length} cached and "
                f"{q_len} new tokens; it covers both"
            )
        self._check_cached(mask)
        real = _real(mask, batch, self.length, self.length + q_len)
        items, firsts = [], []
        for i, (row, tokens) in enumerate(zip(self._batch, real, strict=True)):
            count = int(tokens.sum())
            begin = int(tokens.int().argmax()) if count else 0
            padded = row.first is not None and (begin or row.first + row.seq.kv_len != self.length)
            if count and (padded or not bool(tokens[begin : begin + count].all())):
                raise InputError(
                    f"row {i} has padding between its tokens; a PagedCache takes padding in front "
                    'of a prompt alone: padding_side="left"'
                )
            firsts.append(self.length + begin if row.first is None and count else row.first)
            items.append((row.seq, [0] * count))
        step = self.pages.step(items)
        for row, first in zip(self._batch, firsts, strict=True):
            row.first = first
        self.paged.begin(step)
        return step, real.to(self.pages.device)

    def _check_cached(self, mask: LazyMask) -> None:
        """Raises InputError unless a mask keeps the tokens that the rows hold, and no others."""
        rows = self._batch
        held = torch.zeros(len(rows), self.length, dtype=torch.bool, device="cpu")
        for i, row in enumerate(rows):
            if row.first is not None:
                held[i, row.first : row.first + row.seq.kv_len] = True
        wrong = torch.nonzero(held != _real(mask, len(rows), 0, self.length))
        if len(wrong):
            row, position = wrong[0].tolist()
            is_held = bool(held[row, position])
            raise InputError(
                f"attention_mask {'hides' if is_held else 'keeps'} position {position} of row "
                f"{row}, which was {'a token' if is_held else 'padding'} in an earlier forward "
                "pass; give each forward pass the masks of those before it, with the new tokens'"
            )

    def _end(self, q_len: int) -> None:
        assert self._open is not None
        self._open[0].commit()
        self._open = None
        self.length += q_len

    def _abort(self) -> None:
        """Give back what a forward pass that failed had taken."""
        self._open = None
        for row in self._batch:
            if row.seq.step is not None:
                row.seq.step.abort()
            if not row.seq.kv_len:
                row.first = None
        if not self.length:
            self._close_rows()

    def _close_rows(self) -> None:
        for row in self._batch:
            row.seq.close()
        self._batch = []

    def new_prompts(self, q_len: int) -> int:
        """See `OverPages.new_prompts`."""
        return 0 if self.length or self.paged.has_mask_params else q_len

    # --- what generate() does with caches ---------------------------------------------------------

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was; rows that become several share their pages.

        beam_idx: a 1-d tensor, array or list of integers. Raises InputError for others.
        """
        self._select(self._read_rows("beam_idx", beam_idx))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep rows by their indices, or by one bool a row.

        indices: a 1-d tensor, array or list of integers or bools. Raises InputError for others.
        """
        self._select(self._read_rows("indices", indices, bools=True))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times, one after another; they share their pages."""
        repeats = check_int("repeats", repeats, 1)
        self._select([i for i in range(len(self._batch)) for _ in range(repeats)])

    def _read_rows(self, name: str, value: object, *, bools: bool = False) -> list[int]:
        """The rows that an argument selects. Raises InputError for what selects none.

        bools: it may also say of each row whether it is selected.
        """
        # An empty batch, or one without tokens, has nothing that could be selected.
        count = len(self._batch) if self.length else None
        takes = "a 1-d tensor, array or list of int" + (" or bool" if bools else "")
        given = f"{takes} that selects from {count or 0} rows"
        if isinstance(value, Tensor):
            need_values(name, "a cache selects rows by it", (value,))
            chosen = check_readable(name, value)
        else:
            try:
                chosen = torch.as_tensor(value, device="cpu")
            except (TypeError, ValueError, RuntimeError) as error:
                raise InputError(f"{name} must be {given}, got {shown(value)}") from error
            if chosen.shape == (0,):
                chosen = chosen.long()  # an empty list has no dtype of its own
        is_mask = bools and chosen.dtype == torch.bool
        if chosen.dim() != 1 or chosen.is_meta or not (is_mask or chosen.dtype in _ROW_NUMBERS):
            where = " on meta" if chosen.is_meta else ""
            raise InputError(
                f"{name} must be {given}, got {list(chosen.shape)} of {chosen.dtype}{where}"
            )
        if is_mask:
            if count is not None and len(chosen) != count:
                raise InputError(
                    f"{name} is {list(chosen.shape)} of {chosen.dtype}, but the cache has {count} "
                    "rows: give one bool a row, or the indices of rows"
                )
            chosen = torch.nonzero(chosen)[:, 0]
        rows: list[int] = chosen.tolist()
        for i in rows:
            if count is not None and not -count <= i < count:
                raise InputError(
                    f"{name} {list(chosen.shape)} of {chosen.dtype} has row {i} of a cache with "
                    f"{count} rows"
                )
        return rows

    def _select(self, rows: Sequence[int]) -> None:
        self._abort()
        if not self._batch:
            return
        before, taken = self._batch, set()
        after: list[_Row] = []
        for i in rows:
            row = before[i]
            after.append(_Row(row.seq.fork(), row.first) if row.seq.number in taken else row)
            taken.add(row.seq.number)
        self._batch = after
        for row in before:
            if row.seq.number not in taken:
                row.seq.close()
        if not after:
            self.length = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last tokens back: a negative number of them, as transformers has it."""
        count = -check_int("tokens_to_remove", tokens_to_remove, -self.length, 0)
        self._abort()
        if not count:
            return
        left = self.length - count
        lengths = [
            0 if row.first is None else min(row.seq.kv_len, max(0, left - row.first))
            for row in self._batch
        ]
        for row, kv_len in zip(self._batch, lengths, strict=True):
            row.seq.check_trim(kv_len)
        for row, kv_len in zip(self._batch, lengths, strict=True):
            row.seq.trim(kv_len)
            if not kv_len:
                row.first = None
        self.length = left

    def reset(self) -> None:
        """End the batch and free its pages."""
        self._abort()
        self._close_rows()
        self.length = 0

    def activate_past_recording(self) -> None:
        """Nothing: the cache's ``lookback`` says how far `crop` may go."""

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can take a token back."""
        return self.pages.lookback > 0 or not self.pages.reclaiming

    @property
    def batch_size(self) -> int:
        """Rows of the batch, -1 before the first forward pass."""
        return len(self._batch) or -1

    @property
    def sequences(self) -> list[kv.Sequence]:
        """The sequences of the rows."""
        return [row.seq for row in self._batch]

    def __repr__(self) -> str:
        return f"PagedCache(rows={len(self._batch)}, length={self.length})"


def cache_for(
    model: Any, num_tokens: int, *, page_size: int = 16, lookback: int = 0, max_kv_len: int = 0
) -> kv.Cache:
    """An `fa.kv.Cache` for a model: of its device and dtype, with the masks of its config.

    max_kv_len: of a sequence, num_tokens by default. Raises InputError for what is no such model.
    """
    config = getattr(model, "config", None)
    if config is None or not isinstance(getattr(model, "dtype", None), torch.dtype):
        raise InputError(f"model must be a model of transformers, got {shown(model)}")
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    check_decoder(config)
    check_decoder(text)
    if getattr(text, "kv_lora_rank", None) and not prepare_family(config):
        raise InputError(
            f"the latent attention of {type(model).__name__} is not served over pages; use a cache "
            "of transformers"
        )
    num_tokens = check_int("num_tokens", num_tokens, 1)
    spec = kv.Spec.from_config(text, page_size=page_size, dtype=model.dtype)
    pages = -(-num_tokens // spec.page_size)
    return kv.Cache(
        spec, pages, max_kv_len=max_kv_len or num_tokens, device=model.device, lookback=lookback
    )


_ROW_NUMBERS = (torch.int64, torch.int32, torch.int16, torch.int8)
"""Of row indices. Not uint8: torch reads such an index as a mask."""


def _real(mask: LazyMask, batch: int, begin: int, end: int) -> Tensor:
    """bool [batch, end - begin]: which of the positions are no padding."""
    if mask.keep is not None:
        return mask.keep[:, begin:end].expand(batch, -1).cpu()
    real = torch.ones(batch, end - begin, dtype=torch.bool, device="cpu")
    if mask.key_len is not None:
        real &= torch.arange(begin, end, device="cpu") < mask.key_len.cpu()[:, None]
    return real


def _packed(x: Tensor, real: Tensor | None) -> Tensor:
    """[batch, heads, rows, dim] as [num_tokens, heads, dim], without padding."""
    x = x.transpose(1, 2)
    return x.flatten(0, 1) if real is None else x[real]


class PackedCache(OverPages):
    """One forward pass is one step of the cache; its rows lie one after another in one row."""

    def __init__(self, cache: kv.Cache) -> None:
        super().__init__(cache)
        self._requests = 0
        self._checked: set[int] = set()

    def begin(self, step: kv.Step) -> None:
        """A forward pass over the new tokens of a step follows."""
        self.paged.begin(step)
        self._requests = len(step.sequences)
        # The model must not number tokens from 0 on: biases are read at their positions.
        self.length = max(seq.kv_len for seq in step.sequences)

    def attend(self, query: Tensor, key: PagedRows, value: PagedRows, call: LayerCall) -> Tensor:
        """See `OverPages.attend`."""
        layer, mask = key.layer, call.mask
        if layer not in self._checked:
            if mask is None:
                raise InputError(f"layer {layer} has no mask, which generate_batch needs")
            check_mask(self.pages, layer, mask, {0: 0}, range(0))
            self._checked.add(layer)
        if self.paged.has(layer):
            raise InputError(
                f"layer {layer} attends twice in a forward pass, which is not served over pages"
            )
        pack = functools.partial(_packed, real=None)
        packed = [pack(x) for x in (query, key.rows, value.rows)]
        call = call.with_expanded(pack)
        first = torch.zeros(self._requests, dtype=torch.int32, device="cpu")
        call = call.with_bias(self._requests, query.shape[1], first)
        return self.paged.attend(layer, call, *packed)[None]

    def check_complete(self) -> None:
        """Raises InputError unless all layers of the cache had their turn."""
        if not self.paged.is_complete:
            raise InputError(
                f"the model has fewer attention layers with a cache than the "
                f"{self.pages.spec.num_layers} of the cache's spec"
            )
