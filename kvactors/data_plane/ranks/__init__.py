"""Tensor-parallel ranks in their own processes: each moves its share of every block, without a
barrier between them."""
