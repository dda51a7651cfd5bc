"""Old path of `kvactors.storage.backends.device_store`."""

from kvactors.moved import moved

__getattr__ = moved(__name__, "kvactors.storage.backends.device_store", DirectBackend="DeviceStore")
