"""What a block is made of."""
