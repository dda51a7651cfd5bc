"""PrefixIndex: which blocks this node knows, who uses them, and the device block pool."""
