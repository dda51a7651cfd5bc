// KV events as MessagePack, in the form in which vLLM's engines publish them
// (vllm/distributed/kv_events.py, https://github.com/msgpack/msgpack/blob/master/spec.md). Numbers
// are written in their shortest form.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "common.hpp"

namespace kvactors {

// The fields of a stored event that identify its blocks beside their tokens, already encoded.
struct EventIdentity {
    std::string_view lora_id, lora_name;
    u32 num_fields;           // fields after lora_name
    std::string_view fields;  // with their names in maps
};

// Appends events to a buffer. Immutable.
class EventEncoder {
public:
    // array: events are arrays with their class first, not maps. whole_hashes: hashes are sent as
    // 32 bytes, not as the number in their last 8 bytes. media: by tier, the name of the medium.
    EventEncoder(bool array, bool whole_hashes, u32 block_size, const std::vector<std::string>& media);

    std::size_t num_media() const { return media_.size(); }

    // parent: null at the start of a sequence. tokens: little-endian uint32.
    void stored(Raw<u8>& out, const Key* hashes, std::size_t count, const Key* parent, const u8* tokens,
                std::size_t num_tokens, std::size_t medium, const EventIdentity& identity) const;

    // Of blocks in path order. The last one is written first: children are removed before parents.
    void removed(Raw<u8>& out, const Key* hashes, std::size_t count, std::size_t medium) const;

private:
    void hash(u8*& at, const Key& key) const;

    struct Medium {
        std::string stored, removed;  // what follows lora_id, and what follows the removed hashes
    };

    bool array_, whole_hashes_;
    std::string stored_, parent_, tokens_, block_size_, removed_;
    std::vector<Medium> media_;
};

// Appends the bytes of a batch that come before its events.
void begin_batch(Raw<u8>& out, double timestamp, std::size_t num_events);

}  // namespace kvactors
