"""PrefixIndex: the block tree, the device blocks, and the leases of requests."""
