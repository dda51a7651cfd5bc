"""Registration of the host arena with Mooncake's client, so that transfers need no staging."""

from __future__ import annotations

from kvactors.device.arena import Arena
from kvactors.errors import StoreError
from kvactors.storage.backends.mooncake_client import MooncakeClient
from kvactors.storage.backends.mooncake_codes import OK


class Registration:
    """The registered memory of a client.

    Args:
        client: of the pool.
        largest: bytes of a registration at most (MC_MAX_MR_SIZE), None for no limit.
    """

    def __init__(self, client: MooncakeClient, largest: int | None) -> None:
        self._client = client
        self._largest = largest
        self._addresses: list[int] = []

    async def add(self, arena: Arena) -> None:
        """Register an arena.

        Raises:
            StoreError: the client refuses a part of it. None of it is registered then.
        """
        for address, size in pieces(arena.address, arena.nbytes, arena.stride, self._largest):
            code = await self._client.register(address, size)
            if code != OK:
                await self.remove()
                raise StoreError(
                    f"mooncake would not register {size} bytes of the host arena: code {code}. "
                    "MC_MAX_MR_SIZE sets the largest registration"
                )
            self._addresses.append(address)

    async def remove(self) -> None:
        """Take every registration back."""
        while self._addresses:
            await self._client.unregister(self._addresses.pop())


def pieces(address: int, size: int, stride: int, largest: int | None) -> list[tuple[int, int]]:
    """Address and size of each registration of an arena. Each has whole slots, since no transfer
    may cross two of them.

    Args:
        address: of the arena.
        size: its bytes.
        stride: bytes of a slot.
        largest: bytes of a registration at most, None for no limit.

    Raises:
        StoreError: a slot is larger than a registration may be.
    """
    if largest is None or size <= largest:
        return [(address, size)] if size else []
    if largest < stride:
        raise StoreError(
            f"MC_MAX_MR_SIZE {largest} is less than a slot of the host arena ({stride} bytes)"
        )
    step = largest // stride * stride
    return [(address + start, min(step, size - start)) for start in range(0, size, step)]
