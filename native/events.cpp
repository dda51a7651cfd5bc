#include "events.hpp"

#include "tokens.hpp"

namespace kvactors {
namespace {

constexpr std::size_t kHead = 9;  // bytes of the longest number, or of the head of an array

void put(u8*& at, std::string_view bytes) {
    std::memcpy(at, bytes.data(), bytes.size());
    at += bytes.size();
}

void put_big_endian(u8*& at, u64 value, int size) {
    for (int shift = 8 * (size - 1); shift >= 0; shift -= 8) *at++ = u8(value >> shift);
}

void put_number(u8*& at, u64 value) {
    if (value >> 32) {
        *at++ = 0xcf;
        put_big_endian(at, value, 8);
    } else {
        at += pack_number(u32(value), at);
    }
}

void put_array(u8*& at, std::size_t count) {
    if (count < 16) {
        *at++ = u8(0x90 | count);
    } else if (count < 65536) {
        *at++ = 0xdc;
        put_big_endian(at, count, 2);
    } else {
        *at++ = 0xdd;
        put_big_endian(at, count, 4);
    }
}

std::string text(std::string_view value) {  // of at most 255 bytes
    std::string out;
    if (value.size() < 32) out += char(0xa0 | value.size());
    else (out += char(0xd9)) += char(value.size());
    return out.append(value);
}

std::string number(u64 value) {
    u8 bytes[kHead], *at = bytes;
    put_number(at, value);
    return std::string(reinterpret_cast<const char*>(bytes), std::size_t(at - bytes));
}

// Reserves space for `size` more bytes. `finish` gives back those that were not written.
u8* reserve(Raw<u8>& out, std::size_t size) {
    const std::size_t before = out.size();
    out.resize(before + size);
    return out.data() + before;
}

void finish(Raw<u8>& out, const u8* at) { out.resize(std::size_t(at - out.data())); }

}  // namespace

EventEncoder::EventEncoder(bool array, bool whole_hashes, u32 block_size, const std::vector<std::string>& media)
    : array_(array), whole_hashes_(whole_hashes) {
    const auto name = [array](const char* field) { return array ? std::string() : text(field); };
    stored_ = name("type") + text("BlockStored") + name("block_hashes");
    parent_ = name("parent_block_hash");
    tokens_ = name("token_ids");
    block_size_ = name("block_size") + number(block_size) + name("lora_id");
    removed_ = name("type") + text("BlockRemoved") + name("block_hashes");
    for (const std::string& medium : media)
        media_.push_back({name("medium") + text(medium) + name("lora_name"), name("medium") + text(medium)});
}

void EventEncoder::hash(u8*& at, const Key& key) const {
    if (whole_hashes_) {
        *at++ = 0xc4;
        *at++ = 32;
        std::memcpy(at, key.bytes, 32);
        at += 32;
        return;
    }
    u64 value = 0;
    for (int i = 24; i < 32; ++i) value = value << 8 | key.bytes[i];
    put_number(at, value);
}

void EventEncoder::stored(Raw<u8>& out, const Key* hashes, std::size_t count, const Key* parent, const u8* tokens,
                          std::size_t num_tokens, std::size_t medium, const EventIdentity& identity) const {
    const std::string& after = media_[medium].stored;
    const std::size_t fixed = stored_.size() + parent_.size() + tokens_.size() + block_size_.size() + after.size() + 4 * kHead;
    const std::size_t named = identity.lora_id.size() + identity.lora_name.size() + identity.fields.size();
    u8* at = reserve(out, fixed + named + 34 * (count + 1) + packed_size(num_tokens));
    *at++ = u8((array_ ? 0x90 : 0x80) | (8 + identity.num_fields));
    put(at, stored_);
    put_array(at, count);
    for (std::size_t i = 0; i < count; ++i) hash(at, hashes[i]);
    put(at, parent_);
    if (parent != nullptr) hash(at, *parent);
    else *at++ = 0xc0;
    put(at, tokens_);
    put_array(at, num_tokens);
    at += pack_numbers(tokens, num_tokens, at);
    put(at, block_size_);
    put(at, identity.lora_id);
    put(at, after);
    put(at, identity.lora_name);
    put(at, identity.fields);
    finish(out, at);
}

void EventEncoder::removed(Raw<u8>& out, const Key* hashes, std::size_t count, std::size_t medium) const {
    const std::string& after = media_[medium].removed;
    u8* at = reserve(out, removed_.size() + after.size() + 2 * kHead + 34 * count);
    *at++ = u8((array_ ? 0x90 : 0x80) | 3);
    put(at, removed_);
    put_array(at, count);
    for (std::size_t i = count; i-- > 0;) hash(at, hashes[i]);
    put(at, after);
    finish(out, at);
}

void begin_batch(Raw<u8>& out, double timestamp, std::size_t num_events) {
    u64 bits;
    static_assert(sizeof bits == sizeof timestamp);
    std::memcpy(&bits, &timestamp, sizeof bits);
    u8* at = reserve(out, 2 + 2 * kHead);
    *at++ = 0x93;
    *at++ = 0xcb;
    put_big_endian(at, bits, 8);
    put_array(at, num_events);
    finish(out, at);
}

}  // namespace kvactors
