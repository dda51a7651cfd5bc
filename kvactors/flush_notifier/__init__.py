"""FlushNotifier: tells external indexes what this node holds."""
