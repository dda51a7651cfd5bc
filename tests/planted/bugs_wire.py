"""Planted bugs of a block's identity in KV events. See `catalogue`."""

from __future__ import annotations

from mutation import Mutation

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "salt_on_the_first_event_only",
        "flush_notifier/sinks/kv_identity.py",
        "    cache_salt = None if salt is None else salt",
        "    cache_salt = None if salt is None or position else salt",
        "an index forgets the salt of blocks that stay on one tier when they leave another",
        ("tests/flush_notifier/test_kv_identity.py::test_every_reader_gets_the_whole_identity",),
    ),
    Mutation(
        "media_not_in_the_events",
        "prefix_index/announcements.py",
        "path.tokens(first, last), path.extra_keys(first, last)",
        "path.tokens(first, last), ()",
        "prompts with different images are one path to a router",
        ("tests/flush_notifier/test_kv_identity.py::test_every_reader_gets_the_whole_identity",),
    ),
    Mutation(
        "media_lost_when_the_notifier_restarts",
        "prefix_index/announcements.py",
        "        return PathCached(\n"
        "            root, tokens, hashes, start, resident, Tier.DEVICE, reason, parent, scope, extras\n"
        "        )\n",
        "        return PathCached(root, tokens, hashes, start, resident, Tier.DEVICE, reason, parent, scope)\n",
        "after a restart of the notifier images are missing from the events",
        ("tests/flush_notifier/test_kv_identity.py::test_every_reader_gets_the_whole_identity",),
    ),
    Mutation(
        "media_of_another_block",
        "flush_notifier/ledger.py",
        'extra_keys.get(message.start + i, b"")',
        'extra_keys.get(i, b"")',
        "the images of a prompt that grew are announced for other blocks than those they overlap",
        (
            "tests/flush_notifier/test_kv_identity.py::test_media_of_a_prompt_that_grows_stay_with_their_blocks",
        ),
    ),
    Mutation(
        "place_of_media_not_in_the_hash",
        "extra_keys.py",
        "per_block.setdefault(block, []).append((value, offset - block * block_size))",
        "per_block.setdefault(block, []).append((value, 0))",
        "an image at another place among equal placeholder tokens is served with the wrong bytes",
        ("tests/prefix_index/test_keys.py::test_media_belong_to_the_blocks_they_overlap",),
    ),
    Mutation(
        "salt_taken_for_an_image",
        "flush_notifier/sinks/kv_identity.py",
        "_mm_infos(media, count) if first or media else None",
        "_mm_infos(media, count) if media else None",
        "a salt that looks like a digest is an image to Dynamo",
        (
            "tests/flush_notifier/test_kv_identity.py::test_an_array_for_dynamo_has_the_salt_on_every_event",
        ),
    ),
    Mutation(
        "unknown_scope_announced_as_plain",
        "prefix_index/announcements.py",
        """\
        scope, reason = self.scopes.get(root), Reason.REQUEST_FINISH
""",
        """\
        scope, reason = (
            self.scopes.get(root, next(iter(self.scopes.values()))),
            Reason.REQUEST_FINISH,
        )
""",
        "blocks of a tenant that was forgotten are announced as blocks of another",
        (
            "tests/prefix_index/test_announcements.py::test_a_walk_does_not_announce_blocks_of_a_forgotten_root_as_others",
        ),
    ),
    Mutation(
        "adapter_number_forgotten_by_a_prefetch",
        "prefix_index/announcements.py",
        """\
        self.scopes[root] = before if scope.lora_id is None else scope
""",
        """\
        self.scopes[root] = scope
""",
        "a call that gives no number takes the adapter's number from the events",
        ("tests/flush_notifier/test_kv_identity.py::test_a_number_stays_until_another_is_given",),
    ),
    Mutation(
        "fields_that_vllms_router_refuses",
        "flush_notifier/sinks/kv_encoder.py",
        "num_fields=3 if config.maps_for",
        'num_fields=3 if config.dialect == "map" or config.maps_for',
        "vLLM's router drops every batch with a salt or an image",
        ("tests/flush_notifier/test_kv_events.py::test_bytes_are_as_documented",),
    ),
    Mutation(
        "topic_of_the_template",
        "flush_notifier/sinks/__init__.py",
        "settings.for_model(config.cache.model)",
        "settings",
        "readers of one model's topic get nothing",
        (
            "tests/flush_notifier/test_kv_identity.py::test_events_are_published_on_the_topic_of_the_model",
        ),
    ),
    Mutation(
        "identity_of_another_place",
        "flush_notifier/sinks/kv_encoder.py",
        "scope_identity(self._form, scope, position == 0, count)",
        "scope_identity(self._form, scope, True, count)",
        "vLLM's readers find a bare salt in the middle of a sequence",
        ("tests/flush_notifier/test_kv_encoder.py::test_every_form_of_every_scope_in_parts",),
    ),
    Mutation(
        "identity_of_another_form",
        "flush_notifier/sinks/kv_encoder.py",
        "for name, value in sent if value is not None]",
        "for name, value in sent]",
        "vLLM's router refuses a field that vLLM leaves out",
        ("tests/flush_notifier/test_kv_encoder.py::test_every_form_of_every_scope_in_parts",),
    ),
    Mutation(
        "part_below_the_parent_of_the_task",
        "flush_notifier/sinks/kv_encoder.py",
        "                hashes[HASH_BYTES * (at - 1) : HASH_BYTES * at] if at else task.parent,\n",
        "                task.parent,\n",
        "the second part of a long run is announced as a sibling of the first",
        ("tests/flush_notifier/test_kv_encoder.py::test_every_form_of_every_scope_in_parts",),
    ),
    Mutation(
        "parts_of_a_removal_in_path_order",
        "flush_notifier/sinks/kv_encoder.py",
        "            for end in range(count, 0, -max_blocks):  # children before parents\n"
        "                part = hashes[HASH_BYTES * max(0, end - max_blocks) : HASH_BYTES * end]\n",
        "            for at in range(0, count, max_blocks):\n"
        "                part = hashes[HASH_BYTES * at : HASH_BYTES * (at + max_blocks)]\n",
        "between two batches of a removal an index holds children without their parents",
        ("tests/flush_notifier/test_kv_encoder.py::test_every_form_of_every_scope_in_parts",),
    ),
    Mutation(
        "one_batch_is_not_noted",
        "flush_notifier/sinks/kv_stream.py",
        """\
            changes.note(tasks)
        self._last = ()
""",
        """\
            changes.note(())
        self._last = ()
""",
        "a batch that is published while a state is made is in the state and comes once more "
        "after it",
        (
            "tests/flush_notifier/test_kv_recovery.py::test_a_batch_published_while_a_state_is_made_is_not_in_it",
        ),
    ),
    Mutation(
        "one_batch_is_not_the_last",
        "flush_notifier/sinks/kv_stream.py",
        """\
        self._send(payload)
        self._last = tasks
""",
        """\
        self._send(payload)
""",
        "a state lacks the last batch before it, which the ledger does not have in its view yet",
        (
            "tests/flush_notifier/test_kv_recovery.py::test_the_state_has_the_last_published_batch_before_the_ledger_counts_it",
        ),
    ),
    Mutation(
        "window_begins_one_later",
        "flush_notifier/sinks/kv_replay.py",
        "        return self._next - len(self._kept) if self._kept else END\n",
        "        return self._next - len(self._kept) + 1 if self._kept else END\n",
        "a replay replaces a batch that is kept by a whole state",
        (
            "tests/flush_notifier/test_kv_recovery.py::test_a_window_keeps_the_events_after_a_state_within_bounds",
        ),
    ),
    Mutation(
        "sender_outlives_its_socket",
        "flush_notifier/sinks/kv_sockets.py",
        """\
        for sender in self._senders:
            sender.close()
""",
        "",
        "a message after the sink was closed reads freed memory of ZMQ",
        ("tests/flush_notifier/test_kv_sockets.py::test_a_sender_ends_before_its_socket",),
    ),
    Mutation(
        "error_of_another_call",
        "flush_notifier/sinks/kv_sockets.py",
        """\
    error = zmq.ZMQError()  # before any other call of the library
    raise zmq.ZMQError(zmq.ENOTSOCK) if socket.closed else error
""",
        """\
    raise zmq.ZMQError(zmq.ENOTSOCK if socket.closed else None)
""",
        "a message that could not be sent is reported with the error of another call",
        ("tests/flush_notifier/test_kv_sockets.py::test_a_sender_raises_the_error_of_the_library",),
    ),
    Mutation(
        "media_of_a_single_block_not_in_its_task",
        "flush_notifier/tasks.py",
        "((first.depth - 1, own),) if own else ()",
        "()",
        "the images of a block that is announced by itself are missing from its event",
        ("tests/flush_notifier/test_tasks.py::test_a_block_is_sent_alike_alone_and_with_others",),
    ),
    Mutation(
        "tokens_of_a_block_that_is_gone",
        "flush_notifier/tasks.py",
        'tokens = first.tokens if run.resident else b""',
        "tokens = first.tokens",
        "every removal of a single block carries tokens that no sink by name is to be sent",
        ("tests/flush_notifier/test_tasks.py::test_a_block_is_sent_alike_alone_and_with_others",),
    ),
)
