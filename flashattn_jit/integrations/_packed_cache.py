"""`PackedCache`: a model's cache while `generate_batch` runs, with the packed rows of requests."""

from __future__ import annotations

import torch
from torch import Tensor

from flashattn_jit import kv
from flashattn_jit.errors import InputError
from flashattn_jit.integrations._paged_cache import OverPages
from flashattn_jit.integrations._paged_rows import LayerCall, PagedRows, check_mask


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
            check_mask(self.pages, layer, mask, 0, 0)
            self._checked.add(layer)
        if self.paged.has(layer):
            raise InputError(
                f"layer {layer} attends twice in a forward pass, which is not served over pages"
            )
        packed = [x[0].transpose(0, 1) for x in (query, key.rows, value.rows)]
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
