"""Tensor-parallel ranks in processes of their own: each moves its share of every block, without a
barrier between them."""
