"""The SDK's error."""


class AttentionStoreSDKError(Exception):
    """Anything the service refuses or cannot do."""
