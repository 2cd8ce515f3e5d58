"""What a plan with a sparsity computes: the variant with its bits, its key lists, its params."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ... import _C
from ...errors import InputError
from ...torch_modes import need_values
from ...variants.variant import Variant
from ..arguments.calls import Offset
from ..keys.key_lists import KeyLists, Lengths, key_lists
from ..keys.mask_bits import BlockBits, FlatBits, TreeBits, flat_params, tree_words
from ..keys.sparsity import Bits, BlockSparse, Sparsity, TokenSparse, Tree
from .batch_plan import Options


class Sparsities:
    """The sparsities of one variant, which is composed with each kind of bits once."""

    def __init__(self, variant: Variant, options: Options) -> None:
        self._options = options
        self._variants: dict[type[Variant] | None, Variant] = {None: variant}

    def read(
        self, sparsity: Sparsity, lengths: _C.BatchLengths, q_offset: Offset
    ) -> tuple[Variant, KeyLists | None, dict[str, Any]]:
        """The variant with the sparsity's bits, its lists, and the params of its bits.

        Raises InputError.
        """
        options = self._options
        if isinstance(sparsity, Tree):
            if not isinstance(q_offset, str):
                raise InputError('fa.Tree counts draft tokens from the end: q_offset must be "end"')
            short = [b for b, (q, k) in enumerate(zip(lengths.q_len, lengths.kv_len, strict=True))
                     if q > k]  # fmt: skip
            if short:
                raise InputError(
                    f"request {short[0]} has q_len={lengths.q_len[short[0]]} draft tokens, but "
                    f"kv_len={lengths.kv_len[short[0]]}, which counts them: append their keys first"
                )
            words = tree_words(sparsity.bits, lengths.q_len, options.device)
            return self._composed(TreeBits), None, {"sparsity_bits": words}
        if isinstance(sparsity, Bits):
            flat = flat_params(
                sparsity.bits, sparsity.bit_indptr, lengths.q_len, lengths.kv_len, options.device
            )
            return self._composed(FlatBits), None, flat
        if not isinstance(sparsity, (BlockSparse, TokenSparse)):
            raise InputError(
                "sparsity must be an fa.BlockSparse, an fa.TokenSparse, an fa.Tree or an fa.Bits, "
                f"got {type(sparsity).__name__}"
            )
        lists = key_lists(
            sparsity,
            Lengths(
                lengths.q_len, lengths.kv_len, lengths.num_q_tokens, options.num_q_heads,
                options.num_kv_heads, options.device,
                lengths.max_kv_len if options.limits is None else options.limits.max_kv_len,
            ),
        )  # fmt: skip
        return self._composed(BlockBits if lists.params else None), lists, lists.params

    def _composed(self, bits: type[Variant] | None) -> Variant:
        if bits not in self._variants:
            assert bits is not None
            self._variants[bits] = self._variants[None] & bits()
        return self._variants[bits]


def check_values(sparsity: Sparsity | None, params: Mapping[str, object]) -> None:
    """Raises unless the tensors of a sparsity and of mask params have values to plan with."""
    parts = [(n, getattr(sparsity, n, None)) for n in getattr(type(sparsity), "__slots__", ())]
    for name, value in [*parts, *params.items()]:
        tensors = value if isinstance(value, (tuple, list)) else (value,)
        need_values(name, "batches are planned from them", tensors)
