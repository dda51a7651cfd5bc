"""The types of channels are those of the channel graph: a reference accepts the messages of its
actor, and nothing that the actor has no handler for."""

from __future__ import annotations

from typing import get_args

import pytest

from kvactors.actor import edges
from kvactors.cpu_evictor.messages import HostReply, HostRequest
from kvactors.flush_notifier.messages import Report
from kvactors.gpu_swapper.messages import CopiedWithin, Copy, CopyReply, CopyWithin, DataPlaneStatus
from kvactors.prefix_index.messages import IndexAsk, IndexRequest
from kvactors.storage.messages import DeviceStoreMessage, ReaderMessage, StorageReply, WriterMessage
from tests.docs.generators.messages import ACTORS

CHANNELS = {
    "prefix_index": HostReply | DataPlaneStatus | CopiedWithin,
    "cpu_evictor": HostRequest | CopyReply | StorageReply,
    "gpu_swapper": Copy | CopyWithin,
    "storage_reader": ReaderMessage,
    "storage_writer": WriterMessage,
    "storage_direct": DeviceStoreMessage,
    "flush_notifier": Report,
}
HANDLERS = {actor.ROLE: actor.HANDLERS.keys() for actor in ACTORS}


@pytest.mark.parametrize("role", HANDLERS)
def test_a_channel_is_typed_by_its_messages(role):
    sent = {edge.message for edge in edges(ACTORS) if edge.receiver == role}
    accepted = set(get_args(CHANNELS[role]) or (CHANNELS[role],))
    assert accepted == sent
    assert accepted <= HANDLERS[role]


def test_every_request_of_the_public_api_has_a_handler():
    assert {*IndexAsk.__subclasses__(), *get_args(IndexRequest)[1:]} <= HANDLERS["prefix_index"]
