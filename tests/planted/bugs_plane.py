"""Planted bugs of data planes. See `catalogue`."""

from __future__ import annotations

from mutation import Mutation

GENERATIONS = "tests/data_plane/test_generations.py"

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "copies_of_lost_memory",
        "data_plane/base.py",
        "        if self.refuses(generation):\n            return tuple(range(len(blocks)))\n",
        "",
        "a copy that was asked for before a rank was lost takes bytes of the lost memory",
        (GENERATIONS,),
    ),
    Mutation(
        "reads_into_lost_memory",
        "data_plane/base.py",
        "        if self.store is None or self.refuses(generation):\n            return ReadReport(",
        "        if self.store is None:\n            return ReadReport(",
        "a read that was asked for before a rank was lost writes into slots that are used again",
        (GENERATIONS,),
    ),
    Mutation(
        "writes_of_lost_memory",
        "data_plane/base.py",
        "        if self.store is None or self.refuses(generation):\n            return WriteReport(",
        "        if self.store is None:\n            return WriteReport(",
        "a write that was asked for before a rank was lost stores other bytes under its keys",
        (GENERATIONS,),
    ),
    Mutation(
        "fetches_into_lost_memory",
        "data_plane/base.py",
        "        if self.device_store is None or self.refuses(generation):\n"
        "            return 0\n"
        "        return await self.device_store.fetch(",
        "        if self.device_store is None:\n"
        "            return 0\n"
        "        return await self.device_store.fetch(",
        "a fetch that was asked for before a rank was lost counts as cached after it",
        (GENERATIONS,),
    ),
    Mutation(
        "later_generations_only",
        "data_plane/base.py",
        "        return generation != self.generation\n",
        "        return generation > self.generation\n",
        "work of an earlier memory generation is carried out",
        (GENERATIONS,),
    ),
)
