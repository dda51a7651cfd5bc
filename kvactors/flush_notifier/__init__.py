"""FlushNotifier: keeps external indexes informed of the blocks on this node."""
