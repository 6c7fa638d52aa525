"""Advantages and losses: pure functions over packed tensors, one small file each.

Array suffixes: ``_N`` episodes, ``_T`` trained tokens (flat, over all sequences of a micro-batch). A loss maps typed
per-token tensors to a :class:`~maieutic.algorithms.base.TokenLoss`; the trainer sums it and divides by the global count
of trained tokens ("token-mean"), so no loss knows about batches, packing or ranks.
"""
